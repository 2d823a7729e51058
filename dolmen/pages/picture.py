"""Pictures by matplotlib in the style of all pages (style.css): as SVG within a page, whose colours
follow the reader's light or dark theme, or as a file. matplotlib takes 0.3 s to import, so it is
imported where a picture is drawn.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from io import BytesIO
from typing import Any, NamedTuple

THEME = {
    "ink": ("#22303c", "#dde4ea"),
    "faint": ("#5a6670", "#9ba8b3"),
    "line": ("#e3e0d8", "#3a444d"),
    "shade": ("#f6f5f1", "#222a31"),
    "paper": ("#ffffff", "#151b20"),
    "red": ("#b03a2e", "#e8847a"),
    "blue": ("#2f6cab", "#7fb2e5"),
    "orange": ("#c2572f", "#e8946f"),
    "green": ("#4f8a48", "#8cc484"),
    "violet": ("#7d55a5", "#bb9be0"),
    "gold": ("#9a7a1f", "#d9b95c"),
}
"""Colours that differ by theme: name -> (light, dark). Pictures are drawn with the light ones."""
INK, FAINT, LINE, SHADE, PAPER, RED, BLUE, ORANGE, GREEN, VIOLET, GOLD = (
    light for light, _ in THEME.values()
)
INSIDE = "#16202a"
"""Colour of text on a fill, which is the same in both themes."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dolmen",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    # names come from files: a $ in one is a $
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "axes.facecolor": "none",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": False,
    "legend.handlelength": 2.0,
    "legend.handleheight": 1.1,
    # room above the title of the axes
    "legend.borderpad": 0.8,
    "lines.linewidth": 1.6,
    "hatch.color": FAINT,
    "hatch.linewidth": 0.5,
}
WIDTH = 9.2  # inches of a picture that takes the width of a page


class Fill(NamedTuple):
    """How boxes of one kind are drawn. Kinds differ by hatching too, for black and white."""

    title: str
    colour: str
    hatch: str = ""


def draw(paint: Callable[..., None], *values: object, kind: str = "svg") -> bytes:
    """Return the file of a picture in format `kind`, svg or png. `paint(figure, *values)` draws it
    on an empty matplotlib figure and sets its height.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3), dpi=130, layout="constrained")
        paint(figure, *values)
        out = BytesIO()
        # no date, so that equal data give equal files
        empty = dict.fromkeys(("Date", "Creator", "Format", "Type")) if kind == "svg" else None
        figure.savefig(out, format=kind, metadata=empty)
    return out.getvalue()


def inline_svg(title: str, paint: Callable[..., None], *values: object) -> str:
    """Return a picture as SVG within an element of a page, in which it scrolls sideways where the
    screen is narrow. Its colours are those of the page's theme; a gid of a matplotlib artist is the
    tooltip of its marks. `title` is read by screen readers; `paint`: as of `draw`.
    """
    text = draw(paint, *values).decode()
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None, "matplotlib writes a viewBox"
    # what follows the <style> that matplotlib would give to the whole page
    body = text.partition("</defs>")[2]
    # only tooltips have a space; other ids would occur in each picture of a page
    for quote in "\"'":  # matplotlib takes ' around a text with "
        some = f"[^{quote}]*"
        body = re.sub(rf"<g id={quote}({some} {some}){quote}>", r"<g><title>\1</title>", body)
        body = re.sub(rf"<g id={quote}{some}{quote}>", "<g>", body)
    # a tenth of a point is enough, and halves a picture of many boxes
    body = re.sub(r' [dxy]="[^"]*"', lambda at: re.sub(r"(\.[0-9])[0-9]+", r"\1", at[0]), body)
    body = re.sub(r' transform="rotate\(-0 [^"]*"', "", body)
    # the page has the typeface, as a reader's machine may lack ours
    body = body.replace("font-family: 'DejaVu Sans', sans-serif; ", "")
    for name, (light, _) in THEME.items():
        body = body.replace(light, f"var(--{name})")
    head = f'<svg {view[0]} role="img" aria-label="{escape(title)}">'
    return f'<div class="plot">{head}{body}</div>'


def add_legend(figure: Any, fills: Sequence[Fill], columns: int) -> None:
    """Add a legend above all axes of a matplotlib figure: a box for each of `fills`, with its
    title, in so many columns, or fewer where these are wider than the figure.
    """
    from matplotlib.patches import Patch

    edge = {"edgecolor": FAINT, "linewidth": 0.5}
    handles = [Patch(facecolor=f.colour, hatch=f.hatch, label=f.title, **edge) for f in fills]
    for number in range(columns, 0, -1):
        legend = figure.legend(handles=handles, loc="outside upper left", ncols=number)
        if number == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def add_columns(axes: Any, titles: Mapping[str, float], rows: Sequence[Sequence[str]]) -> None:
    """Write columns of text right of matplotlib axes that have a row at each of y = 0, 1, ...,
    downwards. `titles`: title -> right edge of its column, in points from the axes; `rows`: the
    texts of each row.
    """
    edge = axes.get_yaxis_transform()
    for y, row in enumerate([[*titles], *rows], -1):
        style = {"color": FAINT, "style": "italic"} if y < 0 else {}
        for right, text in zip(titles.values(), row, strict=True):
            # 0.75: between the axes' edge, 0.55 above the first row, and their title
            place, at = (1, max(y, -0.75)), (right, 0)
            axes.annotate(text, place, at, edge, "offset points", ha="right", va="center", **style)
