"""BLOOM (2211.05100): ALiBi, LayerNorms, one of them of the embedding, a plain feed-forward layer,
biases everywhere, and q, k, v of each head in one tensor.

Its config.json states no longest sequence: `seq_length` is what it was trained at, and transformers
does not read it.
"""

from typing import Any

from dolmen.families.family import BESIDE, Family, Field, expect
from dolmen.families.rules import Rename, Rule, Split
from dolmen.files import kinds
from dolmen.files.schema import Flag, Real
from dolmen.model.tree import (
    Alibi,
    Attention,
    Block,
    Embedding,
    Head,
    Mlp,
    Norm,
    Tree,
    runs_of,
)

FIELDS = (
    Field("vocab_size", kinds.VOCABULARY, 250880, "Rows of the embedding and of the head, tokens."),
    Field("hidden_size", kinds.WIDTH, 64, "Width of the residual stream.", ("n_embed",)),
    Field("n_layer", kinds.LAYERS, 2, "Decoder blocks.", ("num_hidden_layers",)),
    Field("n_head", kinds.HEADS, 8, "Heads.", ("num_attention_heads",)),
    Field(
        "seq_length",
        kinds.POSITIONS,
        2048,
        "Longest sequence, tokens; ALiBi itself goes on.",
        common=("max_position_embeddings",),
    ),
    Field(
        "layer_norm_epsilon",
        Real(0),
        1e-5,
        "Added to the variance inside every norm.",
        common=("norm_eps",),
    ),
    Field(
        "initializer_range",
        Real(0),
        0.02,
        "Standard deviation of initial weights; output projections get it divided by "
        "sqrt(2 * layers).",
    ),
    Field("tie_word_embeddings", Flag(), True, "Head and embedding are one parameter."),
)


def read(c: dict[str, Any]) -> Tree:
    heads, hidden = c["n_head"], c["hidden_size"]
    if hidden % heads:
        raise ValueError(f"hidden_size ({hidden}) is not divisible by n_head ({heads})")
    norm = Norm("layernorm", float(c["layer_norm_epsilon"]), bias=True)
    mixer = Attention(
        heads,
        heads,
        hidden // heads,
        q_bias=True,
        k_bias=True,
        v_bias=True,
        o_bias=True,
        positions=Alibi(),
    )
    mlp = Mlp(4 * hidden, gated=False, activation="gelu_tanh", bias=True)
    return Tree(
        hidden_size=hidden,
        embedding=Embedding(c["vocab_size"], norm=norm),
        runs=runs_of([Block(mixer, mlp, norm)] * c["n_layer"]),
        final_norm=norm,
        head=Head(tied=c["tie_word_embeddings"]),
        max_position_embeddings=c["seq_length"],
        initializer_range=float(c["initializer_range"]),
    )


def new(tree: Tree) -> dict[str, Any]:
    return {
        "vocab_size": tree.embedding.rows,
        "hidden_size": tree.hidden_size,
        "n_layer": len(tree.blocks),
        "n_head": expect(tree.blocks[0].mixer, Attention, "mixer").heads,
        "seq_length": tree.max_position_embeddings,
        "layer_norm_epsilon": tree.final_norm.eps,
        "initializer_range": tree.initializer_range,
        "tie_word_embeddings": tree.head.tied,
    }


def rules(tree: Tree) -> list[Rule]:
    layer, ours = "transformer.h.{}.", "layers.{}."
    heads = expect(tree.blocks[0].mixer, Attention, "mixer").heads
    qkv = tuple(f"{ours}attn.{part}" for part in "qkv")
    return [
        Rename("transformer.word_embeddings", "embed"),
        Rename("transformer.word_embeddings_layernorm", "embed_norm"),
        Rename(layer + "input_layernorm", ours + "attn_norm"),
        Split(layer + "self_attention.query_key_value", qkv, heads, (1, 1, 1)),
        Rename(layer + "self_attention.dense", ours + "attn.o"),
        Rename(layer + "post_attention_layernorm", ours + "mlp_norm"),
        Rename(layer + "mlp.dense_h_to_4h", ours + "mlp.up"),
        Rename(layer + "mlp.dense_4h_to_h", ours + "mlp.down"),
        Rename("transformer.ln_f", "final_norm"),
        Rename("lm_head", "head"),
    ]


FAMILY = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    read=read,
    new=new,
    rules=rules,
    fields=FIELDS,
    only={
        "apply_residual_connection_post_layernorm": (False, None),
        "n_inner": (None,),
        # with pretraining_tp it leaves biases out
        "slow_but_exact": (False, None),
    },
    harmless=(
        "hidden_dropout",
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "offset_alibi",
        "skip_bias_add",
        "skip_bias_add_qkv",
    ),
    beside={
        **BESIDE,
        "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    prefix="transformer.",
)
