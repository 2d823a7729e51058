"""One model behind every format: a checkpoint, saved at any layout, and its export are the same
source to the bit; what is none, damaged, or of another model is refused with what was found.
"""

import json
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from seals import seal_again
from spawning import Row
from torch.multiprocessing.reductions import StorageWeakRef

from dolmen.checkpoint import reader
from dolmen.checkpoint.folders import Damaged
from dolmen.checkpoint.reader import Checkpoint
from dolmen.checkpoint.saved import Saved
from dolmen.checkpoint.store import Checkpoints
from dolmen.conversion import hf, hf_export
from dolmen.conversion.source import (
    ModelSource,
    load_weights,
    open_source,
    pin_source,
)
from dolmen.core import consensus
from dolmen.core.config import to_dict
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.data.config import DataConfig
from dolmen.families import ModelConfig, edit
from dolmen.model import build
from dolmen.model.layout import Layout
from dolmen.model.training import RouterTraining, Training
from dolmen.serving import engine, processes
from dolmen.training.checks.model import check_init
from dolmen.training.config import RunConfig, TrainConfig
from dolmen.training.initialize import make_state
from dolmen.training.resolve import resolve

SIZES = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
LLAMA = dict(SIZES, intermediate_size=40, num_key_value_heads=2, max_position_embeddings=64)
MODELS = {
    "llama, tied": ModelConfig(dict(LLAMA, model_type="llama", tie_word_embeddings=True)),
    "gpt2": ModelConfig(  # transposed, q, k and v in one, tied
        dict(model_type="gpt2", vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
    "falcon": ModelConfig(  # q, k and v in one, by groups
        dict(SIZES, model_type="falcon", new_decoder_architecture=True, num_kv_heads=2)
    ),
    "qwen3_moe": ModelConfig(  # a tensor on disk per expert
        dict(
            LLAMA,
            model_type="qwen3_moe",
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
        )
    ),
}
PLAIN = TrainConfig()
BALANCED = TrainConfig(router=RouterTraining("bias"))


def save(
    folder: Path, model: ModelConfig, step: int = 2, train: TrainConfig = PLAIN, **of_run
) -> Path:
    """A run's folder with a checkpoint of what one process begins with."""
    save_at(Layout(dp=1), SINGLE, folder, model, step, train, **of_run)
    return folder


def save_at(
    layout: Layout,
    mesh: Mesh,
    folder: Path,
    model: ModelConfig,
    step: int = 2,
    train: TrainConfig = PLAIN,
    **of_run,
) -> None:
    made = built(layout, mesh, model, train.training, seed=step)
    run = RunConfig(model=model, train=train, data=DataConfig(path=("text",)), **of_run)
    kept = Saved(to_dict(run), step, 0, step, 0, 0, 0.0, {}, (1.0, 0), (), None)
    tensors = {f"model/{name}": p for name, p in made.named_parameters()}
    Checkpoints(folder / "checkpoints", mesh, 0).save(step, tensors, kept.meta(), wait=True)


def built(layout: Layout, mesh: Mesh, model: ModelConfig, training: Training, seed: int):
    schedule = layout.make_schedule(4, 1)
    made = build.build(model.spec, mesh, layout, schedule, training=training)
    build.initialize(made, seed)
    with torch.no_grad():  # a bias of routers begins with zeros, as a place that nobody fills has
        for name, p in made.named_parameters():
            if not made.spec.params[name].trained:
                p += torch.arange(len(p)) + 1.0
    return made


def different(one: ModelSource, other: ModelSource) -> list[str]:
    """Names of what is not the same to the bit, streamed or read by itself."""
    assert one.spec == other.spec and one.specs == other.specs
    streamed, others = dict(one.stream()), dict(other.stream())
    assert streamed.keys() == others.keys() == one.specs.keys()
    return [
        name
        for name, tensor in streamed.items()
        if not torch.equal(tensor, others[name])
        or not torch.equal(tensor, one.read(name))
        or not torch.equal(tensor, other.read(name))
        or (tuple(tensor.shape), tensor.dtype) != (one.specs[name].shape, one.specs[name].dtype)
    ]


def saved_and_exported(layout: Layout) -> dict[str, list[str]]:
    """Of each model saved at a layout: what of it differs from its export, or from what one process
    begins with. On the first rank.
    """
    mesh, found = layout.mesh(torch.device("cpu")), {}
    folder = Path(consensus.run_on_rank_zero(tempfile.mkdtemp))
    for name, model in MODELS.items():
        save_at(layout, mesh, folder / name, model)
    if mesh.first:
        for name, model in MODELS.items():
            source = open_source(folder / name)
            hf_export.write(source, folder / f"{name} exported")
            found[name] = different(source, open_source(folder / f"{name} exported"))
            alone = built(Layout(dp=1), SINGLE, model, Training(), seed=2)
            whole = dict(source.stream())
            found[name] += [n for n, p in alone.named_parameters() if not torch.equal(p, whole[n])]
        shutil.rmtree(folder)
    return found


def opened_alike() -> list[str]:
    """What two ranks open of a run that has saved once more before the first has looked."""
    mesh = Layout(tp=2).resolve(2).mesh(torch.device("cpu"))
    run = Path(consensus.run_on_rank_zero(tempfile.mkdtemp))
    for step in (2, 4):
        save_at(Layout(tp=2, dp=1), mesh, run, MODELS["gpt2"], step)
    real = reader.locate
    if not mesh.first:
        reader.locate = lambda path: run / "checkpoints/step-00000002" if path == run else path
    try:
        resolved = processes.resolve("verify", [str(run)], Layout(tp=2), "cpu")
        found = consensus.gather_objects(resolved.sources_on(mesh)[0].where.name)
    finally:
        reader.locate = real
    if mesh.first:
        shutil.rmtree(run)
    return found


@pytest.mark.parametrize(
    "row",
    [
        Row(name, 2, partial(saved_and_exported, layout)).parameter
        for name, layout in (("tp2", Layout(tp=2, dp=1)), ("pp2", Layout(pp=2, dp=1)))
    ],
)
def test_a_checkpoint_is_its_export(row, result):
    assert result(row) == {name: [] for name in MODELS}


@pytest.mark.parametrize("row", [Row("run", 2, opened_alike).parameter])
def test_all_ranks_open_what_the_first_finds(row, result):
    assert result(row) == ["step-00000004"] * 2


def test_what_names_a_run(tmp_path, monkeypatch):
    """Its folder, that of its checkpoints, one of them; the newest is taken and pinned."""
    run = save(tmp_path / "run", MODELS["gpt2"])
    save(run, MODELS["gpt2"], step=4)
    four, two = (run / "checkpoints" / f"step-0000000{n}" for n in (4, 2))
    for name, where in ((run, four), (run / "checkpoints", four), (four, four), (two, two)):
        source = open_source(name)
        assert source.where == where and pin_source(name) == str(where)
    assert open_source(run).title == "the checkpoint of step 4"
    assert different(open_source(four), open_source(two))  # negative control
    hf_export.write(open_source(run), tmp_path / "hf")
    assert open_source(tmp_path / "hf").where == tmp_path / "hf"
    assert pin_source(tmp_path / "hf") == str(tmp_path / "hf")
    monkeypatch.setattr(hf, "resolve_model", lambda name: tmp_path / "hf")
    assert pin_source("org/name") == "org/name" and open_source("org/name").where == tmp_path / "hf"


def test_what_is_none_is_told_with_what_is_there(tmp_path):
    none = tmp_path / "none"
    for content, said in (
        (
            [],
            f"{none} is neither a Megatron .*, nor a transformers .*, nor a run or .*: it is empty",
        ),
        (["a.txt", "b"], "it holds a.txt, b$"),
        ([*"abcdef"], "it holds a, b, c, d, e ...$"),
        (["checkpoints/"], "none has no complete checkpoint: nothing is saved yet"),
        (
            ["checkpoints/step-00000002.partial/"],
            "has no complete checkpoint: checkpoints/ has only step-00000002.partial",
        ),
        (["step-00000002.damaged/"], "has no complete checkpoint: give a run's folder"),
        (["model.safetensors"], "none has no config.json"),
    ):
        none.mkdir()
        for name in content:
            (none / name).mkdir(parents=True) if name[-1] == "/" else (none / name).touch()
        for opening in (open_source, pin_source):
            if opening is open_source or "no config.json" not in said:
                with pytest.raises(ValueError, match=said):
                    opening(none)
        shutil.rmtree(none)


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """A run, not to be written into."""
    return save(tmp_path_factory.mktemp("kept") / "run", MODELS["gpt2"])


@pytest.fixture
def run(kept, tmp_path) -> Path:
    return shutil.copytree(kept, tmp_path / "run")


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_damage_is_told_as_such(run):
    step, (file,) = run / "checkpoints/step-00000002", [*run.rglob("*.distcp")]
    flip(step / "state.json", 40)
    with pytest.raises(Damaged, match="state.json is damaged"):
        open_source(run)
    flip(step / "state.json", 40)
    whole = open_source(run)
    flip(file, file.read_bytes().find(whole.read("embed.weight").numpy().tobytes()) + 5)
    for use in (dict, lambda pairs: load_weights(whole, lambda *_: None)):
        with pytest.raises(Damaged, match=f"{file.name} is .* damaged"):
            use(open_source(run).stream())
    with open(file, "r+b") as stream_:
        stream_.truncate(100)
    with pytest.raises(Damaged, match=file.name):
        open_source(run)


def test_a_checkpoint_that_says_an_impossible_model(run):
    """With a seal that fits it: somebody else has made it so."""
    step = run / "checkpoints/step-00000002"
    state = json.loads((step / "state.json").read_text())
    state["run"]["model"]["n_head"] = 5
    (step / "state.json").write_text(json.dumps(state))
    seal_again(step)
    with pytest.raises(Damaged, match=r"state.json: .*n_embd \(32\).*n_head \(5\)"):
        open_source(run)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"vocab_size": 70}, ValueError, r"embed.* \(61, 32\) .* \(70, 32\) \(vocab_size is 61"),
        (
            {"tie": False},
            KeyError,
            r"tie_word_embeddings is True in the checkpoint, False here.*head",
        ),
    ],
)
def test_weights_of_another_model(kept, change, error, said):
    source = open_source(kept).read_as(edit(MODELS["gpt2"], **change))
    for use in (lambda: source.specs, source.stream, lambda: source.read("embed.weight")):
        with pytest.raises(error, match=said):
            use()


