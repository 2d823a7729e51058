"""Ways to get a layout wrong, most of them one line: each takes a MonkeyPatch and puts what is
wrong in its place, in every rank. controls.py says which layout must see which.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import table
import torch
import torch.distributed as dist
import variations
from torch.utils.checkpoint import checkpoint

from dolmen.core import collectives, device, state, transfers
from dolmen.core.mesh import Axis
from dolmen.data.batch import IGNORED, Batch
from dolmen.evaluation import validate
from dolmen.model import block, component, mlp, spec
from dolmen.ops import elementwise
from dolmen.parallel import context, data, pipeline, qk_norm, tensor
from dolmen.parallel import vocabulary as loss


def without(module, name, instead):
    """`module` calls `instead` where it would call the collective; all other callers are left
    alone.
    """
    return lambda patch: patch.setattr(
        module, "transfers", SimpleNamespace(**vars(transfers) | {name: instead})
    )


def head_alone(patch):
    """The gradient of the head's input is each rank's own."""
    backward = loss._LinearCrossEntropy.backward

    def unsummed(ctx, g):
        ctx.kept = replace(ctx.kept, axis=Axis("tp"))
        return backward(ctx, g)

    patch.setattr(loss._LinearCrossEntropy, "backward", staticmethod(unsummed))


def untyped(name):
    """The gradient of a replicated weight used on a part of the activations is no longer declared
    Partial.
    """
    return lambda patch: patch.setattr(tensor.TensorParallel, name, property(lambda tp: None))


def batches(change):
    def damage(patch):
        whole = table.batches
        patch.setattr(
            table, "batches", lambda *args, **options: [change(b) for b in whole(*args, **options)]
        )

    return damage


def half_tokens(b: Batch) -> Batch:
    """Losses of half the positions, as if one of two ranks' sums were dropped."""
    return Batch(b.tokens, torch.where(torch.arange(b.labels.shape[1]) % 2 == 0, b.labels, IGNORED))


def half_a_block(patch):
    """FSDP averages one block's gradient instead of summing it: what forgetting a non-recursive
    setting does.
    """
    build = table.build

    def built(*args, **options):
        model = build(*args, **options)
        if units := data.units(model):
            units[0].set_gradient_divide_factor(2.0)
        return model

    patch.setattr(table, "build", built)


def constant(place, name, value):
    """`place.name` is something else."""
    return lambda patch: patch.setattr(place, name, value)


def means_of_own_heads(patch):
    """Of the heads of a rank, where it is to be of all."""
    means = qk_norm._means
    patch.setattr(qk_norm, "_means", lambda parts, tp: means(parts, replace(tp, axis=Axis("tp"))))


def norm_twice(patch):
    """The weight that both ends own is counted at both."""
    norm = data.gradient_norm
    patch.setattr(
        data,
        "gradient_norm",
        lambda parameters, mesh, twice, squares: norm(parameters, mesh, None, squares),
    )


def weights_of_the_last_alone(patch):
    """Of the weight gradients left for later, those of the last microbatch are computed."""

    def run(weights, grads, *rest):
        made = deferred(weights, grads, *rest)
        return lambda: made() if grads[0].shape[0] and next(count) % 2 else None

    deferred, count = tensor._weight_gradients, itertools.count()
    patch.setattr(tensor, "_weight_gradients", run)


def another_message(patch):
    """A stage takes the tensors of two microbatches in the wrong order."""
    sent = pipeline.messages_sent

    def swapped(schedule, sender, to):
        messages = sent(schedule, sender, to)
        messages[:2] = messages[1::-1]
        return messages

    patch.setattr(pipeline, "messages_sent", swapped)


def computed_otherwise(patch):
    """What backward computes again is not what forward has computed."""

    def again(function, *args):
        times = itertools.count()
        return checkpoint(
            lambda x, *rest: function(x * 1.5 if next(times) else x, *rest),
            *args,
            use_reentrant=False,
        )

    patch.setattr(block, "recompute", again)


def unrotated(patch):
    """Keys and values stay where they are, and are taken for the neighbour's."""
    patch.setattr(
        context.transfers,
        "start_rotate",
        lambda tensors, axis, shift=1: SimpleNamespace(wait=lambda: list(tensors)),
    )


def unscaled(patch):
    """Pieces of attention are added up without their log-sum-exp."""
    patch.setattr(
        context,
        "merge",
        lambda out, log_sum, more, more_log_sum: (
            out + more,
            torch.logaddexp(log_sum, more_log_sum),
        ),
    )


def untyped_router(patch):
    """The gradient of a router is not declared Partial."""
    params = spec.RouterSpec.params
    patch.setattr(
        spec.RouterSpec,
        "params",
        lambda *sizes: {n: replace(param, gradient="own") for n, param in params(*sizes).items()},
    )


