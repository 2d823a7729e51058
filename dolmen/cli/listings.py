"""The verbs that list what there is: recipes, families and show (the page of runs)."""

from pathlib import Path

from rich.table import Table

from dolmen.cli.command import FamiliesOptions, RecipesOptions
from dolmen.core.log import console, size
from dolmen.core.messages import BadInput, escape, message
from dolmen.families import checked, families
from dolmen.files.storage import StorageError
from dolmen.model import count
from dolmen.recipes import RECIPES
from dolmen.watching import page
from dolmen.watching.page import ShowConfig, write_page


def run_recipes(_: RecipesOptions) -> int:
    """Run `dolmen recipes`: print a table of the built-in runs with parameters, tokens per step and
    descriptions. Returns 0.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("recipe", "parameters", "tokens per step", "description"):
        table.add_column(name, justify="right" if name[0] in "pt" else "left")
    for name, recipe in RECIPES.items():
        run = recipe()
        tokens = (
            f"{run.train.global_batch_size * run.sequence_length:,}"
            if run.model
            else "set by options"
        )
        table.add_row(
            name,
            size(count.parameters(run.model.spec)) if run.model else "of --init",
            tokens,
            " ".join((recipe.__doc__ or "").split()),
        )
    # the same on every terminal, as docs show it
    console().print(table, width=80)
    return 0


WIDTH = 80
FOOTNOTE = (
    "Each is compared with a reference of the same random weights: hf, the class of\n"
    "transformers, or plain, written from the published equations where there is none.\n"
    "Columns are the largest differences over all cases, of logits in fp32 and of\n"
    "gradients in float64, and the layouts with the gradients of one process. Cases\n"
    "have the stated number of parameters at most. docs/reference/families.md lists every case,\n"
    "and why a layout is refused."
)


def run_families(_: FamiliesOptions) -> int:
    """Run `dolmen families`: print a table of the model families with recorded differences of
    logits and gradients from their references, and checked layouts; nothing is measured now.
    Returns 0.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in (
        "model_type",
        "description",
        "cases",
        "reference",
        "logits",
        "gradients",
        "layouts",
    ):
        table.add_column(name, justify="right" if name in ("cases", "logits") else "left")
    for name in families():
        # stored results: nothing is measured now
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
            # one digit: these are orders of magnitude
            f"{checked.worst(rows, 'logits'):.0e}",
            f"{checked.worst(rows, 'gradients_fp64'):.0e}",
            " ".join(
                part.split()[0] + (f" ({some})" if some else "")
                for part, some in checked.layouts(rows).items()
            ),
        )
    console().print(table, width=WIDTH)
    console().print(FOOTNOTE, width=WIDTH, highlight=False)
    return 0


def run_show(options: ShowConfig) -> int:
    """Run `dolmen show`: write the HTML page of runs to a file and print its path, or with --serve
    serve it until Ctrl-C. Returns 0. Raises BadInput.
    """
    try:
        folders = [page.run_folder(name) for name in options.runs]
        if options.serve:
            page.serve(folders, options)
        else:
            print(f"wrote {escape(write_page(folders, Path(options.out)))}")
    except KeyboardInterrupt:  # the usual way to end a server, and intended
        return 0
    except (ValueError, StorageError) as error:
        raise BadInput(message(error)) from None
    return 0
