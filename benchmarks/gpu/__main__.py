"""Everything a GPU is asked, in order of worth, within so many minutes.

    python -m benchmarks.gpu --minutes 25 --out runs/gpu
    python -m benchmarks.gpu --minutes 9 --out DIR --resume       what DIR has is not run again
    python -m benchmarks.gpu --stages ops throughput --out DIR    some stages; `smoke` is a group
    python -m benchmarks.gpu --stages ops --only 'rope bf16' --out DIR
    python -m benchmarks.gpu --plan                               what would be run, and how long
    python -m benchmarks.gpu report DIR... [--write]              the section of docs/performance.md

DIR/gpu.json has everything, DIR/gpu.log what was printed. Exit code 1 where a case was not ok.
"""

import argparse
import fcntl
import importlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path

from benchmarks.gpu import packages
from benchmarks.gpu.case import Context
from benchmarks.gpu.results import AGAIN, LOCK, NAME, Results, named
from benchmarks.gpu.runner import Runner, Stage
from benchmarks.gpu.schema import STATUS
from benchmarks.gpu.stages import STAGES, chosen
from benchmarks.gpu.worker import START
from dolmen.core import environment

DAY = 24 * 60  # minutes
VERSIONS = ("torch", "triton", "transformers", "numpy", "nvidia-nccl-cu13", "nvidia-cudnn-cu13")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=25, help="after which all has ended")
    add("--out", type=Path, default=Path("runs/gpu"), help="folder of gpu.json and gpu.log")
    add("--stages", nargs="+", help=", ".join(["smoke", *(s.name for s in STAGES)]))
    add("--skip", nargs="+", help="stages, or smoke, that are left out")
    add("--only", default="", help="of the stages, the case of this name alone")
    add("--resume", nargs="?", type=Path, const=True, help="go on from --out, or from this folder")
    add("--retry", action="store_true", help="with --resume: what was not ok is run again")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--shape", choices=["full", "small", "tiny"], default="full", help="tiny: in miniature")
    add("--wheels", type=Path, default=Path(".whl"), help="for what this Python lacks")
    add("--plan", action="store_true", help="say what would be run, and run nothing")
    return parser.parse_args(words)


def refused(given: argparse.Namespace) -> str:
    """What of the arguments cannot be meant; empty: nothing."""
    if not 0 < given.minutes <= DAY:
        return f"--minutes is {given.minutes:g}: it must be over 0 and at most {DAY}"
    if given.retry and given.resume is None:
        return "--retry runs again what an earlier call left, so it needs --resume"
    if isinstance(given.resume, Path) and not (given.resume / NAME).is_file():
        return f"--resume {given.resume}: there is no {NAME} in it"
    return ""


def commit() -> str | None:
    """Of the checkout, where it and git are there."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(words, cwd=packages.ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() or None


def machine() -> dict:
    """What is known without asking the GPU."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "commit": commit(),
        "packages": {d.name: d.version for d in metadata.distributions() if d.name in VERSIONS},
        "missing": packages.missing(),
    }


def gpu() -> bool:
    """Asked in a process of its own, as what has asked CUDA cannot fork."""
    words = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", words], stderr=subprocess.DEVNULL).returncode == 0


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder, made if it is not there, is this process's alone. Raises ValueError where another
    runner has it, OSError where it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is in use by another run: give another --out") from None
        yield
    finally:
        os.close(lock)


def opened(given: argparse.Namespace) -> Results:
    """The results to go on with, or new ones. Raises ValueError where there are some and nobody
    said --resume.
    """
    here = given.out / NAME
    options = {"device": given.device, "shape": given.shape, "minutes": given.minutes}
    if given.resume is None and here.exists():
        raise ValueError(f"{here} is there: say --resume to go on, or give another --out")
    before = here if given.resume is True else Path(given.resume or "") / NAME
    if given.resume is None or not before.exists():
        return Results.new(given.out, options=options, machine=machine())
    results = Results.read(before)
    results.file = here
    old = results.content["options"]
    if (old["device"], old["shape"]) != (given.device, given.shape):
        raise ValueError(f"{before} is of {old}: resume with the same --device and --shape")
    results.end_running("cut", "its process was ended, and the runner's with it")
    if given.retry:
        results.content["cases"] = [c for c in results.content["cases"] if c["status"] == "ok"]
    results.content["options"] = options
    return results


