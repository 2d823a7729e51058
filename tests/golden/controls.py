"""Ways to get a layout wrong, one line each: the golden test must see every one of them, by a
factor of ten at least.
"""

import itertools
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import mechanisms
import pytest
import table
import torch
import torch.distributed as dist
import variations
from table import Layout
from torch.utils.checkpoint import checkpoint

from dolmen.core import collectives, rng, state, transfers
from dolmen.core.mesh import Axis
from dolmen.data.batch import IGNORED, Batch
from dolmen.model import block, branch, layers, moe, parallel, pre, sandwich, tree
from dolmen.ops import dropout
from dolmen.ops.attention import Attend
from dolmen.parallel import channels, context, data, expert, loss, tensor
from dolmen.train import step, validate


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

    def run(weights, grads, x, gather):
        made = deferred(weights, grads, x, gather)
        return lambda: made() if grads[0].shape[0] and next(count) % 2 else None

    deferred, count = tensor._weight_gradients, itertools.count()
    patch.setattr(tensor, "_weight_gradients", run)


def another_message(patch):
    """A stage takes the tensors of two microbatches in the wrong order."""
    sent = channels.messages_sent

    def swapped(schedule, sender, to):
        messages = sent(schedule, sender, to)
        messages[:2] = messages[1::-1]
        return messages

    patch.setattr(channels, "messages_sent", swapped)


