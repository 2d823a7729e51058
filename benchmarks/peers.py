"""How others train a model of this shape, written anew in plain torch (benchmarks/plain.py has the
model), with our weights, data, masters, clipping and optimizer:

    nanochat    fp32 parameters, each cast where it is used; model and loss are one compiled program
    picotron    nothing compiled; tensor parallelism by hand: each column sends the gradient of its
                input by itself, each row its sum, and every rank gets all logits

What differs from theirs: nanochat's model (another norm, activation and embedding) and optimizers
are ours here, and picotron keeps bf16 parameters without masters and clips nothing.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.plain import Llama
from benchmarks.sides import (
    OPTIMIZER,
    Side,
    Work,
    batch_of,
    copy_weights,
    fused_adamw,
    mean_loss,
    plain_step,
    with_masters,
)
from dolmen.core.mesh import Axis, Mesh


def model_of(work: Work, mesh: Mesh) -> Llama:
    with mesh.device:
        model = Llama(work.model.spec, work.sequence, mesh.device)
    copy_weights(work, model, mesh.device, lambda name: name)
    return model


def nanochat_side(work: Work, mesh: Mesh) -> Side:
    """One step of it; see benchmarks/sides.py."""
    model, (tokens, labels) = model_of(work, mesh), batch_of(work, mesh.device)

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        cast = {name: p.bfloat16() for name, p in model.named_parameters()}
        return mean_loss(functional_call(model, cast, (tokens,)), labels)

    compiled = torch.compile(loss_of, dynamic=False)
    return plain_step(compiled, tokens, labels, model, fused_adamw(model.parameters()))


class Enter(torch.autograd.Function):
    """x, and the sum of its gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x

    @staticmethod
    def backward(ctx, g: Tensor):
        return summed(g, ctx.axis), None


class Leave(torch.autograd.Function):
    """The sum of x, and its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        return summed(x, axis)

    @staticmethod
    def backward(ctx, g: Tensor):
        return g, None


class Gather(torch.autograd.Function):
    """All parts of the last dim, and this rank's part of the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        parts = [torch.empty_like(x) for _ in range(axis.size)]
        dist.all_gather(parts, x.contiguous(), axis.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, g: Tensor):
        return g.chunk(ctx.axis.size, -1)[ctx.axis.rank], None


def summed(x: Tensor, axis: Axis) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


class Embedding(nn.Module):
    """This rank's rows of an embedding."""

    def __init__(self, whole: nn.Embedding, axis: Axis):
        super().__init__()
        self.weight, self.axis = part_of(whole.weight, 0, axis), axis

    def forward(self, tokens: Tensor) -> Tensor:
        row = tokens - self.axis.rank * len(self.weight)
        mine = (row >= 0) & (row < len(self.weight))
        x = F.embedding(torch.where(mine, row, 0), self.weight)
        return Leave.apply(x * mine[..., None], self.axis)


def part_of(weight: Tensor, dim: int, axis: Axis) -> nn.Parameter:
    return nn.Parameter(weight.detach().chunk(axis.size, dim)[axis.rank].clone())


def divide(model: Llama, axis: Axis) -> None:
    """Columns and rows as picotron has them, in place."""
    columns: list[nn.Linear] = [model.head]
    for layer in model.layers:
        columns += [*layer.attn.qkv, layer.mlp.gate, layer.mlp.up]
        for row in (layer.attn.o, layer.mlp.down):
            row.weight = part_of(row.weight, 1, axis)
            row.register_forward_hook(lambda _, given, y: Leave.apply(y, axis))
    for column in columns:
        column.weight = part_of(column.weight, 0, axis)
        column.register_forward_pre_hook(lambda _, given: (Enter.apply(given[0], axis),))
    model.embed = Embedding(model.embed, axis)
    model.head.register_forward_hook(lambda _, given, y: Gather.apply(y, axis))


def clip_over(masters: Sequence[Tensor], axis: Axis) -> None:
    """Of matrices each rank has a part, of norms all."""
    matrices = [m.grad for m in masters if m.ndim > 1 and m.grad is not None]
    norms = [m.grad for m in masters if m.ndim == 1 and m.grad is not None]
    square = torch.nn.utils.get_total_norm(matrices).square()
    dist.all_reduce(square, group=axis.group)
    total = (square + torch.nn.utils.get_total_norm(norms).square()).sqrt()
    torch.nn.utils.clip_grads_with_norm_(masters, OPTIMIZER.clip, total)


def picotron_side(work: Work, mesh: Mesh) -> Side:
    """One step of it; see benchmarks/sides.py."""
    model, axis = model_of(work, mesh), mesh.tp
    if axis.size == 1:
        return with_masters(model, work, mesh, lambda x, y: mean_loss(model(x), y))
    divide(model, axis)
    return with_masters(
        model,
        work,
        mesh,
        lambda x, y: mean_loss(model(x), y),
        lambda masters: clip_over(masters, axis),
    )
