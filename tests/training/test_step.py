"""One update: clipping, what is not finite, and arithmetic in half precision over fp32 masters, on
one rank and on two.
"""

import math

import pytest
import tinyrun
import torch
import torch.distributed as dist
from tiny_models import Flat, build, initialize

from dolmen.core import mesh as meshes
from dolmen.core import state as states
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.data.batch import IGNORED, Batch
from dolmen.model.head import cross_entropy_function
from dolmen.model.layout import Layout
from dolmen.optim.optimizer import DTYPES, AdamW, LossScale, OptimizerConfig, adamw, prime
from dolmen.parallel import data
from dolmen.parallel.simulation import make_schedule
from dolmen.training.state import TrainState
from dolmen.training.step import optimizer_step

one_thread = tinyrun.one_thread

CONFIG = Flat(
    vocab_size=71,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.1,
)
ROWS, LENGTH = 4, 8


def make(mesh: Mesh, zero: int = 1, dtype: str = "float32", **options) -> TrainState:
    model = build(CONFIG, mesh, Layout(zero=zero), compute=DTYPES[dtype])
    initialize(model, 0)
    config = OptimizerConfig(**{"lr": 1e-2, "schedule": "constant", "weight_decay": 0.0, **options})
    optimizer = adamw(model, config)
    prime(optimizer)
    return TrainState(
        model,
        optimizer,
        config,
        100,
        zero,
        make_schedule("1f1b", 1, 1),
        scale=LossScale.from_dtype(dtype),
    )


