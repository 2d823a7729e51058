"""How a conversion is divided over processes: what one writes, or proves, no other touches."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")
LAYER = re.compile(r"layers\.(\d+)\.")
EACH = 2**30
"""Bytes of a model that are worth a process more. To start one takes 1.5 s of CPU; to convert 423
MB takes 7 s by one, start and logits included, 10 s by two, who share them.
"""
MOST = 4
"""Processes, where nobody says how many: each has one tensor in memory, and they share one disk."""


def processes(asked: int | None, size: int, cores: int) -> int:
    """How many for a model of `size` bytes: what is asked, or else one per EACH of them."""
    return asked or max(1, min(size // EACH, cores, MOST))


def by_layer(items: Iterable[T], ours: Callable[[T], str]) -> list[list[T]]:
    """In order, those of one layer together; `ours` is the name of a parameter that one has."""

    def layer(item: T) -> str | None:
        match = LAYER.match(ours(item))
        return match and match[1]

    return [list(group) for _, group in groupby(items, layer)]


def divided(sizes: Sequence[int], processes: int) -> list[range]:
    """Units of such sizes for each of at most so many processes, in order: a unit is for whom its
    middle falls to, where all bytes are divided evenly.
    """
    total, before, owners = sum(sizes), 0, []
    for size in sizes:
        owners.append((2 * before + size) * processes // (2 * total))
        before += size
    starts = [i for i, owner in enumerate(owners) if i == 0 or owner != owners[i - 1]]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(sizes)], strict=True)]
