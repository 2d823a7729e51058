"""`ModelConfig`: a config.json and the spec it parses to. Edits change fields of the config.json,
under the names that it uses, and never the spec: runs store and exports write that config.json.

    ModelConfig(config).spec                  parse
    model_from_spec(spec, "mistral")          a config.json of this spec, checked by parsing it back
    replace_fields(model, {"n_embd": 64})     the same config.json with other fields
    edit(model, vocab_size=50304)             the same, for what any family has

A model with a scalar head (reward or value) names transformers' ...ForSequenceClassification class
and one label.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dolmen.core.config import CustomValue
from dolmen.core.messages import brief
from dolmen.families import common
from dolmen.families.differences import differences
from dolmen.families.family import (
    ONLY,
    RESERVED,
    Family,
    canonical_names,
    check_one_spelling,
    families,
    family_of,
    fill_defaults,
    find_family,
    flag,
    nest_own_fields,
    parse_numbers,
    spell_field,
)
from dolmen.files import kinds
from dolmen.files.schema import Mismatch, check_value
from dolmen.model.spec import ModelSpec, ScalarHeadSpec

ENDING = "ForSequenceClassification"
LABELS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
"""Label maps of one label, as transformers writes them."""
TRANSFORMERS = 2  # labels, where a config.json states none


def has_scalar_head(config: Mapping[str, Any], family: Family) -> bool:
    """Return whether a config.json describes a model with a scalar head (reward or value model), by
    its architectures. Raises ValueError for a classifier of several labels, and for a class that is
    not the family's own.
    """
    # only the class name distinguishes a reward model from a language model
    named = config.get("architectures") or []
    if not (isinstance(named, list) and any(str(name).endswith(ENDING) for name in named)):
        return False
    check_scorer(family)
    if named != [family.scorer_class]:
        raise ValueError(
            f"architectures is {brief(named)}: the only {family.name} with a scalar head is "
            f"{family.scorer_class}"
        )
    # transformers derives the number of labels from id2label, and only then from num_labels
    labels = config.get("id2label")
    count = config.get("num_labels", TRANSFORMERS) if labels is None else len(labels)
    if count != 1:
        raise ValueError(
            f"num_labels is {brief(count)}: only classifiers with one label (reward models) are "
            "supported"
        )
    return True


def check_scorer(family: Family) -> None:
    """Raise ValueError if transformers has no ...ForSequenceClassification class with a bias-free
    scalar head for the family.
    """
    if family.scorer_class is None:
        raise ValueError(
            f"transformers has no {family.name} with a scalar head without bias: choose a model "
            "of another family, such as llama, qwen2 or gpt2"
        )


def scorer_config(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the config.json of the same model with a scalar head in place of the LM head. Raises
    ValueError as `check_scorer`.
    """
    check_scorer(family)
    return {
        **{name: value for name, value in config.items() if name != "num_labels"},
        "architectures": [family.scorer_class],
        **LABELS,
    }


