"""A dry run beside the real run: what ranks of gloo processes hold at their peak, to the byte, and
what they send over each axis; FLOPs and activations beside their closed forms.
"""

import gc
import time
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from spawning import Row as Case
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dolmen.core.topology import Topology
from dolmen.data.batch import Batch
from dolmen.families import Model
from dolmen.model import count
from dolmen.model.layout import Layout
from dolmen.ops.kernels import CPU, H100
from dolmen.planning.dryrun import dryrun, shortened
from dolmen.planning.ledger import Ledger
from dolmen.training import garbage
from dolmen.training.config import RunConfig, TrainConfig
from dolmen.training.run import make_state
from dolmen.training.step import optimizer_step

LENGTH = 16
LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
GPT = {
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 32,
    "n_inner": 128,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": LENGTH,
}


def run_of(model: dict[str, Any], layout: Layout, **train: Any) -> RunConfig:
    """Eight sequences in a step, one in a microbatch."""
    asked = TrainConfig(sequence_length=LENGTH, global_batch_size=8, microbatch_size=1)
    return RunConfig(model=Model(model), layout=layout, train=replace(asked, **train))


class Found(NamedTuple):
    """Of a rank."""

    rest: int
    peak: int
    sent: Counter[tuple[tuple[int, ...], str, int]]
    """(ranks of the group, operation, bytes)."""


OPERATIONS = {
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "allreduce_": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "_allgather_base_": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "send": "send",
    "recv_": "receive",
}


