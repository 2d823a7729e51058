"""Llama 1 to 3.3 and everything saved as `model_type: llama` (Touvron et al., 2302.13971; Dubey et
al., 2407.21783).
"""

from typing import Any

from dolmen.families import llama_like
from dolmen.families.family import Family, Field, expect
from dolmen.files.schema import Flag, optional
from dolmen.model.tree import Mlp, Tree


def read(c: dict[str, Any]) -> Tree:
    """`attention_bias` puts biases on q, k, v and on the output projection. transformers refuses
    heads that do not divide the width, whatever head_dim says.
    """
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    if hidden % heads:
        raise ValueError(
            f"hidden_size ({hidden}) is not divisible by num_attention_heads ({heads}): set "
            "model.model-type to mistral, which is the same decoder, and give head_dim"
        )
    bias = bool(c["attention_bias"])
    return llama_like.read(c, qkv_bias=bias, o_bias=bias, mlp_bias=bool(c["mlp_bias"]))


def new(tree: Tree) -> dict[str, Any]:
    return {
        **llama_like.new(tree),
        "attention_bias": llama_like.mixer(tree).q_bias,
        "mlp_bias": expect(tree.blocks[0].mlp, Mlp, "mlp").bias,
    }


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=read,
    new=new,
    rules=llama_like.rules,
    fields=(
        *llama_like.FIELDS,
        llama_like.ATTENTION_BIAS,
        Field("mlp_bias", optional(Flag()), False, "Biases on the feed-forward projections."),
    ),
    only={**llama_like.NO_WINDOW, "sliding_window": (None,)},
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
