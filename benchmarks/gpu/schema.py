"""What a gpu.json may hold: it may have come from another machine, and is read as any file is."""

from typing import Annotated, Any, Literal

from annotated_types import Interval, MaxLen

from benchmarks.gpu.case import CHECKED
from dolmen.core.config import NonNegative
from dolmen.files.gate import MIB, Kind
from dolmen.files.kinds import NAME
from dolmen.files.schema import typed_dict

FORMAT = 1
STATUS = {
    "ok": "ran, and every check held",
    "wrong": "ran, and a check did not hold",
    "failed": "raised an exception",
    "died": "its process ended",
    "late": "was ended, far over its estimate",
    "cut": "was ended, as all time was spent",
    "left": "not started: no time was left",
}
WORD = NAME
# `plain` in case.py writes what is no number of JSON as a word
NUMBER = float | Literal["nan", "inf", "-inf"]
CHECK: dict[str, Any] = dict(zip(CHECKED, (WORD, NUMBER, NUMBER, bool, WORD), strict=True))
CASE = {
    "stage": WORD,
    "name": WORD,
    "status": Literal[*STATUS],
    "expected": NonNegative,
    "seconds": float,
    "values": dict[str, Any],
    "checks": list[typed_dict(CHECK, rest=None)],
    "error": str,
    "repeat": str,
}
OPTIONS = {"device": Literal["cuda", "cpu"], "shape": Literal["full", "small", "tiny"]}
MACHINE = {
    "python": WORD,
    "system": WORD,
    "commit": Annotated[str | None, MaxLen(1024)],
    "packages": dict[str, WORD],
}
RUNNING = {"stage": WORD, "name": WORD, "since": float, "limit": float}
STAGE = {"about": WORD, "expected": NonNegative, "seconds": float, "state": WORD, "error": str}
GPU_JSON = Kind(
    typed_dict(
        {
            "format": Annotated[int, Interval(ge=FORMAT, le=FORMAT)],
            "made": WORD,
            "options": typed_dict(OPTIONS),
            "machine": typed_dict(MACHINE),
            "stages": dict[str, typed_dict({}, STAGE)],
            "cases": list[typed_dict(CASE)],
            "running": typed_dict(RUNNING) | None,
        }
    ),
    size=64 * MIB,  # all stages leave about 1 MiB
)
