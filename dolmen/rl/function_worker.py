"""Calls a user's function, MODULE:FUNCTION, in a worker process with a time limit per call, so that
a function that hangs, leaks or ends its process does not take the run with it. Both ends are here:

    FunctionWorker    starts the process, sends requests and waits for replies
    main              python -m dolmen.rl.function_worker reward|turn MODULE:FUNCTION FD

The process reads a line of JSON per request from its standard input, {"number", "prompt",
"completion", "row"} for a reward or {"number", "prompt", "turns", "row"} for an environment, and
writes to the file descriptor FD {"number", "reward": number}, {"number", "turn": text or null} or
{"number", "failed": why}. What the function prints goes where the process's output goes.
"""

import importlib
import importlib.util
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, SupportsFloat, TextIO

START_SECONDS = 120.0  # for what the function's module imports
LARGEST = 1e15
"""Bound of a reward: rewards are squared in fp32, for their deviation."""

Reply = dict[str, float | str | None]


def check_function_name(name: str, option: str, alternatives: str = "") -> None:
    """Raise ValueError, about option `option`, where `name` is not of the form MODULE:FUNCTION;
    `alternatives` lists the other values it may have, for the message.
    """
    module, _, function = name.partition(":")
    if not function or not all(part.isidentifier() for part in (*module.split("."), function)):
        raise ValueError(f"{option} is {name}: it must be {alternatives}MODULE:FUNCTION")


class FunctionWorker:
    """A worker process that runs one function. A call fails if it raises, takes over `timeout`
    seconds or ends the process; after the latter two the next call starts a new process.
    """

    def __init__(self, kind: Literal["reward", "turn"], name: str, timeout: float):
        """`kind`: what the function returns, a reward or an environment's turn. `name`:
        MODULE:FUNCTION. `timeout`: seconds per call. The process starts with `start`, or the first
        call.
        """
        self.kind, self.name, self.timeout = kind, name, timeout
        self.requests = 0
        """Requests sent so far; each has a number, which its reply repeats."""
        self.process: subprocess.Popen[str] | None = None
        self.replies: TextIO | None = None

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the reply, or {"failed": reason}; starts the process if there
        is none. Raises ValueError where the function cannot be imported.
        """
        if self.process is None:
            self.start()
        self.requests += 1
        # a reply that comes too late, or from a forked child, has another number
        numbered = {**request, "number": self.requests}
        reply = self._send(json.dumps(numbered, default=str) + "\n", self.timeout)
        if reply is None:
            self.stop()
            return {
                "failed": f"{self.name} returned no {self.kind} within {self.timeout:g} s, or its "
                "process ended"
            }
        if reply.pop("number", None) != self.requests:
            self.stop()
            return {
                "failed": f"{self.name}: its process sent a reply that does not answer request "
                f"{self.requests}: the function forks, or writes to its file descriptors"
            }
        if "failed" in reply:
            return {"failed": f"{self.name}: {reply['failed']}"}
        return reply

    def start(self) -> None:
        """Start the process and wait until it has imported the function, START_SECONDS (120 s) at
        most. Raises ValueError where that fails.
        """
        # a descriptor of its own, so that what the function prints is no reply
        ours, theirs = os.pipe()
        module = "dolmen.rl.function_worker"
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, self.kind, self.name, str(theirs)],
            stdin=subprocess.PIPE,
            pass_fds=(theirs,),
            text=True,
            start_new_session=True,  # processes of the function are killed with it
        )
        # else the end of the process would not end the pipe
        os.close(theirs)
        self.replies = open(ours)  # noqa: SIM115  # closed by stop
        first = self._read(START_SECONDS)
        if first is None or "ready" not in first:
            self.stop()
            why = (
                f"it was not ready within {START_SECONDS:g} s"
                if first is None
                else first.get("failed", "it sent no reply")
            )
            raise ValueError(f"{self.kind} {self.name}: {why}")

    def _send(self, line: str, timeout: float) -> dict[str, Any] | None:
        """Send a line of JSON to the worker process and return its reply; None if none comes within
        `timeout` seconds, or the process has ended.
        """
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read(timeout)

    def _read(self, timeout: float) -> dict[str, Any] | None:
        """Return the worker process's next reply, {} for a line that is no JSON object; None if
        none comes within `timeout` seconds, or its pipe is closed.
        """
        assert self.replies is not None
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            if select.select([self.replies], [], [], left)[0]:
                line = self.replies.readline()
                # a line without its end: the process died while it wrote
                return _parse_reply(line) if line.endswith("\n") else None
        return None

    def stop(self) -> None:
        """Kill the process and all processes that it started, and close the pipes."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                # SIGKILL: a function that hangs may ignore anything else
                os.killpg(self.process.pid, signal.SIGKILL)
            assert self.process.stdin is not None
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass  # unread requests are lost with it
            self.process.wait()
        if self.replies is not None:
            self.replies.close()
        self.process = self.replies = None


