"""Validation of values that a file holds (None, bool, int, float, str, list and dict) against a
type hint, by pydantic.

    class AdapterFields(TypedDict):
        r: Annotated[int, Interval(ge=1, le=2**16)]
        use_dora: NotRequired[bool | None]

    check_value({"r": 8}, AdapterFields)

Problem: by default pydantic converts values, lets through infinity and text that UTF-8 cannot
encode, and collects an error for each of a million wrong entries.

Idea: `_restrict` adds the rules that all files share to pydantic's schema of the hint, once per
hint. Values are compared and never changed, so fields keep their order and unknown ones.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NotRequired

from pydantic import AfterValidator, TypeAdapter
from pydantic_core import (
    ErrorDetails,
    PydanticCustomError,
    SchemaValidator,
    ValidationError,
    core_schema,
)
from typing_extensions import TypedDict

from dolmen.core.config import expectation
from dolmen.core.messages import cut, plural

INT64 = 2**63
LONGEST_TEXT = 2**40  # characters where nothing smaller is known: the file's size bounds it


class Mismatch(Exception):
    """A value that its schema does not allow; the message names the field."""


def check_value(value: Any, schema: Any) -> None:
    """Raise Mismatch, which names the field, unless the type hint `schema` allows `value`, which
    consists of None, bool, int, float, str, list and dict. Bound its depth first (gate.py does).
    """
    try:
        validator(schema).validate_python(value)
    except ValidationError as error:
        raise Mismatch(_describe_errors(error.errors(include_url=False), value)) from None


def typed_dict(
    required: Mapping[str, Any], optional: Mapping[str, Any] = {}, rest: Any = Any
) -> Any:
    """Return a TypedDict with `required` and `optional` fields (name -> type hint), for mappings
    whose fields are known at run time only or need no class.

    Any other field has the type hint `rest`; None: it is an error.
    """
    make: Any = TypedDict  # type checkers want a literal mapping
    extra = {"closed": True} if rest is None else {"extra_items": rest}
    names = {**required, **{name: NotRequired[kind] for name, kind in optional.items()}}
    return make("fields", names, **extra)


def needs(**fields: str) -> AfterValidator:
    """Return a rule to annotate a TypedDict with: where field NAME is present, the fields that
    NAME="a b" lists must be present too.
    """

    def check(value: dict[str, Any]) -> dict[str, Any]:
        """Return the value; raise pydantic's error, whose text is the missing field."""
        for name in fields.keys() & value.keys():
            if missing := [other for other in fields[name].split() if other not in value]:
                raise PydanticCustomError("needed_field", "{name}", {"name": missing[0]})
        return value

    return AfterValidator(check)


@cache
def validator(schema: Any) -> SchemaValidator:
    """Return a validator of the type hint `schema` with the rules that all files share (no
    conversion of types, int64, finite floats, bounded text); cached.
    """
    return SchemaValidator(_restrict(TypeAdapter(schema).core_schema))


def _restrict(node: Any) -> Any:
    """Return a copy of a part of a pydantic-core schema with the rules that all files share,
    recursively: no conversion of types, int64, finite floats, a bound on the length of text, the
    first error only. Other values are returned as they are.
    """
    if isinstance(node, list):
        return [_restrict(part) for part in node]
    if not isinstance(node, dict):
        return node
    node = {name: _restrict(part) for name, part in node.items()}
    match node.get("type"):
        case "bool":
            return {**node, "strict": True}
        case "int":
            return {"ge": -INT64, "le": INT64 - 1, **node, "strict": True}
        case "float":
            finite: Any = {**node, "strict": True, "allow_inf_nan": False}
            return core_schema.no_info_before_validator_function(_refuse_long, finite)
        case "str":
            # with a length, pydantic decodes the text, and refuses lone surrogates
            return {"max_length": LONGEST_TEXT, **node, "strict": True}
        case "list" | "tuple" | "dict":
            return {**node, "fail_fast": True}
        case "typed-dict":
            return _restrict_fields(node)
    return node


