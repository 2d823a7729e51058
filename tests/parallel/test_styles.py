"""Any module, split by columns, rows, tokens and vocabulary, against itself whole: gradients, norms
and weights after updates.
"""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from owned import MODELS, Toy
from spawning import Row
from torch import Tensor, nn

import dolmen
from dolmen.checkpoint.store import Checkpoints
from dolmen.core import state
from dolmen.core.mesh import SINGLE, Mesh, build_mesh
from dolmen.optim import optimizer as optim
from dolmen.optim.config import OptimizerConfig
from dolmen.parallel import styles
from dolmen.training import modules

CPU, STEPS = torch.device("cpu"), 3


def trained(name: str, mesh: Mesh, zero: int, folder: str | None = None) -> dict[str, Tensor]:
    """Whole gradients of the first step, norms, and weights after the last; between them the
    module is saved and read into another, where a folder is given.
    """
    make, plan, sampled = MODELS[name]
    torch.manual_seed(0)
    module, given = make().double(), sampled()
    given = given.double() if given.is_floating_point() else given
    module = dolmen.parallelize(module, plan, mesh, zero=zero)
    optimizer = modules.adamw(module, OptimizerConfig(lr=1e-2))
    optim.prime(optimizer)
    rows = len(given) // mesh.dp.size
    mine = given[mesh.dp.rank * rows :][:rows]
    found = {}
    if mesh.grid is not None:
        before = modules.data.scale_gradients

        def seen(parameters, factor):
            for n, p in module.named_parameters():
                found.setdefault(f"gradient {n}", state.gather_full(p.grad).clone())
            before(parameters, factor)
    else:
        before = modules.data.scale_gradients

        def seen(parameters, factor):
            for n, p in module.named_parameters():
                found.setdefault(f"gradient {n}", p.grad.clone())
            before(parameters, factor)

    with mock.patch.object(modules.data, "scale_gradients", seen):
        for i in range(STEPS):
            loss = module(mine).square().sum() / len(given)
            found[f"norm {i}"] = torch.tensor(modules.step(module, optimizer, loss, mesh).grad_norm)
    if folder is not None:
        saved = Checkpoints(folder, mesh, 0)
        kept = optim.tensors(module, optimizer)
        saved.save(STEPS, kept, {}, wait=True)
        saved.finish()
        want = {n: state.gather_full(t).clone() for n, t in kept.items()}
        with torch.no_grad():
            for tensor in kept.values():
                state.local_view(tensor).zero_()
        saved.load(STEPS, kept)
        assert all(torch.equal(state.gather_full(t), want[n]) for n, t in kept.items())
    weights = {f"weight {n}": state.gather_full(p).clone() for n, p in module.named_parameters()}
    return found | weights


def compare(name: str, dp: int, tp: int, zero: int, saves: bool = False) -> tuple[float, str]:
    """The largest difference from one process, and where it is."""
    import tempfile

    folder = [tempfile.mkdtemp()] if saves else [None]
    if saves:
        dist.broadcast_object_list(folder)
    got = trained(name, build_mesh(dp, tp, CPU), zero, folder[0])
    want = trained(name, SINGLE, 0)
    assert got.keys() == want.keys()
    off = {n: float((got[n] - want[n]).abs().max() / (want[n].abs().max() + 1e-9)) for n in want}
    worst = max(off, key=lambda n: off[n])
    return off[worst], worst


def damaged(what: str) -> tuple[float, str]:
    """The same of a module in which something is forgotten."""
    wrong = {
        "copy": ("dolmen.core.collectives.copy", lambda x, axis: x),
        "sum": ("dolmen.core.collectives.all_reduce_", lambda x, axis: x),
        "partial": ("dolmen.core.collectives.sum_", lambda x, axis: x),
    }
    with mock.patch(*wrong[what]):
        return compare("llama", 1, 4, 0)


ROWS = [
    Row("toy-tp4", 4, partial(compare, "toy", 1, 4, 0, True)),
    Row("toy-dp2 tp2 zero3", 4, partial(compare, "toy", 2, 2, 3, True)),
    Row("wide-dp2 tp2 zero1", 4, partial(compare, "wide", 2, 2, 1)),
    Row("llama-tp4", 4, partial(compare, "llama", 1, 4, 0)),
    Row("llama-dp2 tp2 zero2", 4, partial(compare, "llama", 2, 2, 2)),
]
CONTROLS = [
    Row(f"without {what}", 4, partial(damaged, what)) for what in ("copy", "sum", "partial")
]


@pytest.mark.parametrize("row", [row.parameter for row in ROWS])
def test_a_module_is_as_it_was_whole(row, result):
    """float64: the order of sums."""
    difference, where = result(row)
    assert difference < 1e-9, (difference, where)


def test_the_row_of_padding_gets_no_gradient():
    """The split table replaces nn.Embedding on one process too, so rows cannot tell."""
    make, plan, draw = MODELS["llama"]
    torch.manual_seed(0)
    module = dolmen.parallelize(make(), plan, SINGLE)
    module(draw()).square().sum().backward()
    gradient = module.get_parameter("table.weight").grad
    assert gradient is not None and not gradient[0].any() and gradient[1:].any()


@pytest.mark.parametrize("row", [row.parameter for row in CONTROLS])
def test_what_is_forgotten_is_seen(row, result):
    assert result(row)[0] > 1e-3


@pytest.mark.parametrize(
    "plan, message",
    [
        ({"net3": "columns"}, "no part net3: did you mean net"),
        ({"net1": "column"}, "net1 is 'column': use one of columns"),
        ({"net1": "columns", "net*": "rows"}, "net1 is columns and rows: list it once"),
        ({"": "rows"}, "the module has no part"),
    ],
)
def test_what_is_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        dolmen.parallelize(Toy(), plan, SINGLE)


def test_sizes_kinds_and_shared_weights_are_refused():
    four = mock.Mock(size=4, rank=0)
    with pytest.raises(ValueError, match="net1 has 30 columns, not divisible by tp .4."):
        styles._check("net1", nn.Linear(10, 30), "columns", four)
    with pytest.raises(ValueError, match="n is a LayerNorm, but rows is for Linear"):
        styles._check("n", nn.LayerNorm(3), "rows", four)
    with pytest.raises(ValueError, match="max_norm"):
        styles._check("t", nn.Embedding(8, 4, max_norm=1.0), "vocabulary", four)
    tied = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="0.weight and 1.weight are one parameter"):
        dolmen.parallelize(tied, {"0": "vocabulary"}, SINGLE)
    dolmen.parallelize(tied, {"0": "vocabulary", "1": "vocabulary"}, SINGLE)
    assert tied[1].weight is tied[0].weight
