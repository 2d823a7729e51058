"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, a plain feed-forward layer, biases
everywhere.

Linear weights are stored [in, out] (Conv1D) and q, k, v are one of them. Files in the wild come
with and without the leading "transformer.", and with the causal mask saved as a buffer.
"""

from typing import Any

from dolmen.families.family import BESIDE, Family, Field, activation, expect
from dolmen.families.rules import Rename, Rule, Split, Transpose
from dolmen.files import kinds
from dolmen.files.schema import Flag, Real, optional
from dolmen.model.tree import Attention, Block, Embedding, Head, Mlp, Norm, Table, Tree, runs_of

FIELDS = (
    Field("vocab_size", kinds.VOCABULARY, 50257, "Rows of the embedding and of the head, tokens."),
    Field(
        "n_positions",
        kinds.POSITIONS,
        1024,
        "Longest sequence, tokens: rows of the table of positions.",
        ("max_position_embeddings",),
    ),
    Field("n_embd", kinds.WIDTH, 768, "Width of the residual stream.", ("hidden_size",)),
    Field("n_layer", kinds.LAYERS, 12, "Decoder blocks.", ("num_hidden_layers",)),
    Field("n_head", kinds.HEADS, 12, "Heads.", ("num_attention_heads",)),
    Field(
        "n_inner",
        optional(kinds.WIDTH),
        None,
        "Width of the feed-forward layer; None: 4 n_embd.",
        common=("intermediate_size",),
    ),
    Field(
        "activation_function",
        kinds.NAME,
        "gelu_new",
        "Activation of the feed-forward layer: gelu_new, gelu (the exact erf form), silu, relu.",
        common=("hidden_act",),
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
        "Standard deviation of initial weights; output "
        "projections get it divided by sqrt(2 * layers).",
    ),
    Field("tie_word_embeddings", Flag(), True, "Head and embedding are one parameter."),
)


def read(c: dict[str, Any]) -> Tree:
    heads, hidden = c["n_head"], c["n_embd"]
    if hidden % heads:
        raise ValueError(f"n_embd ({hidden}) is not divisible by n_head ({heads})")
    norm = Norm("layernorm", float(c["layer_norm_epsilon"]), bias=True)
    mixer = Attention(
        heads, heads, hidden // heads, q_bias=True, k_bias=True, v_bias=True, o_bias=True
    )
    mlp = Mlp(
        4 * hidden if c["n_inner"] is None else c["n_inner"],
        gated=False,
        activation=activation(c["activation_function"], "activation_function"),
        bias=True,
    )
    return Tree(
        hidden_size=hidden,
        embedding=Embedding(c["vocab_size"], positions=Table(c["n_positions"])),
        runs=runs_of([Block(mixer, mlp, norm)] * c["n_layer"]),
        final_norm=norm,
        head=Head(tied=c["tie_word_embeddings"]),
        max_position_embeddings=c["n_positions"],
        initializer_range=float(c["initializer_range"]),
    )


def new(tree: Tree) -> dict[str, Any]:
    mlp = expect(tree.blocks[0].mlp, Mlp, "mlp")
    return {
        "vocab_size": tree.embedding.rows,
        "n_positions": tree.max_position_embeddings,
        "n_embd": tree.hidden_size,
        "n_layer": len(tree.blocks),
        "n_head": expect(tree.blocks[0].mixer, Attention, "mixer").heads,
        "n_inner": mlp.size,
        "activation_function": "gelu_new" if mlp.activation == "gelu_tanh" else mlp.activation,
        "layer_norm_epsilon": tree.final_norm.eps,
        "initializer_range": tree.initializer_range,
        "tie_word_embeddings": tree.head.tied,
    }


def rules(tree: Tree) -> list[Rule]:
    layer, qkv = "transformer.h.{}.", tuple(f"layers.{{}}.attn.{part}" for part in "qkv")
    return [
        Rename("transformer.wte", "embed"),
        Rename("transformer.wpe", "positions"),
        Rename(layer + "ln_1", "layers.{}.attn_norm"),
        Transpose(Split(layer + "attn.c_attn", qkv, 1, (1, 1, 1))),
        Transpose(Rename(layer + "attn.c_proj", "layers.{}.attn.o")),
        Rename(layer + "ln_2", "layers.{}.mlp_norm"),
        Transpose(Rename(layer + "mlp.c_fc", "layers.{}.mlp.up")),
        Transpose(Rename(layer + "mlp.c_proj", "layers.{}.mlp.down")),
        Rename("transformer.ln_f", "final_norm"),
        Rename("lm_head", "head"),
    ]


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    read=read,
    new=new,
    rules=rules,
    fields=FIELDS,
    only={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
    },
    harmless=(
        "n_ctx",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
    ),
    beside={**BESIDE, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    prefix="transformer.",
)
