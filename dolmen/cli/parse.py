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
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dolmen.core.config import NONE, Mark, ValueOptional, Words, from_words, is_optional, plain_type
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
        """True if the option is a bool: it takes no value, and `--no-NAME` switches it off."""
        return plain_type(self.hint) is bool

    @property
    def off(self) -> str:
        """Name of the option that switches this bool option off: layout.no-x for layout.x."""
        section, dot, last = self.name.rpartition(".")
        return f"{section}{dot}no-{last}"

    @property
    def key(self) -> str:
        """The option's name in YAML: with _ for -."""
        return self.name.replace("-", "_")

    @property
    def several(self) -> bool:
        """True if one occurrence of the option takes any number of words (a tuple that is not
        REPEATED).
        """
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
    """Return the options that the fields of a dataclass are on the command line: a group for its
    own fields, then one for each nested dataclass (section). Default values are those of the
    instance `default`, if given, else of the class. `section`: prefix of the names, such as
    "layout.". Fields of type Any or an optional dataclass, such as the model, are no options.
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
    """Return (type, *marks) for Annotated[type, *marks], and (hint,) for any other type hint."""
    return get_args(hint) if hasattr(hint, "__metadata__") else (hint,)


def options(option_groups: Sequence[OptionGroup]) -> dict[str, Option]:
    """Return name -> option for the options of all groups."""
    return {option.name: option for group in option_groups for option in group.options}


def names(known: Collection[Option]) -> list[str]:
    """Return the names (without dashes) of all options that a command line may have: "help", then
    each option that is not positional, a bool followed by the name that switches it off.
    """
    flags = (field for field in known if Mark.POSITIONAL not in field.marks)
    return ["help", *chain.from_iterable([o.name, o.off] if o.switch else [o.name] for o in flags)]


def attribute_docs(cls: type) -> dict[str, str]:
    """Return attribute -> the docstring below it in the source of the class, or else of a base
    class, as one line. Python keeps none of these, so the source is parsed: 2 ms per module.
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
    """Return, for a module that has been imported, the name of each class at its top level -> the
    statements (AST) of the class, from its source.
    """
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def parse(
    argv: Sequence[str], known: Mapping[str, Option], verb: str, rest: bool = False
) -> dict[str, Any]:
    """Parse the words `argv` after a verb: return name in YAML -> value (layout.tp -> 2) of the
    options that occur, converted to their types. `known`: the verb's options by name. With `rest`,
    unknown options are returned too, their values as Words, because only the family of a run's
    model decides which of them exist. Raises BadInput for unknown or missing options, stray words
    and invalid values.
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
            value = _convert_words(option, words)
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
    """Return which of the words `after` an option (up to the next option) are its value: for a bool
    the first if it is True, False, None or null; for a tuple all of them; else the first.
    """
    if option.switch:
        return [word for word in after[:1] if word in ("True", "False", *NONE)]
    return list(after if option.several else after[:1])


def _convert_words(option: Option, words: Sequence[str]) -> Any:
    """Return the value of an option from its words on the command line, converted to its type.
    Without words: True for a bool, and for an option whose value may be left out the value that
    this means. Raises BadInput for words that do not fit the type.
    """
    bare = [mark.value for mark in option.marks if isinstance(mark, ValueOptional)]
    if not words and (option.switch or bare):
        return True if option.switch else bare[0]
    with as_bad_input(ValueError):
        return from_words(option.hint, words, f"--{option.name}")


def _refuse_missing(known: Mapping[str, Option], values: Mapping[str, Any]) -> None:
    """Raise BadInput if required options have no value in `values` (by name in YAML), naming all of
    them with their help texts.
    """
    # all at once, not one per run
    missing = [o for o in known.values() if o.default is MISSING and o.key not in values]
    if missing:
        names = (o.name.upper() if Mark.POSITIONAL in o.marks else f"--{o.name}" for o in missing)
        named = (f"{name} ({o.text.rstrip('.')})" for name, o in zip(names, missing, strict=True))
        raise BadInput(f"missing {', and '.join(named)}")


def _unknown_options_message(unknown: Sequence[str], verb: str, known: Collection[str]) -> str:
    """Return the error message for unknown options of a verb, with advice for each: the nearest of
    the `known` names, or the one that has another trainer's name; else how to list the options.
    """
    # imports the options of all families, which takes 0.1 s
    from dolmen.training.spellings import suggestion

    # also of Megatron's and other trainers' names
    advice = {
        f"--{cut(name)}": suggestion(name, known) or f"dolmen {verb} --help lists them"
        for name in unknown
    }
    return unknown_options(advice)


def _stray_words_message(argv: Sequence[str], places: Sequence[int], verb: str) -> str:
    """Return the error message for words on a command line that belong to no option, naming the
    first; `places`: their indices in `argv`. If that word follows an option, the message says that
    the option does not take it; else it suggests the corrected command, if that is clear and has at
    most 200 characters, or how to list the options.
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
"""Columns of a help text, in a terminal that has them."""
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT"}


