"""Detokenizer: the text of a sequence while it is generated, in whole characters, without anything
that may turn out to be the beginning of a stop string.

    text = Detokenizer(tokenizer, ["\n\n"])
    text.add(token) -> the text that can be shown now; text.stopped is the stop string, once reached
    text.whole      -> all of the text, up to the stop string

A token alone has no text: a character may have several tokens, and the token before decides whether
a word begins with a space. So the last tokens are decoded twice, without and with the new ones, and
the difference is the new text.
"""

from collections.abc import Sequence

from dolmen.data.tokenizer import PreTrainedTokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to
HELD = 8  # tokens that may wait for the rest of a character; UTF-8 has at most 4 bytes


def check_stop(stop: Sequence[str]) -> None:
    """Raise ValueError for an empty stop string, which every text contains."""
    for text in stop:
        if not text:
            raise ValueError(
                "--stop is empty, which would end every text before it begins: give a text, or "
                "leave it out"
            )


class Detokenizer:
    """Detokenizes one sequence."""

    def __init__(self, tokenizer: PreTrainedTokenizer, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, stop
        self.tokens: list[int] = []
        self.stopped: str | None = None
        """The stop string that was reached."""
        self._before = self._read = (
            0  # tokens decoded as context from here; tokens whose text is known
        )
        self._text = ""  # of the tokens up to `_read`
        self._shown = 0  # characters of it

    def add(self, token: int) -> str:
        """Append a token; return the text that can be shown now, and could not before."""
        self.tokens.append(token)
        known = self._decode(self._before, self._read)
        text = self._decode(self._before, len(self.tokens))
        if text.endswith(UNFINISHED) and len(self.tokens) - self._read < HELD:
            return ""
        return self._append(text[len(known) :])

    def end(self) -> str:
        """Return the rest of the text, incomplete characters too, as no token follows."""
        known = self._decode(self._before, self._read)
        new = self._append(self._decode(self._before, len(self.tokens))[len(known) :])
        left = "" if self.stopped is not None else self._text[self._shown :]
        self._shown = len(self._text)
        return new + left

    @property
    def whole(self) -> str:
        """The text so far, without the stop string."""
        return self._text

    def _append(self, new: str) -> str:
        """Append text; return what can be shown."""
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
            certain = len(self._text) - self._partial_stop()
        shown, self._shown = self._text[self._shown : certain], max(self._shown, certain)
        return shown

    def _partial_stop(self) -> int:
        """Number of characters at the end of the text that may begin a stop string."""
        most = max((len(s) - 1 for s in self.stop), default=0)
        for length in range(min(most, len(self._text)), 0, -1):
            if any(s.startswith(self._text[-length:]) for s in self.stop):
                return length
        return 0

    def _decode(self, first: int, end: int) -> str:
        return self.tokenizer.decode(self.tokens[first:end], skip_special_tokens=True)
