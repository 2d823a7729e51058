"""Mixed precision and the policies of steps, each against its definition: the loss scale goes in
and comes out again, the router computes in fp32, and what skips a step or moves the scale is a
plain loop.
"""

import math
import random
from dataclasses import replace
from statistics import median

import pytest
import tinyrun
import torch
from tiny_models import Flat, build, initialize

import dolmen
from dolmen.core import mesh as meshes
from dolmen.core import state as states
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.data.batch import Batch
from dolmen.model.layout import Layout
from dolmen.model.mlp import Router
from dolmen.ops import moe
from dolmen.optim.optimizer import LossScale, OptimizerConfig, adamw, prime
from dolmen.parallel.simulation import make_schedule
from dolmen.training import loop, run
from dolmen.training.hooks import SKIPS_SCALED
from dolmen.training.state import LEAST, WINDOW, SpikePolicy, TrainState
from dolmen.training.step import StepMetrics, optimizer_step

material, one_thread = tinyrun.material, tinyrun.one_thread

DENSE = Flat(
    vocab_size=71,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.1,
)
SPARSE = replace(
    DENSE,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    router_aux_loss_coef=0.5,
    router_z_loss_coef=0.1,
)
MODELS = {"dense": DENSE, "experts": SPARSE}


def make(
    config: Flat, mesh: Mesh = SINGLE, compute: torch.dtype = torch.float32, **options
) -> TrainState:
    model = build(config, mesh, Layout(zero=1), compute=compute)
    initialize(model, 0)
    settings = OptimizerConfig(
        **{"lr": 1e-2, "schedule": "constant", "weight_decay": 0.0, **options}
    )
    optimizer = adamw(model, settings)
    prime(optimizer)
    return TrainState(model, optimizer, settings, 100, 1, make_schedule("1f1b", 1, 2))


def batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch.from_windows(torch.randint(71, (4, 9), generator=generator).numpy())


def values(state: TrainState) -> dict[str, torch.Tensor]:
    return {n: states.local_view(p).detach().clone() for n, p in state.model.named_parameters()}


@pytest.mark.parametrize("clip", (0.25, 0.0))
@pytest.mark.parametrize("name", MODELS)
def test_a_scale_of_two_to_the_k_changes_nothing(name, clip):
    """A product with a power of two is exact, so the scaled step is the step, bit by bit: loss,
    norm, and, as eps is as large as a gradient, an update that a gradient scaled wrong would
    change.
    """
    found = []
    for scale in (1.0, 2.0**12):
        state = make(MODELS[name], eps=1.0, clip=clip)
        before = values(state)
        state.scale = LossScale(False, scale)
        reported = [optimizer_step(state, batch(seed), SINGLE) for seed in (0, 1)]
        found.append((reported, values(state)))
    (reported, want), (scaled_told, got) = found
    assert scaled_told == reported and reported[0].grad_norm > 0.25
    for n, value in want.items():
        assert torch.equal(got[n], value), (n, (got[n] - value).abs().max())
        assert not torch.equal(value, before[n]), n


def test_the_auxiliary_losses_reach_the_gradient():
    """Or the test above would say nothing of them."""
    norms = set()
    for balance, z in ((0.5, 0.1), (0.0, 0.1), (0.5, 0.0)):
        config = replace(SPARSE, router_aux_loss_coef=balance, router_z_loss_coef=z)
        norms.add(optimizer_step(make(config), batch(), SINGLE).grad_norm)
    assert len(norms) == 3


def test_a_spike_leaves_the_scale_and_an_overflow_halves_it():
    state = make(DENSE)
    state.scale, state.spike = LossScale(True, 2.0**8), SpikePolicy(2.0)
    state.spike.load([1e-3] * LEAST)
    before = values(state)
    spike = optimizer_step(state, batch(), SINGLE)
    assert spike.skipped and math.isfinite(spike.grad_norm)
    assert (state.scale.value, state.scale.good_steps) == (2.0**8, 1)
    state.scale.value = 2.0**126  # the scaled loss is over the largest fp32
    overflow = optimizer_step(state, batch(), SINGLE)
    assert overflow.skipped and not math.isfinite(overflow.grad_norm)
    assert (state.scale.value, state.scale.good_steps) == (2.0**125, 0)
    assert all(torch.equal(value, before[n]) for n, value in values(state).items())


@pytest.fixture
def grid():
    """The mesh of a group of this process alone: without a group nothing computes in bf16."""
    with meshes.process_group_context(None, torch.device("cpu")):
        yield meshes.build_mesh(1, 1, torch.device("cpu"))


