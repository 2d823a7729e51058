"""Sliding windows in a config.json: one for all layers, or one for the layers whose type says that
they slide.
"""

from collections.abc import Sequence
from typing import Any

from dolmen.core.messages import plural
from dolmen.families.family import Field, expect, flag
from dolmen.files import kinds
from dolmen.files.schema import Flag, Int, List, String, optional
from dolmen.model.spec import AttentionSpec, ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"
SIZE = Field(
    "sliding_window",
    optional(Int(0, kinds.POSITIONS.high)),
    None,
    "Tokens a query sees, itself included; None: all before it.",
)
USED = Field("use_sliding_window", Flag(), False, "Whether any layer has a sliding window.")
# of families that have no types of layers, and of those that have no window either
NO_TYPES = {"layer_types": (None,)}
NONE = {**NO_TYPES, SIZE.name: (None,)}


def types(otherwise: str) -> Field:
    """The field of the layers' types; `otherwise`: what None means."""
    kind = optional(List(String((FULL, SLIDING)), longest=kinds.LAYERS.high))
    return Field("layer_types", kind, None, f"{FULL} or {SLIDING}, per layer; None: {otherwise}.")


def pattern(every: int) -> tuple[Field, Field]:
    """The fields of layers of which all slide but one of `every`."""
    name = "sliding_window_pattern"
    help_text = "Of so many layers the last sees all, where layer_types is None."
    otherwise = f"all slide but those whose number {name} divides"
    return types(otherwise), Field(name, kinds.LAYERS, every, help_text)


def pattern_windows(config: dict[str, Any]) -> list[int | None]:
    """The window of each layer, by the fields of `pattern`."""
    every = config["sliding_window_pattern"]
    layers = range(1, config["num_hidden_layers"] + 1)
    return typed_windows(config, [SLIDING if i % every else FULL for i in layers])


def uniform_windows(config: dict[str, Any], used: bool = True) -> list[int | None]:
    """The window of each layer: that of SIZE, if it is `used`."""
    return [config[SIZE.name] if used else None] * config["num_hidden_layers"]


def typed_windows(
    config: dict[str, Any], otherwise: Sequence[str], used: bool = True
) -> list[int | None]:
    """The window of each layer: that of SIZE, if it is `used`, where its type says that it slides;
    the types are `layer_types`, or else `otherwise`. Raises ValueError for another number of
    layers, and where there is no window for one that slides.
    """
    layers, stated = config["num_hidden_layers"], config["layer_types"]
    of = list(otherwise if stated is None else stated)
    if len(of) != layers:
        entries = plural(len(of), "entry", "entries")
        raise ValueError(
            f"layer_types has {entries}, num_hidden_layers is {layers}: set "
            f"{flag('layer_types')} to one per layer"
        )
    size = config[SIZE.name] if used else None
    if size is None and SLIDING in of:
        missing = f"{SIZE.name} is None" if used else f"{USED.name} is False"
        sliding = plural(of.count(SLIDING), "layer")
        raise ValueError(
            f"layer_types has {sliding} of {SLIDING}, but {missing}: set "
            f"{flag(SIZE.name if used else USED.name)}, or other types"
        )
    return [size if kind == SLIDING else None for kind in of]


def sizes(tree: ModelSpec) -> list[int | None]:
    """The window of each layer. Raises ValueError where one has another mixer than attention."""
    return [expect(block.mixer, AttentionSpec, "mixer").window for block in tree.blocks]


def write(tree: ModelSpec) -> dict[str, Any]:
    """SIZE, of the first layer that has a window."""
    return {SIZE.name: next((size for size in sizes(tree) if size is not None), None)}


def write_types(tree: ModelSpec) -> dict[str, Any]:
    """SIZE and the types of the layers."""
    return {**write(tree), "layer_types": [FULL if s is None else SLIDING for s in sizes(tree)]}
