"""What multi-head latent attention is (DeepSeek-V2, 2405.04434, section 2.1): queries, keys and
values are made of short vectors per token, and a cache keeps those of keys and values alone.

    x -- q_a, norm, q_b --> heads of [nope | rope]
    x -- kv_a ----+- norm, kv_b --> heads of [nope | value]
                  +- one rope key, which all heads share
"""

import math
from dataclasses import dataclass
from typing import Literal

from dolmen.core.messages import counted
from dolmen.model.tree.leaf import Cut, Leaf, Leaves, Stream, column, row, within
from dolmen.model.tree.norm import Norm
from dolmen.model.tree.positions import Rope, Yarn, temperature


@dataclass(frozen=True)
class LatentAttention:
    """softmax(scale q k^T) v, causal, where q and k are [nope | rope] and the latter is turned."""

    heads: int
    q_rank: int | None
    """Width of the queries' latent; None: there is none, q is one matrix."""
    kv_rank: int
    """Width of the latent of keys and values."""
    nope_size: int
    """Of each query and key head, what no position turns."""
    value_size: int
    norm: Norm
    """Of the latents."""
    positions: Rope
    """Of the rest of each query and key head; its size is that of the key that all heads share."""
    mscale_all_dim: float = 0.0
    """Scores are multiplied by the square of YaRN's temperature with this (0: by 1)."""
    down_bias: bool = False
    """Of what makes the latents."""
    o_bias: bool = False

    @property
    def head_size(self) -> int:
        """Of a query or key."""
        return self.nope_size + self.positions.size

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Of keys and of values."""
        return self.head_size, self.value_size

    @property
    def scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        scaling, scale = self.positions.scaling, 1 / math.sqrt(self.head_size)
        if not isinstance(scaling, Yarn) or not self.mscale_all_dim:
            return scale
        return scale * temperature(scaling.factor, self.mscale_all_dim) ** 2

    @property
    def window(self) -> int | None:
        """Tokens a query sees; None: all before it."""
        return None

    @property
    def mask(self) -> Literal["causal", "prefix", "both"]:
        """Who sees whom: see `Attention`."""
        return "causal"

    @property
    def words(self) -> str:
        """For a person."""
        return f"{counted(self.heads, 'head')} of a latent of {self.kv_rank}"

    def leaves(self, stream: Stream) -> Leaves:
        """What makes the latents, and their norms, is whole on every rank of tp: see
        dolmen/model/latent.py.
        """
        hidden, knob = stream.hidden_size, "num_attention_heads"
        of_heads = Cut("tp", 0, self.heads, knob)
        q, kv = self.heads * self.head_size, self.heads * (self.nope_size + self.value_size)
        down = self.kv_rank + self.positions.size
        return {
            **self._queries(hidden, q, of_heads),
            **within("kv_a", _whole(down, hidden, self.down_bias)),
            **within("kv_a_norm", self.norm.leaves(self.kv_rank)),
            **within("kv_b", column(kv, self.kv_rank, False, of_heads)),
            **within(
                "o",
                row(
                    hidden,
                    self.heads * self.value_size,
                    self.o_bias,
                    Cut("tp", 1, self.heads, knob),
                    stream.out_scale,
                ),
            ),
        }

    def _queries(self, hidden: int, q: int, of_heads: Cut) -> Leaves:
        if self.q_rank is None:
            return within("q", column(q, hidden, False, of_heads))
        return {
            **within("q_a", _whole(self.q_rank, hidden, self.down_bias)),
            **within("q_a_norm", self.norm.leaves(self.q_rank)),
            **within("q_b", column(q, self.q_rank, False, of_heads)),
        }

    def products(self, keys: float) -> float:
        """Multiply-adds per token of scores and of their sum of values, for a query that sees so
        many `keys`.
        """
        return self.heads * (self.head_size + self.value_size) * keys


def _whole(out: int, inp: int, bias: bool) -> Leaves:
    """Weight [out, inp] and bias of a product of the residual stream that every rank of tp stores
    whole.
    """
    leaves = {"weight": Leaf((out, inp), "matrix", gradient="residual", products=out * inp)}
    if bias:
        leaves["bias"] = Leaf((out,), "bias", gradient="residual", initial="zeros")
    return leaves
