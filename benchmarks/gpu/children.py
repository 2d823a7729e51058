"""Processes that a stage starts: the kernel kills them when the stage ends, however it ends, so
that nothing holds the GPU after a runner was killed.

    python -m benchmarks.gpu.children PARENT COMMAND...      COMMAND, that dies with process PARENT
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which has started it, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before the kernel was asked
        os._exit(1)


def dying(command: Sequence[str]) -> list[str]:
    """The words that start `command` as a process which dies with this one. (A function run between
    fork and exec might wait for ever for a lock that one of torch's threads held.)
    """
    return [sys.executable, "-m", "benchmarks.gpu.children", str(os.getpid()), *command]


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # the kernel's promise outlives this
