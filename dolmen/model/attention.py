"""Attention over this rank's heads: norms and rope where the config says so, grouped queries, and
an optional cache.

With fewer key-value heads than tp ranks (or a count tp does not divide) k and v are stored whole on
every rank; a rank multiplies only the rows of the heads its queries use, and their gradient is
`Partial`.
"""

import math

import torch
from torch import Tensor, nn

from dolmen.core import ranges
from dolmen.core.state import local
from dolmen.model.config import ModelConfig
from dolmen.model.given import Given
from dolmen.model.layers import Column, Norm, Row
from dolmen.model.split import Split
from dolmen.ops import rope
from dolmen.ops.attention import Attend
from dolmen.ops.dropout import Dropout
from dolmen.parallel import tensor
from dolmen.parallel.recompute import again


class Attention(nn.Module):
    """x [batch * length / cp, hidden] I@tp (or S(0)@tp) -> the same. `cache`, where given, is this
    layer's keys and values so far.
    """

    def __init__(self, c: ModelConfig, layer: int, split: Split):
        super().__init__()
        tp = split.tp
        size, rank = tp.axis.size, tp.axis.rank
        if c.num_attention_heads % size:
            raise ValueError(
                f"num_attention_heads ({c.num_attention_heads}) is not divisible by tp ({size}): "
                f"set --layout.tp to a divisor"
            )
        self.tp, self.cp, self.head_dim = tp, split.cp, c.head_dim
        self.selective = split.recompute.of(layer) == "selective"
        self.whole_kv = c.num_key_value_heads % size != 0
        self.heads = c.num_attention_heads // size
        group = c.num_attention_heads // c.num_key_value_heads
        first_head, self.dropout = rank * self.heads, c.dropout
        self.attend = Attend(c.window(layer), first_head=first_head)
        # the key-value head of each of our queries
        used = [(first_head + i) // group for i in range(self.heads)]
        self.kv_first, self.kv_heads = used[0], used[-1] - used[0] + 1
        self.spread = (
            None
            if used == _grouped(used[0], self.kv_heads, self.heads)
            else [u - used[0] for u in used]
        )
        self.q = Column(c.hidden_size, c.num_attention_heads * c.head_dim, c.attention_bias)
        grad = tp.branch_grad if self.whole_kv else None
        kv_size = c.num_key_value_heads * c.head_dim
        self.k = Column(c.hidden_size, kv_size, c.attention_bias, self.whole_kv, grad)
        self.v = Column(c.hidden_size, kv_size, c.attention_bias, self.whole_kv, grad)
        self.o = Row(
            c.num_attention_heads * c.head_dim,
            c.hidden_size,
            c.output_bias,
            tp,
            1 / math.sqrt(2 * c.num_hidden_layers),
        )
        if c.qk_norm:
            norm = (c.head_dim, "rmsnorm", c.norm_eps, tp.branch_grad, split.kernels)
            self.q_norm, self.k_norm = Norm(*norm), Norm(*norm)
        else:
            self.q_norm = self.k_norm = None

    def _mine(self, p: Tensor | None) -> Tensor | None:
        """The rows of a k or v parameter that this rank multiplies."""
        if p is None:
            return None
        if not self.whole_kv:
            return local(p)
        return local(p).narrow(0, self.kv_first * self.head_dim, self.kv_heads * self.head_dim)

    def forward(self, x: Tensor, given: Given, cache=None) -> Tensor:
        weights = local(self.q.weight), self._mine(self.k.weight), self._mine(self.v.weight)
        biases = (
            (local(self.q.bias), self._mine(self.k.bias), self._mine(self.v.bias))
            if self.q.bias is not None
            else (None,) * 3
        )
        q, k, v = (
            y.view(given.batch, -1, y.shape[-1] // self.head_dim, self.head_dim)
            for y in tensor.columns(x, weights, biases, self.tp)
        )
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if given.cos is not None:
            q, k = rope.rotate(q, given.cos, given.sin), rope.rotate(k, given.cos, given.sin)
        if cache is not None:
            k, v = cache.append(k, v)
        y = again(self._inner, q, k, v, given) if self.selective else self._inner(q, k, v, given)
        return self.o(y.reshape(-1, self.heads * self.head_dim))

    @ranges.marked("attention")
    def _inner(self, q: Tensor, k: Tensor, v: Tensor, given: Given) -> Tensor:
        """softmax(q k^T) v: what selective recomputation computes again."""
        if self.spread is not None:
            k, v = (_per_query(t, self.spread) for t in (k, v))
        noise, dropped = given.noise, None
        if noise is not None:
            dropped = Dropout(self.dropout, noise, noise.site(1))
        return self.cp.attention(q, k, v, self.attend.of(given.documents, dropped))


def _per_query(x: Tensor, heads: list[int]) -> Tensor:
    """x [batch, length, kv_heads, size] -> [batch, length, queries' heads, size]: the key-value
    head of each query. By views, as an index would be copied to a GPU, which the host waits for.
    """
    return torch.cat([x.narrow(2, head, 1) for head in heads], 2)


def _grouped(first: int, kv_heads: int, heads: int) -> list[int]:
    """The key-value head of each query where each serves the same number of queries, as grouped
    attention assumes.
    """
    return (
        [first + i // -(-heads // kv_heads) for i in range(heads)] if heads % kv_heads == 0 else []
    )
