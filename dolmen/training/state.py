"""The state that training changes, and the policy for gradient spikes.

Which steps to skip for a gradient that is far over the usual: a batch of nonsense, or of another
world, undoes hours.

The usual is the median of the norms of the last WINDOW steps, those skipped among them: so a
lasting change becomes the usual after half a window, and a single giant, which would spoil a mean,
does not count (PaLM, arXiv:2204.02311, skipped some hundred batches around each spike by hand).
Pure and the same on every rank, as the norm is.

Everything that changes while training: a model, its optimizer, and what is learned beside it.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from torch import Tensor

from dolmen.conversion.checkpoint import CRITIC
from dolmen.model.decoder import Decoder
from dolmen.objectives.objective import CrossEntropy, Objective, check
from dolmen.optim import optimizer as optim
from dolmen.optim.config import OptimizerConfig
from dolmen.optim.optimizer import LossScale, Optimizer
from dolmen.parallel import product
from dolmen.parallel.actions import Schedule
from dolmen.rl.targets import KLController
from dolmen.training.new_rows import NewRows
from dolmen.training.pretraining import Text

WINDOW = 64  # steps remembered
LEAST = 16  # of them, before anything is a spike: a run's start is no usual


class SpikePolicy:
    """`factor` times the median is a spike; None: nothing is."""

    def __init__(self, factor: float | None = None):
        self.factor, self.norms = factor, deque(maxlen=WINDOW)

    def allow(self, norm: float) -> bool:
        """Whether a step of this gradient norm may change parameters; remembers it, if it is
        finite. One that is not is refused.
        """
        if not math.isfinite(norm):
            return False
        spike = (
            self.factor is not None
            and len(self.norms) >= LEAST
            and norm > self.factor * median(self.norms)
        )
        self.norms.append(norm)
        return not spike

    def state(self) -> list[float]:
        """What a checkpoint keeps, so that a resumed run decides as one never stopped; exact in
        JSON.
        """
        return list(self.norms)

    def load(self, norms: list[float]) -> None:
        """Go on from `state()`."""
        self.norms = deque(norms, maxlen=WINDOW)


@dataclass
class TrainState:
    """Everything that changes while training, and what it needs to change."""

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
    updates: int = 0  # those of them that were not skipped
    # what the optimizer's count of updates is over these: of the run whose moments it began with;
    # less than 0 where it has begun anew since
    inherited: int = 0
    tokens: int = 0  # real tokens trained on
    warmup: float | None = None  # steps in which the learning rate rises; None: as `config` says
    ahead: float = 0.0  # steps of the batch of today that earlier batches read over `step`
    objective: Objective = CrossEntropy()
    new_rows: NewRows | None = None  # which learn alone at first
    waits: int = 0  # steps at the beginning that update nothing: others learn before it
    beside: "Critic | None" = None
    text: Text | None = None
    """What is learned of plain text in each step besides."""

    @property
    def alone(self) -> NewRows | None:
        """Those that learn alone in the coming step."""
        rows = self.new_rows
        return rows if rows is not None and self.step < rows.until else None

    def __post_init__(self):
        check(self.objective, self.model.tree)

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint keeps as tensors, by name, those of a critic among them."""
        beside = {} if self.beside is None else self.beside.state.tensors()
        return {
            **optim.tensors(self.model, self.optimizer),
            **self.model.scaling(),
            **{f"{CRITIC}{name}": tensor for name, tensor in beside.items()},
        }

    def scaling(self) -> dict[str, Tensor]:
        """Those of them that are scales of delayed scaling."""
        beside = {} if self.beside is None else self.beside.state.scaling()
        return self.model.scaling() | {f"{CRITIC}{name}": t for name, t in beside.items()}

    def delayed(self) -> list[product.Delayed]:
        """Who has these."""
        beside = [] if self.beside is None else self.beside.state.delayed()
        return [*self.model.delayed().values(), *beside]

    def names(self) -> set[str]:
        """Names of those of the whole model, of whatever stage."""
        leaves = self.model.tree.leaves
        beside = set() if self.beside is None else self.beside.state.names()
        own = optim.names(leaves, self.config.name) | {
            f"{kind}/{name}"
            for name, leaf in leaves.items()
            if leaf.fp8 is not None and leaf.fp8.delayed
            for kind in (product.HISTORY, product.SCALE)
        }
        return own | {f"{CRITIC}{name}" for name in beside}


@dataclass(frozen=True)
class Critic:
    """What learns beside a policy from the same batches (PPO), by the same steps."""

    state: TrainState
    """Of a model that ends in one number for each token, with an optimizer of its own."""
    coefficient: KLController
    """Of the KL in rewards, for the next phase."""
