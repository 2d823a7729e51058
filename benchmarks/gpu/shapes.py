"""The models that stages train, at the size that the context asks for."""

from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.case import Context
from dolmen.families import ModelConfig, convert_family, replace_fields
from dolmen.model.count import activation_bytes_per_layer, parameters
from dolmen.model.spec import ModelSpec
from dolmen.model.training import Training
from dolmen.recipes import RECIPES

H100 = 79 << 30  # bytes, where nobody can be asked
BYTES_PER_PARAMETER = 18  # fp32 master, gradient and two moments; the bf16 copy a step works with
TINY = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
)


@dataclass(frozen=True)
class Shape:
    """A model and the sequences it is trained on. `sequences`: how many at once are tried."""

    name: str
    model: ModelConfig
    length: int
    sequences: tuple[int, ...] = (1, 2, 4)
    training: Training = Training()

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def with_num_layers(self, number: int) -> "Shape":
        """The same with so many layers."""
        return replace(self, model=with_layers(self.model, number))


def of(context: Context, recipe: str, dropout: float = 0.0, **changes) -> Shape:
    """The model of a recipe at sequence length 4096, or in miniature with its structure; `changes`
    of fields of its config.json. With a sliding window a Llama is a Mistral.
    """
    model = RECIPES[recipe]().model
    if "sliding_window" in changes:
        model = convert_family(model, "mistral")
    if not context.full:
        names = model.family.names
        window = {"sliding_window": 8} if "sliding_window" in changes else {}
        changes = {n: value for n, value in TINY.items() if n in names} | window
    model = replace_fields(model, {model.family.names[n]: value for n, value in changes.items()})
    full = context.full
    sequences = (1, 2, 4) if full else (1, 2)
    return Shape(recipe, model, 4096 if full else 32, sequences, Training(dropout))


def with_layers(model: ModelConfig, number: int) -> ModelConfig:
    return replace_fields(model, {model.family.names["num_hidden_layers"]: number})


def fitting(context: Context, recipe: str) -> Shape:
    """The model of a recipe with as many layers as the device trains."""
    shape = of(context, recipe)
    if not context.full:
        return shape
    memory = H100
    if context.cuda and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
    return shape.with_num_layers(layers_that_fit(shape.model, shape.length, memory))


def layers_that_fit(model: ModelConfig, length: int, memory: int) -> int:
    """Layers of `model` that one device of `memory` bytes trains with one sequence at a time: the
    rest of the model, their states, and what they keep for backward; a tenth stays free.
    """

    one, two = (parameters(with_layers(model, n).spec) for n in (1, 2))
    kept = activation_bytes_per_layer(model.spec, 1, length)
    layer = (two - one) * BYTES_PER_PARAMETER + kept
    rest = (2 * one - two) * BYTES_PER_PARAMETER + (4 << 30)  # of the head's logits, kernels
    return max(1, min(model.spec.layers, int((0.9 * memory - rest) // layer)))
