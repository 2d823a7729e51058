"""Specs of attention: heads with keys and values (Vaswani et al., 1706.03762; grouped queries:
Ainslie et al., 2305.13245), and multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1),
whose cache keeps a short latent per token.

    x -- q_a, norm, q_b --> heads of [nope | rope]
    x -- kv_a ----+- norm, kv_b --> heads of [nope | value]
                  +- one rope key, which all heads share
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from dolmen.core.messages import divisor, plural
from dolmen.model.spec.layers import NormSpec
from dolmen.model.spec.param import (
    ParamSpec,
    ParamSpecs,
    ResidualStream,
    ShardSpec,
    add_prefix,
    column_parallel,
    row_parallel,
)
from dolmen.model.spec.positions import AttentionPositions, RopeSpec, YarnScaling, yarn_temperature

NormOf = Literal["heads", "each head", "width"]


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention: softmax(scale q k^T + ALiBi) v."""

    heads: int
    kv_heads: int
    head_size: int
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    clip: float | None = None
    """Bound of the absolute value of q, k and v, applied after their norms; None: not clipped."""
    qk_norm: NormSpec | None = None
    """Norm of queries and keys, before rope."""
    qk_norm_of: NormOf = "heads"
    """heads: over each head, with one weight shared by all (Qwen3); each head: over each head, with
    its own weight (Cohere, StableLM); width: over all heads together (OLMo 2).
    """
    positions: AttentionPositions | None = None
    scale: float | None = None
    """None: 1 / sqrt(head_size)."""
    window: int | None = None
    """Number of tokens that a query sees, itself included (sliding window); None: all."""
    soft_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    mask: Literal["causal", "prefix", "both"] = "causal"
    """causal; prefix: bidirectional within the first tokens of a document, as many as the batch
    states, and causal after them (prefix LM; Raffel et al., 1910.10683, section 3.2); both:
    bidirectional (BERT).
    """
    sinks: bool = False
    """Attention sinks: each head has a learned score in the softmax's denominator that weighs no
    value (GPT-OSS, 2508.10925).
    """

    def __post_init__(self):
        """Raise ValueError for kv heads that do not divide heads, a window below 1, a norm that is
        not computed, a bidirectional window, and ALiBi with keys after the query.
        """
        if self.heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.heads}) is not divisible by num_key_value_heads "
                f"({self.kv_heads}): set --model.num-key-value-heads to a divisor, such as "
                f"{divisor(self.heads, near=self.kv_heads)}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"sliding_window is {self.window}: it must be at least 1 (the query itself), "
                "or None"
            )
        of, norm = self.qk_norm_of, self.qk_norm
        # None: either kind
        kind = {"heads": None, "each head": "layernorm", "width": "rmsnorm"}[of]
        if norm is not None and kind is not None and (norm.kind != kind or norm.bias):
            raise ValueError(f"qk_norm of {of} is {norm}: only {kind} without bias is supported")
        if self.mask == "both" and self.window is not None:
            raise ValueError(
                f"a bidirectional window of {self.window} tokens is not supported: windows must "
                "be causal"
            )
        if self.mask != "causal" and self.positions is not None and not self.positions.both_ways:
            raise ValueError(
                f"ALiBi with a {self.mask} mask is not defined for keys after the query: use rope"
            )

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Size of a key head, with the extra dims of Falcon's ALiBi, and size of a value head."""
        # Falcon's ALiBi: 8 more dims of a key
        carried = 0 if self.positions is None else self.positions.extra_key_dims
        return self.head_size + carried, self.head_size

    @property
    def words(self) -> str:
        """Description for messages, such as "32 heads, 8 kv heads"."""
        kv = f", {plural(self.kv_heads, 'kv head')}" if self.kv_heads != self.heads else ""
        return f"{plural(self.heads, 'head')}{kv}"

    def params(self, stream: ResidualStream) -> ParamSpecs:
        """Return the specs of the parameters of q, k, v, o, norms and sinks, by name. k and v are
        stored whole on every rank if tp does not divide their heads; a rank then multiplies by the
        rows of the heads that its queries use.
        """
        hidden = stream.hidden_size
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        of_q = ShardSpec("tp", 0, self.heads, "num_attention_heads")
        # 8 kv heads on tp 16: replicated, and each rank uses one of them
        of_kv = ShardSpec("tp", 0, self.kv_heads, "num_key_value_heads", or_replicate=True)
        of_o = ShardSpec("tp", 1, self.heads, "num_attention_heads")
        params = {
            **add_prefix("q", column_parallel(q, hidden, self.q_bias, of_q)),
            **add_prefix("k", column_parallel(kv, hidden, self.k_bias, of_kv, "branch")),
            **add_prefix("v", column_parallel(kv, hidden, self.v_bias, of_kv, "branch")),
            **add_prefix("o", row_parallel(hidden, q, self.o_bias, of_o, stream.out_scale)),
        }
        if self.qk_norm is not None:
            params |= self._norm_params(self.qk_norm, of_q, of_kv)
        if self.sinks:
            params |= add_prefix("sinks", {"weight": ParamSpec((self.heads,), "bias", (of_q,))})
        return params

    def _norm_params(self, norm: NormSpec, of_q: ShardSpec, of_kv: ShardSpec) -> ParamSpecs:
        """Return the specs of the parameters of the q and k norms, by name. A norm over the whole
        width ("width") requires that tp divides the kv heads, as its mean counts each head once.
        """
        if self.qk_norm_of == "heads":
            params = norm.params(self.head_size, gradient="branch")
            return {**add_prefix("q_norm", params), **add_prefix("k_norm", params)}
        if self.qk_norm_of == "width":
            q = norm.params(self.heads * self.head_size, shards=(of_q,))
            # shared heads would be counted by several ranks in the mean square
            of_kv = replace(of_kv, or_replicate=False)
            k = norm.params(self.kv_heads * self.head_size, shards=(of_kv,))
        else:
            q = norm.params(self.heads, self.head_size, shards=(of_q,))
            k = norm.params(self.kv_heads, self.head_size, gradient="branch", shards=(of_kv,))
        return {**add_prefix("q_norm", q), **add_prefix("k_norm", k)}

    def products(self, keys: float) -> float:
        """Return the multiply-adds per token of q k^T and of the weighted sum of values, for a
        query that sees `keys` keys.
        """
        return 2 * self.heads * self.head_size * keys


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention: softmax(scale q k^T) v, causal, where q and k are [nope | rope]
    and only the rope part is rotated.
    """

    heads: int
    q_rank: int | None
    """Width of the queries' latent; None: queries have no latent, q is one matrix."""
    kv_rank: int
    """Width of the latent of keys and values."""
    nope_size: int
    """Size of the part of each query and key head without rope."""
    value_size: int
    norm: NormSpec
    """Norm of the latents."""
    positions: RopeSpec
    """Rope of the rest of each query and key head; its size is that of the shared rope key."""
    mscale_all_dim: float = 0.0
    """YaRN's mscale of the softmax scale, which is multiplied by the square of the temperature; 0:
    it is not.
    """
    down_bias: bool = False
    """Biases on the down projections."""
    o_bias: bool = False

    @property
    def head_size(self) -> int:
        """Size of a query or key head: without rope plus with rope."""
        return self.nope_size + self.positions.size

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Size of a key head, and size of a value head."""
        return self.head_size, self.value_size

    @property
    def scale(self) -> float:
        """Softmax scale: 1 / sqrt(head_size), with YaRN and a nonzero `mscale_all_dim` times the
        square of its temperature.
        """
        scaling, scale = self.positions.scaling, 1 / math.sqrt(self.head_size)
        if not isinstance(scaling, YarnScaling) or not self.mscale_all_dim:
            return scale
        # once for queries and once for keys
        return scale * yarn_temperature(scaling.factor, self.mscale_all_dim) ** 2

    @property
    def window(self) -> int | None:
        """Sliding window in tokens: always None, attention is full."""
        return None

    @property
    def mask(self) -> Literal["causal", "prefix", "both"]:
        """Attention mask: always causal."""
        return "causal"

    @property
    def words(self) -> str:
        """Description for messages, such as "128 heads of a latent of 512"."""
        return f"{plural(self.heads, 'head')} of a latent of {self.kv_rank}"

    def params(self, stream: ResidualStream) -> ParamSpecs:
        """Return the specs of all parameters, by name. Down projections and their norms are
        replicated over tp, up projections and o are sharded by heads.
        """
        hidden, knob = stream.hidden_size, "num_attention_heads"
        of_heads = ShardSpec("tp", 0, self.heads, knob)
        q, kv = self.heads * self.head_size, self.heads * (self.nope_size + self.value_size)
        # DeepSeek-V3: 512 + 64
        down = self.kv_rank + self.positions.size
        return {
            **self._query_params(hidden, q, of_heads),
            **add_prefix("kv_a", _replicated_params(down, hidden, self.down_bias)),
            **add_prefix("kv_a_norm", self.norm.params(self.kv_rank)),
            **add_prefix("kv_b", column_parallel(kv, self.kv_rank, False, of_heads)),
            **add_prefix(
                "o",
                row_parallel(
                    hidden,
                    self.heads * self.value_size,
                    self.o_bias,
                    ShardSpec("tp", 1, self.heads, knob),
                    stream.out_scale,
                ),
            ),
        }

    def _query_params(self, hidden: int, q: int, of_heads: ShardSpec) -> ParamSpecs:
        """Return the parameters of q: one matrix, or a down projection, norm and up projection if
        q_rank is set. `q`: outputs of all heads.
        """
        if self.q_rank is None:
            return add_prefix("q", column_parallel(q, hidden, False, of_heads))
        return {
            **add_prefix("q_a", _replicated_params(self.q_rank, hidden, self.down_bias)),
            **add_prefix("q_a_norm", self.norm.params(self.q_rank)),
            **add_prefix("q_b", column_parallel(q, self.q_rank, False, of_heads)),
        }

    def products(self, keys: float) -> float:
        """Return the multiply-adds per token of q k^T and of the weighted sum of values, for a
        query that sees `keys` keys; heads expanded, as in training.
        """
        return self.heads * (self.head_size + self.value_size) * keys


def _replicated_params(out: int, inp: int, bias: bool) -> ParamSpecs:
    """Return weight [out, inp], and bias [out] if `bias`, of a linear that every rank of tp stores
    whole and applies to its tokens of the residual stream.
    """
    params = {"weight": ParamSpec((out, inp), "matrix", gradient="residual", products=out * inp)}
    if bias:
        params["bias"] = ParamSpec((out,), "bias", gradient="residual", initial="zeros")
    return params
