"""Words to a dataclass of options, by tyro; what it refuses is one line, as ours is: it draws a box
of several, which is read here.
"""

import ast
import inspect
import re
import sys
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass
from functools import cache
from io import StringIO
from itertools import pairwise, zip_longest
from typing import Annotated, Any, TypeGuard, TypeVar, cast, get_args, get_origin, get_type_hints

import tyro

from dolmen.core.messages import BadInput, choices, cut
from dolmen.training.spellings import meant_command, suggestion

T = TypeVar("T")
HELP = {"-h", "--help"}

# What tyro says, on one line -> what we say.
WORDING = {
    r"Error parsing (--\S+): no type matching {None}\|(.+) could be .*? from \[(.*?)\]\..*": (
        r"\1 is \3: it must be \2, or None"
    ),
    r"Error parsing (--\S+): could not convert string to float: (.*)": (
        r"\1 is \2: it must be FLOAT"
    ),
    r"Error parsing (--\S+): invalid literal for int\(\) with base 10: (.*)": (
        r"\1 is \2: it must be INT"
    ),
    r"Error parsing [A-Za-z]\S*: (.*)": r"\1",  # of a section or a verb, which names itself
    r"Missing value for argument '(\S+)'\..*": r"\1 needs a value",
}
LONGEST = 200  # characters of a command that a message repeats
BROKEN = 20  # tyro breaks no shorter value
# of options `explain` says the text: tyro would look for it in the source of each class, at every
# call, for a fifth of a second
OWN_TEXTS = (tyro.conf.HelptextFromCommentsOff,)
CHOICE = r"invalid choice ('.*') for argument '(\S+)' ?\. Expected one of \((.*)\)\."
KINDS = {
    "{[INT [INT ...]]}": "whole numbers",
    "INT": "a whole number",
    "FLOAT": "a number",
}


def parse(cls: type[T], argv: list[str], verb: str, default: T | None = None) -> T:
    """A `cls` from `argv`; what is not said is that of `default`. Exits with 0 after --help. Raises
    BadInput.
    """
    said = StringIO()
    if HELP & set(argv):
        explain(cls)
    try:
        with redirect_stderr(said):
            # with a `default` of None, which is none, a `cls` comes back as well
            read = tyro.cli(
                cls, args=argv, default=default, prog=f"dolmen {verb}", config=OWN_TEXTS
            )
            options = cast(T, read)
    except SystemExit as end:
        if not end.code:
            raise
        text = mended(flat(said.getvalue()), argv)
        if "Unrecognized options:" in text:
            _, _, words = text.partition("Unrecognized options:")
            text = unknown(argv, verb, names(cls), words.strip())
        raise BadInput(worded(text)) from None
    sys.stderr.write(said.getvalue())  # a warning
    return options


def last(argv: list[str], *names: str) -> str | None:
    """The last value of the option of these names, without dashes before them, for what must be
    known before all is parsed; None where it is not said.
    """
    value = None
    for word, after in zip_longest(argv, argv[1:]):
        name, sign, inside = word.partition("=")
        if name.startswith("--") and name[2:].replace("_", "-") in names:
            value = inside if sign else after
    return value


def said(argv: list[str]) -> set[str]:
    """The options of `argv`, as YAML has their names."""
    words = (word.partition("=")[0] for word in argv if word.startswith("--"))
    return {word.removeprefix("--").replace("-", "_") for word in words}


def explain(cls: type) -> None:
    """Give tyro the help of each option, the docstring of its attribute, and of each section, that
    of its class, as one line: it would read each file once per option, keep the line breaks of the
    source, and break the lines once more.
    """
    texts: dict[str, str] = {}  # also of what a class says again with other marks
    for base in reversed(cls.__mro__[:-1]):
        texts |= attribute_docs(base)
        hints = get_type_hints(base, include_extras=True)
        for name, hint in hints.items():
            parts = [part for part in (hint, *get_args(hint)) if is_section(part)]
            for part in parts:
                explain(part)
            text = texts.get(name) or "".join(part.__doc__ or "" for part in parts[:1])
            if text and name in base.__annotations__:
                said = tyro.conf.arg(help=" ".join(text.split()))
                base.__annotations__[name] = Annotated[hint, said]


def is_section(hint: Any) -> TypeGuard[type]:
    return isinstance(hint, type) and is_dataclass(hint)


