"""x

What a norm is: RMSNorm (Zhang and Sennrich, 1910.07467) or LayerNorm (Ba et al., 1607.06450).

Specs of dense and sparse (mixture of experts) feed-forward layers.

What a dense feed-forward layer is: down(act(up x)), or gated, down(act(gate x) * up x)
(Shazeer, 2002.05202).

What a sparse feed-forward layer is: a router sends each token to some of many experts, which are
gated MLPs (Shazeer et al., 1701.06538; DeepSeek-V2, 2405.04434, and V3, 2412.19437).

"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from dolmen.core.messages import divisor, plural
from dolmen.model.spec.param import Cut, Gradient, Leaf, Leaves, Stream, column, row, within


@dataclass(frozen=True)
class Norm:
    """Over the last dim."""

    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    eps: float = 1e-5
    """Added to the variance."""
    bias: bool = False
    affine: bool = True
    """Its result is multiplied by a weight (OLMo: it is not)."""
    zero_centred: bool = False
    """The weight is stored less 1: y = x / rms(x) * (1 + w), and starts at 0 (Gemma)."""

    def __post_init__(self):
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"a norm's eps is {self.eps!r}: it must be finite and not negative")
        if not self.affine and (self.bias or self.kind != "layernorm"):
            raise ValueError(
                f"{self} has no weight: dolmen computes that of layernorm without bias alone"
            )
        if self.zero_centred and self.kind != "rmsnorm":
            raise ValueError(f"{self} is zero-centred: dolmen computes that of rmsnorm alone")

    def leaves(
        self, *shape: int, gradient: Gradient = "residual", cuts: tuple[Cut, ...] = ()
    ) -> Leaves:
        """Of a norm over so many features, or of one with a weight for each of several, [several,
        features]; whole on every rank of tp but for its `cuts`.
        """
        if not self.affine:
            return {}
        initial = "zeros" if self.zero_centred else "ones"
        leaves = {"weight": Leaf(shape, "norm", cuts, gradient, initial)}
        if self.bias:
            leaves["bias"] = Leaf(shape, "bias", cuts, gradient, "zeros")
        return leaves


Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class Mlp:
    """Over the features of each token by itself."""

    size: int
    """Width inside."""
    gated: bool = True
    activation: Activation = "silu"
    """gelu is the exact erf form."""
    bias: bool = False

    @property
    def experts(self) -> int:
        """How many a router chooses from."""
        return 0

    def biased(self) -> "Mlp":
        """The same with a router whose choice a bias balances; here is none."""
        return self

    def leaves(self, stream: Stream) -> Leaves:
        hidden, knob = stream.hidden_size, "intermediate_size"
        inner = column(self.size, hidden, self.bias, Cut("tp", 0, self.size, knob))
        down = row(hidden, self.size, self.bias, Cut("tp", 1, self.size, knob), stream.out_scale)
        return {
            **(within("gate", inner) if self.gated else {}),
            **within("up", inner),
            **within("down", down),
        }


@dataclass(frozen=True)
class Router:
    """Which experts compute a token, and with what weight."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    """The weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """What the weights are multiplied by, last."""
    groups: int = 1
    """Experts lie in as many groups of equal size, ..."""
    groups_per_token: int = 1
    """... of which a token's experts come from so many."""
    group_score: Literal["max", "top2"] = "max"
    """A group's score: that of its best expert, or the sum of its best two."""
    bias: bool = False
    """A bias added for the choice alone, not moved by gradients."""
    logit_bias: bool = False
    """A bias of the logits, which is learned like any other (GPT-OSS)."""
    aux_loss_coef: float = 0.0
    """Weight of the balance loss that its config.json states; --train.router can say otherwise."""

    def leaves(self, experts: int, hidden: int) -> Leaves:
        """Whole on every rank of tp, which weighs by it what is a partial sum."""
        shape = (experts, hidden)
        leaves = {"weight": Leaf(shape, "router", gradient="branch", products=experts * hidden)}
        if self.bias:
            # bf16 has 8 bits: a step of 0.001 would be lost on a bias of 0.5, and choices turn
            leaves["bias"] = Leaf((experts,), "bias", initial="zeros", trained=False, precise=True)
        if self.logit_bias:
            leaves["logits.bias"] = Leaf((experts,), "bias", gradient="branch", initial="zeros")
        return leaves


