"""Baichuan and Baichuan 2 (2309.10305), 7B and 13B: Llama with q, k and v in one tensor. 7B turns
by rope, 13B has ALiBi; the head of Baichuan 2 has rows of length 1.

One `model_type` stands for four models, and no field of a config.json states which:

    positions   13B calls its longest sequence model_max_length, and has no max_position_embeddings
    head        Baichuan 2 has twice as many tokens, and a field that the first has not

So the variant is assumed by these, with a warning; it can be stated as
`"dolmen": {"head": "normalised"}`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from dolmen.core.config import NonNegative
from dolmen.families import common, llama
from dolmen.families.family import Family, Field
from dolmen.families.rules import Rule, Split
from dolmen.files import kinds
from dolmen.model.spec import AlibiSpec, AttentionSpec, BlockSpec, ModelSpec, RopeSpec

HeadKind, PositionKind = Literal["linear", "normalised"], Literal["rope", "alibi"]
HEADS, POSITIONS = get_args(HeadKind), get_args(PositionKind)
TOKENS = (64000, 125696)  # of Baichuan and of Baichuan 2
WIDE = 5120  # of 13B
LONGEST = ("max_position_embeddings", "model_max_length")


def assume_variant(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields `head` and `positions` that the config leaves open, with values assumed
    from vocabulary size, z_loss_weight, width and the name of the length field.
    """
    # nearer to Baichuan 2's vocabulary than to Baichuan's
    second = 2 * config["vocab_size"] > sum(TOKENS) or config["z_loss_weight"] is not None
    # 7B states max_position_embeddings, 13B model_max_length
    short, long = (config[name] is not None for name in LONGEST)
    alibi = long and not short or config["hidden_size"] >= WIDE
    variant = {"head": HEADS[second], "positions": POSITIONS[alibi]}
    return {name: value for name, value in variant.items() if config[name] is None}


def read(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Baichuan or Baichuan 2 config.json, with the head and positions (rope or
    ALiBi) that it states or that are assumed. Raises ValueError for a z_loss_weight, which changes
    the loss and no logit.
    """
    if config["z_loss_weight"]:
        raise ValueError(
            f"z_loss_weight is {config['z_loss_weight']}: max-z loss is not supported; set "
            "--model.z-loss-weight 0"
        )
    stated = {**config, **assume_variant(config)}
    heads, size = config["num_attention_heads"], common.head_size(config, FIELDS)
    positions = AlibiSpec() if stated["positions"] == "alibi" else RopeSpec(size)
    mixer = AttentionSpec(heads, heads, size, positions=positions)
    block = BlockSpec(mixer, llama.dense_mlp(config), llama.rms_norm(config))
    longest = next((config[name] for name in LONGEST if config[name] is not None), 4096)
    spec = common.make_spec(
        {**config, LONGEST[0]: longest}, FIELDS, [block] * config["num_hidden_layers"]
    )
    return replace(spec, head=replace(spec.head, normalised=stated["head"] == "normalised"))


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a Baichuan config.json that `common.write` does not state: `head` and
    `positions`.
    """
    mixer = common.attention(spec)
    return {
        "head": HEADS[spec.head.normalised],
        "positions": POSITIONS[mixer.positions == AlibiSpec()],
    }


def rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of Baichuan: Llama's with q, k, v fused one after the other."""
    # rows of all q, all k, all v
    packed = Split(llama.LAYER + "self_attn.W_pack", common.QKV, 1, (1, 1, 1))
    return llama.llama_like_rules(spec, instead=[packed])


def _longest(config: Mapping[str, Any], value: int) -> dict[str, Any]:
    """Return {field name: value} for the longest sequence, under the name that the config.json uses
    (max_position_embeddings if none): the 13B model is recognised by it.
    """
    return {next((name for name in LONGEST if config.get(name) is not None), LONGEST[0]): value}


LIKE_LLAMA = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

FIELDS = (
    common.vocab_size(TOKENS[0]),
    *(field for field in llama.FIELDS if field.name in LIKE_LLAMA),
    next(field for field in llama.FIELDS if field.name == "hidden_act"),
    Field(
        LONGEST[0],
        kinds.POSITIONS | None,
        None,
        "Maximum sequence length in tokens (ALiBi itself has no limit).",
        spell=_longest,
    ),
    Field(LONGEST[1], kinds.POSITIONS | None, None, "The same, by the name of the 13B model."),
    Field(
        "z_loss_weight",
        NonNegative | None,
        None,
        "Weight of the max-z loss (mean squared largest logit); only 0 is supported.",
    ),
    Field(
        "head",
        HeadKind | None,
        None,
        "normalised: rows of the head are scaled to norm 1 (Baichuan 2).",
        ours=True,
    ),
    Field(
        "positions",
        PositionKind | None,
        None,
        "rope (7B), or alibi: scores fall with distance (13B).",
        ours=True,
    ),
    *common.last_fields(common.eps(llama.EPS, 1e-6), tied=False),
)

BAICHUAN = Family(
    model_type="baichuan",
    title="Baichuan and Baichuan 2",
    architecture="BaichuanForCausalLM",
    in_transformers=False,
    read=read,
    write=write,
    rules=rules,
    fields=FIELDS,
    assume=assume_variant,
    only={"rope_theta": (10000.0, None), "rope_scaling": (None,), "rope_parameters": (None,)},
    extra_fields=llama.BESIDE,
    ignored=llama.IGNORED,
    remote_code=("configuration_baichuan", "modeling_baichuan", "tokenization_baichuan"),
)
