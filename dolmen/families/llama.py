"""Llama, and what the many families derived from it share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dolmen.families import common, rope, windows
from dolmen.families.family import (
    ACTIVATION,
    BESIDE,
    Family,
    Field,
    activation,
    activation_name,
    expect,
    flag,
)
from dolmen.families.rules import Rename, Rule
from dolmen.files import kinds
from dolmen.files.schema import Flag, optional
from dolmen.model.spec import (
    AttentionSpec,
    BlockSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    RopeSpec,
)
from dolmen.model.spec.attention import NormOf

# What Llama and its descendants share: the fields of their config.json, the tree that they say,
# and the names of the weights.
#
# Rope is the rotate-half layout in transformers and here: q and k rows are never permuted.

LAYER, OURS = "model.layers.{}.", "layers.{}."
IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
MLP_NAMES = {f"{name}_proj": name for name in ("gate", "up", "down")}  # of a feed-forward layer
EPS = "rms_norm_eps"
NORM_EPS, TURNED = common.eps(EPS, 1e-6), rope.fields()
NO_BIAS = {"attention_bias": (False, None), "mlp_bias": (False, None)}
BESIDE = {**BESIDE, "attention_dropout": 0.0}

BEFORE = (  # rope
    common.vocab_size(32000),
    Field("hidden_size", kinds.WIDTH, 4096, "Width of the residual stream."),
    Field("intermediate_size", kinds.WIDTH, 11008, "Width of the feed-forward layer."),
    Field("num_hidden_layers", kinds.LAYERS, 32, "Decoder blocks."),
    Field("num_attention_heads", kinds.HEADS, 32, "Query heads."),
    Field(
        "num_key_value_heads",
        optional(kinds.HEADS),
        None,
        "Key and value heads; fewer than query heads is grouped-query attention. None: as many.",
    ),
    Field(
        "head_dim",
        optional(kinds.WIDTH),
        None,
        "Size of one head. None: hidden_size / num_attention_heads.",
    ),
    Field(
        "hidden_act",
        ACTIVATION,
        "silu",
        "Activation of the feed-forward layer: silu, gelu (the exact erf form), "
        "gelu_pytorch_tanh, relu.",
    ),
    Field("max_position_embeddings", kinds.POSITIONS, 2048, "Longest sequence, tokens."),
)


def fields_with(
    eps: Field | None = NORM_EPS, turned: Sequence[Field] = TURNED
) -> tuple[Field, ...]:
    """Return Llama's fields with another norm `eps` field (None: no field states it) and other rope
    fields.
    """
    ends = common.last_fields(eps or common.LAYER_NORM_EPS, tied=False)
    return (*BEFORE, *turned, *(ends if eps else ends[1:]))


FIELDS = fields_with()
ATTENTION_BIAS = Field(
    "attention_bias",
    optional(Flag()),
    False,
    "Biases on q, k, v and the attention output projection.",
)


def drop_fields(fields: Sequence[Field], *names: str) -> tuple[Field, ...]:
    """`fields` that have none of the names."""
    return tuple(field for field in fields if field.name not in names)


def change_fields(fields: Sequence[Field], *more: Field, **defaults: Any) -> tuple[Field, ...]:
    """`fields` with other defaults, and more of them."""
    assert not defaults.keys() - {field.name for field in fields}
    return (
        *(replace(f, default=defaults.get(f.name, f.default)) for f in fields),
        *more,
    )


def read_llama_like(
    config: dict[str, Any],
    mlp: Callable[[int], MLPSpec | MoESpec] | None = None,
    windows: Sequence[int | None] | None = None,
    norm: NormSpec | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    qk_norm_of: NormOf = "heads",
    mlp_bias: bool = False,
    interleaved: bool = False,
) -> ModelSpec:
    """The tree of a config.json; what the family decides beside the common fields is given: layer
    -> its feed-forward layer (unset: the dense one), the windows of the layers, its norms (unset:
    RMSNorm). Raises ValueError naming the field.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size, norm = _head_size(config), norm or rms_norm(config)
    mixer = AttentionSpec(
        heads,
        heads if kv_heads is None else kv_heads,
        size,
        q_bias=qkv_bias,
        k_bias=qkv_bias,
        v_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=norm if qk_norm else None,
        qk_norm_of=qk_norm_of,
        positions=replace(rope.read(config, size), interleaved=interleaved),
    )
    dense = dense_mlp(config, mlp_bias)
    blocks = [
        BlockSpec(
            replace(mixer, window=None if windows is None else windows[i]),
            dense if mlp is None else mlp(i),
            norm,
        )
        for i in range(config["num_hidden_layers"])
    ]
    return common.make_spec(config, FIELDS, blocks)


