"""Context parallelism against attention of one process in float64, forward and backward, over axes
of 2 and 4 ranks; what it sends, in which order, and what it keeps, on rank 0 of a fake process
group.
"""

import itertools
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import flash_kernel
import pytest
import torch
import torch.distributed as dist
from fakes import join_fake
from spawning import run_spawned
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dolmen.core import collectives, transfers
from dolmen.core.mesh import Axis
from dolmen.ops.attention import Attend, Documents, blockwise, reference
from dolmen.ops.attention.score_bias import alibi_slopes
from dolmen.ops.elementwise import Dropout, Noise
from dolmen.parallel import context
from dolmen.parallel.context import ContextParallel

LENGTH, HEADS, SIZE, WORLD = 96, 4, 8, 16
ALONE = ContextParallel(Axis("cp", 1, 0))
PREFIX = Attend(mask="prefix")
SINKS = torch.tensor([2.0, -1.0, 0.0, 5.0], dtype=torch.float64)  # of each head
ENDS = ([], [0, 40, 41, 95], [95])  # last tokens of the documents of each sequence


@dataclass(frozen=True)
class Case:
    """Attention of the four heads; chunks have 12 tokens over 4 ranks and 24 over 2."""

    kv_heads: int = 2
    attend: Attend = Attend()
    documents: bool = False
    values: int = SIZE
    """Numbers of a value, of a query and key SIZE."""
    prefixes: bool = False
    sinks: bool = False

    @property
    def whole(self) -> Documents | None:
        """Of all ranks."""
        if not self.documents:
            return None
        return Documents.from_starts(starts(), reach() if self.prefixes else None)


CASES = {
    "plain": Case(4),
    "grouped": Case(2),
    "one key head": Case(1),
    "window in a chunk": Case(2, Attend(7)),
    "window of chunks": Case(2, Attend(30)),
    "documents": Case(documents=True),
    "documents and window": Case(1, Attend(17), documents=True),
    "another scale": Case(attend=Attend(scale=0.2)),
    "long values": Case(values=2 * SIZE),
    "slopes": Case(attend=Attend(slopes=alibi_slopes(6), first_head=2)),
    "slopes, documents and window": Case(4, Attend(30, slopes=alibi_slopes(4)), documents=True),
    "soft cap": Case(1, Attend(soft_cap=1.5)),
    "prefix": Case(attend=PREFIX, documents=True, prefixes=True),
    "prefix and window": Case(4, PREFIX._replace(window=20), documents=True, prefixes=True),
    "sinks": Case(sinks=True),
    "sinks, documents and window": Case(1, Attend(17), documents=True, sinks=True),
    "all at once": Case(2, Attend(50, 0.3, 2.0, alibi_slopes(4)), documents=True, values=SIZE // 2),
}
FLASH = [n for n, case in CASES.items() if case.attend.plain and not case.prefixes]
# relative to the largest number. fp32: each of a few hundred terms is rounded by 2^-24, as in one
# process. fp64: the same, by 2^-53
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}


