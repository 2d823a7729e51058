"""The merges of a BPE that lead to a new token.

BPE begins with single characters and joins the pair that was learned first, until no pair of
neighbours is known. Whoever adds tokens behind those of a base leaves its pairs the first, so that
a text is cut as before, and what is new joins what that gives: every new token is a run of old
ones. A new token may therefore be out of reach by the pairs that it was learned with:

    new   (e5 a4) (a4a9 e6) ...      base   (a9 e6)      e5 a4 [a9 e6] b0 94

So what the base makes of the token's own text is asked, and each pair from there on is added; what
lies between and has no name becomes a token too.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

LONGEST = 512  # characters of a token: finding its merges takes the square of it


class Pairs(Protocol):
    """Which neighbours are joined, and which of them first."""

    def rank(self, left: str, right: str) -> int | None:
        """Lower is sooner; None: they are not joined."""
        ...

    def join(self, left: str, right: str) -> None:
        """From now on they are, behind all others."""
        ...


@dataclass
class Merges:
    """Of `tokenizers`: a list of pairs."""

    ranks: dict[tuple[str, str], int]

    def rank(self, left: str, right: str) -> int | None:
        return self.ranks.get((left, right))

    def join(self, left: str, right: str) -> None:
        self.ranks[left, right] = len(self.ranks)


@dataclass
class Concatenations:
    """Of sentencepiece: all pairs that make a piece."""

    ranks: dict[str, int]

    def rank(self, left: str, right: str) -> int | None:
        return self.ranks.get(left + right)

    def join(self, left: str, right: str) -> None:
        self.ranks[left + right] = len(self.ranks)


def cut(parts: Iterable[str], pairs: Pairs) -> list[str]:
    """What BPE makes of neighbours."""
    found = list(parts)
    while len(found) > 1:
        ranked = [(pairs.rank(a, b), i) for i, (a, b) in enumerate(pairwise(found))]
        known = [(rank, i) for rank, i in ranked if rank is not None]
        if not known:
            break
        _, at = min(known)
        found[at : at + 2] = [found[at] + found[at + 1]]
    return found


@dataclass
class Added:
    """What was added to a vocabulary."""

    tokens: list[str] = field(default_factory=list)
    """In order, those between among them."""
    between: int = 0
    """Of them those that lead to others, and that nobody asked for."""


def lead(
    wanted: Collection[str],
    known: Collection[str],
    pairs: Pairs,
    reach: Callable[[int], None] = lambda done: None,
) -> Added:
    """Adds what is `wanted`, in order, to the `known` tokens; `pairs` gets what leads there, which
    may join a token before its turn. `reach` is told how many are done.
    """
    have, left, added = set(known), set(wanted), Added()

    def add(token: str) -> None:
        if token not in have:
            have.add(token)
            added.tokens.append(token)
            added.between += token not in left

    def between(token: str) -> None:
        if token not in left:  # or its turn comes, in order
            add(token)

    for done, token in enumerate(wanted, 1):
        for character in token:
            between(character)
        parts = cut(token, pairs)
        while len(parts) > 1:
            named = [
                i for i, (a, b) in enumerate(pairwise(parts)) if a + b in have or a + b in left
            ]
            at = named[0] if named else 0
            pairs.join(parts[at], parts[at + 1])
            between(parts[at] + parts[at + 1])
            parts = cut(parts, pairs)
        add(token)
        reach(done)
    return added