def lm_config(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the config.json of the same model with an LM head: the inverse of `scorer_config`."""
    fields = {name: value for name, value in config.items() if name not in LABELS}
    return {**fields, "architectures": [family.architecture]}


CARRIED = (*kinds.SPECIAL_TOKENS, "dtype")  # to another family
TUNED = ("initializer_range", "router_aux_loss_coef")  # by training or its start alone


@dataclass(frozen=True)
class ModelConfig(CustomValue):
    """A model, described by its config.json. Raises ValueError, with field and value, for a field
    that changes what is computed and is not supported; unknown fields are kept (`unknown_fields`).
    Dropout in the config.json is ignored.
    """

    config: dict[str, Any]
    """All fields of the config.json. Do not change it: `replace_fields` returns an edited model."""

    def __post_init__(self):
        """Parse the config.json at once, so that an unsupported field raises ValueError here."""
        _ = self.spec  # parsed at once, so that an unsupported field is refused here

    @property
    def model_type(self) -> str:
        """Name of the family, which may differ from the config's `model_type`."""
        return self.family.name

    @property
    def family(self) -> Family:
        """Family that reads the config.json. Raises ValueError if there is none."""
        return family_of(self.config)

    @property
    def dtype(self) -> str:
        """Name of the dtype the config.json states for the weights; float32 if none."""
        return self.config.get("dtype") or self.config.get("torch_dtype") or "float32"

    @cached_property
    def spec(self) -> ModelSpec:
        """Spec that the config.json parses to, computed once. Raises ValueError for a config.json
        of the wrong schema or with unsupported values.
        """
        family = self.family
        try:
            check_value(self.config, family.schema)
        except Mismatch as error:
            # a schema mismatch names field and value itself
            raise ValueError(str(error)) from None
        self._check_fields()
        # schema and unsupported values are checked before `read`, which relies on kinds
        spec = check_matrix_count(family.read(fill_defaults(family, self.config)))
        return (
            replace(spec, head=ScalarHeadSpec()) if has_scalar_head(self.config, family) else spec
        )

    def _check_fields(self) -> None:
        """Raise ValueError for a config.json that states two different values of a field, requires
        remote code or quantised weights, or gives a field that `read` does not handle an
        unsupported value.
        """
        config, family = self.config, self.family
        for field in family.fields:
            check_one_spelling(field, config)
        # code that is known to compute the same is ignored; any other is refused
        if _remote_code_files(config.get("auto_map") or {}) - {*family.remote_code}:
            raise ValueError(
                f"auto_map is {brief(config['auto_map'])}: code from model folders is never run "
                "(trust_remote_code); use a model saved with a class of transformers"
            )
        if config.get("quantization_config"):
            raise ValueError(
                f"quantization_config is {brief(config['quantization_config'])}: only unquantised "
                "weights are supported; transformers can save them (load with dequantize=True in "
                "the quantization_config, if the method has it)"
            )
        # fields that `read` handles have their own checks
        stated, read = canonical_names(family, config), {field.name for field in family.fields}
        for name, allowed in {**ONLY, **family.only}.items():
            if name not in read and name in stated and stated[name] not in allowed:
                raise ValueError(
                    f"{name} is {brief(stated[name])}: dolmen's {family.name} supports only "
                    f"{allowed[0]!r}"
                )

    def export_config(self) -> dict[str, Any]:
        """Return a copy of the config.json for other programs: without dolmen's own fields and
        `auto_map`.
        """
        return {n: deepcopy(v) for n, v in self.config.items() if n not in (RESERVED, "auto_map")}

    def plain(self) -> dict[str, Any]:
        """Return a copy of the whole config.json, dolmen's own fields included, to be stored with a
        run.
        """
        return deepcopy(self.config)

    @classmethod
    def from_plain(cls, value: Any) -> "ModelConfig":
        """Return the model of a config.json read from a run's YAML, where 1e-05 is text. Raises
        ValueError as ModelConfig does, and for a value that is no mapping.
        """
        if not isinstance(value, dict):
            raise ValueError(f"it must be a config.json, a mapping, not {brief(value)}")
        return cls(parse_numbers(deepcopy(value), family_of(value).schema))


def check_matrix_count(spec: ModelSpec) -> ModelSpec:
    """Return `spec` unchanged. Raises ValueError if layers x experts exceed the limit on matrices:
    checked before parameters are listed, as a hostile config.json could have billions.
    """
    layers, experts = spec.layers, spec.experts
    if (matrices := layers * max(1, experts)) > kinds.MOST_MATRICES:
        raise ValueError(
            f"num_hidden_layers ({layers:,}) x experts ({experts:,}) are {matrices:,}, more than "
            f"{kinds.MOST_MATRICES:,}"
        )
    return spec


def explicit_fields(model: ModelConfig) -> dict[str, Any]:
    """Return every field that the family reads, under its own name, with an explicit value in
    transformers 5's spelling: absent ones filled in, and those derived from others computed.
    """
    stated = fill_defaults(model.family, model.config)
    written = common.write(model.family, model.spec)
    for field in model.family.fields:
        if field.ours and field.nested:  # states more than the spec keeps
            written[field.name] = {
                **(stated[field.name] or {}),
                **(written.get(field.name) or {}),
            } or None
    return {**stated, **written}


def model_from_spec(
    spec: ModelSpec, model_type: str, carried: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Return a model of the family `model_type` whose spec is `spec`, with the fields `carried`
    added to its config.json. Raises ValueError, naming what the family cannot express: the new
    config.json is parsed back and compared with `spec`.
    """
    family = find_family(model_type)
    try:
        # marker fields distinguish families that share a model_type
        fields = {
            "model_type": family.model_type,
            **family.marker_fields,
            **common.write(family, spec),
        }
        if isinstance(spec.head, ScalarHeadSpec):
            fields = scorer_config(fields, family)
        model = add_standard_fields(
            ModelConfig(nest_own_fields(family, {**fields, **deepcopy(dict(carried or {}))}))
        )
        # what the family cannot say would be lost silently: compare with what it reads back
        if lost := differences(spec, model.spec):
            raise ValueError(
                "; ".join(f"{n} = {a} (it would read back as {b})" for n, a, b in lost)
            )
    except ValueError as error:
        raise ValueError(
            f"family {model_type} cannot express {error}: set {flag('model_type')} to one that "
            f"can, of {', '.join(families())}"
        ) from None
    return model


def add_standard_fields(model: ModelConfig) -> ModelConfig:
    """Return the model with fields that transformers states besides structure, where absent:
    architectures, dtype float32 (not beside torch_dtype), and the family's `extra_fields`, such as
    special tokens and a dropout of 0.
    """
    family = model.family
    defaults = {
        "architectures": [family.architecture],
        "dtype": "float32",
        **deepcopy(family.extra_fields),
    }
    stated = {"dtype"} if "torch_dtype" in model.config else set()
    return ModelConfig({**{n: v for n, v in defaults.items() if n not in stated}, **model.config})


def model_from_fields(model_type: str, fields: Mapping[str, Any]) -> ModelConfig:
    """Return a model of the family with these fields (own names; `rope_parameters.factor` for one
    inside another) and its defaults, all stated in the config.json. Raises ValueError for an
    impossible model.
    """
    bare = replace_fields(ModelConfig({"model_type": model_type}), fields)
    return model_from_spec(bare.spec, model_type, {n: v for n, v in fields.items() if "." not in n})


def convert_family(model: ModelConfig, model_type: str) -> ModelConfig:
    """Return the model with the same spec as a config.json of another family, special tokens and
    dtype kept. Raises ValueError as `model_from_spec`.
    """
    carried = {name: model.config[name] for name in CARRIED if name in model.config}
    return model_from_spec(model.spec, model_type, {**carried, "dtype": model.dtype})


def assumed_fields(model: ModelConfig) -> dict[str, Any]:
    """Return dolmen's own fields that the config.json leaves open, with the values assumed for
    them; {} if it leaves none open.
    """
    family = model.family
    return {} if family.assume is None else family.assume(fill_defaults(family, model.config))


def replace_fields(model: ModelConfig, fields: Mapping[str, Any]) -> ModelConfig:
    """Return the model with other values of `fields`, by the family's own names
    (`rope_parameters.factor` for a field inside another one). If anything changes, assumed fields
    become explicit, so that the model stays what it was taken for. Raises ValueError for an
    impossible model, and KeyError for an unknown name.
    """
    known_fields = {field.name: field for field in model.family.fields}
    whole: dict[str, Any] = {}
    for path, value in fields.items():
        name, _, inner = path.partition(".")
        field = known_fields[name]
        if inner:
            before = whole.get(name) or explicit_fields(model)[name] or {}
            # one field inside a mapping changes, the others are kept
            value = {**before, inner: value}
        whole[field.name] = value
    config = deepcopy(model.config)
    # an assumption follows from other fields, which now change
    if whole and (open_before := assumed_fields(model)):
        config[RESERVED] = {**config.get(RESERVED, {}), **open_before}
    for name, value in whole.items():
        config |= spell_field(known_fields[name], config, deepcopy(value))
    return ModelConfig(config)


def set_fields(model: ModelConfig, fields: Mapping[str, Any]) -> ModelConfig:
    """Return the model with other values of `fields`, by any of their names. Raises ValueError for
    an impossible model, and for a field that the family lacks.
    """
    names = model.family.names
    if unknown := [name for name in fields if name not in names]:
        raise ValueError(
            f"{model.model_type} has no field {brief(unknown[0])}: it has {', '.join(names)}"
        )
    return replace_fields(model, {names[name]: value for name, value in fields.items()})


def edit(
    model: ModelConfig,
    *,
    vocab_size: int | None = None,
    tie: bool | None = None,
    dtype: str | None = None,
    context: int | None = None,
    **special: int | list[int],
) -> ModelConfig:
    """Return the model with another vocabulary size, tied or untied head, stated dtype, longest
    sequence, or special token ids (`bos_token_id`, `eos_token_id`, `pad_token_id`); unset arguments
    change nothing. Raises ValueError for another keyword, or a value that the model cannot have.
    """
    unknown = sorted(special.keys() - kinds.SPECIAL_TOKENS.keys())
    if unknown:
        raise ValueError(
            f"edit: {unknown[0]} is unknown; special tokens are {', '.join(kinds.SPECIAL_TOKENS)}"
        )
    names = model.family.names
    fields = {"vocab_size": vocab_size, "tie_word_embeddings": tie}
    if context is not None:
        # RoBERTa: the field counts pad_token_id + 1 rows that no position uses
        fields["max_position_embeddings"] = context + _rows_before(model)
    edited = replace_fields(
        model, {names[n]: value for n, value in fields.items() if value is not None}
    )
    extra: dict[str, Any] = {**special}
    if dtype is not None:
        stated = [name for name in ("dtype", "torch_dtype") if name in model.config] or ["dtype"]
        extra |= dict.fromkeys(stated, dtype)
    return ModelConfig({**edited.config, **extra}) if extra else edited


def with_scalar_head(model: ModelConfig) -> ModelConfig:
    """Return the model with a scalar head in place of its LM head; unchanged if it has one. Raises
    ValueError for a family of which transformers has no such class.
    """
    ends = isinstance(model.spec.head, ScalarHeadSpec)
    return model if ends else ModelConfig(scorer_config(model.config, model.family))


def with_lm_head(model: ModelConfig) -> ModelConfig:
    """Return the model with an LM head in place of a scalar head; unchanged if it has one."""
    ends = isinstance(model.spec.head, ScalarHeadSpec)
    return ModelConfig(lm_config(model.config, model.family)) if ends else model


def _rows_before(model: ModelConfig) -> int:
    """Return how much the field max_position_embeddings exceeds the longest sequence: 0 but for
    RoBERTa, whose table has rows that no position uses.
    """
    stated = explicit_fields(model)[model.family.names["max_position_embeddings"]]
    return stated - model.spec.max_position_embeddings


def training_fields(model: ModelConfig) -> frozenset[str]:
    """Return the fields, by the family's own names, that only initialisation or training uses: the
    model computes the same whatever they are.
    """
    names = model.family.names
    return frozenset(names[name] for name in TUNED if name in names)


def compare_fields(first: ModelConfig, second: ModelConfig) -> list[tuple[str, Any, Any]]:
    """Return (name, first value, second value) of each difference between two models: the family,
    and the structural fields that both families have, under the names of the first. Spelling does
    not matter.
    """
    # compared by what both specs say, not by spelling
    names, theirs = second.family.names, common.write(second.family, second.spec)
    pairs = [("model_type", first.model_type, second.model_type)]
    pairs += [
        (name, value, theirs[names[name]])
        for name, value in common.write(first.family, first.spec).items()
        if names.get(name) in theirs
    ]
    return [pair for pair in pairs if pair[1] != pair[2]]


def _remote_code_files(auto_map: Mapping[str, Any]) -> set[str]:
    """Return the names of the Python files that a config.json's `auto_map` would run: "modeling_x"
    for "x/y--modeling_x.Class".
    """
    classes = [
        name for value in auto_map.values() for name in (value if type(value) is list else [value])
    ]
    return {name.split("--")[-1].split(".")[0] for name in classes if name is not None}
