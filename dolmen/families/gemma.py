"""Gemma (2403.08295): Llama with norms whose weight is stored less 1, an embedding times
sqrt(hidden_size), and heads whose size is their own.
"""

import math
from dataclasses import replace
from typing import Any

from dolmen.families import common, llama_like, windows
from dolmen.families.family import Family
from dolmen.model.tree import Tree, runs_of

TANH = "gelu_pytorch_tanh"


def read(config: dict[str, Any]) -> Tree:
    """The first files say "gelu" for the form by tanh, and transformers reads them so."""
    name = config["hidden_act"]
    return read_stated({**config, "hidden_act": TANH if name == "gelu" else name})


def read_stated(config: dict[str, Any]) -> Tree:
    """As Gemma 2 has it too: the activation is the one stated. `attention_bias` puts biases on q,
    k, v and on the output projection.
    """
    bias = bool(config["attention_bias"])
    tree = llama_like.read(config, qkv_bias=bias, o_bias=bias)
    norm = replace(tree.blocks[0].norm, zero_centred=True)
    return replace(
        tree,
        embedding=replace(tree.embedding, scale=math.sqrt(tree.hidden_size)),
        runs=runs_of([replace(block, norm=norm) for block in tree.blocks]),
        final_norm=norm,
    )


def new(tree: Tree) -> dict[str, Any]:
    return {**llama_like.new(tree), "attention_bias": common.attention(tree).q_bias}


DEFAULTS = dict(
    vocab_size=256000, head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True
)
ONLY = {"mlp_bias": (False, None), "use_bidirectional_attention": (None, False)}

FAMILY = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    scorer="GemmaForSequenceClassification",
    read=read,
    new=new,
    rules=llama_like.rules,
    fields=llama_like.changed(
        llama_like.FIELDS,
        llama_like.ATTENTION_BIAS,
        hidden_size=3072,
        intermediate_size=24576,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        hidden_act=TANH,
        **DEFAULTS,
    ),
    only={**windows.NONE, **ONLY},
    harmless=("hidden_activation",),
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
