"""Configurations as plain values: the round trip, and what is refused by name."""

import math
from dataclasses import field, fields, replace
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from dolmen.core.config import (
    LARGEST,
    LocalName,
    Name,
    Positive,
    Seed,
    changed_options,
    config,
    from_dict,
    refuse_unreadable,
    require,
    to_dict,
)
from dolmen.families import ModelConfig, families
from dolmen.recipes import RECIPES
from dolmen.training.config import RunConfig
from dolmen.training.request import read_run, write_config

RUN = RunConfig(model=ModelConfig({"model_type": "llama"}))


@config()
class Inner:
    a: int = 1
    b: tuple[str, ...] = ()


@config()
class Outer:
    count: int = 3
    rate: float = 0.5
    on: bool = False
    name: str | None = None
    kind: Literal["x", "y", 1] = "x"
    marked: Annotated[int, "a mark"] = 2
    sizes: tuple[int, ...] | None = None
    inner: Inner = Inner()
    maybe: Inner | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.count < 0:
            raise ValueError(f"count is {self.count}")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_yaml(name):
    run = RECIPES[name]()
    assert from_dict(RunConfig, yaml.safe_load(yaml.safe_dump(to_dict(run)))) == run


def test_round_trip():
    made = Outer(
        5,
        1e-5,
        True,
        "n",
        "y",
        7,
        (1, 2),
        Inner(4, ("p", "q")),
        Inner(),
        {"k": [1, {"l": None}], "m": (1, 2)},
    )
    plain = to_dict(made)
    assert (
        plain["sizes"] == [1, 2]
        and plain["inner"] == {"a": 4, "b": ["p", "q"]}
        and plain["extra"]["m"] == [1, 2]
    )
    assert from_dict(Outer, plain) == Outer(
        **{**vars(made), "extra": {"k": [1, {"l": None}], "m": [1, 2]}}
    )
    assert from_dict(Outer, {}) == Outer()


def test_left_out_keys_keep_the_default_given():
    default = Outer(count=9, inner=Inner(a=8, b=("z",)), maybe=Inner(a=7))
    made = from_dict(Outer, {"inner": {"b": ["y"]}, "maybe": {"b": "x"}, "rate": 2}, default)
    assert (
        made == Outer(count=9, rate=2.0, inner=Inner(a=8, b=("y",)), maybe=Inner(a=7, b=("x",)))
        and type(made.rate) is float
    )
    assert from_dict(Outer, {"maybe": None}, default).maybe is None


def test_what_people_write():
    """Dashes for underscores, one value for a list of one, and YAML's 1e-3, which YAML reads as
    text.
    """
    made = from_dict(Outer, yaml.safe_load("rate: 1e-3\ninner: {b: one}\nsizes: 4\nkind: y"))
    assert (
        made.rate == 1e-3 and made.inner.b == ("one",) and made.sizes == (4,) and made.kind == "y"
    )
    assert from_dict(RunConfig, {"train": {"sequence-length": 8}}).train.sequence_length == 8


@pytest.mark.parametrize(
    "values, said",
    [
        ({"cuont": 1}, "unknown option cuont: did you mean count?"),
        ({"inner": {"c": 1, "z": 2}}, "unknown option inner.c: known are a, b"),
        ({"zzzzz": 1}, "unknown option zzzzz: known are count, rate"),
        ([1], "the configuration must be a mapping of options, not [1]"),
        ({"inner": 3}, "inner must be a mapping of options, not 3"),
        ({"inner": None}, "inner must be a mapping"),
        ({"count": "3"}, "--count is '3': it must be a whole number"),
        ({"count": 3.0}, "--count is 3.0: it must be a whole number"),
        ({"count": True}, "--count is True: it must be a whole number"),
        ({"count": None}, "--count is None: it must be a whole number"),
        ({"rate": True}, "--rate is True: it must be a number"),
        ({"rate": "x"}, "--rate is 'x': it must be a number"),
        ({"on": 1}, "--on is 1: it must be true or false"),
        ({"on": "yes"}, "--on is 'yes': it must be true or false"),
        ({"name": 5}, "--name is 5: it must be text"),
        ({"kind": "z"}, "--kind is 'z': use one of x, y, 1"),
        ({"kind": True}, "--kind is True: use one of x, y, 1"),
        ({"marked": "m"}, "--marked is 'm': it must be a whole number"),
        ({"sizes": ["a"]}, "--sizes is 'a': it must be a whole number"),
        ({"sizes": "a"}, "--sizes is 'a': it must be a whole number"),
        ({"maybe": {"a": "q"}}, "maybe.a is 'q': it must be a whole number"),
        ({"extra": 3}, "--extra is 3: it must be a mapping"),
        ({"count": -1}, "count is -1"),
    ],
    ids=str,
)
def test_refused_by_name(values, said):
    with pytest.raises(ValueError) as refusal:
        from_dict(Outer, values)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    "values, said",
    [
        (
            {"count": "a" * 200},
            f"count is '{'a' * 76}... (202 characters): it must be a whole number",
        ),
        ({"kind": "a" * 200}, f"--kind is '{'a' * 76}... (202 characters): use one of x, y, 1"),
        ({"rate": "a" * 200}, f"--rate is '{'a' * 76}... (202 characters): it must be a number"),
        ({"a" * 200: 1}, f"unknown option {'a' * 77}... (200 characters): known are count, rate"),
        ({"inner": [1] * 200}, f"not [{'1, ' * 25}1... (600 characters)"),
    ],
    ids=["int", "choice", "float", "key", "section"],
)
def test_a_long_value_is_cut(values, said):
    with pytest.raises(ValueError) as refusal:
        from_dict(Outer, values)
    assert said in str(refusal.value)


