"""DTensor at rest, plain tensors in compute: what a step and an update ask of DTensor, and how
gradients cross fsdp, counted on rank 0 of a fake process group of 8.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from fakes import join_fake
from tiny_models import Flat, build, initialize
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dolmen.core import mesh as meshes
from dolmen.model.head import cross_entropy_function
from dolmen.model.layout import Layout
from dolmen.optim.optimizer import OptimizerConfig, adamw, prime
from dolmen.parallel import data

WORLD, HIDDEN = 8, 32
TOKENS = torch.zeros(1, 8, dtype=torch.long)


@pytest.fixture(scope="module", autouse=True)
def world():
    join_fake(WORLD, 0)
    yield
    dist.destroy_process_group()


class Seen(TorchDispatchMode):
    """Counts operators; those that DTensor is asked to carry out as `DTensor`."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        wrapped = any(issubclass(t, DTensor) for t in types)
        self.count["DTensor" if wrapped else f"{op.namespace}.{op.__name__.split('.')[0]}"] += 1
        return op(*args, **(kwargs or {}))


def made(layers: int, zero: int, dp: int, sequence: bool = True, **options):
    config = Flat(
        vocab_size=71,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=8,
        head_dim=4,
        **{"num_key_value_heads": 8} | options,
    )
    mesh = meshes.build_mesh(dp, WORLD // dp, torch.device("cpu"))
    model = build(config, mesh, Layout(sequence_parallel=sequence, zero=zero))
    initialize(model, 0)
    return model


def step(model, zero: int, microbatches: int) -> None:
    reduction = data.Reduction(model, zero, split_backward=False)
    for i in range(microbatches):
        last = i == microbatches - 1
        loss = model(TOKENS, cross_entropy_function(TOKENS))
        reduction.prepare_backward([model], last, last)
        loss.backward()


def seen(layers: int, zero: int, microbatches: int, **options) -> Counter:
    """Of a step's forward and backward, the second: the first makes what FSDP keeps."""
    model = made(layers, zero, 2, **options)
    step(model, zero, microbatches)
    model.zero_grad()
    with Seen() as mode:
        step(model, zero, microbatches)
    return mode.count


@pytest.mark.parametrize("zero", range(4))
def test_compute_asks_nothing_of_dtensor(zero):
    """Not per layer, and not per microbatch: where DTensors are gathered it is 9 operators per
    layer and microbatch, one per weight, beside what needs no operator.
    """
    assert seen(3, zero, 2)["DTensor"] == 0


def test_at_rest_everything_is_a_dtensor():
    """Parameters and gradients lie on fsdp and tp, and are there again after a step; what was
    gathered was plain, of this rank's part.
    """
    model, shapes = made(1, 1, 2), {}
    before = {n: (p.placements, p.device_mesh) for n, p in model.named_parameters()}

    def note(*_):
        weight = model.layers["0"].attn.q.weight
        shapes[type(weight)] = tuple(weight.shape)

    model.layers["0"].register_forward_pre_hook(note)
    step(model, 1, 2)
    assert shapes == {torch.nn.Parameter: (HIDDEN // 4, HIDDEN)}
    for n, p in model.named_parameters():
        assert isinstance(p, DTensor) and isinstance(p.grad, DTensor), n
        assert before[n] == (p.placements, p.device_mesh) == (p.grad.placements, p.device_mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "per_layer"),
    (
        (dict(), 2),  # two norms
        (dict(qk_norm=True), 4),
        (dict(num_key_value_heads=1), 4),  # whole k and v
        (dict(sequence=False), 0),
    ),
    ids=str,
)
@pytest.mark.parametrize("zero", (1, 2))
def test_partial_gradients_are_summed_once_per_reduction(options, per_layer, zero):
    """Of two microbatches: with the last under ZeRO 1, with each under ZeRO 2. Without sequence
    parallelism the sums of a layer are those of its input gradient and of its output, twice.
    """
    of_activations = 0 if options.get("sequence", True) else 4 * 2
    two, three = (
        seen(layers, zero, 2, **options)["_c10d_functional.all_reduce_"] for layers in (2, 3)
    )
    assert three - two == per_layer * zero + of_activations


@pytest.mark.parametrize("device", ("cpu", "cuda"))
@pytest.mark.parametrize("zero", range(4))
def test_gradients_are_summed_and_never_divided(zero, device, monkeypatch):
    """By a plain sum whatever the device: no factor for NCCL to multiply by, no pass that divides
    by 1, no copy for it.
    """
    model, mesh, factors = (
        torch.nn.Linear(8, 8, device="meta"),
        meshes.build_mesh(8, 1, torch.device("cpu")),
        [],
    )
    data.shard_model(model, (), replace(mesh, device=torch.device(device)), zero, torch.float32)
    model.to_empty(device="cpu")
    find = _fsdp_collectives._get_gradient_divide_factors
    monkeypatch.setattr(
        _fsdp_collectives,
        "_get_gradient_divide_factors",
        lambda *args: factors.append(find(*args)) or factors[-1],
    )
    loss = model(torch.ones(2, 8)).sum()
    data.Reduction(model, zero, False).prepare_backward([model], True, True)
    with Seen() as mode:
        loss.backward()
    assert [f[2:] for f in factors] == [(dist.ReduceOp.SUM, dist.ReduceOp.SUM)]
    assert not [op for op in mode.count if "div" in op or "mul" in op], mode.count


def launches(squares: str, layers: int) -> Counter:
    """Of the norm, the clipping and the update of a model that fsdp and tp share."""
    mesh = meshes.build_mesh(2, WORLD // 2, torch.device("cpu"))
    model = made(layers, 1, 2)
    optimizer = adamw(model, OptimizerConfig())
    prime(optimizer)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with Seen() as mode:
        norm = data.gradient_norm(model.parameters(), mesh, None, squares)
        data.scale_gradients(model.parameters(), 1 / norm)
        optimizer.step()
    return mode.count


def test_an_update_is_the_same_few_launches_for_any_number_of_parameters():
    """Where the norm is torch's: one call per number of ranks that share a shard, one that scales,
    one for each of the optimizer's groups. On a CPU the norm visits every parameter, and of each
    its whole pieces at once, then what is left.
    """
    few, many = launches("whole", 1), launches("whole", 4)
    assert few == many and many["DTensor"] == 0
    assert many["aten._foreach_norm"] == 2  # of what tp splits, and of norms
    assert many["aten._foreach_mul_"] == 1 and many["aten._fused_adamw_"] == 2
    each = launches("pieces", 4)
    assert each["aten.linalg_vector_norm"] == 2 * 39 and each["DTensor"] == 0


def test_the_norm_does_not_depend_on_how_squares_are_added():
    """On rank 0, whose own part alone is added up here: weights of 1 and of 1 / tp."""
    mesh = meshes.build_mesh(2, WORLD // 2, torch.device("cpu"))
    model = made(2, 1, 2)
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 1.0 + i % 3)
    tied = model.layers["1"].attn_norm.weight
    want = sum(
        part.double().square().sum() * (1 if p.ndim > 1 else 1 / 4) / (2 if p is tied else 1)
        for p in model.parameters()
        for part in [p.grad._local_tensor]
    ).sqrt()
    for squares in ("pieces", "whole"):
        got = data.gradient_norm(model.parameters(), mesh, tied, squares)
        assert abs(got / want - 1) < 1e-6, squares  # fp32 norms of each tensor
