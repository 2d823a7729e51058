"""Block table of the paged KV cache: which pages of the pool each sequence has. Numbers alone, the
same for every layer.

Problem: the keys and values of a sequence grow by one token per step, and sequences come and go. A
rectangle [sequences, longest length] would waste most of its memory on the short ones.

Idea (PagedAttention, 2309.06180): memory is cut into pages of `page_size` tokens, and each sequence
has a list of pages, in the order of its tokens.

    page             0     1     2     3     4     5          page_size 4
    of sequence      a     b     -     a     a     c
    its tokens      0-3   0-2          4-7    8    0-3        a has 9 tokens, b 3, c 4

Samples of one prompt share its full pages (`fork`); the last page, if it is not full, is copied.

Invariants:
- a sequence has ceil(length / page_size) pages, so at most page_size - 1 tokens of memory are lost;
- a page counts its sequences, and is free when the last of them is removed;
- a shared page is full, so nobody writes to it again: new tokens go behind it;
- shared pages come first in a sequence's list (`shared_pages` relies on it).
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping

PAGE_SIZE = (
    32  # tokens: half of it is lost per sequence, and smaller products take longer per token
)


class BlockTable:
    """Maps sequences, which the caller numbers, to pages of the pool. `pages` and `lengths`
    (tokens) are by sequence; `total` counts all pages, free ones included.
    """

    def __init__(self, page_size: int = PAGE_SIZE):
        """`page_size`: tokens per page. The pool begins without pages and grows as needed."""
        self.page_size, self.total = page_size, 0
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self._users: Counter[int] = Counter()  # page -> sequences that have it
        self._free: list[int] = []  # a heap: the first free page is taken

    @property
    def in_use(self) -> int:
        """Number of pages that sequences have."""
        return self.total - len(self._free)

    def pages_for(self, lengths: Iterable[int]) -> int:
        """Return the number of pages that sequences of these lengths need together, each rounded
        up.
        """
        return sum(-(-length // self.page_size) for length in lengths)

    def append(self, new: Mapping[int, int]) -> list[int] | None:
        """Extend sequences by numbers of new tokens (sequence -> number), allocating pages as
        needed; unknown sequences begin at length 0.

        Returns the old page numbers in their new order if the pool was compacted, else None. The
        pool grows by a quarter at least, so that not every step copies all of it, and is compacted
        when more than half of it would be free, because attention multiplies all of it.
        """
        needed, moved = self.in_use + self.growth(new), None
        if 2 * needed < self.total:
            moved = self._compact()
        self._grow_pool(needed)
        for sequence, count in new.items():
            pages = self.pages.setdefault(sequence, [])
            self.lengths[sequence] = self.lengths.get(sequence, 0) + count
            while len(pages) * self.page_size < self.lengths[sequence]:
                # lowest numbers first, so that a sequence alone has consecutive pages
                pages.append(self._allocate())
        return moved

    def growth(self, new: Mapping[int, int]) -> int:
        """Return how many pages `append` would add for these new tokens (sequence -> number of
        tokens).
        """
        had = {sequence: len(self.pages.get(sequence, ())) for sequence in new}
        return sum(
            self.pages_for([self.lengths.get(sequence, 0) + count]) - had[sequence]
            for sequence, count in new.items()
        )

    def fork(self, parent: int, child: int) -> tuple[int, int] | None:
        """Let the new sequence `child` begin with all tokens of `parent`, sharing its full pages.

        Returns (page, copy) where the last page is not full and must be copied, else None.
        """
        pages, length = self.pages[parent], self.lengths[parent]
        full = length // self.page_size
        # no tensor is touched: sharing is an entry in two lists
        self.pages[child], self.lengths[child] = pages[:full], length
        self._users.update(pages[:full])
        if full == len(pages):
            return None
        self._grow_pool(self.in_use + 1)
        copy = self._allocate()
        self.pages[child].append(copy)
        return pages[full], copy

    def truncate(self, sequence: int, length: int) -> None:
        """Shorten a sequence to its first `length` tokens, at least one, and free the pages behind
        them: rejected drafts of speculative decoding.
        """
        pages, self.lengths[sequence] = self.pages[sequence], length
        kept = self.pages_for([length])
        self._release(pages[kept:])
        del pages[kept:]

    def shared_pages(self, sequences: Iterable[int]) -> dict[int, list[int]]:
        """Return page -> its sequences among `sequences`, for each page that at least two of them
        share.
        """
        users: dict[int, list[int]] = {}
        for sequence in sequences:
            for page in self.pages[sequence]:
                if self._users[page] == 1:  # shared pages come first
                    break
                users.setdefault(page, []).append(sequence)
        return {page: sequences for page, sequences in users.items() if len(sequences) > 1}

    def remove(self, sequence: int) -> None:
        """Forget a sequence and free its pages, except those that other sequences share."""
        del self.lengths[sequence]
        self._release(self.pages.pop(sequence))

    def _release(self, pages: Iterable[int]) -> None:
        """Take a sequence from the users of `pages`, and free those that have none left."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                heapq.heappush(self._free, page)

    def _grow_pool(self, needed: int) -> None:
        """Add free pages until there are `needed` in all, by at least a quarter of the pool."""
        if needed > self.total:
            grown = max(needed, self.total * 5 // 4)
            for page in range(self.total, grown):
                heapq.heappush(self._free, page)
            self.total = grown

    def _allocate(self) -> int:
        """Take the free page of the lowest number for one sequence and return it."""
        page = heapq.heappop(self._free)
        self._users[page] = 1
        return page

    def _compact(self) -> list[int]:
        """Renumber the pages in use from 0 and drop the free ones. Returns the old number of each
        page, in the new order, by which the pools are permuted.
        """
        before = sorted({page for pages in self.pages.values() for page in pages})
        renumbered = {page: i for i, page in enumerate(before)}
        self.pages = {s: [renumbered[page] for page in pages] for s, pages in self.pages.items()}
        self._users = Counter(page for pages in self.pages.values() for page in pages)
        self.total, self._free = len(before), []
        return before