class Real(TorchDispatchMode):
    """What a process holds and sends, with none of the house's own counting."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, Any] = {}
        self.sent = Counter()
        self.sends = False
        self.groups = {
            group.group_name: tuple(ranks)
            for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items()
        }

    def look(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known[key] = 0
            weakref.finalize(storage, self.gone, key)
        self.now += size - self.known[key]
        self.known[key] = size
        self.peak = max(self.peak, self.now)

    def gone(self, key: int) -> None:
        self.now -= self.known.pop(key)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented
        if (
            self.sends
        ):  # the thread that has sent lets go of the tensors a moment after it has said so
            time.sleep(0.002)
        self.sends = "c10d" in op.namespace
        out = op(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if not op.is_view:
            for t in tensors:
                if not isinstance(t, AsyncCollectiveTensor):
                    self.look(t.untyped_storage())
        name = op.__name__.split(".")[0]
        if op.namespace in ("c10d", "_c10d_functional") and name in OPERATIONS:
            tensors += [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            # a group comes before what is done over it
            named = (
                dist.ProcessGroup.unbox(a).group_name if isinstance(a, torch.ScriptObject) else a
                for a in args
                if isinstance(a, (str, torch.ScriptObject))
            )
            group = next(self.groups[n] for n in named if n in self.groups)
            self.sent[group, OPERATIONS[name], max(t.nbytes for t in tensors)] += 1
        return out


@contextmanager
def resized(mode: Real):
    """FSDP frees what it has gathered by `resize_`, of which no operator tells."""
    resize = torch.UntypedStorage.resize_

    def told(storage, size):
        resize(storage, size)
        if storage._cdata in mode.known:
            mode.look(storage)

    torch.UntypedStorage.resize_ = told
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


def really(run: RunConfig) -> list[Found]:
    """A step of the processes that have joined, of every rank."""
    mesh = run.layout.mesh(torch.device("cpu"))
    rows = 8 // (run.layout.dp or 1)
    tokens = torch.arange(rows * LENGTH).view(rows, LENGTH) % 96
    batch = Batch(tokens, tokens.flip(0))
    gc.collect()
    mode = Real()
    with resized(mode), mode:
        state = make_state(run, mesh, steps=1)
        gc.collect()
        rest = mode.peak = mode.now
        mode.sent.clear()
        mode.groups = Real().groups
        with garbage.by_hand():
            optimizer_step(state, batch, mesh)
    found: list[Any] = [None] * run.layout.world
    dist.all_gather_object(found, Found(rest, mode.peak, mode.sent))
    return found


def dryly(run: RunConfig, rank: int, **options: Any) -> Ledger:
    return dryrun(run, rank, hardware=CPU, exact=True, **options)


def sent(ledger: Ledger, run: RunConfig) -> Counter:
    """As `Found` has it."""
    at, found = run.layout, Counter()
    topology = Topology(dp=at.dp or 1, tp=at.tp, pp=at.pp, cp=at.cp, ep=at.ep)
    for row in ledger.rows:
        if row.kind in ("collective", "send"):
            match row.axis:
                case "world":
                    ranks = range(topology.size)
                case "ends":
                    ranks = topology.ends(ledger.rank)
                case axis:
                    ranks = topology.group(axis, ledger.rank)
            found[tuple(ranks), row.op, row.payload] += row.times
    return found


CASES = {
    "tp": run_of(LLAMA, Layout(tp=2, dp=1)),
    "tp, sequence parallel": run_of(LLAMA, Layout(tp=2, dp=1, sequence_parallel=True)),
    "tp, recomputed": run_of(LLAMA, Layout(tp=2, dp=1, recompute="selective")),
    "zero 0": run_of(LLAMA, Layout(dp=2, zero=0)),
    "zero 1": run_of(LLAMA, Layout(dp=2, zero=1), dtype="bfloat16"),
    "zero 2": run_of(LLAMA, Layout(dp=2, zero=2)),
    "zero 3": run_of(LLAMA, Layout(dp=2, zero=3), dtype="bfloat16"),
    "pp": run_of(LLAMA, Layout(pp=2, dp=1)),
    "zero-bubble": run_of(LLAMA, Layout(pp=2, dp=1, schedule="zero-bubble")),
    "ring": run_of(LLAMA, Layout(cp=2, dp=1)),
    "gather": run_of(LLAMA, Layout(cp=2, dp=1, context="gather")),
    "dropout": run_of(GPT, Layout(tp=2, dp=1), dropout=0.1),
    "tp and dp": run_of(GPT, Layout(tp=2, dp=2, sequence_parallel=True), dtype="bfloat16"),
    "tied over pp": run_of(GPT, Layout(pp=2, dp=2)),
    "interleaved": run_of(
        LLAMA, Layout(pp=2, dp=2, schedule="interleaved", virtual_stages=2, zero=2)
    ),
    "all": run_of(LLAMA, Layout(tp=2, pp=2, dp=1, sequence_parallel=True, recompute="full")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [Case(name, run.layout.world, partial(really, run)).parameter for name, run in CASES.items()],
)
def test_a_dry_run_is_the_real_one(row, result):
    """What each rank holds at rest and at its peak, and every message, by group, kind and size."""
    run = CASES[row.name]
    for rank, found in enumerate(result(row)):
        ledger = dryly(run, rank)
        assert sent(ledger, run) == found.sent
        assert ledger.rest.total == found.rest
        assert ledger.peak == found.peak == ledger.at_peak.total


def counted_for(run: RunConfig, **changes: Any) -> Ledger:
    """As on an H100, of the first rank."""
    return dryrun(replace(run, **changes), 0, hardware=H100)


@pytest.mark.parametrize("model", (LLAMA, GPT), ids=lambda model: model["model_type"])
@pytest.mark.parametrize("tp", (1, 4))
def test_operations_equal_their_closed_form(model, tp):
    """Products and attention apart. Where heads are split evenly a rank of tp does its part of
    all, and the backward of flash attention forms scores once more: seven products, not six.
    """
    wide = {"num_key_value_heads": 4} if model is LLAMA else {}
    run = run_of({**model, **wide}, Layout(tp=tp, dp=2), dtype="bfloat16", global_batch_size=16)
    ledger, tokens = counted_for(run), 8 * LENGTH
    attention = count.attention_flops_per_token(run.tree, LENGTH)
    matrices = count.training_flops_per_token(run.tree, LENGTH) - attention
    found = Counter()
    for row in ledger.rows:
        found[row.kind] += row.flops * row.times
    assert found["product"] == matrices * tokens / tp
    assert found["attention"] == attention * tokens / tp * 7 / 6


@pytest.mark.parametrize("sequence", (False, True))
@pytest.mark.parametrize("recompute", ("none", "selective", "full"))
def test_activations_equal_their_closed_form(sequence, recompute):
    """Of a GPT block (2205.05198), what is there after a forward and not with one layer less."""
    layout = Layout(tp=2, dp=1, sequence_parallel=sequence, recompute=recompute)
    kept = []
    for layers in (3, 2):
        run = run_of({**GPT, "n_layer": layers}, layout)
        rows = [row for row in counted_for(run).rows if row.action == "F0"]
        kept.append(rows[-1].live.activation)
    formula = count.activation_bytes_per_layer(
        run.tree,
        1,
        LENGTH,
        tp=2,
        sequence_parallel=sequence,
        recompute=recompute,
        element_bytes=4,
    )
    assert kept[0] - kept[1] == formula


@pytest.mark.parametrize("schedule", ("1f1b", "interleaved", "zero-bubble", "zero-bubble-v"))
def test_a_steady_state_stands_for_what_was_not_run(schedule):
    """Operations, messages and the peak of every stage are those of all microbatches."""
    chunks = 2 if schedule in ("interleaved", "zero-bubble-v") else 1
    layout = Layout(pp=2, dp=1, schedule=schedule, virtual_stages=chunks)
    run = run_of(LLAMA, layout, dtype="bfloat16", global_batch_size=12)
    for rank in range(2):
        assert shortened(run, rank, H100).schedule.micros < 12
        short, whole = (dryrun(run, rank, hardware=H100, exact=exact) for exact in (False, True))
        assert short.flops == whole.flops and short.peak == whole.peak
        assert sent(short, run) == sent(whole, run)
