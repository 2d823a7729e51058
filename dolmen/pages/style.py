"""The style sheet (style.css) that the pages of plans, runs and RL reports share."""

from pathlib import Path

from dolmen.files import gate

FILE = Path(__file__).with_name("style.css")


def house_style() -> str:
    """Return the CSS for the head of a page; the page's own rules follow it."""
    return gate.read_text(FILE, gate.MIB)
