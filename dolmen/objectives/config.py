"""Options of the objective. Imports no torch."""

from dataclasses import fields
from typing import Annotated, Literal, get_args

from pydantic import Field

from dolmen.core.config import Name, config

PairKind = Literal["sigmoid", "ipo", "hinge", "robust", "sppo", "apo-zero", "exo"]
ReferenceFreeKind = Literal["simpo", "orpo"]
"""Preference losses without a reference model."""
UnpairedKind = Literal["kto"]
"""Preference losses of single completions, each desirable or not."""
SIMPO_MARGIN = 0.5
WEIGHTS = ("desirable_weight", "undesirable_weight")
MAX_WEIGHT = 1e30  # losses are float32, whose range ends at 3.4e38
Weight = Annotated[float, Field(ge=0, le=MAX_WEIGHT)]
"""A factor in a loss."""
Beta = Annotated[float, Field(gt=0, le=MAX_WEIGHT)]
LabelSmoothing = Annotated[float, Field(ge=0, lt=0.5)]
"""Share of pairs with swapped labels: at a half the loss would not depend on the model."""


OPTIONS_OF = {
    "tokens": (),
    "dpo": ("beta", "loss_type", "label_smoothing", "rpo_alpha", "reference", "margin", *WEIGHTS),
    "reward": ("margin", "center_rewards_coefficient"),
    "grpo": ("reference",),
    "ppo": ("reference",),
}
"""The options that apply to each objective."""


@config("objective")
class ObjectiveConfig:
    """The loss that the model is trained with."""

    name: Literal["tokens", "dpo", "reward", "grpo", "ppo"] = "tokens"
    """tokens: cross-entropy of the next token, or of masked tokens. dpo: preference optimisation
    for --data.rows pairs or completions (--objective.loss-type). reward: a reward model, with a
    scalar head, for --data.rows pairs. grpo: GRPO and its variants, which generate completions and
    score them with --reward, for --data.rows prompts (--rollout). ppo: PPO, the same with a critic
    (--ppo, --critic).
    """
    beta: Beta = 0.1
    """dpo: factor of the log-ratios of policy to reference; the smaller, the further the policy may
    move from the reference. simpo: factor of the mean log-probability per token (2 and more are
    usual). orpo: weight of the odds ratio relative to the likelihood of the chosen completion.
    """
    loss_type: Literal[PairKind, ReferenceFreeKind, UnpairedKind] = "sigmoid"
    """dpo: the preference loss. kto is for --data.rows completions, all others for pairs; simpo and
    orpo have no reference model.
    """
    label_smoothing: LabelSmoothing = 0.0
    """dpo: assumed share of pairs with swapped labels, for sigmoid, robust, exo and simpo."""
    rpo_alpha: Weight = 0.0
    """dpo: weight of the cross-entropy per token of the chosen completion, added to the loss (RPO).
    It keeps the likelihood of both completions from falling together. Not for simpo, orpo and kto.
    """
    reference: Name | None = None
    """dpo, grpo, ppo: the reference model: a transformers directory, a hub id or a run. Default:
    the initial model.
    """
    margin: Weight | None = None
    """reward, simpo: target margin between the scores of the chosen and the rejected completion.
    reward adds a row's own `margin`, if it has one. Default: 0, simpo 0.5.
    """
    desirable_weight: Weight = 1.0
    """kto: weight of the loss of desirable completions."""
    undesirable_weight: Weight = 1.0
    """kto: weight of the loss of undesirable completions."""
    center_rewards_coefficient: Weight = 0.0
    """reward: weight of the squared sum of a pair's scores, which centres scores at 0."""

    def __post_init__(self):
        """Raise ValueError for options that the objective, or DPO's loss_type, does not have."""
        if self.rpo_alpha and self.loss_type not in get_args(PairKind):
            raise ValueError(
                f"objective.rpo-alpha ({self.rpo_alpha}) applies to "
                f"{', '.join(get_args(PairKind))}, but objective.loss-type is {self.loss_type}: "
                "leave it out, or set another --objective.loss-type"
            )
        for field in fields(self):
            # options of other objectives must have their defaults
            applies = field.name in ("name", *OPTIONS_OF[self.name])
            if not applies and getattr(self, field.name) != field.default:
                having = " and ".join(
                    name for name, known in OPTIONS_OF.items() if field.name in known
                )
                raise ValueError(
                    f"objective.{field.name.replace('_', '-')} applies to {having}, but "
                    f"objective.name is {self.name}: leave it out, or set another --objective.name"
                )
        if self.name == "dpo" and not self.needs_reference and self.reference is not None:
            raise ValueError(
                f"objective.loss-type {self.loss_type} has no reference model, but "
                f"objective.reference is {self.reference}: leave it out, or set another "
                "--objective.loss-type"
            )
        if self.name == "dpo" and self.margin is not None and self.loss_type != "simpo":
            raise ValueError(
                f"objective.margin ({self.margin}) applies to reward models and simpo, but "
                f"objective.loss-type is {self.loss_type}: leave it out"
            )
        if self.loss_type != "kto" and (self.desirable_weight, self.undesirable_weight) != (1, 1):
            raise ValueError(
                "objective.desirable-weight and undesirable-weight apply to kto, but "
                f"objective.loss-type is {self.loss_type}: leave them out"
            )

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares with a reference model: DPO's variants and KTO, not SimPO and
        ORPO.
        """
        return self.name == "dpo" and self.loss_type not in get_args(ReferenceFreeKind)

    @property
    def uses_rollouts(self) -> bool:
        """True if the run samples completions and trains on them."""
        return self.rows == "prompts"

    @property
    def rows(self) -> str | None:
        """Value that --data.rows must have for the objective ("pairs", "completions" or "prompts");
        None where several fit.
        """
        if self.name == "dpo" and self.loss_type in get_args(UnpairedKind):
            return "completions"
        return {"tokens": None, "grpo": "prompts", "ppo": "prompts"}.get(self.name, "pairs")
