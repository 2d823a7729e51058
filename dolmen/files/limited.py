"""Runs Python code in a process of its own with limits on CPU time and memory.

For what a hostile file can make run for ever, or fill the memory with, and what cannot be stopped
within this process: the matching of its regular expressions.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

PRELUDE = """
import json, resource, sys
given = json.load(sys.stdin)
sys.path[:] = given["path"]
def limit():
    resource.setrlimit(resource.RLIMIT_CPU, (given["seconds"],) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (given["memory"],) * 2)
"""
OVER_TIME = (-signal.SIGXCPU, -signal.SIGKILL)
"""Exit codes of a process that has used its CPU time."""


def run_limited(
    code: str, given: Mapping[str, Any], *, seconds: int, memory: int
) -> subprocess.CompletedProcess[str]:
    """Run `code`, which reads what it works on from the dict `given` and calls `limit()` once it
    has imported what it needs: `seconds` of CPU time and `memory` bytes from there on.
    """
    # -I: nothing of the working folder is imported, and so the modules are where ours are
    path = [path for path in sys.path if path]
    request = {**given, "path": path, "seconds": seconds, "memory": memory}
    return subprocess.run(
        [sys.executable, "-I", "-c", PRELUDE + code],
        input=json.dumps(request),
        text=True,
        capture_output=True,
    )
