"""BLOOM (2211.05100): ALiBi, LayerNorms, one of them of the embedding, a plain feed-forward layer,
biases everywhere, and q, k, v of each head in one tensor.

Its config.json states no longest sequence: `seq_length` is what it was trained at, and transformers
does not read it.
"""

from typing import Any

from dolmen.families import common
from dolmen.families.family import BESIDE, Family, Field
from dolmen.families.rules import Rename, Rule, Split
from dolmen.files import kinds
from dolmen.model.spec import (
    AlibiSpec,
    BlockSpec,
    EmbeddingSpec,
    MLPSpec,
    ModelSpec,
    SequentialResidual,
)

FIELDS = (
    common.vocab_size(250880),
    Field("hidden_size", kinds.WIDTH, 64, "Width of the residual stream.", ("n_embed",)),
    common.standard("num_hidden_layers", 2, "n_layer", aliased=True),
    common.standard("num_attention_heads", 8, "n_head", aliased=True, help="Heads."),
    common.standard("max_position_embeddings", 2048, "seq_length", help=common.ALIBI_LENGTH),
    Field(
        "apply_residual_connection_post_layernorm",
        bool,
        False,
        (
            "Add the outputs of attention and MLP to the output of the norm before them, not to "
            "its input."
        ),
    ),
    *common.last_fields(common.LAYER_NORM_EPS, tied=True),
)
NORMED = SequentialResidual(residual="normed")


def read(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a BLOOM config.json: ALiBi, a norm of the embedding, biases everywhere."""
    norm = common.layer_norm(config)
    mixer = common.biased_attention(config, FIELDS, positions=AlibiSpec())
    mlp = MLPSpec(4 * config["hidden_size"], gated=False, activation="gelu_tanh", bias=True)
    embedding = EmbeddingSpec(config["vocab_size"], norm=norm)
    normed = config["apply_residual_connection_post_layernorm"]
    block = BlockSpec(mixer, mlp, norm, NORMED if normed else SequentialResidual())
    return common.make_spec(config, FIELDS, [block] * config["n_layer"], embedding)


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return the field of a BLOOM config.json that `common.write` does not state:
    apply_residual_connection_post_layernorm.
    """
    return {"apply_residual_connection_post_layernorm": spec.blocks[0].arrangement == NORMED}


def rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of BLOOM: q, k, v of each head fused."""
    layer, ours = "transformer.h.{}.", "layers.{}."
    heads = common.attention(spec).heads
    return [
        Rename("transformer.word_embeddings", "embed"),
        Rename("transformer.word_embeddings_layernorm", "embed_norm"),
        Rename(layer + "input_layernorm", ours + "attn_norm"),
        Split(layer + "self_attention.query_key_value", common.QKV, heads, (1, 1, 1)),
        Rename(layer + "self_attention.dense", ours + "attn.o"),
        Rename(layer + "post_attention_layernorm", ours + "mlp_norm"),
        Rename(layer + "mlp.dense_h_to_4h", ours + "mlp.up"),
        Rename(layer + "mlp.dense_4h_to_h", ours + "mlp.down"),
        Rename("transformer.ln_f", "final_norm"),
        Rename("lm_head", "head"),
    ]


BLOOM = Family(
    model_type="bloom",
    title="BLOOM",
    architecture="BloomForCausalLM",
    read=read,
    write=write,
    rules=rules,
    fields=FIELDS,
    only={
        "n_inner": (None,),
        # with pretraining_tp it leaves biases out
        "slow_but_exact": (False, None),
    },
    harmless=(
        "hidden_dropout attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion "
        "offset_alibi skip_bias_add skip_bias_add_qkv"
    ),
    extra_fields={**BESIDE, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    prefix="transformer.",
)
