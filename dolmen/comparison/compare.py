"""Two recordings, tensor by tensor, in the order in which a step computes them: which is the first
that parts?

The difference of a tensor is that of its worst row (a token's vector, an output's weights): |a - b|
of the row, of |b| of the row, or of a tenth of the usual row where that is more. One token that is
wrong is seen so, and a row of almost nothing is not held to its own size.

What is allowed grows with what came in:

    allowed = min(MOST, max(LEAST, GROWTH x the largest difference so far that was allowed))

with LEAST = 32 u, where u is the rounding unit of the coarser of the two dtypes. One operation of
two correct implementations differs by 1 to 5 u, as they add in different orders, and passes on what
it was given, usually not larger, in a softmax of large scores or behind a cancellation up to
several times. A wrong epsilon of 1e-5 where 1e-6 is right changes a norm by 5e-6 = 80 u in float32:
it is found in the norm, where all before it is at 5 u, and would not be in the logits, of which
1e-3 may be rounding. MOST = 1000 LEAST, 2e-3 in float32: no number of right operations makes more.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dolmen.comparison import recording
from dolmen.comparison.recording import Recorded, RecordedShard, Recording, Stage
from dolmen.model import block
from dolmen.model.spec import ModelSpec
from dolmen.ops.attention import reference

LEAST, GROWTH, MOST = 32, 8.0, 1000
HALF = 0.5  # nothing is allowed to differ by more, however coarse the dtype
SMALL = 1e-3  # of the whole gradient's norm: what a tensor's is held to at least
"""Key biases have gradient zero up to rounding: without such a bound rounding would be compared
with rounding.
"""
HEALED = 1e-2  # of a difference inside a layer: what may be left of it behind the layer
"""A tensor that one program keeps in another form (turned, in another order) differs by its own
size, and nothing behind it does; of a difference that is a fault most comes through.
"""
THROUGH_SCORES = ("attn.query", "attn.key", "attn.q_norm", "attn.k_norm", "attn.q", "attn.k")
"""Tensors whose gradient comes through a softmax, where it cancels if one score is the largest."""
UNITS = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}


@dataclass(frozen=True)
class Side:
    """A recording and the model that it is of; `length`: tokens per sequence."""

    recording: Recording
    spec: ModelSpec
    length: int


@dataclass(frozen=True)
class TensorComparison:
    """Comparison of one tensor. A NaN difference is not within any tolerance."""

    stage: Stage
    name: str
    difference: float
    allowed: float
    ranks: tuple[tuple[str, int], ...] = ()
    """(side, rank) of each rank whose values differ from B's joined tensor."""
    note: str = ""

    @property
    def ok(self) -> bool:
        """True if the difference is allowed; a NaN difference never is."""
        return self.difference <= self.allowed


def compare_recordings(a: Side, b: Side) -> Iterator[TensorComparison]:
    """Yield a comparison of each tensor that both sides recorded, in the order of a training step
    (weights, forward, loss, backward, gradient norm, update), and of each weight that only one side
    has.
    """
    yield from _compare_weights(a, b)
    # in full: backward needs the largest difference that forward allowed
    forward = list(_compare_forward(a, b))
    yield from forward
    before = max((row.difference for row in forward if row.ok), default=0.0)
    yield from _compare_numbers(a, b, "loss", before)
    backward = list(_compare_backward(a, b, before, {row.name for row in forward if row.note}))
    yield from backward
    before = max((row.difference for row in backward if row.ok), default=before)
    yield from _compare_numbers(a, b, "gradient norm", before)
    yield from _compare_update(a, b, before)


def first_difference(rows: Sequence[TensorComparison]) -> TensorComparison | None:
    """Return the first comparison whose difference is not allowed; None if all are allowed."""
    return next((row for row in rows if not row.ok), None)


