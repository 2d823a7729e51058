"""Models that wait are put to the CPU, where a run asks for it (--rollout.idle cpu). In each part
of a phase only what it reads is on the device:

    weights are put to the drawing model     the policy, and the one that draws
    answers are drawn                        the one that draws
    they are judged                          reward models
    log-probabilities, values                each model while it is asked
    updates                                  the policy and the critic, with their optimizers

What goes away is the memory under tensors and not the tensors: a storage is emptied, and filled
again in its place, so that whoever holds a parameter, a shard of ZeRO or a moment goes on holding
it. The bytes are the same, to the last of a shard's padding.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dolmen.checkpoint import writer
from dolmen.checkpoint.writer import Pinned
from dolmen.core import state
from dolmen.optim.optimizer import Optimizer


class Memory:
    """What lies under tensors, on their device or, while it is away, in memory of the CPU."""

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        pinned: Pinned | None = None,
        kept: bool = True,
    ):
        """`tensors` that nobody may read while they are away, asked for each time they go; `pinned`
        as `staging.pinned_for` says. Not `kept`: whoever has them back writes them anew.
        """
        self.tensors, self.pinned, self.kept = tensors, pinned, kept
        self.gone: list[tuple[Tensor, int]] = []
        self.copies: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        """That are away."""
        return sum(size for _, size in self.gone)

    def go(self) -> None:
        if self.gone:
            return
        flat = _storages(self.tensors())
        if self.kept:
            named = {str(number): one for number, one in enumerate(flat)}
            self.copies = writer.copies(named, self.pinned)  # which have arrived
        self.gone = [(one, one.nbytes) for one in flat]
        for one in flat:
            one.untyped_storage().resize_(0)

    def come(self) -> None:
        for number, (one, size) in enumerate(self.gone):
            one.untyped_storage().resize_(size)
            if self.kept:
                one.copy_(self.copies[str(number)])
        self.gone, self.copies = [], {}


def _storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each piece of memory under this rank's parts of `tensors` once, whole, as bytes."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = state.local_view(tensor).untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in found:
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
            found[storage.data_ptr()] = flat.set_(storage)
    return list(found.values())


@dataclass(frozen=True, eq=False)
class Part:
    """Of what a run holds: a model's weights, or the state of the optimizer that trains it."""

    model: nn.Module
    memory: Memory
    learns: bool = False


class Idle:
    """Who waits, and where."""

    def __init__(self, parts: Sequence[Part] = ()):
        """Without parts all stay where they are."""
        self.parts = parts

    @property
    def bytes(self) -> int:
        """That are away from this rank's device."""
        return sum(part.memory.bytes for part in self.parts)

    def reads(self, *models: nn.Module) -> None:
        """Now the weights of these are read, and nothing else."""
        self._here([part for part in self.parts if part.model in models and not part.learns])

    def learns(self) -> None:
        """Now all that has an optimizer learns, and nothing else is read."""
        learning = {part.model for part in self.parts if part.learns}
        self._here([part for part in self.parts if part.model in learning])

    def _here(self, wanted: Sequence[Part]) -> None:
        for part in self.parts:
            if part not in wanted:
                part.memory.go()  # first, so that there is room
        for part in wanted:
            part.memory.come()


def parts_of(
    device: torch.device,
    trained: Iterable[tuple[nn.Module, Optimizer]],
    drawing: nn.Module,
    asked: Iterable[nn.Module],
) -> list[Part]:
    """What may wait: models that learn with their optimizers, the one that draws, whose weights are
    written in each phase, and those that are `asked` alone.
    """
    pinned = writer.pinned_for(device)
    parts = [Part(drawing, Memory(drawing.parameters, pinned, kept=False))]
    for model, optimizer in trained:
        parts.append(Part(model, Memory(model.parameters, pinned)))
        parts.append(Part(model, Memory(_state_of(optimizer), pinned), learns=True))
    return parts + [Part(model, Memory(model.parameters, pinned)) for model in asked]


def _state_of(optimizer: Optimizer) -> Callable[[], Iterable[Tensor]]:
    def tensors() -> Iterable[Tensor]:
        for kept in optimizer.state.values():
            yield from (each for each in kept.values() if isinstance(each, Tensor))

    return tensors
