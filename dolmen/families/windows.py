"""Sliding windows in a config.json: in all layers, or in those whose layer type is
"sliding_attention".
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from annotated_types import MaxLen

from dolmen.core.messages import plural
from dolmen.families.family import Field, expect, flag
from dolmen.files import kinds
from dolmen.model.spec import AttentionSpec, ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"
SIZE = Field(
    "sliding_window",
    kinds.POSITION | None,
    None,
    "Sliding window in tokens, including the query. None: no window.",
)
USED = Field("use_sliding_window", bool, False, "Use sliding windows.")
# `only` of families without layer types, and of those without a window
NO_TYPES = {"layer_types": (None,)}
NONE = {**NO_TYPES, SIZE.name: (None,)}


def types(otherwise: str) -> Field:
    """Return the field `layer_types`; `otherwise` describes, in its help, what None means."""
    kind = Annotated[list[Literal[FULL, SLIDING]] | None, MaxLen(kinds.MOST_LAYERS)]
    return Field("layer_types", kind, None, f"{FULL} or {SLIDING}, per layer; None: {otherwise}.")


def pattern(every: int) -> tuple[Field, Field]:
    """Return the fields layer_types and sliding_window_pattern of a family in which every
    `every`-th layer has full attention and all others a window.
    """
    name = "sliding_window_pattern"
    help_text = "Every n-th layer has full attention, if layer_types is None."
    otherwise = f"all are sliding_attention but every {name}-th"
    return types(otherwise), Field(name, kinds.LAYERS, every, help_text)


def pattern_windows(config: dict[str, Any]) -> list[int | None]:
    """Return the sliding window of each layer (None: full attention), by layer_types or else by
    sliding_window_pattern: every n-th layer is full.
    """
    interval = config["sliding_window_pattern"]
    # numbered from 1: every n-th has full attention
    layers = range(1, config["num_hidden_layers"] + 1)
    return typed_windows(config, [SLIDING if i % interval else FULL for i in layers])


def uniform_windows(config: dict[str, Any], used: bool = True) -> list[int | None]:
    """Return the window of each layer: sliding_window for all if `used`, else None for all."""
    return [config[SIZE.name] if used else None] * config["num_hidden_layers"]


def typed_windows(
    config: dict[str, Any], otherwise: Sequence[str], used: bool = True
) -> list[int | None]:
    """Return the window of each layer: sliding_window where its type is sliding (and
    `used`), else None. The types are `layer_types`, or `otherwise` if that is None. Raises
    ValueError if their number is not that of the layers, and if a layer slides without a window
    size.
    """
    layers, stated = config["num_hidden_layers"], config["layer_types"]
    of = list(otherwise if stated is None else stated)
    if len(of) != layers:
        entries = plural(len(of), "entry", "entries")
        raise ValueError(
            f"layer_types has {entries}, but num_hidden_layers is {layers}: set "
            f"{flag('layer_types')} to one per layer"
        )
    size = config[SIZE.name] if used else None
    # `used` is False: the file has a size and switches it off (Qwen2)
    if size is None and SLIDING in of:
        missing = f"{SIZE.name} is None" if used else f"{USED.name} is False"
        sliding = plural(of.count(SLIDING), "layer")
        raise ValueError(
            f"layer_types has {sliding} of {SLIDING}, but {missing}: set "
            f"{flag(SIZE.name if used else USED.name)}, or other types"
        )
    return [size if kind == SLIDING else None for kind in of]


def sizes(spec: ModelSpec) -> list[int | None]:
    """Return the window of each layer of a spec (None: full attention). Raises ValueError if a
    mixer is not plain attention.
    """
    return [expect(block.mixer, AttentionSpec, "mixer").window for block in spec.blocks]


def first_size(spec: ModelSpec) -> int | None:
    """Return the size of the first layer that has a window (the field sliding_window), or None."""
    return next((size for size in sizes(spec) if size is not None), None)


def layer_types(spec: ModelSpec) -> list[str]:
    """Return the type of each layer, as the field layer_types has it."""
    return [FULL if size is None else SLIDING for size in sizes(spec)]
