"""The command line: words to nested options, and the help of a verb.

    groups(RunConfig)       options of a dataclass and of its sections
    parse(words, options)   name -> value, of those that are given
    full_help(verb, ...)    all options with their texts and defaults

An option is a field of a dataclass: its name with `-` for `_`, after the names of its sections
(`--layout.virtual-stages 2`, or with `=`). A tuple takes all words up to the next option. A bool
takes none: `--layout.sequence-parallel` and `--layout.no-sequence-parallel`. The text of an option
is the docstring below its field, which is read from the source, as Python does not keep it.

argparse is not used: options of a model's family are only known once `--model.model-type` has been
read, an unknown option is answered with the nearest known one or that of another trainer's
spelling, and one pass over the words is shorter than bending argparse to both. Types and ranges are
checked by the dataclass, not here.
"""

import ast
import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from inspect import cleandoc
from itertools import chain, pairwise, takewhile
from textwrap import wrap
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dolmen.core.config import Mark, ValueOptional, Words, from_words, is_optional, plain_type
from dolmen.core.messages import BadInput, as_bad_input, cut, unknown_options

HELP = {"-h", "--help"}
LONGEST = 200  # characters of a command that a message repeats


@dataclass(frozen=True)
class Option:
    """An option of a verb."""

    name: str
    """Without the dashes before it."""
    hint: Any
    """Its type, without `marks`."""
    text: str
    """Help text."""
    default: Any = MISSING
    """MISSING where it must be given."""
    marks: tuple[Any, ...] = ()
    """Marks of its field, such as POSITIONAL or REPEATED."""

    @property
    def switch(self) -> bool:
        """True for a bool: it takes no value, and `--no-NAME` switches it off."""
        return plain_type(self.hint) is bool

    @property
    def off(self) -> str:
        """Name of the option that switches it off."""
        section, dot, last = self.name.rpartition(".")
        return f"{section}{dot}no-{last}"

    @property
    def key(self) -> str:
        """Its name in YAML."""
        return self.name.replace("-", "_")

    @property
    def several(self) -> bool:
        """True if it takes any number of words."""
        return get_origin(plain_type(self.hint)) is tuple and Mark.REPEATED not in self.marks


@dataclass(frozen=True)
class OptionGroup:
    """The options of one section."""

    title: str
    """Name of the section; "" for options outside of sections."""
    about: str
    """Text above its options."""
    options: tuple[Option, ...]


def groups(cls: type, default: Any = None, section: str = "") -> list[OptionGroup]:
    """Return the options of a dataclass and of its sections, one group each, with the values of
    `default` (an instance) as defaults. A field that is neither text nor number nor section, such
    as the model, is no option.
    """
    hints = get_type_hints(cls, include_extras=True)
    texts = attribute_docs(cls)
    options, sections = [], []
    for field in fields(cls):
        hint, *marks = split_marks(hints[field.name])
        value = field.default if default is None else getattr(default, field.name)
        name = f"{section}{field.name.replace('_', '-')}"
        if isinstance(hint, type) and is_dataclass(hint):
            sections += groups(hint, None if value is MISSING else value, f"{name}.")
        elif hint is not Any and not is_dataclass(plain_type(hint)):
            options.append(Option(name, hint, texts.get(field.name, ""), value, tuple(marks)))
    about = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    return [OptionGroup(section.rstrip("."), about, tuple(options)), *sections]


def split_marks(hint: Any) -> tuple[Any, ...]:
    """Return (type, *marks) of a type hint that may be Annotated."""
    return get_args(hint) if hasattr(hint, "__metadata__") else (hint,)


def options(option_groups: Sequence[OptionGroup]) -> dict[str, Option]:
    """Return the options of all groups by name."""
    return {option.name: option for group in option_groups for option in group.options}


def names(known: Collection[Option]) -> list[str]:
    """Return all option names that a command line may have, each switch followed by the name that
    switches it off.
    """
    flags = (field for field in known if Mark.POSITIONAL not in field.marks)
    return ["help", *chain.from_iterable([o.name, o.off] if o.switch else [o.name] for o in flags)]


def attribute_docs(cls: type) -> dict[str, str]:
    """Return attribute -> its docstring in the source of the class or a base class, as one line.
    Python keeps none of these, so the source is parsed: 2 ms per module.
    """
    docs: dict[str, str] = {}
    # the text of a subclass wins
    for base in reversed(cls.__mro__[:-1]):
        for statement, after in pairwise(class_bodies(base.__module__).get(base.__name__, ())):
            match statement, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = " ".join(text.split())
    return docs


@cache
def class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Return class -> its statements, for a module that has been imported."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def parse(
    argv: Sequence[str], known: Mapping[str, Option], verb: str, rest: bool = False
) -> dict[str, Any]:
    """Parse `argv` and return the given values by the options' names in YAML, such as `layout.tp`.

    `rest`: return unknown options too, as Words, because only the family of a run's model decides
    which of them exist. Raises BadInput for unknown or missing options, stray words and invalid
    values.
    """
    names_off = {option.off: option for option in known.values() if option.switch}
    places = [option for option in known.values() if Mark.POSITIONAL in option.marks]
    values: dict[str, Any] = {}
    stray: list[int] = []
    unknown: list[str] = []
    i = 0
    while i < len(argv):
        # a negative number has one dash, so it is a value
        word, after = argv[i], list(takewhile(lambda w: not w.startswith("--"), argv[i + 1 :]))
        i += 1
        name, sign, inline = word.removeprefix("--").partition("=")
        # --train.global_batch_size works too
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
            words = [inline] if sign else option_words(option, after)
            i += 0 if sign else len(words)
            value = _value(option, words)
            repeated = Mark.REPEATED in option.marks
            # otherwise the last one wins
            values[option.key] = (*values.get(option.key, ()), *value) if repeated else value
        else:
            if rest:
                values[name.replace("-", "_")] = Words([inline] if sign else after)
            else:
                unknown.append(name)
            i += 0 if sign else len(after)
    if unknown:
        raise BadInput(_unknown_options_message(unknown, verb, names(known.values())))
    if stray:
        raise BadInput(_stray_words_message(argv, stray, verb))
    _refuse_missing(known, values)
    return values


