"""Declared families: a config.json is a ModelConfig and back, and every stored tensor has a rule.

from_hf(config.json) -> ModelConfig -> to_hf -> the same config.json, field for field
weight_map(ModelConfig) -> which of our parameters each stored tensor holds, for importer and
exporter alike
"""

import re
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

from dolmen.families import gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from dolmen.families.family import HARMLESS, ONLY, Family
from dolmen.families.llama_like import ROPE_FIELDS
from dolmen.families.rules import Entry, Shape, disagreeing_fields, entries
from dolmen.files import kinds
from dolmen.files.schema import Mismatch, Object, check
from dolmen.model.config import ModelConfig

FAMILIES = {
    module.FAMILY.model_type: module.FAMILY
    for module in (gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe)
}
EXPERTS = (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "dense_layers",
    "router_aux_loss_coef",
)
# no part of the function
TRAINING = ("dropout", "router_balance", "router_z_loss_coef", "router_bias_rate")
CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id")  # to another family


def find(model_type: Any) -> Family:
    """The family of that name. Raises ValueError listing the known ones."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type is {model_type!r}: dolmen knows {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def from_hf(hf: dict[str, Any]) -> ModelConfig:
    """Structure of a config.json of transformers 4 or 5, kept whole in `ModelConfig.hf`. Dropout is
    0 whatever it says. Raises ValueError with field and value for what would change the function
    and is not supported; fields never heard of are kept, see `unknown_fields`.
    """
    family = find(hf.get("model_type"))
    try:
        check(hf, schema(family))
    except Mismatch as error:
        raise ValueError(str(error)) from None
    if hf.get("auto_map"):
        raise ValueError(
            f"auto_map is {hf['auto_map']}: dolmen runs no code from a model folder "
            "(trust_remote_code); use a model saved with a class of transformers"
        )
    if hf.get("quantization_config"):
        raise ValueError(
            f"quantization_config is {hf['quantization_config']}: dolmen reads unquantised "
            f"weights only"
        )
    given = {family.aliases.get(name, name): value for name, value in hf.items()}
    for name, allowed in {**ONLY, **family.only}.items():
        if name in given and given[name] not in allowed:
            raise ValueError(
                f"{name} is {given[name]!r}: dolmen's {family.model_type} supports only "
                f"{allowed[0]!r}"
            )
    return replace(
        family.read({**family.defaults, **given}), family=family.model_type, hf=deepcopy(hf)
    )


def schema(family: Family) -> Object:
    """What a config.json of the family may hold: the fields that it reads, under each name."""
    every = {*kinds.SPECIAL_TOKENS, "dtype", "torch_dtype", "rope_scaling", "rope_parameters"}
    names = {*family.defaults, *family.aliases, *every}
    return replace(kinds.CONFIG.schema, optional={n: kinds.CONFIG_FIELDS[n] for n in names})


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json of a model. One that was read comes back field for field in its own spelling,
    except for what changed in the structure; one made here is written as transformers 5 writes it.
    Raises ValueError naming the structure that the family cannot express.
    """
    if config.router_balance == "bias" and config.num_experts:
        raise ValueError(
            f"router_balance is bias: transformers' {config.family} has no place for a router's "
            "bias, and without it would route otherwise: train with --model.router-balance loss "
            "to export"
        )
    family = find(config.family)
    new = family.write(config)
    if config.hf.get("model_type") == family.model_type:
        old = family.write(from_hf(config.hf))
        out = _spell(
            config.hf, {name: value for name, value in new.items() if value != old[name]}, family
        )
        if _differences(config, from_hf(out)):
            out = _spell(out, new, family)  # absent fields followed a changed one
    else:
        extra = (
            config.hf
            if "model_type" not in config.hf
            else {n: v for n, v in config.hf.items() if n in CARRIED}
        )
        out = {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            "dtype": stored_dtype(config.hf),
            **deepcopy(family.scratch),
            **new,
            **deepcopy(extra),
        }
    if differences := _differences(config, from_hf(out)):
        raise ValueError(
            f"family {family.model_type} cannot express {'; '.join(differences)}: set model.family "
            f"to one that can, of {', '.join(FAMILIES)}"
        )
    return out


def on_disk(config: ModelConfig) -> ModelConfig:
    """`config` as files of its family hold it: no file has the biases of routers, which
    start at 0.
    """
    return replace(config, router_balance="loss") if config.router_balance == "bias" else config


def stored_dtype(hf: dict[str, Any]) -> str:
    """Name of the dtype that a config.json states for its weights; float32 where it states none."""
    return hf.get("dtype") or hf.get("torch_dtype") or "float32"


