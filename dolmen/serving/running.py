"""Which texts an engine runs, and what is read of each next: numbers alone, no tensor, so that all
ranks, which are told the same, decide the same.

    waiting    as they came; those put back for lack of pages before all others
    running    in the order in which they were admitted, as many as rows and pages allow

Of a forward, the texts that have one unread token, their last one, come first, and what they leave
of its tokens goes to prompts, in pieces. So a long prompt delays no text that is being written.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dolmen.model.tree import Span
from dolmen.serving.forward import Part
from dolmen.serving.pages import PageTable
from dolmen.serving.request import Ended, Limits, LogProb, Request, Why


@dataclass(eq=False)
class Row:
    """A text: one sample of a request, or, until its prompt is read, several."""

    number: int
    """Of the request."""
    request: Request
    samples: range
    span: Span | None
    text: list[int]
    """The prompt, and what has been chosen."""
    length: int
    """What it is taken to be long (`Part.length`)."""
    read: int = 0
    """Tokens of it that are in the cache."""
    logprobs: list[LogProb] = field(default_factory=list)
    prompt_logprobs: list[LogProb] = field(default_factory=list)
    close: int = 0

    @property
    def new(self) -> list[int]:
        """What has been chosen."""
        return self.text[len(self.request.tokens) :]

    @property
    def unread(self) -> int:
        return len(self.text) - self.read

    def part(self, count: int) -> Part:
        """The next `count` unread tokens."""
        labels, first = self._labels(count)
        return Part(
            self.text[self.read : self.read + count],
            last=count == self.unread,
            labels=labels,
            first=first - self.read,
            top=self.request.top,
            span=self.span,
            length=self.length,
            adapter=self.request.adapter,
        )

    def _labels(self, count: int) -> tuple[list[int], int]:
        """What follows those of them in the prompt, where that has no log-probability yet, and the
        first token that one follows.
        """
        if not self.request.prompt_logprobs:
            return [], self.read
        first = max(self.read, len(self.prompt_logprobs))
        end = min(self.read + count, len(self.request.tokens) - 1)
        return list(self.request.tokens[first + 1 : end + 1]), first

    def sampled(self, number: int) -> "Row":
        """One of its samples, as it begins where the prompt has been read."""
        return replace(
            self,
            samples=range(number, number + 1),
            text=list(self.text),
            logprobs=[],
            prompt_logprobs=list(self.prompt_logprobs),
        )

    def take(self, token: int, logprob: LogProb | None, close: bool) -> Why | None:
        """It goes on with `token`. -> Why it ends there, if it does."""
        self.text.append(token)
        self.close += close
        if logprob is not None:
            self.logprobs.append(logprob)
        options = self.request.options
        if token in options.stop:
            return "stop"
        return "length" if len(self.new) >= options.max_new_tokens else None

    def ended(self, sample: int, why: Why) -> Ended:
        """What is told of a sample of it that has ended."""
        return Ended(
            number=self.number,
            sample=sample,
            id=self.request.id,
            tokens=self.new,
            why=why,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            close=self.close,
        )


class Running:
    """Texts by keys, which the cache knows them by."""

    def __init__(self, limits: Limits, whole: bool, pages: PageTable):
        """`whole`: prompts are read in one forward, as their tokens see both ways."""
        self.limits, self.whole, self.pages = limits, whole, pages
        self.waiting: deque[Row] = deque()
        self.running: dict[int, Row] = {}
        self._keys = 0

    def key(self) -> int:
        """One that no text has had."""
        self._keys += 1
        return self._keys

    def split(self, samples: int, prompt: int) -> list[range]:
        """Samples of a prompt of so many tokens, as many together as can run at once."""
        most, free = min(self.limits.rows, self.limits.tokens), self.limits.pages
        if free is not None:
            most = max(1, min(most, free - self.pages.needed([prompt])))
        return [range(i, min(i + most, samples)) for i in range(0, samples, most)]

    def admit(self) -> None:
        """Those that wait, in their order, until one finds no place: rows for all its samples, and
        pages for what it has to read.
        """
        most = min(self.limits.rows, self.limits.tokens)
        while self.waiting:
            row = self.waiting[0]
            others = sum(len(other.samples) for other in self.running.values())
            if others + len(row.samples) > most or others and not self._fits(row):
                return
            self.running[self.key()] = self.waiting.popleft()

    def _fits(self, row: Row) -> bool:
        if self.limits.pages is None:
            return True
        coming = sum(self.pages.growth({key: other.unread}) for key, other in self.running.items())
        own = self.pages.needed([len(row.text)]) + len(row.samples) - 1
        return self.pages.in_use + coming + own <= self.limits.pages

    def next(self) -> dict[int, int]:
        """Text -> how many tokens the next forward reads of it. Where pages are lacking, the
        youngest texts are put back until there are enough.
        """
        new = self._shares()
        while self._lacking(new):
            self.put_back(next(reversed(self.running)))
            new = self._shares()
        return new

    def _shares(self) -> dict[int, int]:
        new = {key: 1 for key, row in self.running.items() if row.unread == 1}
        left = max(self.limits.tokens - len(new), 0 if new else 1)
        for key, row in self.running.items():
            if row.unread > 1 and left > 0:
                new[key] = row.unread if self.whole else min(row.unread, left)
                left -= new[key]
        return new

    def _lacking(self, new: Mapping[int, int]) -> bool:
        if self.limits.pages is None or len(self.running) == 1:
            return False
        copies = sum(
            len(row.samples) - 1
            for row in (
                self.running[key] for key, n in new.items() if self.running[key].unread == n
            )
        )
        return self.pages.in_use + self.pages.growth(new) + copies > self.limits.pages

    def put_back(self, key: int) -> None:
        """A text that runs waits again, the first of all, and will be read anew."""
        row = self.running.pop(key)
        self.forget(key, row)
        self.waiting.appendleft(row)

    def forget(self, key: int, row: Row) -> None:
        """What was read of it is given up."""
        if key in self.pages.lengths:
            self.pages.end(key)
        row.read = 0

    def end(self, key: int) -> Row:
        """It runs no more."""
        row = self.running.pop(key)
        self.forget(key, row)
        return row

    def cancel(self, number: int, sample: int | None) -> list[Row]:
        """All texts of a request, waiting or running, or those of one sample alone."""

        def meant(row: Row) -> bool:
            return row.number == number and (sample is None or list(row.samples) == [sample])

        out = [row for row in self.waiting if meant(row)]
        self.waiting = deque(row for row in self.waiting if not meant(row))
        keys = [key for key, row in self.running.items() if meant(row)]
        return [self.end(key) for key in keys] + out


def groups(new: Mapping[int, int], count: int) -> Sequence[dict[int, int]]:
    """The texts of a step in up to `count` forwards, which fill a pipeline."""
    keys = list(new)
    return [{key: new[key] for key in keys[i::count]} for i in range(min(count, len(keys)))]
