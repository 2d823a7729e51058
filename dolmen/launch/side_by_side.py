"""One command's work in several processes of this machine, which have nothing in common but files:
no process group, no store.

    with Group(2) as group:
        results = group.run(work, [(0,), (1,)], reach)

    this process      starts `python -m dolmen.launch.side_by_side` twice, sends each its work
      |-- process 1   through a pipe, adds up what they tell, and kills all when one fails or dies,
      `-- process 2   or when it is interrupted itself. If it dies, the kernel kills them.

The standard library's way to spawn would run the caller's main module again in each of them, and
import from the working directory, which may be of somebody else's files.
"""

import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from signal import Signals
from typing import Any

from dolmen.core.messages import Failed
from dolmen.launch import process

Work = Callable[..., Generator[int, None, Any]]
"""Yields how much it has done since it last did; its result is what it returns. What is known by a
name in a module, or a method of a value that can be pickled, can be sent to a process.
"""
REACHED, DONE, FAILED = "reached", "done", "failed"


class Group:
    """So many processes, until it is left. One is this process, and none is started."""

    def __init__(self, processes: int):
        self.processes = processes
        self.started: list[_Started] = []
        self.ends = ExitStack()

    def __enter__(self) -> "Group":
        with self.ends:
            for n in range(self.processes if self.processes > 1 else 0):
                self.started.append(_Started(n, self.processes))
                self.ends.callback(self.started[-1].end)
            self.ends = self.ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.ends.close()

    def run(self, work: Work, each: Sequence[tuple], reach: Callable[[int], None]) -> list[Any]:
        """The results of `work(*args)` for each of `args`, at most one per process: of a single one
        in this process. `reach` is told how much all have done. Raises what the first of them
        raised, and Failed for one that died; then the group is to be left.
        """
        done = 0

        def more(count: int) -> None:
            nonlocal done
            done += count
            reach(done)

        if len(each) == 1:
            return [_drain(work(*each[0]), more)]
        results: dict[int, Any] = {}
        busy: dict[Any, tuple[int, _Started]] = {}
        for n, (one, args) in enumerate(zip(self.started[: len(each)], each, strict=True)):
            one.tell(work, args)
            busy[one.told] = n, one
        while busy:
            for told in connection.wait(list(busy)):
                n, one = busy[told]
                kind, value = one.hear()
                if kind == FAILED:
                    raise value
                if kind == REACHED:
                    more(value)
                else:
                    results[n] = value
                    del busy[told]
        return [results[n] for n in range(len(each))]


def _drain(work: Generator[int, None, Any], more: Callable[[int], None]) -> Any:
    while True:
        try:
            more(next(work))
        except StopIteration as end:
            return end.value


class _Started:
    """One process of several. It is in a group of its own: Ctrl-C is for who started it."""

    def __init__(self, n: int, processes: int):
        self.title = f"process {n + 1} of {processes}"
        self.told, theirs = Pipe()
        end = theirs.fileno()
        words = ("-m", "dolmen.launch.side_by_side", str(end), str(os.getpid()))
        self.process = subprocess.Popen(
            [sys.executable, *process.safely(), *words],
            stdin=subprocess.DEVNULL,
            env=process.one_of(processes),
            pass_fds=(end,),
            process_group=0,
        )
        theirs.close()  # so that the pipe ends with the process

    def tell(self, work: Work, args: tuple) -> None:
        """What to do next."""
        with suppress(BrokenPipeError):  # `hear` says how it died
            self.told.send((work, args))

    def hear(self) -> tuple[str, Any]:
        """What it says next. Raises Failed where it has died."""
        try:
            return self.told.recv()
        except (EOFError, OSError):
            code = self.process.wait()
        how = f"ended with exit code {code}"
        if code < 0:
            hint = " (out of memory?)" if -code == Signals.SIGKILL else ""
            how = f"was ended by {Signals(-code).name}{hint}"
        raise Failed(f"{self.title} (pid {self.process.pid}) {how}; all were stopped")

    def end(self) -> None:
        """Whatever it does: it has nothing that it would have to tidy up."""
        self.process.kill()
        self.process.wait()
        self.told.close()


def _serve(end: int, parent: int) -> None:
    """A process: does what it is told, and tells the result, or the exception."""
    process.die_with(parent)  # before the imports of what it is told
    warnings.simplefilter("ignore")  # of what who started this has opened too
    told = Connection(end)
    try:
        while True:
            work, args = told.recv()
            told.send((DONE, _drain(work(*args), lambda count: told.send((REACHED, count)))))
    except EOFError:
        return
    except Exception as error:
        error.add_note(traceback.format_exc())
        told.send((FAILED, error))


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