def _head_size(config: dict[str, Any]) -> int:
    if config["head_dim"] is not None:
        return config["head_dim"]
    return common.head_size(config, FIELDS, instead=f", or {flag('head_dim')}")


def rms_norm(config: dict[str, Any]) -> NormSpec:
    """Each of its norms. Raises ValueError for an eps that is not finite."""
    return NormSpec("rmsnorm", float(config[EPS]))


def dense_mlp(config: dict[str, Any], bias: bool = False) -> MLPSpec:
    """Its feed-forward layer. Raises ValueError for an activation that is not supported."""
    return MLPSpec(config["intermediate_size"], True, activation(config, "hidden_act"), bias)


def write_llama_like(tree: ModelSpec, fields: Sequence[Field] = FIELDS) -> dict[str, Any]:
    """The `fields` that all llama-like families have, of the first layer, and rope of the first
    that has positions. Raises ValueError where that is none, or the mixer no attention.
    """
    attention, mlp = common.attention(tree), tree.blocks[0].mlp
    names = {field.name for field in fields}
    known = (block.mixer.positions for block in tree.blocks)
    turned = expect(next((p for p in known if p is not None), None), RopeSpec, "positions")
    stated = {
        "intermediate_size": mlp.size,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_size,
        "hidden_act": activation_name(mlp.activation) if "hidden_act" in names else None,
        "rope_parameters": rope.write(
            turned, attention.head_size if rope.PART.name in names else None
        ),
    }
    return common.write(tree, fields) | {n: value for n, value in stated.items() if n in names}


def llama_like_rules(
    tree: ModelSpec, norms: Mapping[str, str] = NORMS, instead: Sequence[Rule] = ()
) -> list[Rule]:
    """Weight names of Llama and those like it, whose blocks have these `norms`; q and k norms and
    biases exist where the tree has them. What rules `instead` make has no other.
    """
    otherwise = {name for rule in instead for name in rule.names}
    names = {
        **norms,
        "self_attn.q_proj": "attn.q",
        "self_attn.k_proj": "attn.k",
        "self_attn.v_proj": "attn.v",
        "self_attn.o_proj": "attn.o",
        "self_attn.q_norm": "attn.q_norm",
        "self_attn.k_norm": "attn.k_norm",
        **{f"mlp.{hf}": f"mlp.{ours}" for hf, ours in MLP_NAMES.items()},
    }
    every = [
        Rename("model.embed_tokens", "embed"),
        *(Rename(LAYER + hf, OURS + ours) for hf, ours in names.items()),
        Rename("model.norm", "final_norm"),
        Rename("lm_head", "head"),
    ]
    return [*instead, *(rule for rule in every if rule.ours not in otherwise)]


# Llama 1 to 3.3, Code Llama (2302.13971, 2307.09288, 2407.21783, 2308.12950), and everything saved
# as `model_type: llama`.

INSTEAD = f", or {flag('model_type')} to mistral, which is the same decoder, and {flag('head_dim')}"


def read_llama(config: dict[str, Any]) -> ModelSpec:
    """`attention_bias` puts biases on q, k, v and on the output projection. transformers refuses
    heads that do not divide the width, whatever head_dim says.
    """
    common.head_size(config, FIELDS, INSTEAD)
    bias = bool(config["attention_bias"])
    return read_llama_like(config, qkv_bias=bias, o_bias=bias, mlp_bias=bool(config["mlp_bias"]))


def write_llama(tree: ModelSpec) -> dict[str, Any]:
    return {
        **write_llama_like(tree),
        "attention_bias": common.attention(tree).q_bias,
        "mlp_bias": common.mlp(tree).bias,
    }


LLAMA = Family(
    model_type="llama",
    title="Llama 1 to 3.3, Code Llama",
    architecture="LlamaForCausalLM",
    scorer="LlamaForSequenceClassification",
    read=read_llama,
    write=write_llama,
    rules=llama_like_rules,
    fields=(
        *FIELDS,
        ATTENTION_BIAS,
        Field("mlp_bias", optional(Flag()), False, "Biases on the feed-forward projections."),
    ),
    only=windows.NONE,
    extra_fields=BESIDE,
    ignored=IGNORED,
)
