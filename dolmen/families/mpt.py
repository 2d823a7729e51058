"""MPT (MosaicML, 2023): ALiBi, LayerNorms without bias, a plain feed-forward layer, no biases, and
q, k, v in one tensor.

What attention is stands in a mapping, `attn_config`. Where the code of its makers has a table of
positions (`alibi` false), or other slopes, biases or widths, transformers has not: these are
refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from annotated_types import Interval

from dolmen.core.config import AboveZero
from dolmen.core.messages import brief
from dolmen.families import common
from dolmen.families.family import BESIDE, Family, Field, mapping
from dolmen.families.rules import Rename, Rule, Split
from dolmen.model.spec import AlibiSpec, AttentionSpec, BlockSpec, MLPSpec, ModelSpec


def _spell(config: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"attn_config": the config's mapping with the entries `stated` replaced and all others
    kept}.
    """
    return {"attn_config": {**(config.get("attn_config") or {}), **stated}}


ATTENTION = (
    Field(
        "clip_qkv",
        AboveZero | None,
        None,
        "Clip queries, keys and values to this absolute value. None: no clipping.",
    ),
    Field(
        "softmax_scale",
        AboveZero | None,
        None,
        "Factor of attention scores. None: 1 / sqrt(d_model / n_heads).",
    ),
)
# keys of attn_config that change what is computed, with their supported values; and harmless ones
ONLY = {
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "attn_type": ("multihead_attention",),
    "attn_uses_sequence_id": (False,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "rope": (False,),
}
HARMLESS = ("attn_impl", "attn_pdrop")
FIELDS = (
    common.vocab_size(50368),
    Field(
        "expansion_ratio",
        Annotated[float, Interval(gt=0, le=1024)],
        4,
        "Width of the feed-forward layer relative to d_model; transformers supports only 4.",
    ),
    common.standard("hidden_size", 2048, "d_model", aliased=True),
    common.standard("num_hidden_layers", 24, "n_layers", aliased=True),
    common.standard("num_attention_heads", 16, "n_heads", aliased=True, help="Heads."),
    common.standard("max_position_embeddings", 2048, "max_seq_len", help=common.ALIBI_LENGTH),
    mapping(
        "attn_config", *ATTENTION, *(Field(name, Any) for name in (*ONLY, *HARMLESS)), spell=_spell
    ),
    *common.last_fields(common.LAYER_NORM_EPS, tied=True),
)


def read(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of an MPT config.json: ALiBi, LayerNorms without bias, a plain feed-forward
    layer, no biases. Raises ValueError for a value in attn_config that is not supported, and for a
    feed-forward layer without width.
    """
    heads, stated = config["n_heads"], config["attn_config"] or {}
    for name, allowed in ONLY.items():
        # absent means the usual value
        if stated.get(name, allowed[0]) not in allowed:
            raise ValueError(
                f"attn_config.{name} is {brief(stated[name])}: dolmen's mpt supports only "
                f"{allowed[0]!r}"
            )
    clip, scale = (stated.get(name) for name in ("clip_qkv", "softmax_scale"))
    mixer = AttentionSpec(
        heads,
        heads,
        common.head_size(config, FIELDS),
        clip=None if clip is None else float(clip),
        scale=None if scale is None else float(scale),
        positions=AlibiSpec(),
    )
    size = int(config["d_model"] * config["expansion_ratio"])
    if size < 1:
        raise ValueError(
            f"expansion_ratio is {config['expansion_ratio']}, with which the feed-forward layer "
            f"has no column: it must be at least 1 / d_model (1 / {config['d_model']:,})"
        )
    mlp = MLPSpec(size, gated=False, activation="gelu")
    norm = replace(common.layer_norm(config), bias=False)
    return common.make_spec(config, FIELDS, [BlockSpec(mixer, mlp, norm)] * config["n_layers"])


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of an MPT config.json that `common.write` does not state: expansion_ratio,
    and attn_config with its entries clip_qkv and softmax_scale.
    """
    mixer = common.attention(spec)
    return {
        "expansion_ratio": _ratio(common.mlp(spec).size, spec.hidden_size),
        "attn_config": {"clip_qkv": mixer.clip, "softmax_scale": mixer.scale},
    }


def _ratio(size: int, width: int) -> int | float:
    """Return the expansion ratio from which `read` computes `size`, by int(width * ratio)."""
    if size % width == 0:
        return size // width
    # half a unit more, where the quotient rounds down to size - 1
    return size / width if int(width * (size / width)) == size else (size + 0.5) / width


def rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of MPT: q, k, v fused one after the other."""
    layer, ours = "transformer.blocks.{}.", "layers.{}."
    return [
        Rename("transformer.wte", "embed"),
        Rename(layer + "norm_1", ours + "attn_norm"),
        Split(layer + "attn.Wqkv", common.QKV, 1, (1, 1, 1)),
        Rename(layer + "attn.out_proj", ours + "attn.o"),
        Rename(layer + "norm_2", ours + "mlp_norm"),
        Rename(layer + "ffn.up_proj", ours + "mlp.up"),
        Rename(layer + "ffn.down_proj", ours + "mlp.down"),
        Rename("transformer.norm_f", "final_norm"),
        Rename("lm_head", "head"),
    ]


DROPOUT = ("resid_pdrop", "emb_pdrop")
MPT = Family(
    model_type="mpt",
    title="MPT",
    architecture="MptForCausalLM",
    read=read,
    write=write,
    rules=rules,
    fields=FIELDS,
    only={
        "no_bias": (True,),
        "logit_scale": (None,),
        "embedding_fraction": (1.0,),
        "norm_type": ("low_precision_layernorm", "layernorm"),
    },
    harmless="resid_pdrop emb_pdrop init_config init_device learned_pos_emb tokenizer_name verbose",
    extra_fields={**BESIDE, **dict.fromkeys(DROPOUT, 0.0)},
    remote_code=("configuration_mpt", "modeling_mpt"),
    prefix="transformer.",
)
