"""CPU time of a test run: minutes of the whole run at its end, seconds of each file with `--cpu`.

A process counts itself, every child that it has waited for (getrusage), and the server that ranks
are forked from (spawning.py), which waits for them. With xdist each worker reports its own numbers
when it ends, and the controller adds them.
"""

import os
import resource
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path

import pytest


def cpu_seconds() -> float:
    """CPU seconds of this process, of its children that have ended, and of ranks."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + rank_seconds()


def rank_seconds() -> float:
    """CPU seconds of the server of ranks, while it lives, and of its ranks that have ended."""
    server = forkserver._forkserver._forkserver_pid
    if server is None:
        return 0.0
    fields = Path(f"/proc/{server}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime to cstime


class CpuTime:
    """A pytest plugin that adds up the CPU time of a run, on a worker or on the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seconds = 0.0  # of workers
        self.files: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self):
        result = yield
        self.files["imports and collection"] += cpu_seconds()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        before = cpu_seconds()
        result = yield
        self.files[item.nodeid.partition("::")[0]] += cpu_seconds() - before
        return result

    @pytest.hookimpl(tryfirst=True)  # before xdist sends it
    def pytest_sessionfinish(self):
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["cpu"] = cpu_seconds(), dict(self.files)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        seconds, files = getattr(node, "workeroutput", {}).get("cpu", (0.0, {}))
        self.seconds += seconds
        self.files.update(files)

    def pytest_terminal_summary(self, terminalreporter):
        # workers are children of the controller: none is counted twice
        own = resource.getrusage(resource.RUSAGE_SELF)
        seconds = own.ru_utime + own.ru_stime + self.seconds if self.seconds else cpu_seconds()
        terminalreporter.write_line(f"{seconds / 60:.1f} minutes of CPU time")
        if not self.config.getoption("--cpu"):
            return
        folders: Counter[str] = Counter()
        for file, used in self.files.items():
            folders[str(Path(file).parent)] += used
        for totals in (folders, self.files):
            terminalreporter.write_line("")
            for name, used in totals.most_common():
                terminalreporter.write_line(f"{used:8.1f} s  {name}")