def test_weights_that_another_model_has_no_place_for(tmp_path):
    run = save(tmp_path / "run", MODELS["qwen3_moe"])
    with pytest.raises(KeyError, match="True here.*1 parameter is in only one .*'head.weight'"):
        _ = open_source(run).read_as(edit(MODELS["qwen3_moe"], tie=True)).specs


def test_a_model_that_is_given_is_taken(kept):
    """And its weights are those of the source, where they have place in it."""
    changed = edit(MODELS["gpt2"], bos_token_id=7)
    source = open_source(kept).read_as(changed)
    assert source.model == changed and not different(source, open_source(kept))
    for opened in (source, open_source(kept)):
        with pytest.raises(KeyError, match=f"{opened.where} has no parameter surprise"):
            opened.read("surprise")


def test_one_tensor_of_a_checkpoint_is_resident(kept, monkeypatch, tmp_path):
    made, read = [], Checkpoint.read

    def read_alone(self, name):
        if name.split(".")[-2] not in "kv":  # which are stored with q
            assert all(reference.expired() for reference in made), name
        made.append(StorageWeakRef((tensor := read(self, name)).untyped_storage()))
        return tensor

    monkeypatch.setattr(Checkpoint, "read", read_alone)
    load_weights(open_source(kept), lambda name, whole: None)
    hf_export.write(open_source(kept), tmp_path / "hf")
    assert len(made) == 2 * len(MODELS["gpt2"].spec.params)


