"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, a plain feed-forward layer, biases
everywhere.

Linear weights are stored [in, out] (Conv1D) and q, k, v are one of them. Files in the wild come
with and without the leading "transformer.", and with the causal mask saved as a buffer.
"""

from typing import Any

from dolmen.families import common
from dolmen.families.family import ACTIVATION, BESIDE, Family, Field, activation
from dolmen.families.rules import Rename, Rule, Split, Transpose
from dolmen.files import kinds
from dolmen.files.schema import optional
from dolmen.model.tree import Attention, Block, Embedding, Mlp, Table, Tree

FIELDS = (
    common.vocab_size(50257),
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
        ACTIVATION,
        "gelu_new",
        "Activation of the feed-forward layer: gelu_new, gelu (the exact erf form), silu, relu.",
        common=("hidden_act",),
    ),
    *common.ends(common.LAYER_NORM_EPS, tied=True),
)


def read(config: dict[str, Any]) -> Tree:
    heads, size, inner = config["n_head"], common.head_size(config, FIELDS), config["n_inner"]
    mixer = Attention(heads, heads, size, q_bias=True, k_bias=True, v_bias=True, o_bias=True)
    mlp = Mlp(
        4 * config["n_embd"] if inner is None else inner,
        gated=False,
        activation=activation(config, "activation_function"),
        bias=True,
    )
    blocks = [Block(mixer, mlp, common.layer_norm(config))] * config["n_layer"]
    embedding = Embedding(config["vocab_size"], positions=Table(config["n_positions"]))
    return common.tree(config, FIELDS, blocks, embedding)


def new(tree: Tree) -> dict[str, Any]:
    mlp = common.mlp(tree)
    return {
        **common.new(tree, FIELDS),
        "n_head": common.attention(tree).heads,
        "n_inner": mlp.size,
        "activation_function": "gelu_new" if mlp.activation == "gelu_tanh" else mlp.activation,
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
