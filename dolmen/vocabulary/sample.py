"""Text to learn a vocabulary from: all of it, or what was drawn of it at random, in one pass over
any amount, within a number of bytes.

Each line draws a number. While what is kept is too much, the lines of the largest numbers are let
go, and from then on none with such a number is kept (a sample by keys, Efraimidis and Spirakis,
2006, all weights equal): so what remains is a draw without preference for a place.
"""

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dolmen.data.documents import seam
from dolmen.vocabulary.report import Text

TOLD = 1000  # lines, after which a bar moves
LONGEST = 4000
"""Bytes of a line; a longer one is cut, as sentencepiece passes over those of more than 4,192."""


@dataclass(frozen=True)
class Sample:
    """Lines of a text, in its order."""

    lines: list[str]
    """Each of what is left of it without the line's end."""
    bytes: int
    """Of the lines."""
    whole: int
    """Bytes of all text that was read."""
    characters: frozenset[str]
    """Different ones of the lines."""


def draw(
    text: Text, most: int, seed: int, reach: Callable[[int], None] = lambda done: None
) -> Sample:
    """At most `most` bytes; `reach` is told how many were read. Raises ValueError for what cannot
    be read.
    """
    chance = random.Random(seed)
    heap: list[tuple[float, int, str, int]] = []  # the largest number first, as its negative
    held, whole, limit = 0, 0, 1.0
    for place, line in enumerate(_lines(text)):
        size = len(line.encode())
        whole += size
        if place % TOLD == 0:
            reach(whole)
        number = chance.random()
        if number >= limit:
            continue
        heapq.heappush(heap, (-number, place, line, size))
        held += size
        while held > most:
            largest, _, _, gone = heapq.heappop(heap)
            held, limit = held - gone, -largest
    heap.sort(key=lambda one: one[1])
    lines = [line for _, _, line, _ in heap]
    return Sample(lines, held, whole, frozenset().union(*lines))


def _lines(text: Text) -> Iterator[str]:
    """Those that say something, each within LONGEST bytes."""
    most = LONGEST // 4  # a character has up to 4 bytes
    for piece in text.pieces():
        for line in piece.splitlines():
            start = 0
            while len(line) - start > most:
                end = seam(line, start + most // 2, start + most)
                yield line[start:end]
                start = end
            if line[start:].strip():
                yield line[start:]
