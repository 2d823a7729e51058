"""Declaration of a model family: how its config.json is parsed into a `ModelSpec`
(dolmen/model/spec) and written from one, and its weight rules.

    config.json --fields: names, limits, defaults--> all fields --read--> ModelSpec
    ModelSpec --write--> the fields that state it, in the spelling of transformers 5

A field can have three kinds of names: its own, aliases that transformers accepts in a file too, and
names of other families that only the command line accepts. A config.json keeps the spelling it came
with; fields of dolmen's own are under the key "dolmen" and are removed on export. Nothing here
imports torch, because the options of the command line are built from the fields.
"""

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from typing_extensions import is_typeddict

from dolmen.core.config import plain_type
from dolmen.core.messages import brief, did_you_mean
from dolmen.families.rules import Rule
from dolmen.files import kinds
from dolmen.files.schema import typed_dict
from dolmen.model.spec import ClampedSwiGLU, ModelSpec
from dolmen.model.spec.layers import Activation

INHERITED = (*kinds.SPECIAL_TOKENS, "dtype", "torch_dtype", "tie_word_embeddings")


@dataclass(frozen=True)
class OuterModel:
    """The multimodal model that contains a family's model as its text model, and how to find this
    one in its files.
    """

    model_type: str
    field: str
    """Field of the outer config.json that holds this model's."""
    prefixes: Mapping[str, str]
    """Prefixes of its stored names in the outer checkpoint -> in a checkpoint of its own."""
    other_prefixes: tuple[str, ...]
    """Prefixes of tensors of the other parts (vision tower, projector), which are skipped."""

    def inner(self, content: Mapping[str, Any], model_type: str) -> dict[str, Any]:
        """Return the text model's config.json from the multimodal one (`content`), with the special
        tokens and dtype that it inherits, and `model_type` as its own. Raises ValueError if
        `content` lacks it.
        """
        field_value = content.get(self.field)
        if not isinstance(field_value, dict):
            raise ValueError(
                f"{self.field} is {brief(field_value)}: it must be the config.json of a model"
            )
        # the inner config.json wins where both state a field
        carried = {name: content[name] for name in INHERITED if name in content}
        return {**carried, **field_value, "model_type": model_type}

    def name(self, stored: str) -> str:
        """Return the name that a tensor of the multimodal checkpoint has in a checkpoint of the
        text model alone; unchanged if it has none of the known prefixes.
        """
        # the first prefix that fits
        for before, now in self.prefixes.items():
            if stored.startswith(before):
                return now + stored.removeprefix(before)
        return stored


T = TypeVar("T")
Ids = Mapping[str, int]
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}

ACTIVATION = Literal[*ACTIVATIONS]  # what a field that names one may hold

RESERVED = "dolmen"  # field of what no config.json can say; not exported

# Fields of any config.json whose other values change the function: only these are supported.
ONLY: dict[str, tuple] = {
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "per_layer_config": ({}, None),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False, None),
}

# Fields of any config.json that do not change the function of a decoder; names that start with "_"
# are harmless too.
HARMLESS = frozenset(
    """
    architectures model_type transformers_version dtype torch_dtype use_cache is_decoder return_dict
    use_return_dict torchscript output_hidden_states output_attentions output_scores
    return_dict_in_generate use_bfloat16 tf_legacy_loss prefix chunk_size_feed_forward
    tie_encoder_decoder finetuning_task task_specific_params problem_type tokenizer_class id2label
    label2id num_labels name_or_path attn_implementation gradient_checkpointing
    tie_last_hidden_states bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id max_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens attention_dropout pretraining_tp auto_map
    quantization_config""".split()
)


@dataclass(frozen=True)
class Field:
    """A field of config.json that the family reads: name, type, default, and the option that sets
    it.
    """

    name: str
    kind: Any
    """Type hint of the allowed values. The type of the command-line option follows from it."""
    default: Any = None
    """Default of an absent field: that of the config class in transformers."""
    help: str = ""
    """Help text of the option; without it the field is read but is no option."""
    aliases: tuple[str, ...] = ()
    """Other names that transformers accepts for it in a config.json, and the command line too."""
    common: tuple[str, ...] = ()
    """Names that other families or dolmen before have for it: for the command line alone."""
    nested: "tuple[Field, ...]" = ()
    """Fields of a mapping, each an option."""
    spell: Callable[[Mapping[str, Any], Any], dict[str, Any]] | None = None
    """(config.json, value) -> the entries that state the value, for a field that files spell in
    several ways.
    """
    ours: bool = False
    """Dolmen's own field: it is nested under "dolmen", and not exported."""


