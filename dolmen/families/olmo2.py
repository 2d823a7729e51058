"""OLMo 2 (2501.00656): Llama with norms after its layers, not before, and one norm of all queries
of a token and one of all its keys.
"""

from dataclasses import replace
from typing import Any

from dolmen.families import common, llama_like, windows
from dolmen.families.family import Family
from dolmen.families.rules import Rule
from dolmen.model.tree import Sequential, Tree

NORMS = {
    "post_attention_layernorm": "attn_post_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}


def read(config: dict[str, Any]) -> Tree:
    """`attention_bias` puts biases on q, k, v and on the output projection."""
    bias = bool(config["attention_bias"])
    tree = llama_like.read(config, qkv_bias=bias, o_bias=bias, qk_norm=True, qk_norm_of="width")
    return common.each_block(tree, lambda block: replace(block, arrangement=Sequential("output")))


def new(tree: Tree) -> dict[str, Any]:
    return {**llama_like.new(tree), "attention_bias": common.attention(tree).q_bias}


def rules(tree: Tree) -> list[Rule]:
    return llama_like.rules(tree, NORMS)


FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    scorer="Olmo2ForSequenceClassification",
    read=read,
    new=new,
    rules=rules,
    fields=llama_like.changed(
        llama_like.FIELDS, llama_like.ATTENTION_BIAS, vocab_size=50304, rms_norm_eps=1e-5
    ),
    only={**windows.NONE, "mlp_bias": (False, None), "clip_qkv": (None,)},
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
