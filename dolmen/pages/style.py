"""The style of every page of ours (style.css): what a plan's and a run's have in common."""

from pathlib import Path

from dolmen.files import gate

FILE = Path(__file__).with_name("style.css")


def house_style() -> str:
    """For the head of a page; its own rules come after."""
    return gate.read_text(FILE, gate.MIB)
