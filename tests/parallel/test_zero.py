"""Bytes of parameters, gradients, optimizer state and unsharded compute copies on a rank, at rest
and at peak, for each ZeRO stage, against closed forms. Measured on rank 0 of a fake process group
of 4, at every operation of a step.

    P   parameters in fp32, as they lie on one rank of tp, of which B a block's, R the rest's
        (embedding, final norm, head), H that of it whose gradient comes before all blocks'
        (final norm and head)
    d   dp, but 1 for ZeRO-0: what a sharded tensor is divided by (FSDP pads dim 0 to a multiple of
        dp)
"""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from backward import backward
from fakes import join_fake
from tiny_models import Flat, Tiny, build, initialize
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from dolmen.core import mesh as meshes
from dolmen.model.head import compute_logits, cross_entropy_function
from dolmen.model.layout import Layout
from dolmen.model.spec import LoraSpec
from dolmen.model.training import Training
from dolmen.optim.optimizer import OptimizerConfig, adamw
from dolmen.parallel import data

WORLD, LAYERS = 4, 3
CONFIG = Flat(
    vocab_size=71,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
)


@pytest.fixture(scope="module", autouse=True)
def world():
    join_fake(WORLD, 0)
    yield
    dist.destroy_process_group()


@dataclass(frozen=True)
class Bytes:
    """What a rank holds of each kind. Pointwise maxima are taken of each field and of the sum."""

    parameters: int
    copies: int
    gradients: int

    @property
    def all(self) -> int:
        return self.parameters + self.copies + self.gradients


