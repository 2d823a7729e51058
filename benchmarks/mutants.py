"""The mutation score: how many of a list of one-line faults (benchmarks/mutation/*.yaml) the tests
see.

    python -m benchmarks.mutants                         all of them; again: what is left of them
    python -m benchmarks.mutants --only pipeline         those whose file or words have it
    python -m benchmarks.mutants --sample 10 --fresh     ten drawn by --seed, whatever is known
    python -m benchmarks.mutants --record tests/ops      record which tests execute which line
    python -m benchmarks.mutants --automatic 40 --seed 1 2    faults made by rule, 40 of each seed
    python -m benchmarks.mutants --repeated 20           cases that execute the lines of others

The tests that any fault names run first, without a fault, and must pass. Then each fault is put
into a copy of the tree, and the tests that it names run there, up to the first that fails.

    killed       a test failed, or what prepares it did
    survived     all passed
    late         time was up; not a kill: a test that hangs says nothing of why
    broken       the tests could not run: an error in the list of faults, and no kill

Score = killed / all faults that were run, those named as equivalent included, which must survive.
Results are kept by a digest of fault, code and tests, so that an interrupted run goes on. Exit code
1 where a test fails without a fault, and for what is broken or wrongly named equivalent.

Faults made by rule (mutation/automatic.py) run against the tests that execute their line, fastest
first, then, where all pass, against the files of these tests, up to --limit each. A fault by which
the files cannot be imported is killed; one that no recorded test executes is not, and is
"unreached". At the end the tests that killed run without the fault. Score = killed / drawn, without
those that are named equivalent (mutation/equivalent/equivalent.yaml, at most 10 %).
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.mutation import automatic, cases, faults, record
from benchmarks.mutation.cases import Case
from benchmarks.mutation.faults import Fault

VERDICTS = {"failed": "killed", "passed": "survived", "late": "late", "broken": "broken"}
UNMUTATED_LIMIT = 1800  # seconds, of all tests of one file


@dataclass
class Results:
    """A file of results, one per line; what is there already is not run again."""

    file: Path
    known: dict[str, Case]

    @staticmethod
    def open(file: Path, fresh: bool) -> "Results":
        file.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            file.unlink(missing_ok=True)
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return Results(file, {row["key"]: Case(**row["case"]) for row in rows})

    def add(self, key: str, case: Case, why: str) -> None:
        self.known[key] = case
        with self.file.open("a") as file:
            file.write(json.dumps({"key": key, "case": asdict(case), "why": why}) + "\n")


def chosen(given: argparse.Namespace) -> list[Fault]:
    """The faults that the command line asks for. Raises ValueError where there are none."""
    found = [f for f in faults.read() if given.only.lower() in f"{f.file} {f.why}".lower()]
    if given.sample is not None:
        order = random.Random(given.seed[0]).sample(
            range(len(found)), min(given.sample, len(found))
        )
        found = [found[i] for i in sorted(order)]
    if not found:
        raise ValueError(
            f"no fault has {given.only!r} in its file or its words: use another --only"
        )
    return found


def carry_out(
    pool: Executor,
    work: dict[str, tuple[str, Callable[..., Case], tuple]],
    results: Results,
    line: Progress,
) -> None:
    """Run what has no result yet; `work` is key -> (words, function, arguments). Tells each."""
    left = {key: it for key, it in work.items() if key not in results.known}
    task = line.add_task("", total=len(work), completed=len(work) - len(left))
    futures = {
        pool.submit(function, *arguments): key for key, (why, function, arguments) in left.items()
    }
    try:
        for future in as_completed(futures):
            key, case = futures[future], future.result()
            why, function, _ = left[key]
            results.add(key, case, why)
            line.update(task, advance=1, description=why)
            verdict = VERDICTS[case.outcome] if function is cases.attempt else case.outcome
            line.console.print(
                f"{verdict:9}{case.seconds:6.1f} s  {why}", highlight=False, markup=False
            )
    finally:  # interrupted, it keeps what is done and starts nothing more
        for future in futures:
            future.cancel()
    line.remove_task(task)


def unmutated(found: Sequence[Fault], spec: str) -> dict[str, tuple]:
    """The work of running all tests that these faults name, a test file at a time."""
    files: dict[str, set[str]] = {}
    for test in (test for fault in found for test in fault.tests):
        files.setdefault(test.split("::")[0], set()).add(test)
    out = {}
    for file, tests in sorted(files.items()):
        nothing = Fault(file, "", "", f"unmutated: {file}", tuple(sorted(tests)))
        out[nothing.key(spec)] = nothing.why, cases.run, (nothing.tests, UNMUTATED_LIMIT)
    return out


def told(found: Sequence[Fault], ends: Sequence[Case]) -> Table:
    """What was not killed, and what was that should not be."""
    table = Table("", "fault", "in", "told", title="not killed")
    for fault, case in zip(found, ends, strict=True):
        verdict = VERDICTS[case.outcome]
        if fault.equivalent is not None:
            verdict = "equivalent" if verdict == "survived" else f"{verdict}, named equivalent"
        if verdict != "killed":
            said = fault.equivalent if verdict == "equivalent" else case.told
            change = f"{fault.old}  ->  {fault.new}"
            table.add_row(verdict, fault.why, f"{fault.file}\n{change}", said)
    return table


def score(found: Sequence[Fault], ends: Sequence[Case]) -> str:
    """The last line: killed of all, and how many of the rest are named as equivalent."""
    killed = sum(case.outcome == "failed" for case in ends)
    equivalent = sum(fault.equivalent is not None for fault in found)
    share = 100 * killed / len(found)
    return (
        f"mutation score: {share:.1f} % ({killed} of {len(found)} killed, {equivalent} equivalent)"
    )


def right(fault: Fault, case: Case) -> bool:
    """Whether the list of faults is as it should be: tests run, an equivalent survives."""
    return case.outcome != "broken" and (fault.equivalent is None or case.outcome == "passed")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="words that a fault's file or its why has")
    parser.add_argument("--sample", type=int, help="so many, drawn at random")
    parser.add_argument(
        "--record", nargs="+", default=[], help="folders or files of tests to record"
    )
    parser.add_argument("--ignore", nargs="+", default=[], help="of --record, files left out")
    parser.add_argument("--automatic", type=int, help="so many faults made by rule, of each seed")
    parser.add_argument("--repeated", type=int, help="list so many tests whose cases repeat")
    parser.add_argument("--tests", type=int, default=40, help="at most, of a fault made by rule")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="of the draw")
    parser.add_argument("--workers", type=int, default=2, help="processes, each with a copy")
    parser.add_argument(
        "--limit", type=float, default=120, help="CPU seconds of the tests of a fault"
    )
    parser.add_argument("--fresh", action="store_true", help="forget all results")
    parser.add_argument("--results", type=Path, default=faults.ROOT / "runs" / "mutants.jsonl")
    return parser.parse_args(words)


def pool(workers: int, scratch: Path) -> ProcessPoolExecutor:
    """Processes that have a copy of the tree each; forking is theirs, so they are spawned."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, spawn, cases.prepare, (scratch,))


