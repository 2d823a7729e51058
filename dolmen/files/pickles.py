"""Pickles that somebody else may have written: which instructions they may hold, before anything
obeys them. What they may name, the `find_class` of each unpickler says.
"""

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Instructions:
    """Those that a kind of pickle has a use for."""

    fixed: re.Pattern[bytes]
    """Many of those of a known length, in a row."""
    counted: Mapping[int, int]
    """Those that hold bytes of a length that they say -> the bytes of that length."""
    kind: str
    """As in: an instruction that {kind} has no use for."""

    def follow(self, content: bytes, start: int = 0, last: bytes = b"") -> int:
        """Where they end from `start` on: at the instruction `last`, or behind all. Raises
        UnpicklingError for another one. Among those are the ones that name a place in the memo, of
        which the unpickler then makes as many as the largest: nine bytes cost gigabytes. 20 times
        as fast as pickletools.genops.
        """
        at = start
        while at < len(content) and content[at : at + 1] != last:
            if run := self.fixed.match(content, at):
                at = run.end()
            elif (width := self.counted.get(content[at])) is not None:
                at += 1 + width + int.from_bytes(content[at + 1 : at + 1 + width], "little")
            else:
                raise pickle.UnpicklingError(
                    f"byte {at} is {content[at]:#04x}, an instruction that {self.kind} has no use "
                    "for"
                )
        return at
