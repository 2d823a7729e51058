"""The state that training changes: model, optimizer, counters, loss scale, spike policy, and the
critic of PPO, which has a state of its own.

What a checkpoint keeps, and which field or file has it:

    weights, moments, fp8 scales    TrainState.tensors(), with those of the critic under CRITIC
    step, updates, inherited        checkpoint/saved.py, as JSON in state.json
    loss scale, norms of spikes     the same
    learning rate                   not kept: a function of step, steps and warm-up
    new_rows, steps, lr offset      not kept: functions of the options and the data, set on resume

`step` counts batches, `updates` those that changed parameters. They differ where steps are skipped
(loss or gradient not finite, spikes) and during the warm-up of a critic, in which the policy only
reads. The optimizer's own count, which corrects the bias of its moments, is `inherited + updates`.

Frozen phase of new vocabulary rows. A model that gets new tokens (dolmen vocab extend) first trains
only their rows of embedding and head; everything else stays the same to the bit:

    step    0 ............ until | until ................ steps
            new rows only        | all parameters, with a fresh optimizer state

A new row is initialised to a mean of other rows, so its first gradients are those of a guess: they
would also move the layers, which are already trained (Hewitt, 2021; Cui et al., 2304.08177,
section 2.3).
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from torch import Tensor

from dolmen.checkpoint.saved import SavedCritic
from dolmen.conversion.checkpoint import CRITIC
from dolmen.core.state import local_view, region
from dolmen.data.batch import Batch
from dolmen.model.decoder import Decoder
from dolmen.objectives.objective import CrossEntropy, Objective, check
from dolmen.optim import optimizer as optim
from dolmen.optim.config import OptimizerConfig
from dolmen.optim.optimizer import LossScale, Optimizer
from dolmen.parallel import quantized_product
from dolmen.parallel.schedule import Schedule
from dolmen.rl.targets import KLController
from dolmen.training.config import NewRowsConfig


@dataclass(frozen=True)
class NewRows:
    """The frozen phase: new rows of the vocabulary, and the steps in which only they are
    trained.
    """

    first: int
    """Id of the first new token."""
    until: int
    """The first step in which everything is trained."""

    @classmethod
    def from_config(cls, config: NewRowsConfig, steps: int) -> "NewRows | None":
        """Return the frozen phase of a run of `steps` steps, in which only rows of new tokens are
        trained: the configured share of the steps, at least one; None if the share is 0 or the
        first new token is unknown.
        """
        if not config.share or config.first is None:
            return None
        return cls(config.first, max(1, round(config.share * steps)))

    def mask_gradients(self, model: Decoder) -> None:
        """Leave gradients of new tokens' rows only, in place: zero those of old rows in embedding
        and head, and set all other parameters' gradients to None. Call it after backward, on every
        rank.
        """
        params = model.local_specs()
        for name, p in model.named_parameters():
            if p.grad is None:
                continue
            if params[name].is_vocabulary:
                # tables are sharded by rows: a rank may have old rows only, new rows only, or both
                old = max(0, self.first - region(p)[0].start)  # rows of this rank
                local_view(p.grad)[:old].zero_()
            else:
                p.grad = None


def step_without_decay(optimizer: Optimizer) -> None:
    """Step the optimizer once without weight decay, so that rows whose gradient is zero stay the
    same to the bit. The weight decay of each group is restored.
    """
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    optimizer.step()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay


def reset_optimizer(optimizer: Optimizer) -> None:
    """Zero the moments of all parameters and the step count of the optimizer, in place. Done when
    the phase in which only rows of new tokens are trained ends: old rows have no moments yet, and
    the step count that corrects their bias is shared by all rows.
    """
    # moments exist before they are zeroed, also where no step was made yet
    optim.prime(optimizer)
    for group in optimizer.param_groups:
        for p in group["params"]:
            for kind in group["kinds"]:
                local_view(optimizer.state[p][kind]).zero_()
    optim.set_step(optimizer, 0)


WINDOW = 64  # steps remembered
LEAST = 16  # steps before anything is a spike: norms at the start of a run are no baseline


class SpikePolicy:
    """Skips steps whose gradient norm is over `factor` times the median norm of the last WINDOW
    steps (None: no step is a spike). Skipped steps are part of the median: a lasting change becomes
    usual after half a window, and a single giant, which would spoil a mean, does not count (PaLM,
    2204.02311, skipped some hundred batches around each spike by hand). It depends on norms alone,
    which are the same on every rank, and so are its decisions.
    """

    def __init__(self, factor: float | None = None):
        """Start without norms. `factor`: a norm over this many times the median is a spike; None:
        none is.
        """
        self.factor, self.norms = factor, deque(maxlen=WINDOW)

    def allow(self, norm: float) -> bool:
        """Return whether a step with this gradient norm may update parameters: False if the norm is
        not finite, or a spike (over `factor` times the median of the last 64, once there are 16).
        Remembers every finite norm, so call it once per step.
        """
        if not math.isfinite(norm):
            return False
        # compared with the norms before this one, so that a spike does not raise its own threshold
        spike = (
            self.factor is not None
            and len(self.norms) >= LEAST
            and norm > self.factor * median(self.norms)
        )
        # spikes too: after WINDOW / 2 steps at a new level that level is the median
        self.norms.append(norm)
        return not spike

    def state(self) -> list[float]:
        """Return the remembered norms, for a checkpoint. They are exact in JSON, so a resumed run
        decides as one that never stopped.
        """
        return list(self.norms)

    def load(self, norms: list[float]) -> None:
        """Replace the remembered norms by `norms`, which `state` returned."""
        self.norms = deque(norms, maxlen=WINDOW)


@dataclass
class TrainState:
    """Everything that training changes, and what an update needs."""

    model: Decoder
    optimizer: Optimizer
    config: OptimizerConfig
    steps: int  # length of the learning rate's schedule
    zero: int
    schedule: Schedule  # what each rank of pp does in a step
    seed: int = 0
    scale: LossScale = field(default_factory=lambda: LossScale(False))
    spike: SpikePolicy = field(default_factory=SpikePolicy)
    step: int = 0  # steps made, and the index of the next batch
    updates: int = 0  # those of them that changed parameters
    # difference of the optimizer's step count to `updates`: over 0 with moments of another run,
    # below 0 after a reset (NewRows)
    inherited: int = 0
    tokens: int = 0  # real tokens trained on
    warmup: float | None = None  # steps of learning-rate warm-up; None: that of `config`
    lr_step_offset: float = 0.0  # steps of the current batch size that smaller or larger ones read
    objective: Objective = CrossEntropy()
    new_rows: NewRows | None = None  # rows that the frozen phase trains
    critic_warmup_steps: int = 0  # at the start, in which only the critic is updated
    critic: "Critic | None" = None
    pretraining: "PretrainingLoss | None" = None

    @property
    def frozen_phase(self) -> NewRows | None:
        """The new rows of the vocabulary (`new_rows`), if the coming step trains only them and
        everything else is frozen; else None.
        """
        rows = self.new_rows
        return rows if rows is not None and self.step < rows.until else None

    def __post_init__(self):
        """Raise ValueError if the objective needs another head (LM, scalar) than the model has."""
        check(self.objective, self.model.spec)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that a checkpoint stores, by name: weights (`model/NAME`), optimizer
        moments (`KIND/NAME`), scales and histories of delayed fp8 scaling, and the same of the
        critic with a prefix. They are this rank's own tensors, not copies: loading a checkpoint
        writes into them.
        """
        critic = {} if self.critic is None else self.critic.state.tensors()
        return {
            **optim.tensors(self.model, self.optimizer),
            **self.model.scaling(),
            **{f"{CRITIC}{name}": tensor for name, tensor in critic.items()},
        }

    def scaling(self) -> dict[str, Tensor]:
        """Return the subset of `tensors` that are scales and amax histories of delayed fp8 scaling,
        with those of the critic.
        """
        critic = {} if self.critic is None else self.critic.state.scaling()
        return self.model.scaling() | {f"{CRITIC}{name}": t for name, t in critic.items()}

    def delayed_scalings(self) -> list[quantized_product.Delayed]:
        """Return the delayed fp8 scaling object of each weight that has one, with those of the
        critic.
        """
        critic = [] if self.critic is None else self.critic.state.delayed_scalings()
        return [*self.model.delayed_scaling().values(), *critic]

    def names(self) -> set[str]:
        """Return the names that a checkpoint's tensors have on all ranks together: weights,
        optimizer state and fp8 scales of the model and critic, those of other pipeline stages
        included.
        """
        specs = self.model.spec.params
        critic = set() if self.critic is None else self.critic.state.names()
        param_names = optim.names(specs, self.config.name) | {
            f"{kind}/{name}"
            for name, spec in specs.items()
            if spec.fp8 is not None and spec.fp8.delayed
            for kind in (quantized_product.HISTORY, quantized_product.SCALE)
        }
        return param_names | {f"{CRITIC}{name}" for name in critic}


