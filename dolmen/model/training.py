"""Training options that act inside a model and are no part of its config.json: dropout, router
balancing, adapters, fp8.
"""

from dataclasses import dataclass, replace
from typing import Literal

from dolmen.core.config import NonNegative, config
from dolmen.model.spec import LayerRun, LoraSpec, ModelSpec
from dolmen.ops.attention_support import AttentionChoice
from dolmen.ops.numerics import Exact, Fp8


@config("train.router")
class RouterTraining:
    """Training options of MoE routers."""

    balance: Literal["loss", "bias", "none"] = "loss"
    """Load balancing of experts. loss: an auxiliary loss. bias: a bias that is added to the scores
    for expert selection only and adjusted after each update. none: no balancing.
    """
    aux_loss_coef: NonNegative | None = None
    """Weight of the auxiliary loss (summed over layers, mean over sequences) of balance loss.
    Unset: that of the model's config.json.
    """
    z_loss_coef: NonNegative = 0.0
    """Weight of the mean square of the router's logsumexp, summed over layers."""
    bias_rate: NonNegative = 0.001
    """Step size of the bias per update, for balance bias."""


@dataclass(frozen=True)
class Training:
    """Training options that change what the model computes."""

    dropout: float = 0.0
    """Dropout after embedding, attention and feed-forward, and on attention probabilities."""
    router: RouterTraining = RouterTraining()
    adapter: LoraSpec | None = None
    """LoRA adapters to train; None: all parameters."""
    fp8: Fp8 | None = None
    """How products of matrices are rounded; None: they are not."""
    exact: Exact | None = None
    """Leaves of all sums, for the same bits at every layout; None: sums as they are fastest."""
    attention: AttentionChoice = AttentionChoice()
    """The attention backend, or auto."""

    def apply_to(self, spec: ModelSpec) -> ModelSpec:
        """Return a copy of `spec` as it is trained: with LoRA adapters, fp8 rounding, and, if
        balance is "bias", a balance bias in every router.
        """
        if self.adapter is not None:
            spec = replace(spec, adapter=self.adapter)
        if self.fp8 is not None:
            spec = replace(spec, fp8=self.fp8)
        if self.router.balance != "bias":
            return spec
        runs = tuple(
            LayerRun(
                tuple(replace(b, mlp=b.mlp.with_balance_bias()) for b in run.blocks), run.repeat
            )
            for run in spec.runs
        )
        return replace(spec, runs=runs)
