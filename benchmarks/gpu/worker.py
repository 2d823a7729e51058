"""One process of a stage: its cases one after the other, each result kept before the next begins.

    python -m benchmarks.gpu.worker STAGE GPU.JSON UNTIL CASE RUNNER

UNTIL is the second (time.time) after which nothing is begun, RUNNER the process that this one dies
with. Exit code AGAIN: a case wants that the next begins in a process of its own; UNSAVED: what was
found could not be saved.
"""

import importlib
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from benchmarks.gpu import children
from benchmarks.gpu.case import Case, Context, Record
from benchmarks.gpu.results import Results

AGAIN, UNSAVED = 75, 74
START = 10  # seconds that a process takes to import torch and to wake the device


def say(text: str) -> None:
    """Into the log, if the disk has room."""
    with suppress(OSError):
        print(text, flush=True)


def planned(stage: str, case: Case, context: Context) -> dict:
    """What is known of a case before it has run."""
    words = f"--stages {stage} --only '{case.name}' --device {context.device} "
    return {
        "stage": stage,
        "name": case.name,
        "status": "left",
        "expected": case.seconds,
        "seconds": 0.0,
        "values": {},
        "checks": [],
        "error": "",
        "repeat": f"python -m benchmarks.gpu {words}--shape {context.shape} --out DIR",
    }


def run_case(results: Results, stage: str, case: Case, context: Context) -> str:
    """Run it and keep what it tells; its status."""
    row, began = planned(stage, case, context), time.time()
    results.put(row)
    row = results.case(stage, case.name)
    running = {"stage": stage, "name": case.name, "since": began, "limit": case.limit}
    results.content["running"] = running
    record = Record(row["values"], row["checks"], results.keep)
    results.save()
    say(f"--- {stage}/{case.name}, about {case.seconds:.0f} s")
    try:
        case.run(record)
        row["status"] = "ok" if record.ok else "wrong"
    except Exception:
        row.update(status="failed", error=traceback.format_exc())
        say(row["error"])
    row["seconds"] = time.time() - began
    results.content["running"] = None
    results.save()
    say(f"    {row['status']}, {row['seconds']:.1f} s")
    return row["status"]


def run_stage(
    results: Results, stage: str, cases: list[Case], context: Context, until: float, only: str = ""
) -> bool:
    """Run what has not been run and fits before `until`, in order. Whether there is more to run, in
    another process.
    """
    asked = [case for case in cases if only in ("", case.name)]
    for case in asked:
        if results.case(stage, case.name) is None:
            results.put(planned(stage, case, context))
    results.save()
    for i, case in enumerate(asked):
        if results.done(stage, case.name) or time.time() + case.seconds > until:
            continue
        run_case(results, stage, case, context)
        rest = [c for c in asked[i + 1 :] if not results.done(stage, c.name)]
        if case.fresh and any(time.time() + START + c.seconds <= until for c in rest):
            return True
    return False


def main(words: list[str]) -> int:
    module, file, until, only, runner = words
    children.die_with(int(runner))
    results = Results.read(Path(file))
    options = results.content["options"]
    context = Context(options["device"], options["shape"], Path(file).parent)
    stage = importlib.import_module(module)
    name = module.rpartition(".")[2]
    more = run_stage(results, name, list(stage.cases(context)), context, float(until), only)
    if results.unsaved:
        results.save()
    if results.unsaved:
        return UNSAVED
    return AGAIN if more else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
