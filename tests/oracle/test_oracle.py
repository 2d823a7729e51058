"""dolmen against the oracle: losses, gradient norms, learning rates, tokens, what routers do, the
validation loss and bits per byte, and every weight and moment at the end.

Tolerances are rows.TOLERANCE, what was measured in docs/concepts/numerics.md. A weight is told by
how far it has moved, a moment by its tensor's largest element.

In float64 two right programs differ by the order of sums alone. A loss averages the roundings of a
hundred tokens; a norm does of gradients, in which they add up over layers; what a weight has moved
is rounded with the weight. eps is 1e-3, for Adam's g / (|g| + eps) turns rounding into a step of lr
where g is about eps: `adamw-default-eps` is float64 alone. In half precision a token between two
experts goes to the other, which no rounding bounds: 2^-1 of a moment says that the gradients are
those of the same model. What half precision computes is held by the other rows; those of its name
hold what rests in fp32, and that the router and the loss scale are what they should be.
"""

import ast
import math
from functools import cache
from pathlib import Path

import adapter
import freeze
import numpy as np
import pytest
import torch
import trainer
import wide
from adapter import LENGTH, Material
from faults import FAULTS
from rows import BOTH, DATA, ROWS, TOLERANCE, Row, named
from torch import Tensor
from trainer import IGNORED, Result

