"""Reads pickles that somebody else may have written, without running anything.

A pickle is a program: it names classes and functions, which Python would import and call. Three
rules make one safe to read:

- Its instructions are scanned first. Only those that torch.save, DCP and pickle itself write for
  tensors and plain values are accepted (protocols 2 to 5). Among the others are the ones that name
  a place in the memo, of which Python makes as many as the largest: nine bytes cost gigabytes.
- A name stands for what the reader's `find` returns for it, a stand-in as a rule. Any other name is
  refused; nothing is imported.
- The value may have no more values in nested mappings, lists and tuples than the pickle has bytes,
  or VALUES where that is more. One that stands in several places counts in each: 40 mappings that
  each hold the next one twice are 2^40 to whoever walks them, and pass
  `torch.load(weights_only=True)`. A value that is written out takes a byte or more, so only values
  that are shared can be too many.

`Window` is a part of an open archive as a file, such as the pickle in a file of torch.save.
"""

import io
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, cast

VALUES = 2**20
"""Values that any pickle may have, however short it is."""

Find = Callable[[str, str], Any]
"""Module and name -> what stands for it; None: it is refused."""

FIXED = re.compile(
    # q and r put into the memo, r here below 2**23; c names a class
    rb"(?:[()}\]NaesubtRQ02\x81\x85-\x89\x8f\x90\x93\x94]|[\x80Kqh].|M..|[Jj].{4}|[G\x95].{8}"
    rb"|r..[\x00-\x7f]\x00|c[^\n]{1,255}\n[^\n]{1,255}\n){1,4096}",
    re.DOTALL,
)
"""Instructions of a known length, many in a row: 20 times as fast as pickletools.genops."""
COUNTED = {0x8C: 1, ord("X"): 4, ord("U"): 1, ord("T"): 4, 0x8A: 1, ord("C"): 1, ord("B"): 4}
"""Instructions that hold bytes -> the bytes of their length, which comes first."""


def scan(content: bytes, start: int = 0) -> int:
    """Return where the pickle that begins at `start` ends. Raises UnpicklingError for an
    instruction that is not accepted, and where there is no end.
    """
    at = start
    while content[at : at + 1] != pickle.STOP:
        if at >= len(content):
            raise pickle.UnpicklingError("its pickle has no end")
        if run := FIXED.match(content, at):
            at = run.end()
        elif (width := COUNTED.get(content[at])) is not None:
            at += 1 + width + int.from_bytes(content[at + 1 : at + 1 + width], "little")
        else:
            raise pickle.UnpicklingError(
                f"byte {at} is {content[at]:#04x}, an opcode that pickles of tensors do not use"
            )
    return at + 1


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickler that takes names from `find` and persistent ids from `resolve`, and imports
    nothing.
    """

    def __init__(self, content: bytes, find: Find, resolve: Callable[[Any], Any] | None):
        """`content`: the pickle. `find`: (module, name) -> stand-in, or None for a name that is not
        allowed. `resolve`: returns the value of a persistent id; None: they are errors.
        """
        super().__init__(io.BytesIO(content), encoding="latin1")  # of Python 2, as torch takes it
        self.find, self.resolve = find, resolve

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name. Raises UnpicklingError for one that is not allowed."""
        target = self.find(module, name)
        if target is None:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which is not allowed, since unpickling would run it"
            )
        return target

    def persistent_load(self, pid: Any) -> Any:
        """Return the value of a persistent id. Raises UnpicklingError if they have no
        meaning here.
        """
        if self.resolve is None:
            raise pickle.UnpicklingError("it has a persistent id, which is not allowed")
        return self.resolve(pid)


def load(content: bytes, find: Find, resolve: Callable[[Any], Any] | None = None) -> Any:
    """Return the value of the pickle that `content` begins with. Raises UnpicklingError for an
    instruction or name that is not allowed, and too many values; a damaged pickle can raise almost
    anything else.
    """
    # before anything is built
    end = scan(content)
    value = RestrictedUnpickler(content[:end], find, resolve).load()
    # iterative: nesting may exceed Python's stack
    left, seen, limit = [value], 0, max(VALUES, end)
    while left:
        node = left.pop()
        if isinstance(node, (Mapping, list, tuple)):
            seen += len(node)
            if seen > limit:
                raise pickle.UnpicklingError(f"it has more than {limit:,} values")
            left += node.values() if isinstance(node, Mapping) else node
    return value


class Window(io.RawIOBase):
    """A readable file that consists of `size` bytes of another open file, from `start`."""

    def __init__(self, file: BinaryIO | io.BufferedIOBase, start: int, size: int):
        """`start`, `size`: bytes of `file`, which stays open as long as the window is used."""
        self.file = cast(io.BufferedIOBase, file)  # `open` returns both types
        self.start, self.size, self.at = start, size, 0

    def readable(self) -> bool:
        """Return True: it can be read."""
        return True

    def seekable(self) -> bool:
        """Return True: it can seek."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position within the window and return it. Raises OSError for a negative one."""
        at = offset + (0, self.at, self.size)[whence]
        if at < 0:
            raise OSError(f"position {at} of {self.size} bytes")
        self.at = at
        return at

    def readinto(self, buffer) -> int:
        """Read into a buffer, at most to the end of the window; return the number of bytes. Moves
        the underlying file.
        """
        self.file.seek(self.start + self.at)
        data = self.file.read(min(len(buffer), max(0, self.size - self.at)))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)
