"""The model that draws: the weights that are trained, in a layout that generation takes, put there
anew in each phase, from rank to rank and through no file.

    training    any tp, pp, cp, ep, and any stage of ZeRO
    drawing     tp, and pp with one stage per rank; the rest of the ranks are further copies
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dolmen.core import collectives, state
from dolmen.core.mesh import Mesh
from dolmen.model import build
from dolmen.model.decoder import Decoder
from dolmen.model.layout import Layout
from dolmen.model.training import Training
from dolmen.model.tree import Tree
from dolmen.parallel import channels
from dolmen.parallel import schedule as schedules


class Drawing:
    """A decoder for inference beside one that is trained."""

    def __init__(
        self,
        tree: Tree,
        training: Training,
        mesh: Mesh,
        tp: int,
        dtype: torch.dtype,
        pp: int = 1,
        resting: bool = False,
    ):
        """`mesh` is that of training, and `pp`, or 1. `resting`: it has no memory until it is
        refreshed. Raises ValueError where `tp` does not divide its processes, or the model.
        """
        if mesh.size % tp:
            raise ValueError(
                f"rollout.tp ({tp}) does not divide the run's {mesh.size} processes: set another"
            )
        layout = Layout(tp=tp, pp=pp, dp=mesh.size // (tp * pp))
        self.trained_on = mesh
        self.mesh = mesh if mesh.size == 1 else layout.mesh(mesh.device)
        self.schedule = None if pp == 1 else schedules.make("1f1b", pp, pp)
        if self.schedule is not None:
            channels.connect(self.schedule, self.mesh)
        made = build.place if resting else build.build
        self.model = made(
            tree, self.mesh, schedule=self.schedule, dtype=dtype, training=training
        ).eval()

    def refresh(self, trained: Decoder) -> Decoder:
        """The decoder, with the values that are trained now. All ranks call it."""
        if self.model.device.type == "meta":
            build.allocate(self.model, self.mesh.device)
        own = {name for name, _ in self.model.named_parameters()}

        def stream(write: Callable[[str, Tensor], None]) -> None:
            for name, value in whole(trained, self.trained_on):
                if name in own:  # of this rank's stage
                    write(name, value)

        build.load(self.model, stream)
        return self.model

    def rest(self) -> None:
        """Its memory is free until it is refreshed, that of weights laid out for products too."""
        self.model.at_rest(keep=False)
        self.model.to_empty(device="meta")


def whole(model: Decoder, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of `model`, as a whole tensor on every rank, one after another, in fp32 or
    wider, what is held in eight bits as it is. A collective of all ranks.
    """
    held = dict(model.named_parameters())
    wide = torch.promote_types(state.dtype_of(model), torch.float32)
    # a tied weight is at both ends, and the first stage brings it
    brought_by_another = None if model.split.first else model.tied_apart
    for name, leaf in model.tree.leaves.items():
        mine, dtype = held.get(name), torch.int8 if leaf.int8 else wide
        if mesh.pp.size == 1:
            yield name, state.full(held[name]).to(dtype)
            continue
        value = torch.zeros(leaf.shape, dtype=dtype, device=mesh.device)
        if mine is not None:
            whole_here = state.full(mine)  # all ranks of the stage gather it
            if mine is not brought_by_another:
                value.copy_(whole_here)
        # one stage has it, and the others add 0
        yield name, collectives.reduce_scalar(value, mesh.pp)