@dataclass(frozen=True)
class Clamped:
    """What an expert of GPT-OSS (2508.10925) makes of its gate and its factor: with a = min(gate,
    limit) and b = factor between -limit and limit, a sigmoid(alpha a) (b + 1).
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self):
        for name in ("alpha", "limit"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"swiglu_{name} is {getattr(self, name)}: it must be finite and above 0"
                )


@dataclass(frozen=True)
class Experts:
    """y = sum over a token's experts of weight * expert(x), beside what is shared. Raises
    ValueError, with the numbers and the option, for a choice of experts that cannot be made.
    """

    number: int
    per_token: int
    size: int
    """Width inside an expert."""
    activation: Activation | Clamped = "silu"
    """Of the gate, which then multiplies; or what is made of both."""
    router: Router = Router()
    shared: Mlp | None = None
    """A dense layer beside the experts, which every token passes."""
    shared_gate: bool = False
    """What is shared is multiplied by the sigmoid of a learned product with the token (Qwen2-MoE,
    2407.10671, section 2.2.2).
    """
    bias: bool = False
    """Of each of an expert's matrices."""

    def __post_init__(self):
        if not 1 <= self.per_token <= self.number:
            raise ValueError(
                f"num_experts_per_tok ({self.per_token}) must lie in 1 to num_experts "
                f"({self.number}): set --model.num-experts-per-tok"
            )
        self._check_groups()
        if self.shared is not None and self.shared.bias:
            raise ValueError("a shared expert has a bias: dolmen computes it without")
        if self.shared_gate and self.shared is None:
            raise ValueError("a gate of what experts share, and nothing is shared")

    def _check_groups(self) -> None:
        router, number = self.router, self.number
        groups, kept = router.groups, router.groups_per_token
        if number % groups:
            raise ValueError(
                f"num_experts ({number}) is not divisible by n_group ({groups}): set "
                f"--model.n-group to a divisor, such as {divisor(number, near=groups)}"
            )
        if not 1 <= kept <= groups:
            raise ValueError(
                f"topk_group ({kept}) must lie in 1 to n_group ({groups}): set --model.topk-group"
            )
        best = 2 if router.group_score == "top2" else 1
        if kept < groups and number // groups < best:
            raise ValueError(
                f"a group counts as its best {best} experts, but n_group ({groups}) leaves "
                f"{number // groups} of {number} in each: set a smaller --model.n-group"
            )
        if kept * (number // groups) < self.per_token:
            raise ValueError(
                f"topk_group ({kept}) x {plural(number // groups, 'expert')} of a group are fewer "
                f"than num_experts_per_tok ({self.per_token}): set a larger --model.topk-group"
            )

    @property
    def experts(self) -> int:
        """How many a router chooses from."""
        return self.number

    def biased(self) -> "Experts":
        """The same with a router whose choice a bias balances."""
        return replace(self, router=replace(self.router, bias=True))

    def leaves(self, stream: Stream) -> Leaves:
        hidden = stream.hidden_size
        inner = self._stacked(self.size, hidden, 1)
        down = self._stacked(hidden, self.size, 2, stream.out_scale)
        return {
            **within("router", self.router.leaves(self.number, hidden)),
            **{f"experts.{name}.weight": inner for name in ("gate", "up")},
            "experts.down.weight": down,
            **(within("experts", self._biases(hidden)) if self.bias else {}),
            **({} if self.shared is None else within("shared", self.shared.leaves(stream))),
            **(within("shared_gate", self._gate(hidden)) if self.shared_gate else {}),
        }

    @staticmethod
    def _gate(hidden: int) -> Leaves:
        """Like a router whole on every rank of tp, where it multiplies a partial sum."""
        return {"weight": Leaf((1, hidden), "router", gradient="branch", products=hidden)}

    def _stacked(self, out: int, inp: int, dim: int, std_scale: float = 1.0) -> Leaf:
        """One matrix of every expert: [experts, out, inp], experts cut over ep, `dim` over tp."""
        cuts = self._cuts(dim)
        shape, products = (self.number, out, inp), self.per_token * out * inp
        return Leaf(shape, "expert", cuts, std_scale=std_scale, products=products)

    def _biases(self, hidden: int) -> Leaves:
        """One of every expert: [experts, out]. That of `down` is whole on every rank of tp, where
        it joins what is a partial sum.
        """
        of_experts, of_inner = self._cuts(1)
        inner = Leaf((self.number, self.size), "bias", (of_experts, of_inner), initial="zeros")
        down = Leaf((self.number, hidden), "bias", (of_experts,), "branch", "zeros")
        return {"gate.bias": inner, "up.bias": inner, "down.bias": down}

    def _cuts(self, dim: int) -> tuple[Cut, Cut]:
        """Of what every expert has one: over ep, and along `dim` over tp."""
        return (
            Cut("ep", 0, self.number, "num_experts"),
            Cut("tp", dim, self.size, "moe_intermediate_size"),
        )
