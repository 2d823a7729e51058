"""Runs tests in a copy of the tree, each case in a process forked from one that has imported what
takes seconds (torch, transformers) and nothing of the tree: a case of unit tests takes a second
instead of eight.

One process of a pool has one copy (`prepare`). Nothing a case does outlives it: it leads a process
group of its own, which is killed when it ends or its time is up.
"""

import importlib
import json
import os
import py_compile
import shutil
import signal
import sys
import time
import types
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch

from benchmarks.mutation.faults import ROOT, Fault, mutated

# imported before the fork: what takes seconds and is none of the tree's
PRELOAD = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.testing._internal.distributed.fake_pg",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
PARTS = ("dolmen", "tests", "benchmarks", "pyproject.toml", "docs", "README.md", "Makefile")
PATIENCE = 5  # seconds that a second of CPU time may take beside other work
DIED = json.dumps(["failed", "the process died"])
copy = Path()  # of this process


@dataclass(frozen=True)
class Case:
    """How one run of some tests ended."""

    outcome: str
    """passed; failed; broken: a file could not be imported, a test is not there, or all were
    skipped; late: time was up.
    """
    told: str
    """Of what failed first: its node id and what it said."""
    seconds: float


def prepare(scratch: Path) -> None:
    """Once in each process: its copy of the tree under `scratch`."""
    global copy
    for name in PRELOAD:
        importlib.import_module(name)
    torch.set_num_threads(1)
    copy = scratch / f"worker-{os.getpid()}" / "tree"
    copy.mkdir(parents=True)
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, copy / part)
    for path in (copy / "dolmen").rglob("*.py"):
        # by hash: a fault may leave a file's size and second of modification as they were
        py_compile.compile(path, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    assert "dolmen" not in sys.modules


def attempt(fault: Fault, limit: float) -> Case:
    """The fault's tests with the fault in the copy."""
    path, text = copy / fault.file, mutated(fault, copy)
    whole = path.read_text("utf-8")
    path.write_text(text, "utf-8")
    try:
        return run(fault.tests, limit)
    finally:
        path.write_text(whole, "utf-8")


def run(tests: tuple[str, ...], limit: float) -> Case:
    """The tests of these node ids, up to the first that fails, for `limit` seconds of CPU time at
    most: another's work on this machine stops no test.
    """
    began, told = time.monotonic(), copy.parent / "told.json"
    told.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            _inside(tests, told)
        except BaseException as error:
            told.write_text(json.dumps(["broken", repr(error)]))
        os._exit(0)
    in_time = _ends(child, limit)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and whatever it has started
    os.waitpid(child, 0)
    seconds = time.monotonic() - began
    if not in_time:
        return Case("late", "", seconds)
    return Case(*json.loads(told.read_text() if told.exists() else DIED), seconds)


def _ends(child: int, limit: float) -> bool:
    """Whether it ends before its group of processes has used `limit` seconds of CPU time, in
    PATIENCE times as many seconds at most. It is not waited for, so that its number stays its own.
    """
    until, check = time.monotonic() + PATIENCE * limit, 0.0
    while time.monotonic() < until:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
        if time.monotonic() > check:
            if group_seconds(child) > limit:
                return False
            check = time.monotonic() + 1
        time.sleep(0.02)
    return False


def group_seconds(group: int) -> float:
    """CPU seconds of the processes of a group, and of their children that have ended."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            fields = path.read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15])) if int(fields[2]) == group else 0
    return ticks / os.sysconf("SC_CLK_TCK")


class _Watch:
    """A pytest plugin: what failed first, and how."""

    def __init__(self):
        self.failed, self.broken, self.passed = "", "", 0

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.failed:
            last = report.longreprtext.strip().splitlines()
            said = next((line for line in last if line.startswith("E ")), last[-1] if last else "")
            self.failed = f"{report.nodeid}: {said.removeprefix('E').strip()}"
        self.passed += report.when == "call" and report.passed

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken = f"{report.nodeid}: {report.longreprtext.strip().splitlines()[-1]}"


def _inside(tests: tuple[str, ...], told: Path) -> None:
    """In the forked process: pytest, with the copy in the place of the tree."""
    log = os.open(copy.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(copy)
    sys.path[:] = [str(copy)] + [p for p in sys.path if Path(p or ".").resolve() != ROOT]
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    sys.modules["__main__"] = types.ModuleType("__main__")  # spawned processes import none
    tracker = resource_tracker._resource_tracker  # its own: ours would tell what a kill has left
    tracker._fd = tracker._pid = None
    for name in [n for n in sys.modules if n.split(".")[0] == "benchmarks"]:
        del sys.modules[name]
    watch = _Watch()
    options = ["-p", "no:cacheprovider", "--basetemp", str(copy.parent / "tmp"), "--tb=short"]
    code = pytest.main([*options, "--rootdir", str(copy), "-x", *tests], plugins=[watch])
    module = sys.modules.get("dolmen")
    assert module is None or Path(module.__file__).is_relative_to(copy), module
    outcome = {0: "passed", 1: "failed"}.get(int(code), "broken")
    if outcome == "passed" and not watch.passed:
        outcome, watch.broken = "broken", "no test was run: all were skipped"
    if outcome == "broken" and not watch.broken:
        lines = Path(copy.parent / "log").read_text().splitlines()
        watch.broken = next((line for line in lines if line.startswith("ERROR")), "no test")
    told.write_text(json.dumps([outcome, watch.broken or watch.failed]))
