"""The help of a verb: its options, in groups."""

from collections.abc import Sequence
from dataclasses import MISSING
from inspect import cleandoc
from textwrap import wrap
from typing import Any, Literal, get_args, get_origin

from dolmen.cli.parse import Group, Option
from dolmen.core.config import Mark, is_optional, plain_type

WIDTH = 88
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT"}


def full(verb: str, about: str, groups: Sequence[Group]) -> str:
    """The help of a verb: all options, in groups."""
    places = [o for group in groups for o in group.options if Mark.POSITIONAL in o.marks]
    named = " ".join(option.name.upper() for option in places)
    lines = [f"usage: dolmen {verb} [OPTIONS] {named}".rstrip(), ""]
    for paragraph in cleandoc(about).split("\n\n"):
        example = paragraph.startswith(" ")
        lines += [*([paragraph] if example else wrap(paragraph, WIDTH)), ""]
    for option in places:
        lines += [f"  {option.name.upper()}", *_indented(option)]
    for group in (group for group in groups if group.options):
        title = f"{group.title} options: {group.about}" if group.title else "options:"
        lines += ["", *wrap(title, WIDTH)]
        if not group.title:
            lines += ["  -h, --help", "      Show this help and exit."]
        for option in group.options:
            if option not in places:
                lines += [*_synopsis(option), *_indented(option)]
    return "\n".join(lines)


def _synopsis(option: Option) -> list[str]:
    """The lines of an option with its values."""
    if option.switch:
        return [f"  --{option.name}, --{option.off}"]
    form = f"--{option.name} {_metavar(option.hint)}"
    return wrap(form, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _metavar(hint: Any) -> str:
    """How a value of a type is written."""
    kind, none = plain_type(hint), "|None" if is_optional(hint) else ""
    if get_origin(kind) is tuple:
        return f"[{_metavar(get_args(kind)[0])} ...]{none}"
    if get_origin(kind) is Literal:
        return f"{{{', '.join(map(str, get_args(kind)))}}}{none}"
    return METAVARS[kind] + none


def _indented(option: Option) -> list[str]:
    """The lines of an option's text and default."""
    default = "(required)"
    if option.default is not MISSING:
        default = f"(default: {_words(option.default)})"
    lines = wrap(f"{option.text} {default}", WIDTH - 6, break_on_hyphens=False)
    return [f"      {line}" for line in lines]


def _words(value: Any) -> str:
    """A value as it is typed."""
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