def _parse_reply(line: str) -> dict[str, Any]:
    """Return a line of JSON as a dict; {} for a line that is no JSON object."""
    try:
        reply = json.loads(line)
    except ValueError:
        return {}
    return reply if isinstance(reply, dict) else {}


# What follows runs in the worker process.

ARGUMENTS = {"reward": ("prompt", "completion", "row"), "turn": ("prompt", "turns", "row")}


def import_function(name: str) -> Callable[..., Any]:
    """Return the function of MODULE:FUNCTION; the current folder is added to the import path.
    Raises ValueError where the import fails or there is no such function.
    """
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target = importlib.import_module(module)
    except Exception as error:
        why, hint = f"{type(error).__name__}: {error}", ""
        if module.endswith(".py"):
            if importlib.util.find_spec(module[:-3].split(".")[0]) is None:
                raise ValueError(f"{name}: no file {module} in {os.getcwd()}") from error
            hint = f"; write {module[:-3]}:{function}"
        raise ValueError(f"{module} cannot be imported: {why}{hint}") from error
    if not callable(target.__dict__.get(function)):
        raise ValueError(f"{module} has no function {function}")
    return target.__dict__[function]


def check_signature(name: str, function: Callable[..., Any], kind: str) -> None:
    """Raise ValueError for a function that cannot be called with the arguments of its `kind`,
    "reward" or "turn"; for reward functions in TRL's form the message shows how to adapt it.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: its parameters are not known
        return
    call = f"function({', '.join(ARGUMENTS[kind])})"
    if kind == "reward" and "completions" in signature.parameters:
        raise ValueError(
            f"{name} takes lists of completions, like a reward function of TRL, but dolmen calls "
            f"{call} once per completion: give one that returns "
            f"{name.rpartition(':')[2]}(prompts=[prompt], completions=[completion], **{{k: [v] "
            "for k, v in row.items()})[0]"
        )
    try:
        signature.bind(*ARGUMENTS[kind])
    except TypeError as error:
        raise ValueError(f"{name} cannot be called as {call}: {error}") from error


def compute_reward(function: Callable[..., object], request: dict[str, Any]) -> Reply:
    """Call a reward function and return {"reward": float}, or {"failed": reason} for a result that
    is no number (bool is none) or not below LARGEST (1e15).
    """
    # numpy and torch scalars have __float__
    result = function(request["prompt"], request["completion"], request["row"])
    kind = type(result).__name__  # numpy's bool is not Python's
    if not isinstance(result, SupportsFloat) or kind.startswith("bool"):
        return {"failed": f"it returned {kind}, not a number"}
    reward = float(result)
    return {"reward": reward} if abs(reward) < LARGEST else {"failed": f"it gave {reward}"}


def compute_turn(function: Callable[..., str | None], request: dict[str, Any]) -> Reply:
    """Call an environment function and return {"turn": text, or None to end the completion}, or
    {"failed": reason} for another result.
    """
    turn = function(request["prompt"], request["turns"], request["row"])
    if turn is not None and not isinstance(turn, str):
        return {"failed": f"it returned {type(turn).__name__}, not text or None"}
    if turn is not None and turn != _escape_surrogates(turn):
        return {"failed": "it returned a lone surrogate, which is not valid text"}
    return {"turn": turn}


def _escape_surrogates(text: str) -> str:
    """Return the text with lone surrogates, which cannot be encoded, as backslash escapes."""
    return text.encode(errors="backslashreplace").decode()


KINDS = {"reward": compute_reward, "turn": compute_turn}


def make_reply(kind: str, function: Callable[..., Any], line: str) -> Reply:
    """Call the user's function for a request (a line of JSON) and return the reply with the
    request's number; an exception of the function becomes {"failed": reason}.
    """
    request = json.loads(line)
    number = {"number": request.pop("number")}
    try:
        return KINDS[kind](function, request) | number
    except Exception as error:
        return {"failed": _escape_surrogates(f"{type(error).__name__}: {error}"[:400])} | number


def main(kind: str, name: str, reply_to: int) -> None:
    """Serve requests from standard input, one per line, until it ends; replies go to the file
    descriptor `reply_to`. The first line sent is {"ready": true}, or why the function cannot be
    called.
    """
    with open(reply_to, "w", buffering=1) as out:
        try:
            function = import_function(name)
            check_signature(name, function, kind)
        except ValueError as error:
            out.write(json.dumps({"failed": str(error)}) + "\n")
            return
        out.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            out.write(json.dumps(make_reply(kind, function, line)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
