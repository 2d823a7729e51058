"""A function of the user's in a process of its own, which may be ended at any time:

    python -m dolmen.rl.judge reward MODULE:FUNCTION FD
    python -m dolmen.rl.judge turn MODULE:FUNCTION FD

reads a line of JSON per request from its standard input, {"number", "prompt", "answer", "row"} or
{"number", "prompt", "turns", "row"}, and writes to the file descriptor FD one of {"reward":
number}, {"turn": text or null} or {"failed": why}, with the request's number. What the function
prints goes where its process's output goes.
"""

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any, SupportsFloat


def named(name: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION is, the current folder's modules among them. Raises
    ValueError.
    """
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise ValueError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found.__dict__.get(function)):
        raise ValueError(f"{module} has no function {function}")
    return found.__dict__[function]


ARGUMENTS = {"reward": ("prompt", "answer", "row"), "turn": ("prompt", "turns", "row")}


def check_signature(name: str, function: Callable[..., Any], kind: str) -> None:
    """Raise ValueError for a function that cannot be called with ARGUMENTS[kind]."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: nothing is known of it
        return
    call = f"function({', '.join(ARGUMENTS[kind])})"
    if kind == "reward" and "completions" in signature.parameters:
        raise ValueError(
            f"{name} takes lists of completions, as a reward function of TRL does; dolmen calls "
            f"{call} for each completion: give one that returns {name.rpartition(':')[2]}("
            "prompts=[prompt], completions=[answer], **{k: [v] for k, v in row.items()})[0]"
        )
    try:
        signature.bind(*ARGUMENTS[kind])
    except TypeError as error:
        raise ValueError(f"{name} cannot be called as {call}: {error}") from error


Reply = dict[str, float | str | None]
LARGEST = 1e15


def judged(function: Callable[..., object], asked: dict[str, Any]) -> Reply:
    """How good an answer is: a number, of Python or another library; text and a bool are none."""
    found = function(asked["prompt"], asked["answer"], asked["row"])
    kind = type(found).__name__  # numpy's bool is none of Python's
    if not isinstance(found, SupportsFloat) or kind.startswith("bool"):
        return {"failed": f"it gave {kind}, not a number"}
    reward = float(found)
    # rewards are squared in fp32, for their deviation
    return {"reward": reward} if abs(reward) < LARGEST else {"failed": f"it gave {reward}"}


def turned(function: Callable[..., str | None], asked: dict[str, Any]) -> Reply:
    """What is said to the model next; None: nothing more."""
    turn = function(asked["prompt"], asked["turns"], asked["row"])
    if turn is not None and not isinstance(turn, str):
        return {"failed": f"it gave {type(turn).__name__}, not a text or None"}
    if turn is not None and turn != _writable(turn):
        return {"failed": "it gave half a character (a lone surrogate)"}
    return {"turn": turn}


def _writable(text: str) -> str:
    """With half characters, which no tokenizer and no terminal takes, as Python writes them."""
    return text.encode(errors="backslashreplace").decode()


KINDS = {"reward": judged, "turn": turned}


def replied(kind: str, function: Callable[..., Any], line: str) -> Reply:
    """The reply to a line."""
    request = json.loads(line)
    number = {"number": request.pop("number")}
    try:
        return KINDS[kind](function, request) | number
    except Exception as error:
        return {"failed": _writable(f"{type(error).__name__}: {error}"[:400])} | number


def main(kind: str, name: str, reply_to: int) -> None:
    with open(reply_to, "w", buffering=1) as out:
        try:
            function = named(name)
            check_signature(name, function, kind)
        except ValueError as error:
            out.write(json.dumps({"failed": str(error)}) + "\n")
            return
        out.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            out.write(json.dumps(replied(kind, function, line)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