def help_width(most: int) -> int:
    """Return the columns at which a help text is wrapped: `most`, or fewer in a narrow terminal."""
    # without a terminal `most`; below 40 columns lines would be single words
    return max(40, min(most, get_terminal_size((most, 24)).columns))


def full_help(verb: str, about: str, groups: Sequence[OptionGroup]) -> str:
    """Return the text of `dolmen VERB --help`: usage, the description `about`, positional
    arguments, and all options with texts and defaults, in groups.
    """
    places = [o for group in groups for o in group.options if Mark.POSITIONAL in o.marks]
    named = " ".join(option.name.upper() for option in places)
    lines = [f"usage: dolmen {verb} [OPTIONS] {named}".rstrip(), ""]
    for paragraph in cleandoc(about).split("\n\n"):
        # an indented command is not wrapped
        example = paragraph.startswith(" ")
        lines += [*([paragraph] if example else wrap(paragraph, help_width(WIDTH))), ""]
    for option in places:
        lines += [f"  {option.name.upper()}", *_describe_option(option)]
    for group in (group for group in groups if group.options):
        title = f"{group.title} options: {group.about}" if group.title else "options:"
        lines += [*([""] if lines[-1] else []), *wrap(title, help_width(WIDTH))]
        if not group.title:
            lines += ["  -h, --help", "      Show this help and exit."]
        for option in group.options:
            if option not in places:
                lines += [*_synopsis(option), *_describe_option(option)]
    return "\n".join(lines)


def _synopsis(option: Option) -> list[str]:
    """Return the lines of a help text with an option's name and the form of its value: --pp INT; a
    bool with the name that switches it off.
    """
    if option.switch:
        return [f"  --{option.name}, --{option.off}"]
    value = _metavar(option.hint)
    # one word at each time
    value = value.strip("[]").replace(" ...", "") if Mark.REPEATED in option.marks else value
    return wrap(
        f"--{option.name} {value}",
        help_width(WIDTH),
        initial_indent="  ",
        subsequent_indent="    ",
        break_on_hyphens=False,
    )


def _metavar(hint: Any) -> str:
    """Return how a value of the type `hint` is written in help texts: INT, FLOAT, TEXT, [TEXT ...]
    for a tuple, {a, b} for a Literal; followed by |None if None is allowed.
    """
    kind, none = plain_type(hint), "|None" if is_optional(hint) else ""
    if get_origin(kind) is tuple:
        return f"[{_metavar(get_args(kind)[0])} ...]{none}"
    if get_origin(kind) is Literal:
        return f"{{{', '.join(map(str, get_args(kind)))}}}{none}"
    return METAVARS[kind] + none


def _describe_option(option: Option) -> list[str]:
    """Return the lines of an option's help text, indented and wrapped, followed by (default: VALUE)
    or (required); nothing for a default of None or ().
    """
    default = "(required)"
    if option.default is not MISSING:
        unset = option.default is None or option.default in ("", ())
        default = "" if unset else f"(default: {_format_words(option.default)})"
    lines = wrap(f"{option.text} {default}", help_width(WIDTH) - 6, break_on_hyphens=False)
    return [f"      {line}" for line in lines]


def _format_words(value: Any) -> str:
    """Return the value as str() writes it; of a tuple or list each element, with spaces between."""
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
