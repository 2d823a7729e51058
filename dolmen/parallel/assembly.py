"""Matrices that lie in parts on many ranks, each assembled on one of them, its owner; what that
makes of it goes back to all who hold a part.

    at rest         fsdp ->  0    1            Of each matrix the ranks of fsdp (of experts, edp)
             tp 0           a00  a01           first send what they hold to the owner's rank on
             tp 1           a10  a11           that axis, of every rank of tp its part; then the
                                               ranks of tp send theirs to the owner. Back it goes
    fsdp     tp 0           a0   .             the same way. fsdp was the last to cut, so it is
             tp 1           a1   .             the first to put together, and over it, which may
    tp       tp 0           .    .             cross machines, every element goes once.
             tp 1           a    .

Owners divide the work: of what fewest ranks hold first, the costliest first, each matrix goes to
that rank of those who hold it which has least to do. All of it is arithmetic, known before the
first step.

An axis whose ranks all hold the whole sends nothing on the way there, and to each of them on the
way back. Of n elements over an axis of k ranks that cuts them, n (k - 1) / k move each way; where
it does not, n (k - 1) move back. So it is over the ranks of fsdp for each part that tp cuts, or,
where tp does not cut, for each rank of tp.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from dolmen.core import state, transfers
from dolmen.core.mesh import Axis, Mesh

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Entry:
    """A matrix on one axis, seen from one of its ranks."""

    number: int
    """Index of the matrix among those that this rank holds a part of."""
    owner: int
    """Its rank on the axis."""
    dim: int | None
    """Dim that the axis shards; None: it replicates."""
    parts: tuple[Shape, ...]
    """Shape of the part of each rank of the axis."""


class _PartExchange:
    """Sends parts of matrices to their owners over one axis, and results back: two all-to-alls,
    however many matrices.
    """

    def __init__(self, axis: Axis, entries: list[_Entry]):
        """Compute what this rank sends and receives over `axis` for the matrices `entries`, each
        way, in elements per rank.
        """
        me, ranks = axis.rank, range(axis.size)
        self.axis, self.entries = axis, entries
        self.mine = [e for e in entries if e.owner == me]
        remote = [e for e in entries if e.owner != me]
        # stable within an owner: both sides list its matrices in the same order
        self.others = sorted(remote, key=lambda e: e.owner)  # in the order of arrival
        self.cut = any(e.dim is not None for e in entries)

        def sizes(rank: int, where: int, entries: list[_Entry]) -> int:
            """Return how many elements rank `where` holds of the matrices that rank `rank` owns."""
            return sum(math.prod(e.parts[where]) for e in entries if e.owner == rank)

        cut = [e for e in entries if e.dim is not None]
        self.peers = [r for r in ranks if r != me]
        self.there = [sizes(r, me, cut) if r != me else 0 for r in ranks]
        self.from_there = [sizes(me, r, cut) if r != me else 0 for r in ranks]
        self.back = [sizes(me, r, entries) if r != me else 0 for r in ranks]
        self.from_back = [sizes(r, me, entries) if r != me else 0 for r in ranks]

    def gather(self, local: dict[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """Send this rank's parts (by matrix number) to their owners on the axis; return the joined
        matrices that this rank owns, by number. Sends nothing where the axis cuts none of them.
        `like` gives dtype and device. Collective.
        """
        # every rank of the axis already holds the whole
        if not self.cut:
            return {e.number: local[e.number] for e in self.mine}
        going = [local[e.number] for e in self.others if e.dim is not None]
        cut = [e for e in self.mine if e.dim is not None]
        shapes = [e.parts[r] for r in self.peers for e in cut]
        coming = iter(self._exchange_parts(going, self.there, self.from_there, shapes, like))
        parts: dict[int, list[Tensor]] = {e.number: [] for e in self.mine}
        for r in range(self.axis.size):
            for e in self.mine:
                if r == self.axis.rank:
                    parts[e.number].append(local[e.number])
                elif e.dim is not None:
                    parts[e.number].append(next(coming))
        return {e.number: torch.cat(parts[e.number], e.dim or 0) for e in self.mine}

    def scatter(self, done: dict[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """Send the results `done` of the matrices that this rank owns, by number, back over the
        axis; return this rank's part of the result of every matrix. `like` gives dtype and device.
        Collective.
        """
        parts = {e.number: _parts(done[e.number], e) for e in self.mine}
        going = [parts[e.number][r] for r in self.peers for e in self.mine]
        shapes = [e.parts[self.axis.rank] for e in self.others]
        coming = self._exchange_parts(going, self.back, self.from_back, shapes, like)
        local = {e.number: parts[e.number][self.axis.rank] for e in self.mine}
        return local | {e.number: x for e, x in zip(self.others, coming, strict=True)}

    def _exchange_parts(
        self,
        going: list[Tensor],
        send: list[int],
        receive: list[int],
        shapes: list[Shape],
        like: Tensor,
    ) -> list[Tensor]:
        """Send `going`, tensors in the order of their destination ranks, by one all-to-all; return
        the received tensors, in these `shapes`, in the order of ranks. `send` and `receive`:
        elements per rank. `like`: a tensor of their dtype and device.
        """
        flat = torch.cat([x.reshape(-1) for x in going]) if going else like.new_empty(0)
        axis = self.axis
        arrived = transfers.wait(transfers.start_all_to_all(flat, receive, send, axis), axis)
        pieces = arrived.split([math.prod(shape) for shape in shapes])
        return [x.view(shape) for x, shape in zip(pieces, shapes, strict=True)]


def _parts(full: Tensor, entry: _Entry) -> list[Tensor]:
    """Return the part of a matrix for each rank of an axis, in the order of ranks; the whole matrix
    for each where the axis does not cut it.
    """
    if entry.dim is None:
        return [full] * len(entry.parts)
    return list(full.split([shape[entry.dim] for shape in entry.parts], entry.dim))


@dataclass(frozen=True)
class _Layout:
    """How the matrices of one parameter are sharded. `inner`: the axes of more than one rank that a
    matrix is spread over, innermost first, each with the dim it cuts, or None if it replicates;
    `outer`: the axes that cut the stack, so that each of their ranks has other matrices.
    """

    shape: Shape
    stack: int
    inner: tuple[tuple[Axis, int | None], ...]
    outer: tuple[Axis, ...]


class Assembly:
    """Gathers each matrix of a fixed list of parameters on its owner rank, and scatters results
    back.
    """

    def __init__(self, parameters: Sequence[Tensor], mesh: Mesh, cost: Callable[[int, int], float]):
        """Assign each matrix to an owner rank, so that the work is balanced. `parameters`: [rows,
        columns], or stacks of such; the same ones in the same order on all ranks that share them.
        `cost(rows, columns)`: the work of one matrix. Sends nothing.
        """
        ways = [_layout(p, mesh) for p in parameters]
        owners = _owners(ways, mesh, cost)
        self.owned: list[int] = []
        """Numbers of the matrices that this rank owns, among those it holds a part of."""
        self.shapes: list[Shape] = []
        """Full shape of each matrix that this rank holds a part of."""
        entries: dict[Axis, list[_Entry]] = {a: [] for a in (mesh.fsdp, mesh.edp, mesh.ep, mesh.tp)}
        for way, owned in zip(ways, owners, strict=True):
            here = tuple(axis.rank for axis in way.outer)
            for index, owner in enumerate(owned):
                if _holder_ranks(way, index) == here:
                    self._add(entries, way, owner)
        self.exchanges = [_PartExchange(axis, e) for axis, e in entries.items() if e]

    def _add(self, entries: dict[Axis, list[_Entry]], way: _Layout, owner: tuple[int, ...]) -> None:
        """Give the next number to a matrix that this rank holds a part of, and append its shape to
        `shapes`; add it to `entries` of each axis, innermost first, up to the axis on which this
        rank sends its part away. If it never does, it is the owner: add the number to `owned`.
        `owner`: the owner's rank on each inner axis.
        """
        number, shape, cuts = len(self.shapes), way.shape, []
        # the outermost axis has cut the matrix first: shapes shrink inwards
        for axis, dim in reversed(way.inner):
            parts = tuple(_part_shapes(shape, dim, axis.size))
            cuts.append((axis, dim, parts))
            shape = parts[axis.rank]
        self.shapes.append(way.shape)
        for (axis, dim, parts), rank in zip(reversed(cuts), owner, strict=True):
            entries[axis].append(_Entry(number, rank, dim, parts))
            # it leaves this rank here: only the owner's rank carries it on to the next axis
            if rank != axis.rank:
                return
        self.owned.append(number)

    def apply(self, make: Callable[[Tensor], Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        """Apply `make` to each whole matrix on its owner and return this rank's parts of the
        results. `parts`: this rank's part of each matrix, those of a stack one after the other;
        shapes stay. Collective.
        """
        if not parts:
            return []
        tensors = dict(enumerate(parts))
        for exchange in self.exchanges:
            coming = {e.number: tensors.pop(e.number) for e in exchange.entries}
            tensors |= exchange.gather(coming, parts[0])
        tensors = {number: make(tensors[number]) for number in self.owned}
        for exchange in reversed(self.exchanges):
            # back through the axes in reverse: each exchange splits what it had joined
            owned = {e.number: tensors.pop(e.number) for e in exchange.mine}
            tensors |= exchange.scatter(owned, parts[0])
        return [tensors[number] for number in range(len(parts))]


def _part_shapes(shape: Shape, dim: int | None, ranks: int) -> list[Shape]:
    """Return the shape on each rank of a tensor cut along dim, in the order of ranks; the last may
    have less. `dim` None: the whole shape on each.
    """
    if dim is None:
        return [shape] * ranks
    most = -(-shape[dim] // ranks)
    sizes = (max(0, min(most, shape[dim] - r * most)) for r in range(ranks))
    return [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]


def _layout(p: Tensor, mesh: Mesh) -> _Layout:
    """Return how the matrices of a parameter are sharded, from its placements; axes of one rank are
    left out.
    """
    axes = {axis.name: axis for axis in (mesh.fsdp, mesh.edp, mesh.ep, mesh.tp)}
    stacked = p.ndim - 2
    inner, outer = [], []
    for name, dim in state.sharded_dims(p).items():
        if axes[name].size == 1:
            continue
        # a cut stack gives each rank other matrices, whole along this axis
        if stacked and dim == 0:
            outer.append(axes[name])
        else:
            inner.append((axes[name], None if dim is None else dim - stacked))
    stack = p.shape[0] if stacked else 1
    return _Layout(tuple(p.shape[stacked:]), stack, tuple(inner), tuple(outer))


def _owners(
    ways: list[_Layout], mesh: Mesh, cost: Callable[[int, int], float]
) -> list[list[tuple[int, ...]]]:
    """Assign an owner to each matrix of each parameter, greedily: fewest holders first, then
    costliest, to the least loaded rank that holds a part. Returns, per parameter and matrix, the
    owner's rank on each inner axis. All ranks of a stage compute the same.
    """
    # how far apart neighbours on an axis are among the ranks of a stage: fsdp = edp x ep, x tp
    tp, ep = mesh.tp.size, mesh.ep.size
    strides = {"tp": 1, "fsdp": tp, "ep": tp, "edp": tp * ep}
    load = [0.0] * (mesh.fsdp.size * tp)
    owners: list[list[tuple[int, ...]]] = [[()] * way.stack for way in ways]
    matrices = [(i, index) for i, way in enumerate(ways) for index in range(way.stack)]
    holders = [math.prod(axis.size for axis, _ in way.inner) for way in ways]
    for i, index in sorted(matrices, key=lambda at: (holders[at[0]], -cost(*ways[at[0]].shape))):
        way = ways[i]
        outer, places = zip(_holder_ranks(way, index), way.outer, strict=True), {}
        first = sum(r * strides[axis.name] for r, axis in outer)
        for ranks in product(*(range(axis.size) for axis, _ in way.inner)):
            steps = (r * strides[axis.name] for r, (axis, _) in zip(ranks, way.inner, strict=True))
            places[ranks] = first + sum(steps)
        # ties go to the lowest rank, so that every rank computes the same owners
        _, place, owners[i][index] = min((load[at], at, ranks) for ranks, at in places.items())
        load[place] += cost(*way.shape)
    return owners


def _holder_ranks(way: _Layout, index: int) -> tuple[int, ...]:
    """Return the ranks on the outer axes that hold the matrix at `index` of a stack."""
    ranks, size = [], way.stack
    for axis in reversed(way.outer):  # the outermost has cut first
        most = -(-size // axis.size)
        ranks.append(index // most)
        size, index = min(most, size - ranks[-1] * most), index % most
    return tuple(reversed(ranks))
