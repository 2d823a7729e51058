"""Examples of any length packed into rows of one: best fit decreasing (Johnson, 1974).

The longest first, each into the row with the least room that it fits in, else into a new one: never
more than 11/9 of the fewest rows there could be, and in practice within a percent.

What goes together, as two answers to a prompt, is packed into rows that lie side by side, a piece
into each: the longest into the row with the most room, so that such rows are filled alike.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Rows of `room` as the indices of what lies in each. Of equal lengths the earlier comes first.
    Raises ValueError for a length that is over `room`.
    """
    return pack_beside(np.asarray(lengths, np.int64)[:, None], room)


def pack_beside(lengths: Int64[np.ndarray, "items pieces"], room: int) -> list[list[int]]:
    """The same of items of one piece or of two: two consecutive rows have a piece each of the items
    that they have, in the same order. Piece i of item n is n * pieces + i. Raises as `pack`.
    """
    if lengths.max(initial=0) > room:
        raise ValueError(f"a length is {lengths.max()}, over the room of {room}")
    pieces = lengths.shape[1]
    assert pieces in (1, 2), "what fits is known by the longer piece and the shorter"
    rows: list[list[int]] = []
    rooms: list[list[int]] = []
    units = _Units()
    for item in np.argsort(-lengths.max(1), kind="stable").tolist():
        sizes = lengths[item].tolist()
        unit = units.take(max(sizes), min(sizes))
        if unit is None:
            unit = len(rooms)
            rooms.append([room] * pieces)
            rows += [[] for _ in range(pieces)]
        own = rooms[unit]
        emptiest = sorted(range(pieces), key=lambda row: -own[row])
        largest = sorted(range(pieces), key=lambda piece: -sizes[piece])
        for row, piece in zip(emptiest, largest, strict=True):
            rows[unit * pieces + row].append(item * pieces + piece)
            own[row] -= sizes[piece]
        units.put(unit, max(own), min(own))
    return rows


class _Units:
    """Rows side by side, by the room of the emptier and of the fuller one."""

    def __init__(self) -> None:
        self.having: dict[tuple[int, int], list[int]] = defaultdict(list)
        # bit n: whether an emptier one has room n, and of each the rooms of fuller ones
        self.emptier, self.fuller = 0, defaultdict(int)

    def put(self, unit: int, more: int, less: int) -> None:
        self.having[more, less].append(unit)
        self.emptier |= 1 << more
        self.fuller[more] |= 1 << less

    def take(self, long: int, short: int) -> int | None:
        """Those with the least room that have so much, taken out; None: none have."""
        fitting = self.emptier >> long
        while fitting:
            more = long + lowest(fitting)
            if beside := self.fuller[more] >> short:
                less = short + lowest(beside)
                unit = self.having[more, less].pop()
                if not self.having[more, less]:
                    self.fuller[more] &= ~(1 << less)
                if not self.fuller[more]:
                    self.emptier &= ~(1 << more)
                return unit
            fitting &= fitting - 1
        return None


def lowest(bits: int) -> int:
    """The number of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1
