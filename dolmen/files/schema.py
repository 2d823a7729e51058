"""A small language for what a file may hold, as data: a tree of frozen dataclasses that
`check_value` compares with plain values (what JSON and YAML give).

    Object({"step": Int(0)}, {"loss": Real()})   a mapping that has `step` and may have `loss`
    Either(Null(), List(Int(0)))                 one of several

Every field of a file that somebody else may have written is compared here before anything looks at
it, so no reader needs to ask what type it was given.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dolmen.core.messages import cut

# entries of a list or mapping where nothing smaller is known: the file's size bounds it
FEW = 2**40
INT64 = 2**63


@dataclass(frozen=True)
class Anything:
    """Any value, for a field that is not read."""


@dataclass(frozen=True)
class Null:
    """null."""


@dataclass(frozen=True)
class Flag:
    """A boolean: true or false; 0 and 1 are not."""


@dataclass(frozen=True)
class Int:
    """An integer from `low` to `high`; true and false are not."""

    low: int = -INT64
    high: int = INT64 - 1


@dataclass(frozen=True)
class Real:
    """A finite number from `low` to `high`; with `above`, larger than `low`."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False


@dataclass(frozen=True)
class String:
    """Text that UTF-8 can encode, of at most `longest` characters, one of `choices` if given."""

    choices: tuple[str, ...] = ()
    longest: int = FEW


@dataclass(frozen=True)
class List:
    """`shortest` to `longest` values of one schema."""

    item: "Schema" = Anything()
    shortest: int = 0
    longest: int = FEW


@dataclass(frozen=True)
class TupleOf:
    """A list of exactly these, in this order."""

    items: tuple["Schema", ...]


@dataclass(frozen=True)
class Map:
    """A mapping from any text to values of one schema."""

    value: "Schema" = Anything()
    longest: int = FEW


@dataclass(frozen=True)
class Object:
    """A mapping with every field of `required`. Other fields are those of `optional`, or have the
    schema `rest` (None: other fields are errors). `needs`: for a field the other fields that must
    come with it.
    """

    required: Mapping[str, "Schema"] = field(default_factory=dict)
    optional: Mapping[str, "Schema"] = field(default_factory=dict)
    rest: "Schema | None" = Anything()
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Either:
    """Any value that one of `kinds` allows."""

    kinds: tuple["Schema", ...]


ANY = Anything()
Schema = Anything | Null | Flag | Int | Real | String | List | TupleOf | Map | Object | Either


def either(*kinds: Schema) -> Either:
    """Return the schema of one of `kinds`."""
    return Either(kinds)


def optional(kind: Schema) -> Either:
    """Return the schema of `kind` or null."""
    return Either((Null(), kind))


class Mismatch(Exception):
    """A value that its schema does not allow; the message names the field."""


def check_value(value: Any, schema: Schema, where: str = "") -> None:
    """Raise Mismatch, which names the field below `where`, unless `schema` allows `value`.

    `value` must consist of None, bool, int, float, str, list and dict. The check is recursive:
    bound the depth first (gate.py does).
    """
    match schema:
        case Anything():
            return
        case Either(kinds):
            _check_either(value, kinds, where)
        case List() if isinstance(value, list):
            _check_count(value, schema.shortest, schema.longest, where)
            for i, item in enumerate(value):
                check_value(item, schema.item, f"{where}[{i}]")
        case TupleOf(items) if isinstance(value, list):
            _check_count(value, len(items), len(items), where)
            for i, (item, kind) in enumerate(zip(value, items, strict=True)):
                check_value(item, kind, f"{where}[{i}]")
        case Map() if isinstance(value, dict):
            _check_count(value, 0, schema.longest, where)
            for name, item in value.items():
                _check_name(name, where)
                check_value(item, schema.value, _field_path(where, name))
        case Object() if isinstance(value, dict):
            _check_object(value, schema, where)
        case _ if not _allows_scalar(value, schema):
            raise Mismatch(
                f"{where or 'it'} is {describe_value(value)}: it must be {describe_schema(schema)}"
            )


def _check_either(value: Any, kinds: tuple[Schema, ...], where: str) -> None:
    """Raise Mismatch unless one of `kinds` allows the value.

    If exactly one of them has parts as the value has, its message is raised, which names the field;
    else one that names all kinds.
    """
    deep = []
    for kind in kinds:
        try:
            return check_value(value, kind, where)
        except Mismatch as error:
            parts = (Object, Map) if isinstance(value, dict) else (List, TupleOf)
            if isinstance(value, (dict, list)) and isinstance(kind, parts):
                deep.append(error)
    # the author meant this form, so its field is what is wrong
    if len(deep) == 1:
        raise deep[0]
    raise Mismatch(
        f"{where or 'it'} is {describe_value(value)}: it must be {describe_schema(Either(kinds))}"
    )


