"""Processes that take turns: each side of a comparison has its own, makes itself ready, and then
does a piece of work when it is asked, while the others wait.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp


class Team:
    """The processes of a side; they end with this one. `member(rank, *given, asked, told)` puts
    into `told` what it has to say when it is ready, and then, for each True that it gets from
    `asked`, what its work was; a False is the end.
    """

    def __init__(self, member: Callable[..., None], size: int, *given: Any):
        context = mp.get_context("spawn")
        self.asked = [context.SimpleQueue() for _ in range(size)]
        self.told = [context.SimpleQueue() for _ in range(size)]
        self.processes = [
            context.Process(
                target=member,
                args=(rank, *given, self.asked[rank], self.told[rank]),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def ask(self, more: bool = True) -> None:
        for queue in self.asked:
            queue.put(more)

    def answer(self) -> list[Any]:
        """What each process says next. Raises SystemExit where one has died."""
        while any(told.empty() for told in self.told):
            time.sleep(0.05)
            if any(process.exitcode for process in self.processes):
                raise SystemExit("a process has died (out of memory?): use a smaller shape")
        return [told.get() for told in self.told]

    def work(self) -> list[Any]:
        """A piece of it, by all processes at once."""
        self.ask()
        return self.answer()

    def end(self) -> None:
        self.ask(False)
        for process in self.processes:
            process.join()


def end_all(teams: Sequence[Team]) -> None:
    for team in teams:
        team.end()


def forget_peak() -> None:
    """From here on `peak_memory` counts anew. Linux alone; elsewhere it goes on from the start."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def peak_memory() -> int:
    """The most bytes that this process has had in memory (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")
