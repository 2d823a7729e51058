"""Frozen dataclasses to and from plain mappings (YAML, JSON), strictly: an unknown key or a wrong
type is refused by name.
"""

import dataclasses
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar

from dolmen.core.messages import choices, cut, did_you_mean, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


class Plain(ABC):
    """A dataclass that is in a file what it says, not a mapping of its fields."""

    @abstractmethod
    def plain(self) -> Any:
        """What YAML and JSON can hold."""

    @classmethod
    @abstractmethod
    def from_plain(cls, value: Any) -> Self:
        """The inverse. Raises ValueError."""


def to_dict(config: Any) -> dict[str, Any]:
    """Plain values only, tuples as lists: what YAML and JSON can hold."""
    return _plain(config)


def _plain(value: Any) -> Any:
    if isinstance(value, Plain):
        return value.plain()
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def from_dict(cls: type[T], values: Any, default: T | None = None, path: str = "") -> T:
    """A `cls` from a mapping; keys left out keep the value of `default` (or the class's own).
    Raises ValueError with the path of the key: unknown (with the nearest name), or of the wrong
    type.
    """
    if not isinstance(values, dict):
        raise ValueError(
            f"{path or 'the configuration'} must be a mapping of options, not {shown(values)}"
        )
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    made: dict[str, Any] = {} if default is None else {n: getattr(default, n) for n in names}
    for key, value in values.items():
        name, where = str(key).replace("-", "_"), cut(f"{path}.{key}" if path else str(key))
        if name not in names:
            hint = did_you_mean(name, names, f"known are {', '.join(names)}", most=1)
            raise ValueError(f"unknown option {where}: {hint}")
        made[name] = _convert(hints[name], value, where, made.get(name))
    return cls(**made)


def option_types(cls: type, section: str = "") -> dict[str, Any]:
    """The options of a dataclass and its sections: `layout.tp` -> its type."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for one in dataclasses.fields(cls):
        name = f"{section}{one.name}"
        inside = dataclasses.is_dataclass(hints[one.name])
        found |= option_types(hints[one.name], f"{name}.") if inside else {name: hints[one.name]}
    return found


def _convert(hint: Any, value: Any, where: str, default: Any) -> Any:
    """What `value`, of a file, is as a `hint`; `default` is what a section of it keeps."""
    kind = typing.get_origin(hint) or hint
    if kind in KINDS:
        return KINDS[kind](hint, value, where, default)
    if issubclass(kind, Plain):
        return _plain_of(kind, value, where)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return from_dict(kind, value, default, where)
    return _exactly(kind, value, where)


def _exactly(kind: type, value: Any, where: str) -> Any:
    """Of that type and no other; True is no int."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} is {shown(value)}: it must be {kind.__name__}")
    return value


def _plain_of(cls: type[Plain], value: Any, where: str) -> Plain:
    try:
        return cls.from_plain(value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _anything(hint: Any, value: Any, where: str, default: Any) -> Any:
    return value


def _marked(hint: Any, value: Any, where: str, default: Any) -> Any:
    return _convert(typing.get_args(hint)[0], value, where, default)


def _optional(hint: Any, value: Any, where: str, default: Any) -> Any:
    """None, or the one type beside it."""
    if value is None:
        return None
    (inside,) = (one for one in typing.get_args(hint) if one is not type(None))
    return _convert(inside, value, where, default)


def _choice(hint: Any, value: Any, where: str, default: Any) -> Any:
    known = typing.get_args(hint)
    if any(type(value) is type(one) and value == one for one in known):
        return value  # True is not 1
    raise ValueError(f"{where} is {shown(value)}: {choices(str(value), known)}")


def _several(hint: Any, value: Any, where: str, default: Any) -> tuple:
    """A list, or one value alone."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(_convert(typing.get_args(hint)[0], one, where, None) for one in values)


def _number(hint: Any, value: Any, where: str, default: Any) -> float:
    """An integer too, and text that is a number: YAML reads 1e-3 as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{where} is {shown(value)}: it must be a number") from None
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{where} is {shown(value)}: no float is so large") from None
    return _exactly(float, value, where)


def _mapping(hint: Any, value: Any, where: str, default: Any) -> Any:
    return _exactly(dict, value, where)


# Kind of type -> (hint, value, where, default) -> the value of that type. Raises ValueError.
KINDS: dict[Any, Callable[[Any, Any, str, Any], Any]] = {
    Any: _anything,
    typing.Annotated: _marked,
    typing.Union: _optional,
    types.UnionType: _optional,
    typing.Literal: _choice,
    tuple: _several,
    float: _number,
    dict: _mapping,
}


def flatten(values: dict, path: str = "") -> dict[str, Any]:
    """Nested options as `section.option: value`."""
    out = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            out |= flatten(value, f"{path}{key}.")
        else:
            out[f"{path}{key}"] = value
    return out


def changed_options(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    """Lines `section.option: old -> new` for what changed between two configurations as plain
    values.
    """
    lines = []
    for key in {**old, **new}:
        where, a, b = f"{path}.{key}" if path else key, old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += changed_options(a, b, where)
        elif a != b:
            lines.append(f"{where}: {a} -> {b}")
    return lines


MOST = 2**53  # of any count: as large as a float64 counts exactly


def refuse_unreadable(config: Any, most: dict[str, int]) -> None:
    """Raises ValueError for what a YAML file would not give back, with its option: an integer over
    2^53, or over what `most` says of its option or section; a number that is none; text that UTF-8
    cannot write.
    """
    _refuse_in("", to_dict(config), MOST, most)


def _refuse_in(where: str, value: Any, limit: int, most: dict[str, int]) -> None:
    limit = most.get(where, limit)
    if isinstance(value, dict):
        for key, inside in value.items():
            _refuse_in(f"{where}.{key}" if where else str(key), inside, limit, most)
            _refuse_value(where, key, limit)
    elif isinstance(value, list):
        for inside in value:
            _refuse_in(where, inside, limit, most)
    else:
        _refuse_value(where.replace("_", "-"), value, limit)


def _refuse_value(where: str, value: Any, most: int) -> None:
    if isinstance(value, int) and abs(value) > most:
        raise ValueError(f"{where} is {shown(value)}: it must be at most {most:,}")
    if isinstance(value, float) and value != value:
        raise ValueError(f"{where} is {value}: it must be a number")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{where} is {cut(ascii(value))}: UTF-8 cannot write it") from None
