"""Which tests execute which line of dolmen, spawned ranks included: `benchmarks.mutants --record`.

Tests run once under coverage.py with this module as a pytest plugin. It switches coverage's
dynamic context (https://coverage.readthedocs.io/en/latest/contexts.html) to the test that runs:

    test            its node id
    fixture         of module or session scope: its lines belong to every test that uses it
    row             of a spawned world that several tests share (tests/spawning.py): to its test

A process that a test starts reads the context from the environment variable RECORDED_TEST.
A test that failed, or was skipped, is not recorded. Each recorded folder or file of tests is a
file of FOLDER: gzipped JSON, 20 to 200 KB.
"""

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing import spawn
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "runs" / "mutants_record"
# torch's profiler records nothing in a process that is forked from one with torch (cases.py)
LEFT_OUT = ("tests/training/test_profile.py",)
CONTEXT, FACTS = "RECORDED_TEST", "RECORDED_FACTS"  # environment variables
CONFIG = """[run]
source = {root}/dolmen
data_file = {folder}/data
parallel = true
concurrency = multiprocessing,thread
patch = _exit
context = ${{RECORDED_TEST-}}
"""


@dataclass
class Record:
    """Tests of each line, and the CPU seconds of each test, of the source whose digests it has."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Node id -> CPU seconds, ranks included."""
    digests: dict[str, str] = field(default_factory=dict)
    """Source file, as `dolmen/ops/norm.py`, -> digest of its text."""
    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    """Source file -> line number -> node ids."""
    folders: tuple[str, ...] = ()
    """Folders and files of tests that were recorded."""

    def tests(self, file: str, lines: Iterable[int], most: int) -> tuple[str, ...]:
        """At most `most` tests that execute the first of `lines` which any test executes: the
        fastest case of each test function, fastest function first, then the second fastest, ...;
        none of LEFT_OUT.
        """
        known = self.lines.get(file, {})
        found = next((known[line] for line in lines if known.get(line)), set())
        cases: dict[str, list[str]] = defaultdict(list)
        found = {test for test in found if not test.startswith(LEFT_OUT)}
        for test in sorted(found, key=lambda test: (self.seconds[test], test)):
            cases[test.partition("[")[0]].append(test)
        order = [
            (place, self.seconds[test], test)
            for tests in cases.values()
            for place, test in enumerate(tests)
        ]
        return tuple(test for *_, test in sorted(order)[:most])

    def repeated(self) -> dict[str, tuple[float, list[str]]]:
        """Test function -> CPU seconds and node ids of the cases that execute no line which its
        other cases, cheaper ones first, do not; the most seconds first.
        """
        lines: dict[str, set[tuple[str, int]]] = {test: set() for test in self.seconds}
        for file, known in self.lines.items():
            for line, tests in known.items():
                for test in tests:
                    lines[test].add((file, line))
        cases: dict[str, list[str]] = defaultdict(list)
        for test in sorted(self.seconds, key=lambda test: (self.seconds[test], test)):
            cases[test.partition("[")[0]].append(test)
        found = {}
        for function, tests in cases.items():
            seen: set[tuple[str, int]] = set()
            left = []
            for test in tests:
                if seen and lines[test] <= seen:
                    left.append(test)
                seen |= lines[test]
            if left:
                found[function] = sum(self.seconds[test] for test in left), left
        return dict(sorted(found.items(), key=lambda row: -row[1][0]))

    def save(self, path: Path) -> None:
        """Write it as gzipped JSON; lines name tests by their place in the list of tests."""
        places = {test: place for place, test in enumerate(self.seconds)}
        lines = {
            file: {line: sorted(places[test] for test in tests) for line, tests in known.items()}
            for file, known in self.lines.items()
        }
        facts = {"folders": self.folders, "seconds": self.seconds, "digests": self.digests}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps({**facts, "lines": lines}).encode()))

    def add(self, path: Path) -> None:
        """Merge a saved record into this one. Raises ValueError where a source file has changed
        between two records.
        """
        facts = json.loads(gzip.decompress(path.read_bytes()))
        tests = list(facts["seconds"])
        for file, digest in facts["digests"].items():
            if self.digests.setdefault(file, digest) != digest:
                raise ValueError(
                    f"{path} was recorded with another text of {file} than the other records: "
                    f"record again with --record {' '.join(facts['folders'])}"
                )
        self.seconds |= facts["seconds"]
        self.folders += tuple(facts["folders"])
        for file, lines in facts["lines"].items():
            known = self.lines.setdefault(file, {})
            for line, places in lines.items():
                known.setdefault(int(line), set()).update(tests[place] for place in places)


def read(folder: Path = FOLDER) -> Record:
    """All records of `folder` as one. Raises ValueError where there are none."""
    record = Record()
    for path in sorted(folder.glob("*.json.gz")):
        record.add(path)
    if not record.folders:
        raise ValueError(f"{folder} has no records: use --record tests/ops, or other tests")
    return record


def digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def record_tests(tests: str, options: Iterable[str] = (), folder: Path = FOLDER) -> Record:
    """Run `tests`, a folder or file, under coverage and save their record in `folder`. Raises
    ValueError where no test passed.
    """
    with tempfile.TemporaryDirectory(prefix="record_") as scratch:
        config = Path(scratch) / "config"
        config.write_text(CONFIG.format(root=ROOT, folder=scratch))
        facts = Path(scratch) / "facts.json"
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "COVERAGE_PROCESS_START": str(config),
            FACTS: str(facts),
        }
        pytest_words = ["pytest", "-p", __name__, "-p", "no:cacheprovider", *options, tests]
        command = [sys.executable, "-m", *pytest_words]
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        known = json.loads(facts.read_text()) if facts.exists() else {}
        if code not in (0, 1) or not known.get("seconds"):
            raise ValueError(f"{tests}: pytest ended with {code}, and no test passed")
        record = Record(known["seconds"], folders=(tests,))
        _add_lines(record, Path(scratch), known["owners"])
    record.save(folder / (re.sub(r"\W+", "_", tests) + ".json.gz"))
    return record


def _add_lines(record: Record, folder: Path, owners: dict[str, list[str]]) -> None:
    """Add what coverage has measured: a file of each process. `owners`: fixture or row -> the tests
    it belongs to. A file that a killed process has left in the middle is left out.
    """
    import coverage

    for place in folder.glob("data.*"):
        data = coverage.CoverageData(str(place))
        try:
            data.read()
            measured = {path: data.contexts_by_lineno(path) for path in data.measured_files()}
        except coverage.CoverageException as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        for path, lines in measured.items():
            file = Path(path).relative_to(ROOT).as_posix()
            for line, contexts in lines.items():
                names = {context.rpartition("|")[2] for context in contexts}  # static|dynamic
                tests = {test for name in names for test in owners.get(name, [name])}
                if tests := tests & record.seconds.keys():
                    record.lines.setdefault(file, {}).setdefault(line, set()).update(tests)
    record.digests |= {file: digest(ROOT / file) for file in record.lines}


# what follows runs in the recorded process and in those that it starts


class EnvironmentOfTest:
    """Travels with what a process is started with, and sets RECORDED_TEST where it is unpickled:
    the server that ranks are forked from has the environment of the first test.
    """

    def __getstate__(self) -> dict[str, str]:
        return {CONTEXT: os.environ.get(CONTEXT, "")}

    def __setstate__(self, state: dict[str, str]) -> None:
        os.environ.update(state)


def switch(context: str) -> None:
    """Attribute what is executed from here on to `context`, in new processes too."""
    import coverage

    os.environ[CONTEXT] = context
    if running := coverage.Coverage.current():
        running.switch_context(context)


def call_rows(calls: list) -> list:
    """In place of tests/spawning.py:_call, on each rank: the rows of a world, each its context."""
    import spawning

    out = []
    for call in calls:
        switch(f"row {call[0]}")
        out += spawning._call([call])
    return out


class Recorder:
    """The pytest plugin of a recorded run."""

    def __init__(self, facts: Path):
        self.facts = facts
        self.seconds: dict[str, float] = {}
        self.owners: dict[str, set[str]] = defaultdict(set)
        self.failed: set[str] = set()
        preparation = spawn.get_preparation_data

        def with_environment(name: str) -> dict:
            return preparation(name) | {"environment_of_test": EnvironmentOfTest()}

        spawn.get_preparation_data = with_environment

    def pytest_collection_finish(self, session):
        import spawning

        for item in session.items:
            parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
            for row in parameters:
                if isinstance(row, spawning.Row):
                    self.owners[f"row {row.name}"].add(item.nodeid)
            for definitions in item._fixtureinfo.name2fixturedefs.values():
                for definition in definitions:
                    self.owners[_name(definition)].add(item.nodeid)
        run_spawned = spawning.run_spawned

        def recorded(world, fn, *args):
            return run_spawned(world, call_rows if fn is spawning._call else fn, *args)

        spawning.run_spawned = recorded

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope == "function":
            return (yield)
        outer = os.environ[CONTEXT]
        switch(_name(fixturedef))
        try:
            return (yield)
        finally:
            switch(outer)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        from cpu_time import cpu_seconds

        switch(item.nodeid)
        before = cpu_seconds()
        result = yield
        self.seconds[item.nodeid] = round(cpu_seconds() - before, 3)
        switch("")
        return result

    def pytest_runtest_logreport(self, report):
        if report.outcome != "passed":
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self):
        # the first test of a shared world pays for the others' rows: a mean row costs each of them
        rows = [tests for name, tests in self.owners.items() if name.startswith("row ")]
        if shared := set().union(*rows) & self.seconds.keys():
            mean = sum(self.seconds[test] for test in shared) / len(shared)
            self.seconds |= dict.fromkeys(shared, round(mean, 3))
        passed = {test: used for test, used in self.seconds.items() if test not in self.failed}
        owners = {name: sorted(tests) for name, tests in self.owners.items()}
        self.facts.write_text(json.dumps({"seconds": passed, "owners": owners}))


def _name(definition) -> str:
    """The context of a fixture, whatever its parameters."""
    return f"fixture {definition.baseid}::{definition.argname}"


def pytest_configure(config):
    """Called by pytest, which has loaded this module as a plugin."""
    os.environ[CONTEXT] = ""
    config.pluginmanager.register(Recorder(Path(os.environ[FACTS])))
