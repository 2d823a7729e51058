"""GPT-2 and its descendants with learned positions: GPT-2, StarCoder and SantaCoder."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dolmen.families import common
from dolmen.families.family import BESIDE, Family, Field
from dolmen.families.rules import Rename, Rule, Split, Transpose
from dolmen.model.spec import BlockSpec, EmbeddingSpec, ModelSpec, PositionTable

# What GPT-2 and its descendants share: the fields of config.json, a plain mlp, and the names of the
# weights outside the layers' matrices.

GPT2_LIKE_FIELDS = (
    common.vocab_size(50257),
    common.standard(
        "max_position_embeddings",
        1024,
        "n_positions",
        aliased=True,
        help="Maximum sequence length in tokens: rows of the position embedding, if there is one.",
    ),
    common.standard("hidden_size", 768, "n_embd", aliased=True),
    common.standard("num_hidden_layers", 12, "n_layer", aliased=True),
    common.standard("num_attention_heads", 12, "n_head", aliased=True, help="Heads."),
    common.standard("intermediate_size", None, "n_inner", help=common.FOUR_TIMES),
    common.standard("hidden_act", "gelu_new", "activation_function"),
    *common.last_fields(common.LAYER_NORM_EPS, tied=True),
)
DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
HARMLESS = (
    "n_ctx resid_pdrop embd_pdrop attn_pdrop summary_type summary_use_proj "
    "summary_activation summary_proj_to_labels summary_first_dropout"
)
BESIDE = {**BESIDE, **dict.fromkeys(DROPOUT, 0.0)}
LAYER, OURS = "transformer.h.{}.", "layers.{}."
IGNORED = (r"transformer\.h\.[0-9]+\.attn\.(bias|masked_bias)",)


def gpt2_like_rules(layer: Sequence[Rule], first: str = "attn_norm") -> list[Rule]:
    """Return the weight rules of GPT-2-like files: embeddings, norms, head, and the rules `layer`
    for each block's matrices; `first`: our name of the norm ln_1.
    """
    return [
        Rename("transformer.wte", "embed"),
        Rename("transformer.wpe", "positions"),
        Rename(LAYER + "ln_1", OURS + first),
        *layer,
        Rename(LAYER + "ln_2", OURS + "mlp_norm"),
        Rename("transformer.ln_f", "final_norm"),
        Rename("lm_head", "head"),
    ]


# GPT-2 (Radford et al., 2019): learned positions, LayerNorm, a plain feed-forward layer, biases
# everywhere.
# Linear weights are stored [in, out] (Conv1D), q, k, v fused. Published files come with and without
# the leading "transformer.", and with the causal mask saved as a buffer.
# GPT-3 (Brown et al., 2005.14165) is GPT-2 at other sizes with windowed attention in every second
# layer. No family states it: GPT-Neo has such layers, but unscaled scores.


def read_gpt2(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a GPT-2 config.json: learned positions, LayerNorm, a plain feed-forward
    layer, biases everywhere.
    """
    mixer = common.biased_attention(config, GPT2_LIKE_FIELDS)
    block = BlockSpec(mixer, common.plain_mlp(config, GPT2_LIKE_FIELDS), common.layer_norm(config))
    embedding = EmbeddingSpec(config["vocab_size"], positions=PositionTable(config["n_positions"]))
    return common.make_spec(config, GPT2_LIKE_FIELDS, [block] * config["n_layer"], embedding)


def gpt2_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of GPT-2: matrices transposed (Conv1D), q, k, v fused one after the
    other.
    """
    return gpt2_like_rules(
        [
            Transpose(Split(LAYER + "attn.c_attn", common.QKV, 1, (1, 1, 1))),
            Transpose(Rename(LAYER + "attn.c_proj", OURS + "attn.o")),
            Transpose(Rename(LAYER + "mlp.c_fc", OURS + "mlp.up")),
            Transpose(Rename(LAYER + "mlp.c_proj", OURS + "mlp.down")),
        ]
    )


GPT2 = Family(
    model_type="gpt2",
    title="GPT-2",
    architecture="GPT2LMHeadModel",
    scorer="GPT2ForSequenceClassification",
    read=read_gpt2,
    rules=gpt2_rules,
    fields=GPT2_LIKE_FIELDS,
    only={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
    },
    harmless=HARMLESS,
    extra_fields=BESIDE,
    ignored=IGNORED,
    prefix="transformer.",
)


# StarCoder and SantaCoder (Li et al., 2305.06161): GPT-2 with multi-query attention (one key-value
# head). q, k, v are fused: all queries, key, value; or q, k, v per head if `multi_query` is false.

GPT_BIGCODE_FIELDS = (
    *(
        replace(field, default="gelu_pytorch_tanh")
        if field.name == "activation_function"
        else field
        for field in GPT2_LIKE_FIELDS
    ),
    Field("multi_query", bool, True, "One key-value head, not one per query head."),
)


def read_gpt_bigcode(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a StarCoder config.json: GPT-2 with one key-value head (multi_query) or
    one per query head.
    """
    kv_heads = 1 if config["multi_query"] else config["n_head"]
    mixer = common.biased_attention(config, GPT_BIGCODE_FIELDS, kv_heads=kv_heads)
    block = BlockSpec(
        mixer, common.plain_mlp(config, GPT_BIGCODE_FIELDS), common.layer_norm(config)
    )
    embedding = EmbeddingSpec(config["vocab_size"], positions=PositionTable(config["n_positions"]))
    return common.make_spec(config, GPT_BIGCODE_FIELDS, [block] * config["n_layer"], embedding)


def write_gpt_bigcode(spec: ModelSpec) -> dict[str, Any]:
    """Return the field of a StarCoder config.json that `common.write` does not state:
    multi_query.
    """
    return {"multi_query": common.attention(spec).kv_heads == 1}


def gpt_bigcode_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of StarCoder: all queries, key, value in one tensor, or q, k, v per
    head without multi_query.
    """
    mixer = common.attention(spec)
    shared = mixer.kv_heads == 1
    # groups and counts of Split
    stored = (1, (mixer.heads, 1, 1)) if shared else (mixer.heads, (1, 1, 1))
    return gpt2_like_rules(
        [
            Split(LAYER + "attn.c_attn", common.QKV, *stored),
            Rename(LAYER + "attn.c_proj", OURS + "attn.o"),
            Rename(LAYER + "mlp.c_fc", OURS + "mlp.up"),
            Rename(LAYER + "mlp.c_proj", OURS + "mlp.down"),
        ]
    )


GPT_BIGCODE = Family(
    model_type="gpt_bigcode",
    title="StarCoder and SantaCoder",
    architecture="GPTBigCodeForCausalLM",
    read=read_gpt_bigcode,
    write=write_gpt_bigcode,
    rules=gpt_bigcode_rules,
    fields=GPT_BIGCODE_FIELDS,
    only={"scale_attn_weights": (True,)},
    # num_key_value_heads follows from multi_query, and nobody reads it
    harmless=f"{HARMLESS} num_key_value_heads attention_softmax_in_fp32 inference_runner "
    "scale_attention_softmax_in_fp32 max_batch_size max_sequence_length pad_key_length "
    "pre_allocate_kv_cache validate_runner_input",
    extra_fields=BESIDE,
    ignored=IGNORED,
    prefix="transformer.",
)
