"""Llama, and what the many families derived from it share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dolmen.families import common, rope
from dolmen.families.family import BESIDE, Family, Field, activation, flag
from dolmen.families.rules import Rename, Rule
from dolmen.files import kinds
from dolmen.model.spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec
from dolmen.model.spec.attention import NormOf

# What Llama and its descendants share: the fields of config.json, the spec they parse to, and the
# names of the weights.
#
# Rope is the rotate-half layout in transformers and here: q and k rows are never permuted.

LAYER, OURS = "model.layers.{}.", "layers.{}."
IGNORED = (
    r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq",
    r"model\.rotary_emb\.inv_freq",
)
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
MLP_NAMES = {f"{name}_proj": name for name in ("gate", "up", "down")}  # of a feed-forward layer
EPS = "rms_norm_eps"
NORM_EPS, ROPE_FIELDS = common.eps(EPS, 1e-6), rope.fields()
NO_BIAS = {"attention_bias": (False, None), "mlp_bias": (False, None)}
BESIDE = {**BESIDE, "attention_dropout": 0.0}

BEFORE = (  # rope
    common.vocab_size(32000),
    common.standard("hidden_size", 4096),
    common.standard("intermediate_size", 11008),
    common.standard("num_hidden_layers", 32),
    common.standard("num_attention_heads", 32),
    Field(
        "num_key_value_heads",
        kinds.HEADS | None,
        None,
        "Key and value heads; fewer than query heads is grouped-query attention. None: as many.",
    ),
    Field(
        "head_dim",
        kinds.WIDTH | None,
        None,
        "Size of one head. None: hidden_size / num_attention_heads.",
    ),
    common.standard("hidden_act", "silu"),
    common.standard("max_position_embeddings", 2048),
)


def fields_with(
    eps: Field | None = NORM_EPS, rope_fields: Sequence[Field] = ROPE_FIELDS
) -> tuple[Field, ...]:
    """Return Llama's config.json Fields with another norm epsilon field `eps` (None: no field
    states it) and other rope fields `rope_fields`.
    """
    ends = common.last_fields(eps or common.LAYER_NORM_EPS, tied=False)
    return (*BEFORE, *rope_fields, *(ends if eps else ends[1:]))


FIELDS = fields_with()
ATTENTION_BIAS = Field(
    "attention_bias", bool | None, False, "Biases on q, k, v and the attention output projection."
)


def drop_fields(fields: Sequence[Field], *names: str) -> tuple[Field, ...]:
    """Return `fields` without those of the given names."""
    return tuple(field for field in fields if field.name not in names)


def change_fields(fields: Sequence[Field], *more: Field, **defaults: Any) -> tuple[Field, ...]:
    """Return `fields` with other defaults (name=default; each name must be among them), followed by
    the fields `more`.
    """
    assert not defaults.keys() - {field.name for field in fields}
    return (*(replace(f, default=defaults.get(f.name, f.default)) for f in fields), *more)


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
    """Return the spec of a config.json with Llama's common fields. The rest is decided by the
    family: `mlp`: layer index -> feed-forward spec (unset: the dense one); `windows`: window of
    each layer (unset: none); `norm` (unset: RMSNorm with rms_norm_eps); biases of q, k, v and of o;
    `qk_norm` and what it is over; biases of the dense mlp; `interleaved`: rope pairs are
    neighbours. Raises ValueError naming the field.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size, norm = _head_size(config), norm or rms_norm(config)
    mixer = AttentionSpec(
        heads,
        # None: multi-head attention
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
            # layers differ in window and mlp only
            replace(mixer, window=None if windows is None else windows[i]),
            dense if mlp is None else mlp(i),
            norm,
        )
        for i in range(config["num_hidden_layers"])
    ]
    return common.make_spec(config, FIELDS, blocks)


def _head_size(config: dict[str, Any]) -> int:
    """Return head_dim, or hidden_size / num_attention_heads if it is None. Raises ValueError if
    that is not an integer.
    """
    if config["head_dim"] is not None:
        return config["head_dim"]
    return common.head_size(config, FIELDS, instead=f", or {flag('head_dim')}")


def rms_norm(config: dict[str, Any]) -> NormSpec:
    """Return the spec of an RMSNorm with the config's rms_norm_eps."""
    return NormSpec("rmsnorm", float(config[EPS]))


def dense_mlp(config: dict[str, Any], bias: bool = False) -> MLPSpec:
    """Return the spec of the gated feed-forward layer; `bias`: on all three projections."""
    return MLPSpec(config["intermediate_size"], True, activation(config, "hidden_act"), bias)


def llama_like_rules(
    spec: ModelSpec, norms: Mapping[str, str] = NORMS, instead: Sequence[Rule] = ()
) -> list[Rule]:
    """Return the weight rules of Llama-like files. `norms`: stored norm names -> ours. `instead`:
    rules that replace the standard ones for the same parameters of ours. Rules of modules that the
    spec lacks (biases, q and k norms) have no effect.
    """
    # our modules that the replacing rules make
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
    flags = [
        Rename("model.embed_tokens", "embed"),
        *(Rename(LAYER + hf, OURS + ours) for hf, ours in names.items()),
        Rename("model.norm", "final_norm"),
        Rename("lm_head", "head"),
    ]
    return [*instead, *(rule for rule in flags if rule.ours not in otherwise)]


# Llama 1 to 3.3, Code Llama (2302.13971, 2307.09288, 2407.21783, 2308.12950), and everything saved
# as `model_type: llama`.

INSTEAD = f", or {flag('model_type')} to mistral, which is the same decoder, and {flag('head_dim')}"


def read_llama(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Llama config.json. `attention_bias` puts biases on q, k, v and o. Raises
    ValueError if heads do not divide the width, whatever head_dim is, as transformers does.
    """
    common.head_size(config, FIELDS, INSTEAD)
    bias = bool(config["attention_bias"])
    return read_llama_like(config, qkv_bias=bias, o_bias=bias, mlp_bias=bool(config["mlp_bias"]))


LLAMA = Family(
    model_type="llama",
    title="Llama 1 to 3.3, Code Llama",
    architecture="LlamaForCausalLM",
    read=read_llama,
    rules=llama_like_rules,
    fields=(
        *FIELDS,
        ATTENTION_BIAS,
        Field("mlp_bias", bool | None, False, "Biases on the feed-forward projections."),
    ),
    only=common.NO_WINDOWS,
    extra_fields=BESIDE,
    ignored=IGNORED,
)
