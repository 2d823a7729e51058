"""How each source of text is foretold, by itself: what an old language loses while a new one is
learned. Tokenizers cut text differently, so beside nats per token there are bits per byte, and what
they were before the first step.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from dolmen.core.mesh import Mesh
from dolmen.data.batch import Batch
from dolmen.data.batches import HeldOutRows, Loader
from dolmen.evaluation.validate import mean_loss
from dolmen.training.state import TrainState


@dataclass(frozen=True)
class Apart:
    """A validation of each source, by its name."""

    losses: dict[str, float] = field(default_factory=dict)
    """Nats per predicted token."""
    per_byte: dict[str, float] = field(default_factory=dict)
    """Bits per byte; of a source whose bytes nobody knows there are none."""
    before: dict[str, float] = field(default_factory=dict)
    """Bits per byte before the first step."""

    def row(self) -> dict[str, float]:
        """For metrics.jsonl."""
        losses = {f"val_loss/{name}": one for name, one in self.losses.items()}
        return losses | {f"val_bits_per_byte/{name}": one for name, one in self.per_byte.items()}

    def lines(self) -> list[str]:
        """For a person."""
        return [
            told(name, loss, self.per_byte.get(name), self.before.get(name))
            for name, loss in self.losses.items()
        ]


def told(name: str, loss: float, per_byte: float | None, before: float | None) -> str:
    """A line of a source; what is None is not known, or no news."""
    line = f"{loss:.4f} on {name}"
    if per_byte is not None:
        line += f", {per_byte:.4f} bits per byte"
        line += "" if before in (None, per_byte) else f" (before the first step {before:.4f})"
    return line


def measured(
    state: TrainState,
    loader: Loader,
    mesh: Mesh,
    most: int | None,
    before: Mapping[str, float],
    through: Callable[[Iterable[Batch]], Iterable[Batch]],
) -> Apart:
    """Each source's own validation, of at most so many windows; before the first step it is what
    later ones are compared with. Every rank calls it. `through`: what batches go through.
    """
    losses, every = {}, loader.held_apart
    for name, held in every.items():
        batches = loader.validation_batches(most, mesh.dp.rank, mesh.dp.size, held)
        losses[name] = mean_loss(state.model, through(batches), mesh, state.schedule).loss
    per_byte = bits_per_byte(losses, every) if loader.cloze is None else {}
    found = Apart(losses, per_byte, dict(before))
    return found if state.step else replace(found, before=per_byte)


def bits_per_byte(losses: Mapping[str, float], held: Mapping[str, HeldOutRows]) -> dict[str, float]:
    """Of each source whose bytes are known: its nats per token times its tokens per byte, which are
    those of all its held-out text; so it is exact where all of it was read.
    """
    return {
        name: loss * held[name].tokens / size / math.log(2)
        for name, loss in losses.items()
        if (size := held[name].bytes)
    }