@dataclass(frozen=True)
class PretrainingLoss:
    """Plain text that a policy learns with its completions, so that it does not forget how to write
    (2203.02155, section 3.5: PPO-ptx; DeepSpeed-Chat's unsupervised coefficient). In each update

        gradient = that of the policy's loss + coefficient x that of the text's cross-entropy

    each a mean over its own tokens of the global batch. Which text an update reads follows from its
    number alone, as in pretraining.
    """

    coefficient: float
    batch: Callable[[int], Batch]
    """Return this rank's rows of a step, as many as of completions."""
    objective: Objective = CrossEntropy()


@dataclass(frozen=True)
class Critic:
    """The critic of PPO: a second model on the same mesh with an optimizer of its own, trained on
    the same batches by the same steps as the policy.
    """

    state: TrainState
    """The state of a model of the policy's shape with a scalar head."""
    coefficient: KLController
    """The KL coefficient of rewards in the next iteration."""

    def save(self) -> SavedCritic:
        """Return what a checkpoint stores of the critic besides tensors: updates, loss scale, norms
        of the spike policy, KL coefficient.
        """
        state = self.state
        scale = state.scale.value, state.scale.good_steps
        return SavedCritic(state.updates, scale, tuple(state.spike.state()), self.coefficient.value)

    def resume(self, step: int, saved: SavedCritic) -> None:
        """Restore what a checkpoint of `step` stores of the critic besides tensors, in place:
        updates, loss scale (if it is dynamic), norms of the spike policy, and the KL coefficient if
        it adapts; a fixed one follows the options.
        """
        state = self.state
        state.step, state.updates = step, saved.updates
        optim.set_step(state.optimizer, saved.updates)
        if state.scale.dynamic:
            state.scale.value, state.scale.good_steps = saved.loss_scale
        state.spike.load(list(saved.norms))
        if self.coefficient.target is not None:  # else it is what the options say
            self.coefficient.value = saved.kl_coef
