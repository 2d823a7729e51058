"""The GPU section of docs/performance.md, from what gpu.json has.

    python -m benchmarks.gpu report DIR... > section.md
    python -m benchmarks.gpu report DIR... --write      in place of the section that is there

Of several folders (--resume was not used, or cases were run again) the last that has a case is
told. Nothing is left out: what was not ok stands in a table of its own.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.gpu.packages import ROOT
from benchmarks.gpu.results import NAME, Results, named
from benchmarks.gpu.schema import STATUS
from benchmarks.gpu.stages import STAGES

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"
FACTS = ("device", "facts")  # the case that says what machine it is
NEAREST = 5  # checks that are told of each stage
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


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def gib(count: float | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f} GiB"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def share(x: float | None) -> str:
    return "" if x is None else f"{x:.1%}"


def device(own: dict[str, dict]) -> str:
    rows = []
    for name, case in own.items():
        values = case["values"]
        if "bytes_per_second" in values:
            rows.append(
                (name, f"{values['bytes_per_second'] / 1e12:.2f} TB/s read and written", "")
            )
        if "flops_per_second" in values:
            sheet = values["datasheet"]
            told = "" if sheet is None else f"{sheet / 1e12:.4g}"
            rows.append((name, f"{values['flops_per_second'] / 1e12:.4g} TFLOP/s", told))
    return table(("what", "measured", "datasheet"), rows)


def checked(own: dict[str, dict]) -> str:
    """Of cases that compare: how many checks held, and those nearest to their bounds."""
    checks = [(name, check) for name, case in own.items() for check in case["checks"]]
    held = sum(check["ok"] for _, check in checks)
    near = [(over(check), name, check) for name, check in checks if check["bound"]]
    near = sorted(near, key=lambda row: -row[0])[:NEAREST]
    told = f"{len(own)} cases, {held} of {len(checks)} checks held"
    if not near:
        return f"{told}."
    rows = [
        (name, c["what"], number(c["value"]), number(c["bound"]), c["why"]) for _, name, c in near
    ]
    return f"{told}; nearest to their bounds:\n\n" + table(
        ("case", "what", "found", "at most", "because"), rows
    )


def over(check: dict) -> float:
    """A check's value in units of its bound; what is no number is over all."""
    ratio = float(check["value"]) / float(check["bound"])
    return ratio if ratio == ratio else float("inf")


def number(value: float | str) -> str:
    return f"{float(value):.2g}"


def profile(own: dict[str, dict]) -> str:
    blocks = [(name, case["values"]) for name, case in own.items() if "rows" in case["values"]]
    return "\n\n".join(
        f"{name}, a step of {ms(v['seconds'])} ms:\n\n"
        + table(
            ("kind", "ms", "of the step", "calls"),
            [
                (r["kind"], ms(r["seconds"]), share(r["seconds"] / v["seconds"]), f"{r['calls']:,}")
                for r in v["rows"]
            ],
        )
        for name, v in blocks
    )


def training(own: dict[str, dict]) -> str:
    rows = []
    for name, case in own.items():
        same = [k.removesuffix(" bitwise") for k, v in case["values"].items() if v is True]
        other = [k.removesuffix(" bitwise") for k, v in case["values"].items() if v is False]
        told = [f"bit for bit: {', '.join(same)}"] if same else []
        told += [f"not bit for bit: {', '.join(other)}"] if other else []
        rows.append((name, case["status"], "; ".join(told)))
    return table(("case", "", "run again, and resumed ('part')"), rows)


def steps(case: dict) -> dict[str, dict]:
    """Side -> what is told of its step."""
    values = case["values"]
    return {n: v for n, v in values.items() if isinstance(v, dict) and "tokens_per_second" in v}


def throughput(own: dict[str, dict]) -> str:
    rows = []
    for name, case in own.items():
        for side, told in steps(case).items():
            spread = f"{ms(told['least'])} to {ms(told['most'])}"
            rates = (share(told.get("mfu_datasheet")), share(told["mfu_measured"]))
            first = case["values"].get(f"{side}, first steps", {}).get("seconds")
            begun = "" if first is None else f"{first:.0f}"
            rate = f"{told['tokens_per_second']:,.0f}"
            peak = gib(case["values"].get("peak"))
            rows.append((name, side, ms(told["median"]), spread, rate, *rates, peak, begun))
        if case["values"].get("fits") is False:
            rows.append((name, "", "does not fit", "", "", "", "", "", ""))
    columns = ("case", "side", "median ms", "least to most", "tokens/s", "MFU (datasheet)")
    columns += ("MFU (measured)", "peak memory", "first steps, s")
    return "\n\n".join([table(columns, rows), floors(own), extrapolated(own)]).strip()