def inputs(
    kv_heads: int,
    dtype: torch.dtype = torch.float64,
    length: int = LENGTH,
    batch: int = 3,
    values: int = SIZE,
) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, whole."""
    g = torch.Generator().manual_seed(kv_heads)
    return [
        torch.randn(batch, length, h, size, generator=g, dtype=torch.float64).to(dtype)
        for h, size in ((HEADS, SIZE), (kv_heads, SIZE), (kv_heads, values), (HEADS, values))
    ]


def starts() -> torch.Tensor:
    at = torch.arange(LENGTH)
    return torch.stack(
        [
            torch.stack(
                [torch.zeros_like(at), *(torch.where(at > e, e + 1, 0) for e in ends)]
            ).amax(0)
            for ends in ENDS
        ]
    )


def reach() -> torch.Tensor:
    """Prefixes of all, of a part that ends on another rank or here, of a token, and of none."""
    at, started = torch.arange(LENGTH), starts()
    ends = torch.stack(
        (at * 0 + 71, started[1] + torch.where(started[1] < 42, 30, 33), started[2] + 1)
    )
    ends[1, :41], ends[1, 41:42] = 30, 41
    return ends


def gradients(attend, q, k, v, g, *more) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v, *more)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


@cache
def definition(name: str) -> list[torch.Tensor]:
    """Output and gradients of one process, in float64, with every score in one matrix."""
    case = CASES[name]
    attend = case.attend.with_documents(case.whole)
    return gradients(
        lambda q, k, v, *sinks: reference.definition(q, k, v, attend._replace(sinks=first(sinks))),
        *inputs(case.kv_heads, values=case.values),
        *[SINKS] * case.sinks,
    )


def first(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    return tensors[0] if tensors else None


def error(name: str, cp: ContextParallel, dtype: torch.dtype, wrap=lambda f: f) -> float:
    """Largest difference from the definition on this rank, relative to the largest number: of
    output, dq, dk and dv.
    """
    case = CASES[name]
    attend = case.attend.with_documents(None if case.whole is None else cp.documents(case.whole))
    got = gradients(
        wrap(lambda q, k, v, *sinks: cp.attention(q, k, v, attend._replace(sinks=first(sinks)))),
        *(cp.split(t, 1) for t in inputs(case.kv_heads, dtype, values=case.values)),
        *[SINKS.to(dtype)] * case.sinks,
    )
    assert all(t.dtype == dtype for t in got)
    want = definition(name)
    split = [cp.split(t, 1) for t in want[:4]]
    if case.sinks:  # whole on every rank, and its gradient a part of the sum
        got[4] = collectives.reduce_scalar(got[4], cp.axis)
        split.append(want[4])
    return max(
        float((a.double() - b).abs().max() / whole.abs().max())
        for a, b, whole in zip(got, split, want, strict=True)
    )


def dropped(cp: ContextParallel) -> list[torch.Tensor]:
    """Attention with dropout, with documents: the same elements fall out on any number of ranks."""

    noise = Noise(torch.tensor(7), torch.arange(3) + 5)
    attend = Attend(50, 0.3, 2.0, alibi_slopes(6), first_head=2).with_documents(
        cp.documents(Documents.from_starts(starts())), Dropout(0.3, noise, 4)
    )
    return gradients(lambda *t: cp.attention(*t, attend), *(cp.split(t, 1) for t in inputs(2)))


@contextmanager
def broken(owner, name, value):
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


start, merge = transfers.start_rotate, context.merge
CONTROLS = {  # in bf16 the travelling gradients are known by their dtype
    "keys and gradients sent the other way": (
        transfers,
        "start_rotate",
        lambda t, axis: start(t, axis, -1),
    ),
    "gradients sent the other way": (
        transfers,
        "start_rotate",
        lambda t, axis: start(t, axis, -1 if t[0].dtype == torch.float32 else 1),
    ),
    "no rescaling": (context, "merge", lambda out, a, more, b: (out + more, torch.logaddexp(a, b))),
    "the last piece alone": (context, "merge", lambda out, a, more, b: (more, b)),
    "a plain split of tokens alone": (
        ContextParallel,
        "split",
        lambda self, x, dim: collectives.local_part(x, dim, self.axis),
    ),
}


def compiled(f, whole: bool):
    return torch.compile(
        lambda *t: f(*(x * 1 for x in t)) * 1, backend="aot_eager", fullgraph=whole
    )


def in_world() -> dict[str, float]:
    """Errors, the largest over ranks. Axes: all 4 ranks, and pairs of every second rank (so that
    ranks of an axis are not the world's).
    """
    rank, out = dist.get_rank(), {}
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    axes = {4: Axis("cp", 4, rank, dist.group.WORLD), 2: Axis("cp", 2, rank // 2, pairs[rank % 2])}

    def note(name, value):
        out[name] = float(
            collectives.reduce_scalar(torch.tensor(value, dtype=torch.float64), axes[4], "max")
        )

    for (size, axis), kind in itertools.product(axes.items(), ("ring", "gather")):
        cp = ContextParallel(axis, kind)
        for case, dtype in itertools.product(CASES, TOLERANCE):
            note(f"{kind} of {size}, {case}, {dtype}", error(case, cp, dtype))
        note(f"{kind} of {size}, bf16", error("documents", cp, torch.bfloat16))
        note(
            f"{kind} of {size}, dropout",
            max(
                float((a - cp.split(b, 1)).abs().max())
                for a, b in zip(dropped(cp), dropped(ALONE), strict=True)
            ),
        )
    with flash_kernel.on_cpu():
        for (size, axis), kind, case in itertools.product(axes.items(), ("ring", "gather"), FLASH):
            for kernel in ("flash", "cudnn"):
                cp = ContextParallel(axis, kind, kernel)
                note(f"{kernel} {kind} of {size}, {case}", error(case, cp, torch.float64))
    for kind in (
        "ring",
        "gather",
    ):  # on one pair: four processes that import the compiler cost 8 s more
        note(
            f"{kind} compiled",
            error(
                "grouped",
                ContextParallel(axes[2], kind),
                torch.float32,
                lambda f: compiled(f, kind == "gather"),
            )
            if rank % 2 == 0
            else 0.0,
        )
    ring = ContextParallel(axes[4])
    for name, control in CONTROLS.items():
        with broken(*control):
            note(f"control: {name}", error("grouped", ring, torch.bfloat16))
    (got,) = transfers.start_rotate([torch.full((2, 3), rank).T], axes[4], 3).wait()
    note("rotate", float((got - (rank + 1) % 4).abs().max()) + (got.shape != (3, 2)))
    return out


@cache
def results() -> dict[str, float]:
    return run_spawned(4, in_world)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_equals_one_process(kind, size):
    for case, dtype in itertools.product(CASES, TOLERANCE):
        found = results()[f"{kind} of {size}, {case}, {dtype}"]
        assert found <= TOLERANCE[dtype], f"{case} in {dtype} differs by {found:.1e}"
    # inputs, probabilities and results rounded by 2^-9 each
    assert results()[f"{kind} of {size}, bf16"] <= 2e-2
    assert results()[f"{kind} of {size}, dropout"] <= 1e-14


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_flash_equals_one_process(kind, size):
    """By a stand-in for the kernels of a GPU, in float64: what is sliced for them, and merged."""
    for case, kernel in itertools.product(FLASH, ("flash", "cudnn")):
        found = results()[f"{kernel} {kind} of {size}, {case}"]
        assert found <= 1e-14, f"{case} by {kernel} differs by {found:.1e}"


@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_compiled_around(kind):
    """The graph breaks at a ring; gathering is one graph."""
    assert results()[f"{kind} compiled"] <= TOLERANCE[torch.float32]


def test_rotate():
    assert results()["rotate"] == 0


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_are_seen(name):
    """Against 1e-2, the error of bf16 without them."""
    found = results()[f"control: {name}"]
    assert found > 0.3, f"{name} differs by {found:.1e}"


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_has_as_many_pairs(size):
    """Exactly, where a plain split gives the last rank 2 size - 1 times the first one's, at the
    limit.
    """
    length = 12 * size
    parts = [
        ContextParallel(Axis("cp", size, rank)).indices(length, torch.device("cpu"))
        for rank in range(size)
    ]
    assert torch.cat(parts).sort().values.tolist() == list(range(length))
    assert {int((part + 1).sum()) for part in parts} == {length * (length + 1) // 2 // size}
    plain = [int((part + 1).sum()) for part in torch.arange(length).chunk(size)]
    assert plain[-1] > 0.9 * (2 * size - 1) * plain[0]


@pytest.mark.parametrize("size, window, most", [(4, None, 9), (8, None, 17), (4, 1, 2), (4, 12, 4)])
def test_only_visible_pairs_of_chunks_are_computed(size, window, most):
    """Of 4 pairs a hop, 2, and 3 of a rank's own; a window of a chunk reaches one chunk back."""
    counts = [
        sum(
            len(list(ContextParallel(Axis("cp", size, rank)).visible(source, 12, Attend(window))))
            for source in range(size)
        )
        for rank in range(size)
    ]
    assert max(counts) == most and (window is not None or min(counts) == most)


def test_identity_on_an_axis_of_one():
    q, k, v, g = inputs(2)
    assert (
        ALONE.split(q, 1) is q
        and ALONE.gather_keys(k, v) == (k, v)
        and ALONE.indices(7, q.device).tolist() == list(range(7))
    )
    for attend in (Attend(), Attend(9).with_documents(Documents.from_starts(starts()))):
        for a, b in zip(
            gradients(lambda *t: ALONE.attention(*t, attend), q, k, v, g),
            gradients(lambda *t: blockwise.attention(*t, attend), q, k, v, g),
            strict=True,
        ):
            assert torch.equal(a, b)


def test_indivisible_is_refused():
    with pytest.raises(
        ValueError,
        match=r"a sequence of 90 tokens is not divisible by 2 x layout.cp \(8\): use another "
        r"--train.sequence-length",
    ):
        ContextParallel(Axis("cp", 4, 0)).split(torch.zeros(2, 90), 1)


@pytest.fixture(scope="module")
def world():
    join_fake(WORLD, 0)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Watch(TorchDispatchMode):
    """Every operation: bytes sent, the largest tensor made, and the most bytes of tensors made
    within that lived at once.
    """

    def __init__(self):
        super().__init__()
        self.made, self.sent, self.largest, self.peak = [], [], 0, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op.namespace == "c10d" and op.__name__.startswith("send"):
            self.sent.append(sum(t.nbytes for t in args[0]))
        new = [
            t
            for t in (out if isinstance(out, (tuple, list)) else [out])
            if isinstance(t, torch.Tensor)
        ]
        self.made = [r for r in self.made if r() is not None] + [weakref.ref(t) for t in new]
        storages = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for r in self.made
            if (t := r()) is not None
        }
        self.largest = max(self.largest, *storages.values(), 0)
        self.peak = max(self.peak, sum(storages.values()))
        return out