def mapping(name: str, *inside: Field, spell: Callable | None = None, ours: bool = False) -> Field:
    """Return a config.json Field whose value is null or a mapping of the fields `inside`. `spell`
    and `ours`: as in `Field`.
    """
    kind = typed_dict({}, {field.name: field.kind for field in inside}) | None
    return Field(name, kind, nested=inside, spell=spell, ours=ours)


# Field of families whose files may leave out the prefix of names; exports then leave it out too.
BARE = Field(
    "bare_names", bool, False, "Names of tensors leave out what they begin with.", ours=True
)


@dataclass(frozen=True)
class Family:
    """One family of models."""

    model_type: str
    """`model_type` of its config.json."""
    title: str
    """Names of its models, for messages and documentation."""
    architecture: str
    """Class named in an exported config.json: of transformers, or (not `in_transformers`) of the
    code published with the weights.
    """
    fields: tuple[Field, ...]
    """Every field that `read` looks at."""
    read: Callable[[dict[str, Any]], ModelSpec]
    """(config with defaults filled in, under the family's own names) -> its spec. Raises
    ValueError, naming the field, for what cannot be computed.
    """
    rules: Callable[[ModelSpec], list[Rule]]
    """spec -> its weight rules, which name the embedding `embed` and the head `head`."""
    write: Callable[[ModelSpec], dict[str, Any]] = lambda spec: {}
    """spec -> those config.json fields that determine it and that `common.write` does not state.
    Raises ValueError for a spec of other components; other losses show when the fields are read
    back (`model_from_spec`).
    """
    only: dict[str, tuple] = field(default_factory=dict)
    """Other fields that change what the model computes -> their supported values, the usual one
    first.
    """
    harmless: str = ""
    """Names of other fields that do not change what the model computes, between spaces."""
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Harmless fields that a new config.json states, with their values."""
    ignored: tuple[str, ...] = ()
    """Patterns of stored buffers that are recomputed, not parameters."""
    remote_code: tuple[str, ...] = ()
    """Names of remote-code files in auto_map that compute the same as dolmen, so that they may be
    ignored.
    """
    dropped_layers_field: str | None = None
    """Field with the number of stored layers after the last that are no part of the decoder
    (multi-token prediction): they are dropped with a warning.
    """
    assume: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """(config with defaults) -> the dolmen fields that it leaves open and the values assumed for
    them, with a warning.
    """
    legacy_suffixes: dict[str, str] = field(default_factory=dict)
    """Suffix of stored names in older files -> its current form."""
    outer: OuterModel | None = None
    """Multimodal model that contains this one as its text model."""
    prefix: str = ""
    """Prefix of stored names that some files leave out."""
    registry_name: str | None = None
    """Name of the family if another one shares its model_type; None: the model_type is its name."""
    matches: Callable[[Mapping[str, Any]], bool] | None = None
    """For families that share a model_type: (config.json) -> whether it belongs to this one. None:
    it does if no other family matches.
    """
    marker_fields: dict[str, Any] = field(default_factory=dict)
    """Fields added to a new config.json so that `matches` recognises it."""
    frame: Callable[[list[int], Ids], list[int]] | None = None
    """(prompt's token ids, special token ids by key) -> the prompt with the special tokens that the
    published code adds; None: the tokenizer adds them.
    """
    in_transformers: bool = True
    """True if transformers has a class for it."""
    stores_tied_head: bool = False
    """Files store the head's tensor even if it is tied to the embedding."""
    scorer: str | None = ""
    """transformers' class with a bias-free `score` head; "": the ...ForSequenceClassification of a
    ...ForCausalLM in transformers; None: there is none.
    """

    @property
    def name(self) -> str:
        """Name of the family in the registry: its model_type, unless families share that."""
        return self.registry_name or self.model_type

    @property
    def scorer_class(self) -> str | None:
        """Name of transformers' class for this family with a bias-free `score` head (reward and
        value models); None: there is none.
        """
        stem = self.architecture.removesuffix("ForCausalLM")
        if self.scorer == "" and (stem == self.architecture or not self.in_transformers):
            return None
        return f"{stem}ForSequenceClassification" if self.scorer == "" else self.scorer

    @cached_property
    def schema(self) -> Any:
        """Type hint that a config.json of the family is checked against: model_type (required), and
        where present its fields under each of their names, special tokens, dtype, auto_map, labels,
        and dolmen's own fields under "dolmen", where unknown keys are errors.
        """
        fields = {n: f.kind for f in self.fields if not f.ours for n in (f.name, *f.aliases)}
        # under "dolmen", where unknown keys are errors
        ours = {f.name: f.kind for f in self.fields if f.ours}
        other_names = {
            RESERVED: typed_dict({}, ours, rest=None),
            **kinds.SPECIAL_TOKENS,
            **dict.fromkeys(("dtype", "torch_dtype"), kinds.NAME | None),
            "auto_map": dict[str, kinds.NAME | list[kinds.NAME | None]] | None,
            "id2label": dict[Any, Any] | None,
        }
        return typed_dict({"model_type": kinds.NAME}, fields | other_names)

    @property
    def aliases(self) -> dict[str, str]:
        """Alias accepted in a config.json -> the family's own name of the field."""
        return {alias: field.name for field in self.fields for alias in field.aliases}

    @property
    def names(self) -> dict[str, str]:
        """Every name of a field (its own, aliases, and those for the command line) -> its own name;
        for a field inside another one, `rope_parameters.factor`.
        """
        mapping = names(self.fields)
        for outer in self.fields:
            for inner in outer.nested:
                path = f"{outer.name}.{inner.name}"
                # rope_parameters.factor, rope.factor -> rope_parameters.factor
                mapping |= dict.fromkeys((path, *inner.common), path)
        return mapping


def names(fields: Iterable[Field]) -> dict[str, str]:
    """Return every name of each of `fields` (its own, aliases, common names) -> its own name."""
    return {
        name: field.name for field in fields for name in (field.name, *field.aliases, *field.common)
    }


def flag(name: str) -> str:
    """Return the command-line option that sets a field: --model.hidden-size for hidden_size."""
    return f"--model.{name.replace('_', '-')}"


# Fields of a new config.json: special tokens are unknown before there is a tokenizer.
BESIDE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": True}


def activation(config: Mapping[str, Any], field: str) -> Activation:
    """Return dolmen's name of the activation (such as gelu_tanh) that the config's `field` names in
    transformers' terms.
    """
    return ACTIVATIONS[config[field]]


def activation_name(ours: Activation | ClampedSwiGLU) -> str:
    """Return transformers' name of one of dolmen's activations, for a new config.json. Raises
    ValueError for ClampedSwiGLU, which has no name there.
    """
    if isinstance(ours, ClampedSwiGLU):
        raise ValueError(f"activation = {ours} (it has {', '.join(ACTIVATIONS)})")
    return "gelu_pytorch_tanh" if ours == "gelu_tanh" else ours


def expect(value: object, kind: type[T], what: str) -> T:
    """Return `value` if it is an instance of `kind`. Raises ValueError otherwise, naming it `what`:
    the family cannot express anything else.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{what} = {value} (it can only express {kind.__name__})")
    return value


def canonical_names(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with aliases of fields replaced by the family's own names."""
    return {family.aliases.get(name, name): value for name, value in config.items()}


def fill_defaults(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields of a config.json under the family's own names: absent ones at their
    defaults, and those nested under "dolmen" at the top level. Unknown fields stay. Not idempotent:
    dolmen's own fields at the top level of `config` are dropped.
    """
    ours = {RESERVED, *(field.name for field in family.fields if field.ours)}
    unchanged = {n: v for n, v in canonical_names(family, config).items() if n not in ours}
    # later ones win: defaults, then what the file states, then dolmen's own fields
    return {**{f.name: f.default for f in family.fields}, **unchanged, **config.get(RESERVED, {})}


def nest_own_fields(family: Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` as a config.json has them: dolmen's own fields nested under "dolmen". The
    inverse of what `fill_defaults` does with them.
    """
    ours = {field.name for field in family.fields if field.ours} & fields.keys()
    stated = {name: fields[name] for name in fields if name in ours}
    rest = {name: value for name, value in fields.items() if name not in ours}
    return {**rest, RESERVED: {**rest.get(RESERVED, {}), **stated}} if stated else rest


def _spellings(field: Field, config: Mapping[str, Any]) -> list[str]:
    """Return those names of the field, its own first, that the config contains."""
    return [name for name in (field.name, *field.aliases) if name in config]


def check_one_spelling(field: Field, config: Mapping[str, Any]) -> None:
    """Raise ValueError if the config states the field under two names with different values."""
    stated = [(name, config[name]) for name in _spellings(field, config)]
    for name, value in stated[1:]:
        first, before = stated[0]
        if value != before:
            raise ValueError(
                f"{first} is {before!r} and {name} is {value!r}: they are two names of one field, "
                "state one of them"
            )


def spell_field(field: Field, config: Mapping[str, Any], value: Any) -> dict[str, Any]:
    """Return the config.json entries that set `field` to `value`, under each name of the field that
    the config uses; under its own name if it uses none. Dolmen's own fields are nested under
    "dolmen".
    """
    # the family spells it in a way of its own, such as rope
    if field.spell is not None:
        return field.spell(config, value)
    if field.ours:
        return {RESERVED: {**config.get(RESERVED, {}), field.name: value}}
    # all spellings in the file, so that none keeps the old value
    return dict.fromkeys(_spellings(field, config) or [field.name], value)


def parse_numbers(value: Any, hint: Any) -> Any:
    """Return `value` with strings such as "1e-05" converted to floats, also inside mappings, where
    the type hint is a float: YAML reads them as text, JSON as numbers. Other text is unchanged.
    """
    if isinstance(value, str) and plain_type(hint) is float:
        with suppress(ValueError):
            return float(value)
    if isinstance(value, dict) and is_typeddict(plain_type(hint)):
        hints = get_type_hints(plain_type(hint))
        return {name: parse_numbers(item, hints.get(name)) for name, item in value.items()}
    return value


# The registry of families: every `Family` that a module of this package defines.

HERE = Path(__file__).parent


@cache
def families() -> dict[str, Family]:
    """Return name -> family for every `Family` value that a module of this package defines, sorted
    by name; cached.
    """
    modules = [
        # a new family is a new module here, and no other line
        import_module(f"dolmen.families.{file.name}")
        for file in pkgutil.iter_modules([str(HERE)])
    ]
    known = {v.name: v for module in modules for v in vars(module).values() if type(v) is Family}
    return dict(sorted(known.items()))


def find_family(name: Any) -> Family:
    """Return the family of that name. Raises ValueError that lists similar names, or all."""
    if isinstance(name, str) and name in families():
        return families()[name]
    hint = did_you_mean(str(name), families(), f"dolmen knows {', '.join(families())}")
    raise ValueError(f"model_type is {brief(name)}: {hint} (dolmen families lists them)")


def text_config(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the text model's config.json from that of a multimodal model; None if `content` is not
    of a multimodal model that contains a known family. Raises ValueError if its text part is
    missing.
    """
    for family in families().values():
        if family.outer is not None and family.outer.model_type == content.get("model_type"):
            return family.outer.inner(content, family.model_type)
    return None


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family that reads a config.json: of families that share its model_type the one
    whose `matches` accepts it, else the one without `matches`. Raises ValueError if model_type is
    missing or unknown.
    """
    if config.get("model_type") is None:
        raise ValueError(
            "model_type is missing: set it to the model's family, one of " + ", ".join(families())
        )
    model_type = config["model_type"]
    candidates = [family for family in families().values() if family.model_type == model_type]
    for family in candidates:
        if family.matches is not None and family.matches(config):
            return family
    # at most one family of a model_type has no `matches`
    rest = [family for family in candidates if family.matches is None]
    return rest[0] if rest else find_family(model_type)
