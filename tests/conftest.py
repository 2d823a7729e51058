"""spawn(n)(fn, *args): run fn(*args) on n gloo processes. result(row): what a spawning.Row gives.

Two tiers: a test marked `full` runs with --full, or where it is named by its node id. What a test
needs, `spawn` or `command`, is read from its code (needs.py); -m takes these names.
"""

import gc
import os
import re
from pathlib import Path

import cpu_time
import garbage  # noqa: F401  # before torch
import needs
import pytest
import shapes  # noqa: F401  # before anything of dolmen
import torch
import workers
from hypothesis import settings
from spawning import Row, launch_forked, run_rows, run_spawned

os.environ.pop("COLUMNS", None)  # xdist's workers have 80: help would be wrapped there alone
torch.set_num_threads(1)  # tiny models: a second thread waits more than it works


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the tests marked `full` too")
    parser.addoption("--cpu", action="store_true", help="list the CPU seconds of each test file")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: runs with --full, or where named by its node id")
    config.addinivalue_line("markers", "spawn: starts processes (read from its code: needs.py)")
    config.addinivalue_line("markers", "command: calls dolmen as its user does (needs.py)")
    config.addinivalue_line("markers", "slow: over 2 s with all its cases; not in `make check`")
    examples = 1000 if config.getoption("--full") else 200
    profile = settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    settings.register_profile("tier", profile)
    settings.load_profile("tier")
    config.pluginmanager.register(needs.Guard())
    config.pluginmanager.register(cpu_time.CpuTime(config))


def named(config, item) -> bool:
    """Whether a word of the command line is `file::test` or `file::test[case]` of this item."""
    test = item.nodeid.split("::", 1)[1]
    for word in config.args:
        file, _, name = word.partition("::")
        here = Path(config.invocation_params.dir, file).resolve() == item.path
        if name and here and name in (test, test.partition("[")[0]):
            return True
    return False


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at markers
def pytest_collection_modifyitems(config, items):
    if config.option.markexpr:  # reading the code of all tests takes a worker three seconds
        for item in items:
            for need in needs.markers(item):
                item.add_marker(need)
    if config.getoption("--full"):
        return
    left_out = [i for i in items if i.get_closest_marker("full") and not named(config, i)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [i for i in items if i not in set(left_out)]


def pytest_collection_finish():
    """What collection has made is never garbage: looking at it takes half a second each time."""
    gc.freeze()


def pytest_unconfigure():
    """Nor at exit, when the interpreter would look through it twice."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return workers.ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture
def spawn():
    return lambda world: lambda fn, *args: run_spawned(world, fn, *args)


@pytest.fixture
def forked_ranks(monkeypatch):
    """Ranks that dolmen starts are forked from the server that has imported torch."""
    from dolmen.launch import launcher

    monkeypatch.setattr(launcher, "launch", launch_forked)


@pytest.fixture(scope="session")
def result(request):
    """result(row): what it gives. The first row of a world size starts that world once, for all its
    rows that this session runs: no row runs that was not asked for. One that fails ends its world,
    which is started once more for all others.

    Every worker of xdist has collected all tests. It runs the rows of its own group of files
    (workers.py) alone: the other rows are another worker's.
    """
    on_a_worker = hasattr(request.config, "workerinput")
    groups = {
        row: workers.group_of(item.nodeid) if on_a_worker else ""
        for item in request.session.items
        for row in rows_of(item)
    }
    results, failed = {}, {}

    def of(row: Row):
        while row not in results and row not in failed:
            same = [
                r
                for r, group in groups.items()
                if (r.world, group) == (row.world, groups[row]) and r not in failed
            ]
            try:
                results.update(zip(same, run_rows(same), strict=True))
            except AssertionError as error:
                name = re.search(r"^in row (.*)$", str(error), re.MULTILINE)
                ended = [r for r in same if name is not None and r.name == name[1]]
                failed.update(dict.fromkeys(ended or same, error))
        if row in failed:
            raise failed[row]
        return results[row]

    return of


def rows_of(item) -> list[Row]:
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [value for value in parameters if isinstance(value, Row)]