def held(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind tensors, each counted once. FSDP frees a compute copy by
    emptying its storage.
    """
    storages = [getattr(t, "_local_tensor", t).untyped_storage() for t in tensors if t is not None]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def managed(module) -> list:
    """FSDP's record of each parameter of a unit: the shard, the copy gathered from it, and the
    gradients of both.
    """
    kept = vars(module._get_fsdp_state())
    # torch 2.11 has one
    groups = (
        kept["_fsdp_param_groups"] if "_fsdp_param_groups" in kept else [kept["_fsdp_param_group"]]
    )
    return [p for group in groups for p in group.fsdp_params]


def measure(parameters: list) -> Bytes:
    copies = [getattr(p, "_unsharded_param", None) for p in parameters]
    return Bytes(
        held(p._sharded_param_data for p in parameters),
        held(t for p in parameters for t in p.all_gather_outputs),
        # torch 2.15 calls one tensor by two of these names
        held(
            gradient
            for p, copy in zip(parameters, copies, strict=True)
            for gradient in (
                p.sharded_param.grad,
                p.unsharded_accumulated_grad,
                None if copy is None else copy.grad,
            )
        ),
    )


class Peak(TorchDispatchMode):
    """Measures after every operation; `take` returns what is held now and the maxima since the last
    `take`.
    """

    def __init__(self, parameters: list):
        super().__init__()
        self.parameters, self.seen = parameters, set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        self.seen.add(measure(self.parameters))
        return out

    def take(self) -> tuple[Bytes, dict[str, int]]:
        seen, self.seen = self.seen, set()
        return measure(self.parameters), {
            kind: max(getattr(b, kind) for b in seen)
            for kind in ("parameters", "copies", "gradients", "all")
        }


@dataclass(frozen=True)
class Sizes:
    """P, B, R, H of the legend for one element size, padded to a multiple of `of` along dim 0 if it
    is given.
    """

    P: int
    B: int
    R: int
    H: int


def sizes(model, itemsize: int, of: int = 1) -> Sizes:
    def size(p) -> int:
        rows, *rest = p._orig_size  # of this rank of tp
        return -(-rows // of) * of * torch.Size(rest).numel() * itemsize

    root, block = managed(model), managed(model.layers["0"])
    R, B = sum(map(size, root)), sum(map(size, block))
    return Sizes(R + LAYERS * B, B, R, sum(size(p) for p in root if p._param_fqn != "embed.weight"))


def expected(
    zero: int, dp: int, microbatches: int, model, compute: torch.dtype
) -> dict[str, object]:
    """The closed forms: held between steps, after each forward and each backward, and the maxima of
    the whole step.
    """
    d = 1 if zero == 0 else dp
    shard = sizes(model, 4, d)
    copy = sizes(model, compute.itemsize, d)
    whole = sizes(model, 4)
    flying = sizes(model, compute.itemsize)
    rest = shard.P // d
    # copies stay after forward; gradients wait for the last microbatch
    keeps, waits, many = (zero < 3, zero < 2, microbatches > 1)
    # (copies, gradients) when k blocks of the last backward have been reduced and one more is
    # ready, with those before all blocks (H), which are reduced with the rest of R; when R is
    # ready; at the end. Later microbatches add to gradients that are there.
    stages = [
        (
            copy.P - k * copy.B if keeps else copy.R + copy.B,
            flying.B + flying.H + (rest if many else k * shard.B // d),
        )
        for k in range(LAYERS)
    ]
    stages += [(copy.R, flying.R + (rest if many else LAYERS * shard.B // d)), (0, rest)]
    if many and waits:
        # summed in fp32: added where they come from (torch 2.15), or first whole beside the sum
        added = compute == torch.float32 or TorchVersion(torch.__version__) >= (2, 15)
        stages = [
            (copy.P, whole.P + (0 if added else flying.B + flying.H)),
            (0, rest),
        ]
    return {
        "at rest": Bytes(rest, 0, 0),
        "optimizer": 2 * rest,
        "after forward": Bytes(rest, copy.P if keeps else 0, 0),
        "between microbatches": Bytes(rest, copy.P if waits else 0, whole.P if waits else rest)
        if many
        else None,
        "after the last backward": Bytes(rest, 0, rest),
        "peak": {
            "parameters": rest,
            "copies": copy.P if keeps else copy.R + copy.B,
            "gradients": max(g for _, g in stages),
            "all": rest + max(c + g for c, g in stages),
        },
    }


def observed(zero: int, dp: int, microbatches: int, compute: torch.dtype):
    mesh = meshes.build_mesh(dp, WORLD // dp, torch.device("cpu"))
    model = build(CONFIG, mesh, Layout(zero=zero), compute=compute)
    initialize(model, 0)
    parameters = [p for unit in data.units(model) for p in managed(unit)]
    optimizer = adamw(model, OptimizerConfig())
    tokens = torch.zeros(1, 2, dtype=torch.long)
    out = {}
    peaks = []
    out["at rest"] = measure(parameters)
    with Peak(parameters) as peak:
        for i in range(microbatches):
            loss = model(tokens, cross_entropy_function(tokens))
            now, most = peak.take()
            if i == 0:
                out["after forward"] = now
            peaks.append(most)
            backward(loss, model, i == microbatches - 1, zero)
            now, most = peak.take()
            out["after the last backward" if i == microbatches - 1 else "between microbatches"] = (
                now
            )
            peaks.append(most)
    optimizer.step()
    optimizer.zero_grad()
    assert measure(parameters) == out["at rest"]
    out["optimizer"] = held(t for s in optimizer.state.values() for t in s.values() if t.ndim)
    out["peak"] = {kind: max(p[kind] for p in peaks) for kind in peaks[0]}
    return model, out | ({} if microbatches > 1 else {"between microbatches": None})


@pytest.mark.slow
@pytest.mark.parametrize(
    "microbatches, compute",
    (
        (1, torch.float32),
        (2, torch.float32),
        (2, torch.bfloat16),
        pytest.param(1, torch.bfloat16, marks=pytest.mark.full),
    ),
)
@pytest.mark.parametrize("dp", (4, pytest.param(1, marks=pytest.mark.full)))
@pytest.mark.parametrize("zero", range(4))
def test_bytes(zero, dp, microbatches, compute):
    model, got = observed(zero, dp, microbatches, compute)
    assert got == expected(zero, dp, microbatches, model, compute)


@pytest.mark.parametrize("zero", range(4))
def test_the_summary(zero):
    """In words, for fp32: ZeRO-0, and any dp of 1 but stage 3, hold 2 P after forward; 1 and 2 hold
    (1 + 1 / dp) P; 3 holds P / dp.
    """
    for dp in (4, 1):
        model, got = observed(zero, dp, 1, torch.float32)
        # padding: at most a row of embedding and head on each rank
        P, row = (sizes(model, 4).P, 2 * 64 * 4 * WORLD)
        share = 1 if zero == 0 else 1 / dp
        assert P * share <= got["at rest"].all <= P * share + row
        assert (
            P * (share + (zero < 3))
            <= got["after forward"].all
            <= P * (share + (zero < 3)) + 2 * row
        )


ADAPTED = [n for n, param in CONFIG.spec.params.items() if param.role == "matrix"]


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", (1, 2))
@pytest.mark.parametrize("zero", range(4))
def test_what_is_frozen_holds_no_gradient(zero, microbatches):
    """Bytes of gradients and of optimizer state with adapters are those of the adapters alone, at
    every operation of a step.
    """
    adapter = LoraSpec(rank=WORLD, alpha=1.0, targets=frozenset(ADAPTED))
    mesh = meshes.build_mesh(WORLD, 1, torch.device("cpu"))
    model = build(Tiny(CONFIG.spec, Training(adapter=adapter)), mesh, Layout(zero=zero))
    initialize(model, 0)
    records = [p for unit in data.units(model) for p in managed(unit)]
    frozen = [p for p in records if not p.sharded_param.requires_grad]
    own = [p for p in records if p.sharded_param.requires_grad]
    assert len(frozen) == len(CONFIG.spec.params) and len(own) == 2 * len(ADAPTED)
    optimizer, tokens = adamw(model, OptimizerConfig()), torch.zeros(1, 2, dtype=torch.long)
    held_at_once = []
    for watched in (frozen, own):
        with Peak(watched) as peak:
            for i in range(microbatches):
                loss = model(tokens, cross_entropy_function(tokens))
                backward(loss, model, i == microbatches - 1, zero)
            held_at_once.append(peak.take()[1]["gradients"])
        last = measure(own).gradients
        optimizer.step()
        optimizer.zero_grad()
    whole, d = 4 * sum(p._orig_size.numel() for p in own), 1 if zero == 0 else WORLD
    share, block = whole // d, whole // LAYERS  # WORLD divides all dims
    assert last == share
    # as `expected`, where nothing but blocks has any
    waits, added = zero < 2 and microbatches > 1, share if microbatches > 1 else 2 * block // d
    assert held_at_once == [0, whole if waits else block + added]
    assert held(t for s in optimizer.state.values() for t in s.values() if t.ndim) == 2 * share


@pytest.mark.parametrize("zero", range(4))
def test_inference_leaves_nothing(zero):
    """Evaluation gathers what it needs and gives it back; training may then go on."""
    model = build(CONFIG, meshes.build_mesh(4, 1, torch.device("cpu")), Layout(zero=zero))
    initialize(model, 0)
    parameters = [p for unit in data.units(model) for p in managed(unit)]
    tokens = torch.zeros(1, 2, dtype=torch.long)
    before = measure(parameters)
    with data.inference(model):
        model(tokens, compute_logits)
    assert measure(parameters) == before and model.training
    backward(model(tokens, cross_entropy_function(tokens)), model, True, zero)
    assert all(p.grad is not None for p in model.parameters())


def test_one_rank_reduces_in_place(monkeypatch):
    """With dp = 1 gradients stay in the buffers that FSDP has filled with them: a copy of all of
    them would be the sum over one rank.
    """
    filled = []

    class Recorded(data._Alone):
        def allocate(self, size, *, dtype, device):
            fills = self.filled is None
            out = super().allocate(size, dtype=dtype, device=device)
            if fills:
                filled.append(out.untyped_storage().data_ptr())
            return out

    monkeypatch.setattr(data, "_Alone", Recorded)
    model = build(CONFIG, meshes.build_mesh(1, WORLD, torch.device("cpu")), Layout(zero=1))
    initialize(model, 0)
    tokens = torch.zeros(1, 2, dtype=torch.long)
    backward(model(tokens, cross_entropy_function(tokens)), model, True, 1)
    held = {p.grad.to_local().untyped_storage().data_ptr() for p in model.parameters()}
    assert held == {*filled} and len(filled) == LAYERS + 1
