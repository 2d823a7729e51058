"""How close each family is to its reference: measures every case of tests/families and writes
dolmen/families/checked.json, of which `dolmen families` prints a table, and the table of
docs/reference/families.md.

    PYTHONPATH=tests:tests/families:tests/golden python -m benchmarks.families [CASE ...]

Named cases alone are measured anew. Some 3 minutes on 2 cores for all.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import measure
import torch
from family_cases import CASES, build
from measure import save
from rich.progress import track
from spawning import run_spawned
from test_over_layouts import LAYOUTS, compared

from dolmen.conversion.source import open_source
from dolmen.families import families
from dolmen.families.checked import FILE, PLAIN, Checked, measured_cases
from dolmen.model import count, head
from dolmen.serving import engine

DOCS = Path(__file__).parents[1] / "docs" / "reference" / "families.md"
BEGIN, END = "<!-- table: benchmarks/families.py -->\n", "<!-- end of table -->\n"


def over_layouts(cases: list[str]) -> list[dict[str, float | str]]:
    """Of each case: layout -> difference of gradients, or the refusal."""
    out = []
    for case in cases:
        found = {str(layout): compared(case, layout) for layout in LAYOUTS}
        out.append({n: x if isinstance(x, str) else x["gradient"][0] for n, x in found.items()})
    return out


@torch.no_grad()
def logits(case: str, folder: Path) -> float:
    theirs = build(case)
    source, ours = measure.read(save(theirs, folder))
    tokens = measure.tokens_of(source)
    expected = theirs(tokens).logits
    return float(
        (engine.run_whole(ours, tokens, head.compute_logits) - expected).abs().max()
        / expected.std()
    )


def of(case: str, layouts: dict[str, float | str]) -> Checked:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        difference = logits(case, folder / "logits")
        single, double = (
            max(measure.gradients(case, dtype, folder / str(dtype)).off.values())
            for dtype in (torch.float32, torch.float64)
        )
        got, expected = measure.texts(case, folder / "texts")
        model = open_source(folder / "logits").model
        return Checked(
            case,
            model.model_type,
            count.parameters(model.spec),
            PLAIN if CASES[case].plain else type(build(case)).__name__,
            difference,
            single,
            double,
            f"{sum(a == b for a, b in zip(got, expected, strict=True))} of {len(got)}"
            if got
            else "none",
            layouts,
        )


def table() -> str:
    """Of docs/reference/families.md."""
    lines = [
        "| family | case | parameters | against | logits | gradients, fp32 | float64 | texts | "
        + " | ".join(map(str, LAYOUTS))
        + " |",
        "|---|---|---|---|---|---|---|---|" + "---|" * len(LAYOUTS),
    ]
    notes: dict[str, str] = {}
    for row in measured_cases():
        cells = [
            f"[{notes.setdefault(x, str(len(notes) + 1))}]" if isinstance(x, str) else f"{x:.0e}"
            for x in row.layouts.values()
        ]
        title = families()[row.model_type].title
        lines.append(
            f"| {title} (`{row.model_type}`) | {row.case} | {row.parameters:,} "
            f"| {row.against} | {row.logits:.0e} | {row.gradients:.0e} | {row.gradients_fp64:.0e} "
            f"| {'none' if row.texts is None else f'{row.texts} of 3'} | {' | '.join(cells)} |"
        )
    refused = [f"[{number}] {why}" for why, number in notes.items()]
    return "\n".join([*lines, "", *refused]).rstrip() + "\n"


def document() -> str:
    """docs/reference/families.md with the table of checked.json."""
    before, rest = DOCS.read_text().split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def main(asked: list[str]) -> None:
    torch.set_num_threads(1)
    known = {row.case: row for row in measured_cases()} if FILE.exists() else {}
    cases = [case for case in CASES if case in asked or not asked]
    layouts = run_spawned(2, over_layouts, cases)
    for case, found in track(list(zip(cases, layouts, strict=True)), "cases"):
        known[case] = of(case, found)
    rows = sorted((known[c] for c in CASES if c in known), key=lambda row: row.model_type)
    FILE.write_text("[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]\n")
    measured_cases.cache_clear()
    DOCS.write_text(document())


if __name__ == "__main__":
    main(sys.argv[1:])
