"""Command R (Cohere, 2024): Llama with LayerNorms without bias, attention and feed-forward layer
side by side after one of them, rope over neighbours, and logits times a number.
"""

from dataclasses import replace
from typing import Any

from dolmen.families import common, llama_like, windows
from dolmen.families.family import Family, Field
from dolmen.families.rules import Rule
from dolmen.files.schema import Flag, Real, optional
from dolmen.model.tree import Norm, Parallel, Tree

EPS = "layer_norm_eps"
FIELDS = llama_like.fields_with(common.eps(EPS, 1e-5))


def read(config: dict[str, Any]) -> Tree:
    """`attention_bias` puts biases on q, k, v and on the output projection."""
    bias = bool(config["attention_bias"])
    tree = llama_like.read(
        config,
        norm=Norm("layernorm", float(config[EPS])),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=bool(config["use_qk_norm"]),
        qk_norm_of="each head",
        interleaved=True,
    )
    tree = common.each_block(tree, lambda block: replace(block, arrangement=Parallel(1)))
    return replace(tree, head=replace(tree.head, scale=float(config["logit_scale"])))


def new(tree: Tree) -> dict[str, Any]:
    mixer = common.attention(tree)
    return {
        **llama_like.new(tree, FIELDS),
        "attention_bias": mixer.q_bias,
        "use_qk_norm": mixer.qk_norm is not None,
        "logit_scale": tree.head.scale,
    }


def rules(tree: Tree) -> list[Rule]:
    return llama_like.rules(tree, {"input_layernorm": "norm"})


FAMILY = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    read=read,
    new=new,
    rules=rules,
    fields=llama_like.changed(
        FIELDS,
        llama_like.ATTENTION_BIAS,
        Field(
            "use_qk_norm",
            optional(Flag()),
            False,
            "A LayerNorm of every query and key head, each with a weight of its own.",
        ),
        Field("logit_scale", Real(0, above=True), 0.0625, "What logits are multiplied by."),
        vocab_size=256000,
        hidden_size=8192,
        intermediate_size=22528,
        num_hidden_layers=40,
        num_attention_heads=64,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=True,
    ),
    only={**windows.NONE, "mlp_bias": (False, None)},
    harmless=("model_max_length",),
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
