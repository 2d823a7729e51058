"""What a model makes of a batch without learning from it: of a policy, a reference or a reward
model, by itself or beside others on the same mesh.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.core import collectives, state
from dolmen.core.mesh import Mesh
from dolmen.data.batch import Batch
from dolmen.model import routing_replay, spec
from dolmen.model.decoder import Decoder
from dolmen.model.head import Logits, Values
from dolmen.model.routing_replay import Routes
from dolmen.objectives.objective import check_end
from dolmen.parallel import pipeline
from dolmen.parallel.data import inference
from dolmen.parallel.pipeline import Work
from dolmen.parallel.schedule import Schedule

T = TypeVar("T")


def forward(
    model: Decoder,
    batch: Batch,
    mesh: Mesh,
    order: Schedule,
    end: Callable[[Tensor, Any, Batch], T],
    told: Callable[[int, int, Tensor], None] | None = None,
) -> list[T]:
    """What `end` makes of each microbatch, (hidden, head, microbatch) -> T, on the ranks that have
    the last stage; elsewhere nothing. `order` has forwards alone. To be called in `inference`.
    `told`: of each microbatch and sparse layer of this rank which experts its tokens went to.
    """
    found: dict[int, T] = {}
    parts = batch.to(mesh.device).split(order.micros)

    def stage(chunk: int, micro: int, x: Tensor | None) -> Tensor:
        part = parts[micro]

        def here(hidden: Tensor, head: Any) -> Tensor:
            found[micro] = end(hidden, head, part)
            return hidden

        return model(
            part.tokens,
            here,
            documents=part.documents,
            positions=part.positions,
            x=x,
            part=chunk,
            routes=None if told is None else Routes(told=partial(told, micro)),
        )

    pipeline.execute(order, mesh, Work(stage, lambda: model.boundary(*parts[0].tokens.shape)))
    return [found[micro] for micro in sorted(found)]


def log_probabilities(
    model: Decoder, batch: Batch, mesh: Mesh, schedule: Schedule, temperature: float = 1.0
) -> Float[Tensor, "sequences length"]:
    """Of each label of this rank's rows, 0 where it is IGNORED, on every rank of tp, cp and pp, on
    the device: what may join a batch as one of its `numbers`. `schedule` is that of training, whose
    microbatches divide the batch; logits are divided by `temperature`. Every rank of the mesh calls
    it. Raises ValueError for a model that has no logits.
    """

    check_end("a log-probability", spec.Head, model.tree)

    def end(hidden: Tensor, head: Logits, part: Batch) -> Tensor:
        return head.log_probabilities(hidden, part.labels, temperature)

    return _of_tokens(model, batch, mesh, schedule, end)


def routed_log_probabilities(
    model: Decoder, batch: Batch, mesh: Mesh, schedule: Schedule, temperature: float = 1.0
) -> Float[Tensor, "sequences length numbers"]:
    """`log_probabilities`, and behind each the experts that its token went to, of all MoE layers
    (model/routing_replay.py), as numbers of the same dtype, which are exact. Raises ValueError for
    a model without experts.
    """

    check_end("a log-probability", spec.Head, model.tree)
    if not model.tree.experts:
        raise ValueError("experts are asked for, and the model has none")
    kept: dict[tuple[int, int], Tensor] = {}

    def told(micro: int, layer: int, experts: Tensor) -> None:
        kept[micro, layer] = experts

    def end(hidden: Tensor, head: Logits, part: Batch) -> Tensor:
        return head.log_probabilities(hidden, part.labels, temperature)

    found = _of_tokens(model, batch, mesh, schedule, end, told)
    sequences, length = batch.tokens.shape
    shape = (sequences, length)
    experts = routing_replay.gathered(kept, model.tree, model.split, mesh, shape, schedule.micros)
    return torch.cat([found[..., None], experts.to(found.dtype)], -1)


def values(
    model: Decoder, batch: Batch, mesh: Mesh, schedule: Schedule
) -> Float[Tensor, "sequences length"]:
    """The number of each token in a model that ends in a scalar head, as `log_probabilities`."""

    check_end("a value", spec.Scalar, model.tree)

    def end(hidden: Tensor, head: Values, part: Batch) -> Tensor:
        return head.values(hidden)

    return _of_tokens(model, batch, mesh, schedule, end)


def _of_tokens(
    model: Decoder,
    batch: Batch,
    mesh: Mesh,
    schedule: Schedule,
    end: Callable[[Tensor, Any, Batch], Tensor],
    told: Callable[[int, int, Tensor], None] | None = None,
) -> Tensor:
    with inference(model):
        found = forward(model, batch, mesh, pipeline.forward_only(schedule), end, told)
    dtype = torch.promote_types(model.compute or state.dtype_of(model), torch.float32)
    whole = torch.zeros(batch.tokens.shape, dtype=dtype, device=mesh.device)
    if found:
        places = model.split.cp.indices(whole.shape[1], mesh.device)
        whole[:, places] = torch.cat(found)
    # every token is on one rank of cp and one of pp, and 0 on the others
    return collectives.reduce_scalar(collectives.reduce_scalar(whole, mesh.cp), mesh.pp)
