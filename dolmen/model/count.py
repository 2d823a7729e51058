"""What a model costs, in closed form: parameters and the floating point operations of a training step."""

import math

from dolmen.model.config import ModelConfig, parameter_shapes


def parameters(c: ModelConfig) -> int:
    """Number of parameters; a tied head counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(c).values())


def training_flops_per_token(c: ModelConfig, sequence_length: int) -> float:
    """FLOPs a token of forward and backward, 2 a multiply-add, backward twice forward, nothing for recomputation.

    Matrices: 6 * their elements, the head's once more where it is the embedding. Attention: 12 * heads * head_dim * keys
    a layer, with keys the mean number a causal query sees, (sequence + 1) / 2, or what a sliding window leaves of it.
    """
    shapes = parameter_shapes(c)
    matrices = sum(math.prod(s) for n, s in shapes.items() if len(s) == 2 and n not in ("embed.weight", "positions.weight", "head.weight"))
    matrices += c.vocab_size * c.hidden_size
    keys = sum(_mean_keys(sequence_length, c.window(layer)) for layer in range(c.num_hidden_layers))
    return 6.0 * matrices + 12.0 * c.num_attention_heads * c.head_dim * keys


def _mean_keys(length: int, window: int | None) -> float:
    w = min(length, window or length)
    return (w * (w + 1) / 2 + (length - w) * w) / length