def plan(stages: Sequence[Stage], minutes: float) -> str:
    """The stages that would be run, and what they are thought to take."""
    lines = [f"{s.name:12}{s.seconds:6.0f} s  {s.about}" for s in stages]
    whole = sum(s.seconds for s in stages)
    return "\n".join([*lines, f"{'all':12}{whole:6.0f} s  of {minutes * 60:.0f} that there are"])


def in_cases(stages: Sequence[Stage], context: Context) -> str:
    """The plan in cases. What is imported for it, the runner does without."""
    lines = []
    for stage in stages:
        try:
            found = list(importlib.import_module(stage.module).cases(context))
        except ImportError as error:
            lines.append(f"\n{stage.name}: {error}; its cases are known once the wheels are there")
            continue
        apart = 1 + sum(case.fresh for case in found)
        lines.append(f"\n{stage.name}: {len(found)} cases, {apart} processes of {START} s to start")
        lines += [f"{case.seconds:6.0f} s  {case.name}" for case in found]
    return "\n".join(lines)


def table(results: Results, stages: Sequence[Stage]) -> str:
    """How each stage has ended, and what was not ok: fits a terminal."""
    lines = []
    for stage in stages:
        cases = results.of(stage.name)
        row = results.content["stages"].get(stage.name, {})
        counts = [(status, sum(c["status"] == status for c in cases)) for status in STATUS]
        told = ", ".join(f"{n} {status}" for status, n in counts if n) or "no case"
        state = row.get("state", "not reached")
        lines.append(f"{stage.name:12}{row.get('seconds', 0):6.0f} s  {state}: {told}")
        for case in cases:
            if case["status"] not in ("ok", *AGAIN):
                lines.append(f"    {case['status']:7}{case['name']}: {last(case)}"[:110])
    return "\n".join(lines)


def last(case: dict) -> str:
    """Of what is wrong with a case, one line."""
    off = [c for c in case["checks"] if not c["ok"]]
    if off:
        return f"{off[0]['what']} is {off[0]['value']}, at most {off[0]['bound']}"
    return named(case["error"])


def finish(results: Results, stages: Sequence[Stage]) -> int:
    print(table(results, stages), flush=True)
    print(f"{results.file}", flush=True)
    fine = all(c["status"] in ("ok", *AGAIN) for c in results.content["cases"])
    states = [results.content["stages"].get(s.name, {}).get("state") for s in stages]
    return 0 if fine and not {"died", "broken"} & set(states) else 1


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else list(words)
    if words[:1] == ["report"]:
        from benchmarks.gpu import report  # it imports what a machine may lack

        return report.main(words[1:])
    given, began = arguments(words), time.time()
    given.out = given.out.resolve()
    if refusal := refused(given):
        print(f"benchmarks.gpu: {refusal}", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        try:
            stages = chosen(given.stages, given.skip)
            if not stages:
                raise ValueError("--skip leaves nothing of --stages")
            print(plan(stages, given.minutes), flush=True)
            if given.plan:
                print(in_cases(stages, Context(given.device, given.shape)), flush=True)
                return 0
            if given.device == "cuda" and not gpu():
                raise ValueError(
                    "this process sees no GPU (torch.cuda.is_available()): make one visible, or "
                    "try it with --device cpu --shape tiny"
                )
            stack.enter_context(held(given.out))
            results = opened(given)
        except (ValueError, OSError) as error:
            print(f"benchmarks.gpu: {error}", file=sys.stderr)
            return 2
        results.save()
        if results.unsaved:
            return 2
        return asked(results, stages, given, began + 60 * given.minutes)


def asked(
    results: Results, stages: Sequence[Stage], given: argparse.Namespace, deadline: float
) -> int:
    """Run the stages into `results` until `deadline`, and tell how it went: the exit code."""
    site = None
    try:
        site = packages.install(given.wheels)
    except RuntimeError as error:  # what does not need them runs
        print(error, flush=True)
    environment.set_defaults(os.environ)  # as the command does, for the processes of the stages
    os.environ.update(packages.environment(site))
    os.chdir(packages.ROOT)
    runner = Runner(results, deadline, given.only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        runner.run(stages)
    finally:
        if site:
            shutil.rmtree(site, ignore_errors=True)
        code = finish(runner.results, stages)
    return code


if __name__ == "__main__":
    sys.exit(main())