# Tokens of a step that may go to another expert than the oracle's: one did in bf16, none elsewhere
ASTRAY = {"float64": 0, "float32": 0, "bfloat16": 4, "float16": 4}
# by how many times its tolerance a row sees a fault at least: 3e8 and 18 were measured
SEEN = {"float64": 1e6, "bfloat16": 10.0}
FROZEN = freeze.frozen()


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Material:
    return adapter.material(tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("module", [trainer, wide], ids=lambda module: module.__name__)
def test_the_oracle_shares_nothing_with_the_house(module):
    text = Path(module.__file__).read_text()
    imported = {
        name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    own = {
        "collections",
        "contextlib",
        "dataclasses",
        "functools",
        "io",
        "math",
        "pathlib",
        "statistics",
        "typing",
        "zlib",
    }
    assert {n.split(".")[0] for n in imported} <= own | {
        "numpy",
        "safetensors",
        "torch",
        "transformers",
        "wide",
    }
    assert "dolmen" not in text and "importlib" not in text


def test_every_row_is_frozen():
    assert [row.name for row in ROWS] == list(FROZEN)


@pytest.mark.parametrize("name", DATA)
def test_batches_are_those_frozen(name, made):
    """The order of data is part of resuming: another one needs a reason, and a new freeze."""
    now, before = adapter.dump(DATA[name], made), freeze.load(name)
    assert now.keys() == before.keys()
    assert all(np.array_equal(now[part], before[part]) for part in now)


def test_batches_are_the_text():
    """Windows are runs of the documents, each with its end, in a ring; an epoch predicts no token
    twice; held-out text is predicted once, from an end on; documents start after ends.
    """
    text = [w for d in adapter.documents(1, 40, 60) for w in (*d, 0)]
    held = [w for d in adapter.documents(2, 6, 0) for w in (*d, 0)]
    given, masked = freeze.load("plain"), freeze.load("masked")
    ring, places = text + text[:LENGTH], []
    for tokens, label in zip(
        given["tokens"].reshape(-1, LENGTH), given["labels"].reshape(-1, LENGTH)[:, -1], strict=True
    ):
        window = [*tokens.tolist(), int(label)]
        (place,) = [i for i in range(len(text)) if ring[i : i + LENGTH + 1] == window]
        places.append(place)
    assert np.array_equal(given["labels"][..., :-1], given["tokens"][..., 1:])
    an_epoch = sorted(places[: len(text) // LENGTH])
    assert all(b - a >= LENGTH for a, b in zip(an_epoch, an_epoch[1:], strict=False))
    labels = given["held_labels"].flatten()
    assert labels[labels != IGNORED].tolist() == held
    tokens = given["held_tokens"].flatten()[labels != IGNORED]
    assert tokens.tolist() == [0, *held[:-1]]
    for part in ("", "held_"):
        tokens, starts = masked[f"{part}tokens"], masked[f"{part}starts"]
        begins = np.concatenate([0 * tokens[..., :1] + 1, tokens[..., :-1] == 0], -1)
        index = np.arange(LENGTH) * begins.astype(int)
        real = masked[f"{part}labels"] != IGNORED
        assert np.array_equal(np.maximum.accumulate(index, -1)[real], starts[real])


@cache
def truth(name: str) -> tuple[Result, dict[str, Tensor]]:
    """What the oracle gives for a row, and the weights it began with: once for all its tests."""
    row = named(name)
    return freeze.oracle(row, freeze.load(row.data))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row(row, made, tmp_path):
    want, (oracle, weights) = FROZEN[row.name], truth(row.name)
    assert freeze.digest(row, freeze.load(row.data), weights) == want["inputs"]
    for key, value in freeze.told(oracle).items():
        assert freeze.difference(value, want[key]) < 1e-12, key
    check_run(row, row.dtypes[0], made, tmp_path)


# The other rows in float32 repeat what they show in float64, with a thousand times the tolerance
SHORT_FLOAT32 = (
    "llama",
    "gpt2",
    "qwen3-moe",
    "muon",
    "masked",
    "bias-balance",
    "not-finite",
    "resumed",
    "loss-scale",
)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, id=row.name, marks=[] if row.name in SHORT_FLOAT32 else [pytest.mark.full]
        )
        for row in ROWS
        if row.dtypes == BOTH
    ],
)
def test_row_in_float32(row, made, tmp_path):
    check_run(row, "float32", made, tmp_path)


def check_run(row: Row, dtype: str, made: Material, folder: Path) -> None:
    """Run dolmen in `dtype`. Raises AssertionError where it differs from the oracle."""
    oracle, weights = truth(row.name)
    got, out = run(row, dtype, made, weights, folder)
    off = differences(row, dtype, got, FROZEN[row.name], oracle, weights)
    assert not off, f"(difference, tolerance): {off}"
    hold_the_rest(row, dtype, got, out, made)


def run(
    row: Row, dtype: str, made: Material, weights: dict[str, Tensor], folder: Path, **options
) -> tuple[Result, Path]:
    """dolmen's run of a row."""
    then = None if row.then is None else {"global_batch_size": row.then}
    given = row.job, DATA[row.data], made, weights, folder, dtype, row.train, row.resume, then
    return adapter.run(*given, **options)


def differences(
    row: Row, dtype: str, got: Result, want: dict, oracle: Result, weights: dict[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """What is over its tolerance: its relative difference, and the tolerance."""
    loss, norm, moved, moment = TOLERANCE[dtype]
    if not row.at_rest:  # nor is what a token with another expert changes of a loss rounding
        loss = 4 * loss
    allowed = {"losses": loss, "norms": norm, "balance": norm, "z": norm}
    allowed |= {"rates": 1e-14, "tokens": 0.0, "scales": 0.0}
    allowed["max_load"] = 1e-14 + ASTRAY[dtype] * share_of_a_token(row, want)
    if row.job.loss_scale is not None and row.resume is None:
        allowed["skipped"] = 0.0
        want = want | {"skipped": np.cumsum(want["skipped"]).tolist()}
    off = {
        key: (freeze.difference(vars(got)[key], want[key]), most) for key, most in allowed.items()
    }
    off["validation"] = abs(got.validation[0] / want["validation"][0] - 1), loss
    off["validation tokens"] = abs(got.validation[1] - want["validation"][1]), 0.0
    biases = np.array([float(b) for bias in got.biases for b in bias])
    off["biases"] = np.abs(biases - want["biases"]).max(initial=0.0), norm * row.job.bias_rate
    for name, true in oracle.weights.items() if row.at_rest else ():
        far = true - weights[name]
        off[f"weight {name}"] = distance(got.weights[name], true, far), moved
        for kind in ("first", "second"):
            true = vars(oracle)[kind][name]
            off[f"{kind} {name}"] = distance(vars(got)[kind][name], true, true), moment
    return {key: (value, most) for key, (value, most) in off.items() if not value <= most}


def share_of_a_token(row: Row, want: dict) -> float:
    """Of the mean load of an expert: what one token with another expert changes a load by."""
    model = row.job.model
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((model[name] for name in names if name in model), 0)
    return experts / (model.get("num_experts_per_tok", 1) * want["tokens"][0])


def distance(got: Tensor, true: Tensor, unit: Tensor) -> float:
    """Largest difference where `true` is finite, in units of `unit`'s largest finite element;
    infinite unless NaN and the infinities of each sign are in the same places.
    """
    got, true, unit = got.double(), true.double(), unit.double()
    finite = true.isfinite()
    if not torch.equal(got.isnan(), true.isnan()) or not torch.equal(
        got[~finite].nan_to_num(), true[~finite].nan_to_num()
    ):
        return math.inf
    largest = unit[unit.isfinite()].abs().max()
    return float((got - true)[finite].abs().max() / largest)


def hold_the_rest(row: Row, dtype: str, got: Result, out: Path, made: Material) -> None:
    """What is at rest is fp32 or wider; the export is what is at rest; bits per byte and epochs."""
    rest = torch.float64 if dtype == "float64" else torch.float32
    for tensors in (got.weights, got.first, got.second):
        assert {t.dtype for t in tensors.values()} == {rest}
    if adapter.has_place(row.job):
        exported = adapter.exported(out)
        assert exported.keys() == got.weights.keys()
        assert all(torch.equal(t, got.weights[n].float()) for n, t in exported.items())
    loss, tokens = got.validation
    bits = loss * tokens / math.log(2) / made.held_out_bytes
    assert adapter.summary(out)["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    text = sum(len(d) + 1 for d in adapter.documents(1, 40, 60))
    windows = text // DATA[row.data].length
    sizes = [len(b.tokens) for b in freeze.batches(row, freeze.load(row.data))]
    read = np.cumsum(sizes[: row.job.steps]) / windows
    assert adapter.epochs(out) == pytest.approx(read.tolist(), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_apart(bad):
    """From what is finite, and from what is not finite otherwise; in one place it is equal."""
    true = torch.tensor([1.0, 2.0, math.inf])
    assert distance(true, true, true) == 0.0
    assert distance(true + torch.tensor([0.5, 0.0, 0.0]), true, true) == 0.25
    for place in (0, 1, 2):
        got = true.clone()
        got[place] = bad
        same = bad == math.inf and place == 2
        assert distance(got, true, true) == distance(true, got, got) == (0.0 if same else math.inf)
        assert distance(got, got, got) == 0.0


@pytest.mark.parametrize("name", ["no-clip", "clip-not-reached", "auxiliary-accumulation"])
def test_a_static_loss_scale_changes_no_bit(name, made, tmp_path):
    """A power of two is exact in fp32, from the loss through clipping to the update: one that is
    not undone somewhere, or not applied to an auxiliary loss, is another number.
    """
    row = named(name)
    weights = trainer.initial(row.job)
    plain, _ = run(row, "float32", made, weights, tmp_path / "plain")
    scaled, _ = run(row, "float32", made, weights, tmp_path / "scaled", static_scale=2.0**12)
    for key, want in vars(plain).items():
        got = vars(scaled)[key]
        if isinstance(want, dict):
            assert all(torch.equal(got[n], t) for n, t in want.items()), key
        else:
            assert got == want, key


def test_the_same_seed_gives_the_same_run_to_the_bit(made, tmp_path):
    row = named("qwen3-moe")
    weights = trainer.initial(row.job)
    runs = [run(row, "float32", made, weights, tmp_path / name)[0] for name in "ab"]
    assert runs[0].losses == runs[1].losses and runs[0].norms == runs[1].norms
    assert all(torch.equal(t, runs[1].weights[n]) for n, t in runs[0].weights.items())


SHORT = (
    "moments not corrected",
    "masters of bf16",
    "document masks ignored",
    "weights of experts normalised",
    "spikes forgotten by a checkpoint",
)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=str(fault), marks=[] if str(fault) in SHORT else [pytest.mark.full])
        for fault in FAULTS
    ],
)
def test_fault_is_seen(fault, made, tmp_path):
    """The row sees the fault, far over its tolerance."""
    row = named(fault.row)
    oracle, weights = truth(row.name)
    dtype = row.dtypes[0]
    with fault.made():
        got, _ = run(row, dtype, made, weights, tmp_path)
    off = differences(row, dtype, got, FROZEN[row.name], oracle, weights)
    assert any(not value <= SEEN[dtype] * most for value, most in off.values()), off


def test_faults_change_what_is_there():
    """A fault whose function has another name now would be found by the full tier alone."""
    for fault in FAULTS:
        assert isinstance(fault.place, dict) or hasattr(fault.place, fault.name), fault.what
