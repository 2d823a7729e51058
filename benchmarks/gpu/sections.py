"""What the report says of each stage, in Markdown: TOLD, functions of the stage's cases by name."""

from collections.abc import Callable, Iterable, Sequence

NEAREST = 5  # checks that are told of each stage


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
    speed = {n: c["values"] for n, c in own.items() if "backends" in c["values"]}
    rows = []
    for name, values in speed.items():
        case = name.removeprefix("speed of attention, ")
        for backend, told in values["backends"].items():
            rows.append(
                (
                    case,
                    f"{backend}, by rule" if backend == values["rule"] else backend,
                    ms(told["forward"]),
                    ms(told["seconds"]),
                    f"{told['causal_flops_per_second'] / 1e12:.4g}",
                    "yes" if told["repeats"] else "no",
                    number(told["apart"]),
                    share(told["same_bits"]),
                )
            )
        rows.append((case, "SDPA, causal", "", ms(values["sdpa"]), "", "", "", ""))
    columns = ("attention", "backend", "forward ms", "forward and backward ms", "causal TFLOP/s")
    columns += ("same bits again", "output apart from the first's", "equal numbers")
    rest = {n: c for n, c in own.items() if n not in speed}
    return f"{checked(rest)}\n\n{table(columns, rows)}"


TITLES = {
    "device": "The machine",
    "throughput": "Throughput",
    "profile": "Where a step's time goes",
    "memory": "Memory",
    "compiling": "With and without torch.compile",
    "generation": "Generation",
    "training": "`dolmen train`, resumed",
    "ops": "Operators compared with float64",
    "fp8": "Products of eight bits",
    "families": "Families compared with the CPU",
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
    "fp8": checked,
    "families": checked,
    "golden": checked,
    "nccl": checked,
    "ranks": checked,
}
