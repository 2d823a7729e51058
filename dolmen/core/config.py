"""Configuration classes: an option is a field with a type, a range and a docstring, which the
command line, YAML, Python keywords and help all read.

    @config("layout")                   its options are called layout.tp, ...
    class Layout:
        tp: Positive = 1                a type with a range
        dp: Positive | None = None
        \"\"\"The help of the option.\"\"\"

        def __post_init__(self): ...    rules over several fields

The classes are frozen dataclasses of pydantic, and strict: construction from Python, `replace` and
`from_dict` check each value, and raise ValueError with the option, its value and the bound. Only
text that is a number counts as one for a float (YAML reads 1e-3 as text), and one value as a tuple
of one.
"""

import dataclasses
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cache
from inspect import get_annotations
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
)

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic_core import ArgsKwargs, ErrorDetails, PydanticCustomError, core_schema

from dolmen.core.filesystem import is_url
from dolmen.core.messages import brief, choices, cut, did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

LARGEST = 2**63 - 1
MOST = 2**53  # of any count: as large as a float64 counts exactly
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, lt=2**16)]
Seed = Annotated[int, Field(ge=0, le=LARGEST)]
NonNegative = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
"""A float in [0, 1)."""
Name = Annotated[str, Field(pattern=r"\S")]
"""Text that is not empty: as the value of a variable of a shell that was never set, it would be
taken for the option's default, or for the current folder.
"""
STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


def require(holds: Callable[[Any], Any], expected: str) -> AfterValidator:
    """Return a rule of one option, for `Annotated`: a value for which `holds` returns something
    false raises ValueError, which says that it must be `expected`.
    """

    def check(value: Any) -> Any:
        """Return the value, or raise pydantic's error of kind `required`."""
        if not holds(value):
            raise PydanticCustomError("required", "{expected}", {"expected": expected})
        return value

    return AfterValidator(check)


LocalName = Annotated[
    Name, require(lambda name: not is_url(name), "a path of this machine, not a URL")
]
"""Path of a file or folder to write; a URL would be the name of a folder such as `s3:`."""


