"""Offloading of idle models to host memory (--rollout.offload cpu). At each time only what is read
is on the device:

    copying weights                 the policy and the generation model
    generation                      the generation model
    scoring                         reward models
    log-probabilities, values       the model whose forward runs
    updates                         policy and critic with their optimizers

The memory under tensors is offloaded, and not the tensors: a storage is resized to 0 and filled
again in place, so whoever holds a parameter, a ZeRO shard or an optimizer moment still holds it.
Bytes are restored exactly, padding of shards included.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dolmen.checkpoint import writer
from dolmen.checkpoint.writer import Pinned
from dolmen.core import state
from dolmen.optim.optimizer import Optimizer


class OffloadableMemory:
    """The memory under tensors, on their device or, while offloaded, copied to host memory."""

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        pinned: Pinned | None = None,
        keep: bool = True,
    ):
        """Describe the memory of what `tensors` returns; nobody may read these while they are
        offloaded. `pinned` is the pinned host memory of `writer.pinned_for`. Without `keep` the
        values are dropped: whoever reloads writes them.
        """
        self.tensors, self.pinned, self.keep = tensors, pinned, keep
        self.offloaded: list[tuple[Tensor, int]] = []
        self.copies: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        """Bytes of this memory that are currently offloaded; 0 while it is on the device."""
        return sum(size for _, size in self.offloaded)

    def offload(self) -> None:
        """Copy the memory to the host (unless `keep` is False) and free it on the device; nothing
        if it is offloaded already.
        """
        if self.offloaded:
            return
        storages = _storages(self.tensors())
        if self.keep:
            numbered = {str(number): storage for number, storage in enumerate(storages)}
            # returns when they are complete
            self.copies = writer.copy_to_cpu(numbered, self.pinned)
        self.offloaded = [(storage, storage.nbytes) for storage in storages]
        for storage in storages:
            storage.untyped_storage().resize_(0)

    def reload(self) -> None:
        """Allocate the memory on the device again and restore its values; without `keep` they are
        undefined. Nothing if it is not offloaded.
        """
        for number, (storage, size) in enumerate(self.offloaded):
            # the same storage object: views of it, and graphs, see the restored values
            storage.untyped_storage().resize_(size)
            if self.keep:
                storage.copy_(self.copies[str(number)])
        self.offloaded, self.copies = [], {}


def _storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return each storage under this rank's parts of `tensors` once, in full, as a tensor of
    bytes.
    """
    storages: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = state.local_view(tensor).untyped_storage()
        # several tensors may be views of one storage: it is moved once
        if storage.nbytes() and storage.data_ptr() not in storages:
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
            storages[storage.data_ptr()] = flat.set_(storage)
    return list(storages.values())


@dataclass(frozen=True, eq=False)
class OffloadPart:
    """A model's weights, or the state of the optimizer that trains it."""

    model: nn.Module
    memory: OffloadableMemory
    is_optimizer: bool = False


class Offloader:
    """Moves models and optimizer state to host memory while they are not needed."""

    def __init__(self, parts: Sequence[OffloadPart] = ()):
        """Take the parts that are moved; without parts nothing ever is."""
        self.parts = parts

    @property
    def bytes(self) -> int:
        """Bytes currently offloaded from this rank's device."""
        return sum(part.memory.bytes for part in self.parts)

    def use_weights(self, *models: nn.Module) -> None:
        """Reload the weights of these models onto the device, after offloading everything else."""
        self._use([part for part in self.parts if part.model in models and not part.is_optimizer])

    def use_for_updates(self) -> None:
        """Reload the trained models and their optimizer state onto the device, after offloading
        everything else.
        """
        trained = {part.model for part in self.parts if part.is_optimizer}
        self._use([part for part in self.parts if part.model in trained])

    def _use(self, required: Sequence[OffloadPart]) -> None:
        """Reload the `required` parts, after offloading all others."""
        for part in self.parts:
            if part not in required:
                part.memory.offload()  # before anything is reloaded, so that there is room
        for part in required:
            part.memory.reload()


def offload_parts(
    device: torch.device,
    trained: Iterable[tuple[nn.Module, Optimizer]],
    generator: nn.Module,
    frozen: Iterable[nn.Module],
) -> list[OffloadPart]:
    """Return the parts that can be offloaded: weights and optimizer state of `trained` models, the
    generation model, whose values are dropped as each iteration loads them, and `frozen` reference
    and reward models.
    """
    pinned = writer.pinned_for(device)
    parts = [OffloadPart(generator, OffloadableMemory(generator.parameters, pinned, keep=False))]
    for model, optimizer in trained:
        parts.append(OffloadPart(model, OffloadableMemory(model.parameters, pinned)))
        memory = OffloadableMemory(_state_tensors(optimizer), pinned)
        parts.append(OffloadPart(model, memory, is_optimizer=True))
    weights = [(model, OffloadableMemory(model.parameters, pinned)) for model in frozen]
    return parts + [OffloadPart(*weight) for weight in weights]


def _state_tensors(optimizer: Optimizer) -> Callable[[], Iterable[Tensor]]:
    """Return a function that yields the tensors of the optimizer's state (moments, no parameters)
    that there are at the time of its call.
    """

    def tensors() -> Iterable[Tensor]:
        """Yield the moments of all parameters."""
        for moments in optimizer.state.values():
            yield from (moment for moment in moments.values() if isinstance(moment, Tensor))

    return tensors
