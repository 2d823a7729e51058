"""Mistral 7B, Nemo, Small (Jiang et al., 2310.06825): Llama without biases, with one sliding window
for all layers.
"""

from typing import Any

from dolmen.families import llama_like, windows
from dolmen.families.family import Family
from dolmen.model.tree import Tree


def read(config: dict[str, Any]) -> Tree:
    return llama_like.read(config, windows=windows.of_all(config))


def new(tree: Tree) -> dict[str, Any]:
    return {**llama_like.new(tree), **windows.new(tree)}


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    scorer="MistralForSequenceClassification",
    read=read,
    new=new,
    rules=llama_like.rules,
    fields=llama_like.changed(
        (*llama_like.FIELDS, windows.SIZE),
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        sliding_window=4096,
    ),
    only={**llama_like.NO_BIAS, **windows.NO_TYPES},
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
