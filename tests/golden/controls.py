"""Ways to get a layout wrong, one line each: the golden test must see every one of them, by a factor of ten at least."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import table
import torch
from table import Layout

from dolmen.core import collectives
from dolmen.data.batch import IGNORED, Batch
from dolmen.parallel import data, loss, tensor


def without(module, name, instead):
    """`module` calls `instead` where it would call the collective; all other callers are left alone."""
    return lambda patch: patch.setattr(module, "c", SimpleNamespace(**vars(collectives) | {name: instead}))


def untyped(name):
    """The gradient of a replicated weight used on a part of the activations is no longer declared Partial."""
    return lambda patch: patch.setattr(tensor.TensorParallel, name, property(lambda tp: None))


def batches(change):
    def damage(patch):
        whole = table.batches
        patch.setattr(table, "batches", lambda *args: [change(b) for b in whole(*args)])
    return damage


def half_tokens(b: Batch) -> Batch:
    """Losses of half the positions, as if one of two ranks' sums were dropped."""
    return Batch(b.tokens, torch.where(torch.arange(b.labels.shape[1]) % 2 == 0, b.labels, IGNORED))


def half_a_block(patch):
    """FSDP averages one block's gradient instead of summing it: what forgetting a non-recursive setting does."""
    build = table.build

    def built(*args, **options):
        model = build(*args, **options)
        if units := data.units(model): units[0].set_gradient_divide_factor(2.0)
        return model
    patch.setattr(table, "build", built)


PLAIN, SEQUENCE = Layout(dp=2, tp=2, zero=1), Layout(dp=2, tp=2, sequence=True, zero=2, accumulation=4)
CONTROLS = {
    "nothing is wrong": ("llama", SEQUENCE, lambda patch: None),
    "copy left out of a block": ("llama", PLAIN, without(tensor, "start_all_reduce", lambda x, axis: x)),
    "copy left out of the head": ("gpt2", PLAIN, without(loss, "start_all_reduce", lambda x, axis: x)),
    "reduce-scatter left out of a block": ("llama", SEQUENCE, without(tensor, "start_reduce_scatter", lambda x, axis: collectives.part(x, 0, axis))),
    "Partial of norms left out": ("llama", SEQUENCE, untyped("residual_grad")),
    "Partial of biases and positions left out": ("gpt2", SEQUENCE, untyped("residual_grad")),
    "Partial of q and k norms and whole k, v left out": ("qwen3", PLAIN, untyped("branch_grad")),
    "gradients of half the tokens": ("llama", PLAIN, batches(half_tokens)),
    "labels unshifted": ("llama", PLAIN, batches(lambda b: Batch(b.tokens, torch.where(b.labels == IGNORED, IGNORED, b.tokens)))),
    "one block's gradient halved": ("gpt2", SEQUENCE, half_a_block),
}


@contextmanager
def damaged(damage):
    with pytest.MonkeyPatch.context() as patch:
        damage(patch)
        yield


def compare_damaged() -> dict[str, tuple[float, str]]:
    """The first step of each control against one undamaged process: {control: largest difference of a gradient}."""
    out, one = {}, {family: table.run(config, table.SINGLE, Layout(), steps=1) for family, config in table.FAMILIES.items()}
    for name, (family, layout, damage) in CONTROLS.items():
        with damaged(damage):
            got = table.run(table.FAMILIES[family], table.meshes.grid(layout.dp, layout.tp, torch.device("cpu")), layout, steps=1)
        out[name] = table.differences(got, one[family])["gradient"]
    return out
