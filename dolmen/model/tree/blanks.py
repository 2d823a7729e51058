"""Blank infilling (GLM; Du et al., 2103.10360, section 2): what of a text is its prefix, and where
its tokens stand, follows from special tokens in it.

A text has a blank, which a mask token marks, and its first <sop> begins what fills it. What is
before <sop> is the prefix, whose tokens see one another.

    a  b  [MASK]  c  <sop>  d  e         prefix: four tokens
    0  1    2     3    2    2  2         first stream of positions: what fills a blank stands there
    0  0    0     0    1    2  3         second: it is counted

A text without <sop>, or without a mask before it, has no blank: its tokens see back alone, the
first stream counts them, and the second stays at 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

NEVER = 1 << 40  # an index that no text has


class Span(NamedTuple):
    """How the tokens of one text stand, by their indices in it."""

    prefix: int = 0
    """So many first tokens see one another."""
    stay: int = NEVER
    """From this index on the first stream is `at`; before, it is the index."""
    at: int = 0
    begin: int = NEVER
    """The second stream is 1 at this index, counts from there, and is 0 before."""


def of_prefix(length: int, streams: int) -> Span:
    """Of a text with a prefix and no special tokens: of two streams the first stands at the
    prefix's last token behind it, one alone is the index.
    """
    return Span(length) if streams == 1 else Span(length, length, max(0, length - 1), length)


@dataclass(frozen=True)
class Mask:
    """A kind of token that marks a blank."""

    name: str
    token: int | None
    """None: nobody has said which it is."""
    behind: Literal["stays", "counts", "stays after <sop>"] = "stays"
    """The first stream from <sop> on: at the mask, on with the index, or there from the token
    behind <sop> on, which itself has its index.
    """


@dataclass(frozen=True)
class Blanks:
    """Which tokens say it."""

    start: int | None
    """<sop>; None: nobody has said which it is."""
    masks: tuple[Mask, ...]
    """Of several that a prefix has, the first of the first kind here marks the blank; `nearest`:
    the first of any.
    """
    nearest: bool = False

    def check(self) -> None:
        """Raises ValueError where nobody has said which tokens they are."""
        if self.start is None or all(mask.token is None for mask in self.masks):
            missing = [] if self.start is not None else ["sop"]
            if all(mask.token is None for mask in self.masks):
                missing.append(self.masks[0].name)
            said = ", ".join(f'"{name}": id' for name in missing)
            options = " ".join(f"--model.special-tokens.{name} ID" for name in missing)
            raise ValueError(
                f"neither config.json nor tokenizer names {' and '.join(missing)}, by which the "
                f"model knows the positions of a text: use {options}, dolmen.load(..., "
                f'special_tokens={{{said}}}), or in config.json "dolmen": {{"special_tokens": '
                f"{{{said}}}}}"
            )

    def span(self, tokens: Sequence[int]) -> Span:
        """Of a text. Raises as `check`."""
        self.check()
        if self.start not in tokens:
            return Span()
        begin = tokens.index(self.start)
        prefix = tokens[:begin]
        found = [(prefix.index(m.token), m) for m in self.masks if m.token in prefix]
        if not found:
            return Span()
        at, mask = min(found, key=lambda one: one[0]) if self.nearest else found[0]
        stay = {"stays": begin, "counts": NEVER, "stays after <sop>": begin + 1}[mask.behind]
        return Span(begin, stay, at, begin)
