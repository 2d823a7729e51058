"""What the tests of checkpoints train: a tiny decoder, odd vocabulary, tied embeddings, in the
plainest loop.
"""

from dataclasses import dataclass, field

import torch
from backward import backward
from tiny_models import Flat, build, initialize
from torch import Tensor

from dolmen.core import mesh as meshes
from dolmen.core import state
from dolmen.core.mesh import SINGLE
from dolmen.model.head import cross_entropy_function
from dolmen.model.layout import Layout as Split
from dolmen.optim.optimizer import OptimizerConfig, adamw, prime, set_step, tensors

CONFIG = Flat(
    vocab_size=711,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    tie_word_embeddings=True,
)
ROWS, LENGTH = 4, 8


@dataclass(frozen=True)
class Layout:
    dp: int = 1
    tp: int = 1
    zero: int | None = None
    sequence: bool = False

    def mesh(self):
        return (
            SINGLE
            if self.zero is None
            else meshes.build_mesh(self.dp, self.tp, torch.device("cpu"))
        )


@dataclass
class Run:
    """A model and its optimizer; `train` makes steps of a batch that depends on the step alone."""

    layout: Layout
    mesh: object
    seed: int = 0
    step: int = 0
    model: object = field(init=False)

    def __post_init__(self):
        self.model = build(
            CONFIG,
            self.mesh,
            Split(sequence_parallel=self.layout.sequence, zero=self.layout.zero or 0),
        )
        initialize(self.model, self.seed)
        self.optimizer = adamw(self.model, OptimizerConfig(lr=1e-2))
        prime(self.optimizer)

    def tensors(self) -> dict[str, Tensor]:
        return tensors(self.model, self.optimizer)

    def train(self, steps: int) -> "Run":
        for _ in range(steps):
            tokens = torch.randint(
                711, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(self.step)
            )
            rows = ROWS // self.mesh.dp.size
            mine = tokens[self.mesh.dp.rank * rows :][:rows]
            self.optimizer.zero_grad()
            loss = self.model(mine[:, :-1].contiguous(), cross_entropy_function(mine[:, 1:])) / (
                ROWS * LENGTH
            )
            backward(loss, self.model, last=True, zero=self.layout.zero or 0)
            self.optimizer.step()
            self.step += 1
        return self

    def load(self, checkpoints, step: int) -> "Run":
        checkpoints.load(step, self.tensors())
        set_step(self.optimizer, step)
        self.step = step
        return self

    def whole(self) -> dict[str, Tensor]:
        """Every tensor, whole; a collective."""
        return {name: state.gather_full(t).clone() for name, t in self.tensors().items()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names whose tensors are not bitwise equal."""
    return [
        name
        for name in {**a, **b}
        if name not in a or name not in b or not torch.equal(a[name], b[name])
    ]
