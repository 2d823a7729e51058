"""What is put wrong into one side is named, and two right sides are the same."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from spawning import Row

from benchmarks import diff_faults
from benchmarks.diff_faults import FAULTS, MODELS, Fault
from dolmen.cli import main
from dolmen.comparison import diff, recording
from dolmen.comparison.config import DiffConfig
from dolmen.comparison.recording import merge_ranks
from dolmen.conversion import hf_export
from dolmen.core import consensus
from dolmen.core.environment import Launch
from dolmen.core.messages import BadInput
from dolmen.model.layout import Layout

INSIDE = "attn_norm attn.q attn.k attn.v attn.query attn.key attn.value attn.scores attn.sums attn"
INSIDE += " middle mlp_norm mlp.gate mlp.up mlp.act mlp"
SHORT = (
    "gate and up swapped",
    "heads of q permuted",
    "a stored bias dropped",
    "rope base",
    "eps",
    "a residual left out",
    "slope of the activation",
    "beta1",
)
RIGHT = [
    ("qwen3", Layout(tp=2, dp=1, sequence_parallel=True)),  # k and v whole on every rank
    ("gpt2", Layout(pp=2, dp=1)),  # an embedding that is the head, on another rank
    ("llama", Layout(cp=2, dp=1)),
    ("llama", Layout(dp=2, zero=3)),
]


def named(fault: Fault, found) -> None:
    tensor, kind = diff_faults.right(fault, found)
    assert tensor, f"{fault.where} was to be named\n{found}"
    assert kind, f"{fault.kinds} was to be told\n{found}"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name in SHORT], ids=lambda f: f.name)
def test_a_fault_is_named(fault):
    named(fault, diff_faults.report(fault, diff_faults.recorded(fault)))


def by_both(fault: Fault):
    """What is said of a fault in a layout of this world, which every rank finds."""
    mesh = fault.layout.mesh(torch.device("cpu"))
    tensors = merge_ranks(consensus.gather_objects(diff_faults.recorded(fault, mesh)))
    return diff_faults.report(fault, tensors)


def wrong(name: str):
    (fault,) = (f for f in FAULTS if f.name == name)
    return by_both(fault)


def right(model: str, layout: Layout):
    return by_both(Fault("nothing", "", "", model, layout=layout))


WRONG = Row("sum backward left out", 2, partial(wrong, "sum backward left out"))
LAYOUTS = [
    Row(f"{model}-tp{x.tp}-cp{x.cp}-pp{x.pp}-dp{x.dp}", 2, partial(right, model, x))
    for model, x in RIGHT
]


@pytest.mark.spawn
@pytest.mark.parametrize("row", [WRONG.parameter])
def test_a_fault_of_a_layout_is_named_with_its_axis(row, result):
    (fault,) = (f for f in FAULTS if f.name == row.name)
    found = result(row)
    named(fault, found)
    assert found.first.fault.axis == "tp" and found.first.ranks == "ranks 0, 1 of A"
    assert "axis        tp" in str(found)


@pytest.mark.spawn
@pytest.mark.parametrize("row", [row.parameter for row in LAYOUTS])
def test_a_right_layout_is_the_same(row, result):
    found = result(row)
    assert found.ok, str(found)
    stages = {one.stage for one in found.rows}
    assert stages == set(recording.STAGES), "something was not compared"


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=[pytest.mark.slow] * (m != "llama")) for m in MODELS]
)
def test_both_sides_are_seen_inside(model):
    """A tensor that a hook no longer finds is not missed in silence."""
    fault = Fault("nothing", "", "", model)
    found = diff_faults.report(fault, diff_faults.recorded(fault))
    assert found.ok and str(found).startswith("no difference: "), str(found)
    assert all(row.difference < row.allowed / 2 for row in found.rows if row.stage != "weights")
    inside = {row.name.removeprefix("layers.1.") for row in found.rows if row.stage == "forward"}
    expected = set(INSIDE.split())
    expected -= {"mlp.gate"} if model == "gpt2" else set()
    assert expected <= inside, sorted(expected - inside)
    back = {row.name for row in found.rows if row.stage == "backward"}
    scores = {name for name in expected if not name.endswith("scores")}
    assert {f"layers.1.{name}" for name in scores} <= back


def test_what_has_another_form_inside_is_no_difference():
    """By rope alone, all positions off by one are the same function: queries and keys differ."""
    fault = Fault("turned further", "", "", code=diff_faults.positions_off)
    found = diff_faults.report(fault, diff_faults.recorded(fault))
    assert found.ok, str(found)
    reported = {row.name for row in found.rows if "another form" in row.note}
    assert {"layers.0.attn.query", "layers.0.attn.key"} <= reported


def test_what_has_another_form_does_not_hide_a_fault_behind_it():
    fault = Fault(
        "turned further, and another activation",
        "forward/layers.0.mlp.act",
        "other values",
        code=diff_faults.positions_off,
        config=dict(hidden_act="gelu"),
    )
    named(fault, diff_faults.report(fault, diff_faults.recorded(fault)))


def test_what_is_no_number_is_a_difference():
    fault = Fault(
        "nan",
        "forward/layers.1.mlp.up",
        "not finite",
        weights=diff_faults.to("layers.1.mlp.up.weight", lambda w: w * float("nan")),
    )
    found = diff_faults.report(fault, diff_faults.recorded(fault))
    assert not found.ok and found.first.fault.kind == "not finite"
    assert found.as_dict()["first"]["difference"] is None  # JSON has no NaN


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model as transformers keeps it."""
    where = tmp_path_factory.mktemp("diff") / "llama"
    hf_export.write(diff_faults.right_source("llama"), where)
    return where


