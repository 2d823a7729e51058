"""The command line: words to nested options.

    options(RunConfig)      name -> its option, of a dataclass and its sections
    parse(words, options)   name -> value, of those that are given

An option is a field of a dataclass: its name with `-` for `_`, after the names of its sections
(`--layout.virtual-stages 2`, or with `=`). A tuple takes all words up to the next option. A bool
takes none: `--layout.sequence-parallel` and `--layout.no-sequence-parallel`. Ranges are checked by
the dataclass.
"""

import ast
import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import chain, pairwise, takewhile
from typing import Any, get_args, get_origin, get_type_hints

from dolmen.core.config import Mark, ValueOptional, Words, from_words, plain_type
from dolmen.core.messages import BadInput, cut

HELP = {"-h", "--help"}
LONGEST = 200  # characters of a command that a message repeats


@dataclass(frozen=True)
class Option:
    """An option of a verb."""

    name: str
    """Without the dashes before it."""
    hint: Any
    """Its type, without marks."""
    text: str
    """What the help says about it."""
    default: Any = MISSING
    """MISSING where it must be given."""
    marks: tuple[Any, ...] = ()

    @property
    def switch(self) -> bool:
        """Whether it takes no value, and `--no-NAME` switches it off."""
        return plain_type(self.hint) is bool

    @property
    def off(self) -> str:
        """The name that switches it off."""
        section, dot, last = self.name.rpartition(".")
        return f"{section}{dot}no-{last}"

    @property
    def key(self) -> str:
        """Its name in YAML."""
        return self.name.replace("-", "_")

    @property
    def several(self) -> bool:
        """Whether it takes any number of words."""
        return get_origin(plain_type(self.hint)) is tuple and Mark.REPEATED not in self.marks


@dataclass(frozen=True)
class Group:
    """The options of one section."""

    title: str
    about: str
    options: tuple[Option, ...]


def groups(cls: type, default: Any = None, section: str = "") -> list[Group]:
    """The options of a dataclass, and of each of its sections, with the values of `default`. A
    field that is neither text nor number nor a section, such as a model, is no option.
    """
    hints = get_type_hints(cls, include_extras=True)
    texts = attribute_docs(cls)
    own, sections = [], []
    for field in fields(cls):
        hint, *marks = unmarked(hints[field.name])
        value = field.default if default is None else getattr(default, field.name)
        name = f"{section}{field.name.replace('_', '-')}"
        if isinstance(hint, type) and is_dataclass(hint):
            sections += groups(hint, None if value is MISSING else value, f"{name}.")
        elif hint is not Any and not is_dataclass(plain_type(hint)):
            own.append(Option(name, hint, texts.get(field.name, ""), value, tuple(marks)))
    about = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    return [Group(section.rstrip("."), about, tuple(own)), *sections]


def unmarked(hint: Any) -> tuple[Any, ...]:
    """A type, and what is said of it besides."""
    return get_args(hint) if hasattr(hint, "__metadata__") else (hint,)


def options(found: Sequence[Group]) -> dict[str, Option]:
    """Name -> option."""
    return {option.name: option for group in found for option in group.options}


def names(known: Collection[Option]) -> list[str]:
    """All names of options, those that switch one off behind it."""
    named = (one for one in known if Mark.POSITIONAL not in one.marks)
    return ["help", *chain.from_iterable([o.name, o.off] if o.switch else [o.name] for o in named)]


def attribute_docs(cls: type) -> dict[str, str]:
    """Attribute -> the docstring below it in the source of its class, or of one that it is of, as
    one line.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        for one, after in pairwise(class_bodies(base.__module__).get(base.__name__, ())):
            match one, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split())
    return found


@cache
def class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Class -> its statements, of a module that has been imported."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {one.name: one.body for one in tree.body if isinstance(one, ast.ClassDef)}


def parse(
    argv: Sequence[str], known: Mapping[str, Option], verb: str, rest: bool = False
) -> dict[str, Any]:
    """The values that `argv` gives, by the names of options in YAML: `layout.tp`. With `rest`
    unknown options are in it too, as Words: the family of a run's model decides which it has.
    Raises BadInput.
    """
    names_off = {option.off: option for option in known.values() if option.switch}
    places = [option for option in known.values() if Mark.POSITIONAL in option.marks]
    values: dict[str, Any] = {}
    stray: list[int] = []
    i = 0
    while i < len(argv):
        word, after = argv[i], list(takewhile(lambda w: not w.startswith("--"), argv[i + 1 :]))
        i += 1
        name, sign, inline = word.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if not word.startswith("--"):
            if not places:
                stray.append(i - 1)
            elif places[0].several:
                values[places[0].key] = (*values.get(places[0].key, ()), word)
            else:
                values[places.pop(0).key] = word
        elif name in names_off and not sign:
            values[names_off[name].key] = False
        elif (option := known.get(name)) is not None and Mark.POSITIONAL not in option.marks:
            given = [inline] if sign else taken(option, after)
            i += 0 if sign else len(given)
            value = _value(option, given)
            repeated = Mark.REPEATED in option.marks
            values[option.key] = (*values.get(option.key, ()), *value) if repeated else value
        elif rest:
            values[name.replace("-", "_")] = Words([inline] if sign else after)
            i += 0 if sign else len(after)
        else:
            raise BadInput(_unknown(name, verb, names(known.values())))
    if stray:
        raise BadInput(_stray(argv, stray, verb))
    _refuse_missing(known, values)
    return values


def taken(option: Option, after: Sequence[str]) -> list[str]:
    """The words of those `after` an option that are its values."""
    if option.switch:
        return [word for word in after[:1] if word in ("True", "False", "None")]
    return list(after if option.several else after[:1])


def _value(option: Option, words: Sequence[str]) -> Any:
    """The value of an option that is followed by these words. Raises BadInput."""
    bare = [mark.value for mark in option.marks if isinstance(mark, ValueOptional)]
    if not words and (option.switch or bare):
        return True if option.switch else bare[0]
    try:
        return from_words(option.hint, words, f"--{option.name}")
    except ValueError as error:
        raise BadInput(str(error)) from None


def _refuse_missing(known: Mapping[str, Option], values: Mapping[str, Any]) -> None:
    """Raises BadInput with the options that must be given and are not."""
    missing = [o for o in known.values() if o.default is MISSING and o.key not in values]
    if missing:
        named = (
            f"{'a word' if Mark.POSITIONAL in o.marks else f'--{o.name}'} ({o.text.rstrip('.')})"
            for o in missing
        )
        raise BadInput(f"missing {', and '.join(named)}")


def _unknown(name: str, verb: str, known: Collection[str]) -> str:
    """That a verb has no option of this name, and which may be meant."""
    # it knows the options of all families, which take a tenth of a second to import
    from dolmen.training.spellings import suggestion

    near = suggestion(name, known) or f"dolmen {verb} --help lists them"
    return f"unknown option --{cut(name)}: {near}"


def _stray(argv: Sequence[str], places: Sequence[int], verb: str) -> str:
    """That a word belongs to no option, and what may be meant; `places` are those of all such."""
    before = argv[places[0] - 1] if places[0] else ""
    word = cut(argv[places[0]]) or "''"
    if before.startswith("--"):
        return f"{word} is no option: {before} takes no such value (dolmen {verb} --help)"
    # as in `_unknown`
    from dolmen.training.spellings import meant_command

    command = meant_command(verb, argv, [argv[place] for place in places])
    if command and len(command) <= LONGEST:
        return f"{word} is no option: did you mean {command}"
    return f"{word} is no option: dolmen {verb} --help lists them"
