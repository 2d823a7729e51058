"""`dolmen convert` from the words: what it prints, and bad input told in one line, with exit code 2
and nothing written.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dolmen import cli
from dolmen.conversion import hf_export
from dolmen.conversion.convert import Unlike
from dolmen.families import ModelConfig

LLAMA = dict(
    model_type="llama",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A directory of transformers and the same as ranks, not to be written into."""
    where = tmp_path_factory.mktemp("models")
    model = ModelConfig(LLAMA)
    torch.manual_seed(0)
    random = {name: torch.randn(shape) for name, shape in model.spec.shapes.items()}
    hf_export.save(where / "hf", model, random.__getitem__)
    words = (where / "hf", where / "ranks", "--to", "megatron-core", "--tp", 2)
    assert cli.main(["convert", *map(str, words)]) == 0
    return where


def convert(capsys, *words) -> tuple[int, str, str]:
    code = cli.main(["convert", *map(str, words)])
    return code, *capsys.readouterr()


def test_what_is_said(kept, tmp_path, capsys):
    code, out, err = convert(capsys, kept / "ranks", tmp_path / "hf", "--to", "hf")
    assert code == 0 and out == (
        f"read {kept}/ranks/release, a Megatron checkpoint (Megatron-Core's names, tp 2)\n"
        f"wrote {tmp_path}/hf: 21 parameters read back, equal bit for bit; logits equal\n"
    )
    assert err == f"writing {tmp_path}/hf\nreading the result back\n"


class Evil:
    def __reduce__(self):
        return print, ("evil",)


def rank(folder, number: int):
    return folder / f"release/mp_rank_{number:02d}/model_optim_rng.pt"


def outside(folder):
    (folder / "model.safetensors").unlink()
    save_file({"x": torch.ones(1)}, folder.parent / "other.safetensors")
    index = {"weight_map": {"x": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def mixed(folder):
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "q_proj" in name)
    weights[name] = weights[name].half()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


BAD = {
    "a rank is missing": (
        "ranks", lambda f: shutil.rmtree(rank(f, 1).parent), (), "mp_rank_01 is missing",
    ),
    "a pickle with anything executable": (
        "ranks",
        lambda f: torch.save({"args": Evil(), "model": {}}, rank(f, 1)),
        (),
        "it names __builtin__.print, which is not allowed",
    ),
    "a shard is cut": ("ranks", lambda f: cut(rank(f, 0)), (), "rng.pt: cannot be read"),
    "a shard of transformers is cut": (
        "hf", lambda f: cut(f / "model.safetensors"), (), "is truncated",
    ),
    "an index that points outside": ("hf", outside, (), "lists files that are missing"),
    "ranks that heads do not divide": (
        "hf", None, ("--to", "megatron", "--tp", 3), "num_attention_heads (4) is not divisible by",
    ),
    "the vocabulary is not said": (
        "ranks", lambda f: (f / "config.json").unlink(), (), "give --vocab-size",
    ),
    "one tensor of another dtype": (
        "hf", mixed, (), "1 of float16 (e.g. layers.0.attn.q.weight): choose one with --dtype",
    ),
    "no such format": ("hf", None, ("--to", "nemo"), "--to"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(case, kept, tmp_path, capsys):
    name, damage, words, said = BAD[case]
    folder = tmp_path / "model"
    shutil.copytree(kept / name, folder)
    if damage:
        damage(folder)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = convert(capsys, folder, tmp_path / "out", *(words or ("--to", "hf")))
    assert code == 2 and out == "" and said in err
    assert err.count("\n") == 1 and err.startswith("dolmen convert: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_another_model_is_a_failure(kept, tmp_path, capsys, monkeypatch):
    def unlike(*_):
        raise Unlike("logits of a are not those of b")

    monkeypatch.setattr("dolmen.conversion.convert.compare_logits", unlike)
    code, out, err = convert(capsys, kept / "hf", tmp_path / "out", "--to", "megatron")
    assert code == 1 and "logits of a are not those of b; nothing was written" in err
    assert not any(tmp_path.iterdir())
