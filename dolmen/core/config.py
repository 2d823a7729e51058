"""Frozen dataclasses to and from plain mappings (YAML, JSON), strictly: an unknown key or a wrong
type is refused by name.
"""

import dataclasses
import difflib
import types
import typing
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self, TypeVar

from dolmen.core.words import choices

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
            f"{path or 'the configuration'} must be a mapping of options, not {values!r}"
        )
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    made: dict[str, Any] = {} if default is None else {n: getattr(default, n) for n in names}
    for key, value in values.items():
        name, where = str(key).replace("-", "_"), f"{path}.{key}" if path else str(key)
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise ValueError(
                f"unknown option {where}"
                + (f": did you mean {near[0]}?" if near else f"; known: {', '.join(names)}")
            )
        made[name] = _convert(hints[name], value, where, made.get(name))
    return cls(**made)


def _convert(hint: Any, value: Any, where: str, default: Any) -> Any:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _convert(inside[0], value, where, default)
    if isinstance(hint, type) and issubclass(hint, Plain):
        return _from_plain(hint, value, where)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return from_dict(hint, value, default, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in inside:
            return None
        return _convert(next(i for i in inside if i is not type(None)), value, where, default)
    if origin is typing.Literal:
        if any(value == i and type(value) is type(i) for i in inside):
            return value  # True is not 1
        raise ValueError(f"{where} is {value!r}: {choices(str(value), inside)}")
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            value = [value]
        return tuple(_convert(inside[0], v, where, None) for v in value)
    if hint is float and isinstance(value, str):
        value = _number(value, where)  # YAML reads 1e-3 as text
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is dict or hint is dict:
        hint = dict
    if hint is not Any and (
        not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)
    ):
        raise ValueError(f"{where} is {value!r}: it must be {hint.__name__}")
    return value


def _from_plain(cls: type[Plain], value: Any, where: str) -> Any:
    try:
        return cls.from_plain(value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{where} is {text!r}: it must be a number") from None


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
        raise ValueError(f"{where} is {value}: it must be at most {most:,}")
    if isinstance(value, float) and value != value:
        raise ValueError(f"{where} is {value}: it must be a number")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{where} is {value!a}: UTF-8 cannot write it") from None
