"""A model that is opened to generate and nothing else, held as what multiplies: each matrix becomes
that as soon as its values have come, so that no two are in memory as they were.

    meta -> allocated -> values of the source -> int8 -> the memory of the next
"""

from collections.abc import Callable

from torch import Tensor

from dolmen.core.mesh import Mesh
from dolmen.model import build
from dolmen.model.decoder import Decoder
from dolmen.model.layers import Parameters
from dolmen.parallel.inference_linear import Weights


def load(
    model: Decoder,
    mesh: Mesh,
    weights: Weights,
    stream: Callable[[Callable[[str, Tensor], None]], None],
) -> Decoder:
    """What `build.place` has placed, filled from `stream` (build.load): matrices are `weights`
    alone. What is embedded or normalised by stays as it is. On a CPU.
    """
    model.alone = weights
    alone = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, Parameters) and part.multiplies
    }
    for name, part in model.named_modules():
        if name not in alone:
            part.to_empty(device=mesh.device, recurse=False)
    for delayed in model.delayed().values():
        delayed.on(mesh.device)
    coming = {
        name: {own for own, _ in part.named_parameters(recurse=False)}
        for name, part in alone.items()
    }
    begun: set[str] = set()

    def through(write: Callable[[str, Tensor], None], name: str, value: Tensor) -> None:
        owner, _, own = name.rpartition(".")
        if owner not in alone:
            return write(name, value)
        if owner not in begun:
            begun.add(owner)
            alone[owner].to_empty(device=mesh.device, recurse=False)
        write(name, value)
        coming[owner].remove(own)
        if not coming[owner]:
            alone[owner].let_go(weights)

    build.load(model, lambda write: stream(lambda name, value: through(write, name, value)))
    return model
