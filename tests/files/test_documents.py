"""Any document that fits a schema is read as it is, and any JSON at all is read as it is or
refused: documents made from the schemas themselves.
"""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from pydantic_core import SchemaValidator
from subjects import CONFIGS, alike

from dolmen.families import ModelConfig, find_family
from dolmen.files import gate, kinds
from dolmen.files.gate import Kind, Refused
from dolmen.files.schema import check_value

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


def fitting(schema: Any) -> st.SearchStrategy[Any]:
    """Values that a type hint allows, with the limits that all files share."""
    hint: Any = TypeAdapter(schema).core_schema
    known = {one["ref"]: one for one in hint.get("definitions", ())}

    def of(node: Any) -> st.SearchStrategy[Any]:
        """Values of one part of pydantic's schema."""
        match node:
            case {"type": "definitions", "schema": inside} | {"type": "nullable", "schema": inside}:
                return of(inside) | (st.none() if node["type"] == "nullable" else st.nothing())
            case {"type": "definition-ref", "schema_ref": name}:
                return of(known[name])
            case {"type": "function-after", "schema": inside}:
                return of(inside).filter(SchemaValidator(node).isinstance_python)
            case {"type": "bool"}:
                return st.booleans()
            case {"type": "int"}:
                return st.integers(node.get("ge", -(2**63)), node.get("le", 2**63 - 1))
            case {"type": "float"}:
                low, above = node.get("gt", node.get("ge", -1e300)), "gt" in node
                high = node.get("le", 1e300)
                fractions = st.floats(low, high, exclude_min=above)
                least, most = max(int(low) + 1, -(2**62)), min(int(high), 2**62)
                return fractions | st.integers(least, most) if least <= most else fractions
            case {"type": "str"}:
                return TEXT.filter(lambda text: len(text) <= node.get("max_length", 8))
            case {"type": "literal", "expected": choices}:
                return st.sampled_from(choices)
            case {"type": "list"}:
                least = node.get("min_length", 0)
                return st.lists(of(node["items_schema"]), min_size=least, max_size=least + 2)
            case {"type": "tuple", "items_schema": items}:
                return st.tuples(*map(of, items)).map(list)
            case {"type": "dict", "values_schema": item}:
                return st.dictionaries(TEXT, of(item), max_size=3)
            case {"type": "typed-dict", "fields": fields}:
                each = {name: of(field["schema"]) for name, field in fields.items()}
                needed = {name: each.pop(name) for name in fields if fields[name]["required"]}
                return st.fixed_dictionaries(needed, optional=each)
            case {"type": "union", "choices": among}:
                return st.one_of(*map(of, among))
            case {"type": "any"}:
                return LEAF
        raise AssertionError(node)

    return of(hint)


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
    @given(fitting(family.schema))
    def reads(document):
        content = CONFIGS[name] | {n: v for n, v in document.items() if n != "model_type"}
        try:
            model = ModelConfig(content)
        except ValueError:
            return
        assert alike(model.config, content)

    reads()