class CustomValue(ABC):
    """A dataclass with a representation of its own in files, instead of a mapping of its fields."""

    @abstractmethod
    def plain(self) -> Any:
        """Return the value as YAML and JSON can hold it: the form that `from_plain` reads."""

    @classmethod
    @abstractmethod
    def from_plain(cls, value: Any) -> Self:
        """Construct an instance from what `plain` returns. Raises ValueError for anything else."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        """Return pydantic's schema of this type, which validates fields by `_validate` alone."""
        return core_schema.no_info_plain_validator_function(cls._validate)

    @classmethod
    def _validate(cls, value: Any) -> Self:
        """Return an instance as it is, anything else through `from_plain`, whose ValueError is
        raised as pydantic's error of kind `plain` (`describe_error` makes the message of it).
        """
        try:
            return value if isinstance(value, cls) else cls.from_plain(value)
        except ValueError as error:
            raise PydanticCustomError("plain", "{text}", {"text": str(error)}) from None


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def config(section: str = "", *, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a class a frozen dataclass whose fields are checked against
    their types and ranges at construction; a wrong one raises ValueError that names the option.
    `section`: prefix of its options in error messages (`layout` -> layout.tp). `kw_only`: fields
    are given by keyword only.
    """

    def decorate(cls: type[T]) -> type[T]:
        """Return the class as a strict frozen dataclass of pydantic, with `SECTION` and an
        `__init__` whose ValueError names the option.
        """
        annotations = get_annotations(cls)
        # the shared rules are added here, so that a class states only its own bounds
        cls.__annotations__ = {name: strict_type(hint) for name, hint in annotations.items()}
        unchecked: Any = cls
        # pydantic's strict mode would refuse a dict for a nested section
        unchecked.__get_pydantic_core_schema__ = classmethod(_from_mapping)
        checked: Any = checked_dataclass(frozen=True, kw_only=kw_only, config=STRICT)(unchecked)
        checked.SECTION = section
        checked.__init__ = _construct
        return checked

    return decorate


def _from_mapping(cls: type, source: Any, handler: Any) -> Any:
    """Return pydantic's schema of a configuration class, relaxed to take a mapping of its fields as
    well as an instance.
    """
    return {**handler(source), "strict": False}


def _construct(_config_self: Any, *args: Any, **kwargs: Any) -> None:
    """Validate the arguments and set the fields: `__init__` of a configuration class. Raises
    ValueError, with the option, its value and what it must be, for the first that is wrong.
    """
    cls = type(_config_self)
    try:
        arguments = ArgsKwargs(args, kwargs)
        cls.__pydantic_validator__.validate_python(arguments, self_instance=_config_self)
    except ValidationError as error:
        # the first error alone: later ones often follow from it
        first = error.errors()[0]
        path, names = first["loc"], cls.__match_args__
        # an argument without a keyword
        if path and isinstance(path[0], int) and path[0] < len(names):
            first["loc"] = (names[path[0]], *path[1:])
        raise ValueError(describe_error(first, cls, cls.SECTION)) from None


def strict_type(hint: Any) -> Any:
    """Return a type hint with the rules that all options of it share, applied inside unions and
    tuples too: floats are finite, and may be text that is a number; integers lie within +-2^53;
    text is what UTF-8 can write; a bool is no literal's 0 or 1; a tuple may be a list or a single
    value.
    """
    kind, inside = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return Annotated[(strict_type(inside[0]), *inside[1:])]
    if kind in (typing.Union, types.UnionType):
        return typing.Union[tuple(strict_type(member) for member in inside)]  # noqa: UP007
    if kind is tuple:
        return Annotated[(tuple[(strict_type(inside[0]), ...)], BeforeValidator(_as_tuple))]
    if kind is Literal:
        return Annotated[hint, BeforeValidator(_refuse_bool)]
    # a field without a range would let NaN and infinity through
    if hint is float:
        return Annotated[float, BeforeValidator(_as_number), Field(allow_inf_nan=False)]
    if hint is str:
        return Annotated[str, AfterValidator(_refuse_surrogates)]
    # above 2^53 a count would round where it meets a float
    if hint is int:
        return Annotated[int, Field(ge=-MOST, le=MOST)]
    return hint


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a list or tuple as a tuple, and any other value as a tuple of one."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _as_number(value: Any) -> Any:
    """Return text that is a number as a float (YAML reads 1e-3 as text), any other
    value unchanged.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


def _refuse_surrogates(value: str) -> str:
    """Return the text; raise pydantic's error where UTF-8 cannot write it (lone surrogates)."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("string_unicode", "no UTF-8") from None
    return value


def _refuse_bool(value: Any) -> Any:
    """Return the value; raise pydantic's error for a bool, as True == 1 would match a literal 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("literal_bool", "")
    return value


EXPECTED = {
    "greater_than": "over {gt:,}",
    "greater_than_equal": "at least {ge:,}",
    "less_than": "less than {lt:,}",
    "less_than_equal": "at most {le:,}",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "finite",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_long": "text of at most {max_length:,} characters",
    "string_unicode": "text that UTF-8 can encode",
    "literal_error": "{expected}",
    "required": "{expected}",
    "too_short": "at least {min_length:,}",
    "too_long": "at most {max_length:,}",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
}


def expectation(error: ErrorDetails) -> str:
    """Return the words behind "it must be" in the message of a pydantic error, such as "at least
    1"; of a kind of error that EXPECTED lacks, pydantic's own message.
    """
    words, bounds = EXPECTED.get(error["type"]), error.get("ctx", {})
    if error["type"] == "float_type" and type(error["input"]) is int:
        words = "less than 2^63, or have a decimal point"  # larger integers are not converted
    # 0, not 0.0
    full = {n: int(bound) for n, bound in bounds.items() if bound in (0.0, 1.0)}
    return error["msg"] if words is None else words.format(**{**bounds, **full})


def describe_error(error: ErrorDetails, cls: type, section: str) -> str:
    """Return the message of a pydantic error: the option with its section, its value, and what it
    must be; of a rule over several fields the rule's own message. `cls` is the configuration class,
    `section` its prefix.
    """
    kind, context = error["type"], error.get("ctx", {})
    # integers in `loc` are positions in a tuple: the option is the same
    path = [str(part) for part in error["loc"] if not isinstance(part, int)]
    option = cut(".".join([*([section] if section else []), *path]).replace("_", "-"))
    value = error["input"]
    if kind == "value_error":  # of a rule over several fields
        return str(context["error"])
    if kind == "plain":
        return f"{option}: {context['text']}"
    if kind == "unexpected_keyword_argument":
        return _unknown(option, path[-1], [*field_types(_type_at(cls, path[:-1]))])
    # a scalar or a list where a section is expected
    if kind.startswith("dataclass"):
        return f"{option or 'the configuration'} must be a mapping of options, not {brief(value)}"
    option = option if "." in option else f"--{option}"
    if kind == "missing":
        return f"missing {option}"
    if kind == "string_pattern_mismatch":
        of_section = field_types(_type_at(cls, path[:-1]))[path[-1]]
        none = " or None" if is_optional(of_section) else ""
        return f"{option} is empty: give a name{none}, or leave the option out"
    if kind.startswith("literal"):
        return f"{option} is {brief(value)}: {choices(str(value), get_args(_type_at(cls, path)))}"
    if kind == "string_unicode":
        return f"{option} is {cut(ascii(value))}: UTF-8 cannot write it"
    return f"{option} is {brief(value)}: it must be {expectation(error)}"


def _type_at(cls: type, path: Sequence[str]) -> Any:
    """Return the type of the option at a path of field names below `cls`; of a tuple, its elements'
    type.
    """
    hint: Any = cls
    for name in path:
        hint = plain_type(field_types(hint)[name])
    return plain_type(get_args(hint)[0]) if get_origin(hint) is tuple else hint


def _unknown(option: str, name: str, known: Sequence[str]) -> str:
    """Return the message for an unknown option `name`, called `option` in it: the nearest of the
    known names, or all of them where none is near.
    """
    hint = did_you_mean(name, known, f"known are {', '.join(known)}", most=1)
    return f"unknown option {option}: {hint}"


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the type hint of each field of a class by name, `Annotated` included; cached."""
    return typing.get_type_hints(cls, include_extras=True)


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as nested dicts, as YAML and JSON hold it: tuples become lists, a
    CustomValue its `plain()`; other values stay as they are.
    """
    return _plain_value(config)


def _plain_value(value: Any) -> Any:
    """Return a value of a configuration as YAML and JSON hold it, recursively: dataclasses as
    dicts, tuples as lists, a CustomValue as its `plain()`, anything else as it is.
    """
    if isinstance(value, CustomValue):
        return value.plain()
    if dataclasses.is_dataclass(value):
        return {f.name: _plain_value(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: _plain_value(v) for k, v in value.items()}
    return [_plain_value(v) for v in value] if isinstance(value, (tuple, list)) else value


def from_dict(cls: type[T], values: Any, default: T | None = None, path: str = "") -> T:
    """Construct a `cls` from a mapping, whose keys may have dashes; keys left out keep the value of
    `default` (or the class's own). `path`: the section's name, which messages begin with. Raises
    ValueError with the path of the key: unknown (with the nearest name), of the wrong type or out
    of its range.
    """
    # unknown keys are found here, wrong values by pydantic
    merged = _merge(cls, values, default, path)
    try:
        return cls.__pydantic_validator__.validate_python(merged)  # type: ignore[attr-defined]
    except ValidationError as error:
        raise ValueError(describe_error(error.errors()[0], cls, path)) from None


def _merge(cls: type, values: Any, default: Any, path: str) -> dict[str, Any]:
    """Return the fields of `default` (none if None) overridden by `values`, sections merged
    recursively; keys become Python names, their values are not checked. Raises ValueError for an
    unknown key, or `values` that are no mapping.
    """
    if not isinstance(values, dict):
        raise ValueError(
            f"{path or 'the configuration'} must be a mapping of options, not {brief(values)}"
        )
    known = field_types(cls)
    merged = {} if default is None else {name: getattr(default, name) for name in known}
    for key, value in values.items():
        name, where = str(key).replace("-", "_"), cut(f"{path}.{key}" if path else str(key))
        if name not in known:
            raise ValueError(_unknown(where, name, [*known]))
        # a section that is given as a mapping changes only the keys it names
        section = plain_type(known[name])
        unflatten = is_config(section) and isinstance(value, dict)
        merged[name] = _merge(section, value, merged.get(name), where) if unflatten else value
    return merged


def is_config(hint: Any) -> bool:
    """Return True for a class made by `config`, False for any other class, hint or instance."""
    return isinstance(hint, type) and hasattr(hint, "__pydantic_validator__")


def option_types(cls: type, section: str = "") -> dict[str, Any]:
    """Return the type hint of each option by its full name (`layout.tp`), those of nested sections
    included; a section that may be None is one option. `section`: prefix of the names.
    """
    types: dict[str, Any] = {}
    for name, hint in field_types(cls).items():
        inside = plain_type(hint)
        # an optional section is one option: None or a whole mapping
        if is_config(inside) and not is_optional(hint):
            types |= option_types(inside, f"{section}{name}.")
        else:
            types[f"{section}{name}"] = hint
    return types


class Mark(Enum):
    """How the command line reads an option, besides its type: Annotated[str, Mark.POSITIONAL]."""

    POSITIONAL = "a word without the option's name before it"
    REPEATED = "one word at a time, repeating the option"


@dataclasses.dataclass(frozen=True)
class ValueOptional:
    """Marks an option that may stand without a value, and then has this one."""

    value: str


class Words(tuple[str, ...]):
    """Raw command-line words of an option whose type is not known yet."""


def plain_type(hint: Any) -> Any:
    """Return the bare type of a hint: without annotations, and without None. A union of several
    types stays as it is.
    """
    if get_origin(hint) is typing.Annotated:
        return plain_type(get_args(hint)[0])
    if get_origin(hint) in (typing.Union, types.UnionType):
        among = [member for member in get_args(hint) if member is not type(None)]
        return plain_type(among[0]) if len(among) == 1 else hint
    return hint


def is_optional(hint: Any) -> bool:
    """Return True if the type is a union with None, such as `int | None`, in Annotated or not.
    False for None alone and for Any.
    """
    if get_origin(hint) is typing.Annotated:
        return is_optional(get_args(hint)[0])
    return type(None) in get_args(hint)


NONE = ("None", "null")
"""Words of a command line that unset an option."""
WORDED = {int: "a whole number", float: "a number", bool: "True or False"}


def from_words(hint: Any, words: Sequence[str], option: str) -> Any:
    """Parse the words after a command-line option as a value of type `hint`: the word None, or null
    as in YAML, as None if `hint` allows it, no words as True for a bool, each word as an element
    for a tuple, else all of them, joined by spaces, as one value. Raises ValueError that names
    `option`.
    """
    hint = get_args(hint)[0] if get_origin(hint) is typing.Annotated else hint
    kind = plain_type(hint)
    if is_optional(hint) and len(words) == 1 and words[0] in NONE:
        return None
    # `--flag` alone means True
    if not words and kind is bool:
        return True
    if not words:
        raise ValueError(f"{option} needs a value")
    if get_origin(kind) is tuple:
        inside = plain_type(get_args(kind)[0])
        several = WORDED.get(inside, "").removeprefix("a ") + "s"
        return tuple(_from_word(inside, word, option, several, hint) for word in words)
    return _from_word(kind, " ".join(words), option, WORDED.get(kind, ""), hint)


def _from_word(kind: Any, word: str, option: str, expected: str, hint: Any) -> Any:
    """Parse one word as `kind`, which is never None; a bool is exactly True or False. For the error
    message alone: `expected`, what it must be, and `hint`, the full type, which adds "or None" if
    it allows that. Raises ValueError.
    """
    if get_origin(kind) is typing.Literal:
        known = {str(choice): choice for choice in get_args(kind)}
        if word not in known:
            raise ValueError(f"{option} is {cut(word)!r}: {choices(word, known)}")
        return known[word]
    try:
        return {"True": True, "False": False}[word] if kind is bool else kind(word)
    except (ValueError, KeyError):
        none = ", or None" if is_optional(hint) else ""
        raise ValueError(f"{option} is {cut(word)!r}: it must be {expected}{none}") from None


def flatten(values: dict, path: str = "") -> dict[str, Any]:
    """Return nested mappings of options as one dict by dotted name (`section.option: value`), names
    prefixed with `path`; an empty mapping stays as a value.
    """
    out = {}
    for key, value in values.items():
        # an empty section has no option to stand for it
        if isinstance(value, dict) and value:
            out |= flatten(value, f"{path}{key}.")
        else:
            out[f"{path}{key}"] = value
    return out


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by dotted name as nested mappings: the inverse of `flatten`."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        inside = nested
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[last] = value
    return nested


def changed_options(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    """Return lines `section.option: old -> new` for each option that differs between two
    configurations as plain values, recursively; an option that is missing counts as None.
    """
    lines = []
    for key in {**old, **new}:
        where, a, b = f"{path}.{key}" if path else key, old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += changed_options(a, b, where)
        elif a != b:
            lines.append(f"{where}: {a} -> {b}")
    return lines


def refuse_unreadable(where: str, value: Any) -> None:
    """Raise ValueError for a plain value that YAML would not read back the same, at any depth, keys
    included: an integer beyond 64 bits, NaN, text that UTF-8 cannot write. `where` names the
    option.
    """
    if isinstance(value, dict):
        for key, inside in value.items():
            refuse_unreadable(f"{where}.{key}", inside)
            refuse_unreadable(where, key)
    elif isinstance(value, list):
        for inside in value:
            refuse_unreadable(where, inside)
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{where} is {brief(value)}: it must be at most {LARGEST:,}")
    elif isinstance(value, float) and value != value:
        raise ValueError(f"{where} is {value}: it must be a number")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{where} is {cut(ascii(value))}: UTF-8 cannot write it") from None
