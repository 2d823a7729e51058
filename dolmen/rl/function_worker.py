"""A function of the user's, MODULE:FUNCTION, in a process of its own (judge.py), with a limit of
time for each reply.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, Literal, TextIO

START_SECONDS = 120.0  # for what the function's module imports


def check_name(name: str, option: str, known: str = "") -> None:
    """Raises ValueError for what is no MODULE:FUNCTION; `known` else could be there."""
    module, _, function = name.partition(":")
    if not function or not all(part.isidentifier() for part in (*module.split("."), function)):
        raise ValueError(f"{option} is {name}: it must be {known}MODULE:FUNCTION")


class Apart:
    """One that raises, takes longer than `limit` seconds or ends its process has failed, and the
    next is asked of a new process where the old one is gone.
    """

    def __init__(self, kind: Literal["reward", "turn"], name: str, limit: float):
        self.kind, self.name, self.limit = kind, name, limit
        self.requests = 0
        """Sent so far; each has a number, which its reply repeats."""
        self.process: subprocess.Popen[str] | None = None
        self.replies: TextIO | None = None

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The reply, or {"failed": why}. Raises ValueError where the function is not there."""
        if self.process is None:
            self.begin()
        self.requests += 1
        request = {**asked, "number": self.requests}
        reply = self._asked(json.dumps(request, default=str) + "\n", self.limit)
        if reply is None:
            self.end()
            return {"failed": f"{self.name} gave no {self.kind} within {self.limit:g} s, or ended"}
        if reply.pop("number", None) != self.requests:
            self.end()
            return {
                "failed": f"{self.name}: its process sent a reply that does not answer request "
                f"{self.requests}: the function forks, or writes to its file descriptors"
            }
        if "failed" in reply:
            return {"failed": f"{self.name}: {reply['failed']}"}
        return reply

    def begin(self) -> None:
        """Start its process. Raises ValueError where the function is not there."""
        ours, theirs = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dolmen.rl.judge", self.kind, self.name, str(theirs)],
            stdin=subprocess.PIPE,
            pass_fds=(theirs,),
            text=True,
            start_new_session=True,  # what a function has started ends with it
        )
        os.close(theirs)
        self.replies = open(ours)  # noqa: SIM115  # closed by end
        begun = self._read(START_SECONDS)
        if begun is None or "ready" not in begun:
            self.end()
            why = (
                f"it was not ready in {START_SECONDS:g} s"
                if begun is None
                else begun.get("failed", "it wrote no reply")
            )
            raise ValueError(f"{self.kind} {self.name}: {why}")

    def _asked(self, line: str, limit: float) -> dict[str, Any] | None:
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read(limit)

    def _read(self, limit: float) -> dict[str, Any] | None:
        """The next reply; None where none comes in time."""
        assert self.replies is not None
        end = time.monotonic() + limit
        while (left := end - time.monotonic()) > 0:
            if select.select([self.replies], [], [], left)[0]:
                line = self.replies.readline()
                return _parsed(line) if line.endswith("\n") else None
        return None

    def end(self) -> None:
        """End the process and all that it has started."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            assert self.process.stdin is not None
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass  # what it had not read is lost with it
            self.process.wait()
        if self.replies is not None:
            self.replies.close()
        self.process = self.replies = None


def _parsed(line: str) -> dict[str, Any]:
    """A reply; {} for a line that is none."""
    try:
        reply = json.loads(line)
    except ValueError:
        return {}
    return reply if isinstance(reply, dict) else {}
