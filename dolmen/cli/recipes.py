"""dolmen recipes"""

from rich.table import Table

from dolmen.cli.options import RecipesOptions
from dolmen.core.log import console, size
from dolmen.model import count
from dolmen.recipes import RECIPES


def run(_: RecipesOptions) -> int:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("recipe", "parameters", "tokens per step", "what it is"):
        table.add_column(name, justify="right" if name[0] in "pt" else "left")
    for name, recipe in RECIPES.items():
        made = recipe()
        tokens = (
            f"{made.train.global_batch_size * made.sequence_length:,}" if made.model else "as given"
        )
        table.add_row(
            name,
            size(count.parameters(made.model.tree)) if made.model else "of --init",
            tokens,
            " ".join((recipe.__doc__ or "").split()),
        )
    console().print(table, width=80)
    return 0
