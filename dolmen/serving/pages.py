"""Which pages of a pool each text has: numbers alone, the same for every layer.

    page             0     1     2     3     4     5          tokens of a page: 4
    of text          a     b     -     a     a     c
    its tokens      0-3   0-2          4-7    8    0-3        a has 9, b 3, c 4

A text has as many pages as its tokens fill, the last one in part, so at most `size - 1` tokens of
each text are held for nothing. A text that ends gives its pages back, and the next that needs one
takes the first that is free.

Texts that begin alike share the pages that are full of what they have in common (`fork`): each page
is counted by the texts that have it, and is free when the last of them ends. Nobody writes to a
page of two texts, as what is new begins behind them.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping

SIZE = 32  # tokens: half of it is lost per text, and products of fewer take longer per token


class PageTable:
    """Texts are known by numbers of the caller's."""

    def __init__(self, size: int = SIZE):
        self.size, self.total = size, 0
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self._texts: Counter[int] = Counter()  # that have a page
        self._free: list[int] = []

    @property
    def in_use(self) -> int:
        """Pages that texts have."""
        return self.total - len(self._free)

    def needed(self, lengths: Iterable[int]) -> int:
        """Pages of texts of so many tokens."""
        return sum(-(-length // self.size) for length in lengths)

    def read(self, new: Mapping[int, int]) -> list[int] | None:
        """Texts grow by so many tokens, those not known yet from none. -> Where the pool's pages
        were that are first in it now, if they have moved; None: each is where it was.

        The pool grows by a quarter at least, lest every step copy all of it, and is laid anew where
        more than half of it would be free: what is multiplied is all of it.
        """
        needed, moved = self.in_use + self.growth(new), None
        if 2 * needed < self.total:
            moved = self._compact()
        self._hold(needed)
        for text, n in new.items():
            own = self.pages.setdefault(text, [])
            self.lengths[text] = self.lengths.get(text, 0) + n
            while len(own) * self.size < self.lengths[text]:
                own.append(self._take())
        return moved

    def growth(self, new: Mapping[int, int]) -> int:
        """Pages more that are in use once texts have grown by so many tokens."""
        own = {text: len(self.pages.get(text, ())) for text in new}
        return sum(
            self.needed([self.lengths.get(text, 0) + n]) - own[text] for text, n in new.items()
        )

    def fork(self, text: int, other: int) -> tuple[int, int] | None:
        """`other`, which is not known yet, begins as `text` does until now. -> A page that is not
        full, and the one that must become its copy; None: all are full, and shared.
        """
        own, length = self.pages[text], self.lengths[text]
        full = length // self.size
        self.pages[other], self.lengths[other] = own[:full], length
        self._texts.update(own[:full])
        if full == len(own):
            return None
        self._hold(self.in_use + 1)
        copy = self._take()
        self.pages[other].append(copy)
        return own[full], copy

    def shared(self, texts: Iterable[int]) -> dict[int, list[int]]:
        """Page -> those of `texts` that have it, of the pages that several have."""
        out: dict[int, list[int]] = {}
        for text in texts:
            for page in self.pages[text]:
                if self._texts[page] == 1:  # what is shared comes first
                    break
                out.setdefault(page, []).append(text)
        return {page: own for page, own in out.items() if len(own) > 1}

    def _hold(self, needed: int) -> None:
        if needed > self.total:
            grown = max(needed, self.total * 5 // 4)
            for page in range(self.total, grown):
                heapq.heappush(self._free, page)
            self.total = grown

    def _take(self) -> int:
        page = heapq.heappop(self._free)
        self._texts[page] = 1
        return page

    def _compact(self) -> list[int]:
        """The pages in use become the first, and there are no others."""
        before = sorted({page for pages in self.pages.values() for page in pages})
        now = {page: i for i, page in enumerate(before)}
        self.pages = {t: [now[page] for page in pages] for t, pages in self.pages.items()}
        self._texts = Counter(page for pages in self.pages.values() for page in pages)
        self.total, self._free = len(before), []
        return before

    def end(self, text: int) -> None:
        """Its pages are free, but those that another text has."""
        del self.lengths[text]
        for page in self.pages.pop(text):
            self._texts[page] -= 1
            if not self._texts[page]:
                del self._texts[page]
                heapq.heappush(self._free, page)
