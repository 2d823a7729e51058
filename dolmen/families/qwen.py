"""Qwen, the first (2309.16609): Llama with biases on q, k, v, which are fused, and names of its
own. In inference on long sequences, rope's base grows (NTK) and queries are scaled (log-n).

The feed-forward layer is c_proj(w1 x * silu(w2 x)), and `intermediate_size` counts both of its
columns. First files say n_embd, n_layer, n_head, n_positions and ffn_hidden_size.
"""

from typing import Any

from dolmen.core.config import AboveZero
from dolmen.families import common
from dolmen.families.family import BESIDE, Family, Field, expect
from dolmen.families.rules import Rename, Rule, Split
from dolmen.files import kinds
from dolmen.model.spec import (
    AttentionSpec,
    BlockSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    QwenScaling,
    RopeSpec,
)

FIELDS = (
    common.vocab_size(151936),
    Field("hidden_size", kinds.WIDTH, 4096, "Width of the residual stream.", ("n_embd",)),
    Field(
        "intermediate_size",
        kinds.WIDTH,
        22016,
        "Twice the width of the feed-forward layer.",
        ("ffn_hidden_size",),
    ),
    Field("num_hidden_layers", kinds.LAYERS, 32, "Decoder blocks.", ("n_layer",)),
    Field("num_attention_heads", kinds.HEADS, 32, "Heads.", ("n_head",)),
    Field("kv_channels", kinds.WIDTH, 128, "Size of one head.", common=("head_dim",)),
    Field(
        "no_bias",
        bool,
        True,
        "Only q, k, v have biases, not the output projection and the feed-forward layer.",
    ),
    Field(
        "max_position_embeddings",
        kinds.POSITIONS,
        8192,
        "Longest sequence, tokens.",
        ("n_positions",),
    ),
    Field("seq_length", kinds.POSITIONS, 2048, "Context length of pretraining in tokens."),
    Field(
        "use_dynamic_ntk",
        bool,
        True,
        "Larger rope base for sequences over seq_length (inference only).",
    ),
    Field(
        "use_logn_attn",
        bool,
        True,
        "Multiply the query of token i by log(i) to the base seq_length, if over 1 (inference "
        "only).",
    ),
    Field(
        "rotary_emb_base",
        AboveZero,
        10000.0,
        "Base of the geometric series of wavelengths.",
        common=("rope_theta",),
    ),
    *common.last_fields(common.eps("layer_norm_epsilon", 1e-6), tied=False),
)


def read(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Qwen (first version) config.json: biases on q, k, v, rope with dynamic
    NTK and log-n scaling if stated. Raises ValueError if heads times kv_channels is not the width,
    and for an odd intermediate_size.
    """
    heads, size, width = (config[n] for n in ("num_attention_heads", "kv_channels", "hidden_size"))
    if heads * size != width:
        raise ValueError(
            f"num_attention_heads ({heads}) x kv_channels ({size}) differs from hidden_size "
            f"({width}): set --model.kv-channels to hidden_size / num_attention_heads"
        )
    if config["intermediate_size"] % 2:
        raise ValueError(
            f"intermediate_size is {config['intermediate_size']}: it counts both halves of the "
            "feed-forward layer, so set --model.intermediate-size to an even number"
        )
    ntk, log_n = config["use_dynamic_ntk"], config["use_logn_attn"]
    longer = QwenScaling(config["seq_length"], ntk, log_n) if ntk or log_n else None
    # q, k, v have biases in any case
    bias = not config["no_bias"]
    mixer = AttentionSpec(
        heads,
        heads,
        size,
        q_bias=True,
        k_bias=True,
        v_bias=True,
        o_bias=bias,
        positions=RopeSpec(size, float(config["rotary_emb_base"]), longer),
    )
    # the field counts w1 and w2 together
    mlp = MLPSpec(config["intermediate_size"] // 2, bias=bias)
    block = BlockSpec(mixer, mlp, NormSpec("rmsnorm", float(config["layer_norm_epsilon"])))
    return common.make_spec(config, FIELDS, [block] * config["num_hidden_layers"])


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a Qwen config.json that `common.write` does not state: widths, biases,
    rope's base and its scaling. Raises ValueError for another rope scaling than Qwen's.
    """
    mixer, mlp = common.attention(spec), common.mlp(spec)
    positions = expect(mixer.positions, RopeSpec, "positions")
    none = QwenScaling(spec.max_position_embeddings, ntk=False, log_n=False)
    longer = (
        none
        if positions.scaling is None
        else expect(positions.scaling, QwenScaling, "rope scaling")
    )
    return {
        "intermediate_size": 2 * mlp.size,
        "no_bias": not mlp.bias,
        "seq_length": longer.original_max_position_embeddings,
        "use_dynamic_ntk": longer.ntk,
        "use_logn_attn": longer.log_n,
        "rotary_emb_base": positions.theta,
    }


def rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of Qwen: q, k, v fused one after the other, w2 is the gate
    and w1 up.
    """
    layer, ours = "transformer.h.{}.", "layers.{}."
    return [
        Rename("transformer.wte", "embed"),
        Rename(layer + "ln_1", ours + "attn_norm"),
        Split(layer + "attn.c_attn", common.QKV, 1, (1, 1, 1)),
        Rename(layer + "attn.c_proj", ours + "attn.o"),
        Rename(layer + "ln_2", ours + "mlp_norm"),
        Rename(layer + "mlp.w2", ours + "mlp.gate"),
        Rename(layer + "mlp.w1", ours + "mlp.up"),
        Rename(layer + "mlp.c_proj", ours + "mlp.down"),
        Rename("transformer.ln_f", "final_norm"),
        Rename("lm_head", "head"),
    ]


QWEN = Family(
    model_type="qwen",
    title="Qwen, the first",
    architecture="QWenLMHeadModel",
    in_transformers=False,
    read=read,
    write=write,
    rules=rules,
    fields=FIELDS,
    only={
        "rotary_pct": (1.0, None),
        "activation": ("swiglu", None),
        "pos_emb": ("rotary", None),
        "scale_attn_weights": (True, None),
        "apply_residual_connection_post_layernorm": (False, None),
        "use_cache_quantization": (False, None),
        "visual": (None,),
        "audio": (None,),
    },
    # bf16, fp16 and fp32 all false is what its code takes for automatic
    harmless=(
        "bf16 fp16 fp32 onnx_safe params_dtype softmax_in_fp32 use_flash_attn "
        "use_cache_kernel tokenizer_type padded_vocab_size bias_dropout_fusion "
        "attn_dropout_prob emb_dropout_prob attn_pdrop embd_pdrop resid_pdrop"
    ),
    extra_fields={**BESIDE, "attn_dropout_prob": 0.0, "emb_dropout_prob": 0.0},
    ignored=(
        r"transformer\.h\.[0-9]+\.attn\.(bias|masked_bias|rotary_emb\.inv_freq)",
        r"transformer\.rotary_emb\.inv_freq",
    ),
    remote_code=("configuration_qwen", "modeling_qwen", "tokenization_qwen"),
)
