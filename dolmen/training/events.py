"""Who was busy when in a step, with what kind of work, from the events of a Chrome trace of
torch.profiler. Pure functions: no torch, no files.

    events --read--> who was busy when, with what kind of work --timeline.py--> seconds by kind

On a GPU its kernels are busy. A kernel is of the kind of what was open on the thread that launched
it (its launch has its correlation): the innermost range of ours (core/ranges.py) or known operator.
Only where that says nothing does the kernel's own name. On a CPU the operators of the thread that
makes the step are busy, each without those that it calls.

What runs in backward is of the range in which its forward ran: autograd gives both one sequence
number. Matrix products are products wherever they are, but for attention's, experts' and the
optimizer's.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dolmen.core.ranges import PREFIX
from dolmen.core.torch_private import spelled

PRODUCTS, ATTENTION, EXPERTS, LOSS = "matrix products", "attention", "experts", "loss"
NORMS, ELEMENTWISE, COPIES = "norms", "elementwise", "copies and casts"
OPTIMIZER, COLLECTIVES, WAITING = "optimizer", "collectives", "waiting for other ranks"
IDLE, OTHER = "idle, waiting for the host", "other"
STEP = f"{PREFIX}step"

# A range takes all that runs in it, or (the last two) all but matrix products; another one is the
# name of an axis.
WHOLE = {"attention": ATTENTION, "experts": EXPERTS, "optimizer": OPTIMIZER}
ALL_BUT_PRODUCTS = {"loss": LOSS, "norm": NORMS}

OPERATORS = (
    (EXPERTS, r"aten::_?(scaled_)?grouped_mm.*"),
    (ATTENTION, r".*(attention|flash_|flex_|fmha).*"),
    (PRODUCTS, r"aten::(b?mm|(b|addb)?addb?mm|baddbmm|add?mv|mv|dot|matmul|linear|_scaled_mm)_?"),
    (PRODUCTS, r"aten::_addmm_activation|(mkldnn|onednn|mkl)::.*linear.*"),
    (NORMS, r"aten::.*(layer|rms)_norm.*|(triton|cpp)_.*(rsqrt|norm).*"),
    (OPTIMIZER, r"aten::_fused_adam.*|Optimizer\..*"),
    (COPIES, r"aten::(_foreach_)?(to|_to_copy|copy|contiguous|clone|cat|stack|fill|zero)_?"),
    (COPIES, r"aten::(split_with_sizes_copy|_chunk_cat|constant_pad_nd)|fsdp::.*cop.*|fsdp::.*cat"),
    (COLLECTIVES, r"(c10d|_c10d_functional|_c10d_functional_autograd)::.*|record_param_comms"),
    (
        ELEMENTWISE,
        r"aten::(_foreach_)?(add|sub|rsub|mul|div|true_divide|neg|pow|square|sqrt|rsqrt|reciprocal"
        r"|exp|log|sin|cos|tanh|sigmoid|silu|gelu|relu|threshold|softmax|_softmax|log_softmax"
        r"|_log_softmax|sum|mean|amax|amin|max|min|norm|clamp|clamp_min|where|masked_fill|maximum"
        r"|minimum|eq|ne|lt|le|gt|ge|logical_and|logical_not|bitwise_and|bitwise_or|bitwise_xor"
        r"|lerp|addcmul|addcdiv|logsumexp|logaddexp|native_dropout)(_backward(_data)?)?_?"
        r"|(triton|cpp)_.*",
    ),
)
KERNELS = (
    (COLLECTIVES, r"nccl"),
    (ATTENTION, r"flash|fmha|attention|flex|sdpa"),
    (EXPERTS, r"[gG]rouped?_?([gG]emm|[mM]m|ProblemShape)"),
    (PRODUCTS, r"gemm|cutlass|nvjet|cublas|xmma|splitK"),
    (OPTIMIZER, r"[aA]dam"),
    (NORMS, r"[lL]ayer_?[nN]orm|[rR][mM][sS]_?[nN]orm|rsqrt"),
    (COPIES, r"Memcpy|copy|CatArray|Memset|Fill"),
    (ELEMENTWISE, r"elementwise|triton_|reduce_kernel|softmax|multi_tensor_apply"),
)


class Span(NamedTuple):
    """Something was busy from `start` to `end`, in microseconds."""

    start: float
    end: float
    kind: str
    name: str
    """Of the kernel, or of the operator."""
    again: bool
    """It computes what forward had computed."""


@dataclass(frozen=True)
class Timeline:
    """A step, from `start` to `end` in microseconds."""

    start: float
    end: float
    gpu: bool
    busy: list[Span]
    """The device's work, in no order; collectives may run beside computing."""
    host: list[Span]
    """What the thread that makes the step was doing, one after the other."""
    calls: Counter[str]
    """By kind: kernels on a GPU; on a CPU, times that the kind was entered."""
    took: dict[str, list[float]]
    """By kind of collective, the microseconds of each, in order, waiting for others included."""


