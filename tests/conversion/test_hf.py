"""Model folders: what is refused before anything is built, tied heads, prefixes, shards, and
exports that are whole.
"""

import contextlib
import io
import json
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import flat_model
from torch.multiprocessing.reductions import StorageWeakRef

from dolmen.conversion import hf, hf_export
from dolmen.conversion.source import load_weights, open_source
from dolmen.conversion.weights import join_stored
from dolmen.families import ModelConfig, weight_map
from dolmen.families import edit as edited
from dolmen.files.safetensors import Stored

LLAMA = flat_model(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
TIED = edited(LLAMA, tie=True)
GPT2 = ModelConfig(
    {
        "model_type": "gpt2",
        "vocab_size": 61,
        "n_embd": 32,
        "n_inner": 40,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "activation_function": "gelu",
    }
)
K = "model.layers.0.self_attn.k_proj.weight"


def random(config):
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in config.spec.shapes.items()}


def saved(config, folder, **options):
    hf_export.save(folder, config, random(config).__getitem__, **options)
    return folder


def edit(folder, change):
    """Rewrites model.safetensors as `change(tensors)` leaves it."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )


def loaded(folder):
    got = {}
    load_weights(open_source(folder), got.__setitem__)
    return got


def test_shards_and_dtypes(tmp_path):
    folder = saved(LLAMA, tmp_path / "m", shard_bytes=4000, dtype=torch.bfloat16)
    assert (
        len(list(folder.glob("model-*.safetensors"))) > 5
        and (folder / "model.safetensors.index.json").is_file()
    )
    config, ours = hf.read_config(folder), loaded(folder)
    assert config.dtype == "bfloat16" and list(ours) == list(LLAMA.spec.params)
    assert all(torch.equal(ours[name], tensor.bfloat16()) for name, tensor in random(LLAMA).items())
    # the dtype of the source, without being told
    hf_export.save(tmp_path / "again", config, ours.__getitem__)
    assert {t.dtype for t in load_file(tmp_path / "again" / "model.safetensors").values()} == {
        torch.bfloat16
    }


def test_dtype_is_stated_only_where_it_says_something(tmp_path):
    # an old config.json
    plain = ModelConfig({k: v for k, v in LLAMA.config.items() if k != "dtype"})
    written = saved(plain, tmp_path / "a") / "config.json"
    assert json.loads(written.read_text()) == plain.config
    half = hf.read_config(saved(plain, tmp_path / "b", dtype=torch.float16))
    assert half.config == plain.config | {"dtype": "float16"}
    old = ModelConfig(plain.config | {"torch_dtype": "float16"})
    full = hf.read_config(saved(old, tmp_path / "c", dtype=torch.float32))
    assert full.config == plain.config | {"torch_dtype": "float32"}


def test_transformers_loads_it(tmp_path):
    for i, config in enumerate((LLAMA, GPT2)):
        folder = saved(config, tmp_path / str(i), shard_bytes=9000)
        with contextlib.redirect_stderr(io.StringIO()):
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, output_loading_info=True
            )
        assert not any(info.values()) and model.dtype == torch.float32
        theirs, entries = dict(model.named_parameters()), weight_map(config).entries
        assert theirs.keys() == entries.keys()
        ours = random(config)
        assert all(
            torch.equal(join_stored(e.rule, [ours[n] for n in e.ours]), theirs[name])
            for name, e in entries.items()
        )


def test_only_some_parameters(tmp_path):
    folder = saved(GPT2, tmp_path / "m")
    only = {"layers.1.attn.k.weight", "final_norm.bias"}
    got = {}
    load_weights(open_source(folder), got.__setitem__, only)
    assert got.keys() == only and all(torch.equal(got[name], random(GPT2)[name]) for name in only)
    with pytest.raises(KeyError, match="layers.9"):
        load_weights(open_source(folder), got.__setitem__, {"layers.9.attn.k.weight"})


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            lambda t: t.update(surprise=torch.zeros(1)),
            KeyError,
            "1 tensor has no counterpart in the model, e.g. .'surprise'",
        ),
        (
            lambda t: t.update({K.replace("weight", "bias"): torch.zeros(16)}),
            KeyError,
            "no counterpart.*k_proj.bias",
        ),
        (
            lambda t: t.pop("model.norm.weight"),
            KeyError,
            "1 tensor is missing, e.g. .'model.norm.weight'",
        ),
        (lambda t: t.pop("lm_head.weight"), KeyError, "missing.*lm_head"),
        (
            lambda t: t.update({K: torch.zeros(8, 32)}),
            ValueError,
            r"k_proj.*\(8, 32\).*\(16, 32\): check num_key_value_heads or head_dim",
        ),
        (lambda t: t.update({K: torch.zeros(16, 33)}), ValueError, r"check hidden_size"),
        (lambda t: t.update({K: torch.zeros(16, 32, 1)}), ValueError, r"check the family"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(64, 32)}),
            ValueError,
            r"lm_head.*check vocab_size",
        ),
        (
            lambda t: t.update({K: torch.zeros(16, 32, dtype=torch.int8)}),
            ValueError,
            "k_proj.*int8.*quantised",
        ),
    ],
)
def test_refused_before_anything_is_built(tmp_path, change, error, match):
    folder = saved(LLAMA, tmp_path / "m")
    edit(folder, change)
    for use in (
        lambda source: source.specs,
        lambda source: source.stream(),
        lambda source: source.read("embed.weight"),
        lambda source: load_weights(source, lambda *_: pytest.fail("wrote")),
    ):
        with pytest.raises(error, match=match):
            use(open_source(folder))


def test_truncated(tmp_path):
    folder = saved(LLAMA, tmp_path / "m")
    os.truncate(folder / "model.safetensors", 9000)
    with pytest.raises(ValueError, match="truncated"):
        _ = open_source(folder).specs


def test_tied_head(tmp_path):
    folder = saved(TIED, tmp_path / "m")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert loaded(folder).keys() == TIED.spec.params.keys()
    edit(folder, lambda t: t["lm_head.weight"][7, 3].add_(1e-3))
    _ = open_source(folder).specs
    for use in (loaded, lambda folder: open_source(folder).read("embed.weight")):
        with pytest.raises(ValueError, match="tie_word_embeddings.*lm_head.weight"):
            use(folder)
    edit(folder, lambda t: t.update({"lm_head.weight": torch.zeros(60, 32)}))
    with pytest.raises(ValueError, match="vocab_size"):
        _ = open_source(folder).specs


def test_gpt2_without_prefix_and_with_masks(tmp_path):
    folder = saved(GPT2, tmp_path / "m")

    def as_published(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for i in range(2):
            tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
            tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)

    edit(folder, as_published)
    ours = loaded(folder)
    assert ours.keys() == GPT2.spec.params.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in random(GPT2).items())
    edit(folder, lambda t: t.update({"transformer.wte.weight": t["wte.weight"].clone()}))
    with pytest.raises(ValueError, match="transformer.wte.weight twice"):
        _ = open_source(folder).specs


def test_old_rope_buffers_are_ignored_by_name(tmp_path):
    folder = saved(LLAMA, tmp_path / "m")
    edit(
        folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    )
    assert loaded(folder).keys() == LLAMA.spec.params.keys()
    edit(
        folder,
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.cos_cached": torch.zeros(4)}),
    )
    with pytest.raises(KeyError, match="cos_cached"):
        _ = open_source(folder).specs


def test_config_files(tmp_path):
    with pytest.raises(ValueError, match="no config.json"):
        hf.read_config(tmp_path)
    for text, match in [
        ("{", "not JSON"),
        ("[]", "list"),
        ("{}", "model_type"),
        ('{"model_type": "llama", "auto_map": {"A": "b"}}', "is never run"),
        ('{"model_type": "llama", "quantization_config": {"bits": 4}}', "unquantised"),
    ]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=match):
            hf.read_config(tmp_path)


def test_save_is_all_or_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    saved(LLAMA, tmp_path / "empty")  # an empty folder may be taken
    with pytest.raises(ValueError, match="not empty"):
        saved(LLAMA, tmp_path / "empty")
    tensors = random(LLAMA)
    tensors["layers.1.mlp.up.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match="layers.1.mlp.up.weight"):
        hf_export.save(tmp_path / "half", LLAMA, tensors.__getitem__)
    del tensors["layers.1.mlp.up.weight"]
    with pytest.raises(KeyError, match="layers.1.mlp.up.weight"):
        hf_export.save(tmp_path / "half", LLAMA, tensors.__getitem__)
    with pytest.raises(ValueError, match="no tokenizer"):
        saved(LLAMA, tmp_path / "half", tokenizer_folder=tmp_path)
    assert os.listdir(tmp_path) == ["empty"]


def test_tokenizer_and_generation_config(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.bin"):
        (source / name).write_text(name)
    folder = saved(edited(LLAMA, eos_token_id=[3, 5]), tmp_path / "m", tokenizer_folder=source)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} == {
        f.name for f in folder.iterdir()
    } - {"config.json", "generation_config.json", "model.safetensors"}
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [3, 5]
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    hf_export.write(open_source(folder), tmp_path / "copied")
    copied = tmp_path / "copied"
    assert json.loads((copied / "generation_config.json").read_text()) == {"temperature": 0.6}
    assert not (saved(LLAMA, tmp_path / "none") / "generation_config.json").exists()


def test_resolve(tmp_path, monkeypatch):
    assert hf.resolve_model(tmp_path) == tmp_path and hf.resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("dolmen-tests/absent", str(tmp_path / "absent"), "./absent"):
        with pytest.raises(ValueError, match="absent: no such folder|absent is neither"):
            hf.resolve_model(name)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda c: c.model_type)
def test_one_tensor_is_resident(tmp_path, config, monkeypatch):
    """When a tensor is read, or asked for to be written, the one before is gone; so are its views,
    and what was made of it.
    """
    made, read = [], Stored.read

    def watched(tensor):
        made.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def read_alone(stored):
        assert all(reference.expired() for reference in made)
        return watched(read(stored))

    def made_alone(name):
        if name.split(".")[-2] not in "kv":
            assert all(reference.expired() for reference in made)  # joined with q
        return watched(torch.randn(shapes[name]))

    shapes = config.spec.shapes
    hf_export.save(tmp_path / "m", config, made_alone)
    monkeypatch.setattr(Stored, "read", read_alone)
    load_weights(open_source(tmp_path / "m"), lambda name, full: None)
    assert len(made) == len(shapes) + len(weight_map(config).entries)


def test_export_is_what_save_writes(tmp_path):
    folder, ours = saved(GPT2, tmp_path / "m"), random(GPT2)
    written = load_file(folder / "model.safetensors")
    exported = dict(hf_export.export_weights(GPT2, ours.__getitem__))
    assert exported.keys() == written.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in written.items())
    assert json.loads((folder / "config.json").read_text()) == GPT2.export_config()


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_weights_from_before_safetensors(tmp_path, archive, shards):
    """pytorch_model.bin, one or with an index, as every torch has written it: the same parameters
    to the bit, and nothing in it is run.
    """
    whole = saved(TIED, tmp_path / "m")
    tensors = load_file(whole / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # one storage, as torch saves
    older = tmp_path / "older"
    older.mkdir()
    (older / "config.json").write_bytes((whole / "config.json").read_bytes())
    files = ["pytorch_model.bin"]
    if shards > 1:
        files = [f"pytorch_model-0000{i + 1}-of-00002.bin" for i in range(2)]
    parts = {name: dict(list(tensors.items())[i::shards]) for i, name in enumerate(files)}
    for name, part in parts.items():
        torch.save(part, older / name, _use_new_zipfile_serialization=archive)
    if shards > 1:
        places = {tensor: name for name, part in parts.items() for tensor in part}
        index = older / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": places}))
    ours = loaded(older)
    assert ours.keys() == TIED.spec.params.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in random(TIED).items())
    if shards > 1:
        for outside in ("../m/model.safetensors", "/etc/passwd", "none.bin"):
            index.write_text(json.dumps({"weight_map": places | {K: outside}}))
            with pytest.raises(ValueError, match="index.json: lists files that are missing"):
                loaded(older)
        index.write_text(json.dumps({"weight_map": places}))
    torch.save(parts[files[0]] | {"x": Evil()}, older / files[0])
    with pytest.raises(ValueError, match="cannot be read: it names __builtin__.print"):
        loaded(older)
    content = (older / files[0]).read_bytes()
    (older / files[0]).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=f"{files[0]}: cannot be read"):
        loaded(older)


class Evil:
    def __reduce__(self):
        return print, ("evil",)
