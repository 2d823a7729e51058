"""Gemma (2403.08295): Llama with norms whose weight is stored less 1, an embedding times
sqrt(hidden_size), and heads whose size is their own.
"""

import math
from dataclasses import replace
from typing import Any

from dolmen.families import llama_like
from dolmen.families.family import Family
from dolmen.model.tree import Norm, Tree, runs_of

TANH = "gelu_pytorch_tanh"


def read(c: dict[str, Any]) -> Tree:
    """The first files say "gelu" for the form by tanh, and transformers reads them so."""
    return common({**c, "hidden_act": TANH if c["hidden_act"] == "gelu" else c["hidden_act"]})


def common(c: dict[str, Any]) -> Tree:
    """What Gemma 2 has of it. `attention_bias` puts biases on q, k, v and on the output
    projection.
    """
    bias = bool(c["attention_bias"])
    tree = llama_like.read(c, qkv_bias=bias, o_bias=bias)
    norm = Norm("rmsnorm", tree.final_norm.eps, zero_centred=True)
    return replace(
        tree,
        embedding=replace(tree.embedding, scale=math.sqrt(tree.hidden_size)),
        runs=runs_of([replace(block, norm=norm) for block in tree.blocks]),
        final_norm=norm,
    )


def new(tree: Tree) -> dict[str, Any]:
    return {**llama_like.new(tree), "attention_bias": llama_like.mixer(tree).q_bias}


DEFAULTS = dict(
    vocab_size=256000, head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True
)
ONLY = {"mlp_bias": (False, None), "use_bidirectional_attention": (None, False)}

FAMILY = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
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
    only={**llama_like.NO_WINDOW, **ONLY, "sliding_window": (None,)},
    harmless=("hidden_activation",),
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