class _Frame(NamedTuple):
    """What is open on a thread: an operator or a range, in those around it."""

    end: float
    name: str
    operator: bool = False
    kind: str | None = None
    whole: str | None = None
    soft: str | None = None
    fsdp: str | None = None
    again: bool = False


@dataclass
class _Thread:
    """A stack of frames, and what its top has been, as time goes on."""

    at: float = 0.0
    stack: list[_Frame] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def top(self) -> _Frame:
        return self.stack[-1] if self.stack else _Frame(0.0, "")

    def advance(self, to: float) -> None:
        """Close what has ended by `to`."""
        while self.stack and self.stack[-1].end <= to:
            self._spend(self.stack[-1].end)
            self.stack.pop()
        self._spend(to)

    def _spend(self, to: float) -> None:
        frame = self.top()
        moves = frame.kind is not None and frame.kind.startswith(COLLECTIVES)
        if to > self.at and (frame.operator or moves):
            fused = ELEMENTWISE if frame.name.startswith(spelled.COMPILED) else OTHER
            kind = frame.kind or fused
            self.spans.append(Span(self.at, to, kind, frame.name, frame.again))
        self.at = max(self.at, to)


def read_trace(events: Iterable[Mapping[str, Any]]) -> Timeline:
    """`events`: the traceEvents of a Chrome trace. Raises ValueError where they hold no range
    STEP.
    """
    found = [e for e in events if e.get("ph") == "X" and "dur" in e]
    # a GPU's trace has each range again, where its kernels ran
    ranges = (e for e in found if e["cat"] == "user_annotation")
    step = next((e for e in ranges if e["name"] == STEP), None)
    if step is None:
        raise ValueError(f"the trace has no range {STEP!r}: record it with dolmen.training.profile")
    start, end = step["ts"], step["ts"] + step["dur"]
    inside = [e for e in found if e["ts"] < end and e["ts"] + e["dur"] > start]
    threads, launched, calls, took = _hosts(inside)
    host = _clipped(threads[step["pid"], step["tid"]].spans, start, end)
    kernels = [e for e in inside if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return Timeline(start, end, False, host, host, calls, took)
    busy = [_kernel(e, launched) for e in sorted(kernels, key=lambda e: e["ts"])]
    took = defaultdict(list)
    for span in busy:
        if span.kind.startswith(COLLECTIVES):
            took[span.kind].append(span.end - span.start)
    calls = Counter(span.kind for span in busy)
    return Timeline(start, end, True, _clipped(busy, start, end), host, calls, dict(took))


def _clipped(spans: list[Span], start: float, end: float) -> list[Span]:
    cut = (s._replace(start=max(s.start, start), end=min(s.end, end)) for s in spans)
    return [s for s in cut if s.end > s.start]


def _hosts(events: list[Mapping[str, Any]]):
    """Threads by (process, thread); the frame that each launch came from, by correlation; how often
    each kind was entered; how long each collective's ranges were.
    """
    threads: dict[tuple, _Thread] = defaultdict(_Thread)
    launched: dict[int, _Frame] = {}
    forward: dict[int, _Frame] = {}  # by sequence number: the last operator that had it
    calls: Counter[str] = Counter()
    took: dict[str, list[float]] = defaultdict(list)
    for e in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        thread = threads[e["pid"], e["tid"]]
        if e["cat"] in ("cuda_runtime", "cuda_driver"):
            thread.advance(e["ts"])
            launched[e["args"]["correlation"]] = thread.top()
        # gloo's own threads tell theirs under the thread that asked, beside what it does then
        elif e["cat"] in ("cpu_op", "user_annotation") and not e["name"].startswith("gloo:"):
            thread.advance(e["ts"])
            above, frame = thread.top(), _enter(e, thread.top(), forward)
            thread.stack.append(frame)
            kind = frame.kind
            if kind is not None and kind != above.kind:  # entered
                if not e["name"].endswith(" wait"):
                    calls[kind] += 1
                if kind.startswith(COLLECTIVES):
                    took[kind].append(e["dur"])
    for thread in threads.values():
        thread.advance(float("inf"))
    return threads, launched, calls, dict(took)


def _enter(event: Mapping[str, Any], above: _Frame, forward: dict[int, _Frame]) -> _Frame:
    """The frame of an event, in the one above it."""
    name, end = event["name"], event["ts"] + event["dur"]
    frame = above._replace(end=end, name=name, operator=event["cat"] == "cpu_op")
    if name.startswith(PREFIX):
        return _named(name.removeprefix(PREFIX).split()[0], frame)
    if name.startswith(spelled.FSDP):
        return frame._replace(fsdp=f"{COLLECTIVES} {'edp' if '.experts' in name else 'fsdp'}")
    sequence = event.get("args", {}).get("Sequence number", -1)
    if name.startswith("autograd::engine::evaluate_function") and sequence in forward:
        origin = forward[sequence]
        frame = frame._replace(kind=None, whole=origin.whole, soft=origin.soft)
    kind = _kind(_match(OPERATORS, name, re.fullmatch), frame)
    frame = frame._replace(kind=kind or frame.kind)
    if sequence >= 0 and "Backward" not in name:
        forward[sequence] = frame
    return frame


def _named(word: str, frame: _Frame) -> _Frame:
    """A range of ours."""
    if word == "step":
        return frame
    if word == "recompute":
        return frame._replace(kind=None, whole=None, soft=None, again=True)
    if word in ALL_BUT_PRODUCTS:
        kind = ALL_BUT_PRODUCTS[word]
        return frame._replace(kind=kind, whole=None, soft=kind)
    kind = WHOLE.get(word, f"{COLLECTIVES} {word}")
    return frame._replace(kind=kind, whole=kind, soft=None)


def _kind(own: str | None, frame: _Frame) -> str | None:
    """Of work whose name says `own`, in the ranges of a frame."""
    if frame.whole is not None:
        return frame.whole
    if own == COLLECTIVES:
        return frame.fsdp or own
    if own == PRODUCTS or frame.soft is None:
        return own
    return frame.soft


def _match(patterns: Iterable[tuple[str, str]], name: str, how: Any) -> str | None:
    return next((kind for kind, pattern in patterns if how(pattern, name)), None)


def _kernel(event: Mapping[str, Any], launched: Mapping[int, _Frame]) -> Span:
    """What a kernel, a copy or a fill of the GPU was for."""
    frame = launched.get(event.get("args", {}).get("correlation", -1), _Frame(0.0, ""))
    own = _match(KERNELS, event["name"], re.search)
    if own == COLLECTIVES:
        whole = frame.whole or ""
        kind = whole if whole.startswith(COLLECTIVES) else frame.fsdp or COLLECTIVES
    else:
        kind = frame.kind or _kind(own, frame) or OTHER
    end = event["ts"] + event["dur"]
    return Span(event["ts"], end, kind, event["name"], frame.again)