def _check_object(value: dict, schema: Object, where: str) -> None:
    """Raise Mismatch for a missing field, an unknown one, or a value that its schema does not
    allow.
    """
    needed = [n for name, others in schema.needs.items() if name in value for n in others]
    if missing := [name for name in [*schema.required, *needed] if name not in value]:
        raise Mismatch(f"{where or 'it'} has no {missing[0]}")
    for name, item in value.items():
        _check_name(name, where)
        # no schema is false
        kind = schema.required.get(name) or schema.optional.get(name) or schema.rest
        if kind is None:
            names = ", ".join([*schema.required, *schema.optional])
            known = f"known are {names}" if names else "it can have none"
            raise Mismatch(f"{where or 'it'} has a field {describe_value(name)}: {known}")
        if kind != ANY:  # most fields of a row are: a run has a million
            check_value(item, kind, _field_path(where, name))


def _check_name(name: Any, where: str) -> None:
    """Raise Mismatch unless a name is text that UTF-8 can encode."""
    if not isinstance(name, str) or not _writable(name):
        raise Mismatch(
            f"{where or 'it'} has a field named {describe_value(name)}: a name must be text"
        )


def _check_count(value: list | dict, shortest: int, longest: int, where: str) -> None:
    """Raise Mismatch unless there are `shortest` to `longest` entries."""
    if not shortest <= len(value) <= longest:
        many = f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
        many = f"{shortest:,} or more" if longest == FEW else many
        raise Mismatch(f"{where or 'it'} has {len(value):,} entries: it must have {many}")


def _field_path(where: str, name: str) -> str:
    """Return the path of a field below `where`, such as "run.train", shortened for messages."""
    return f"{where}.{_short(name)}" if where else _short(name)


def _allows_scalar(value: Any, schema: Schema) -> bool:
    """Return whether `schema`, one without parts (null, flag, number, text), allows a value."""
    # bool is an int in Python
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    match schema:
        case Null():
            return value is None
        case Flag():
            return isinstance(value, bool)
        case Int(low, high):
            return number and isinstance(value, int) and low <= value <= high
        case Real(low, high, above):
            # float(value) would overflow or lose digits
            if not number or (isinstance(value, int) and abs(value) >= INT64):
                return False
            return math.isfinite(value) and low <= value <= high and not (above and value == low)
        case String(choices, longest):
            if not isinstance(value, str) or len(value) > longest:
                return False
            return (not choices or value in choices) and _writable(value)
    return False


def _writable(text: str) -> bool:
    """Return whether UTF-8 can encode a text: it has no lone surrogate."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def describe_schema(schema: Schema) -> str:
    """Describe the values that a schema allows, to follow "it must be"."""
    match schema:
        case Null():
            return "null"
        case Flag():
            return "true or false"
        case Int(low, high):
            return f"an integer{_describe_range(low, high, -INT64, INT64 - 1)}"
        case Real(low, high, True):
            upper = f", at most {high:,}" if high < math.inf else ""
            return f"a number larger than {low:,}{upper}"
        case Real(low, high):
            return f"a finite number{_describe_range(low, high, -math.inf, math.inf)}"
        case String(choices, longest):
            if choices:
                return f"one of {', '.join(choices)}"
            return "text" if longest == FEW else f"text of at most {longest:,} characters"
        case List(item, n, m) if n == m:
            return f"a list of {n}, each {describe_schema(item)}"
        case List(item):
            return "a list" if item == Anything() else f"a list, each {describe_schema(item)}"
        case TupleOf(items):
            return f"a list of {', '.join(describe_schema(item) for item in items)}"
        case Map() | Object():
            return "a mapping"
        case Either(kinds):
            return " or ".join(describe_schema(kind) for kind in kinds)
    return "anything"


def _describe_range(low: float, high: float, lowest: float, highest: float) -> str:
    """Describe a range of numbers, such as " from 1 to 8"; "" if it is unlimited (`lowest` to
    `highest`).
    """
    if low == lowest and high == highest:
        return ""
    if high == highest:
        return f" of at least {low:,}"
    return f" of at most {high:,}" if low == lowest else f" from {low:,} to {high:,}"


def describe_value(value: Any) -> str:
    """Describe a value for a message, in one short line of ASCII: containers by their length,
    integers of over 40 digits as such.
    """
    if isinstance(value, (dict, list)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value):,}"
    if isinstance(value, bool) or value is None:
        # as JSON and YAML spell them
        return {None: "null", True: "true", False: "false"}[value]
    # repr of an integer takes quadratic time
    if isinstance(value, int) and abs(value) >= 10**40:
        return "an integer of more than 40 digits"
    return _short(ascii(value)) if isinstance(value, str) else _short(repr(value))


def _short(text: str) -> str:
    """Return a text as printable ASCII, cut to the length of messages."""
    text = text if text.isascii() and text.isprintable() else ascii(text)[1:-1]
    return cut(text)
