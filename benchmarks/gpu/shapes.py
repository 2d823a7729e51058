"""The models that stages train, at the size that the context asks for."""

from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.case import Context
from dolmen.model.config import ModelConfig
from dolmen.model.count import activation_bytes_per_layer, parameters
from dolmen.recipes import RECIPES

H100 = 79 << 30  # bytes, where nobody can be asked
BYTES_PER_PARAMETER = 18  # fp32 master, gradient and two moments; the bf16 copy a step works with
TINY = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=16,
)


@dataclass(frozen=True)
class Shape:
    """A model and the sequences it is trained on. `sequences`: how many at once are tried."""

    name: str
    config: ModelConfig
    length: int
    sequences: tuple[int, ...] = (1, 2, 4)


def of(context: Context, recipe: str, **changes) -> Shape:
    """The model of a recipe at sequence length 4096, or in miniature with its structure."""
    config = RECIPES[recipe]().model
    if not context.full:
        kv = {"num_key_value_heads": 2}
        experts = {"num_experts": 4, "num_experts_per_tok": 2} if config.num_experts else {}
        narrow = {"moe_intermediate_size": 32} if config.moe_intermediate_size else {}
        config = replace(config, **TINY, **kv, **experts, **narrow)
        changes = {k: v for k, v in changes.items() if k in ("dropout", "sliding_window")}
        changes |= {"sliding_window": 8} if "sliding_window" in changes else {}
    return Shape(
        recipe,
        replace(config, **changes),
        4096 if context.full else 32,
        (1, 2, 4) if context.full else (1, 2),
    )


def fitting(context: Context, recipe: str) -> Shape:
    """The model of a recipe with as many layers as the device trains."""
    shape = of(context, recipe)
    if not context.full:
        return shape
    memory = H100
    if context.cuda and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
    layers = layers_that_fit(shape.config, shape.length, memory)
    return replace(shape, config=replace(shape.config, num_hidden_layers=layers))


def layers_that_fit(config: ModelConfig, length: int, memory: int) -> int:
    """Layers of `config` that one device of `memory` bytes trains with one sequence at a time: the
    rest of the model, their states, and what they keep for backward; a tenth stays free.
    """

    one, two = (parameters(replace(config, num_hidden_layers=n)) for n in (1, 2))
    layer = (two - one) * BYTES_PER_PARAMETER + activation_bytes_per_layer(config, 1, length)
    rest = (2 * one - two) * BYTES_PER_PARAMETER + (4 << 30)  # of the head's logits, kernels
    return max(1, min(config.num_hidden_layers, int((0.9 * memory - rest) // layer)))
