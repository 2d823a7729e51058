"""OLMo (2402.00838): Llama with LayerNorms that have no parameters and an epsilon that no field
says; queries, keys and values may be clipped.
"""

from dataclasses import replace
from typing import Any

from dolmen.families import common, llama_like, windows
from dolmen.families.family import Family, Field
from dolmen.files.schema import Real, optional
from dolmen.model.tree import Norm, Tree

NORM = Norm("layernorm", 1e-5, affine=False)
CLIP = Field(
    "clip_qkv",
    optional(Real(0, above=True)),
    None,
    "Numbers of queries, keys and values become at most so large; None: they stay.",
)


def read(config: dict[str, Any]) -> Tree:
    """`attention_bias` puts biases on q, k, v and on the output projection."""
    bias = bool(config["attention_bias"])
    return clipped(config, llama_like.read(config, norm=NORM, qkv_bias=bias, o_bias=bias))


def clipped(config: dict[str, Any], tree: Tree) -> Tree:
    """The same as CLIP says."""
    clip = None if config[CLIP.name] is None else float(config[CLIP.name])
    return common.each_block(tree, lambda b: replace(b, mixer=replace(b.mixer, clip=clip)))


def new(tree: Tree) -> dict[str, Any]:
    mixer = common.attention(tree)
    return {
        **llama_like.new(tree, FIELDS),
        "attention_bias": mixer.q_bias,
        CLIP.name: mixer.clip,
    }


FIELDS = llama_like.fields_with(None)

FAMILY = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    scorer="OlmoForSequenceClassification",
    read=read,
    new=new,
    rules=llama_like.rules,
    fields=llama_like.changed(
        FIELDS,
        llama_like.ATTENTION_BIAS,
        CLIP,
        vocab_size=50304,
    ),
    only={**windows.NONE, "mlp_bias": (False, None)},
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