def difference(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """Return the relative difference of the worst row (last dim; a vector is one row): |a - b| /
    max(|b|, 0.1 x RMS of |b| over rows, `least`). NaN where a value is not finite.
    """
    # Rows, not elements: an element near 0 has no meaningful relative error.
    a, b = flatten_rows(a), flatten_rows(b)
    deviation = torch.linalg.vector_norm(a - b, dim=1)
    size = torch.linalg.vector_norm(b, dim=1)
    # RMS over rows
    usual = size.square().mean().sqrt()
    scale = torch.maximum(size, (0.1 * usual).clamp(min=least))
    if not (deviation.isfinite().all() and scale.isfinite().all()):
        return math.nan
    # a row of zeros on both sides has scale 0: 0 / 0 is no difference
    worst = torch.where(deviation > 0, deviation / scale, torch.zeros_like(deviation)).max().item()
    return worst


def flatten_rows(x: Tensor) -> Tensor:
    """Return `x` as a float64 matrix: a vector or scalar as one row, higher dims flattened into
    rows.
    """
    x = x.double()
    return x.reshape(1, -1) if x.ndim < 2 else x.reshape(-1, x.shape[-1])


class Tolerance:
    """Allowed difference of the next tensor, which grows with the differences allowed so far.
    `before`: the largest of an earlier stage.
    """

    def __init__(self, a: Side, b: Side, before: float = 0.0):
        """Start with a tolerance for the coarser of the two sides' compute dtypes and the
        difference `before`.
        """
        unit = max(UNITS[side.recording.dtype] for side in (a, b))
        self.least, self.most = min(HALF / 2, LEAST * unit), min(HALF, LEAST * unit * MOST)
        self.before = before

    def limit(self, factor: float = 1.0) -> float:
        """Return the difference that is allowed for the next tensor: `factor` times the larger of 8
        times the largest one admitted so far and 32 rounding units of the coarser dtype; in any
        case at most 32,000 units, and at most 0.5.
        """
        return min(self.most, factor * max(self.least, GROWTH * self.before))

    def admit(self, row: TensorComparison) -> TensorComparison:
        """Take the row's difference into account for later limits, if it is allowed and the row has
        no note; return the row.
        """
        # a row with a note is in another form: its difference does not measure rounding
        if row.ok and not row.note:
            self.before = max(self.before, row.difference)
        return row


def _differences_by_rank(
    a: Recorded, b: Recorded, least: float = 0.0
) -> tuple[float, dict[tuple[str, int], float]]:
    """Compare what each rank of either side holds with the joined tensor of B, with `least` as in
    `difference`. Return the largest difference (NaN counts as largest), and that of each (side,
    rank). Of a side whose ranks hold summands the sum is compared, under the first rank.
    """
    full = b.join()
    sides = {"A": a, "B": b}
    by_rank: dict[tuple[str, int], float] = {}
    for side, recorded in sides.items():
        pieces = recorded.pieces
        # each rank has a summand: only their sum can be compared
        if recorded.partial:
            region = tuple(slice(0, n) for n in recorded.shape)
            pieces = [RecordedShard(pieces[0].rank, region, recorded.join())]
        for piece in pieces:
            deviation = difference(piece.values, full[piece.index], least)
            key = side, piece.rank
            by_rank[key] = worse(deviation, by_rank.get(key, 0.0))
    return max(by_rank.values(), key=_or_inf), by_rank


def worse(a: float, b: float) -> float:
    """Return the larger of two differences; NaN is larger than any number."""
    return max(a, b, key=_or_inf)


def _or_inf(x: float) -> float:
    """Return `x`, or infinity for NaN, as a sort key."""
    return math.inf if math.isnan(x) else x


def _compare_tensor(
    stage: Stage, name: str, a: Recorded, b: Recorded, allowed: float, least: float = 0.0
) -> TensorComparison:
    """Return the comparison of one tensor of both sides, with the ranks whose difference exceeds
    `allowed`; `least` as in `difference`. Unequal shapes are an infinite difference.
    """
    if a.shape != b.shape:
        return TensorComparison(
            stage, name, math.inf, allowed, note=f"shapes {a.shape} and {b.shape}"
        )
    deviation, by_rank = _differences_by_rank(a, b, least)
    ranks = tuple(key for key, difference in by_rank.items() if not difference <= allowed)
    return TensorComparison(stage, name, deviation, allowed, ranks)


def _compare_weights(a: Side, b: Side) -> Iterator[TensorComparison]:
    """Yield a comparison per parameter. Weights must be equal, or, where the sides store parameters
    in two dtypes, equal up to rounding to the coarser. A parameter that only one side has is an
    infinite difference.
    """
    left, right = a.recording, b.recording
    # rounding once to the coarser is off by a unit at most; twice that is allowed
    unit = 0.0 if left.rest == right.rest else 2 * max(UNITS[left.rest], UNITS[right.rest])
    names = left.names("weights")
    for name in [*names, *(n for n in right.names("weights") if n not in names)]:
        x, y = left.tensors.get(("weights", name)), right.tensors.get(("weights", name))
        if x is None or y is None:
            yield TensorComparison(
                "weights", name, math.inf, unit, note=f"only {'A' if y is None else 'B'} has it"
            )
        else:
            yield _compare_tensor("weights", name, x, y, unit)


def forward_order(a: Side, b: Side) -> list[str]:
    """Return the names of the forward tensors that both sides have, sorted by layer, then in the
    order in which side A recorded them.
    """
    left, right = a.recording.names("forward"), set(b.recording.names("forward"))
    both = [name for name in left if name in right]
    place = {name: i for i, name in enumerate(both)}
    return sorted(both, key=lambda name: (recording.place(name), place[name]))


def _compare_forward(a: Side, b: Side) -> Iterator[TensorComparison]:
    """Yield a comparison per forward tensor, and, before each layer's weighted sums of values, one
    of its attention scores. The tolerance of these two is multiplied by the largest score: softmax
    amplifies relative errors of q and k by it.
    """
    allowed, names = Tolerance(a, b), forward_order(a, b)
    rows: list[TensorComparison] = []
    for name in names:
        factor = 1.0
        if name.endswith(".attn.sums"):
            factor = max(1.0, *(largest_score(side, name) for side in (a, b)))
            scores = _compare_scores(a, b, name, allowed.limit(factor))
            if scores is not None:
                rows.append(allowed.admit(scores))
        x, y = (side.recording.tensors["forward", name] for side in (a, b))
        # after the scores: their difference is admitted first
        row = _compare_tensor("forward", name, x, y, allowed.limit(factor))
        rows.append(allowed.admit(row))
    yield from _excuse_other_forms(b, rows)


def _excuse_other_forms(b: Side, rows: list[TensorComparison]) -> list[TensorComparison]:
    """Return the rows, in which those that differ inside a layer get an infinite tolerance and a
    note if no tensor computed from them differs: then A and B only keep that tensor in two forms.
    """
    # Fused qkv or a rotated head layout differ by their own size, but nothing computed from them
    # does.
    by_name = {row.name: row for row in rows}
    out = []
    for row in rows:
        # rows of the tensors that depend on this one
        behind = [] if row.ok else [by_name.get(name) for name in _names_downstream(b, row.name)]
        limit = HEALED * _or_inf(row.difference)
        if any(row is not None and row.ok and row.difference <= limit for row in behind):
            note = "in another form: nothing computed from it differs"
            row = TensorComparison(row.stage, row.name, row.difference, math.inf, note=note)
        out.append(row)
    return out


def _names_downstream(b: Side, name: str) -> list[str]:
    """Return the names of the tensors inside the layer that everything computed from tensor `name`
    passes through, the layer's output last; empty for tensors outside layers and for a layer's
    output.
    """
    number, word = recording.layer_of(name), recording.inside(name)
    # the layer's own output has nothing behind it inside the layer
    if number is None or word == "":
        return []
    layer = f"layers.{number}"
    names = [f"{layer}.{name}" for name in recording.downstream(word)]
    before = b.recording.tensor("forward", f"layers.{number - 1}" if number else "embed")
    middle = b.recording.tensor("forward", f"{layer}.middle")
    # where mixer and mlp are side by side, what enters the mlp has not seen the mixer
    if before is not None and middle is not None and torch.equal(before, middle):
        names = [name for name in names if name != f"{layer}.middle"]
    return [*names, layer]


def _compare_scores(a: Side, b: Side, sums: str, allowed: float) -> TensorComparison | None:
    """Return the comparison of both sides' attention scores, recomputed from their recorded queries
    and keys by each side's own model, for the layer of tensor `sums`; None where a side lacks
    these.
    """
    name = sums.replace("sums", "scores")
    x, y = (scores_of(side, name) for side in (a, b))
    if x is None or y is None or x.shape != y.shape:
        return None
    return TensorComparison("forward", name, difference(x, y), allowed)


def largest_score(side: Side, sums: str) -> float:
    """Return an upper bound of the attention scores before softmax in the layer of tensor `sums`:
    scale x max |q| x max |k|; 0 where queries or keys are not recorded. If queries and keys are off
    by a relative e, a score is off by up to 2 e times this bound.
    """
    number = recording.layer_of(sums)
    assert number is not None
    q, k = (_heads(side, number, word) for word in ("query", "key"))
    if q is None or k is None:
        return 0.0
    scale = block.attention_kinds(side.spec)[number].scale
    most = q.norm(dim=-1).max() * k.norm(dim=-1).max()
    return most.item() * (q.shape[-1] ** -0.5 if scale is None else scale)


def _heads(side: Side, number: int, word: str) -> Tensor | None:
    """Return the recorded queries or keys of layer `number` (`word`: "query" or "key"), fp32
    [sequences, length, heads, size]; None where not recorded.
    """
    heads = side.recording.tensor("forward", f"layers.{number}.attn.{word}")
    size = side.spec.blocks[number].mixer.head_size
    return (
        None if heads is None else heads.float().view(-1, side.length, heads.shape[1] // size, size)
    )


def scores_of(side: Side, name: str) -> Tensor | None:
    """Return the attention probabilities softmax(scale q k^T + mask) of the layer that has tensor
    `name`, from the side's recorded queries and keys, [sequences, heads, queries, keys]; attention
    sinks take their share, so rows may sum to less than 1. None where queries or keys are not
    recorded.
    """
    number = recording.layer_of(name)
    assert number is not None
    q, k = (_heads(side, number, word) for word in ("query", "key"))
    if q is None or k is None:
        return None
    attend = block.attention_kinds(side.spec)[number]
    sinks = side.recording.tensor("weights", f"layers.{number}.attn.sinks.weight")
    # values = identity: the attention output then is the matrix of probabilities
    identity = torch.eye(side.length, dtype=q.dtype)[:, None]
    identity = identity.expand(len(q), side.length, k.shape[2], side.length)
    attend = attend._replace(sinks=None if sinks is None else sinks.to(q.dtype))
    return reference.definition(q, k, identity, attend).transpose(1, 2)


def _compare_numbers(a: Side, b: Side, name: str, before: float) -> Iterator[TensorComparison]:
    """Yield a comparison of the scalar `name`, "loss" or "gradient norm", if both sides recorded
    it; `before`: the largest difference allowed so far.
    """
    x, y = (side.recording.tensor("numbers", name) for side in (a, b))
    if x is not None and y is not None:
        left, right = x.item(), y.item()
        deviation = abs(left - right) / abs(right) if right else math.nan
        limit = Tolerance(a, b, before).limit()
        yield TensorComparison(
            "numbers", name, deviation, limit, note=f"{left:.7g} and {right:.7g}"
        )


def _compare_backward(
    a: Side, b: Side, before: float, other_form: set[str]
) -> Iterator[TensorComparison]:
    """Yield comparisons of the gradients of forward tensors and of parameters, from the head down
    to the embedding. `before`: largest difference allowed in forward; `other_form`: forward tensors
    to skip. Nothing if no parameter's gradient was recorded.
    """
    left, right = a.recording.tensors, b.recording.tensors
    # activations whose gradient both sides recorded
    names = [n for n in forward_order(a, b) if ("backward", n) in left and ("backward", n) in right]
    trained = [n for n in a.recording.names("gradients") if ("gradients", n) in right]
    if not trained:
        return
    norm = _stage_norm(b, "gradients")
    place = {name: i for i, name in enumerate(forward_order(a, b))}
    # behind each tensor's gradient, those of the parameters that it gives
    # (layer, place in the layer, 1 for activations): sorted in reverse, an activation's gradient
    # comes before those of the parameters behind it.
    keyed: dict[tuple[Stage, str], tuple[int, int, int]] = {}
    for name in names:
        if name not in other_form:
            keyed["backward", name] = (recording.place(name), place[name], 1)
    for name in trained:
        keyed["gradients", name] = (*_gradient_order(name, place), 0)
    allowed = Tolerance(a, b, before)
    for stage, name in sorted(keyed, key=lambda key: keyed[key], reverse=True):
        x, y = left[stage, name], right[stage, name]
        least = _least_scale(norm, y) if stage == "gradients" else 0.0
        sums = name.removesuffix(recording.inside(name)) + "attn.sums"
        factor = 1.0
        if stage == "backward" and recording.inside(name) in THROUGH_SCORES:
            factor = max(1.0, *(largest_score(side, sums) for side in (a, b)))
        yield allowed.admit(_compare_tensor(stage, name, x, y, allowed.limit(factor), least))


def _gradient_order(parameter: str, place: dict[str, int]) -> tuple[int, int]:
    """Return the sort key of a parameter's gradient: (layer, place) of the forward tensor whose
    gradient gives it; `place`: forward tensor -> its place in order.
    """
    tensor = recording.gradient_tensor(parameter)
    if tensor in place:
        return recording.place(tensor), place[tensor]
    return recording.place(parameter), -1


def _compare_update(a: Side, b: Side, before: float) -> Iterator[TensorComparison]:
    """Yield comparisons of AdamW's moments and of each parameter's update. The update is weighted
    by |gradient|: where a gradient is rounding alone, AdamW still makes a step of full length.
    `before`: the largest difference that passed in an earlier stage; the tolerance grows with it.
    """
    left, right = a.recording.tensors, b.recording.tensors
    limit = Tolerance(a, b, before).limit()
    moments: tuple[tuple[Stage, int], ...] = (("exp_avg", 1), ("exp_avg_sq", 2))
    sizes = {stage: _stage_norm(b, stage) for stage, _ in moments}
    names = [n for n in a.recording.names("update") if ("update", n) in right]
    for name in names:
        for stage, power in moments:
            x, y = left[stage, name], right[stage, name]
            # the second moment is a square: twice the relative error
            yield _compare_tensor(stage, name, x, y, power * limit, _least_scale(sizes[stage], y))
    steps = {name: _weight_by_gradient(b, name, right["update", name]) for name in names}
    size = math.hypot(*(_tensor_norm(step) for step in steps.values()))
    stages: tuple[Stage, Stage] = ("weights", "update")
    for name, y in steps.items():
        x = _weight_by_gradient(b, name, left["update", name])
        weight, change = (_tensor_norm(right[stage, name]) for stage in stages)
        unit = max(UNITS[side.recording.rest] for side in (a, b))
        # the new weight is rounded to its dtype: relative to the change that is weight / change
        # units
        rounded = 2 * unit * weight / change if change else 0.0  # a weight is, after its update
        yield _compare_tensor("update", name, x, y, limit + rounded, _least_scale(size, y))


def _stage_norm(side: Side, stage: Stage) -> float:
    """Return the Euclidean norm of all tensors together that the side recorded in a stage."""
    recording = side.recording
    return math.hypot(*(_tensor_norm(recording.tensors[stage, n]) for n in recording.names(stage)))


def _tensor_norm(recorded: Recorded) -> float:
    """Return the Euclidean norm of a recorded tensor, joined over its ranks."""
    return torch.linalg.vector_norm(recorded.join().double()).item()


def _least_scale(norm: float, recorded: Recorded) -> float:
    """Return the smallest scale that the rows of a tensor are compared at: a thousandth of `norm`
    (of all tensors of its stage), shared over the tensor's rows.
    """
    rows = math.prod(recorded.shape[:-1]) if len(recorded.shape) > 1 else 1
    return SMALL * norm / math.sqrt(rows)


def _weight_by_gradient(b: Side, name: str, recorded: Recorded) -> Recorded:
    """Return the recorded tensor of parameter `name` times |gradient| of side B, element by
    element.
    """
    # B's gradient on both sides, so that only the updates differ
    gradient = b.recording.tensors["gradients", name].join().double().abs()
    pieces = [replace(p, values=p.values.double() * gradient[p.index]) for p in recorded.pieces]
    return Recorded(recorded.shape, recorded.partial, pieces)
