"""Tokens as text while they come: whole characters alone, and nothing that may turn out to be the
beginning of a stop string.

    text = Incremental(tokenizer, ["\n\n"])
    text.add(token) -> what can be shown of it; then text.stopped says whether it has come to an end
    text.whole      -> all of it, up to the stop string

A token alone has no text: a character may be of four, and whether a word has a space before it is
known by the one before. So some tokens are decoded twice, those before the new ones and all of
them, and the difference is new.
"""

from collections.abc import Sequence

from dolmen.data.tokenizer import PreTrainedTokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how half a character is decoded
HELD = 8  # tokens that may wait for the rest of their character, which has four bytes at most


def check_stop(stop: Sequence[str]) -> None:
    """Raises ValueError for a stop string that every text has."""
    for text in stop:
        if not text:
            raise ValueError(
                "--stop is empty, and every text would end before it begins: give a text, or "
                "leave it out"
            )


class Incremental:
    """The text of one answer."""

    def __init__(self, tokenizer: PreTrainedTokenizer, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, stop
        self.tokens: list[int] = []
        self.stopped: str | None = None
        """The stop string that ended it."""
        self._before = self._read = 0  # decoded again as context; and whose text is known
        self._text = ""  # of the tokens up to `_read`
        self._shown = 0  # characters of it

    def add(self, token: int) -> str:
        """-> The text that is certain now, and was not before."""
        self.tokens.append(token)
        known = self._decoded(self._before, self._read)
        text = self._decoded(self._before, len(self.tokens))
        if text.endswith(UNFINISHED) and len(self.tokens) - self._read < HELD:
            return ""
        return self._take(text[len(known) :])

    def end(self) -> str:
        """-> What is left, half a character too, as no token follows."""
        known = self._decoded(self._before, self._read)
        new = self._take(self._decoded(self._before, len(self.tokens))[len(known) :])
        left = "" if self.stopped is not None else self._text[self._shown :]
        self._shown = len(self._text)
        return new + left

    @property
    def whole(self) -> str:
        """The text until now, without its stop string."""
        return self._text

    def _take(self, new: str) -> str:
        """-> What of the text with what is new can be shown."""
        if self.stopped is not None:
            return ""
        if new:  # context without text would not tell whether a word has a space before it
            self._before = self._read
        self._read = len(self.tokens)
        longest = max(map(len, self.stop), default=1)
        start = max(0, len(self._text) - longest + 1)  # a stop string may have begun here
        self._text += new
        found = [(at, s) for s in self.stop if (at := self._text.find(s, start)) >= 0]
        if found:
            at, self.stopped = min(found)
            self._text = self._text[:at]
            certain = at
        else:
            certain = len(self._text) - self._begun()
        shown, self._shown = self._text[self._shown : certain], max(self._shown, certain)
        return shown

    def _begun(self) -> int:
        """Characters at the end of the text that a stop string may begin with."""
        most = max((len(s) - 1 for s in self.stop), default=0)
        for length in range(min(most, len(self._text)), 0, -1):
            if any(s.startswith(self._text[-length:]) for s in self.stop):
                return length
        return 0

    def _decoded(self, first: int, end: int) -> str:
        return self.tokenizer.decode(self.tokens[first:end], skip_special_tokens=True)
