"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, a plain feed-forward layer, biases
everywhere.

Linear weights are stored [in, out] (Conv1D) and q, k, v are one of them. Files in the wild come
with and without the leading "transformer.", and with the causal mask saved as a buffer.

GPT-3 (Brown et al., 2005.14165) is this at other sizes, but for every second layer, which sees a
band of tokens. No config.json says both: gpt_neo.py has such layers, and does not scale scores.
"""

from typing import Any

from dolmen.families import common, gpt_like
from dolmen.families.family import Family
from dolmen.families.gpt_like import LAYER, OURS
from dolmen.families.rules import Rename, Rule, Split, Transpose
from dolmen.model.tree import Attention, Block, Embedding, Table, Tree


def read(config: dict[str, Any]) -> Tree:
    heads, size = config["n_head"], common.head_size(config, gpt_like.FIELDS)
    mixer = Attention(heads, heads, size, q_bias=True, k_bias=True, v_bias=True, o_bias=True)
    block = Block(mixer, common.plain(config, gpt_like.FIELDS), common.layer_norm(config))
    embedding = Embedding(config["vocab_size"], positions=Table(config["n_positions"]))
    return common.tree(config, gpt_like.FIELDS, [block] * config["n_layer"], embedding)


def rules(tree: Tree) -> list[Rule]:
    return gpt_like.rules(
        [
            Transpose(Split(LAYER + "attn.c_attn", common.QKV, 1, (1, 1, 1))),
            Transpose(Rename(LAYER + "attn.c_proj", OURS + "attn.o")),
            Transpose(Rename(LAYER + "mlp.c_fc", OURS + "mlp.up")),
            Transpose(Rename(LAYER + "mlp.c_proj", OURS + "mlp.down")),
        ]
    )


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    scorer="GPT2ForSequenceClassification",
    read=read,
    new=gpt_like.new,
    rules=rules,
    fields=gpt_like.FIELDS,
    only={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
    },
    harmless=gpt_like.HARMLESS,
    beside=gpt_like.BESIDE,
    ignored=gpt_like.IGNORED,
    prefix="transformer.",
)
