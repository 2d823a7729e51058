"""dolmen families"""

from rich.table import Table

from dolmen.cli.options import FamiliesOptions
from dolmen.core.log import console, size
from dolmen.families import checked, families

WIDTH = 80
TOLD = (
    "Each has the random weights of what it is held beside: hf, the class of\n"
    "transformers, or plain, a reference written from the published equations, where\n"
    "there is none. Largest differences over its cases, each of so many parameters at\n"
    "most: of logits in fp32, of gradients in float64; and layouts with the gradients\n"
    "of one process. docs/reference/families.md has every case, and why a layout is refused."
)


def run(_: FamiliesOptions) -> int:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("model_type", "what it is", "cases", "beside", "logits", "gradients", "layouts"):
        table.add_column(name, justify="right" if name in ("cases", "logits") else "left")
    for name in sorted(families()):
        rows = checked.cases_of(name)
        if not rows:
            table.add_row(name, families()[name].title, "", "", "", "not measured", "")
            continue
        sizes = sorted(row.parameters for row in rows)
        table.add_row(
            name,
            families()[name].title,
            f"{len(rows)} of {size(sizes[-1])}",
            " ".join(sorted({"plain" if row.against == checked.PLAIN else "hf" for row in rows})),
            f"{checked.worst(rows, 'logits'):.0e}",
            f"{checked.worst(rows, 'gradients_fp64'):.0e}",
            " ".join(
                part.split()[0] + (f" ({some})" if some else "")
                for part, some in checked.layouts(rows).items()
            ),
        )
    console().print(table, width=WIDTH)
    console().print(TOLD, width=WIDTH, highlight=False)
    return 0
