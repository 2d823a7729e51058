"""The frame of every page that dolmen writes: an HTML template with the shared style sheet
(style.css).
"""

from pathlib import Path
from string import Template

from dolmen import __version__
from dolmen.files import gate

STYLE = Path(__file__).with_name("style.css")


def house_style() -> str:
    """Return the CSS for the head of a page; the page's own rules follow it."""
    return gate.read_text(STYLE, gate.MIB)


def fill(frame: Path, own_style: str = "", **parts: str) -> str:
    """Return the page of the template `frame`: its $names replaced by the HTML of `parts`, by the
    style (with `own_style` after the shared one) and by dolmen's version.
    """
    # $names: CSS is full of braces
    template = Template(gate.read_text(frame, gate.MIB))
    return template.substitute(style=house_style() + own_style, version=__version__, **parts)


def figure(name: str | int, content: object, caption: str) -> str:
    """Return a figure as HTML with the id figure-`name`. `content`, `caption`: HTML."""
    return f'<figure id="figure-{name}">\n{content}\n<figcaption>{caption}</figcaption>\n</figure>'
