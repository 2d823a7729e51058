"""The events of one profiled step, grouped by kind of work: how many seconds each kind took.

`torch.profiler` gives a tree of operators and ranges for each thread, with the GPU kernels that
each operator launched. The first of these decides the kind of an operator:

1. the innermost range of `core/profiling.py` around it ("attention", "loss", an axis). In backward,
   the ranges around the forward operator with the same autograd sequence number;
2. its own name, or that of the nearest operator around it whose name is known;
3. of a kernel, its name.

Matrix products inside the loss and inside norms stay matrix products.

The seconds of all kinds add up to the step:

    computing      the time in which any kernel but a collective runs (the union of their
                   intervals), shared by kinds in proportion to the time that they were busy
    collectives    the time in which only collectives run: what hides behind computing is free
    idle           the rest: the device waits for the host

A CPU does one thing at a time: an operator is busy for its own time, without the operators that it
calls.
"""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from torch.autograd.profiler_util import FunctionEvent, Interval
from torch.profiler import DeviceType

from dolmen.core.profiling import PREFIX
from dolmen.core.torch_private import strings

PRODUCTS, ATTENTION, EXPERTS, LOSS = "matrix products", "attention", "experts", "loss"
NORMS, ELEMENTWISE, COPIES = "norms", "elementwise", "copies and casts"
OPTIMIZER, COLLECTIVES, WAITING = "optimizer", "collectives", "waiting for other ranks"
IDLE, OTHER = "idle, waiting for the host", "other"
STEP, RECOMPUTE = f"{PREFIX}step", f"{PREFIX}recompute"

RANGES = {"attention": ATTENTION, "experts": EXPERTS, "optimizer": OPTIMIZER}
RANGES |= {"loss": LOSS, "norm": NORMS}  # every other range is named for the axis of a collective

NAMES = (
    (COLLECTIVES, r"c10d|record_param_comms|nccl"),
    (EXPERTS, r"grouped?_?(gemm|mm|problemshape)"),
    (ATTENTION, r"attention|flash|flex_|fmha|sdpa"),
    (PRODUCTS, r"aten::(\w*mm|\w*mv|dot|matmul|linear|_addmm_activation)_?$"),
    (PRODUCTS, r"(mkldnn|onednn|mkl)::.*linear|gemm|cutlass|nvjet|cublas|xmma|splitk"),
    (NORMS, r"(layer|rms)_?norm|(triton|cpp)_.*(rsqrt|norm)"),
    (OPTIMIZER, r"adam|optimizer\."),
    (COPIES, r"aten::(_foreach_)?(to|_to_copy|copy|contiguous|clone|cat|stack|fill|zero)_?$"),
    (COPIES, r"split_with_sizes_copy|_chunk_cat|constant_pad_nd|fsdp::.*(copy|cat)"),
    (COPIES, r"memcpy|memset|copy_kernel|catarray|fillfunctor"),
    (ELEMENTWISE, r"elementwise|(triton|cpp)_|reduce_kernel|softmax|multi_tensor_apply"),
    (
        ELEMENTWISE,
        r"aten::(_foreach_)?(add|r?sub|mul|div|true_divide|neg|pow|square|r?sqrt|reciprocal|exp|log"
        r"|sin|cos|tanh|sigmoid|silu|gelu|relu|threshold|sum|mean|amax|amin|max|min|norm|clamp"
        r"|clamp_min|where|masked_fill|maximum|minimum|eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+"
        r"|lerp|addcmul|addcdiv|logsumexp|logaddexp|native_dropout)(_backward(_data)?)?_?$",
    ),
)
"""Kinds by what the name of an operator or a kernel contains, in any case; the first that matches
counts.
"""


@dataclass(frozen=True)
class KindRow:
    """One kind of work: the seconds of the step that it accounts for, and how long it was `busy`,
    which is longer where it overlapped with other work.
    """

    kind: str
    seconds: float
    calls: int
    busy: float


