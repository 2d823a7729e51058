"""Forward passes without gradients, over the layout of training: log-probabilities and values of a
policy, a reference model, a critic or a reward model.
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
from dolmen.model.head import LMHead, ScalarHead
from dolmen.model.routing_replay import Routes
from dolmen.objectives.objective import check_head
from dolmen.parallel import pipeline
from dolmen.parallel.data import inference
from dolmen.parallel.pipeline import StepWork
from dolmen.parallel.schedule import Schedule

T = TypeVar("T")


def forward(
    model: Decoder,
    batch: Batch,
    mesh: Mesh,
    order: Schedule,
    head_function: Callable[[Tensor, Any, Batch], T],
    route_callback: Callable[[int, int, Tensor], None] | None = None,
) -> list[T]:
    """Run the forward of all microbatches without gradients. Return `head_function(hidden, head,
    microbatch)` of each, in order, on the ranks of the last pipeline stage; elsewhere an empty
    list. `order` is a schedule of forwards only. To be called within `inference`, by every rank.
    `route_callback(microbatch, layer, experts)` is called for each MoE layer of this rank with the
    experts that its tokens are routed to.
    """
    results: dict[int, T] = {}
    parts = batch.to(mesh.device).split(order.micros)

    def stage(chunk: int, micro: int, x: Tensor | None) -> Tensor:
        """Run one stage's forward of a microbatch; the last stage keeps the result of the head
        function.
        """
        microbatch = parts[micro]

        def keep_result(hidden: Tensor, head: Any) -> Tensor:
            """Store the head function's result; the hidden vectors pass on, as the pipeline expects
            a tensor.
            """
            results[micro] = head_function(hidden, head, microbatch)
            return hidden

        return model(
            microbatch.tokens,
            keep_result,
            documents=microbatch.documents,
            positions=microbatch.positions,
            x=x,
            part=chunk,
            routes=None
            if route_callback is None
            else Routes(on_routing=partial(route_callback, micro)),
        )

    pipeline.execute(order, mesh, StepWork(stage, lambda: model.boundary(*parts[0].tokens.shape)))
    return [results[micro] for micro in sorted(results)]


def log_probabilities(
    model: Decoder, batch: Batch, mesh: Mesh, schedule: Schedule, temperature: float = 1.0
) -> Float[Tensor, "sequences length"]:
    """Return the log-probability of each label of this rank's rows [sequences, length], 0 where it
    is IGNORED, on every rank of tp, cp and pp, on the device: it may join a batch as one of its
    `numbers`. `schedule` is that of training, whose microbatches divide the batch; logits are
    divided by `temperature`. Every rank of the mesh calls it. Raises ValueError for a model without
    logits.
    """
    check_head("a log-probability", spec.LMHeadSpec, model.spec)
    head_function = partial(_compute_log_probabilities, temperature)
    return _compute_per_token(model, batch, mesh, schedule, head_function)


def routed_log_probabilities(
    model: Decoder, batch: Batch, mesh: Mesh, schedule: Schedule, temperature: float = 1.0
) -> Float[Tensor, "sequences length numbers"]:
    """Return, for each token of this rank's rows, the log-probability of its label (0 where it is
    IGNORED), followed by the experts that it was routed to in all MoE layers: [sequences, length, 1
    + choices], in one dtype that is exact for both, on every rank of tp, cp and pp. Raises
    ValueError for a model without experts.
    """
    check_head("a log-probability", spec.LMHeadSpec, model.spec)
    if not model.spec.experts:
        raise ValueError("routing replay is for MoE models, but this one has no experts")
    routes: dict[tuple[int, int], Tensor] = {}

    def route_callback(micro: int, layer: int, experts: Tensor) -> None:
        """Store the experts of a layer."""
        routes[micro, layer] = experts

    head_function = partial(_compute_log_probabilities, temperature)
    results = _compute_per_token(model, batch, mesh, schedule, head_function, route_callback)
    sequences, length = batch.tokens.shape
    shape = (sequences, length)
    experts = routing_replay.gather_routes(
        routes, model.spec, model.split, mesh, shape, schedule.micros
    )
    # one tensor, so that one gather brings both
    return torch.cat([results[..., None], experts.to(results.dtype)], -1)


def values(
    model: Decoder, batch: Batch, mesh: Mesh, schedule: Schedule
) -> Float[Tensor, "sequences length"]:
    """Return the output of a scalar head for each token of this rank's rows [sequences, length], on
    every rank of tp, cp and pp. Every rank of the mesh calls it. Raises ValueError for a model with
    logits.
    """
    check_head("a value", spec.ScalarHeadSpec, model.spec)

    def head_function(hidden: Tensor, head: ScalarHead, microbatch: Batch) -> Tensor:
        """Return the scalar of each token."""
        return head.values(hidden)

    return _compute_per_token(model, batch, mesh, schedule, head_function)


def _compute_log_probabilities(
    temperature: float, hidden: Tensor, head: LMHead, microbatch: Batch
) -> Tensor:
    """Return the log-probability of each label of a microbatch [sequences, length], of the logits
    divided by `temperature`, 0 where the label is IGNORED.
    """
    return head.log_probabilities(hidden, microbatch.labels, temperature)


def _compute_per_token(
    model: Decoder,
    batch: Batch,
    mesh: Mesh,
    schedule: Schedule,
    head_function: Callable[[Tensor, Any, Batch], Tensor],
    route_callback: Callable[[int, int, Tensor], None] | None = None,
) -> Tensor:
    """Return `head_function` of all tokens of this rank's rows [sequences, length], gathered over
    cp and pp, in fp32 or wider, on the device.
    """
    with inference(model):
        results = forward(
            model, batch, mesh, pipeline.forward_only(schedule), head_function, route_callback
        )
    dtype = torch.promote_types(model.compute or state.dtype_of(model), torch.float32)
    # ranks without the last stage contribute 0
    gathered = torch.zeros(batch.tokens.shape, dtype=dtype, device=mesh.device)
    if results:
        # positions of this rank's tokens in the sequence, by the layout of cp
        places = model.split.cp.indices(gathered.shape[1], mesh.device)
        gathered[:, places] = torch.cat(results)
    # every token is on one rank of cp and one of pp, and 0 on the others
    return collectives.reduce_scalar(collectives.reduce_scalar(gathered, mesh.cp), mesh.pp)