def test_the_router_computes_in_fp32_under_bf16(grid, monkeypatch):
    """Its input is bf16, as all activations are; its weight is the fp32 master, and its logits are
    their fp32 product, which bf16 does not hold. The rest of a block computes in bf16.
    """
    state, seen, inputs, route = make(SPARSE, grid, torch.bfloat16), [], [], moe.route
    others, grouped = set(), moe.grouped_linear

    def noting(logits, *args, **choice):
        seen.append(logits.detach())
        return route(logits, *args, **choice)

    def noting_rows(rows, weight, counts):
        others.update((rows.dtype, weight.dtype))
        return grouped(rows, weight, counts)

    def before(router, args):
        weight = states.local(router.weight).detach()
        inputs.append((args[0].detach(), weight.clone()))

    monkeypatch.setattr(moe, "route", noting)
    monkeypatch.setattr(moe, "grouped_linear", noting_rows)
    for module in state.model.modules():
        if isinstance(module, Router):
            module.register_forward_pre_hook(before)
    optimizer_step(state, batch(), grid)
    assert len(seen) == len(inputs) == 4 and others == {torch.bfloat16}  # 2 layers, 2 microbatches
    for logits, (x, weight) in zip(seen, inputs, strict=True):
        assert x.dtype == torch.bfloat16
        assert logits.dtype == weight.dtype == torch.float32
        assert (logits - x.float() @ weight.T).abs().max() < 1e-6  # rounding; bf16's is 1e-2
        assert not torch.equal(weight, weight.bfloat16().float())
        assert (logits.bfloat16().float() == logits).float().mean() < 0.1
    at_rest = {p.dtype for p in state.model.parameters()}
    moments = {v.dtype for s in state.optimizer.state.values() for v in s.values()}
    assert at_rest == moments == {torch.float32}


def test_the_scale_is_a_plain_loop():
    """Doubled after `patience` steps without overflow since it last changed, halved by an overflow,
    never under 1.
    """
    for seed in range(20):
        chance = random.Random(seed)
        patience, scale = chance.randint(1, 9), LossScale(True, 2.0**6)
        scale.patience = patience
        value, run_of_good = 2.0**6, 0
        for _ in range(300):
            finite = chance.random() > 0.15
            scale.update(finite)
            run_of_good = run_of_good + 1 if finite else 0
            if not finite:
                value = max(1.0, value * 0.5)
            elif run_of_good == patience:
                value, run_of_good = value * 2.0, 0
            assert (scale.value, scale.good_steps) == (value, run_of_good)


def test_a_spike_is_a_plain_loop():
    """Over `factor` times the median of the last 64 finite norms, spikes among them, once there are
    16.
    """
    assert (WINDOW, LEAST) == (64, 16)
    for seed in range(20):
        chance, history = random.Random(seed), []
        factor = chance.uniform(1.1, 4)
        policy = SpikePolicy(factor)
        for _ in range(300):
            norm = chance.choice((math.nan, math.inf, *[chance.lognormvariate(0, 1.5)] * 30))
            usual = history[-64:]
            spike = len(usual) >= 16 and norm > factor * median(usual)
            assert policy.allow(norm) == (math.isfinite(norm) and not spike)
            if math.isfinite(norm):
                history.append(norm)


def skipping(monkeypatch, pattern) -> None:
    """Let step i be told as skipped where pattern(i)."""
    step = loop.optimizer_step

    def reported(state, *args) -> StepMetrics:
        return replace(step(state, *args), skipped=bool(pattern(state.step - 1)))

    monkeypatch.setattr(loop, "optimizer_step", reported)
    monkeypatch.setattr(run.mfu, "matmul_peak", lambda *_: 1e12)


def test_so_many_steps_skipped_in_a_row_end_a_run(material, tmp_path, monkeypatch):
    """Two, one that is not, two, one that is not, three: the last of three ends it."""
    skipping(monkeypatch, lambda i: "110110111111"[i] == "1")
    options = {"train": {"steps": 12, "max_skipped_steps": 3}, "log": {"validate_every": 0}}
    with pytest.raises(RuntimeError, match="the last 3 steps, up to step 9, were skipped"):
        dolmen.train(str(material.file), out=tmp_path / "run", **options)


def test_the_search_for_a_scale_may_skip_forty(material, tmp_path, monkeypatch):
    skipping(monkeypatch, lambda i: True)
    options = {
        "train": {"steps": 60, "dtype": "float16", "sequence_length": 4},
        "log": {"validate_every": 0},
    }
    assert SKIPS_SCALED == 40
    with pytest.raises(RuntimeError, match="the last 40 steps, up to step 40, were skipped"):
        dolmen.train(str(material.file), out=tmp_path / "run", **options)
