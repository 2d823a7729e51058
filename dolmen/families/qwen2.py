"""Qwen2 and Qwen2.5 (2407.10671): Llama with biases on q, k, v and a sliding window on some layers.

Which layers slide is `layer_types`, or, in older files, those from `max_window_layers` on, if
`use_sliding_window`.
"""

from typing import Any

from dolmen.families import llama_like
from dolmen.families.family import Family, Field, expect
from dolmen.files import kinds
from dolmen.files.schema import Flag, Int, List, optional
from dolmen.model.tree import Attention, Tree

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(otherwise: str) -> Field:
    """The field; `otherwise`: what None means."""
    kind = optional(List(kinds.NAME, longest=kinds.LAYERS.high))
    return Field("layer_types", kind, None, f"{FULL} or {SLIDING}, per layer; None: {otherwise}.")


USE_WINDOW = Field("use_sliding_window", Flag(), False, "Whether any layer has a sliding window.")
FIELDS = llama_like.changed(
    (*llama_like.FIELDS, llama_like.SLIDING_WINDOW),
    USE_WINDOW,
    Field(
        "max_window_layers",
        Int(0, kinds.POSITIONS.high),
        28,
        "Layers before the first with a sliding window, where layer_types is None.",
    ),
    layer_types("by max_window_layers"),
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    max_position_embeddings=32768,
    sliding_window=4096,
)


def windows(c: dict[str, Any]) -> list[int | None]:
    """The window of each layer. Raises ValueError naming the field that does not fit."""
    layers = c["num_hidden_layers"]
    window = c["sliding_window"] if c["use_sliding_window"] else None
    types = c["layer_types"]
    if types is None:
        slides = [window is not None and i >= c["max_window_layers"] for i in range(layers)]
        types = [SLIDING if slide else FULL for slide in slides]
    stated = (
        f"use_sliding_window is {c['use_sliding_window']} and sliding_window is "
        f"{c['sliding_window']}"
    )
    return of_types(types, layers, window, stated)


def of_types(types: list[str], layers: int, window: int | None, stated: str) -> list[int | None]:
    """The window of each of these types of layers. Raises ValueError for other types, another
    number of layers, and where there is no window for one that slides: `stated` says why.
    """
    if unknown := sorted(set(types) - {FULL, SLIDING}):
        raise ValueError(f"layer_types has {unknown}: dolmen supports {FULL} and {SLIDING}")
    if len(types) != layers:
        raise ValueError(f"layer_types has {len(types)} entries, num_hidden_layers is {layers}")
    if window is None and (sliding := types.count(SLIDING)):
        raise ValueError(f"layer_types has {sliding} layers of {SLIDING}, but {stated}")
    return [window if kind == SLIDING else None for kind in types]


def new_windows(tree: Tree) -> dict[str, Any]:
    of = [expect(block.mixer, Attention, "mixer").window for block in tree.blocks]
    sliding = [window is not None for window in of]
    return {
        "use_sliding_window": any(sliding),
        "sliding_window": next((window for window in of if window is not None), None),
        "max_window_layers": sliding.index(True) if any(sliding) else len(sliding),
        "layer_types": [SLIDING if s else FULL for s in sliding],
    }


def read(c: dict[str, Any]) -> Tree:
    return llama_like.read(c, windows=windows(c), qkv_bias=True)


def new(tree: Tree) -> dict[str, Any]:
    return {**llama_like.new(tree), **new_windows(tree)}


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=read,
    new=new,
    rules=llama_like.rules,
    fields=FIELDS,
    beside=llama_like.BESIDE,
    only={"attention_bias": (True, None), "mlp_bias": (False, None), "use_mrope": (False, None)},
    ignored=llama_like.IGNORED,
)
