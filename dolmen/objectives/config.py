"""What a run may be told of what it is trained to. Knows nothing of torch."""

from dataclasses import fields
from typing import Annotated, Literal, get_args

from pydantic import Field

from dolmen.core.config import Name, config

Kind = Literal["sigmoid", "ipo", "hinge", "robust", "sppo", "apo-zero", "exo"]
Alone = Literal["simpo", "orpo"]
"""Kinds that compare with no other model."""
Single = Literal["kto"]
"""Kinds of answers that are wanted or not, one by one."""
SIMPO_MARGIN = 0.5
WEIGHTS = ("desirable_weight", "undesirable_weight")
LARGEST = 1e30
"""Of what is multiplied with losses, which are float32 and end at 3.4e38."""


OWN = {
    "tokens": (),
    "dpo": ("beta", "loss_type", "label_smoothing", "rpo_alpha", "reference", "margin", *WEIGHTS),
    "reward": ("margin", "center_rewards_coefficient"),
    "grpo": ("reference",),
    "ppo": ("reference",),
}
"""Of each objective the options that are its own."""


@config("objective")
class ObjectiveConfig:
    """What the model is trained to."""

    name: Literal["tokens", "dpo", "reward", "grpo", "ppo"] = "tokens"
    """tokens: the next ones, or those that are masked; dpo: of two answers the preferred one, for
    --data.rows pairs, or completions; reward: one number for a text, larger for the preferred
    answer, for --data.rows pairs; grpo: of answers that the model draws those with the larger
    --reward, for --data.rows prompts (--rollout says how); ppo: the same, by what a critic expects
    of each token (--ppo, --critic).
    """
    beta: float = 0.1
    """dpo: how much the log-ratio of the model to the reference counts; the smaller, the further it
    may go. simpo: how much a token's mean log-probability counts (2 and more are usual); orpo: how
    much the odds of the answers count beside the chosen one's likelihood.
    """
    loss_type: Literal[Kind, Alone, Single] = "sigmoid"
    """dpo: the loss of a pair, of kto that of an answer, for --data.rows completions. simpo and
    orpo compare with no reference.
    """
    label_smoothing: float = 0.0
    """dpo: the share of pairs that are taken to be the wrong way round, of sigmoid, robust, exo and
    simpo.
    """
    rpo_alpha: float = 0.0
    """dpo: how much the chosen answer's likelihood itself counts, the mean over its tokens of
    -log p; over 0 it cannot fall together with that of the rejected one. Of kinds that compare with
    a reference answer by answer: neither simpo nor orpo, which has it, nor kto.
    """
    reference: Name | None = None
    """dpo: the model that is compared with: a transformers directory, a hub id or a run. Default:
    the model that the run begins with.
    """
    margin: Annotated[float, Field(ge=0, le=LARGEST)] | None = None
    """reward, simpo: target margin between the scores of the chosen and the rejected completion.
    reward adds a row's own `margin`, if it has one. Default: 0, simpo 0.5.
    """
    desirable_weight: Annotated[float, Field(ge=0, le=LARGEST)] = 1.0
    """kto: what the loss of a wanted answer is multiplied by."""
    undesirable_weight: Annotated[float, Field(ge=0, le=LARGEST)] = 1.0
    """kto: what that of an unwanted one is."""
    center_rewards_coefficient: Annotated[float, Field(ge=0, le=LARGEST)] = 0.0
    """reward: what scores that are not about 0 cost, the weight of the squared sum of a pair's."""

    def __post_init__(self):
        if self.name == "dpo":
            check_dpo(self.beta, self.loss_type, self.label_smoothing, self.rpo_alpha)
        for field in fields(self):
            own = field.name in ("name", *OWN[self.name])
            if not own and getattr(self, field.name) != field.default:
                having = " and ".join(name for name, known in OWN.items() if field.name in known)
                raise ValueError(
                    f"objective.{field.name.replace('_', '-')} is of {having}, and objective.name "
                    f"is {self.name}: leave it out, or use another --objective.name"
                )
        if self.name == "dpo" and not self.needs_reference and self.reference is not None:
            raise ValueError(
                f"objective.loss-type {self.loss_type} compares with no other model, and "
                "objective.reference "
                f"is {self.reference}: leave it out, or use another --objective.loss-type"
            )
        if self.name == "dpo" and self.margin is not None and self.loss_type != "simpo":
            raise ValueError(
                f"objective.margin ({self.margin}) is of reward models and of simpo, and "
                f"objective.loss-type is {self.loss_type}: leave it out"
            )
        if self.loss_type != "kto" and (self.desirable_weight, self.undesirable_weight) != (1, 1):
            raise ValueError(
                "objective.desirable-weight and undesirable-weight are of kto, and "
                "objective.loss-type "
                f"is {self.loss_type}: leave them out"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is used."""
        return self.name == "dpo" and self.loss_type not in get_args(Alone)

    @property
    def draws(self) -> bool:
        """Whether a model learns from answers of its own."""
        return self.rows == "prompts"

    @property
    def rows(self) -> str | None:
        """The --data.rows that it is of, where there is but one."""
        if self.name == "dpo" and self.loss_type in get_args(Single):
            return "completions"
        return {"tokens": None, "grpo": "prompts", "ppo": "prompts"}.get(self.name, "pairs")


def check_dpo(beta: float, kind: str, label_smoothing: float, rpo_alpha: float = 0.0) -> None:
    """Raises ValueError for what no preference is trained by."""
    known = (*get_args(Kind), *get_args(Alone), *get_args(Single))
    if kind not in known:
        raise ValueError(f"kind is {kind!r}: it must be one of {known}")
    if not 0 < beta <= LARGEST:
        raise ValueError(f"beta is {beta}: it must be over 0 and at most {LARGEST:g}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing is {label_smoothing}: it is the share of pairs the wrong way round, "
            "so it must be 0 or more and below 0.5"
        )
    if not 0 <= rpo_alpha <= LARGEST:
        raise ValueError(
            f"rpo_alpha is {rpo_alpha}: it must be finite, at least 0 and at most {LARGEST:g}"
        )
    if rpo_alpha and kind not in get_args(Kind):
        raise ValueError(
            f"rpo_alpha ({rpo_alpha}) is of {', '.join(get_args(Kind))}, and kind is {kind}: leave "
            "it out, or use another kind"
        )