def _restrict_fields(node: dict[str, Any]) -> Any:
    """Return the schema of a TypedDict that compares its undeclared fields first and stops at the
    first error: pydantic's own would report an error for each.
    """
    validator, rest = None, node.pop("extras_schema", core_schema.any_schema())
    if node.pop("extra_behavior", None) != "forbid":
        name: Any = _restrict({"type": "str"})
        validator = SchemaValidator(core_schema.dict_schema(name, rest, fail_fast=True))
    known: Any = node
    check = partial(_check_others, tuple(node["fields"]), validator)
    # the name by which others refer to this schema is that of the outermost one
    ref = node.pop("ref", None)
    return core_schema.no_info_before_validator_function(check, known, ref=ref)


def _check_others(known: Sequence[str], validator: SchemaValidator | None, value: Any) -> Any:
    """Return the value for a TypedDict with the fields `known`; raise pydantic's error if it has
    other fields that `validator` does not allow, or any where it is None.
    """
    rest = {n: item for n, item in value.items() if n not in known} if type(value) is dict else {}
    if validator is not None:
        validator.validate_python(rest)
    elif rest:
        names = f"known are {', '.join(known)}" if known else "it can have none"
        text = f"{describe_value(next(iter(rest)))}: {names}"
        raise PydanticCustomError("unknown_field", "{text}", {"text": text})
    return value


def _refuse_long(value: Any) -> Any:
    """Return a value for a float; raise pydantic's error for an integer that is too long for it."""
    if isinstance(value, int) and abs(value) >= INT64:
        raise PydanticCustomError("float_type", "")
    return value


def _describe_errors(errors: Sequence[ErrorDetails], value: Any) -> str:
    """Return the first error of `value` in words. Where all alternatives of a union failed, it is
    that of the one that has the value's type ("at most 5"), or names the types of all ("text or a
    list").
    """
    first = errors[0]
    place, _, before = _locate(first, value)
    union = [error for error in errors if error["loc"][:before] == first["loc"][:before]]
    if before == len(first["loc"]):
        union = [first]
    # pydantic names all errors of a wrong type so, such as list_type
    meant = [
        error
        for error in union
        if not error["type"].endswith("_type") or _locate(error, value)[0] != place
    ]
    must = " or ".join(dict.fromkeys(map(expectation, meant[:1] or union)))
    return _describe_error((meant or union)[0], value, must)


def _describe_error(error: ErrorDetails, value: Any, must: str) -> str:
    """Return one error of `value` in words, which name the field. `must`: what it must be."""
    path, inside, _ = _locate(error, value)
    kind, it = error["type"], path or "it"
    if kind == "missing":
        missing = error["loc"][-1]
        if isinstance(missing, str):
            return f"{it} has no {missing}"
        must = f"at least {missing + 1}"  # of a tuple
    if kind == "needed_field":
        return f"{it} has no {error['msg']}"
    if kind == "unknown_field":
        return f"{it} has a field {error['msg']}"
    if error["loc"][-1:] == ("[key]",):
        return f"{it} has a field named {describe_value(error['input'])}: a name must be text"
    if kind in ("missing", "too_short", "too_long"):
        return f"{it} has {plural(len(inside), 'entry', 'entries')}: it must have {must}"
    return f"{it} is {describe_value(inside)}: it must be {must}"


def _locate(error: ErrorDetails, value: Any) -> tuple[str, Any, int]:
    """Return where an error lies in `value`: the path, such as "a[1].b"; the value there; and how
    many steps of its `loc` precede the first that names an alternative of a union, not a field.
    """
    loc = error["loc"]
    if error["type"] == "missing":
        loc = loc[:-1]
    elif loc[-1:] == ("[key]",):
        loc = loc[:-2]
    path, before = "", len(error["loc"])
    for i, step in enumerate(loc):
        if isinstance(value, list) and isinstance(step, int):
            path, value = f"{path}[{step}]", value[step]
        elif isinstance(value, dict) and step in value:
            path, value = f"{path}{'.' if path else ''}{_short(str(step))}", value[step]
        else:
            before = min(before, i)
    return path, value, before


def describe_value(value: Any) -> str:
    """Describe a value for a message, in one short line of ASCII: "a mapping of 3", "a list of 3",
    null, true, false, "an integer of more than 40 digits"; anything else as its repr, cut short.
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
