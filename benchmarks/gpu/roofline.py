"""The least time that a training step can take on a device: of each part the time of its arithmetic
at the rate of matrix products, or of the bytes that it must move, whichever is longer.

Bytes are those of a program whose neighbouring passes are fused: what one part gives the next is
written once and read once. e bytes per element of activations, t tokens, h hidden, L layers, f the
feed-forward width, V the vocabulary, P parameters.

    products    6 x matrix elements x t FLOPs
    attention   12 x heads x head size x keys seen x t FLOPs (a query sees half the keys)
    norms       2 L + 1 norms, each with the residual added to it: 4 passes forward, 4 back: 8 e t h
    activation  3 passes forward, 5 back: 8 e t f a layer
    rope        q and k read and written, forward and back: 4 e t (heads + kv heads) x head size
    loss        logits written, read twice, their gradient written: 4 e t V
    optimizer   p, m, v read and written, g read: 28 P; g written, its norm and clipping: 16 P; the
                bf16 copy written, the gradient in bf16 read: 8 P
"""

from dolmen.model.count import (
    attention_flops_per_token,
    parameters,
    training_flops_per_token,
)
from dolmen.model.spec import ModelSpec

OPTIMIZER_BYTES = 28 + 16 + 8


def parts(
    spec: ModelSpec, sequences: int, length: int, flops: float, bandwidth: float, e: int = 2
) -> dict[str, float]:
    """Part -> seconds, for a dense model; `flops` per second of matrix products, `bandwidth` in
    bytes per second, read and written.
    """
    t, layers = sequences * length, spec.layers
    every = t * training_flops_per_token(spec, length)
    products = every - t * attention_flops_per_token(spec, length)
    attention, mlp = spec.blocks[0].mixer, spec.blocks[0].mlp
    q, k = attention.heads * attention.head_size, attention.kv_heads * attention.head_size
    moved = {
        "norms": 8 * e * t * spec.hidden_size * (2 * layers + 1),
        "activation": 8 * e * t * mlp.size * layers,
        "rope": 4 * e * t * (q + k) * layers,
        "loss": 4 * e * t * spec.vocab_size,
        "optimizer": OPTIMIZER_BYTES * parameters(spec),
    }
    return {
        "products": products / flops,
        "attention": (every - products) / flops,
        **{name: count / bandwidth for name, count in moved.items()},
    }
