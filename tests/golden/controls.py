"""Ways to get a layout wrong, one line each: the golden test must see every one of them, by a
factor of ten at least.
"""

import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import table
import torch
from table import Layout
from torch.utils.checkpoint import checkpoint

from dolmen.core import collectives, state
from dolmen.data.batch import IGNORED, Batch
from dolmen.model import decoder, moe
from dolmen.parallel import context, data, expert, loss, pipeline, tensor


def without(module, name, instead):
    """`module` calls `instead` where it would call the collective; all other callers are left
    alone.
    """
    return lambda patch: patch.setattr(
        module, "c", SimpleNamespace(**vars(collectives) | {name: instead})
    )


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


def norm_twice(patch):
    """The weight that both ends own is counted at both."""
    norm = data.gradient_norm
    patch.setattr(
        data, "gradient_norm", lambda parameters, mesh, twice: norm(parameters, mesh, None)
    )


def weights_of_the_last_alone(patch):
    """Of the weight gradients left for later, those of the last microbatch are computed."""

    def run(weights, grads, x, gather):
        made = deferred(weights, grads, x, gather)
        return lambda: made() if grads[0].shape[0] and next(count) % 2 else None

    deferred, count = tensor._weight_gradients, itertools.count()
    patch.setattr(tensor, "_weight_gradients", run)


def another_message(patch):
    """A stage takes the tensors of two microbatches in the wrong order."""
    sent = pipeline._sent

    def swapped(schedule, sender, to):
        messages = sent(schedule, sender, to)
        messages[:2] = messages[1::-1]
        return messages

    patch.setattr(pipeline, "_sent", swapped)


def computed_otherwise(patch):
    """What backward computes again is not what forward has computed."""

    def again(function, *args):
        times = itertools.count()
        return checkpoint(
            lambda x, *rest: function(x * 1.5 if next(times) else x, *rest),
            *args,
            use_reentrant=False,
        )

    patch.setattr(decoder, "again", again)


def unrotated(patch):
    """Keys and values stay where they are, and are taken for the neighbour's."""
    patch.setattr(
        context.collectives,
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


def experts_averaged(patch):
    """Gradients of experts are averaged over edp instead of summed."""
    build = table.build

    def built(*args, **options):
        model = build(*args, **options)
        for unit in data.units(model):
            if isinstance(unit, moe.Experts):
                unit.set_gradient_divide_factor(2.0)
        return model

    patch.setattr(table, "build", built)


def unweighted(patch):
    """A token's experts count alike."""
    combine = moe.moe.combine
    patch.setattr(
        moe.moe, "combine", lambda rows, weights, order: combine(rows, 0 * weights + 0.5, order)
    )


def auxiliary_of_every_rank(patch):
    """The auxiliary losses' gradient is not divided by tp."""
    apply = moe._Account.apply
    patch.setattr(
        moe._Account,
        "apply",
        staticmethod(
            lambda w, loss, scale, tally, m: apply(w, loss * m.tp.axis.size, scale, tally, m)
        ),
    )


PLAIN, SEQUENCE, STAGES, LATER, RING = map(
    Layout.of,
    (
        "dp2 tp2 zero1",
        "dp2 tp2 sp zero2 acc4",
        "pp2 dp2 acc4 zero1",
        "pp4 acc4 zero-bubble",
        "cp2 dp2 zero1",
    ),
)
CONTEXT_EXPERTS, EXPERTS, TENSOR_EXPERTS = map(
    Layout.of, ("dp2 cp2 ep2 zero1", "dp4 ep2 zero2 acc4", "dp2 tp2 ep2 zero1")
)
CONTROLS = {
    "nothing is wrong": ("llama", SEQUENCE, lambda patch: None),
    "copy left out of a block": (
        "llama",
        PLAIN,
        without(tensor, "start_all_reduce", lambda x, axis: x),
    ),
    "copy left out of the head": (
        "gpt2",
        PLAIN,
        without(loss, "start_all_reduce", lambda x, axis: x),
    ),
    "reduce-scatter left out of a block": (
        "llama",
        SEQUENCE,
        without(
            tensor,
            "finish_reduce_scatter",
            lambda x, axis: collectives.part(collectives.wait(x), 0, axis),
        ),
    ),
    "Partial of norms left out": ("llama", SEQUENCE, untyped("residual_grad")),
    "Partial of biases and positions left out": ("gpt2", SEQUENCE, untyped("residual_grad")),
    "Partial of q and k norms and whole k, v left out": ("qwen3", PLAIN, untyped("branch_grad")),
    "gradients of half the tokens": ("llama", PLAIN, batches(half_tokens)),
    "labels unshifted": (
        "llama",
        PLAIN,
        batches(lambda b: Batch(b.tokens, torch.where(b.labels == IGNORED, IGNORED, b.tokens))),
    ),
    "one block's gradient halved": ("gpt2", SEQUENCE, half_a_block),
    "a tied embedding's two gradients not summed": (
        "gpt2",
        STAGES,
        constant(data, "sum_over", lambda p, axis: None),
    ),
    "a tied embedding counted twice in the norm": ("gpt2", STAGES, norm_twice),
    "a message of another microbatch": ("llama", STAGES, another_message),
    "half of the weight gradients never computed": ("llama", LATER, weights_of_the_last_alone),
    "another forward computed again": ("llama", Layout.of("dp4 full"), computed_otherwise),
    "keys and values not passed on": ("llama", RING, unrotated),
    "pieces merged without rescaling": ("llama", RING, unscaled),
    "a plain split taken for a zigzag": (
        "llama",
        RING,
        constant(
            context.ContextParallel, "split", lambda cp, x, dim: collectives.part(x, dim, cp.axis)
        ),
    ),
    "balance counts of a part of the sequence": (
        "qwen3-moe",
        CONTEXT_EXPERTS,
        constant(
            moe,
            "collectives",
            SimpleNamespace(**vars(collectives) | {"reduce_scalar": lambda x, axis: x}),
        ),
    ),
    "experts averaged": ("qwen3-moe", EXPERTS, experts_averaged),
    "experts unweighted": ("qwen3-moe", EXPERTS, unweighted),
    "experts' rows back in the wrong order": (
        "qwen3-moe",
        EXPERTS,
        constant(
            expert,
            "combine",
            lambda rows, trip, axis: collectives.exchange(rows, trip.receive, trip.send, axis),
        ),
    ),
    "Partial of the router left out": (
        "qwen3-moe",
        TENSOR_EXPERTS,
        constant(moe, "local", lambda p, grad=None: state.local(p)),
    ),
    "auxiliary losses of every rank of tp": ("qwen3-moe", TENSOR_EXPERTS, auxiliary_of_every_rank),
}


@contextmanager
def damaged(damage):
    with pytest.MonkeyPatch.context() as patch:
        damage(patch)
        yield


def compare_damaged(control: str) -> dict[str, tuple[float, str]]:
    """The first step of a control against one undamaged process: largest differences."""
    family, layout, damage = CONTROLS[control]
    want = table.alone(table.FAMILIES[family], steps=1)
    with damaged(damage):
        mesh = layout.mesh(torch.device("cpu"))
        return table.differences(table.run(table.FAMILIES[family], mesh, layout, steps=1), want)
