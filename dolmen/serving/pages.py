"""Which pages of a pool each text has: numbers alone, the same for every layer.

    page             0     1     2     3     4     5          tokens of a page: 4
    of text          a     b     -     a     a     c
    its tokens      0-3   0-2          4-7    8    0-3        a has 9, b 3, c 4

A text has as many pages as its tokens fill, the last one in part, so at most `size - 1` tokens of
each text are held for nothing. A text that ends gives its pages back, and the next that needs one
takes the first that is free.
"""

import heapq
from collections.abc import Iterable, Mapping

SIZE = 32  # tokens: half of it is lost per text, and products of fewer take longer per token


class PageTable:
    """Texts are known by numbers of the caller's."""

    def __init__(self, size: int = SIZE):
        self.size, self.total = size, 0
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
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
        lengths = self.lengths | {t: self.lengths.get(t, 0) + n for t, n in new.items()}
        needed, moved = self.needed(lengths.values()), None
        if 2 * needed < self.total:
            moved = self._compact()
        if needed > self.total:
            grown = max(needed, self.total * 5 // 4)
            for page in range(self.total, grown):
                heapq.heappush(self._free, page)
            self.total = grown
        for text in new:
            own = self.pages.setdefault(text, [])
            while len(own) * self.size < lengths[text]:
                own.append(heapq.heappop(self._free))
        self.lengths = lengths
        return moved

    def _compact(self) -> list[int]:
        """The pages in use become the first, and there are no others."""
        before = sorted(page for pages in self.pages.values() for page in pages)
        now = {page: i for i, page in enumerate(before)}
        self.pages = {t: [now[page] for page in pages] for t, pages in self.pages.items()}
        self.total, self._free = len(before), []
        return before

    def end(self, text: int) -> None:
        """Its pages are free."""
        del self.lengths[text]
        for page in self.pages.pop(text):
            heapq.heappush(self._free, page)
