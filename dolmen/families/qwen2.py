"""Qwen2 and Qwen2.5 (2407.10671): Llama with biases on q, k, v and a sliding window on some layers.

Which layers slide is `layer_types`, or, in older files, those from `max_window_layers` on, if
`use_sliding_window`.
"""

from typing import Any

from dolmen.families import llama_like, windows
from dolmen.families.family import Family, Field
from dolmen.files import kinds
from dolmen.files.schema import Int
from dolmen.model.tree import Tree

FIELDS = llama_like.changed(
    (*llama_like.FIELDS, windows.SIZE),
    windows.USED,
    Field(
        "max_window_layers",
        Int(0, kinds.POSITIONS.high),
        28,
        "Layers before the first with a sliding window, where layer_types is None.",
    ),
    windows.types("by max_window_layers"),
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    max_position_embeddings=32768,
    sliding_window=4096,
)


def windows_of(config: dict[str, Any]) -> list[int | None]:
    """The window of each layer. Raises ValueError naming the field that does not fit."""
    used, first = config["use_sliding_window"], config["max_window_layers"]
    slides = used and config["sliding_window"] is not None
    by_number = [
        windows.SLIDING if slides and i >= first else windows.FULL
        for i in range(config["num_hidden_layers"])
    ]
    return windows.of_types(config, by_number, used)


def new_windows(tree: Tree) -> dict[str, Any]:
    """The fields that say the window of each layer."""
    slides = [size is not None for size in windows.sizes(tree)]
    return {
        **windows.new_types(tree),
        "use_sliding_window": any(slides),
        "max_window_layers": slides.index(True) if any(slides) else len(slides),
    }


def read(config: dict[str, Any]) -> Tree:
    return llama_like.read(config, windows=windows_of(config), qkv_bias=True)


def new(tree: Tree) -> dict[str, Any]:
    return {**llama_like.new(tree), **new_windows(tree)}


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    scorer="Qwen2ForSequenceClassification",
    read=read,
    new=new,
    rules=llama_like.rules,
    fields=FIELDS,
    beside=llama_like.BESIDE,
    only={"attention_bias": (True, None), "mlp_bias": (False, None), "use_mrope": (False, None)},
    ignored=llama_like.IGNORED,
)
