"""The gate: sizes and depths are bounded before anything is parsed, and what does not fit its
schema is refused in one line that begins with the file's name.
"""

import math
import os
import resource
import time
from typing import Annotated, Any, Literal

import pytest
import yaml
from annotated_types import Interval, Len, MaxLen

from dolmen.core.config import AboveZero
from dolmen.files import gate, kinds
from dolmen.files.gate import Kind, Refused
from dolmen.files.schema import needs, typed_dict

ANY = Kind(Any, size=16 * gate.MIB)


def refused(call, *given) -> str:
    """The message of a refusal, which must cost little and come in one line."""
    began = time.process_time()
    with pytest.raises(Refused) as caught:
        call(*given)
    assert time.process_time() - began < 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


JSON = {
    "nested": (b"[" * 200_000, "200,000 brackets open at once"),
    "nested in names": (b'{"a":' * 200_000, "brackets open at once"),
    "an escape without end": (b'"' + b'\\"' * 2_000_000, "is not JSON"),
    "a name twice": (b'{"b": {"a": 1, "a": 2}}', "'a' is given twice"),
    "a name twice among many": (
        b"{" + b",".join(b'"%d":0' % (i % 99_999) for i in range(100_000)) + b"}",
        "'0' is given twice",
    ),
    "not a number": (b"[NaN]", "NaN is not a number in JSON"),
    "infinity": (b"[-Infinity]", "-Infinity is not a number in JSON"),
    "a number of 5,000 digits": (b"1" * 5000, "is not JSON"),
    "cut": (b'{"a": 1', "is not JSON"),
    "empty": (b"", "is not JSON"),
    "another encoding": ('{"a": "ä"}'.encode("utf-16"), "is not UTF-8 text: byte 0xff at 0"),
    "latin": (b'{"a": "\xe4"}', "byte 0xe4 at 7"),
}


@pytest.mark.parametrize("case", JSON)
def test_json_that_is_refused(tmp_path, case):
    file = tmp_path / "a.json"
    file.write_bytes(JSON[case][0])
    message = refused(gate.read_json, file, ANY)
    assert message.startswith(f"{file}: ") and JSON[case][1] in message


def test_json_that_is_read(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b'\xef\xbb\xbf{"[[[[\\"[[[": [[1, 2.5], null, "\\\\"], "b": true}')
    kind = Kind(Any, depth=3)
    assert gate.read_json(file, kind) == {'[[[["[[[': [[1, 2.5], None, "\\"], "b": True}
    assert gate.read_json(file, Kind(Any, depth=2 + 1))
    assert "3 brackets" in refused(gate.read_json, file, Kind(Any, depth=2))


def test_what_is_no_file_of_that_size(tmp_path):
    (tmp_path / "large").write_bytes(b"1" * 11)
    os.mkfifo(tmp_path / "pipe")
    small = Kind(Any, size=10)
    assert "more than 10 bytes" in refused(gate.read_json, tmp_path / "large", small)
    assert "is a folder" in refused(gate.read_json, tmp_path, small)
    assert "is not a regular file" in refused(gate.read_json, tmp_path / "pipe", small)
    assert "No such file" in refused(gate.read_json, tmp_path / "none", small)
    for reader in (lambda file: list(gate.read_json_lines(file, small)), gate.read_yaml):
        given = (tmp_path,) if reader is not gate.read_yaml else (tmp_path, small)
        assert "is a folder" in refused(reader, *given)


YAML = {
    "nested": ("[" * 20_000, "nested deeper than 32"),
    "nested in names": ("? " * 20_000, "nested deeper than 32"),
    "nested by aliases": (
        "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 50)),
        "line 32: nested deeper than 32",
    ),
    "an alias without an anchor": ("a: *b", "the alias *b has no anchor before it"),
    "an alias of itself": ("a: &a [*a]", "the alias *a is inside its own anchor"),
    "aliases of aliases": (
        "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30)),
        "more than 1,048,576 values",
    ),
    "a name twice": ("a: 1\nb: 2\na: 3", "line 3: 'a' is given twice"),
    "a tag": ("a: !!python/object/apply:os.system [ls]", "tags are not supported"),
    "a tag of a mapping": ("a: !!python/object:os.x {b: 1}", "tags are not supported"),
    "a tag of a value": ("a: !!python/name:os.system x", "tags are not supported"),
    "two documents": ("a: 1\n---\nb: 2", "more than one document"),
    "a name that is a list": ("? [a]\n: b", "a list or mapping as a key"),
    "a number of 50 digits": ("a: " + "1" * 50, "an integer of 50 digits"),
    "a control character": ("a: \0", "control characters"),
    "not closed": ("a: [b", "line 2, column 1"),
}


