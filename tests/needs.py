"""What a test needs, read from its code, so that nobody writes it by hand on thousands of tests.

spawn     processes: the test, a fixture of it or a helper in tests that these name, names something
          that starts them
command   the whole of dolmen, as its user calls it: in the same way

What dolmen itself starts, when a test asks it for a layout of two, cannot be read there: `Guard`
fails such a test until it says `@pytest.mark.spawn` by hand. So `-m "not spawn"` is a promise that
is kept, and no list.
"""

import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).parent
NEEDS = {
    "spawn": """subprocess multiprocessing torch.multiprocessing dolmen.launch.launcher.launch
        spawning.run_spawned spawning.run_rows spawning.fork_ranks""".split(),
    "command": "tinyrun.dolmen dolmen.cli.main dolmen.train dolmen.api.runs.train".split(),
}
FORKS = ("os.fork", "os.forkpty")
RUNS = ("subprocess.Popen", "os.posix_spawn")  # of another Python; fc-list and uname are no ranks


def markers(item: pytest.Function) -> list[str]:
    """What a test needs, of NEEDS."""
    fixtures = item._fixtureinfo.name2fixturedefs
    requested = [found.func for name in item.fixturenames for found in fixtures.get(name, ())]
    return needs_of(item.function, *requested)


@cache  # a test of a hundred cases is one function
def needs_of(*functions: Callable) -> list[str]:
    """What a test needs that is made of these: itself and its fixtures."""
    reached: set[str] = set()
    for function in functions:
        reach(function, reached)
    return [need for need, names in NEEDS.items() if not reached.isdisjoint(names)]


def reach(value: Any, reached: set[str]) -> None:
    """Adds the name of `value`, and of what its code reaches where it is of the tests."""
    if isinstance(value, ModuleType):
        reached.add(value.__name__)
        return
    function = inspect.unwrap(value) if callable(value) else None
    if not isinstance(function, (FunctionType, type)):
        return
    name = f"{function.__module__}.{function.__qualname__}"
    if name not in reached:
        reached.add(name)
        for inner in named(function):
            reach(inner, reached)


@cache
def named(function: FunctionType | type) -> list[Any]:
    """What a function of the tests names, or what a class of the tests has; of others nothing."""
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    if TESTS not in Path(file or "/").parents:
        return []
    if isinstance(function, type):
        return list(vars(function).values())
    return list(names(function.__code__, function.__globals__))


def names(code: CodeType, known: dict[str, Any]) -> Iterator[Any]:
    """What `code` names: globals, what it imports, and members of modules of either."""
    value: Any = None
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            value = known.get(step.argval)
        elif step.opname == "IMPORT_NAME":
            value = sys.modules.get(step.argval)
        elif step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")):
            value = getattr(value, step.argval, None) if isinstance(value, ModuleType) else None
        else:
            continue
        yield value
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names(inner, known)


class Guard:
    """Fails a test that starts a process and is not marked `spawn`."""

    def __init__(self) -> None:
        self.item: pytest.Item | None = None
        sys.addaudithook(self._audit)  # stays for ever, as all audit hooks
        BaseProcess.start = self._before(BaseProcess.start)

    def _audit(self, event: str, args: tuple) -> None:
        if self.item and (event in FORKS or event in RUNS and "python" in str(args[0])):
            self.refuse(event)

    def _before(self, start: Callable) -> Callable:
        def guarded(process):
            self.refuse("multiprocessing")
            return start(process)

        return guarded

    def refuse(self, how: str) -> None:
        frame = sys._getframe()
        while frame := frame.f_back:  # a process without torch, once per tokenizer, is none
            if frame.f_code.co_filename.endswith("dolmen/files/tokenizer_files.py"):
                return
        if self.item:
            raise AssertionError(
                f"{self.item.nodeid} starts a process ({how}) and is not marked: "
                "say @pytest.mark.spawn"
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        marked = item.get_closest_marker("spawn") or "spawn" in markers(item)
        self.item = None if marked else item
        try:
            return (yield)
        finally:
            self.item = None
