"""One answer while it is written: tokens in, pieces of text out, with their log-probabilities.

A piece is what has become certain (text.py): whole characters, and nothing that may turn out to be
the beginning of a stop string. An answer that is sent whole is its pieces put together, so it is
the one that is streamed.

    tokens          Hel   lo   \\n   \\n  Bye            with the stop string \\n\\n
    pieces         "Hel" "lo"   -    end: "stop"        the line end waited, and is not part of it
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from dolmen.data.tokenizer import PreTrainedTokenizer, bytes_of
from dolmen.serving.request import Chosen, LogProb
from dolmen.serving.text import UNFINISHED, Incremental

Finish = Literal["stop", "length"]
LEAST = -9999.0
"""What is told of a token without any probability, as OpenAI does; JSON knows no infinity."""


@dataclass(frozen=True)
class Likely:
    """A token, as text, and its log-probability."""

    text: str
    logprob: float
    part: bytes | None = None
    """What it stands for, where that is a part of a character, which has no text."""

    @property
    def bytes(self) -> list[int] | None:
        """UTF-8; None where nobody knows."""
        if self.part is None and UNFINISHED in self.text:
            return None
        return list(self.text.encode() if self.part is None else self.part)

    @property
    def escaped(self) -> str:
        r"""Its text, or the bytes of a part of a character, as \xe4\xbd: no two parts alike."""
        if self.part is None:
            return self.text
        return "".join(f"\\x{byte:02x}" for byte in self.part)

    @property
    def name(self) -> str:
        r"""The same as a key of OpenAI's completions: bytes:\xe4\xbd."""
        return self.text if self.part is None else f"bytes:{self.escaped}"


@dataclass(frozen=True)
class Entry:
    """What is told of one token of an answer."""

    own: Likely
    top: Sequence[Likely]
    offset: int
    """Characters of the answer before it."""


@dataclass(frozen=True)
class Piece:
    """The next part of an answer."""

    index: int
    """Of the answer, among those of its request."""
    text: str
    entries: Sequence[Entry] = ()
    finish: Finish | None = None
    """The last piece says what has ended it."""


class Tokens:
    """Tokens as text, each as it stands behind other text."""

    def __init__(self, tokenizer: PreTrainedTokenizer):
        ids = tokenizer.encode("a", add_special_tokens=False)
        before = tokenizer.decode(ids)

        @lru_cache(maxsize=1 << 16)
        def text(token: int) -> str:
            both = tokenizer.decode([*ids, token])
            return both.removeprefix(before) if both.startswith(before) else both

        self.text = text
        self.written = {number: token for token, number in tokenizer.get_vocab().items()}

    def likely(self, token: int, logprob: float) -> Likely:
        text = self.text(token)
        part = bytes_of(self.written.get(token, text)) if UNFINISHED in text else None
        return Likely(text, max(logprob, LEAST), part)

    def entry(self, token: int, found: LogProb, offset: int) -> Entry:
        """Of a token that has been chosen, or of a prompt."""
        top = [self.likely(one, value) for one, value in found.top]
        return Entry(self.likely(token, found.logprob), top, offset)


@dataclass(eq=False)
class Written:
    """An answer until now."""

    index: int
    text: Incremental
    known: Tokens | None
    """None: no log-probabilities are asked for."""
    count: int = 0
    """Tokens, with those that ended it."""
    finish: Finish | None = None
    _shown: int = 0
    _waiting: list[Entry] = field(default_factory=list)

    def add(self, chosen: Chosen) -> Piece | None:
        """-> What is certain now, if anything is."""
        offset = len(self.text.whole)
        self.count += 1
        if self.known is not None and chosen.logprob is not None:
            self._waiting.append(self.known.entry(chosen.token, chosen.logprob, offset))
        new = self.text.add(chosen.token)
        self._shown += len(new)
        if self.text.stopped is not None:
            return self._last(new, "stop")
        entries = self._certain(self._shown)
        return Piece(self.index, new, entries) if new or entries else None

    def end(self, why: Finish) -> Piece:
        """No token follows. -> The last piece."""
        new = self.text.end()
        return self._last(new, "stop" if self.text.stopped is not None else why)

    def _last(self, new: str, why: Finish) -> Piece:
        self.finish = why
        cut = self.text.stopped is not None
        entries = self._certain(len(self.text.whole)) if cut else self._waiting
        self._waiting = []
        return Piece(self.index, new, entries, why)

    def _certain(self, end: int) -> list[Entry]:
        """Entries of tokens that begin before the character `end`."""
        found = [entry for entry in self._waiting if entry.offset < end]
        self._waiting = self._waiting[len(found) :]
        return found