def measured(kind: str, length: int, size: int, group, kv_heads: int = 2) -> tuple[Watch, int]:
    """A forward and backward of rank 0 of `size`, in fp32, and the bytes kept between them."""
    cp, kept = ContextParallel(Axis("cp", size, 0, group), kind), {}

    def keep(t):
        kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    tensors = [cp.split(t, 1) for t in inputs(kv_heads, torch.float32, length, 1)]
    with Watch() as watch, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        gradients(lambda *t: cp.attention(*t, Attend()), *tensors)
    return watch, sum(kept.values())


def test_memory_is_in_proportion_to_length_over_size(world):
    """Twice the ranks hold twice the length in the same bytes; and what is kept is q, k, v, out,
    and fp32 a query and head.
    """
    (a, kept), (b, kept_b), (c, kept_c) = (
        measured("ring", *args, world) for args in ((2048, 4), (4096, 8), (4096, 4))
    )
    tokens = 2048 // 4
    assert (
        kept == kept_b == tokens * 4 * (HEADS * (2 * SIZE + 1) + 2 * 2 * SIZE)
        and kept_c == 2 * kept
    )
    assert (a.largest, a.peak) == (b.largest, b.peak)
    assert c.largest == 2 * a.largest and c.peak <= 2 * a.peak
    whole, kept_whole = measured("gather", 4096, 8, dist.new_group(list(range(8))))
    assert kept_whole > kept_b + 4096 * 2 * 2 * SIZE * 4 // 2, (
        "the control: gathered keys and values are kept whole"
    )


