"""What the metrics say of routers is the same on every layout, and bias balancing does balance."""

import pytest
import torch
from spawning import run_spawned
from tiny_models import Flat, build, initialize

from dolmen.core import device, state
from dolmen.core.mesh import SINGLE
from dolmen.data.batch import Batch
from dolmen.model.layout import Layout
from dolmen.optim.optimizer import OptimizerConfig, adamw
from dolmen.training.state import TrainState
from dolmen.training.step import optimizer_step

ROWS, LENGTH, STEPS = 8, 16, 3
MODEL = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    num_experts=8,
    num_experts_per_tok=2,
    dense_layers=(1,),
    initializer_range=0.3,
    router_z_loss_coef=0.01,
    router_aux_loss_coef=0.01,
)
LAYOUTS = (
    Layout(dp=2, cp=2, ep=4, zero=1, recompute="full"),
    Layout(dp=2, tp=2, ep=2, zero=3, sequence_parallel=True),
    Layout(dp=2, pp=2, ep=2, zero=0),
)


def batch(rank: int, size: int, step: int = 0) -> Batch:
    windows = torch.randint(
        0, 32, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step)
    )
    return Batch.from_windows(windows[rank * ROWS // size : (rank + 1) * ROWS // size].numpy())


def train(
    mesh, layout: Layout, steps: int = STEPS, lr: float = 1e-3, micro: int = 2, **model
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The routers' numbers of each step, of microbatches of `micro` rows, and in the end their
    biases, whole.
    """
    schedule = layout.make_schedule(ROWS, micro)
    decoder = build(Flat(**MODEL | model), mesh, layout, schedule)
    initialize(decoder, 0)
    optimizer = OptimizerConfig(lr=lr, schedule="constant")
    train = TrainState(decoder, adamw(decoder, optimizer), optimizer, steps, layout.zero, schedule)
    reported = [
        optimizer_step(train, batch(mesh.dp.rank, mesh.dp.size, step), mesh).router
        for step in range(steps)
    ]
    return reported, {
        name: state.gather_full(p).clone()
        for name, p in decoder.named_parameters()
        if name.endswith("router.bias")
    }


def over_layouts() -> list[tuple]:
    """Of each layout what `train` gives, and how often this rank has read the device."""
    metrics, read = [], device.read_back
    for layout in LAYOUTS:
        reads = []
        device.read_back = lambda x, *rows, reads=reads: reads.append(x) or read(x, *rows)
        mesh = layout.mesh(torch.device("cpu"))
        metrics.append(
            (*train(mesh, layout, router_balance="bias", router_bias_rate=0.02), len(reads))
        )
    device.read_back = read
    return metrics


def test_no_layout_changes_numbers_or_biases():
    want, biases = train(SINGLE, Layout(dp=1), router_balance="bias", router_bias_rate=0.02)
    assert list(biases) == ["layers.0.mlp.router.bias", "layers.2.mlp.router.bias"] and all(
        b.abs().max() > 0.01 for b in biases.values()
    )
    for (got, moved, reads), again, layers in zip(
        run_spawned(4, over_layouts), (2, 1, 1), (2, 2, 1), strict=True
    ):
        # a step's own, and of two microbatches, with ep over 1, each sparse layer's, run once or
        # again
        assert reads == STEPS * (1 + 2 * again * layers)
        for mine, other in zip(got, want, strict=True):
            assert mine["router/max_load"] == other["router/max_load"]  # whole numbers of tokens
            for name in ("router/aux_loss", "router/z_loss"):
                assert abs(mine[name] / other[name] - 1) < 1e-5
        # a stage has its own
        assert moved and all(torch.equal(b, biases[name]) for name, b in moved.items())


@pytest.mark.slow
def test_bias_balances_and_a_loss_does():
    loads = {}
    for kind in ("none", "bias", "loss"):
        metrics, _ = train(
            SINGLE,
            Layout(dp=1),
            steps=60,
            lr=3e-3,
            micro=ROWS,
            router_balance=kind,
            router_bias_rate=0.01,
            router_aux_loss_coef=0.2,
        )
        loads[kind] = sum(t["router/max_load"] for t in metrics[-10:]) / 10
    assert loads["none"] > 3 and loads["bias"] < 2 and loads["loss"] < 2, loads  # 3.8, 1.7 and 1.6


def test_a_dense_model_tells_nothing():
    assert train(SINGLE, Layout(dp=1), steps=1, num_experts=0, dense_layers=())[0] == [{}]


def test_a_skipped_step_moves_no_bias_and_is_forgotten():
    layout = Layout(dp=1)
    decoder = build(Flat(**MODEL, router_balance="bias", router_bias_rate=0.02), SINGLE, layout)
    initialize(decoder, 0)
    with torch.no_grad():
        decoder.final_norm.weight.fill_(float("inf"))
    optimizer = OptimizerConfig()
    state_ = TrainState(
        decoder, adamw(decoder, optimizer), optimizer, 1, 0, layout.make_schedule(ROWS, ROWS)
    )
    assert optimizer_step(state_, batch(0, 1), SINGLE).skipped
    assert not decoder.layers["0"].mlp.router.bias.any()
