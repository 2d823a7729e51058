"""Which model of several side by side (dp) answers which row, and how its answer comes to the rank
that writes: through a store that all ranks reach, so that no model waits for another one.

    next    a counter: the first rank of a model adds one to it, and answers the row of that number
    row/G/N what the first rank of model G has taken the N-th time, for the others of it
    done    a counter: so many answers have been given
    ask/N   the N-th of them

A single model takes the rows as they come, and needs no store.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from dolmen.core.mesh import Mesh
from dolmen.core.torch_private import processes
from dolmen.files import gate
from dolmen.files.kinds import JOURNAL_ROW
from dolmen.serving.rows import line_of

NAME = "dolmen generate"


class Deal:
    """Rows that are to be answered, by their numbers, and answers that are to be written."""

    def __init__(self, rows: Sequence[int], mesh: Mesh):
        """The same `rows`, in order, on all ranks."""
        self.rows, self.models = rows, mesh.dp.size
        self.model, self.leads = mesh.dp.rank, mesh.tp.rank == 0 and mesh.pp.rank == 0
        self.store = None if self.models == 1 else processes.store(NAME)
        self._taken = self._own = self._given = 0
        self._answers: deque[tuple[int, dict[str, Any]]] = deque()

    def take(self, running: int) -> int | None:
        """The next row of this model, which has so many `running`; None where it is to take none
        now. All of its ranks ask the same. While few are left, a model takes no more than its share
        of them.
        """
        if self.store is None:
            number = self._taken
        else:
            number = self._next(self.store, running)
        if number >= len(self.rows):
            return None
        self._taken = number + 1
        return self.rows[number]

    def _next(self, store: processes.Store, running: int) -> int:
        left = max(len(self.rows) - self._taken, 0)
        if running and running >= (left + running) / self.models:
            return len(self.rows)
        key = f"row/{self.model}/{self._own}"
        self._own += 1
        if not self.leads:
            return int(store.get(key))
        number = store.add("next", 1) - 1
        store.set(key, str(number))
        return number

    def give(self, number: int, answer: dict[str, Any]) -> None:
        """An answer of this model; one of its ranks brings it to the one that writes."""
        if self.store is None:
            self._answers.append((number, answer))
        elif self.leads:
            place = self.store.add("done", 1)
            self.store.set(f"ask/{place}", line_of({"row": number, "answer": answer}).decode())

    def given(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """On the rank that writes: what has been given since it last asked."""
        if self.store is None:
            while self._answers:
                yield self._answers.popleft()
            return
        there = self.store.add("done", 0)
        while self._given < there:
            self._given += 1
            key = f"ask/{self._given}"
            found = gate.parse_json(self.store.get(key), NAME, JOURNAL_ROW)
            self.store.delete_key(key)
            yield found["row"], found["answer"]
