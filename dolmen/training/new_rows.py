"""The first part of a run that teaches a model tokens it did not have: their rows of embedding and
head learn alone, what was trained stays to the bit, and then all learn.

    steps   0 ............ until | until ................ steps
            rows of new tokens   | everything, by an optimizer that begins there

A new row begins as a mean of others, and its first gradients are those of a guess: they would move
the layers too, which know better (Hewitt, 2021; Cui et al., 2304.08177, section 2.3).
"""

from dataclasses import dataclass

from dolmen.core import state
from dolmen.model.decoder import Decoder
from dolmen.optim import optimizer as optim
from dolmen.optim.optimizer import Optimizer
from dolmen.training.config import NewRowsConfig


@dataclass(frozen=True)
class NewRows:
    """Which rows, and how long."""

    first: int
    """Id of the first new token."""
    until: int
    """Steps in which they learn alone."""

    @classmethod
    def of(cls, asked: NewRowsConfig, steps: int) -> "NewRows | None":
        """Those of a run of `steps` steps, one of them at least; None where all learn at once."""
        if not asked.share or asked.first is None:
            return None
        return cls(asked.first, max(1, round(asked.share * steps)))

    def keep(self, model: Decoder) -> None:
        """Of all gradients those of new rows, the others are taken away: after backward, on every
        rank.
        """
        leaves = model.held()
        for name, p in model.named_parameters():
            if p.grad is None:
                continue
            if leaves[name].of_vocabulary:
                old = max(0, self.first - state.region(p)[0].start)  # rows of this rank
                state.local_view(p.grad)[:old].zero_()
            else:
                p.grad = None


def update(optimizer: Optimizer) -> None:
    """A step of the optimizer without weight decay: rows without a gradient stay to the bit."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    optimizer.step()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay


def restart(optimizer: Optimizer) -> None:
    """As before its first update: what rows have learned alone says nothing of the others' moments,
    and the count of updates that corrects them is one for a whole table.
    """
    optim.prime(optimizer)
    for group in optimizer.param_groups:
        for p in group["params"]:
            for kind in group["kinds"]:
                state.local_view(optimizer.state[p][kind]).zero_()
    optim.set_step(optimizer, 0)