@pytest.mark.parametrize("case", YAML)
def test_yaml_that_is_refused(tmp_path, case):
    file = tmp_path / "a.yaml"
    file.write_text(YAML[case][0])
    message = refused(gate.read_yaml, file, ANY)
    assert message.startswith(f"{file}: is not valid YAML") and YAML[case][1] in message


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, -2.5, 1e-05, 1e30, True, None, "x"], "b": {"c": {}, "d": []}},
        {
            "words": [
                "no",
                "null",
                "~",
                "1",
                "1.5",
                "-.5",
                "0x1",
                "1:30",
                "2001-01-01",
                "",
                "=",
                "<<",
                "ä",
            ]
        },
        {"lines": "a\nb\n", "quotes": "'\"", "spaces": " a ", "infinite": float("inf")},
    ],
)
def test_yaml_is_read_as_it_is_written(tmp_path, value):
    """What PyYAML writes comes back, and is what PyYAML reads."""
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(value, allow_unicode=True))
    assert gate.read_yaml(file, ANY) == value == yaml.safe_load(file.read_text())


def test_yaml_words_and_aliases(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("a: &a {x: yes, y: 0b11}\nb: [*a, 'yes', 017, 1_000, 1_0.5, .inf, 1e-3, 0x_]\n")
    a = {"x": True, "y": 3}
    assert gate.read_yaml(file, ANY) == {
        "a": a,
        "b": [a, "yes", 15, 1000, 10.5, float("inf"), "1e-3", "0x_"],
    }
    file.write_text("# nothing\n")
    assert gate.read_yaml(file, ANY) is None


def test_rows(tmp_path):
    file, kind = tmp_path / "a.jsonl", Kind(typed_dict({"n": int}), size=60)
    file.write_text('{"n": 1}\n\n {"n": 2}\n')
    assert list(gate.read_json_lines(file, kind)) == [(1, {"n": 1}), (3, {"n": 2})]
    for bad, reason in (
        ('{"n": "1"}', "n is '1': it must be a whole number"),
        ("[" * 50, "50 brackets"),
        ("1" * 60, "more than 60 bytes"),
        ("{}", "it has no n"),
    ):
        file.write_text('{"n": 1}\n' + bad + "\n")
        message = refused(lambda: list(gate.read_json_lines(file, kind)))
        assert message.startswith(f"{file}, line 2: ") and reason in message


UNIT = Annotated[float, Interval(ge=0, le=1)]
SCHEMAS = [
    (Annotated[int, Interval(ge=1, le=5)], [1, 5], [0, 6, 1.0, True, "1", None, [1], 10**400]),
    (int, [-(2**63), 2**63 - 1], [2**63, -(2**63) - 1]),
    (float, [0, 1e300, 2**62], [2**63, 10**400, math.nan, math.inf, -math.inf, True, "0", None]),
    (UNIT, [0, 1, 0.5], [-0.1, math.nan, math.inf, True, "0", 10**400]),
    (AboveZero, [1e-9], [0, 0.0, -1, math.nan, math.inf]),
    (bool, [True, False], [0, 1, None, "yes"]),
    (Literal["a", "b"], ["a"], ["c", 1, None, "\ud800"]),
    (str, ["", "ä"], ["\ud800", 1, None]),
    (Annotated[str, MaxLen(2)], ["ab", "ää"], ["abc", "\ud800"]),
    (int | None, [None, 1], ["a", False]),
    (Annotated[list[int], Len(1, 2)], [[1], [1, 2]], [[], [1, 2, 3], ["a"], 1, {"a": 1}]),
    (tuple[str, int], [["a", 1]], [["a"], ["a", 1, 2], [1, "a"], "a1"]),
    (dict[str, int], [{}, {"a": 1}], [{"a": "b"}, {1: 1}, {"\ud800": 1}, []]),
    (
        typed_dict({"a": int}, {"b": str}),
        [{"a": 1}, {"a": 1, "b": "x", "c": []}],
        [{}, {"a": ""}, {"a": 1, 2: 3}, {"a": 1, "\ud800": 3}],
    ),
    (typed_dict({}, {"b": str}, rest=None), [{}, {"b": ""}], [{"c": 1}]),
    (typed_dict({}, {"b": str}, rest=int), [{}, {"b": "", "c": 1}], [{"c": ""}, {"b": 1}]),
    (Annotated[dict[str, Any], needs(a="b")], [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
]


@pytest.mark.parametrize("schema, good, bad", SCHEMAS, ids=lambda v: type(v).__name__)
def test_schemas(schema, good, bad):
    for value in good:
        assert gate.check_schema(value, "f", schema) == value
    for value in bad:
        assert refused(gate.check_schema, value, "f", schema).startswith("f: ")


def test_messages_name_the_field():
    item = typed_dict({"b": Annotated[int | None, Interval(ge=1, le=4096)], "type": str}, rest=None)
    schema = typed_dict({"a": list[item]}, {"u": str | list[int] | item, "t": tuple[int, int]})
    for value, message in {
        "{'a': [{'b': 1, 'type': ''}, {'b': 10**9, 'type': ''}]}": (
            "a[1].b is 1000000000: it must be at most 4,096"
        ),
        "{'a': [{'b': 'x', 'type': ''}]}": "a[0].b is 'x': it must be a whole number",
        "{'a': [{'b': 1}]}": "a[0] has no type",
        "{'a': [{'b': 1, 'type': '', 'c': 0}]}": "a[0] has a field 'c': known are b, type",
        "{'a': [3]}": "a[0] is 3: it must be a mapping",
        "{'a': [], 'u': True}": "u is true: it must be text or a list or a mapping",
        "{'a': [], 'u': [1, True]}": "u[1] is true: it must be a whole number",
        "{'a': [], 'u': {'b': 0, 'type': ''}}": "u.b is 0: it must be at least 1",
        "{'a': [], 'u': {'b': 1}}": "u has no type",
        "{'a': [], 't': [1]}": "t has 1 entry: it must have at least 2",
        "{'a': [], 't': [1, 2, 3]}": "t has 3 entries: it must have at most 2",
        "{'a': [], 't': [1, '']}": "t[1] is '': it must be a whole number",
        "{'a': [], '\\ud800': 1}": "it has a field named '\\ud800': a name must be text",
        "[]": "it is a list of 0: it must be a mapping",
        "{}": "it has no a",
    }.items():
        assert refused(gate.check_schema, eval(value), "f", schema) == f"f: {message}", value
    message = refused(gate.check_schema, {"tie_word_embeddings": "yes"}, "f", dict[str, bool])
    assert message == "f: tie_word_embeddings is 'yes': it must be true or false"


def test_a_million_wrong_values_are_one_error():
    """Of a list, a mapping, and other fields of a mapping: each error would take a kilobyte."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    names = dict.fromkeys(map(str, range(10**6)), "")
    for value, schema in (
        ([""] * 10**6, list[int]),
        (names, dict[str, int]),
        ([[""]] * 10**6, list[tuple[int]]),
        ({"a": [""] * 10**6}, typed_dict({"a": list[int] | list[float]})),
    ):
        assert "it must be a" in refused(gate.check_schema, value, "f", schema)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, "KiB"


def test_a_million_values_are_checked_in_a_second(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("{" + ",".join(f'"tok{i}": {i}' for i in range(300_000)) + "}")
    began = time.process_time()
    assert len(gate.read_json(file, kinds.VOCAB)) == 300_000
    assert time.process_time() - began < 3  # 0.4 s here


def test_yaml_that_promises_its_end(tmp_path):
    """Every part of it that is cut off at a line, or in its first, is refused."""
    file, whole = tmp_path / "a.yaml", gate.seal_yaml("a: 1\nb: 2\n")
    file.write_text(whole)
    assert gate.read_yaml(file, ANY) == {"a": 1, "b": 2}
    for end in range(1, len(whole)):
        file.write_text(whole[:end])
        assert "is truncated" in refused(gate.read_yaml, file, ANY), whole[:end]
