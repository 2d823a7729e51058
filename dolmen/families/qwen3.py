"""Qwen3, dense (2505.09388): Qwen2 with RMSNorm on every query and key head, no biases, and a head
size of its own.
"""

from typing import Any

from dolmen.families import common, llama_like, qwen2
from dolmen.families.family import Family
from dolmen.model.tree import Tree


def read(config: dict[str, Any]) -> Tree:
    """`attention_bias` puts biases on q, k, v and on the output projection."""
    bias, sizes = bool(config["attention_bias"]), qwen2.windows_of(config)
    return llama_like.read(config, windows=sizes, qkv_bias=bias, o_bias=bias, qk_norm=True)


def new(tree: Tree) -> dict[str, Any]:
    return {
        **llama_like.new(tree),
        **qwen2.new_windows(tree),
        "attention_bias": common.attention(tree).q_bias,
    }


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    scorer="Qwen3ForSequenceClassification",
    read=read,
    new=new,
    rules=llama_like.rules,
    fields=llama_like.changed(qwen2.FIELDS, llama_like.ATTENTION_BIAS, head_dim=128),
    only={"mlp_bias": (False, None)},
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
