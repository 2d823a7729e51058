"""StarCoder and SantaCoder (Li et al., 2305.06161): GPT-2 whose queries share one key-value head,
and whose q, k, v are one linear: all queries, key, value, or q, k, v of each head where every query
has its own (`multi_query` false).
"""

from dataclasses import replace
from typing import Any

from dolmen.families import common, gpt_like
from dolmen.families.family import Family, Field
from dolmen.families.gpt_like import LAYER, OURS
from dolmen.families.rules import Rename, Rule, Split
from dolmen.files.schema import Flag
from dolmen.model.tree import Attention, Block, Embedding, Table, Tree

FIELDS = (
    *(
        replace(one, default="gelu_pytorch_tanh") if one.name == "activation_function" else one
        for one in gpt_like.FIELDS
    ),
    Field("multi_query", Flag(), True, "One key-value head, not one per query head."),
)


def read(config: dict[str, Any]) -> Tree:
    heads, size = config["n_head"], common.head_size(config, FIELDS)
    mixer = Attention(
        heads,
        1 if config["multi_query"] else heads,
        size,
        q_bias=True,
        k_bias=True,
        v_bias=True,
        o_bias=True,
    )
    block = Block(mixer, common.plain(config, FIELDS), common.layer_norm(config))
    embedding = Embedding(config["vocab_size"], positions=Table(config["n_positions"]))
    return common.tree(config, FIELDS, [block] * config["n_layer"], embedding)


def new(tree: Tree) -> dict[str, Any]:
    return {**gpt_like.new(tree, FIELDS), "multi_query": common.attention(tree).kv_heads == 1}


def rules(tree: Tree) -> list[Rule]:
    mixer = common.attention(tree)
    shared = mixer.kv_heads == 1
    stored = (1, (mixer.heads, 1, 1)) if shared else (mixer.heads, (1, 1, 1))
    return gpt_like.rules(
        [
            Split(LAYER + "attn.c_attn", common.QKV, *stored),
            Rename(LAYER + "attn.c_proj", OURS + "attn.o"),
            Rename(LAYER + "mlp.c_fc", OURS + "mlp.up"),
            Rename(LAYER + "mlp.c_proj", OURS + "mlp.down"),
        ]
    )


FAMILY = Family(
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    scorer="GPTBigCodeForSequenceClassification",
    read=read,
    new=new,
    rules=rules,
    fields=FIELDS,
    only={"scale_attn_weights": (True,)},
    harmless=(
        *gpt_like.HARMLESS,
        "num_key_value_heads",  # follows from multi_query, and nobody reads it
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
        "inference_runner",
        "max_batch_size",
        "max_sequence_length",
        "pad_key_length",
        "pre_allocate_kv_cache",
        "validate_runner_input",
    ),
    beside=gpt_like.BESIDE,
    ignored=gpt_like.IGNORED,
    prefix="transformer.",
)
