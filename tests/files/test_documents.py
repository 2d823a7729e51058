"""Any document that fits a schema is read as it is, and any JSON at all is read as it is or
refused: documents made from the schemas themselves.
"""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from subjects import CONFIGS, alike

from dolmen.families import Model, find_family
from dolmen.families.model import schema
from dolmen.files import gate, kinds
from dolmen.files.gate import Kind, Refused
from dolmen.files.schema import (
    Anything,
    Either,
    Flag,
    Int,
    List,
    Map,
    Null,
    Object,
    Real,
    Schema,
    String,
    TupleOf,
    check_value,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
JSON = st.recursive(LEAF, lambda c: st.lists(c, max_size=3) | st.dictionaries(TEXT, c, max_size=3))
KINDS = {name: kind for name, kind in vars(kinds).items() if isinstance(kind, Kind)}
QUICK = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def fitting(shape: Schema) -> st.SearchStrategy[Any]:
    """Values that a schema allows."""
    match shape:
        case Null():
            return st.none()
        case Flag():
            return st.booleans()
        case Int(low, high):
            return st.integers(low, high)
        case Real(low, high, above):
            low, high = max(low, -1e300), min(high, 1e300)
            fractions = st.floats(low, high, exclude_min=above)
            least, most = max(int(low) + 1, -(2**62)), min(int(high), 2**62)
            return fractions | st.integers(least, most) if least <= most else fractions
        case String(choices, longest):
            return st.sampled_from(choices) if choices else TEXT.filter(lambda t: len(t) <= longest)
        case List(item, shortest, _):
            return st.lists(fitting(item), min_size=shortest, max_size=shortest + 2)
        case TupleOf(items):
            return st.tuples(*map(fitting, items)).map(list)
        case Map(value, _):
            return st.dictionaries(TEXT, fitting(value), max_size=3)
        case Object(required, optional, _, needs):
            needed = {name for beside in needs.values() for name in beside}
            every = required | {n: s for n, s in optional.items() if n in needed}
            rest = {n: fitting(s) for n, s in optional.items() if n not in needed}
            return st.fixed_dictionaries({n: fitting(s) for n, s in every.items()}, optional=rest)
        case Either(among):
            return st.one_of(*map(fitting, among))
        case Anything():
            return LEAF
    raise AssertionError(shape)


@pytest.mark.parametrize("name", KINDS)
def test_what_fits_is_read_as_it_is(name):
    kind = KINDS[name]

    @QUICK
    @given(fitting(kind.schema))
    def reads(document):
        text = json.dumps(document).encode()
        assert alike(gate.parse_json(text, "f", kind), document)

    reads()


@pytest.mark.parametrize("name", KINDS)
def test_anything_else_is_refused(name):
    kind = KINDS[name]

    @QUICK
    @given(JSON)
    def refuses_or_reads(document):
        try:
            value = gate.parse_json(json.dumps(document).encode(), "f", kind)
        except Refused as error:
            assert str(error).startswith("f") and "\n" not in str(error)
            return
        check_value(value, kind.schema)
        assert alike(value, document)

    refuses_or_reads()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_json_that_fits_its_family_is_a_model_or_a_refusal(name):
    """Rules across fields refuse with ValueError; nothing else comes out."""
    family = find_family(CONFIGS[name]["model_type"])

    @QUICK
    @given(fitting(schema(family)))
    def reads(document):
        content = CONFIGS[name] | {n: v for n, v in document.items() if n != "model_type"}
        try:
            model = Model(content)
        except ValueError:
            return
        assert alike(model.config, content)

    reads()
