"""Runs Python code in a subprocess with limits on CPU time and memory, for work that a hostile file
can make endless and that cannot be interrupted in this process: matching its regular expressions.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

PRELUDE = """
import json, resource, sys
inputs = json.load(sys.stdin)
sys.path[:] = inputs["path"]
def limit():
    resource.setrlimit(resource.RLIMIT_CPU, (inputs["seconds"],) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (inputs["memory"],) * 2)
"""
OVER_TIME = (-signal.SIGXCPU, -signal.SIGKILL)
"""Exit codes of a process that has used its CPU time."""


def run_limited(
    code: str, inputs: Mapping[str, Any], *, seconds: int, memory: int
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a subprocess and return its exit code and output. The code finds its input in
    the dict `inputs` and calls `limit()` after its imports: from there on it has `seconds` of CPU
    time and `memory` bytes.
    """
    # -I: nothing is imported from the working folder, so modules are found on our own path
    path = [path for path in sys.path if path]
    request = {**inputs, "path": path, "seconds": seconds, "memory": memory}
    return subprocess.run(
        [sys.executable, "-I", "-c", PRELUDE + code],
        input=json.dumps(request),
        text=True,
        capture_output=True,
    )