@config("ranges")
class Ranges:
    low: Positive = 1
    high: Annotated[int, Field(ge=0, lt=10)] | None = None
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    seed: Seed = 0
    names: tuple[Name, ...] = ()
    zero: Literal[0, 1] = 0
    inner: Inner = Inner()
    path: Name | None = None
    to: LocalName | None = None
    even: Annotated[int, require(lambda n: n % 2 == 0, "even")] = 0


@pytest.mark.parametrize(
    "values, said",
    [
        ({"path": ""}, "ranges.path is empty: give a name or None, or leave the option out"),
        ({"even": 3}, "ranges.even is 3: it must be even"),
        (
            {"to": "s3://a/b"},
            "ranges.to is 's3://a/b': it must be a path of this machine, not a URL",
        ),
        ({"low": 0}, "ranges.low is 0: it must be at least 1"),
        ({"low": True}, "ranges.low is True: it must be a whole number"),
        ({"low": 2**53 + 1}, "ranges.low is 9007199254740993: it must be at most 9,007,199,254,7"),
        ({"high": 10}, "ranges.high is 10: it must be less than 10"),
        ({"share": 0}, "ranges.share is 0: it must be over 0"),
        ({"share": math.nan}, "ranges.share is nan: it must be finite"),
        ({"share": math.inf}, "ranges.share is inf: it must be finite"),
        ({"share": "1e9"}, "ranges.share is '1e9': it must be at most 1"),
        ({"seed": 2**63}, "ranges.seed is 9223372036854775808: it must be at most 9,223,372,036"),
        ({"names": " "}, "ranges.names is empty: give a name, or leave the option out"),
        ({"names": "\ud800"}, "ranges.names is '\\ud800': UTF-8 cannot write it"),
        ({"zero": True}, "ranges.zero is True: use one of 0, 1"),
        ({"inner": {"a": "x"}}, "ranges.inner.a is 'x': it must be a whole number"),
        ({"lwo": 1}, "unknown option ranges.lwo: did you mean low?"),
    ],
    ids=str,
)
def test_a_value_is_checked_wherever_it_comes_from(values, said):
    """A file, construction from Python, and `replace`; a section has the name of its class."""
    makers = [lambda: Ranges(**values), lambda: from_dict(Ranges, values, path="ranges")]
    if "lwo" not in values:
        makers.append(lambda: replace(Ranges(low=2), **values))
    if "low" in values:
        makers.append(lambda: Ranges(values["low"]))  # without a keyword
    for make in makers:
        with pytest.raises(ValueError) as refusal:
            make()
        assert str(refusal.value).startswith(said)


def test_values_of_python_are_converted_as_those_of_a_file():
    made = Ranges(share="1e-3", names="a", seed=2**63 - 1)
    assert (made.share, made.names, made.seed) == (1e-3, ("a",), 2**63 - 1)
    assert type(Ranges(share=1).share) is float


def test_differences():
    old = to_dict(Outer(inner=Inner(b=("p",))))
    new = to_dict(Outer(count=4, inner=Inner(b=("q", "r")), name="n"))
    assert changed_options(old, new) == [
        "count: 3 -> 4",
        "name: None -> n",
        "inner.b: ['p'] -> ['q', 'r']",
    ]
    assert changed_options(old, old) == []
    assert changed_options({"a": 1}, {"b": {"c": 2}}) == ["a: 1 -> None", "b: None -> {'c': 2}"]


