"""What a run may be told of answers that its model draws and learns from. Knows nothing of
torch.
"""

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["grpo", "bnpo", "dr-grpo", "dapo", "gspo", "cispo"]


@dataclass(frozen=True)
class RolloutConfig:
    """What is drawn, how it is judged, and how the model learns from it (--objective.name grpo).

    A phase draws answers with the weights as they are; then `epochs` times all of them are learned
    from, --train.global-batch-size in an update.
    """

    samples: int = 8
    """Answers to each prompt; each is compared with the mean of them."""
    prompts: int | None = None
    """Prompts of a phase. Unset: as many as make one update."""
    epochs: int = 1
    """How often the answers of a phase are learned from."""
    max_new_tokens: int = 128
    """Tokens of an answer, at most."""
    temperature: float = 1.0
    """Of what is drawn, and of the log-probabilities that are learned from."""
    kind: Kind = "grpo"
    """The loss of an answer (objectives/policy.py: `group`)."""
    level: Literal["token", "sequence"] = "token"
    """Whether ratios to what was drawn with are of tokens, or of answers."""
    clip_low: float = 0.2
    """A ratio counts down to 1 - clip_low."""
    clip_high: float = 0.2
    """And up to 1 + clip_high."""
    beta: float = 0.0
    """Weight of the KL (k3) from the model that the run begins with; 0: it is not computed."""
    scale: Literal["group", "none"] = "group"
    """Whether rewards less their group's mean are divided by its standard deviation."""
    tp: int | None = None
    """Processes that one copy of the drawing model is split over, by columns and rows. Unset: as
    --layout.tp. Its weights are those that are trained, put where they are needed in each phase.
    """
    batch: int = 64
    """Answers that are drawn at once by a copy."""
    limit_seconds: float = 10.0
    """Of a reward's function for an answer; then its process is ended, and another one started."""
    on_failure: Literal["stop", "zero", "leave-out"] = "stop"
    """Where a reward's function raises, takes too long or gives no finite number: the run ends, the
    reward is 0, or the answer is not learned from. Each is counted and logged.
    """

    def __post_init__(self):
        for name in ("prompts", "epochs", "max_new_tokens", "tp", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    f"rollout.{name.replace('_', '-')} is {value}: it must be at least 1"
                )
        if self.samples < 2:
            raise ValueError(
                f"rollout.samples is {self.samples}: an answer is compared with others to its "
                "prompt, so it must be at least 2"
            )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(
                f"rollout.temperature is {self.temperature}: answers are drawn from the model's "
                "own distribution, so it must be over 0"
            )
        for name in ("clip_low", "clip_high", "beta"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"rollout.{name.replace('_', '-')} is {value}: it must be 0 or more"
                )
        if not (math.isfinite(self.limit_seconds) and self.limit_seconds > 0):
            raise ValueError(
                f"rollout.limit-seconds is {self.limit_seconds}: it must be over 0 and finite"
            )

    def answers(self, global_batch_size: int) -> int:
        """Of a phase. Raises ValueError, with the numbers, where they are not whole updates."""
        prompts = self.prompts or max(1, global_batch_size // self.samples)
        total = prompts * self.samples
        if total % global_batch_size:
            raise ValueError(
                f"a phase draws {total} answers (rollout.prompts {prompts} x rollout.samples "
                f"{self.samples}), and train.global-batch-size {global_batch_size} does not divide "
                f"them: set --train.global-batch-size {total}, or other --rollout.prompts"
            )
        return total

    def updates(self, global_batch_size: int) -> int:
        """Of a phase."""
        return self.epochs * self.answers(global_batch_size) // global_batch_size
