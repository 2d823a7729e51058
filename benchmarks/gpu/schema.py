"""What a gpu.json may hold: it may have come from another machine, and is read as any file is."""

from benchmarks.gpu.case import CHECKED
from dolmen.files.gate import MIB, Kind
from dolmen.files.schema import (
    Flag,
    Int,
    List,
    Map,
    Object,
    Real,
    String,
    either,
    optional,
)

FORMAT = 1
STATUS = {
    "ok": "ran, and every check held",
    "wrong": "ran, and a check did not hold",
    "failed": "raised an exception",
    "died": "its process ended",
    "late": "was ended, far over its estimate",
    "cut": "was ended, as all time was spent",
    "left": "not begun for want of time",
}
WORD = String(longest=1024)
# `plain` in case.py writes what is no number of JSON as a word
NUMBER = either(Real(), String(("nan", "inf", "-inf")))
CHECK = dict(zip(CHECKED, (WORD, NUMBER, NUMBER, Flag(), WORD), strict=True))
CASE = {
    "stage": WORD,
    "name": WORD,
    "status": String(tuple(STATUS)),
    "expected": Real(0),
    "seconds": Real(),
    "values": Map(),
    "checks": List(Object(CHECK, rest=None)),
    "error": String(),
    "repeat": String(),
}
OPTIONS = {"device": String(("cuda", "cpu")), "shape": String(("full", "small", "tiny"))}
MACHINE = {"python": WORD, "system": WORD, "commit": optional(WORD), "packages": Map(WORD)}
RUNNING = {"stage": WORD, "name": WORD, "since": Real(), "limit": Real()}
STAGE = {"about": WORD, "expected": Real(0), "seconds": Real(), "state": WORD, "error": String()}
GPU_JSON = Kind(
    Object(
        {
            "format": Int(FORMAT, FORMAT),
            "made": WORD,
            "options": Object(OPTIONS),
            "machine": Object(MACHINE),
            "stages": Map(Object(optional=STAGE)),
            "cases": List(Object(CASE)),
            "running": optional(Object(RUNNING)),
        }
    ),
    size=64 * MIB,  # all stages leave about 1 MiB
)
