"""Validation during training, of all held-out text and per source.

How each source of text is foretold, by itself: what an old language loses while a new one is
learned. Tokenizers cut text differently, so beside nats per token there are bits per byte, and what
they were before the first step.

Validation of a run while it trains: the loss on held-out text, by source where asked, told to a
person and to all that is written beside.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dolmen.checkpoint.saved import Validation
from dolmen.core.mesh import Mesh
from dolmen.data.batch import Batch
from dolmen.data.batches import HeldOutRows, Loader
from dolmen.evaluation.validate import NEXT_TOKEN, mean_loss
from dolmen.files import write
from dolmen.launch.watch import Watch
from dolmen.objectives.masked_lm import Filling
from dolmen.objectives.objective import CrossEntropy, Objective
from dolmen.objectives.preference import decided
from dolmen.objectives.reward import Calibrated, Preferred
from dolmen.training import calibration, folder
from dolmen.training.config import RunConfig
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


Through = Callable[[Iterable[Batch]], Iterable[Batch]]


class Validator:
    """Measures a run on its held-out text. `last` is the last validation there was, `kept` the last
    whose loss was finite, which checkpoints keep: it knows what was measured before the first step.
    """

    def __init__(self, run: RunConfig, loader: Loader, mesh: Mesh, out: Path, watch: Watch):
        self.run, self.loader, self.mesh, self.out = run, loader, mesh, out
        self.watch = watch
        self.last: Validation | None = None
        self.kept: Validation | None = None

    def begin(self, saved: Validation | None) -> None:
        """With that of the run which goes on."""
        self.last = self.kept = saved

    def measure(self, state: TrainState) -> tuple[dict[str, Any], list[str]]:
        """What metrics.jsonl gets of it, and what a person is told. Every rank calls it; before the
        first step it is what later ones are compared with.
        """
        most = self.most(state)
        through = partial(self.watch.through, phase="validate", patient=not state.step)
        batches = self.loader.validation_batches(most, self.mesh.dp.rank, self.mesh.dp.size)
        objective = objective_of_validation(state.objective)
        found = mean_loss(state.model, through(batches), self.mesh, state.schedule, objective)
        shown = calibration.rest(found.metrics)
        if len(shown) < len(found.metrics):
            shown["calibration_error"] = self._calibrated(found.metrics)
        for name in {*objective.names} - {*decided(objective, state.updates)}:
            del shown[name]
        loss, tokens = found.loss, found.tokens
        each = self._of_sources(state, most, through)
        held = self.loader.validation_tokens
        size = self.loader.validation_bytes
        bits = found.bits_per_byte(size) if tokens == held and size is not None else None
        self.last = Validation(
            state.step, loss, tokens, held, bits, each.losses, each.per_byte, each.before
        )
        if math.isfinite(loss):
            self.kept = self.last
        row = {
            "step": state.step,
            "val_loss": loss,
            "val_tokens": tokens,
            "tokens": state.tokens,
            **each.row(),
            **{f"val_{name}": one for name, one in shown.items()},
        }
        part = "" if tokens == held else f" of {held:,}"
        why = ""
        if part and state.step == state.steps and self.loader.cloze is None:
            why = "; a short run reads no more, --log.validation-tokens 0 reads all"
        more = "".join(f", {name} {one:.4f}" for name, one in shown.items())
        first = (
            f"step {state.step}: validation loss {loss:.4f}{more} on {tokens:,}{part} "
            f"{self.loader.unit}s{why}"
        )
        return row, [first, *(f"  {line}" for line in each.lines())]

    def most(self, state: TrainState) -> int | None:
        """Windows of held-out text that a validation at this step reads at most; None: all. The
        last one reads as many tokens as the run has trained on, if those are more than the usual,
        and one before the first step as the last one will.
        """
        tokens, length = self.run.log.validation_tokens, self.run.sequence_length
        if tokens == 0:
            return None
        if state.step in (0, state.steps):
            trained = state.tokens if state.step else self.loader.first(state.steps) * length
            return -(-max(tokens, trained) // length)
        return max(1, tokens // length)

    def _of_sources(self, state: TrainState, most: int | None, through: Through) -> Apart:
        if not self.run.log.validate_sources:
            return Apart()
        before = {} if self.last is None else self.last.sources_before
        return measured(state, self.loader, self.mesh, most, before, through)

    def _calibrated(self, found: Mapping[str, float]) -> float:
        """The picture of how sure a reward model is; its error."""
        made = calibration.Calibration.of(found)
        if self.mesh.first:
            folder.claim(self.out, calibration.FILE)
            title = f"{self.run.name}: held-out pairs"
            image = calibration.draw(made, found["accuracy"], title)
            write.replace(self.out / calibration.FILE, image)
        return made.error


def objective_of_validation(objective: Objective) -> Objective:
    """Of text each token once, whatever it weighs, and of an encoder those that are masked; of
    pairs what is trained to, and how sure a reward model is.
    """
    match objective:
        case Preferred():
            return Calibrated(objective.center, objective.margin)
        case CrossEntropy() | Filling():
            return NEXT_TOKEN
    return objective