def experts_averaged(patch):
    """Gradients of experts are averaged over edp instead of summed."""
    build = table.build

    def built(*args, **options):
        model = build(*args, **options)
        for unit in data.units(model):
            if isinstance(unit, mlp.Experts):
                unit.set_gradient_divide_factor(2.0)
        return model

    patch.setattr(table, "build", built)


def unweighted(patch):
    """A token's experts count alike."""
    combine = mlp.moe.combine
    patch.setattr(
        mlp.moe,
        "combine",
        lambda rows, weights, order, *exact: combine(rows, 0 * weights + 0.5, order, *exact),
    )


def auxiliary_of_every_rank(patch):
    """The auxiliary losses' gradient is not divided by tp."""
    apply = mlp._RouterLossGradient.apply
    patch.setattr(
        mlp._RouterLossGradient,
        "apply",
        staticmethod(
            # the layouts that see it have tp 2
            lambda w, loss, scale, found, tally: apply(w, loss * 2, scale, found, tally)
        ),
    )


def attending(**wrong):
    """Attention over cp is given something else."""

    def damage(patch):
        attention = context.ContextParallel.attention

        patch.setattr(
            context.ContextParallel,
            "attention",
            lambda cp, q, k, v, attend: attention(cp, q, k, v, attend._replace(**wrong)),
        )

    return damage


def masks_of_the_rank(patch):
    """Dropout of the residual stream by the token's index on the rank."""
    residual = elementwise.dropout
    patch.setattr(
        elementwise,
        "dropout",
        lambda x, p, noise, site, rows: residual(x, p, noise, site, torch.arange(len(rows))),
    )


def biases_of_both_ranks(patch):
    """Branches side by side add their biases before they leave, on each rank of tp."""
    leave = block.leave

    def left(branches, results):
        biases = [state.local(branch.row.bias) for branch in branches]
        return leave(branches, results) + sum(biases)  # tp is 2

    patch.setattr(block, "leave", left)


def shared_of_one_rank(patch):
    """What leaves of a shared expert is the sum of one rank of tp."""
    part = component.Branch.part
    patch.setattr(
        component.Branch,
        "part",
        lambda self, x, given: part(self, x, given) * (self.tp.axis.rank == 0),
    )


def without_post_norms(patch):
    """What a layer makes is added as it is."""
    init = block.SequentialBlock.__init__

    def without(self, *args):
        init(self, *args)
        self.attn_post_norm = self.mlp_post_norm = None

    patch.setattr(block.SequentialBlock, "__init__", without)


def capped_by_rank(patch):
    """A rank of tp caps its part of the vocabulary otherwise than the others."""
    capped = loss.loss.soft_cap_with_slope
    patch.setattr(
        loss.loss,
        "soft_cap_with_slope",
        lambda logits, cap: capped(logits, cap * (1 + dist.get_rank() % 2)),
    )


def without_slope(patch):
    """The gradient of capped logits is taken for that of what they are made of."""
    capped = loss.loss.soft_cap_with_slope

    def flat(logits, cap):
        made, slope = capped(logits, cap)
        return made, torch.ones_like(slope)

    patch.setattr(loss.loss, "soft_cap_with_slope", flat)


def scaled_by_rank(patch):
    """Each rank of tp multiplies the embedding by a number of its own."""
    number = device.scalar_tensor
    patch.setattr(
        device,
        "scalar_tensor",
        lambda value, dtype, at: number(value * (1 + dist.get_rank() % 2), dtype, at),
    )


def adapters_by_rank(patch):
    """Each rank of tp multiplies adapters by a number of its own."""
    scale = spec.LoraSpec.scale.fget
    patch.setattr(
        spec.LoraSpec, "scale", property(lambda made: scale(made) * (1 + dist.get_rank() % 2))
    )


def part_of_the_sums(which: int):
    """Of a validation's sums, nats and tokens, one is that of this rank alone."""

    def damage(patch):
        def reduced(sums, axis):
            out = collectives.reduce_scalar(sums, axis)
            out[which] = sums[which]
            return out

        patch.setattr(
            validate,
            "collectives",
            SimpleNamespace(**vars(collectives) | {"reduce_scalar": reduced}),
        )

    return damage


def counted_again(patch):
    """Stages and ranks of cp count the tokens of a validation too."""
    evaluated = validate.mean_loss

    def evaluate(model, given, mesh, schedule):
        first = replace(mesh, pp=replace(mesh.pp, rank=0), cp=replace(mesh.cp, rank=0))
        sums = validate._sums
        patch.setattr(validate, "_sums", lambda m, b, _, order, of: sums(m, b, mesh, order, of))
        return evaluated(model, given, first, schedule)

    patch.setattr(variations, "mean_loss", evaluate)