@dataclass(frozen=True)
class ProfileTable:
    """A profiled step by kind of work, the longest first; the seconds of the rows add up to
    `seconds`.
    """

    seconds: float
    gpu: bool
    rows: tuple[KindRow, ...]
    recomputed: float
    """Seconds in which forward was computed a second time; the rows contain them."""

    def split_waiting(
        self, measured: Mapping[str, float], least: Mapping[str, float]
    ) -> "ProfileTable":
        """Return the table with waiting for other ranks as a row of its own, taken out of the
        collectives.

        measured: seconds in the collectives of each kind on this rank
        least:    seconds that the same calls take on the rank that arrives last
        """
        rows, waiting = [], 0.0
        for row in self.rows:
            took = measured.get(row.kind, 0.0)
            share = 1 - least[row.kind] / took if took and row.kind in least else 0.0
            waiting += share * row.seconds
            seconds, busy = (1 - share) * row.seconds, (1 - share) * row.busy
            rows.append(replace(row, seconds=seconds, busy=busy))
        rows += [KindRow(WAITING, waiting, 0, waiting)] if waiting else []
        return replace(self, rows=_sort_rows(rows))

    def lines(self) -> list[str]:
        """Return a line of text per kind (share of the step, milliseconds, calls), and one for
        recomputation.

           matrix products              61.2 %      823.0 ms      412 calls
        """
        out = []
        for row in self.rows:
            calls = f"{row.calls:7,} calls" if row.calls else ""
            hidden = row.busy - row.seconds
            overlap = (
                f"; {1e3 * hidden:.1f} ms more overlapped with other work" if hidden > 1e-4 else ""
            )
            share = 100 * row.seconds / self.seconds
            out.append(f"{row.kind:27}{share:5.1f} % {1e3 * row.seconds:10.1f} ms {calls}{overlap}")
        if self.recomputed:
            out.append(f"of these {1e3 * self.recomputed:.1f} ms were recomputation of forward")
        return out