def unknown_fields(hf: dict[str, Any]) -> list[str]:
    """Fields of a config.json that dolmen has never heard of: kept for the way back, without effect
    on the model. For a warning at the place that reads.
    """
    family = find(hf.get("model_type"))
    known = {
        *HARMLESS,
        *ONLY,
        *family.only,
        *family.defaults,
        *family.harmless,
        *family.scratch,
        *family.aliases,
    }
    rope = {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        *sum(ROPE_FIELDS.values(), ()),
    }
    inner = [
        f"{field}.{name}"
        for field in ("rope_parameters", "rope_scaling")
        for name in hf.get(field) or {}
        if name not in rope
    ]
    return sorted(name for name in hf if name not in known and not name.startswith("_")) + inner


def _spell(source: dict[str, Any], fields: dict[str, Any], family: Family) -> dict[str, Any]:
    """`source` with `fields` replaced under the names it uses: aliases, and rope as transformers 4
    or 5 spells it.
    """
    out = deepcopy(source)
    alias = {field: name for name, field in family.aliases.items() if name in source}
    for name, value in fields.items():
        if name == "rope_parameters" and name not in source:
            scaling = {key: number for key, number in value.items() if key != "rope_theta"}
            out |= {
                "rope_theta": value["rope_theta"],
                "rope_scaling": None if len(scaling) == 1 else scaling,
            }
        else:
            out[alias.get(name, name)] = deepcopy(value)
    return out


def _structure(config: ModelConfig) -> dict[str, Any]:
    """What fixes parameters and function, in one form only: unused fields and ways to spell a
    window or a width left out.
    """
    fields = asdict(replace(config, hf={}))
    rope = fields.pop("rope")
    if config.position == "rope":
        fields["rope"] = {n: rope[n] for n in ("theta", "scaling", *ROPE_FIELDS[rope["scaling"]])}
    for name in ("sliding_window", "sliding_layers", *TRAINING):
        del fields[name]
    if not config.num_experts:
        fields = {name: value for name, value in fields.items() if name not in EXPERTS}
    elif not any(not config.sparse(i) for i in range(config.num_hidden_layers)):
        fields["intermediate_size"] = config.expert_size
    if config.num_experts:
        fields["moe_intermediate_size"] = config.expert_size
    return {
        **fields,
        "sliding window of each layer": [config.window(i) for i in range(config.num_hidden_layers)],
    }


def _differences(wanted: ModelConfig, got: ModelConfig) -> list[str]:
    """Each field of the structure that differs, with both values."""
    a, b = _structure(wanted), _structure(got)
    return [
        f"{name} = {a.get(name)} (it would read back as {b.get(name)})"
        for name in {**a, **b}
        if a.get(name) != b.get(name)
    ]


@dataclass(frozen=True)
class WeightMap:
    """Every tensor a checkpoint of `config` stores, and what it holds."""

    config: ModelConfig
    family: Family
    entries: dict[str, Entry]
    """Stored name -> entry, in the order an export writes them."""
    embedding: str
    """Stored name of the embedding."""
    head: str
    """Stored name of the head; of a tied model it may be stored too, and must then equal the
    embedding.
    """

    def canonical(self, name: str) -> str:
        """The stored name with the family's leading part, which some files leave out."""
        full = self.family.prefix + name
        return (
            full
            if name not in self.entries and (full in self.entries or self.ignores(full))
            else name
        )

    def ignores(self, name: str) -> bool:
        """Whether a canonical name is a buffer that the family declares to be recomputed."""
        return any(re.fullmatch(pattern, name) for pattern in self.family.ignored)

    def is_tied_head(self, name: str) -> bool:
        return name == self.head and name not in self.entries

    def expected_shape(self, name: str) -> Shape | None:
        """Shape a stored tensor must have, or None where no rule maps it."""
        entry = self.entries.get(self.embedding if self.is_tied_head(name) else name)
        return entry.shape if entry else None

    def disagreeing_fields(self, name: str, shape: Shape) -> list[str]:
        """Names of config fields that make the expected shape of a stored tensor differ from
        `shape`.
        """
        rules = self.family.rules(self.config)
        stored = self.embedding if self.is_tied_head(name) else name
        fields = disagreeing_fields(rules, self.config, stored, shape)
        return [self.family.aliases.get(field, field) for field in fields]


def weight_map(config: ModelConfig) -> WeightMap:
    """The map of `config`'s family. Raises KeyError naming the first three parameters that no rule
    of it makes.
    """
    family, config = find(config.family), on_disk(config)
    rules = family.rules(config)
    embedding, head = (
        next(f"{rule.hf}.weight" for rule in rules if rule.names == (ours,))
        for ours in ("embed", "head")
    )
    return WeightMap(config, family, entries(rules, config), embedding, head)