def attribute_docs(cls: type) -> dict[str, str]:
    """Attribute -> the docstring below it in the source of its class."""
    found = {}
    for one, after in pairwise(classes(cls.__module__).get(cls.__name__, ())):
        match one, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = text
    return found


@cache
def classes(module: str) -> dict[str, list[ast.stmt]]:
    """Class -> its statements, of a module that has been imported."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {one.name: one.body for one in tree.body if isinstance(one, ast.ClassDef)}


def flat(box: str) -> str:
    """The text of a box on one line, without its title and what follows: help of one option, and
    where to find more.
    """
    lines = [line.strip(" │┃|") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    rules = [i for i, line in enumerate(lines) if re.search("[─━-]{10}", line)]
    text = [line for i, line in enumerate(lines) if i not in rules and line]
    # the first line stands in the frame, or, without one, above a rule
    framed = bool(lines) and lines[0][:1] in "╭┌"
    parts = " ".join(text if framed else text[1:])
    return re.split(r" ?(?:Argument helptext|Perhaps you meant|For full helptext)", parts)[0]


def mended(text: str, argv: list[str]) -> str:
    """Values of `argv` in tyro's text, which it breaks where they are longer than its box, whole
    again, and cut to what a line can say.
    """
    for word in argv:
        for value in (word, word.partition("=")[2]):
            if len(value) > BROKEN:
                broken = " ?".join(map(re.escape, value))
                text = re.sub(broken, lambda _, value=value: cut(value), text)
    return text


def worded(text: str) -> str:
    """tyro's sentence in our words; one that is not known stays."""
    if text.startswith("Missing from "):
        asked = re.findall(r"(?:(--\S+) )?STR (.*?)\.? \(required\)", text)
        return "missing " + ", and ".join(f"{name or 'a word'} ({what})" for name, what in asked)
    if found := re.fullmatch(CHOICE, text):
        value, name, known = found.groups()
        taken = [one.strip("' ") for one in known.split(",")]
        if "None" in taken:  # what may be left unsaid tyro has in the order of hashes
            taken = sorted({*taken} - {"None"})
        return f"{name} is {value}: {choices(value[1:-1], taken)}"
    for theirs, ours in WORDING.items():
        if found := re.fullmatch(theirs, text):
            return re.sub(
                "|".join(map(re.escape, KINDS)), lambda m: KINDS[m[0]], found.expand(ours)
            )
    return text


def unknown(argv: list[str], verb: str, known: list[str], words: str) -> str:
    """The first option of `argv` that the verb does not have, and which may be meant; `words` are
    those that nothing took.
    """
    for word in argv:
        name = word.removeprefix("--").partition("=")[0].replace("_", "-")
        if word.startswith("--") and name not in known:
            near = suggestion(name, known) or f"dolmen {verb} --help lists them"
            return f"unknown option --{cut(name)}: {near}"
    stray = words.split(", ")[0]
    given = [cut(word) for word in argv]
    before = argv[given.index(stray) - 1] if stray in given else ""
    stray = stray or "''"
    if before.startswith("--"):
        return f"{stray} is no option: {before} takes no such value (dolmen {verb} --help)"
    if (command := meant_command(verb, argv, stray_words(argv, words))) and len(command) <= LONGEST:
        return f"{stray} is no option: did you mean {command}"
    return f"{stray} is no option: dolmen {verb} --help lists them"


def stray_words(argv: list[str], words: str) -> list[str]:
    """The words of `argv` in `words`, which tyro lists in order, with commas or spaces between."""
    found: list[str] = []
    for word in reversed(argv):
        before = words.removesuffix(word)
        if word and before != words and before[-1:] in ("", " "):
            found, words = [word, *found], before.rstrip(" ").removesuffix(",")
    return found if not words else []


def names(cls: type, prefix: str = "") -> list[str]:
    """The options of a dataclass and its sections, without the dashes before them: `layout.tp`."""
    found, hints = ([] if prefix else ["help"]), get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        hint, marks = hints[field.name], ()
        if get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
        name = f"{prefix}{field.name.replace('_', '-')}"
        if isinstance(hint, type) and is_dataclass(hint):
            found += names(hint, f"{name}.")
        elif tyro.conf.Positional not in marks and get_origin(hint) is not dict:
            found.append(name)
            if hint is bool and tyro.conf.FlagCreatePairsOff not in marks:
                found.append(f"{prefix}no-{field.name.replace('_', '-')}")
    return found
