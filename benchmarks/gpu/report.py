"""The GPU section of docs/performance.md, from what gpu.json has.

    python -m benchmarks.gpu report DIR... > section.md
    python -m benchmarks.gpu report DIR... --write      in place of the section that is there

Of several folders (--resume was not used, or cases were run again) the last that has a case is
told. Nothing is left out: what was not ok stands in a table of its own. What is said of each stage
is in sections.py.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.packages import ROOT
from benchmarks.gpu.results import NAME, Results, named
from benchmarks.gpu.schema import STATUS
from benchmarks.gpu.sections import TITLES, TOLD, gib, table
from benchmarks.gpu.stages import STAGES

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"
FACTS = ("device", "facts")  # the case that says what machine it is
Cases = dict[tuple[str, str], dict]


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu report", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    given = parser.parse_args(words)
    try:
        text = section([Results.read(folder / NAME) for folder in given.folders])
        if given.write:
            PAGE.write_text(replaced(PAGE.read_text(), text))
    except (ValueError, OSError) as error:
        print(f"benchmarks.gpu report: {error}", file=sys.stderr)
        return 2
    print(f"written into {PAGE}" if given.write else text)
    return 0


def replaced(page: str, text: str) -> str:
    """The page with `text` between its two marks. Raises ValueError unless each is there once, in
    order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"docs/performance.md must have {BEGIN} and then {END}, once each")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def section(found: list[Results]) -> str:
    """All of it, in Markdown. Raises ValueError where the results are of different things."""
    asked = {(r.content["options"]["device"], r.content["options"]["shape"]) for r in found}
    if len(asked) > 1:
        told = " and ".join(f"{device}, {shape}" for device, shape in sorted(asked))
        raise ValueError(f"the folders are of {told}: tell them apart, one report each")
    cases: Cases = {}
    for results in found:
        for case in results.content["cases"]:
            old = cases.get((case["stage"], case["name"]))
            if old is None or case["status"] not in ("left", "cut"):
                cases[case["stage"], case["name"]] = case
    lacking = {key: why for key, case in cases.items() if (why := incomplete(key, found, case))}
    whole = {key: case for key, case in cases.items() if key not in lacking}
    parts = [head(found, whole)]
    for name, told in TOLD.items():
        own = {key[1]: case for key, case in whole.items() if key[0] == name}
        parts += [f"### {TITLES[name]}\n\n{told(own)}"] if any(map(ran, own.values())) else []
    return "\n\n".join([*parts, outcome(cases, lacking)])


def incomplete(key: tuple[str, str], found: list[Results], case: dict) -> str | None:
    """Why a case cannot be told, as its values are not those that its stage leaves; None where it
    can. (The schema of gpu.json says nothing of values: each stage has its own.)
    """
    stage, name = key
    try:
        if stage in TOLD:
            TOLD[stage]({name: case})
        if key == FACTS:
            head(found, {key: case})
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"its values cannot be read: {type(error).__name__} {error}"
    return None


def ran(case: dict) -> bool:
    return case["status"] in ("ok", "wrong")


def head(found: list[Results], cases: Cases) -> str:
    """What was run, when, on what."""
    content = found[-1].content
    facts = cases.get(FACTS, {}).get("values", {})
    name = facts.get("device", f"no GPU ({content['machine']['system']})")
    versions = {"torch": facts.get("torch")} | content["machine"]["packages"]
    told = ", ".join(f"{package} {version}" for package, version in sorted(versions.items()))
    made = sorted(r.content["made"][:10] for r in found)
    lines = [
        f"`make gpu`, {made[-1]}, commit {content['machine']['commit']}: {name}; {told}, Python "
        f"{content['machine']['python']}.",
    ]
    if content["options"]["shape"] != "full":
        lines.append("**In miniature: these figures say that it runs, and nothing else.**")
    if facts.get("driver"):
        lines.append(
            f"Capability {facts['capability']}, {gib(facts['memory'])}, "
            f"{facts['multiprocessors']} multiprocessors, CUDA {facts['cuda']}, NCCL "
            f"{facts['nccl']}, cuDNN {facts['cudnn']}; nvidia-smi: {facts['driver']}."
        )
    return "\n".join(lines)


def outcome(cases: Cases, lacking: dict[tuple[str, str], str]) -> str:
    """How many cases ended how, and each that was not ok, or is `lacking`, with what is wrong."""
    statuses = [case["status"] for case in cases.values()]
    counts = ", ".join(f"{statuses.count(s)} {s}" for s in STATUS if s in statuses)
    order = {stage.name: i for i, stage in enumerate(STAGES)}
    rows = []
    for (stage, name), case in sorted(cases.items(), key=lambda kv: order.get(kv[0][0], 99)):
        if (stage, name) in lacking:
            rows.append((f"{stage}/{name}", "incomplete", cell(lacking[stage, name])))
        if case["status"] != "ok":
            rows.append((f"{stage}/{name}", case["status"], wrong(case)))
    bad = f"\n\n{table(('case', '', 'what'), rows)}" if rows else ""
    return f"### What failed, and what was not run\n\n{len(statuses)} cases: {counts}.{bad}"


def wrong(case: dict) -> str:
    """What is wrong with a case, in one line."""
    off = [c for c in case["checks"] if not c["ok"]]
    if off:
        told = "; ".join(f"{c['what']} {c['value']}, at most {c['bound']}" for c in off[:3])
        told = f"{len(off)} of {len(case['checks'])} checks: {told}"
    else:
        told = named(case["error"]) or STATUS[case["status"]]
    return cell(told)


def cell(text: str) -> str:
    """One line, fit for a cell."""
    return " ".join(text.split()).replace("|", "/")[:300]