def test_a_bias_that_training_added_is_part_of_a_run(tmp_path):
    """No config.json has a place for it, so the run computes with it and is not exported."""
    run = save(tmp_path / "run", MODELS["qwen3_moe"], train=BALANCED)
    source, bias = open_source(run), "layers.1.mlp.router.bias"
    assert bias in source.specs and bias not in source.model.spec.params
    model = engine.load_decoder(source)
    assert torch.equal(model.get_parameter(bias), torch.arange(4) + 1.0)
    with pytest.raises(ValueError, match="train.router.balance is bias: transformers' qwen3_moe"):
        hf_export.write(source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_run_begins_with_the_biases_of_another(tmp_path):
    """Or is refused, if it would lose them."""
    moe, bias = MODELS["qwen3_moe"], "layers.1.mlp.router.bias"
    with_them = str(save(tmp_path / "with", moe, train=BALANCED))
    without = str(save(tmp_path / "without", moe))
    run = RunConfig(model=moe, layout=Layout(dp=1), train=BALANCED)
    for init, values in ((with_them, torch.arange(4) + 1.0), (without, torch.zeros(4))):
        resolved = resolve(replace(run, init=init), 1)
        check_init(resolved)
        started = make_state(resolved, SINGLE, 1).model
        assert torch.equal(started.get_parameter(bias), values)
        assert torch.equal(
            started.get_parameter("head.weight"), open_source(init).read("head.weight")
        )
    plain = replace(run, train=PLAIN)
    check_init(resolve(replace(plain, init=without), 1))
    with pytest.raises(
        ValueError, match=f"--init {with_them} has 2 biases of routers, e.g. layers"
    ):
        check_init(resolve(replace(plain, init=with_them), 1))


def test_a_directory_is_written_again(tmp_path):
    """In another dtype, with its own generation_config.json, and its tokenizer's files."""
    hf_export.write(open_source(save(tmp_path / "run", MODELS["falcon"])), tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text('{"temperature": 0.6}')
    (tmp_path / "hf" / "vocab.txt").write_text("a")
    before = open_source(tmp_path / "hf")
    hf_export.write(before, tmp_path / "half", torch.float16)
    after = open_source(tmp_path / "half")
    assert after.model == edit(before.model, dtype="float16")
    assert after.generation_config == {"temperature": 0.6}
    assert after.tokenizer == tmp_path / "half" and (tmp_path / "half/vocab.txt").is_file()
    for name, tensor in before.stream():
        assert torch.equal(after.read(name), tensor.half()), name
    with hf_export.transformers_folder(after) as folder:
        assert folder == after.where


def test_a_run_is_exported_for_a_while(kept):
    with hf_export.transformers_folder(open_source(kept)) as folder:
        assert not different(open_source(folder), open_source(kept))
    assert not folder.parent.exists()


def test_a_run_that_began_elsewhere_keeps_its_config_json(tmp_path):
    """Word for word; one that began with nothing is completed."""
    bare = ModelConfig({**MODELS["gpt2"].config, "surprise": 1})
    made = open_source(save(tmp_path / "made", bare)).model
    started = open_source(save(tmp_path / "begun", bare, init="elsewhere")).model
    assert started.config == bare.config and "architectures" not in bare.config
    assert made.config["architectures"] == ["GPT2LMHeadModel"] and made.spec == bare.spec
    assert made.config["surprise"] == 1 and replace(made, config=bare.config) == started
