"""GLM-4 and GLM-4-9B as transformers has them (2406.12793): Llama with biases on q, k, v, rope that
turns neighbours in the first half of each head, and gate and up of the feed-forward layer in one
tensor.

ChatGLM2, ChatGLM3 and the first form of GLM-4-9B are the same under other names (chatglm2.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dolmen.families import common, llama_like, rope
from dolmen.families.family import Family, expect
from dolmen.families.rules import Rule, Split
from dolmen.model.tree import Rope, Sequential, Tree, runs_of
from dolmen.model.tree.block import Arrangement

PARTS = ("layers.{}.mlp.gate", "layers.{}.mlp.up")  # of what files store as one

FIELDS = llama_like.changed(
    llama_like.fields_with(turned=rope.fields(part=0.5)),
    replace(llama_like.ATTENTION_BIAS, default=True, help="Biases on q, k and v."),
    vocab_size=151552,
    hidden_size=4096,
    intermediate_size=13696,
    num_hidden_layers=40,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1.5625e-7,
)


def arranged(config: dict[str, Any], arrangement: Arrangement) -> Tree:
    """The tree of a config.json whose norms stand so."""
    tree = llama_like.read(config, qkv_bias=bool(config["attention_bias"]))
    mixer = common.attention(tree)
    turned = replace(expect(mixer.positions, Rope, "positions"), interleaved=True)
    blocks = [
        replace(block, mixer=replace(mixer, positions=turned), arrangement=arrangement)
        for block in tree.blocks
    ]
    return replace(tree, runs=runs_of(blocks))


def read(config: dict[str, Any]) -> Tree:
    return arranged(config, Sequential())


def new(tree: Tree) -> dict[str, Any]:
    mixer = common.attention(tree)
    turned = expect(mixer.positions, Rope, "positions")
    return {
        **llama_like.new(tree),
        "attention_bias": mixer.q_bias,
        "rope_parameters": rope.new(turned, mixer.head_size),
    }


def rules(tree: Tree, norms: Mapping[str, str] = llama_like.NORMS) -> list[Rule]:
    fused = Split(llama_like.LAYER + "mlp.gate_up_proj", PARTS, 1, (1, 1))
    return llama_like.rules(tree, norms, instead=[fused])


FAMILY = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    scorer="GlmForSequenceClassification",
    read=read,
    new=new,
    rules=rules,
    fields=FIELDS,
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
