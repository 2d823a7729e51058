"""The structure of one decoder, as choices. A family (dolmen/families) turns a Hugging Face
`config.json` into this and back; nothing else in the house knows a family's name.

Field names are Hugging Face's where it has one. Behaviour follows from values alone, never from a
model's name.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dolmen.files import kinds
from dolmen.model import tree as trees
from dolmen.model.training import RouterTraining, Training

# The same limits as a config.json has.
SIZES = {
    "vocab_size": kinds.VOCABULARY,
    "hidden_size": kinds.WIDTH,
    "intermediate_size": kinds.WIDTH,
    "num_hidden_layers": kinds.LAYERS,
    "num_attention_heads": kinds.HEADS,
    "num_key_value_heads": kinds.HEADS,
    "head_dim": kinds.WIDTH,
    "max_position_embeddings": kinds.POSITIONS,
    "num_experts": replace(kinds.EXPERTS, low=0),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2104.09864), rotate-half layout, and its context
    extensions.
    """

    theta: float = 10000.0
    """Base of the geometric series of wavelengths."""
    scaling: Literal["default", "linear", "llama3"] = "default"
    """default | linear (positions divided by factor) | llama3 (long wavelengths divided, short
    kept, smooth between).
    """
    factor: float = 1.0
    """Context extension factor of linear and llama3."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original / this are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original / this are kept."""
    original_max_position_embeddings: int = 8192
    """llama3: context length the model was first trained at, tokens."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices that fix the parameters and the function of a decoder. Raises ValueError on
    impossible sizes.
    """

    family: str = "llama"
    """Family file whose weight names and config.json an export uses."""
    vocab_size: int = 32000
    """Rows of the embedding and of the head, tokens."""
    hidden_size: int = 4096
    """Width of the residual stream."""
    intermediate_size: int = 11008
    """Width of the feed-forward layer."""
    num_hidden_layers: int = 32
    """Decoder blocks."""
    num_attention_heads: int = 32
    """Query heads."""
    num_key_value_heads: int = 32
    """Key and value heads; fewer than query heads is grouped-query attention."""
    head_dim: int = 128
    """Size of one head; need not be hidden_size / num_attention_heads."""
    max_position_embeddings: int = 2048
    """Longest sequence, tokens."""
    position: Literal["rope", "learned"] = "rope"
    """How positions enter: rotary in attention, or a learned table added to the embedding."""
    rope: RopeConfig = RopeConfig()
    """Used when position is rope."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Kind of every norm; layernorm has a bias."""
    norm_eps: float = 1e-5
    """Added to the variance inside every norm."""
    qk_norm: bool = False
    """RMSNorm of each query and key head before rope (Qwen3)."""
    mlp: Literal["gated", "plain"] = "gated"
    """gated: down(act(gate x) * up x). plain: down(act(up x))."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    """Activation of the feed-forward layer; gelu is the exact erf form."""
    num_experts: int = 0
    """Experts of a sparse feed-forward layer; 0: every layer is dense."""
    num_experts_per_tok: int = 2
    """Experts that compute a token."""
    moe_intermediate_size: int | None = None
    """Width of an expert; none: intermediate_size."""
    norm_topk_prob: bool = True
    """The weights of a token's experts are divided by their sum."""
    dense_layers: tuple[int, ...] = ()
    """Layers that stay dense in a model with experts."""
    router_balance: Literal["loss", "bias", "none"] = "loss"
    """What keeps experts equally busy: an auxiliary loss; a bias added for the choice alone, moved
    after each update; nothing.
    """
    router_aux_loss_coef: float = 0.001
    """Weight of the balance loss, summed over layers, mean over sequences, where router_balance is
    loss.
    """
    router_z_loss_coef: float = 0.0
    """Weight of the mean square of the router's logsumexp, summed over layers."""
    router_bias_rate: float = 0.001
    """Step of the bias in an update, where router_balance is bias."""
    attention_bias: bool = False
    """Biases on q, k, v."""
    output_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    """Biases on the feed-forward projections."""
    sliding_window: int | None = None
    """Tokens a query sees, itself included; none: all before it."""
    sliding_layers: tuple[int, ...] | None = None
    """Layers that use the sliding window; none: all of them."""
    tie_word_embeddings: bool = False
    """Head and embedding are one parameter."""
    dropout: float = 0.0
    """Dropout after embedding, attention and feed-forward, and on attention probabilities; 0 unless
    asked for.
    """
    initializer_range: float = 0.02
    """Standard deviation of initial weights; output projections get it divided by sqrt(2 * layers).
    """
    hf: dict[str, Any] = field(default_factory=dict)
    """The source config.json, whole: the way back returns it with what changed in the structure
    since; or, without a model_type, extra fields to write beside the structure, such as
    eos_token_id.
    """

    def __post_init__(self):
        for name, allowed in SIZES.items():
            if not allowed.low <= getattr(self, name) <= allowed.high:
                raise ValueError(
                    f"model.{name.replace('_', '-')} is {getattr(self, name)}: it must be from "
                    f"{allowed.low} to {allowed.high:,}"
                )
        for name, value in (
            ("norm_eps", self.norm_eps),
            ("rope.theta", self.rope.theta),
            ("rope.factor", self.rope.factor),
        ):
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise ValueError(
                    f"model.{name.replace('_', '-')} is {value!r}: it must be a number, finite and "
                    f"not negative"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is not divisible by "
                f"num_key_value_heads ({self.num_key_value_heads}): set model.num-key-value-heads "
                "to a divisor"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"model.sliding-window is {self.sliding_window}: it must be at least 1, the query "
                f"itself, or none"
            )
        if not 0 <= self.initializer_range < math.inf:
            raise ValueError(
                f"model.initializer-range is {self.initializer_range}: it must be finite and not "
                f"negative"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout is {self.dropout}: it must lie in [0, 1)")
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(
                f"head_dim ({self.head_dim}) is odd, rope rotates pairs: set model.head-dim to an "
                f"even size"
            )

        if self.num_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must lie in 1 to num_experts "
                f"({self.num_experts}): set model.num-experts-per-tok"
            )
        if self.expert_size < 1:
            raise ValueError(
                f"model.moe-intermediate-size is {self.moe_intermediate_size}: it must be at "
                f"least 1"
            )
        if not self.gated or self.mlp_bias:
            raise ValueError(
                f"experts are gated and have no biases, but mlp is {self.mlp} and mlp_bias "
                f"{self.mlp_bias}: set --model.mlp gated and leave --model.mlp-bias off, or set "
                "--model.num-experts 0"
            )
        if unknown := [i for i in self.dense_layers if not 0 <= i < self.num_hidden_layers]:
            raise ValueError(
                f"dense_layers has {unknown[0]}, num_hidden_layers is {self.num_hidden_layers}: "
                f"name layers from 0 on"
            )
        for name in ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_rate"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(
                    f"model.{name.replace('_', '-')} is {value!r}: it must be a number, finite and "
                    f"not negative"
                )

    @property
    def expert_size(self) -> int:
        """Width of an expert."""
        return (
            self.intermediate_size
            if self.moe_intermediate_size is None
            else self.moe_intermediate_size
        )

    def sparse(self, layer: int) -> bool:
        """Whether `layer` has experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def model_type(self) -> str:
        return self.family

    @property
    def tree(self) -> trees.Tree:
        biased = self.norm == "layernorm"
        norm = trees.Norm(self.norm, self.norm_eps, bias=biased)
        r = self.rope
        scaling = {
            "default": None,
            "linear": trees.Linear(r.factor),
            "llama3": trees.Llama3(
                r.factor,
                r.low_freq_factor,
                r.high_freq_factor,
                r.original_max_position_embeddings,
            ),
        }[r.scaling]
        rope = trees.Rope(self.head_dim, r.theta, scaling) if self.position == "rope" else None
        qk_norm = trees.Norm("rmsnorm", self.norm_eps) if self.qk_norm else None
        bias = self.attention_bias
        dense = trees.Mlp(self.intermediate_size, self.gated, self.activation, self.mlp_bias)
        sparse = (
            trees.Experts(
                self.num_experts,
                self.num_experts_per_tok,
                self.expert_size,
                self.activation,
                trees.Router(
                    normalise=self.norm_topk_prob, aux_loss_coef=self.router_aux_loss_coef
                ),
            )
            if self.num_experts
            else None
        )
        blocks = [
            trees.Block(
                trees.Attention(
                    self.num_attention_heads,
                    self.num_key_value_heads,
                    self.head_dim,
                    bias,
                    bias,
                    bias,
                    self.output_bias,
                    qk_norm,
                    rope,
                    window=self.window(i),
                ),
                sparse if self.sparse(i) else dense,
                norm,
            )
            for i in range(self.num_hidden_layers)
        ]
        learned = self.position == "learned"
        table = trees.Table(self.max_position_embeddings) if learned else None
        return trees.Tree(
            self.hidden_size,
            trees.Embedding(self.vocab_size, positions=table),
            trees.runs_of(blocks),
            norm,
            trees.Head(tied=self.tie_word_embeddings),
            self.max_position_embeddings,
            self.initializer_range,
        )

    @property
    def training(self) -> Training:
        router = RouterTraining(
            self.router_balance, None, self.router_z_loss_coef, self.router_bias_rate
        )
        return Training(self.dropout, router)

    @property
    def gated(self) -> bool:
        return self.mlp == "gated"

    def window(self, layer: int) -> int | None:
        """Sliding window of `layer` in tokens, or None for full causal attention."""
        return (
            self.sliding_window
            if self.sliding_layers is None or layer in self.sliding_layers
            else None
        )


def parameter_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and full (unsplit) shape, in the order of the model: the vocabulary of
    names that weight rules, placements and checkpoints speak. A test holds the built model to it.
    """
    q = c.num_attention_heads * c.head_dim
    kv = c.num_key_value_heads * c.head_dim
    h = c.hidden_size
    f = c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (c.vocab_size, h)}
    if c.position == "learned":
        shapes["positions.weight"] = (c.max_position_embeddings, h)

    def linear(name: str, out: int, inp: int, bias: bool):
        shapes[f"{name}.weight"] = (out, inp)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    def norm(name: str, size: int, bias: bool = c.norm == "layernorm"):
        shapes[f"{name}.weight"] = (size,)
        if bias:
            shapes[f"{name}.bias"] = (size,)

    for i in range(c.num_hidden_layers):
        layer = f"layers.{i}"
        norm(f"{layer}.attn_norm", h)
        linear(f"{layer}.attn.q", q, h, c.attention_bias)
        linear(f"{layer}.attn.k", kv, h, c.attention_bias)
        linear(f"{layer}.attn.v", kv, h, c.attention_bias)
        linear(f"{layer}.attn.o", h, q, c.output_bias)
        if c.qk_norm:
            norm(f"{layer}.attn.q_norm", c.head_dim, bias=False)
            norm(f"{layer}.attn.k_norm", c.head_dim, bias=False)
        norm(f"{layer}.mlp_norm", h)
        if c.sparse(i):
            linear(f"{layer}.mlp.router", c.num_experts, h, c.router_balance == "bias")
            shapes |= {
                f"{layer}.mlp.experts.{name}.weight": (c.num_experts, c.expert_size, h)
                for name in ("gate", "up")
            }
            shapes[f"{layer}.mlp.experts.down.weight"] = (c.num_experts, h, c.expert_size)
            continue
        if c.gated:
            linear(f"{layer}.mlp.gate", f, h, c.mlp_bias)
        linear(f"{layer}.mlp.up", f, h, c.mlp_bias)
        linear(f"{layer}.mlp.down", h, f, c.mlp_bias)
    norm("final_norm", h)
    if not c.tie_word_embeddings:
        shapes["head.weight"] = (c.vocab_size, h)
    return shapes
