"""gpu.json: everything that was found, in one file that is always whole.

It is replaced after each thing that a case tells, by the process of the stage or, where there is
none, by the runner; never by both. So what a stage had found stays when it dies.
"""

import json
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.case import plain
from benchmarks.gpu.schema import FORMAT, GPU_JSON
from dolmen.files import gate

NAME, LOG, LOCK = "gpu.json", "gpu.log", "gpu.lock"
AGAIN = ("cut", "left")  # what a later call with --resume runs


@dataclass
class Results:
    """The content of a gpu.json, and where it is."""

    file: Path
    content: dict[str, Any]
    saved: float = 0.0
    """When it was last saved, in seconds of a clock that only goes on."""
    unsaved: str = ""
    """Why the last `save` could not; empty where it could."""

    @staticmethod
    def new(folder: Path, **facts: Any) -> "Results":
        now = datetime.now(UTC).isoformat(timespec="seconds")
        content = {"format": FORMAT, "made": now, **facts, "stages": {}, "cases": []}
        return Results(folder / NAME, content | {"running": None})

    @staticmethod
    def read(file: Path) -> "Results":
        """Raises gate.Refused for a file that is not as `save` writes it."""
        content = gate.read_json(file, GPU_JSON)
        try:
            datetime.fromisoformat(content["made"])
        except ValueError as error:
            raise gate.refuse(file, f"made is no date: {error}") from error
        return Results(file, content)

    def keep(self, now: bool) -> None:
        """`save`, if not `now` then unless that was done within the last half second."""
        if now or time.monotonic() > self.saved + 0.5:
            self.save()

    def save(self) -> None:
        """What a full disk refuses is said once and kept in memory, for the next save."""
        self.saved = time.monotonic()
        part = self.file.with_suffix(".part")
        text = json.dumps(plain(self.content), indent=1, allow_nan=False)
        try:
            part.write_text(text)
            os.replace(part, self.file)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            with suppress(OSError):
                if not self.unsaved:
                    print(f"{self.file} cannot be saved: {error}", file=sys.stderr, flush=True)
            self.unsaved = str(error)
        else:
            self.unsaved = ""

    def case(self, stage: str, name: str) -> dict[str, Any] | None:
        found = (c for c in self.content["cases"] if (c["stage"], c["name"]) == (stage, name))
        return next(found, None)

    def put(self, case: dict[str, Any]) -> None:
        """`case` in place of what was known of it."""
        old = self.case(case["stage"], case["name"])
        if old is None:
            self.content["cases"].append(case)
        else:
            old.clear()
            old.update(case)

    def done(self, stage: str, name: str) -> bool:
        """Whether it needs not be run again."""
        case = self.case(stage, name)
        return case is not None and case["status"] not in AGAIN

    def of(self, stage: str) -> list[dict[str, Any]]:
        return [case for case in self.content["cases"] if case["stage"] == stage]

    def end_running(self, status: str, error: str) -> str | None:
        """The case that was running, now of `status`: its name; None where none was."""
        running = self.content["running"]
        if running is None:
            return None
        self.content["running"] = None
        case = self.case(running["stage"], running["name"])
        if case is None:
            return None
        case.update(status=status, error=error, seconds=time.time() - running["since"])
        return running["name"]


def named(error: str) -> str:
    """The line of a traceback that names the exception, whose message may have many; of another
    text the last.
    """
    lines = error.strip().splitlines() or [""]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
    return (raised or lines)[-1]
