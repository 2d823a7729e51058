"""Packs examples into rows, and rows into batches.

Examples of any length packed into rows of one: best fit decreasing (Johnson, 1974).

The longest first, each into the row with the least room that it fits in, else into a new one: never
more than 11/9 of the fewest rows there could be, and in practice within a percent.

What goes together, as two completions to a prompt, is packed into rows that lie side by side, a
piece into each: the longest into the row with the most room, so that such rows are filled alike.

Chats in packed rows, as batches.

    row        a a a a|b b b|. .          two examples, of five tokens and of four, and padding
    labels     - a a a|- b b|- -          of the tokens that are trained; `-` is IGNORED
    starts     0 0 0 0 4 4 4 7 7          of documents: no example sees another
    positions  0 1 2 3 0 1 2 0 1

Rows are packed once. An epoch is a permutation of them, keyed by (seed, epoch); so sample i is
known at once, for any i, and each example is read once per epoch.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int64

from dolmen.core.determinism import seed_of
from dolmen.data.batch import Batch
from dolmen.data.examples import Examples
from dolmen.data.mixture import Part, TokenStream, permute_index
from dolmen.ops.attention import Documents
from dolmen.ops.loss import IGNORED


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack items of `lengths` into rows of `room` by best fit decreasing; return the indices in
    each row. Ties go to the earlier item. Raises ValueError for a length over `room`.
    """
    return pack_pairs(np.asarray(lengths, np.int64)[:, None], room)


def pack_pairs(lengths: Int64[np.ndarray, "items pieces"], room: int) -> list[list[int]]:
    """Pack items of one or two pieces (the two completions of a pair) into rows of `room` tokens;
    return the pieces of each row, piece i of item n as n * pieces + i. Rows 2 r and 2 r + 1 hold
    one piece each of the same items, in the same order. Raises ValueError for a piece longer than
    `room`.
    """
    if lengths.max(initial=0) > room:
        raise ValueError(f"the longest item ({lengths.max()}) does not fit into {room} tokens")
    pieces = lengths.shape[1]
    assert pieces in (1, 2), "what fits is known by the longer piece and the shorter"
    rows: list[list[int]] = []
    rooms: list[list[int]] = []
    units = _Units()
    # best fit decreasing: the longest first
    for item in np.argsort(-lengths.max(1), kind="stable").tolist():
        sizes = lengths[item].tolist()
        unit = units.take(max(sizes), min(sizes))
        if unit is None:
            unit = len(rooms)
            rooms.append([room] * pieces)
            rows += [[] for _ in range(pieces)]
        free = rooms[unit]
        # the longer piece goes into the emptier row: both stay filled alike
        emptiest = sorted(range(pieces), key=lambda row: -free[row])
        largest = sorted(range(pieces), key=lambda piece: -sizes[piece])
        for row, piece in zip(emptiest, largest, strict=True):
            rows[unit * pieces + row].append(item * pieces + piece)
            free[row] -= sizes[piece]
        # indexed again under its new room
        units.add(unit, max(free), min(free))
    return rows


class _Units:
    """Index of rows (or pairs of rows) by the room of the emptier and of the fuller one, as bit
    sets.
    """

    def __init__(self) -> None:
        """The index begins without units."""
        # (room of the emptier, of the fuller) -> units
        self.having: dict[tuple[int, int], list[int]] = defaultdict(list)
        # bit n: whether an emptier one has room n, and of each the rooms of fuller ones
        self.emptier, self.fuller = 0, defaultdict(int)

    def add(self, unit: int, more: int, less: int) -> None:
        """Add row (or pair of rows) number `unit`, with `more` room left in its emptier row and
        `less` in its fuller one.
        """
        self.having[more, less].append(unit)
        self.emptier |= 1 << more
        self.fuller[more] |= 1 << less

    def take(self, long: int, short: int) -> int | None:
        """Remove and return the unit with the least room in which an item with pieces of `long` and
        `short` tokens fits; None if there is none.
        """
        # bit n: some unit has room long + n in its emptier row
        fitting = self.emptier >> long
        while fitting:
            more = long + lowest(fitting)
            if rooms := self.fuller[more] >> short:
                less = short + lowest(rooms)
                unit = self.having[more, less].pop()
                if not self.having[more, less]:
                    self.fuller[more] &= ~(1 << less)
                if not self.fuller[more]:
                    self.emptier &= ~(1 << more)
                return unit
            fitting &= fitting - 1
        return None


