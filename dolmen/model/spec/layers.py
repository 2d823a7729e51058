"""Specs of norms and feed-forward layers.

Norms: RMSNorm (Zhang and Sennrich, 1910.07467) or LayerNorm (Ba et al., 1607.06450). Feed-forward:
plain down(act(up x)), or gated down(act(gate x) * up x) (Shazeer, 2002.05202). Mixture of experts:
a router sends each token to some of many gated MLPs (Shazeer et al., 1701.06538; DeepSeek-V2,
2405.04434, and V3, 2412.19437).
"""

from dataclasses import dataclass, replace
from typing import Literal

from dolmen.core.messages import divisor, plural
from dolmen.model.spec.param import (
    Gradient,
    ParamSpec,
    ParamSpecs,
    ResidualStream,
    ShardSpec,
    add_prefix,
    column_parallel,
    row_parallel,
)


@dataclass(frozen=True)
class NormSpec:
    """A norm over the last dim."""

    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    eps: float = 1e-5
    """Added to the variance."""
    bias: bool = False
    affine: bool = True
    """The normalised values are multiplied by a learned weight (OLMo: they are not)."""
    zero_centred: bool = False
    """The weight is stored minus 1, y = x / rms(x) * (1 + w), and starts at 0 (Gemma)."""

    def __post_init__(self):
        """Raise ValueError for combinations that no kernel computes."""
        if not self.affine and (self.bias or self.kind != "layernorm"):
            raise ValueError(f"{self} has no weight: only a layernorm without bias may have none")
        if self.zero_centred and self.kind != "rmsnorm":
            raise ValueError(f"{self} is zero-centred: only rmsnorm may be")

    def params(
        self, *shape: int, gradient: Gradient = "residual", shards: tuple[ShardSpec, ...] = ()
    ) -> ParamSpecs:
        """Return the specs of weight and bias of a norm over `shape` = (features,), or per head
        (heads, features); empty without a weight. Replicated over tp but for `shards`.
        """
        if not self.affine:
            return {}
        # the same function in both cases
        initial = "zeros" if self.zero_centred else "ones"
        params = {"weight": ParamSpec(shape, "norm", shards, gradient, initial)}
        if self.bias:
            params["bias"] = ParamSpec(shape, "bias", shards, gradient, "zeros")
        return params


Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class MLPSpec:
    """A dense feed-forward layer, of each token by itself."""

    size: int
    """Intermediate width."""
    gated: bool = True
    activation: Activation = "silu"
    """gelu is the exact erf form."""
    bias: bool = False

    @property
    def experts(self) -> int:
        """Number of experts that a router chooses from: 0, as the layer is dense."""
        return 0

    def with_balance_bias(self) -> "MLPSpec":
        """Return the spec unchanged: a dense layer has no router to balance."""
        return self

    def params(self, stream: ResidualStream) -> ParamSpecs:
        """Return the specs of the parameters of gate (if gated) and up, column-parallel, and of
        down, row-parallel.
        """
        hidden, knob = stream.hidden_size, "intermediate_size"
        inner = column_parallel(self.size, hidden, self.bias, ShardSpec("tp", 0, self.size, knob))
        down = row_parallel(
            hidden, self.size, self.bias, ShardSpec("tp", 1, self.size, knob), stream.out_scale
        )
        return {
            **(add_prefix("gate", inner) if self.gated else {}),
            **add_prefix("up", inner),
            **add_prefix("down", down),
        }


@dataclass(frozen=True)
class RouterSpec:
    """How a router chooses the experts of each token, and their weights."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    """The weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Factor of the weights, applied last."""
    groups: int = 1
    """Number of groups of equal size that experts are divided into (group-limited routing)."""
    groups_per_token: int = 1
    """Number of groups that a token's experts are chosen from."""
    group_score: Literal["max", "top2"] = "max"
    """A group's score: that of its best expert, or the sum of its best two."""
    bias: bool = False
    """Balance bias, added to scores for the choice of experts only and not moved by gradients
    (DeepSeek-V3).
    """
    logit_bias: bool = False
    """A bias of the logits, which is learned like any other (GPT-OSS)."""
    aux_loss_coef: float = 0.0
    """Weight of the balance loss stated by config.json; --train.router.aux-loss-coef
    overrides it.
    """

    def params(self, experts: int, hidden: int) -> ParamSpecs:
        """Return the specs of the router's weight [experts, hidden] and of its biases, if any:
        "bias" for the choice (untrained, precise) and "logits.bias". All are replicated over tp.
        The output multiplies partial sums, so gradients of the weight and "logits.bias" are partial
        over tp.
        """
        shape = (experts, hidden)
        params = {
            "weight": ParamSpec(shape, "router", gradient="branch", products=experts * hidden)
        }
        if self.bias:
            # bf16 has 8 bits: a step of 0.001 would be lost on a bias of 0.5, and choices turn
            params["bias"] = ParamSpec(
                (experts,), "bias", initial="zeros", trained=False, precise=True
            )
        if self.logit_bias:
            params["logits.bias"] = ParamSpec(
                (experts,), "bias", gradient="branch", initial="zeros"
            )
        return params