@dataclass
class WorkTally:
    """Busy time and calls of a step, by kind of work."""

    busy: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    recomputed: float = 0.0
    durations: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of each collective, in order, with its wait for other ranks."""

    def add(self, kind: str, microseconds: float, recomputed: bool) -> None:
        """Add the time of one operator or kernel to the busy time of its kind, and, if it was part
        of a recomputation of forward, to the time of recomputation.
        """
        self.busy[kind] += microseconds / 1e6
        self.recomputed += microseconds / 1e6 if recomputed else 0.0


def is_collective(kind: str) -> bool:
    """Return whether a kind of work, by its name, is a collective."""
    return kind.startswith(COLLECTIVES)


@cache
def name_kind(name: str) -> str:
    """Return the kind of work ("matrix products", "attention", "copies and casts", ...) of an
    operator or GPU kernel by patterns of its name; "other" if none matches.
    """
    return next((kind for kind, pattern in NAMES if re.search(pattern, name, re.I)), OTHER)


def tabulate(events: Iterable[FunctionEvent]) -> tuple[ProfileTable, Mapping[str, list[float]]]:
    """Group the events of one step (`torch.profiler.profile.events()`) by kind of work. Return the
    table and the seconds of each collective by kind. Raises ValueError where no step was recorded.
    """
    events = [e for e in events if not e.is_async]  # gloo's own threads work beside the step
    host = [e for e in events if e.device_type == DeviceType.CPU]
    step = next((e for e in host if e.name == STEP), None)
    if step is None:
        raise ValueError(f"the profile has no range {STEP!r}")
    ranges = {e.name for e in host if e.is_user_annotation}  # a GPU repeats them beside kernels
    # without kernels it is a CPU run: operators are the work
    kernels = [e for e in events if e.device_type != DeviceType.CPU and e.name not in ranges]
    if kernels:
        work, seconds = _gpu_work(host, kernels, step.time_range)
    else:
        work = _cpu_work(host, step.thread)
        seconds = work.busy
    length = step.time_range.elapsed_us() / 1e6
    idle = length - sum(seconds.values())
    rows = [KindRow(kind, s, work.calls[kind], work.busy[kind]) for kind, s in seconds.items()]
    rows.append(KindRow(IDLE, idle, 0, idle))
    return ProfileTable(length, bool(kernels), _sort_rows(rows), work.recomputed), work.durations


def _sort_rows(rows: list[KindRow]) -> tuple[KindRow, ...]:
    """Return the rows in descending order of seconds."""
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _cpu_work(host: list[FunctionEvent], thread: int) -> WorkTally:
    """Return the time by kind of the operators of `thread`, which runs the step, on a CPU: self
    time, without the operators called inside, and of collectives the whole time of their ranges.
    """
    work, kinds = WorkTally(), _kinds(host)
    for event in (event for event in host if event.thread == thread):
        kind = kinds[id(event)]
        if kind == OTHER and event.name.startswith(strings.COMPILED):
            kind = ELEMENTWISE  # loops of a compiled program have no names on a CPU
        moves = is_collective(kind)
        if moves or not event.is_user_annotation:  # between the operators of a range is Python
            work.add(kind, event.self_cpu_time_total, _is_recomputed(event))
        if event.cpu_parent is None or kinds[id(event.cpu_parent)] != kind:
            work.calls[kind] += not event.name.endswith(" wait")
            if moves:
                work.durations[kind].append(event.cpu_time_total / 1e6)
    return work


def _gpu_work(
    host: list[FunctionEvent], kernels: list[FunctionEvent], step: Interval
) -> tuple[WorkTally, dict[str, float]]:
    """Return the busy time of GPU kernels by kind, and the seconds of the step that each kind
    accounts for. A kernel has the kind of the operator that launched it; without one (CUDA graphs),
    that of its own name.
    """
    launch_kinds = _launch_kinds(host)
    work, times = WorkTally(), defaultdict(list)
    for kernel in kernels:
        # equal kernels of equal duration are distinguished by their order alone, which suffices for
        # sums
        kernel_kind, length = name_kind(kernel.name), kernel.time_range.elapsed_us()
        known = launch_kinds.get((kernel.name, length))
        kind, recomputed = known.popleft() if known else (kernel_kind, False)
        # a copy inside of an FSDP range is no communication: the kernel's own name decides
        if is_collective(kernel_kind) != is_collective(kind) or kind == OTHER:
            kind = kernel_kind
        # kernels may overlap the ends of the step's range
        start, end = max(kernel.time_range.start, step.start), min(kernel.time_range.end, step.end)
        if end > start:
            work.add(kind, end - start, recomputed)
            work.calls[kind] += 1
            times[kind].append((start, end))
        if is_collective(kind):
            work.durations[kind].append(length / 1e6)
    computing = [span for kind in times if not is_collective(kind) for span in times[kind]]
    counted, total = _union(computing), sum(end - start for start, end in computing) / 1e6
    # streams overlap, so kinds share the union of their intervals in proportion to their busy time
    seconds = {k: work.busy[k] * counted / total for k in times if not is_collective(k)}
    for kind in filter(is_collective, sorted(times)):  # what each adds to those before
        # a collective counts only where neither computing nor an earlier collective runs
        computing += times[kind]
        before, counted = counted, _union(computing)
        seconds[kind] = counted - before
    return work, seconds


def _launch_kinds(host: list[FunctionEvent]) -> dict[tuple[str, float], deque[tuple[str, bool]]]:
    """Return (name, duration) of a GPU kernel -> queue of (kind of work, whether recomputed) of the
    operators that launched kernels with this name and duration, in order. torch records no better
    link from an operator to its kernels. `host`: events of the CPU.
    """
    kinds, launch_kinds = _kinds(host), defaultdict(deque)
    for event in (e for e in host if not e.is_user_annotation):  # ranges repeat their kernels
        for kernel in event.kernels:
            what = (kinds[id(event)], _is_recomputed(event))
            launch_kinds[kernel.name, kernel.duration].append(what)
    return launch_kinds


def _union(spans: list[tuple[float, float]]) -> float:
    """Return the seconds covered by at least one of the spans (start, end), given in
    microseconds.
    """
    total, at = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, at))
        at = max(at, end)
    return total / 1e6


def _is_recomputed(event: FunctionEvent | None) -> bool:
    """Return whether a profiler's event is, or is inside, a recomputation of forward (activation
    checkpointing).
    """
    while event is not None and event.name != RECOMPUTE:
        event = event.cpu_parent
    return event is not None


def _kinds(host: list[FunctionEvent]) -> dict[int, str]:
    """Return id(event) -> the kind of work of each CPU event."""
    kinds, forward = {}, {}  # the last forward operator of each autograd sequence number
    for event in host:
        kinds[id(event)] = _kind(event, forward)
        if event.sequence_nr >= 0 and "Backward" not in event.name:
            forward[event.sequence_nr] = event
    return kinds


def _kind(event: FunctionEvent, forward: Mapping[int, FunctionEvent]) -> str:
    """Return the kind of work of an event: walk up its callers, and in backward on to those of the
    forward operator with the same sequence number, to the innermost named range; without one, the
    first name that is known. `forward` maps sequence numbers to forward operators.
    """
    named, fsdp, at, in_forward = OTHER, COLLECTIVES, event, False
    while at is not None and at.name not in (STEP, RECOMPUTE):
        name = at.name
        if name.startswith(PREFIX):
            word = name.removeprefix(PREFIX).split()[0]
            kind = RANGES.get(word, f"{COLLECTIVES} {word}")
            # the matrix product of the LM head is inside the loss's range
            return PRODUCTS if named == PRODUCTS and kind in (LOSS, NORMS) else kind
        backward = name.startswith("autograd::engine::evaluate_function")
        if name.startswith(strings.FSDP):
            fsdp = f"{COLLECTIVES} {'edp' if '.experts' in name else 'fsdp'}"
        elif named == OTHER and not (backward or in_forward):
            named = name_kind(name)
        if backward and not in_forward and at.sequence_nr in forward:
            # from a backward operator to the forward operator that recorded it, whose ranges name
            # the layer
            at, in_forward = forward[at.sequence_nr], True
        else:
            at = at.cpu_parent
    return fsdp if named == COLLECTIVES else named
