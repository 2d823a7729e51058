"""What attention over heads of keys and values is (Vaswani et al., 1706.03762; grouped queries:
Ainslie et al., 2305.13245).
"""

from dataclasses import dataclass

from dolmen.model.tree.norm import Norm
from dolmen.model.tree.positions import Alibi, Rope


@dataclass(frozen=True)
class Attention:
    """softmax(scale q k^T + what the positions add) v, causal."""

    heads: int
    kv_heads: int
    head_size: int
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    qk_norm: Norm | None = None
    """Of each query and key head, before rope."""
    positions: Rope | Alibi | None = None
    scale: float | None = None
    """None: 1 / sqrt(head_size)."""
    window: int | None = None
    """Tokens a query sees, itself included; None: all before it."""
    soft_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.heads}) is not divisible by num_key_value_heads "
                f"({self.kv_heads}): set model.num-key-value-heads to a divisor"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"sliding_window is {self.window}: it must be at least 1, the query itself, or "
                "none"
            )
