"""The frame of every page that dolmen writes: an HTML template with the shared style sheet
(style.css), its tables and figures. Pictures are drawn by picture.py.
"""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from dolmen import __version__
from dolmen.files import gate
from dolmen.pages.picture import THEME

STYLE = Path(__file__).with_name("style.css")


def shared_style() -> str:
    """Return the CSS that every page has in its head before rules of its own: the theme's colours
    as variables, and style.css.
    """
    light, dark = (
        "".join(f"--{name}: {colours[i]}; " for name, colours in THEME.items()) for i in (0, 1)
    )
    return (
        f":root {{ color-scheme: light dark; {light}}}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"
        f"{gate.read_text(STYLE, gate.MIB)}"
    )


def fill(frame: Path, page_style: str = "", **parts: str) -> str:
    """Return an HTML page: the text of the template file `frame`, with $NAME replaced by the HTML
    parts[NAME], $style by the shared CSS followed by `page_style`, and $version by that of dolmen.
    Raises KeyError for a $NAME without a part.
    """
    # $names: CSS is full of braces
    template = Template(gate.read_text(frame, gate.MIB))
    return template.substitute(style=shared_style() + page_style, version=__version__, **parts)


def figure(name: str | int, content: str, caption: str) -> str:
    """Return an HTML <figure> with the id figure-`name`, the content and, below it, the caption.
    `content`, `caption`: HTML, not escaped.
    """
    return f'<figure id="figure-{name}">\n{content}\n<figcaption>{caption}</figcaption>\n</figure>'


def table(rows: Iterable[Sequence[str]], heads: Sequence[str] = ()) -> str:
    """Return an HTML <table> of rows of cells, below a row of headings if there are any. `rows`,
    `heads`: text, which is escaped.
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    lines = [head] if head else []
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>\n{body}\n</table>"


def evenly(count: int, most: int) -> list[int]:
    """Return `most` numbers spread evenly over 0 to `count` - 1, both ends included; all of them if
    `count` is no more than `most`.
    """
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