@contextmanager
def runner(workers: int, screen: Console) -> Iterator[tuple[Executor, Progress]]:
    """Processes that run cases, and the line that shows how far they are."""
    columns = (
        MofNCompleteColumn(),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with (
        tempfile.TemporaryDirectory(prefix="mutants_", ignore_cleanup_errors=True) as scratch,
        pool(workers, Path(scratch)) as processes,
        Progress(*columns, console=screen, transient=True) as line,
    ):
        yield processes, line


def failing_unmutated(
    found: Sequence[Fault], spec: str, results: Results, processes: Executor, line: Progress
) -> list[Case]:
    """Run the tests of these faults without a fault; return the runs that did not pass."""
    work = unmutated(found, spec)
    for key in work:  # what has failed may have been for want of memory or ports
        if key in results.known and results.known[key].outcome != "passed":
            del results.known[key]
    carry_out(processes, work, results, line)
    wrong = [results.known[key] for key in work if results.known[key].outcome != "passed"]
    if wrong:
        reasons = [case.told or case.outcome for case in wrong]
        line.console.print("without a fault, these fail:", *reasons, sep="\n")
    return wrong


def score_list(given: argparse.Namespace, screen: Console) -> int:
    """Run the faults of the list and print their score; return the exit code."""
    found, spec, began = chosen(given), faults.spec(), time.monotonic()
    for fault in found:
        faults.mutated(fault)  # raises: what does not match is an error, never a kill
    results = Results.open(given.results, given.fresh)
    with runner(given.workers, screen) as (processes, line):
        if failing_unmutated(found, spec, results, processes, line):
            return 1
        work = {f.key(spec): (f.why, cases.attempt, (f, given.limit)) for f in found}
        carry_out(processes, work, results, line)
    ends = [results.known[key] for key in work]
    screen.print(told(found, ends))
    seconds = [case.seconds for case in ends]
    screen.print(
        f"{len(found)} faults, median {statistics.median(seconds):.1f} s, longest "
        f"{max(seconds):.1f} s, {(time.monotonic() - began) / 60:.1f} min with {given.workers} "
        f"workers, {sum(case.outcome == 'late' for case in ends)} late"
    )
    print(score(found, ends))
    return 0 if all(map(right, found, ends)) else 1


def score_automatic(given: argparse.Namespace) -> int:
    """Run faults made by rule and print the report as Markdown; return the exit code."""
    known, spec = record.read(), faults.spec()
    drawn = automatic.results_of(known, given.automatic, given.seed, given.tests)
    results = Results.open(given.results, given.fresh)
    with runner(given.workers, Console(stderr=True)) as (processes, line):

        def attempt(found: Sequence[Fault]) -> list[Case]:
            work = {f.key(spec): (f.why, cases.attempt, (f, given.limit)) for f in found}
            carry_out(processes, work, results, line)
            return [results.known[f.key(spec)] for f in found]

        killers = []
        reached = [result for result in drawn if result.fault.tests]
        for result, case in zip(reached, attempt([r.fault for r in reached]), strict=True):
            result.verdict = {"failed": "killed", "late": "late"}.get(case.outcome, "survived")
            if result.verdict == "killed":
                killers.append(automatic.killing_test(result.fault, case))
        left = [result for result in reached if result.verdict == "survived"]
        whole = [automatic.with_files(result.fault) for result in left]
        for result, fault, case in zip(left, whole, attempt(whole), strict=True):
            if case.outcome in ("failed", "broken"):
                result.verdict = "killed"
                killers.append(automatic.killing_test(fault, case))
        wrong = failing_unmutated(killers, spec, results, processes, line)
    print(automatic.report(drawn, known))
    equivalent = sum(automatic.counted(result) == "equivalent" for result in drawn)
    return int(bool(wrong) or equivalent > automatic.EQUIVALENT_SHARE * len(drawn))


def print_repeated(most: int) -> None:
    """Print the test functions in which most CPU time goes into cases that execute no line which
    other cases of the function do not: what belongs to the full tier, or says why not.
    """
    found = record.read().repeated()
    for function, (seconds, tests) in list(found.items())[:most]:
        cases = ", ".join(test.partition("[")[2].removesuffix("]") for test in tests)
        print(f"{seconds:6.1f} s of {len(tests)} cases of {function}: {cases[:200]}")


def main() -> int:
    given = arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    for tests in given.record:
        seconds = record.record_tests(
            tests, [f"--ignore={path}" for path in given.ignore]
        ).seconds.values()
        print(f"{tests}: {len(seconds)} tests of {sum(seconds):.0f} CPU s, in {record.FOLDER}")
    if given.record:
        return 0
    if given.repeated:
        print_repeated(given.repeated)
        return 0
    return score_automatic(given) if given.automatic else score_list(given, Console())


if __name__ == "__main__":
    sys.exit(main())
