"""Draws faults made by rule (rules.py) and reports the score: `benchmarks.mutants --automatic`.

A draw takes one of the functions, all alike, then one of the rules that apply to it, then one of
its places. Functions are those of the packages whose tests were recorded (record.py): tests/ops
records dolmen/ops, and tests/cli the packages without a folder of tests too. Nobody chooses a
fault; a seed gives the same faults for the same source.
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from benchmarks.mutation import record, rules
from benchmarks.mutation.cases import Case
from benchmarks.mutation.faults import ROOT, Fault
from benchmarks.mutation.record import Record
from benchmarks.mutation.rules import Candidate

EQUIVALENT = Path(__file__).parent / "equivalent" / "equivalent.yaml"
EQUIVALENT_SHARE = 0.1  # of the faults drawn, at most


@dataclass
class Result:
    """One fault that was drawn, and what became of it."""

    candidate: Candidate
    fault: Fault
    seed: int
    verdict: str = "unreached"
    """killed; survived; late; unreached: no recorded test executes its line."""

    @property
    def package(self) -> str:
        return self.candidate.file.split("/")[1].removesuffix(".py")


def candidates_by_function(known: Record, root: Path = ROOT) -> dict[str, list[Candidate]]:
    """`file::function` -> its faults, over the packages whose tests were recorded. Raises
    ValueError where a file has changed since.
    """
    found: dict[str, list[Candidate]] = defaultdict(list)
    for package in recorded_packages(known, root):
        for path in sorted((root / "dolmen" / package).rglob("*.py")):
            file = path.relative_to(root).as_posix()
            if known.digests.get(file, record.digest(path)) != record.digest(path):
                raise ValueError(f"{file} has changed since tests were recorded: --record again")
            for candidate in rules.candidates(file, path.read_text("utf-8")):
                found[f"{file}::{candidate.function}"].append(candidate)
    return found


def recorded_packages(known: Record, root: Path = ROOT) -> list[str]:
    """Packages whose tests were recorded; with tests/cli, those that whole commands test alone."""
    recorded = {folder.split("/")[1] for folder in known.folders}
    if "cli" in recorded:
        packages = {path.parent.name for path in (root / "dolmen").glob("*/__init__.py")}
        recorded |= {name for name in packages if not (root / "tests" / name).is_dir()}
    return sorted(recorded)


def draw(functions: dict[str, list[Candidate]], count: int, seed: int) -> list[Candidate]:
    """`count` different faults. Raises ValueError where the functions have fewer."""
    if count > (most := sum(map(len, functions.values()))):
        raise ValueError(f"--automatic {count}: these packages have {most} possible faults")
    generator, names = random.Random(seed), sorted(functions)
    drawn: dict[Candidate, None] = {}
    while len(drawn) < count:
        found = functions[generator.choice(names)]
        rule = generator.choice(sorted({candidate.rule for candidate in found}))
        drawn[generator.choice([c for c in found if c.rule == rule])] = None
    return list(drawn)


def equivalents(path: Path = EQUIVALENT) -> dict[tuple[str, str, str, str], str]:
    """`Candidate.identity` -> why no test can see the fault, as judged by a person."""
    return {
        (file, row["function"], row["before"], row["after"]): row["why"]
        for file, rows in (yaml.safe_load(path.read_text()) or {}).items()
        for row in rows
    }


def fault_of(candidate: Candidate, known: Record, most: int, equivalent: str | None) -> Fault:
    """The fault as the runner takes it, with at most `most` tests that execute its line."""
    text = (ROOT / candidate.file).read_text("utf-8")
    return Fault(
        candidate.file,
        text[candidate.start : candidate.end],
        candidate.new,
        f"{candidate.why}  ->  {candidate.after}",
        known.tests(candidate.file, candidate.lines, most),
        equivalent,
        (candidate.start, candidate.end),
    )


def with_files(fault: Fault, most: int = 2) -> Fault:
    """The fault with the whole files of its tests, those with the most tests first: a value that a
    test has cached is another test's too, though coverage has seen it computed by the first.
    """
    files = [test.split("::")[0] for test in fault.tests]
    often = sorted(dict.fromkeys(files), key=lambda file: -files.count(file))
    return replace(fault, tests=tuple(often[:most]))


def killing_test(fault: Fault, case: Case) -> Fault:
    """The fault with the one test that failed, which must pass without the fault; with the first of
    its tests where none could run.
    """
    ours = (test for test in fault.tests if case.told.startswith(f"{test}: "))
    node = re.match(r"\S+?::\w+(\[[^\]]*\])?(?=: )", case.told)
    failed = node[0] if node and node[0].startswith(fault.tests) else fault.tests[0]
    return replace(fault, tests=(next(ours, failed),))


def table(title: str, results: Sequence[Result], key: Callable[[Result], str]) -> str:
    """A Markdown table with a row for each value of `key`, and the sum."""
    head = ("drawn", "killed", "survived", "late", "unreached", "equivalent", "score")
    lines = [f"| {title} | " + " | ".join(head) + " |", "|---|" + "--:|" * len(head)]
    groups = {name: [r for r in results if key(r) == name] for name in sorted(map(key, results))}
    for name, group in [*groups.items(), ("all", list(results))]:
        counts = [sum(counted(r) == word for r in group) for word in head[1:-1]]
        cells = [len(group), *counts, f"{score(group):.0f} %"]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def counted(result: Result) -> str:
    """The verdict; of an equivalent fault that was not killed, that."""
    if result.fault.equivalent is not None and result.verdict != "killed":
        return "equivalent"
    return result.verdict


def score(results: Iterable[Result]) -> float:
    """Percent killed of those that are not equivalent."""
    verdicts = [verdict for verdict in map(counted, results) if verdict != "equivalent"]
    return 100 * verdicts.count("killed") / max(1, len(verdicts))


def report(results: Sequence[Result], known: Record) -> str:
    """Markdown: scores by seed, package and rule, then whatever was not killed."""
    parts = [
        f"Recorded: {' '.join(known.folders)}, {len(known.seconds)} tests.",
        table("seed", results, lambda result: str(result.seed)),
        table("package", results, lambda result: result.package),
        table("rule", results, lambda result: result.candidate.rule),
    ]
    left = [r for r in results if r.verdict != "killed"]
    for result in sorted(left, key=lambda r: (counted(r), r.candidate.file, r.candidate.line)):
        candidate, why = result.candidate, result.fault.equivalent
        reason = f" ({why})" if why else ""
        parts.append(
            f"- {counted(result)}: {candidate.file}:{candidate.line} {candidate.function} "
            f"[{candidate.rule}]{reason}\n  `{candidate.before}`\n  `{candidate.after}`"
        )
    reached = [r for r in results if r.verdict != "unreached"]
    parts.append(
        f"mutation score: {score(results):.1f} % of {len(results)} drawn; "
        f"{score(reached):.1f} % of the {len(reached)} whose line a recorded test executes"
    )
    return "\n\n".join(parts)


def results_of(known: Record, count: int, seeds: Sequence[int], most: int) -> list[Result]:
    """What each seed draws, not run yet. A fault that two seeds draw is there once."""
    functions, reasons = candidates_by_function(known), equivalents()
    out: dict[Candidate, Result] = {}
    for seed in seeds:
        for candidate in draw(functions, count, seed):
            fault = fault_of(candidate, known, most, reasons.get(candidate.identity))
            out.setdefault(candidate, Result(candidate, fault, seed))
    return list(out.values())


def stale_equivalents(root: Path = ROOT) -> list[str]:
    """Entries of the list of equivalents that no rule makes any more."""
    known = equivalents()
    possible = {
        candidate.identity
        for file in {identity[0] for identity in known}
        if (root / file).exists()
        for candidate in rules.candidates(file, (root / file).read_text("utf-8"))
    }
    return [" ".join(identity) for identity in known if identity not in possible]
