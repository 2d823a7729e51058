"""What GPT-2 and those written after it share: the fields of their config.json, a plain
feed-forward layer, and the names of the weights around the layers' own.
"""

from collections.abc import Sequence
from typing import Any

from dolmen.families import common
from dolmen.families.family import ACTIVATION, BESIDE, Field
from dolmen.families.rules import Rename, Rule
from dolmen.files import kinds
from dolmen.files.schema import optional
from dolmen.model.tree import Tree

FIELDS = (
    common.vocab_size(50257),
    Field(
        "n_positions",
        kinds.POSITIONS,
        1024,
        "Longest sequence, tokens: rows of the table of positions, where there is one.",
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
DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
HARMLESS = (
    "n_ctx",
    *DROPOUT,
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
)
BESIDE = {**BESIDE, **dict.fromkeys(DROPOUT, 0.0)}
LAYER, OURS = "transformer.h.{}.", "layers.{}."
IGNORED = (r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",)


def new(tree: Tree, fields: Sequence[Field] = FIELDS) -> dict[str, Any]:
    """The fields that all of them have, of the first layer."""
    mlp = common.mlp(tree)
    return {
        **common.new(tree, fields),
        "n_head": common.attention(tree).heads,
        "n_inner": mlp.size,
        "activation_function": "gelu_new" if mlp.activation == "gelu_tanh" else mlp.activation,
    }


def rules(layer: Sequence[Rule], first: str = "attn_norm") -> list[Rule]:
    """Weight names, with the rules of the layers' matrices; `first`: what ln_1 is."""
    return [
        Rename("transformer.wte", "embed"),
        Rename("transformer.wpe", "positions"),
        Rename(LAYER + "ln_1", OURS + first),
        *layer,
        Rename(LAYER + "ln_2", OURS + "mlp_norm"),
        Rename("transformer.ln_f", "final_norm"),
        Rename("lm_head", "head"),
    ]
