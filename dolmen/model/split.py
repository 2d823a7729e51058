"""One rank's share of a model, as its modules need it: mesh axes, how they are used, and pipeline
stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dolmen.core.mesh import SINGLE, Axis, Mesh
from dolmen.model.layout import Layout, balance
from dolmen.ops.kernels import Kernels
from dolmen.parallel.context import ContextParallel
from dolmen.parallel.schedule import Schedule
from dolmen.parallel.tensor import Deferred, TensorParallel


@dataclass(frozen=True)
class PipelinePart:
    """One pipeline stage: its layers; `first` has the embedding, `last` the final norm, the head
    and the loss.
    """

    layers: range
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class Recompute:
    """Kind of recomputation in backward, and the numbers of the layers that have it."""

    kind: Literal["none", "selective", "full"] = "none"
    layers: frozenset[int] = frozenset()

    def kind_of(self, layer: int) -> str:
        """Return the kind of recomputation of a layer, given its number in the whole model."""
        return self.kind if layer in self.layers else "none"


@dataclass(frozen=True)
class ModelSplit:
    """How one rank takes part in the model: mesh axes, how tp and cp communicate, its pipeline
    stages, recomputation and kernels.
    """

    tp: TensorParallel
    cp: ContextParallel
    ep: Axis
    edp: Axis
    parts: tuple[PipelinePart, ...]
    """Pipeline stages of this rank, one per chunk of its schedule."""
    recompute: Recompute = field(default_factory=Recompute)
    kernels: Kernels = Kernels()
    """Kernels that the modules use."""
    tied_across_ranks: bool = False
    """First and last stage are on different ranks, so that a tied embedding has two owners."""

    @property
    def layers(self) -> list[int]:
        """Numbers of all layers of this rank, in order."""
        return sorted(i for part in self.parts for i in part.layers)

    @property
    def first(self) -> bool:
        """True if this rank has the embedding."""
        return any(part.first for part in self.parts)

    @property
    def last(self) -> bool:
        """True if this rank has the final norm, the head and the loss."""
        return any(part.last for part in self.parts)


def split_model(
    mesh: Mesh,
    layers: int,
    layout: Layout = Layout(),
    schedule: Schedule | None = None,
    kernels: Kernels = Kernels(),
    stages: Sequence[range] | None = None,
) -> ModelSplit:
    """Return this rank's share of a model of `layers` layers. `schedule` assigns stages to ranks
    (None: all on this one); `stages`: the layers of each stage (None: balanced); `kernels`: the
    kernels its modules use. The first `layout.recompute_layers` layers of each stage are
    recomputed.
    """
    stages = stages or balance(layers, schedule.stages if schedule else 1)

    def part(stage: int) -> PipelinePart:
        """Return the PipelinePart of a stage by its number."""
        return PipelinePart(stages[stage], stage == 0, stage == len(stages) - 1)

    here = (
        [schedule.stage_of(mesh.pp.rank, chunk) for chunk in range(schedule.chunks)]
        if schedule
        else [0]
    )
    parts = tuple(part(stage) for stage in here)
    # None: the slice is all layers of the stage
    recomputed = frozenset(i for p in parts for i in list(p.layers)[: layout.recompute_layers])
    # zero-bubble schedules compute weight gradients later, as actions of their own
    later = Deferred() if schedule is not None and schedule.splits_backward else None
    return ModelSplit(
        TensorParallel(
            mesh.tp,
            # with one rank there is nothing to gather or scatter
            layout.sequence_parallel and mesh.tp.size > 1,
            later,
            kernels.turned,
            (mesh.fsdp,),
            kernels.fp8,
            exact=kernels.exact,
        ),
        ContextParallel(
            mesh.cp,
            layout.context,
            kernels.attention,
            1 if kernels.exact is None else kernels.exact.cp,
        ),
        mesh.ep,
        mesh.edp,
        parts,
        Recompute(layout.recompute, recomputed),
        kernels,
        tied_across_ranks=schedule is not None
        and schedule.rank_of(0) != schedule.rank_of(schedule.stages - 1),
    )


def single_process(layers: int) -> ModelSplit:
    """Return the split of a model with `layers` layers that keeps all of it in one process."""
    return split_model(SINGLE, layers)