def lowest(bits: int) -> int:
    """Return the index of the lowest bit of `bits` that is set."""
    return (bits & -bits).bit_length() - 1


LabelMode = Literal["next", "end"]
"""Labelled tokens of an example: "next" is each token but the first, predicted from those before
it; "end" is the last one only, for models with a scalar head.
"""


def shuffle_row(number: int, size: int, seed: int) -> int:
    """Return the row that is read as number `number`, counted over all epochs, of `size` rows; each
    epoch is a new permutation by `seed`.
    """
    epoch, within = divmod(number, size)
    return int(permute_index(np.array([within]), size, seed_of(seed, "row", epoch))[0])


class PackedRows:
    """Examples `chosen`, packed into rows of `sequence_length`, or one per row without `packing`.
    Examples that belong together (the two completions of a pair: `together` is 2) are consecutive
    in `chosen`, and lie in consecutive rows in the same order. `per_example`: a number per example
    that the batch carries for each of its tokens.
    """

    bytes = None

    def __init__(
        self,
        examples: Examples,
        chosen: np.ndarray,
        sequence_length: int,
        *,
        packing: bool = True,
        weighted: bool = False,
        together: int = 1,
        label_mode: LabelMode = "next",
        seed: int = 0,
        per_example: Mapping[str, np.ndarray] | None = None,
    ):
        """Pack all rows now. `weighted`: batches carry the examples' loss weights."""
        self.examples, self.chosen, self.together = examples, chosen, together
        self.sequence_length, self.weighted = sequence_length, weighted
        self.label_mode, self.seed = label_mode, seed
        # what else a batch brings of each token that is predicted, by name: of all tokens
        self.numbers: dict[str, np.ndarray] = {}
        # and of each example, for all its tokens
        self.per_example = dict(per_example or {})
        self.first = 0 if label_mode == "end" else 1  # token of an example that has a place
        lengths = self._lengths()[chosen].reshape(-1, together)
        # one each, where they are not packed
        # without packing each example claims a whole row
        room = lengths if packing else np.full_like(lengths, sequence_length)
        self.rows = [chosen[row].tolist() for row in pack_pairs(room, sequence_length)]

    def _lengths(self) -> np.ndarray:
        """Return the number of positions that each example takes in a row: its tokens, or one less
        where the last token is not an input.
        """
        return self.examples.places() + 1 - self.first

    @property
    def parts(self) -> Sequence[Part]:
        """The chosen examples as one source of a mixture, for statistics."""
        spans = [self.examples.span(index) for index in sorted(self.chosen.tolist())]
        starts, stops = (
            np.array([key(span) for span in spans], np.int64)
            for key in (lambda s: s.start, lambda s: s.stop)
        )
        stream = TokenStream.from_ranges(self.examples.tokens, starts, stops)
        return [Part(self.examples.name, Fraction(1), stream)]

    @property
    def tokens(self) -> int:
        """Number of labelled tokens of all rows; with label mode "end" one per example."""
        if self.label_mode == "end":
            return len(self.chosen)
        return int(self.examples.predictions()[self.chosen].sum())

    @property
    def full(self) -> float:
        """Share of the positions of all rows that are not padding."""
        places = int(self._lengths()[self.chosen].sum())
        return places / (len(self.rows) * self.sequence_length)

    def epochs(self, samples: int) -> dict[str, float]:
        """Return {name of the source: how many epochs (a fraction) the first `samples` rows are};
        an epoch is all rows once.
        """
        return {self.examples.name: samples / len(self.rows)}

    def read(self, first: int, count: int) -> list[list[int]]:
        """Return the rows (lists of example indices) that are samples first .. first + count - 1;
        each epoch is a new permutation.
        """
        units, rows = len(self.rows) // self.together, []
        for sample in range(first, first + count):
            # rows of a pair are consecutive samples: the same microbatch sees both
            unit, row = divmod(sample, self.together)
            rows.append(self.rows[shuffle_row(unit, units, self.seed) * self.together + row])
        return rows

    def batches(
        self,
        batch_size: int,
        max_sequences: int | None = None,
        first_row: int = 0,
        rows: int | None = None,
    ) -> Iterator[Batch]:
        """Yield batches of `rows` rows (unset: `batch_size`) from `first_row` of each step of
        `batch_size`: a rank's part. At most about `max_sequences` rows, evenly spread, are read
        (None: all); the last batch is padded with empty rows.
        """
        rows, together = rows or batch_size, self.together
        units = len(self.rows) // together
        chosen = min(units, max(1, (max_sequences or len(self.rows)) // together))
        # evenly spread units, all rows of each
        picked = [
            self.rows[index * units // chosen * together + row]
            for index in range(chosen)
            for row in range(together)
        ]
        for first in range(first_row, -(-len(picked) // batch_size) * batch_size, batch_size):
            selected = picked[first : first + rows]
            yield self.batch(selected + [[]] * (rows - len(selected)))

    def documents(self, first: int, count: int) -> list[str]:
        """Return a line for each of the samples first .. first + count - 1 that says which examples
        it holds.
        """
        name = self.examples.name
        return [f"{name}: examples {', '.join(map(str, row))}" for row in self.read(first, count)]

    def places(self, row: Sequence[int]) -> Iterator[tuple[int, slice, slice]]:
        """Yield, for each example of a row (a list of example indices), its index, the slice of
        positions that it takes in the row, and the slice of the source's tokens whose values belong
        to these positions.
        """
        place = 0
        for index in row:
            span = self.examples.span(index)
            span_slice = slice(span.start + self.first, span.stop)
            here = slice(place, place + span_slice.stop - span_slice.start)
            yield index, here, span_slice
            place = here.stop

    def batch(self, rows: Sequence[Sequence[int]]) -> Batch:
        """Return the batch of these rows, each a list of example indices: tokens, labels,
        positions, a document per example and one of padding, and per-token numbers and weights.
        """
        shape = len(rows), self.sequence_length
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        weights, starts = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
        numbers = {name: np.zeros(shape, values.dtype) for name, values in self.numbers.items()}
        numbers |= {name: np.zeros(shape, np.float32) for name in self.per_example}
        for row, indices in enumerate(rows):
            end = 0
            for index, here, span_slice in self.places(indices):
                tokens[row, here], labels[row, here], counts = self._encode_example(index)
                # all of an example has its first place as document start
                weights[row, here], starts[row, here] = counts, here.start
                for name, values in self.numbers.items():
                    numbers[name][row, here] = values[span_slice]
                for name, values in self.per_example.items():
                    numbers[name][row, here] = values[index]
                end = here.stop
            # padding is a document of its own
            starts[row, end:] = end
        batch = Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            Documents.from_starts(torch.from_numpy(starts)),
        ).add_positions(1)
        batch = replace(
            batch, numbers={n: torch.from_numpy(values) for n, values in numbers.items()}
        )
        return replace(batch, weights=torch.from_numpy(weights)) if self.weighted else batch

    def _encode_example(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the input tokens of an example, their labels (IGNORED where not trained), and the
        loss weight of each.
        """
        span = self.examples.span(index)
        ids = self.examples.tokens[span].astype(np.int64)
        if self.label_mode == "end":
            counts = np.arange(1, len(ids) + 1) == len(ids)
            # a scalar head labels the last token with itself
            return ids, np.where(counts, ids, IGNORED), counts
        # the label at place i is token i + 1
        counts = self.examples.trained[span][1:] * self.examples.weights[index]
        return ids[:-1], np.where(counts > 0, ids[1:], IGNORED), counts