def test_bytes_sent_by_a_ring(world):
    """(size - 1) times k and v in forward; in backward again, and their fp32 gradients size times.
    Also in bf16, traced without values.
    """
    for dtype, mode in ((torch.float32, None), (torch.bfloat16, FakeTensorMode())):
        with mode or Watch():
            cp = ContextParallel(Axis("cp", 8, 3, world))
            tensors = [torch.ones(2, 512 // 8, h, SIZE, dtype=dtype) for h in (HEADS, 2, 2, HEADS)]
            here = Attend().with_documents(
                Documents.from_starts(torch.zeros(2, 512 // 8, dtype=torch.int64))
            )
            with Watch() as watch:
                got = gradients(lambda *t: cp.attention(*t, here), *tensors)
        assert [t.shape for t in got] == [
            tensors[0].shape,
            *(t.shape for t in tensors[:3]),
        ] and all(t.dtype == dtype for t in got)
        kv = 2 * 2 * (512 // 8) * 2 * SIZE
        assert sorted(watch.sent) == sorted([kv * dtype.itemsize] * 14 + [kv * 4] * 8)


def test_keys_travel_while_the_present_ones_are_attended_to(world, monkeypatch):
    events, rotate, partial = [], transfers.start_rotate, blockwise.partial

    class Noted:
        def __init__(self, rotation):
            self.rotation = rotation

        def wait(self):
            events.append("wait")
            return self.rotation.wait()

    monkeypatch.setattr(
        transfers, "start_rotate", lambda *args: events.append("start") or Noted(rotate(*args))
    )
    monkeypatch.setattr(
        blockwise, "partial", lambda *args: events.append("attend") or partial(*args)
    )
    cp = ContextParallel(Axis("cp", 4, 1, world))
    cp.attention(*(cp.split(t, 1) for t in inputs(2)[:3]), Attend())
    assert events == [
        "start",
        *["attend"] * 3,
        "wait",
        *["start", *["attend"] * 2, "wait"] * 2,
        *["attend"] * 2,
    ]
