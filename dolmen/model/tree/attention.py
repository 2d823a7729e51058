"""What attention over heads of keys and values is (Vaswani et al., 1706.03762; grouped queries:
Ainslie et al., 2305.13245).
"""

from dataclasses import dataclass
from typing import Literal

from dolmen.core.words import counted, divisor
from dolmen.model.tree.leaf import Cut, Leaf, Leaves, Stream, column, row, within
from dolmen.model.tree.norm import Norm
from dolmen.model.tree.positions import Relative


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
    qk_norm: Norm | None = None
    """Of each query and key head, before rope."""
    positions: Relative | None = None
    scale: float | None = None
    """None: 1 / sqrt(head_size)."""
    window: int | None = None
    """Tokens up to itself that a query sees; None: all."""
    soft_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    mask: Literal["causal", "prefix"] = "causal"
    """prefix: the first tokens of a document, as many as a batch says, are seen by all of it, the
    ones before them too (Raffel et al., 1910.10683, section 3.2). All others see back alone.
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
        if self.mask == "prefix" and self.positions is not None and not self.positions.both_ways:
            raise ValueError(
                "ALiBi with a prefix mask: its scores grow toward the query, and of keys behind it "
                "nobody has said how; use rope"
            )

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Of keys, with what they carry, and of values."""
        carried = 0 if self.positions is None else self.positions.carried
        return self.head_size + carried, self.head_size

    @property
    def words(self) -> str:
        """For a person."""
        kv = f", {counted(self.kv_heads, 'kv head')}" if self.kv_heads != self.heads else ""
        return f"{counted(self.heads, 'head')}{kv}"

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
            norm = self.qk_norm.leaves(self.head_size, "branch")
            leaves |= {**within("q_norm", norm), **within("k_norm", norm)}
        if self.sinks:
            leaves |= within("sinks", {"weight": Leaf((self.heads,), "bias", (of_q,))})
        return leaves

    def products(self, keys: float) -> float:
        """Multiply-adds per token of scores and of their sum of values, for a query that sees so
        many `keys`.
        """
        return 2 * self.heads * self.head_size * keys
