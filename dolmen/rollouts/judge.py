"""A reward's function in a process of its own, which may be ended at any time:

    python -m dolmen.rollouts.judge MODULE:FUNCTION FD

reads a line of JSON per answer from its standard input, {"prompt", "answer", "row"}, and writes to
the file descriptor FD one of {"reward": number} or {"failed": why}. What the function prints goes
where its process's output goes.
"""

import importlib
import json
import math
import os
import sys
from collections.abc import Callable


def named(name: str) -> Callable[..., float]:
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


def judged(function: Callable[..., float], line: str) -> dict[str, float | str]:
    """The reply to a line."""
    asked = json.loads(line)
    try:
        reward = float(function(asked["prompt"], asked["answer"], asked["row"]))
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:400]}
    return {"reward": reward} if math.isfinite(reward) else {"failed": f"it gave {reward}"}


def main(name: str, reply_to: int) -> None:
    with open(reply_to, "w", buffering=1) as out:
        try:
            function = named(name)
        except ValueError as error:
            out.write(json.dumps({"failed": str(error)}) + "\n")
            return
        out.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            out.write(json.dumps(judged(function, line)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