@dataclass(frozen=True)
class ClampedSwiGLU:
    """Activation of an expert of GPT-OSS (2508.10925): with a = min(gate, limit) and b = up clamped
    to [-limit, limit], a sigmoid(alpha a) (b + 1).
    """

    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts: y = sum over a token's experts of weight * expert(x), plus the shared
    expert. Raises ValueError, with the numbers and the option, for a choice of experts that cannot
    be made.
    """

    number: int
    per_token: int
    size: int
    """Intermediate width of an expert."""
    activation: Activation | ClampedSwiGLU = "silu"
    """Activation of the gate, which multiplies up; or ClampedSwiGLU of both."""
    router: RouterSpec = RouterSpec()
    shared: MLPSpec | None = None
    """Shared expert: a dense layer that every token passes, added to the experts' output."""
    shared_gate: bool = False
    """Multiply the shared expert by the sigmoid of a learned product with the token (Qwen2-MoE,
    2407.10671, section 2.2.2).
    """
    bias: bool = False
    """Biases of each expert's matrices."""

    def __post_init__(self):
        """Raise ValueError for more experts per token than experts, expert groups that do not
        divide the experts or hold too few for a token, a shared expert with a bias, and a gate
        without shared expert.
        """
        if not 1 <= self.per_token <= self.number:
            raise ValueError(
                f"num_experts_per_tok ({self.per_token}) must lie in 1 to num_experts "
                f"({self.number}): set --model.num-experts-per-tok"
            )
        self._check_groups()
        if self.shared is not None and self.shared.bias:
            raise ValueError("a shared expert has a bias, which is not supported")
        if self.shared_gate and self.shared is None:
            raise ValueError("a shared-expert gate without a shared expert")

    def _check_groups(self) -> None:
        """Raise ValueError if the groups do not divide the experts, or the groups chosen per token
        do not hold enough experts.
        """
        router, number = self.router, self.number
        groups, limit = router.groups, router.groups_per_token
        if number % groups:
            raise ValueError(
                f"num_experts ({number}) is not divisible by n_group ({groups}): set "
                f"--model.n-group to a divisor, such as {divisor(number, near=groups)}"
            )
        if not 1 <= limit <= groups:
            raise ValueError(
                f"topk_group ({limit}) must lie in 1 to n_group ({groups}): set --model.topk-group"
            )
        best = 2 if router.group_score == "top2" else 1
        # with all groups kept their scores do not matter
        if limit < groups and number // groups < best:
            raise ValueError(
                f"a group is scored by its best {best} experts, but n_group ({groups}) leaves "
                f"{number // groups} of {number} in each: set a smaller --model.n-group"
            )
        if limit * (number // groups) < self.per_token:
            raise ValueError(
                f"topk_group ({limit}) x {plural(number // groups, 'expert')} of a group are fewer "
                f"than num_experts_per_tok ({self.per_token}): set a larger --model.topk-group"
            )

    @property
    def experts(self) -> int:
        """Number of experts the router chooses from."""
        return self.number

    def with_balance_bias(self) -> "MoESpec":
        """Return a copy whose router has a balance bias."""
        return replace(self, router=replace(self.router, bias=True))

    def params(self, stream: ResidualStream) -> ParamSpecs:
        """Return the specs of the parameters of router, stacked experts, shared expert and its
        gate, by name.
        """
        hidden = stream.hidden_size
        # gate and up, sharded over tp by outputs
        inner = self._stacked_matrix(self.size, hidden, 1)
        down = self._stacked_matrix(hidden, self.size, 2, stream.out_scale)
        return {
            **add_prefix("router", self.router.params(self.number, hidden)),
            **{f"experts.{name}.weight": inner for name in ("gate", "up")},
            "experts.down.weight": down,
            **(add_prefix("experts", self._bias_params(hidden)) if self.bias else {}),
            **({} if self.shared is None else add_prefix("shared", self.shared.params(stream))),
            **(
                add_prefix("shared_gate", self._shared_gate_params(hidden))
                if self.shared_gate
                else {}
            ),
        }

    @staticmethod
    def _shared_gate_params(hidden: int) -> ParamSpecs:
        """Return the spec of the shared expert's gate [1, hidden], by name, replicated over tp; it
        multiplies a partial sum, so its gradient is partial.
        """
        return {"weight": ParamSpec((1, hidden), "router", gradient="branch", products=hidden)}

    def _stacked_matrix(self, out: int, inp: int, dim: int, std_scale: float = 1.0) -> ParamSpec:
        """Return the spec of one matrix of every expert, [experts, out, inp]: experts sharded over
        ep, `dim` over tp.
        """
        cuts = self._shards(dim)
        shape, products = (self.number, out, inp), self.per_token * out * inp
        return ParamSpec(shape, "expert", cuts, std_scale=std_scale, products=products)

    def _bias_params(self, hidden: int) -> ParamSpecs:
        """Return the specs of the experts' biases by name, each [experts, out]. That of `down` is
        replicated over tp, where it is added to a partial sum.
        """
        # gate and up biases are sharded with their outputs
        of_experts, of_inner = self._shards(1)
        inner = ParamSpec((self.number, self.size), "bias", (of_experts, of_inner), initial="zeros")
        down = ParamSpec((self.number, hidden), "bias", (of_experts,), "branch", "zeros")
        return {"gate.bias": inner, "up.bias": inner, "down.bias": down}

    def _shards(self, dim: int) -> tuple[ShardSpec, ShardSpec]:
        """Return how a stacked parameter is sharded: dim 0, experts, over ep, and `dim` over tp."""
        return (
            ShardSpec("ep", 0, self.number, "num_experts"),
            ShardSpec("tp", dim, self.size, "moe_intermediate_size"),
        )