def floors(own: dict[str, dict]) -> str:
    found = {name: case["values"] for name, case in own.items() if "parts" in case["values"]}
    if not found:
        return ""
    parts = list(dict.fromkeys(part for v in found.values() for part in v["parts"]))
    rows = [
        (name, *(ms(v["parts"].get(part, 0.0)) for part in parts), ms(v["seconds"]))
        for name, v in found.items()
    ]
    return "The floor by roofline (benchmarks/gpu/roofline.py), ms:\n\n" + table(
        ("case", *parts, "all"), rows
    )


def extrapolated(own: dict[str, dict]) -> str:
    """A whole llama-8b, from the difference that its layers make."""
    found = {}
    for name, case in own.items():
        words = name.split(", ")
        if words[0] == "llama-8b" and words[2:] == ["dolmen", "1 at once"]:
            told = steps(case)
            if "dolmen" in told:
                found[int(words[1].split()[0])] = told["dolmen"]["median"]
    if len(found) < 2:
        return ""
    (few, short), (many, long) = sorted(found.items())
    layer = (long - short) / (many - few)
    whole = long + (32 - many) * layer
    return (
        f"A layer of llama-8b takes {ms(layer)} ms by the difference of {many} and {few} layers; "
        f"all 32 would take {ms(whole)} ms a sequence."
    )


def memory(own: dict[str, dict]) -> str:
    rows = []
    for name, case in own.items():
        values = case["values"]
        if "per_layer" not in values:
            continue
        layer, ratio = values["per_layer"], values["ratios"]
        mib = [f"{layer[k] / 2**20:.1f}" for k in ("between steps", "after backward", "peak")]
        kept = f"{values['activations'] / 2**20:.1f}"
        rows.append((name, *mib, kept, *(f"{ratio[k]:.3f}" for k in ratio)))
    columns = ("case", "states", "gradients", "peak", "activations")
    columns += ("states / form", "activations / form", "gradients / form")
    return "MiB per layer, and over the closed forms:\n\n" + table(columns, rows)


def compiling(own: dict[str, dict]) -> str:
    rows = []
    for name, case in own.items():
        told = steps(case)
        if {"eager", "compiled"} <= told.keys():
            a, b = told["eager"], told["compiled"]
            rows.append(
                (
                    name,
                    ms(a["median"]),
                    ms(b["median"]),
                    f"{a['median'] / b['median']:.2f}x",
                    f"{b['first_step']:.0f}",
                    f"{b['programs']}",
                    f"{len(b['recompilations'])}",
                    f"{sum(b['graph_breaks'].values())}",
                    f"{gib(a['peak'])} / {gib(b['peak'])}",
                )
            )
    columns = ("model", "eager ms", "compiled ms", "faster", "first step, s", "programs")
    return table((*columns, "recompilations", "graph breaks", "peak, eager / compiled"), rows)


def generation(own: dict[str, dict]) -> str:
    rows = []
    for name, case in own.items():
        equal = case["values"].get("equal")
        for side, told in steps(case).items():
            rate = f"{told['tokens_per_second']:,.0f}"
            same = share(equal) if side == "dolmen" else ""
            rows.append((name, side, rate, ms(told["prefill"]["median"]), gib(told["peak"]), same))
    columns = ("case", "side", "tokens/s", "prefill ms", "peak memory", "same tokens")
    return table(columns, rows)


def operators(own: dict[str, dict]) -> str:
    speed = {n: c["values"] for n, c in own.items() if "causal_flops_per_second" in c["values"]}
    rows = [
        (
            name.removeprefix("speed of attention, "),
            ms(v["forward"]),
            ms(v["seconds"]),
            ms(v["sdpa"]),
            f"{v['causal_flops_per_second'] / 1e12:.4g}",
        )
        for name, v in speed.items()
    ]
    columns = ("attention", "forward ms", "forward and backward ms", "SDPA causal ms")
    fast = table((*columns, "causal TFLOP/s"), rows)
    rest = {n: c for n, c in own.items() if n not in speed}
    return f"{checked(rest)}\n\n{fast}"


TITLES = {
    "device": "The machine",
    "throughput": "Throughput",
    "profile": "Where a step's time goes",
    "memory": "Memory",
    "compiling": "With and without torch.compile",
    "generation": "Generation",
    "training": "`dolmen train`, resumed",
    "ops": "Operators beside float64",
    "families": "Families beside the CPU",
    "golden": "Golden rows",
    "nccl": "NCCL with one rank",
    "ranks": "Two ranks on one GPU, over gloo",
}
TOLD: dict[str, Callable[[dict[str, dict]], str]] = {
    "device": device,
    "throughput": throughput,
    "profile": profile,
    "memory": memory,
    "compiling": compiling,
    "generation": generation,
    "training": training,
    "ops": operators,
    "families": checked,
    "golden": checked,
    "nccl": checked,
    "ranks": checked,
}


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
