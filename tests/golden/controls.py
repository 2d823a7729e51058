"""What the golden test must see, by a factor of ten at least: a way to get a layout wrong, and the
layout that sees it.
"""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import damages
import mechanisms
import pytest
import table
import torch
import variations
from table import Layout

from dolmen.core import collectives, determinism, state, transfers
from dolmen.data.batch import IGNORED, Batch
from dolmen.model import mlp
from dolmen.ops.attention import Attend, Documents
from dolmen.parallel import context, data, expert, tensor
from dolmen.training import step

PLAIN, SEQUENCE, STAGES, LATER, RING = map(
    Layout.of,
    (
        "tp2 zero1",
        "tp2 sp zero1 acc4",
        "pp2 acc4 zero1",
        "pp2 acc4 zero-bubble",
        "cp2 zero1",
    ),
)
CONTEXT_EXPERTS, EXPERTS, TENSOR_EXPERTS = map(
    Layout.of, ("cp2 ep2 zero1", "dp4 ep2 zero2 acc4", "dp2 tp2 ep2 zero1")
)
CONTROLS = {
    "nothing is wrong": ("llama", SEQUENCE, lambda patch: None),
    "copy left out of a block": (
        "llama",
        PLAIN,
        damages.without(tensor, "start_all_reduce_", lambda x, axis: x),
    ),
    "copy left out of the head": (
        "gpt2",
        PLAIN,
        damages.head_alone,
    ),
    "reduce-scatter left out of a block": (
        "llama",
        SEQUENCE,
        damages.without(
            tensor,
            "finish_reduce_scatter",
            lambda x, axis: collectives.local_part(transfers.wait(x, axis), 0, axis),
        ),
    ),
    "Partial of norms left out": ("llama", SEQUENCE, damages.untyped("residual_partial")),
    "Partial of biases and positions left out": (
        "gpt2",
        SEQUENCE,
        damages.untyped("residual_partial"),
    ),
    "Partial of q and k norms and whole k, v left out": (
        "qwen3",
        PLAIN,
        damages.untyped("branch_partial"),
    ),
    "gradients of half the tokens": ("llama", PLAIN, damages.batches(damages.half_tokens)),
    "labels unshifted": (
        "llama",
        PLAIN,
        damages.batches(
            lambda b: Batch(b.tokens, torch.where(b.labels == IGNORED, IGNORED, b.tokens))
        ),
    ),
    "one block's gradient halved": ("gpt2", Layout.of("dp2 zero2 acc4"), damages.half_a_block),
    "a tied embedding's two gradients not summed": (
        "gpt2",
        STAGES,
        damages.constant(data, "sum_over", lambda p, axis: None),
    ),
    "a tied embedding counted twice in the norm": ("gpt2", STAGES, damages.norm_twice),
    "a message of another microbatch": ("llama", STAGES, damages.another_message),
    "half of the weight gradients never computed": (
        "llama",
        LATER,
        damages.weights_of_the_last_alone,
    ),
    "another forward computed again": ("llama", Layout.of("dp2 full"), damages.computed_otherwise),
    "keys and values not passed on": ("llama", RING, damages.unrotated),
    "pieces merged without rescaling": ("llama", RING, damages.unscaled),
    "a plain split taken for a zigzag": (
        "llama",
        RING,
        damages.constant(
            context.ContextParallel,
            "split",
            lambda cp, x, dim: collectives.local_part(x, dim, cp.axis),
        ),
    ),
    "balance counts of a part of the sequence": (
        "qwen3-moe",
        CONTEXT_EXPERTS,
        damages.constant(
            mlp,
            "collectives",
            SimpleNamespace(**vars(collectives) | {"reduce_scalar": lambda x, axis: x}),
        ),
    ),
    "experts averaged": ("qwen3-moe", EXPERTS, damages.experts_averaged),
    "experts unweighted": ("qwen3-moe", EXPERTS, damages.unweighted),
    "experts' rows back in the wrong order": (
        "qwen3-moe",
        EXPERTS,
        damages.constant(
            expert,
            "combine",
            lambda rows, trip, axis: collectives.all_to_all(rows, trip.receive, trip.send, axis),
        ),
    ),
    "Partial of the router left out": (
        "qwen3-moe",
        TENSOR_EXPERTS,
        damages.untyped_router,
    ),
    "auxiliary losses of every rank of tp": (
        "qwen3-moe",
        TENSOR_EXPERTS,
        damages.auxiliary_of_every_rank,
    ),
    "no window around the ring": ("window", Layout.of("cp2"), damages.attending(window=None)),
    "no window in what is gathered": (
        "window",
        Layout.of("cp2 gather"),
        damages.attending(window=None),
    ),
    "documents forgotten": (
        "llama",
        RING,
        damages.attending(documents=None),
        {"documents": True},
    ),
    "masks of a rank's own tokens": ("dropout", SEQUENCE, damages.masks_of_the_rank),
    "positions of the window where documents begin anew": (
        "gpt2",
        PLAIN,
        damages.batches(lambda b: replace(b, positions=None)),
        {"documents": True, "streams": 1},
    ),
    "no sinks around the ring": ("sinks", RING, damages.attending(sinks=None)),
    "a ring that leaves out the prefix behind a chunk": (
        "prefix",
        RING,
        damages.constant(Documents, "furthest", 0),
        {"prefixes": True},
    ),
    "slopes of the first heads on every rank of tp": (
        "bloom",
        PLAIN,
        damages.constant(
            Attend, "slopes_of", lambda attend, heads: attend.slopes and attend.slopes[:heads]
        ),
    ),
    "Partial of the embedding's norm left out": (
        "bloom",
        SEQUENCE,
        damages.untyped("residual_partial"),
    ),
    "a norm over the width of a rank's own heads": ("olmo2", PLAIN, damages.means_of_own_heads),
    "no slopes around the ring": ("bloom", RING, damages.attending(slopes=None)),
    "Partial of whole k, v left out side by side": (
        "falcon-7b",
        PLAIN,
        damages.untyped("branch_partial"),
    ),
    "Partial of norms after layers left out": (
        "gemma2",
        SEQUENCE,
        damages.untyped("residual_partial"),
    ),
    "norms after layers left out": ("gemma2", PLAIN, damages.without_post_norms),
    "logits capped by each rank's own": ("gemma2", PLAIN, damages.capped_by_rank),
    "the slope of capped logits left out": ("gemma2", PLAIN, damages.without_slope),
    "no soft cap around the ring": ("gemma2", RING, damages.attending(soft_cap=None)),
    "no scale around the ring": ("gemma2", RING, damages.attending(scale=None)),
    "an embedding scaled otherwise on each rank": ("gemma", PLAIN, damages.scaled_by_rank),
    "Partial of norms left out side by side": (
        "falcon-40b",
        SEQUENCE,
        damages.untyped("residual_partial"),
    ),
    "biases of every rank of tp side by side": ("falcon-40b", PLAIN, damages.biases_of_both_ranks),
    "Partial of what makes latents left out": (
        "deepseek-v3",
        SEQUENCE,
        damages.untyped("residual_partial"),
    ),
    "gradients of a rope key of this rank's heads alone": (
        "deepseek-v2",
        PLAIN,
        damages.constant(tensor.TensorParallel, "enter", lambda tp, x: x),
    ),
    "a shared expert of one rank alone": ("deepseek-v3", PLAIN, damages.shared_of_one_rank),
    # B begins at 0, and so do gradients of A
    "Partial of adapters left out": (
        "qwen3, adapters",
        PLAIN,
        damages.untyped("branch_partial"),
        {"steps": 2},
    ),
    "Partial of adapters of latents left out": (
        "deepseek-v3, adapters",
        SEQUENCE,
        damages.untyped("residual_partial"),
        {"steps": 2},
    ),
    "copy left out of a block whose weights are frozen": (
        "falcon-40b, adapters",
        PLAIN,
        damages.without(tensor, "start_all_reduce_", lambda x, axis: x),
    ),
    "adapters scaled otherwise on each rank of tp": (
        "qwen3, adapters",
        PLAIN,
        damages.adapters_by_rank,
    ),
    "dropout without the seed": (
        "dropout",
        PLAIN,
        damages.constant(step, "seed_of", lambda seed, *names: determinism.seed_of(0, *names)),
        {"seed": variations.OTHER_SEED},
    ),
    "weights without the seed": (
        "llama",
        PLAIN,
        damages.constant(state, "seed_of", lambda seed, *names: determinism.seed_of(0, *names)),
        {"seed": variations.OTHER_SEED},
    ),
}
CONFIGS = table.FAMILIES | {"window": variations.WINDOW, "dropout": table.DROPOUT}
CONFIGS |= mechanisms.CONFIGS | mechanisms.ADAPTED_CONFIGS
# of a validation, each is to change the loss, the number of tokens or the sum
VALIDATIONS = {
    "tokens of one rank of dp": ("dp2 zero1", damages.part_of_the_sums(1)),
    "losses of one rank of cp": ("cp2", damages.part_of_the_sums(0)),
    "tokens of every stage": ("pp2 acc4", damages.counted_again),
    "tokens of every rank of cp": ("cp2", damages.counted_again),
    "documents forgotten": ("cp2", damages.attending(documents=None)),
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
