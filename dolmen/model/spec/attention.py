"""What attention over heads of keys and values is (Vaswani et al., 1706.03762; grouped queries:
Ainslie et al., 2305.13245).


What multi-head latent attention is (DeepSeek-V2, 2405.04434, section 2.1): queries, keys and
values are made of short vectors per token, and a cache keeps those of keys and values alone.

    x -- q_a, norm, q_b --> heads of [nope | rope]
    x -- kv_a ----+- norm, kv_b --> heads of [nope | value]
                  +- one rope key, which all heads share

"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from dolmen.core.messages import divisor, plural
from dolmen.model.spec.layers import Norm
from dolmen.model.spec.param import Cut, Leaf, Leaves, Stream, column, row, within
from dolmen.model.spec.positions import Relative, Rope, Yarn, temperature

NormOf = Literal["heads", "each head", "width"]


@dataclass(frozen=True)
class Attention:
    """softmax(scale q k^T + what the positions add) v."""

    heads: int
    kv_heads: int
    head_size: int
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    clip: float | None = None
    """What no number of queries, keys and values goes beyond, before norms; None: they stay."""
    qk_norm: Norm | None = None
    """Of queries and keys, before rope."""
    qk_norm_of: NormOf = "heads"
    """heads: of every head by itself, and all have one weight (Qwen3); each head: each has its own
    (Cohere, StableLM); width: of all heads together (OLMo 2).
    """
    positions: Relative | None = None
    scale: float | None = None
    """None: 1 / sqrt(head_size)."""
    window: int | None = None
    """Tokens up to itself that a query sees; None: all."""
    soft_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    mask: Literal["causal", "prefix", "both"] = "causal"
    """prefix: the first tokens of a document, as many as a batch says, are seen by all of it, the
    ones before them too (Raffel et al., 1910.10683, section 3.2). All others see back alone. both:
    all tokens of a document see one another (BERT).
    """
    sinks: bool = False
    """Each head has a learned score that weighs no value, as in GPT-OSS (2508.10925)."""

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.heads}) is not divisible by num_key_value_heads "
                f"({self.kv_heads}): set --model.num-key-value-heads to a divisor, such as "
                f"{divisor(self.heads, near=self.kv_heads)}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"sliding_window is {self.window}: it must be at least 1, the query itself, or None"
            )
        of, norm = self.qk_norm_of, self.qk_norm
        kind = {"heads": None, "each head": "layernorm", "width": "rmsnorm"}[of]
        if norm is not None and kind is not None and (norm.kind != kind or norm.bias):
            raise ValueError(
                f"qk_norm of {of} is {norm}: dolmen computes {kind} without bias alone"
            )
        if self.mask == "both" and self.window is not None:
            raise ValueError(
                f"a window of {self.window} tokens that see one another: dolmen computes one that "
                "sees back alone"
            )
        if self.mask != "causal" and self.positions is not None and not self.positions.both_ways:
            raise ValueError(
                f"ALiBi with a {self.mask} mask: its scores grow toward the query, and of keys "
                "behind it nobody has said how; use rope"
            )

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Of keys, with what they carry, and of values."""
        carried = 0 if self.positions is None else self.positions.carried
        return self.head_size + carried, self.head_size

    @property
    def words(self) -> str:
        """For a person."""
        kv = f", {plural(self.kv_heads, 'kv head')}" if self.kv_heads != self.heads else ""
        return f"{plural(self.heads, 'head')}{kv}"

    def leaves(self, stream: Stream) -> Leaves:
        """k and v are whole on every rank where tp does not divide their heads: a rank multiplies
        the rows of the heads that its queries use.
        """
        hidden = stream.hidden_size
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        of_q = Cut("tp", 0, self.heads, "num_attention_heads")
        of_kv = Cut("tp", 0, self.kv_heads, "num_key_value_heads", or_whole=True)
        of_o = Cut("tp", 1, self.heads, "num_attention_heads")
        leaves = {
            **within("q", column(q, hidden, self.q_bias, of_q)),
            **within("k", column(kv, hidden, self.k_bias, of_kv, "branch")),
            **within("v", column(kv, hidden, self.v_bias, of_kv, "branch")),
            **within("o", row(hidden, q, self.o_bias, of_o, stream.out_scale)),
        }
        if self.qk_norm is not None:
            leaves |= self._norms(self.qk_norm, of_q, of_kv)
        if self.sinks:
            leaves |= within("sinks", {"weight": Leaf((self.heads,), "bias", (of_q,))})
        return leaves

    def _norms(self, norm: Norm, of_q: Cut, of_kv: Cut) -> Leaves:
        """Of the width, k's mean is over heads that no two ranks share."""
        if self.qk_norm_of == "heads":
            one = norm.leaves(self.head_size, gradient="branch")
            return {**within("q_norm", one), **within("k_norm", one)}
        if self.qk_norm_of == "width":
            q = norm.leaves(self.heads * self.head_size, cuts=(of_q,))
            of_kv = replace(of_kv, or_whole=False)
            k = norm.leaves(self.kv_heads * self.head_size, cuts=(of_kv,))
        else:
            q = norm.leaves(self.heads, self.head_size, cuts=(of_q,))
            k = norm.leaves(self.kv_heads, self.head_size, gradient="branch", cuts=(of_kv,))
        return {**within("q_norm", q), **within("k_norm", k)}

    def products(self, keys: float) -> float:
        """Multiply-adds per token of scores and of their sum of values, for a query that sees so
        many `keys`.
        """
        return 2 * self.heads * self.head_size * keys


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
        return f"{plural(self.heads, 'head')} of a latent of {self.kv_rank}"

    def leaves(self, stream: Stream) -> Leaves:
        """What makes the latents, and their norms, is whole on every rank of tp: see
        dolmen/model/attention.py.
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
