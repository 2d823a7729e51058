"""Generation: what weights and cache take, and how fast a token of each text is made. A token reads
all weights and the whole cache once, so memory's bandwidth bounds it until texts are many:

    seconds = max(bytes of weights and cache / bandwidth, 2 x products x texts / rate)
              + 2 sums over tp per layer

Of experts those are read that a batch chooses, of E by k per token 1 - (1 - k / E)^texts.
"""

import math
from dataclasses import dataclass

from dolmen.core.topology import Topology
from dolmen.model import count
from dolmen.model.spec import AttentionSpec, ModelSpec, MoESpec
from dolmen.planning.cost import Placement, collective_seconds
from dolmen.planning.hardware import Cluster
from dolmen.planning.question import PRODUCTS, Question
from dolmen.planning.space import Space


@dataclass(frozen=True)
class Serving:
    """One copy of the model on `tp` GPUs; bytes are of one of them."""

    tp: int
    weights: int
    """Bytes of the weights."""
    cache: int
    """Bytes of the KV cache of all sequences at their full length."""
    other: int
    """Bytes of context and workspace."""
    fits: bool
    seconds: float
    """Seconds per token of every sequence, once all are at full length."""
    tokens_per_second: float
    """Tokens of all sequences, per GPU."""
    bound: str
    """memory, compute or tp."""
    most_texts: int
    """Most sequences of this length whose cache fits."""

    @property
    def held(self) -> int:
        """Bytes that one GPU holds in generation: weights, KV cache, context and workspace."""
        return self.weights + self.cache + self.other


@dataclass(frozen=True)
class Inference:
    """The result of `dolmen plan --inference`."""

    model: str
    cluster: Cluster
    batch: int
    """Sequences at once."""
    length: int
    """Tokens of each sequence."""
    dtype: str
    rows: tuple[Serving, ...]
    """A row for each tp."""


def inference(question: Question, batch: int, length: int | None) -> Inference:
    """Predict the generation of `batch` sequences of `length` tokens (None: the model's longest),
    for every tp within a node. Raises ValueError for bidirectional models, too long sequences, and
    pins other than tp.
    """
    spec, cluster = question.run.spec, question.cluster
    if spec.both_ways:
        raise ValueError(f"{question.name} is a masked language model, which cannot generate")
    most = spec.max_position_embeddings
    if (length or 0) > most:
        raise ValueError(
            f"length ({length:,}) is over the model's max_position_embeddings ({most:,}): use "
            f"--length {most} or less"
        )
    pins = question.pins
    if pins.specified.keys() - {"tp"}:
        name = min(pins.specified.keys() - {"tp"}).replace("_", "-")
        raise ValueError(f"--layout.{name} is for training: with --inference give only --layout.tp")
    space = Space(spec, cluster.gpus_per_node, cluster.gpus_per_node, 1, pins=pins)
    sizes = sorted({tp for tp, cp, pp, _, ep in space.meshes() if cp * pp * ep == 1})
    if not sizes:
        space.refuse()
    dtype = PRODUCTS[question.run.train.dtype]
    rows = [serving(spec, cluster, tp, batch, length or most, dtype) for tp in sizes]
    return Inference(question.name, cluster, batch, length or most, dtype, tuple(rows))


def serving(
    spec: ModelSpec, cluster: Cluster, tp: int, batch: int, length: int, dtype: str
) -> Serving:
    """Return predicted memory, seconds per token, throughput and bottleneck of generating `batch`
    sequences of `length` tokens with the model on `tp` GPUs of the cluster.
    """
    device, size = cluster.device, 4 if dtype == "fp32" else 2
    weights = read = 0
    for param in spec.params.values():
        number = size * math.prod(param.local_shape({"tp": tp}))
        weights += number
        # a small batch reads few experts
        read += round(number * _active_expert_share(spec, batch)) if param.stacked else number
    text = cache_bytes(spec, tp, length, size)
    moved = (read + batch * text) / (device.bandwidth * device.streaming)
    # forward only
    per_token = count.training_flops_per_token(spec, length) / 3
    computed = batch * per_token / tp / (device.rate(dtype) * device.product)
    road = Placement(cluster, Topology(tp=tp), min(tp, cluster.gpus_per_node))
    payload = batch * spec.hidden_size * size
    # after attention and after the MLP
    sums = 2 * spec.layers * collective_seconds("all-reduce", payload, road.road(range(tp)))
    parts = {"memory": moved, "compute": computed, "tp": sums}
    # reading and multiplying overlap, sums do not
    seconds = max(moved, computed) + sums
    # for the KV cache
    left = device.memory - device.reserved - weights
    return Serving(
        tp,
        weights,
        batch * text,
        device.reserved,
        batch * text <= left,
        seconds,
        batch / seconds / tp,
        max(parts, key=lambda name: parts[name]),
        max(0, left // text),
    )


def cache_bytes(spec: ModelSpec, tp: int, length: int, size: int) -> int:
    """Return the bytes of the KV cache of one sequence on a rank of tp: keys and values of its
    heads (of all heads if tp does not divide them), within a sliding window; or the latent and rope
    key of latent attention. `size`: bytes of an element.
    """
    total = 0
    for block in spec.blocks:
        mixer = block.mixer
        # a sliding window forgets the rest
        cached = min(length, mixer.window or length)
        if isinstance(mixer, AttentionSpec):
            heads = mixer.kv_heads // tp if mixer.kv_heads % tp == 0 else mixer.kv_heads
            width = heads * sum(mixer.head_sizes)
        else:
            # shared by all heads, so tp does not divide it
            width = mixer.kv_rank + mixer.positions.size
        total += cached * width * size
    return total


def _active_expert_share(spec: ModelSpec, batch: int) -> float:
    """Return the expected share of experts that a batch of tokens routes to; 1 without experts."""
    known = [b.mlp for b in spec.blocks if isinstance(b.mlp, MoESpec)]
    return 1 - (1 - known[0].per_token / known[0].number) ** batch if known else 1.0