def spoiled(folder: Path, tmp_path: Path) -> Path:
    """The same with another epsilon."""
    made = tmp_path / "wrong"
    made.mkdir()
    for file in folder.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    return made


@pytest.mark.slow
def test_the_command(folder, tmp_path, capsys):
    """Exit code 0 where two are the same, and 1 where they part: in words, and as JSON."""
    assert main(["diff", str(folder), "transformers", "--length", "8", "--device", "cpu"]) == 0
    assert "no difference: " in capsys.readouterr().out
    bad, file = str(spoiled(folder, tmp_path)), tmp_path / "out.json"
    words = ["--until", "forward", "--length", "8", "--device", "cpu", "--json", str(file)]
    assert main(["diff", bad, str(folder), *words]) == 1
    output = capsys.readouterr().out
    assert "first difference: layers.0.attn_norm" in output and "a scale by row" in output
    assert "rms_norm_eps is 0.001 in A" in output and "FIRST" in output
    written = json.loads(file.read_text())
    assert written["first"]["name"] == "layers.0.attn_norm" and not written["ok"]
    assert {row["stage"] for row in written["rows"]} == {"weights", "forward", "numbers"}


@pytest.mark.spawn
def test_a_side_of_one_process_computes_in_its_dtype(folder, tmp_path):
    """What is allowed is that of bfloat16, so that what is seen must be too."""
    file = tmp_path / "out.json"
    words = ["--a.dtype", "bfloat16", "--until", "forward", "--length", "8", "--device", "cpu"]
    assert main(["diff", str(folder), "transformers", *words, "--json", str(file)]) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["logits"]["difference"] > 1e-3


@pytest.mark.parametrize("side", ["A", "B"])
def test_a_window_that_is_not_filled_is_told_of_either_side(side, folder, tmp_path):
    made = tmp_path / "windowed"
    made.mkdir()
    for file in folder.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    config = json.loads((made / "config.json").read_text())
    windowed = config | {"model_type": "mistral", "sliding_window": 16}
    (made / "config.json").write_text(json.dumps(windowed))
    names = [str(made), str(folder)]
    both = diff.open_sides(DiffConfig(*(names if side == "A" else names[::-1]), length=8))
    assert any("is shorter than the sliding window of 16" in line for line in diff._notes(both))


def test_it_starts_its_processes_itself(monkeypatch):
    monkeypatch.setattr(diff.process, "read_launch", lambda: Launch(0, 2, 0, 2))
    with pytest.raises(BadInput, match="run it without torchrun or srun"):
        diff.diff(DiffConfig("not", "read"))


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [False, True])
def test_an_encoder_is_seen_inside(pairs, tmp_path, capsys):
    """One that fills in tokens, and one whose head judges pairs of texts too."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        pad_token_id=None,
    )
    kind = transformers.BertForPreTraining if pairs else transformers.BertForMaskedLM
    model = kind(config)
    model.save_pretrained(tmp_path / "right")
    with torch.no_grad():
        model.get_parameter("bert.encoder.layer.1.attention.self.query.weight").mul_(2)
    model.save_pretrained(tmp_path / "wrong")
    words = ["--length", "8", "--device", "cpu"]
    assert main(["diff", str(tmp_path / "right"), "transformers", *words]) == 0
    assert "no difference: " in capsys.readouterr().out
    right = f"transformers:{tmp_path / 'right'}"
    assert main(["diff", str(tmp_path / "wrong"), right, *words]) == 1
    output = capsys.readouterr().out
    assert "first difference: weights of layers.1.attn.q.weight" in output


@pytest.mark.slow
def test_verify_names_the_first_tensor_too(folder, tmp_path, capsys):
    bad = str(spoiled(folder, tmp_path))
    assert main(["verify", bad, "--against", str(folder), "--length", "8", "--device", "cpu"]) == 1
    assert "first difference: layers.0.attn_norm" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, said",
    [
        (["{}", "transformers", "--length", "0"], "length is 0"),
        (["transformers", "transformers"], "both sides are transformers"),
        (["{}", "transformers", "--b.layout.tp", "2"], "--b.layout: side B is transformers"),
        (["{}", "no/such/model/here"], "no/such/model/here: no such folder"),
        (
            ["{}", "{}", "--b.layout.tp", "3"],
            "num_attention_heads (4) is not divisible by tp (3): set --b.layout.tp to a divisor",
        ),
        (["{}", "{}", "--optimizer.beta1", "2"], "optimizer.beta1 is 2.0: it"),
        (["{}"], "missing"),
    ],
)
def test_bad_input_is_refused(words, said, folder, capsys):
    assert main(["diff", *(word.format(folder) for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_recording_is_read_as_it_was_saved(tmp_path):
    tensors = diff_faults.recorded(Fault("nothing", "", ""))
    recording.save(tmp_path, tensors, 0)
    read = recording.load(tmp_path, 1)
    assert read.keys() == tensors.keys()
    for key, found in tensors.items():
        one, other = found, read[key]
        assert (one.shape, one.partial, len(one.pieces)) == (
            other.shape,
            other.partial,
            len(other.pieces),
        )
        assert torch.equal(one.join(), other.join()), key
