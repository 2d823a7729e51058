"""Llama 1 to 3.3, Code Llama (2302.13971, 2307.09288, 2407.21783, 2308.12950), and everything saved
as `model_type: llama`.
"""

from typing import Any

from dolmen.families import common, llama_like, windows
from dolmen.families.family import Family, Field, knob
from dolmen.files.schema import Flag, optional
from dolmen.model.tree import Tree

INSTEAD = f", or {knob('model_type')} to mistral, which is the same decoder, and {knob('head_dim')}"


def read(config: dict[str, Any]) -> Tree:
    """`attention_bias` puts biases on q, k, v and on the output projection. transformers refuses
    heads that do not divide the width, whatever head_dim says.
    """
    common.head_size(config, llama_like.FIELDS, INSTEAD)
    bias = bool(config["attention_bias"])
    return llama_like.read(config, qkv_bias=bias, o_bias=bias, mlp_bias=bool(config["mlp_bias"]))


def new(tree: Tree) -> dict[str, Any]:
    return {
        **llama_like.new(tree),
        "attention_bias": common.attention(tree).q_bias,
        "mlp_bias": common.mlp(tree).bias,
    }


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    scorer="LlamaForSequenceClassification",
    read=read,
    new=new,
    rules=llama_like.rules,
    fields=(
        *llama_like.FIELDS,
        llama_like.ATTENTION_BIAS,
        Field("mlp_bias", optional(Flag()), False, "Biases on the feed-forward projections."),
    ),
    only=windows.NONE,
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
