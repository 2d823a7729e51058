"""Classification of a difference: the one change that turns B's tensor into A's.

Each kind is tried in turn, and the first that explains the difference is reported: what it leaves
unexplained is at most a hundredth of the difference. Sums over ranks come first, since they say
where to look; then exchanges of whole tensors, of halves, heads and rows; then offsets and factors.
If nothing explains it, A and B compute different functions of equal inputs; the name of the tensor
identifies the function.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from dolmen.comparison import recording
from dolmen.comparison.compare import UNITS, Side, TensorComparison, flatten_rows, scores_of
from dolmen.comparison.recording import Recorded, RecordedShard

LEFT = 1e-2  # of a difference, where a kind explains it
NEARLY = 10  # times what is allowed
ROUNDED = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Fault:
    """Likely cause of a difference."""

    kind: str
    """Kind of the cause, such as "a missing sum" or "transposed"."""
    text: str
    """Sentence that explains the cause, with its numbers."""
    axis: str | None = None
    """Mesh axis that the cause has to do with, if any."""


def classify(a: Side, b: Side, row: TensorComparison) -> Fault:
    """Return the likely cause of `row`, the first difference between two recorded training steps:
    the first kind of change that turns B's tensor into A's, or a missing tensor or shape; else
    "rounding" or "other values".
    """
    if row.stage == "numbers":
        return Fault("other values", f"{row.name}: {row.note}")
    if row.name.endswith(".attn.scores") and row.stage == "forward":
        return _compare_scores(a, b, row)
    x, y = (side.recording.tensors.get((row.stage, row.name)) for side in (a, b))
    if x is None or y is None:
        return Fault("only on one side", f"only {'A' if y is None else 'B'} has it")
    if x.shape != y.shape:
        return Fault("another shape", f"{list(x.shape)} in A, {list(y.shape)} in B")
    tried = chain(_compare_ranks(a, x, y), _compare_tensors(a, b, row, x.join(), y.join()))
    return next(tried, _without_explanation(row))


def _without_explanation(row: TensorComparison) -> Fault:
    """Return the cause to report where no known change explains the difference: rounding if it is
    at most 10 times what is allowed; other values if it is larger, and for weights always.
    """
    if row.stage == "weights":
        return Fault("other values", "other values, which no known fault explains")
    if row.difference <= NEARLY * row.allowed:
        text = "so little that it may be rounding: compare in float64 (--a.dtype, --b.dtype)"
        return Fault("rounding", text)
    return Fault("other values", "a different function of equal inputs")


def _explains(predicted: Tensor, a: Tensor, b: Tensor) -> bool:
    """Return whether `predicted`, tensor `a` after a tried change, equals `b` up to 1 % of the
    difference between `a` and `b`; for small differences also up to rounding (1e-5 of b, at most 30
    % of the difference). False if shapes differ.
    """
    if predicted.shape != b.shape:
        return False
    # a change that explains nothing leaves 100 %
    left, deviation = (predicted.double() - b.double()).norm(), (a.double() - b.double()).norm()
    rounding = 1e-5 * b.double().norm()
    return bool(left <= torch.maximum(LEFT * deviation, torch.minimum(rounding, 0.3 * deviation)))


def _compare_ranks(side: Side, x: Recorded, y: Recorded) -> Iterator[Fault]:
    """Yield causes in sharding: compare the pieces `x` that the ranks of side A hold, along each
    mesh axis, with B's joined tensor `y`, to find missing or doubled sums and shards of another
    rank. Nothing if A has one rank, or if its ranks hold summands.
    """
    shards = _join_microbatches(x)
    # summands are indistinguishable, and one rank has nothing to be compared with
    if x.partial or len(shards) < 2:
        return
    full = y.join()
    for axis in ("tp", "cp", "dp", "ep", "fsdp"):
        # each line of ranks along this axis of the mesh
        for group in side.recording.topology.groups(axis):
            pieces = [shards[rank] for rank in group if rank in shards]
            if len(group) > 1 and len(pieces) == len(group):
                yield from _compare_group(axis, pieces, [full[p.index] for p in pieces])


def _compare_group(axis: str, pieces: list[RecordedShard], right: list[Tensor]) -> Iterator[Fault]:
    """Yield causes for the ranks of one line along the mesh axis `axis`, given what each holds
    (`pieces`) and should hold (`right`): a missing sum, a doubled one, or the shard of another
    rank.
    """
    n, first = len(pieces), pieces[0]
    # replicated along the axis: an all-reduce belongs here
    if all(_same_region(first, piece) for piece in pieces):
        # an all-reduce that was left out leaves partial sums on the ranks
        total = torch.stack([p.values.double() for p in pieces]).sum(0)
        if _explains(total, first.values, right[0]):
            text = f"the sum of the {axis} ranks' values is right: they were not all-reduced"
            yield Fault("a missing sum", text, axis)
    else:
        for piece, mine in zip(pieces, right, strict=True):
            for other, theirs in zip(pieces, right, strict=True):
                if piece is not other and _explains(piece.values, mine, theirs):
                    text = f"rank {piece.rank} holds the shard of rank {other.rank} along {axis}"
                    yield Fault("another rank's part", text, axis)
    for piece, mine in zip(pieces, right, strict=True):
        for factor, kind, many in (
            # a mean where a sum belongs has the same look
            (n, "a missing sum", f"1/{n} of"),
            (1 / n, "a doubled sum", f"{n} times"),
        ):
            if _explains(piece.values * factor, piece.values, mine):
                yield Fault(kind, f"rank {piece.rank} of {axis} holds {many} the right value", axis)


def _join_microbatches(recorded: Recorded) -> dict[int, RecordedShard]:
    """Return rank -> what it holds of a recorded tensor, with rows and values of its microbatches
    concatenated as they are. Where pieces have no rows, or one is from another place (`where`) than
    the first, only the first piece is kept.
    """
    joined: dict[int, RecordedShard] = {}
    for piece in recorded.pieces:
        before = joined.get(piece.rank)
        if before is None:
            joined[piece.rank] = piece
        elif before.rows is not None and piece.rows is not None and before.where == piece.where:
            rows = torch.cat((before.rows, piece.rows))
            values = torch.cat((before.values, piece.values))
            joined[piece.rank] = replace(before, rows=rows, values=values)
    return joined


def _same_region(left: RecordedShard, right: RecordedShard) -> bool:
    """Return whether two ranks hold the same region of the tensor, so that they should hold equal
    values.
    """
    if left.rows is None or right.rows is None:
        return left.where == right.where
    return left.where == right.where and torch.equal(left.rows, right.rows)


def _compare_tensors(
    a: Side, b: Side, row: TensorComparison, x: Tensor, y: Tensor
) -> Iterator[Fault]:
    """Yield causes for which one change explains how A's joined tensor `x` and B's `y` differ, the
    most specific kinds first; only "not finite" if A has such elements.
    """
    if not x.isfinite().all():
        yield Fault("not finite", f"{int((~x.isfinite()).sum())} elements of A are not finite")
        return
    x, y = x.double(), y.double()
    if not x.any() and y.any():
        yield Fault("missing", "A has zeros")
    yield from _find_terms(b, row, x, y)
    yield from _find_exchange(a, b, row, x, y)
    yield from _find_permutation(a, row, x, y)
    yield from _find_offset(a, row, x, y)
    yield from _find_scale(x, y, row)
    yield from _find_region(a, row, x, y)
    yield from _find_rounding(row, x, y)


def _find_rounding(row: TensorComparison, x: Tensor, y: Tensor) -> Iterator[Fault]:
    """Yield a cause where one side's values are exactly representable in bf16 or fp16, and the
    other side's are within that dtype's rounding of them.
    """
    for side, other, coarse in (("A", "B", x), ("B", "A", y)):
        for dtype, name in ROUNDED.items():
            near = (x - y).abs().max() <= UNITS[dtype] * y.abs().max()
            if near and torch.equal(coarse, coarse.to(dtype).double()):
                what = f"{other}'s numbers, rounded to {name}"
                text = what if row.stage == "weights" else f"{name} numbers"
                yield Fault("rounding", f"{side} holds {text}")


def _find_terms(b: Side, row: TensorComparison, x: Tensor, y: Tensor) -> Iterator[Fault]:
    """Yield causes where A's forward tensor `x` is B's `y` with another forward tensor of the same
    or the previous layer (a residual, for example) not added, or added twice.
    """
    if row.stage != "forward":
        return
    layer = recording.layer_of(row.name)
    for name in b.recording.names("forward"):
        # the residual stream of the layer before is a term too
        near = recording.layer_of(name) in (layer, None if not layer else layer - 1)
        other = b.recording.tensor("forward", name) if near and name != row.name else None
        if other is None or other.shape != x.shape:
            continue
        for sign, kind, text in (
            (-1, "missing term", f"{name} is not added"),
            (1, "added twice", f"{name} is added twice"),
        ):
            if _explains(y + sign * other.double(), y, x):
                yield Fault(kind, text)


def _find_exchange(
    a: Side, b: Side, row: TensorComparison, x: Tensor, y: Tensor
) -> Iterator[Fault]:
    """Yield a cause where A's tensor equals another tensor of B, of the same stage, layer and
    shape: the two were exchanged, or one was taken for the other.
    """
    layer = recording.layer_of(row.name)
    for name in b.recording.names(row.stage):
        if name == row.name or recording.layer_of(name) != layer:
            continue
        other, mine = (side.recording.tensor(row.stage, name) for side in (b, a))
        if other is None or other.shape != x.shape or mine is None:
            continue
        if _explains(other.double(), y, x):
            # and A's tensor of that name is B's of this
            both = _explains(mine.double(), x, y)
            text = f"exchanged with {name}" if both else f"A's equals B's {name}"
            yield Fault("swapped", text)


def _find_permutation(side: Side, row: TensorComparison, x: Tensor, y: Tensor) -> Iterator[Fault]:
    """Yield causes where A holds the same numbers in another order: transposed, halves swapped,
    heads permuted, tokens shifted, or rotated by rope.
    """
    if x.ndim == 2 and x.shape[0] == x.shape[1] and _explains(x.t(), x, y):
        yield Fault("transposed", "A's is the transpose of B's")
    layer = recording.layer_of(row.name)
    activation = row.stage in ("forward", "backward")
    dims = range(x.ndim)
    for dim in dims:
        if activation and dim == 0:
            continue
        n = x.shape[dim]
        if n % 2 == 0 and _explains(_halves(x, dim), x, y):
            yield Fault("swapped halves", f"the halves of dim {dim} are exchanged")
        size = side.spec.blocks[layer].mixer.head_size if layer is not None else 0
        if size and n % size == 0 and ".attn." in row.name:
            yield from _find_head_order(x, y, dim, size)
    if activation:
        yield from _find_shift(x, y, side.length)
        yield from _find_rotation(side, row, x, y)


def _halves(x: Tensor, dim: int) -> Tensor:
    """Return `x` with its two halves along `dim` exchanged."""
    first, second = x.chunk(2, dim)
    return torch.cat((second, first), dim)


def _find_head_order(x: Tensor, y: Tensor, dim: int, size: int) -> Iterator[Fault]:
    """Yield causes where heads of `size` elements along `dim` are permuted, their halves are
    swapped, or their rope pairs are neighbours instead of halves (or the reverse).
    """
    left, right = (t.movedim(dim, 0).reshape(-1, size, t.numel() // t.shape[dim]) for t in (x, y))
    if len(left) > 1:
        # each head of B is matched with the nearest of A
        deviation = torch.cdist(right.flatten(1)[None], left.flatten(1)[None])[0]
        order = deviation.argmin(1)
        if len(order.unique()) == len(order) and _explains(left[order], left, right):
            yield Fault("permuted heads", f"A's heads are B's {order.argsort().tolist()}")
    half = size // 2
    if size % 2 == 0 and half:
        if _explains(torch.cat((left[:, half:], left[:, :half]), 1), left, right):
            yield Fault("swapped halves", "the halves of each head are exchanged")
        for order, pairs in (
            ("adjacent elements, B's are halves", left.unflatten(1, (half, 2)).transpose(1, 2)),
            ("halves, B's are adjacent elements", left.unflatten(1, (2, half)).transpose(1, 2)),
        ):
            if _explains(pairs.reshape(left.shape), left, right):
                yield Fault("permuted pairs", f"A's pairs of rope are {order}")


def _find_shift(x: Tensor, y: Tensor, length: int) -> Iterator[Fault]:
    """Yield causes where A's tokens are those 1 or 2 positions earlier or later in B, in each
    sequence of `length` tokens.
    """
    # [sequences, length, columns]: a shift does not cross sequences
    left, right = (t.unflatten(0, (-1, length)) for t in (x, y))
    for by in (1, -1, 2, -2):
        stays, from_ = (
            (slice(by, None), slice(None, -by)) if by > 0 else (slice(None, by), slice(-by, None))
        )
        if _explains(left[:, from_], left[:, stays], right[:, stays]):
            yield Fault(
                "shifted", f"A's tokens are shifted by {abs(by)} position{'s' * (abs(by) > 1)}"
            )


def _find_rotation(side: Side, row: TensorComparison, x: Tensor, y: Tensor) -> Iterator[Fault]:
    """Yield a cause where rope pairs of queries or keys have equal length and another direction:
    other angles if the first token agrees (its angle is 0), else other positions. Nothing for other
    tensors.
    """
    layer, word = recording.layer_of(row.name), recording.inside(row.name)
    if layer is None or word not in ("attn.query", "attn.key"):
        return
    size = side.spec.blocks[layer].mixer.head_size
    left, right = (t.unflatten(1, (-1, size)) for t in (x, y))
    # pairs as halves of a head, or as neighbours
    for halves in (True, False):
        lengths = [
            torch.hypot(*(t.chunk(2, -1) if halves else (t[..., ::2], t[..., 1::2])))
            for t in (left, right)
        ]
        if (lengths[0] - lengths[1]).abs().max() > LEFT * (left - right).abs().max():
            continue
        # token 0 has angle 0 under any base and scaling
        starts = (left - right).unflatten(0, (-1, side.length))[:, 0].abs().max()
        if starts <= 1e-4 * right.abs().max():
            yield Fault("other angles", "rotated by other angles: rope's base or scaling")
        else:
            yield Fault("other positions", "rotated from the first token on: positions are shifted")


def _find_offset(a: Side, row: TensorComparison, x: Tensor, y: Tensor) -> Iterator[Fault]:
    """Yield causes where A is B plus a constant. For a 2-D forward tensor: the same vector for each
    token (a bias), or the same vectors by position in every sequence. For any other tensor: a
    scalar.
    """
    deviation = x - y
    if x.ndim == 2 and row.stage == "forward":
        # mean over tokens
        same = deviation.mean(0, keepdim=True).expand_as(deviation)
        if _explains(same, torch.zeros_like(deviation), deviation):
            yield Fault("an offset", "the same vector is added to every token: a bias")
        by_position = deviation.unflatten(0, (-1, a.length)).mean(0, keepdim=True)
        by_position = by_position.expand(len(deviation) // a.length, -1, -1).reshape(
            deviation.shape
        )
        if _explains(by_position, torch.zeros_like(deviation), deviation):
            yield Fault("an offset by position", "the same is added in every sequence")
    elif x.ndim:
        same = deviation.mean() * torch.ones_like(deviation)
        if _explains(same, torch.zeros_like(deviation), deviation):
            yield Fault("an offset", f"{deviation.mean().item():+.4g} everywhere")


def _find_scale(x: Tensor, y: Tensor, row: TensorComparison) -> Iterator[Fault]:
    """Yield causes where A is B times one number (by least squares), or times one per row or
    column.
    """
    # least squares: minimises |A - factor B|
    factor = (x * y).sum() / y.square().sum()
    if _explains(factor * y, y, x):
        yield Fault("a scale", f"A is {factor.item():.6g} times B")
    if x.ndim != 2:
        return
    for dim, text in ((1, "each token, such as a norm's"), (0, "each column, as a weight does")):
        # least squares per row or column
        by = (x * y).sum(dim, keepdim=True) / y.square().sum(dim, keepdim=True)
        if _explains(by * y, y, x):
            yield Fault(
                "a scale by row" if dim else "a scale by column", f"another factor for {text}"
            )


def _find_region(side: Side, row: TensorComparison, x: Tensor, y: Tensor) -> Iterator[Fault]:
    """Yield causes where only some positions, rows or columns of a matrix differ, by more than 1 %
    of the largest difference.
    """
    if x.ndim != 2:
        return
    left, right = flatten_rows(x), flatten_rows(y)
    deviation = (left - right).abs()
    limit = 1e-2 * deviation.max()
    rows, columns = (deviation.amax(1) > limit), (deviation.amax(0) > limit)
    activation = row.stage in ("forward", "backward")
    if activation:
        places = rows.view(-1, side.length).any(0).nonzero().flatten().tolist()
        if 0 < places[0]:
            yield Fault("from a position on", f"tokens differ from position {places[0]} on")
        if places[-1] < side.length - 1:
            yield Fault("some positions", f"only tokens up to position {places[-1]} differ")
    for unit, which in (("rows", rows), ("columns", columns)):
        number = int(which.sum())
        if number <= len(which) // 2 and not (activation and unit == "rows"):
            first = int(which.nonzero()[0])
            yield Fault("a part", f"{number} of {len(which)} {unit} differ, from {first} on")


def _compare_scores(a: Side, b: Side, row: TensorComparison) -> Fault:
    """Return the cause of a difference in attention probabilities, recomputed from each side's
    recorded queries and keys: another mask, a scale of the scores, or other values.
    """
    x, y = scores_of(a, row.name), scores_of(b, row.name)
    assert x is not None and y is not None
    # a masked pair has probability exactly 0
    only_a, only_b = (x > 0) & (y == 0), (y > 0) & (x == 0)
    if only_a.any() or only_b.any():
        side, pairs = ("A", only_a) if only_a.any() else ("B", only_b)
        _, _, query, key = pairs.nonzero()[0].tolist()
        return Fault("another mask", f"only in {side} does token {query} attend to token {key}")
    seen = (x > 0) & (y > 0)
    # log softmax is the score up to a constant per query, which its mean removes
    logs = [torch.where(seen, t.clamp(min=1e-30).log(), 0.0).double() for t in (x, y)]
    counts = seen.sum(-1, keepdim=True)
    left, right = (torch.where(seen, t - t.sum(-1, keepdim=True) / counts, 0.0) for t in logs)
    factor = ((left * right).sum() / right.square().sum()).item()
    if _explains(factor * right, right, left):
        return Fault("a scale", f"A's scores are {factor:.6g} times B's")
    return Fault("other values", "scores are computed differently from equal queries and keys")