def option_words(option: Option, after: Sequence[str]) -> list[str]:
    """Return those of the words `after` an option that are its values: for a switch only a True,
    False or None, for a tuple all of them, else the first.
    """
    if option.switch:
        return [word for word in after[:1] if word in ("True", "False", "None")]
    return list(after if option.several else after[:1])


def _value(option: Option, words: Sequence[str]) -> Any:
    """Convert the words after an option to its value: True for a switch, the default of
    ValueOptional without words. Raises BadInput.
    """
    bare = [mark.value for mark in option.marks if isinstance(mark, ValueOptional)]
    if not words and (option.switch or bare):
        return True if option.switch else bare[0]
    with as_bad_input(ValueError):
        return from_words(option.hint, words, f"--{option.name}")


def _refuse_missing(known: Mapping[str, Option], values: Mapping[str, Any]) -> None:
    """Raise BadInput that names all required options without a value."""
    # all at once, not one per run
    missing = [o for o in known.values() if o.default is MISSING and o.key not in values]
    if missing:
        names = (o.name.upper() if Mark.POSITIONAL in o.marks else f"--{o.name}" for o in missing)
        named = (f"{name} ({o.text.rstrip('.')})" for name, o in zip(names, missing, strict=True))
        raise BadInput(f"missing {', and '.join(named)}")


def _unknown_options_message(unknown: Sequence[str], verb: str, known: Collection[str]) -> str:
    """Return the message for unknown options, each with the nearest known one."""
    # imports the options of all families, which takes 0.1 s
    from dolmen.training.spellings import suggestion

    # also of Megatron's and other trainers' names
    advice = {
        f"--{cut(name)}": suggestion(name, known) or f"dolmen {verb} --help lists them"
        for name in unknown
    }
    return unknown_options(advice)


def _stray_words_message(argv: Sequence[str], places: Sequence[int], verb: str) -> str:
    """Return the error message for words that belong to no option; it names the first of them.
    `places`: their indices in `argv`. After an option: that the option does not take the value;
    else the corrected command, if it is clear and short enough, or how to list the options.
    """
    before = argv[places[0] - 1] if places[0] else ""
    word = cut(argv[places[0]]) or "''"
    # the option before it has taken all the words that it takes
    if before.startswith("--"):
        return f"{word} is not an option: {before} does not take this value (dolmen {verb} --help)"
    # as in `_unknown_options_message`
    from dolmen.training.spellings import meant_command

    command = meant_command(verb, argv, [argv[place] for place in places])
    if command and len(command) <= LONGEST:
        return f"{word} is not an option: did you mean {command}"
    return f"{word} is not an option: dolmen {verb} --help lists them"


WIDTH = 88
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT"}


def full_help(verb: str, about: str, groups: Sequence[OptionGroup]) -> str:
    """Return the help of a verb: usage, `about`, and all options with texts and defaults, in
    groups.
    """
    places = [o for group in groups for o in group.options if Mark.POSITIONAL in o.marks]
    named = " ".join(option.name.upper() for option in places)
    lines = [f"usage: dolmen {verb} [OPTIONS] {named}".rstrip(), ""]
    for paragraph in cleandoc(about).split("\n\n"):
        # an indented command is not wrapped
        example = paragraph.startswith(" ")
        lines += [*([paragraph] if example else wrap(paragraph, WIDTH)), ""]
    for option in places:
        lines += [f"  {option.name.upper()}", *_describe_option(option)]
    for group in (group for group in groups if group.options):
        title = f"{group.title} options: {group.about}" if group.title else "options:"
        lines += [*([""] if lines[-1] else []), *wrap(title, WIDTH)]
        if not group.title:
            lines += ["  -h, --help", "      Show this help and exit."]
        for option in group.options:
            if option not in places:
                lines += [*_synopsis(option), *_describe_option(option)]
    return "\n".join(lines)


def _synopsis(option: Option) -> list[str]:
    """Return the lines with an option's name and its value's form."""
    if option.switch:
        return [f"  --{option.name}, --{option.off}"]
    form = f"--{option.name} {_metavar(option.hint)}"
    return wrap(form, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _metavar(hint: Any) -> str:
    """Return how a value of a type is written in help texts, such as INT, [TEXT ...] or {a, b}."""
    kind, none = plain_type(hint), "|None" if is_optional(hint) else ""
    if get_origin(kind) is tuple:
        return f"[{_metavar(get_args(kind)[0])} ...]{none}"
    if get_origin(kind) is Literal:
        return f"{{{', '.join(map(str, get_args(kind)))}}}{none}"
    return METAVARS[kind] + none


def _describe_option(option: Option) -> list[str]:
    """Return the lines of an option's text and default, indented; unset options show no default."""
    default = "(required)"
    if option.default is not MISSING:
        unset = option.default is None or option.default == ()
        default = "" if unset else f"(default: {_format_words(option.default)})"
    lines = wrap(f"{option.text} {default}", WIDTH - 6, break_on_hyphens=False)
    return [f"      {line}" for line in lines]


def _format_words(value: Any) -> str:
    """Format a value as it is typed: a tuple as several words."""
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