FIELDS = [
    (section, field.name, get_type_hints(type(getattr(RUN, section)))[field.name])
    for section in ("layout", "data", "optimizer", "train", "checkpoint", "log", "finish")
    for field in fields(getattr(RUN, section))
]
INTEGERS = st.one_of(
    st.integers(0, 64), st.sampled_from([2**n + d for n in (31, 53, 63, 64) for d in (-1, 0, 1)])
)
TEXT = st.text(st.characters(codec=None), max_size=8) | st.sampled_from(["null", "1e3", "0x1f"])
VALUES = {
    int: INTEGERS | INTEGERS.map(lambda n: -n),
    float: st.floats(),
    str: TEXT,
    bool: st.booleans(),
    dict[str, Any]: st.dictionaries(TEXT, INTEGERS | TEXT, max_size=2),
    tuple[str, ...]: st.lists(TEXT, max_size=2),
    tuple[int, ...]: st.lists(INTEGERS, max_size=2),
}


def _values(hint: Any) -> st.SearchStrategy:
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return st.one_of(*map(_values, get_args(hint)))
    return st.none() if hint is type(None) else VALUES.get(hint, st.just({}))


@pytest.mark.slow
@given(st.sampled_from(FIELDS).flatmap(lambda f: st.tuples(st.just(f), _values(f[2]))))
def test_what_is_accepted_is_read_back_equal(tmp_path_factory, drawn):
    """Any option, any value: refused, or the same again from the run's own config.yaml."""
    (section, name, _), value = drawn
    _same_again(tmp_path_factory, {section: {name: value}})


CONFIG_FIELDS = [
    (name, one.name) for name, family in families().items() for one in family.fields
] + [(name, unknown) for name in families() for unknown in ("mystery", "dolmen", "eos_token_id")]
PLAIN = st.recursive(
    st.none() | st.booleans() | INTEGERS | INTEGERS.map(lambda n: -n) | st.floats() | TEXT,
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(TEXT, inside, max_size=2),
    max_leaves=4,
)


@pytest.mark.slow
@given(st.sampled_from(CONFIG_FIELDS), PLAIN)
def test_a_model_that_is_accepted_is_read_back_equal(tmp_path_factory, drawn, value):
    """Any field of its config.json, any value: refused, or the same again from config.yaml."""
    model_type, name = drawn
    _same_again(tmp_path_factory, {"model": {"model_type": model_type, name: value}})


def _same_again(tmp_path_factory, changes: dict) -> None:
    try:
        run = from_dict(RunConfig, changes, RUN)
    except ValueError:
        return
    out = tmp_path_factory.getbasetemp() / "written"
    write_config(out, run)
    assert read_run(out / "config.yaml") == run


def test_a_value_with_a_form_of_its_own():
    """A model is in a file what it says, and its refusals name the section."""
    assert to_dict(RUN)["model"] == {"model_type": "llama"}
    pasted = "model: {model_type: llama, rms_norm_eps: 1e-05, rope_parameters: {rope_theta: 1e6}}"
    model = from_dict(RunConfig, yaml.safe_load(pasted)).model
    assert model.config["rms_norm_eps"] == 1e-5  # which YAML reads as text
    assert model.config["rope_parameters"] == {"rope_theta": 1e6}
    for model, said in (
        ({"model_type": "t5"}, "model: model_type is 't5'"),
        ([], "model: it must be a config.json"),
    ):
        with pytest.raises(ValueError, match=said):
            from_dict(RunConfig, {"model": model})


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(-2 * LARGEST, 2 * LARGEST),
    st.text(st.characters(exclude_characters="\x85\u2028\u2029"), max_size=4),
    st.sampled_from([math.nan, LARGEST, -LARGEST, LARGEST + 1, -LARGEST - 1, "\ud800"]),
)
PLAIN = st.recursive(
    SCALARS,
    lambda inside: (
        st.lists(inside, max_size=3) | st.dictionaries(st.text("ab\ud800"), inside, max_size=3)
    ),
    max_leaves=4,
)


def readable(value: Any) -> bool:
    """`refuse_unreadable` by its definition: what UTF-8, 64 bits and equality can carry."""
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else []
        inside = value.values() if isinstance(value, dict) else value
        return all(map(readable, [*keys, *inside]))
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    return value == value and not (isinstance(value, int) and abs(value) > LARGEST)


@given(PLAIN)
def test_a_plain_value_is_refused_or_read_back_the_same(value):
    """At any depth, among keys too; the message names the option."""
    if readable(value):
        refuse_unreadable("model", value)
        written = yaml.safe_dump({"model": value}, allow_unicode=True).encode()
        assert yaml.safe_load(written) == {"model": value}
    else:
        with pytest.raises(ValueError, match="^model"):
            refuse_unreadable("model", value)
