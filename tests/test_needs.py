"""What a test needs is read from its code, and a process that was not told of is refused."""

import importlib
import sys

import needs
import pytest
import tinyrun
import workers
from spawning import run_spawned


def directly():
    return run_spawned(2, print)


def by_a_helper():
    return [directly() for _ in range(2)]


def inside():
    from subprocess import run

    return lambda: run(["true"])


class Holder:
    def method(self):
        return by_a_helper()


def by_a_class():
    return Holder().method()


def commands():
    return tinyrun.dolmen("--version")


def neither():
    return importlib.import_module("json").dumps(tinyrun.MODEL)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (directly, "spawn"),
        (by_a_helper, "spawn"),
        (inside, "spawn"),
        (by_a_class, "spawn"),
        (commands, "command"),
        (neither, None),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_code_reaches(function, found):
    reached: set[str] = set()
    needs.reach(function, reached)
    assert [need for need, names in needs.NEEDS.items() if reached & set(names)] == [
        *filter(None, [found])
    ]


def test_a_fixture_is_asked_for_too(request):
    """The marks of other tests of this session, where it has them."""
    for item in request.session.items:
        if {"spawn", "result"} & set(item.fixturenames):
            marked = item.get_closest_marker("spawn") or "spawn" in needs.markers(item)
            assert marked, item.nodeid


def test_rows_share_a_worker(request):
    """A row elsewhere would have both workers run all rows of its size. Those of this session."""
    for item in request.session.items:
        if "result" in item.fixturenames:
            assert item.nodeid.startswith((workers.GOLDEN, *workers.ROWS)), item.nodeid


def test_a_process_that_was_not_told_of_is_refused():
    hidden = importlib.import_module("subprocess")
    with pytest.raises(AssertionError, match="starts a process .* say @pytest.mark.spawn"):
        hidden.run([sys.executable, "-c", ""])
    hidden.run(["true"], check=True)  # no Python
    forks = importlib.import_module("multiprocessing").get_context("spawn")
    with pytest.raises(AssertionError, match="say @pytest.mark.spawn"):
        forks.Process(target=print).start()