def update(state: TrainState, batch: Batch, mesh: Mesh, microbatch_size: int, **options):
    """One step in microbatches of so many sequences."""
    state.schedule = make_schedule("1f1b", 1, len(batch.tokens) // microbatch_size)
    return optimizer_step(state, batch, mesh, **options)


def batch(mesh: Mesh = SINGLE, seed: int = 0) -> Batch:
    windows = torch.randint(
        71, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    ).numpy()
    return Batch.from_windows(windows).split(mesh.dp.size)[mesh.dp.rank]


def values(state: TrainState) -> dict[str, torch.Tensor]:
    """This rank's part of everything an update changes."""
    out = {n: states.local_view(p).clone() for n, p in state.model.named_parameters()}
    for n, p in state.model.named_parameters():
        out |= {
            f"{kind} {n}": states.local_view(state.optimizer.state[p][kind]).clone()
            for kind in ("exp_avg", "exp_avg_sq", "step")
        }
    return out


def same(a: dict, b: dict) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


@pytest.fixture
def updates(monkeypatch):
    """The norm of the gradient that each update is made of, by the optimizer that makes it."""
    seen, step = [], AdamW.step

    def observed(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        seen.append(data.gradient_norm(parameters, SINGLE).item())
        return step(self)

    monkeypatch.setattr(AdamW, "step", observed)
    return seen


@pytest.mark.parametrize("clip", (0.25, 0.0, 100.0))
def test_clipping(updates, clip):
    """A norm over `clip` is scaled to it, one under it is left alone, 0 leaves all alone; what is
    told is the norm before.
    """
    metrics = update(make(SINGLE, clip=clip), batch(), SINGLE, 2)
    assert (
        metrics.grad_norm > 0.5
        and not metrics.skipped
        and metrics.lr == 1e-2
        and metrics.tokens == ROWS * LENGTH
    )
    assert updates == [pytest.approx(0.25 if clip == 0.25 else metrics.grad_norm, rel=1e-5)]


def test_gradients_do_not_outlive_their_step():
    """The second step's gradient is its own, and a clipped direction is the same direction."""
    state = make(SINGLE)
    first = update(state, batch(), SINGLE, 4)
    assert (
        all(p.grad is None for p in state.model.parameters())
        and state.step == 1
        and state.tokens == ROWS * LENGTH
    )
    again = make(SINGLE, lr=0.0)
    assert [update(again, batch(), SINGLE, 4).grad_norm for _ in range(2)] == [first.grad_norm] * 2


def test_the_loss_is_of_real_tokens():
    """Rows without labels, and labels that are ignored, change neither the mean nor what a token
    weighs in the gradient.
    """
    whole = batch()
    few = Batch(
        whole.tokens,
        torch.where(
            torch.arange(LENGTH) < torch.tensor([[8], [3], [8], [0]]), IGNORED, whole.labels
        ),
    )
    state = make(SINGLE)
    want = state.model(few.tokens, cross_entropy_function(few.labels)) / 13
    want.backward()
    norm = torch.cat([p.grad.flatten() for p in state.model.parameters()]).double().norm().item()
    for size in (1, 2, 4):
        metrics = update(make(SINGLE), few, SINGLE, size)
        assert (
            metrics.tokens == 13
            and metrics.loss == pytest.approx(want.item(), rel=1e-6)
            and metrics.grad_norm == pytest.approx(norm, rel=1e-5)
        )
    with pytest.raises(ValueError, match="step 0: no token of the global batch has a loss"):
        update(state, Batch(whole.tokens, torch.full_like(whole.labels, IGNORED)), SINGLE, 4)
    assert all(p.grad is None for p in state.model.parameters())  # nothing for the next step


@pytest.mark.parametrize("bad", (math.inf, math.nan))
def test_a_step_that_is_not_finite_changes_nothing(bad):
    """In fp32 too: the parameters, the moments and AdamW's own count stay bitwise; the batch is
    passed over.
    """
    state = make(SINGLE)
    update(state, batch(), SINGLE, 4)
    before = values(state)
    hook = state.model.layers["1"].mlp.up.weight.register_hook(lambda g: g + bad)
    metrics = update(state, batch(), SINGLE, 4)
    hook.remove()
    assert (
        metrics.skipped
        and not math.isfinite(metrics.grad_norm)
        and same(before, values(state))
        and state.step == 2
    )
    assert not update(state, batch(), SINGLE, 4).skipped and not same(before, values(state))


@pytest.fixture
def alone():
    """A mesh of one rank with a group: without one nothing is cast (parallel/data.py)."""
    with meshes.process_group_context(None, torch.device("cpu")):
        yield meshes.build_mesh(1, 1, torch.device("cpu"))


def test_fp16_overflow_halves_the_scale_and_patience_doubles_it(alone):
    """A scale of 2^40 overflows fp16 until it has been halved often enough; then it is doubled
    every third step, until...
    """
    state = make(alone, dtype="float16")
    state.scale = LossScale(True, 2.0**40, patience=3)
    before, skipped, scales = values(state), [], []
    while not skipped or skipped[-1]:
        if skipped:
            assert same(before, values(state)), "a skipped step changed something"
        skipped.append(update(state, batch(), alone, 4).skipped)
        scales.append(state.scale.value)
    count = len(skipped) - 1
    assert (
        15 < count < 35
        and scales == [2.0 ** (40 - min(i + 1, count)) for i in range(len(skipped))]
        and not same(before, values(state))
    )
    while not update(state, batch(), alone, 4).skipped:
        scales.append(state.scale.value)
    good = scales[count:]  # of the steps that were made, the first included
    assert (
        good == [good[0] * 2 ** ((i + 1) // 3) for i in range(len(good))]
        and state.scale.value == good[-1] / 2
    )


@pytest.mark.parametrize("dtype, rounding", [("bfloat16", 2**-8), ("float16", 2**-10)])
def test_half_precision_over_fp32_masters(alone, dtype, rounding):
    """Loss and gradient norm are off fp32 by rounding of the type, not by nothing; masters and
    moments stay fp32, and keep an update that the type itself would lose.
    """
    want, half = make(alone, lr=1e-6), make(alone, dtype=dtype, lr=1e-6)
    before = values(half)
    metrics, told_want = (update(s, batch(), alone, 2) for s in (half, want))
    assert rounding / 1000 < abs(metrics.loss / told_want.loss - 1) < rounding
    assert rounding / 1000 < abs(metrics.grad_norm / told_want.grad_norm - 1) < 4 * rounding
    after = values(half)
    assert {t.dtype for t in after.values()} == {torch.float32}
    weight = "layers.0.mlp.up.weight"
    lost = before[weight].to(DTYPES[dtype]) == after[weight].to(DTYPES[dtype])
    assert (before[weight] != after[weight]).float().mean() > 0.95 and lost.float().mean() > 0.8
    # Adam's first step is lr
    assert (after[weight] - before[weight]).abs().max() == pytest.approx(1e-6, rel=0.1)


def overflow_on_one_rank():
    """One element of the gradient that rank 1 alone holds is not finite, at every layout of two
    ranks. Of each rank: whether it skipped that step, the scale, whether nothing changed, whether
    it skipped the next step, steps made.
    """
    out = {}

    def spoil(action):
        if action == ("B", 0, 0) and mesh.rank == 1:
            states.local_view(state.model.layers["1"].mlp.up.weight.grad).view(-1)[-1] = math.inf

    for dp, tp, zero in ((2, 1, 0), (2, 1, 1), (2, 1, 2), (2, 1, 3), (1, 2, 1)):
        mesh = meshes.build_mesh(dp, tp, torch.device("cpu"))
        state = make(mesh, zero)
        state.scale = LossScale(True, 8.0)
        update(state, batch(mesh), mesh, 2)
        before = values(state)
        metrics = update(state, batch(mesh, 1), mesh, ROWS // dp, observe=spoil)
        found = (
            metrics.skipped,
            state.scale.value,
            same(before, values(state)),
            update(state, batch(mesh, 2), mesh, 2).skipped,
            (state.step, state.tokens),
        )
        everyone = [None, None]
        dist.all_gather_object(everyone, found)
        out[f"dp{dp} tp{tp} zero{zero}"] = everyone
    return out


def test_an_overflow_on_one_rank_is_everyones(spawn):
    """And tokens, those of a skipped step too, are counted over all of dp and once of tp."""
    found = spawn(2)(overflow_on_one_rank)
    want = (True, 4.0, True, False, (3, 3 * ROWS * LENGTH))
    assert found == {layout: [want] * 2 for layout in found} and len(found) == 5