def computed_otherwise(patch):
    """What backward computes again is not what forward has computed."""

    def again(function, *args):
        times = itertools.count()
        return checkpoint(
            lambda x, *rest: function(x * 1.5 if next(times) else x, *rest),
            *args,
            use_reentrant=False,
        )

    patch.setattr(block, "again", again)


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
    leaves = tree.Router.leaves
    patch.setattr(
        tree.Router,
        "leaves",
        lambda *sizes: {n: replace(leaf, gradient="own") for n, leaf in leaves(*sizes).items()},
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
    residual = dropout.residual
    patch.setattr(
        dropout,
        "residual",
        lambda x, p, noise, site, rows: residual(x, p, noise, site, torch.arange(len(rows))),
    )


def biases_of_both_ranks(patch):
    """Branches side by side add their biases before they leave, on each rank of tp."""
    leave = parallel.leave

    def left(branches, results):
        biases = [state.local(branch.row.bias) for branch in branches]
        return leave(branches, results) + sum(biases)  # tp is 2

    patch.setattr(parallel, "leave", left)


def shared_of_one_rank(patch):
    """What leaves of a shared expert is the sum of one rank of tp."""
    part = branch.Branch.part
    patch.setattr(
        branch.Branch,
        "part",
        lambda self, x, given: part(self, x, given) * (self.tp.axis.rank == 0),
    )


def without_post_norms(patch):
    """What a layer makes is added as it is."""
    patch.setattr(
        sandwich.Sandwich,
        "stream",
        lambda b, x, given, cache=None: pre.Pre.stream(b, x, given, cache),
    )


def capped_by_rank(patch):
    """A rank of tp caps its part of the vocabulary otherwise than the others."""
    capped = loss.loss.capped_with_slope
    patch.setattr(
        loss.loss,
        "capped_with_slope",
        lambda logits, cap: capped(logits, cap * (1 + dist.get_rank() % 2)),
    )


def without_slope(patch):
    """The gradient of capped logits is taken for that of what they are made of."""
    capped = loss.loss.capped_with_slope

    def flat(logits, cap):
        made, slope = capped(logits, cap)
        return made, torch.ones_like(slope)

    patch.setattr(loss.loss, "capped_with_slope", flat)


def scaled_by_rank(patch):
    """Each rank of tp multiplies the embedding by a number of its own."""
    number = layers.host.number
    patch.setattr(
        layers.host,
        "number",
        lambda value, dtype, device: number(value * (1 + dist.get_rank() % 2), dtype, device),
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
        nats = validate._nats
        patch.setattr(validate, "_nats", lambda model, b, _, order: nats(model, b, mesh, order))
        return evaluated(model, given, first, schedule)

    patch.setattr(variations, "mean_loss", evaluate)


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
        without(tensor, "start_all_reduce_", lambda x, axis: x),
    ),
    "copy left out of the head": (
        "gpt2",
        PLAIN,
        head_alone,
    ),
    "reduce-scatter left out of a block": (
        "llama",
        SEQUENCE,
        without(
            tensor,
            "finish_reduce_scatter",
            lambda x, axis: collectives.part(transfers.wait(x, axis), 0, axis),
        ),
    ),
    "Partial of norms left out": ("llama", SEQUENCE, untyped("residual_partial")),
    "Partial of biases and positions left out": ("gpt2", SEQUENCE, untyped("residual_partial")),
    "Partial of q and k norms and whole k, v left out": ("qwen3", PLAIN, untyped("branch_partial")),
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
        untyped_router,
    ),
    "auxiliary losses of every rank of tp": ("qwen3-moe", TENSOR_EXPERTS, auxiliary_of_every_rank),
    "no window around the ring": ("window", Layout.of("cp2"), attending(window=None)),
    "no window in what is gathered": ("window", Layout.of("cp2 gather"), attending(window=None)),
    "documents forgotten": (
        "llama",
        RING,
        attending(documents=None),
        {"documents": True},
    ),
    "masks of a rank's own tokens": ("dropout", SEQUENCE, masks_of_the_rank),
    "slopes of the first heads on every rank of tp": (
        "bloom",
        PLAIN,
        constant(
            Attend, "slopes_of", lambda attend, heads: attend.slopes and attend.slopes[:heads]
        ),
    ),
    "Partial of the embedding's norm left out": ("bloom", SEQUENCE, untyped("residual_partial")),
    "no slopes around the ring": ("bloom", RING, attending(slopes=None)),
    "Partial of whole k, v left out side by side": (
        "falcon-7b",
        PLAIN,
        untyped("branch_partial"),
    ),
    "Partial of norms after layers left out": ("gemma2", SEQUENCE, untyped("residual_partial")),
    "norms after layers left out": ("gemma2", PLAIN, without_post_norms),
    "logits capped by each rank's own": ("gemma2", PLAIN, capped_by_rank),
    "the slope of capped logits left out": ("gemma2", PLAIN, without_slope),
    "no soft cap around the ring": ("gemma2", RING, attending(soft_cap=None)),
    "no scale around the ring": ("gemma2", RING, attending(scale=None)),
    "an embedding scaled otherwise on each rank": ("gemma", PLAIN, scaled_by_rank),
    "Partial of norms left out side by side": ("falcon-40b", SEQUENCE, untyped("residual_partial")),
    "biases of every rank of tp side by side": ("falcon-40b", PLAIN, biases_of_both_ranks),
    "Partial of what makes latents left out": (
        "deepseek-v3",
        SEQUENCE,
        untyped("residual_partial"),
    ),
    "gradients of a rope key of this rank's heads alone": (
        "deepseek-v2",
        PLAIN,
        constant(tensor.TensorParallel, "enter", lambda tp, x: x),
    ),
    "a shared expert of one rank alone": ("deepseek-v3", PLAIN, shared_of_one_rank),
    "dropout without the seed": (
        "dropout",
        PLAIN,
        constant(step, "seed_of", lambda seed, *names: rng.seed_of(0, *names)),
        {"seed": variations.OTHER_SEED},
    ),
    "weights without the seed": (
        "llama",
        PLAIN,
        constant(state, "seed_of", lambda seed, *names: rng.seed_of(0, *names)),
        {"seed": variations.OTHER_SEED},
    ),
}
CONFIGS = table.FAMILIES | {"window": variations.WINDOW, "dropout": table.DROPOUT}
CONFIGS |= mechanisms.CONFIGS
# of a validation, each is to change the loss, the number of tokens or the sum
VALIDATIONS = {
    "tokens of one rank of dp": ("dp2 zero1", part_of_the_sums(1)),
    "losses of one rank of cp": ("cp2", part_of_the_sums(0)),
    "tokens of every stage": ("pp2 acc4", counted_again),
    "tokens of every rank of cp": ("cp2", counted_again),
    "documents forgotten": ("cp2", attending(documents=None)),
}


@contextmanager
def damaged(damage):
    with pytest.MonkeyPatch.context() as patch:
        damage(patch)
        yield


def compare_damaged(control: str) -> dict[str, tuple[float, str]]:
    """The first step of a control against one undamaged process: largest differences."""
    family, layout, damage, *options = CONTROLS[control]
    options = {"steps": 1} | (options[0] if options else {})
    want = table.alone(CONFIGS[family], **options)
    with damaged(damage):
        mesh = layout.mesh(torch.device("cpu"))
        return table.differences(table.run(CONFIGS[family], mesh, layout, **options), want)


def compare_damaged_validation(control: str) -> dict[str, tuple[float, str]]:
    """A validation of a control against one undamaged process."""
    words, damage = VALIDATIONS[control]
    return variations.compare_validation(table.FAMILIES["llama"], Layout.of(words), damaged(damage))
