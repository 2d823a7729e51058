"""A dry run beside the real run: what ranks of gloo processes hold at their peak, to the byte, and
what they send over each axis; FLOPs and activations beside their closed forms.
"""

import gc
import json
import math
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from spawning import Row as Case
from tinyrun import dolmen
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dolmen.core.topology import Topology
from dolmen.data.batch import Batch
from dolmen.families import ModelConfig
from dolmen.model import count
from dolmen.model.layout import Layout
from dolmen.objectives.objective import CrossEntropy
from dolmen.ops.kernels import CPU, H100
from dolmen.planning.blocks import block_rows, embedding_rows, head_rows
from dolmen.planning.dryrun import dryrun
from dolmen.planning.ledger import Ledger, LedgerRow
from dolmen.planning.operations import OURS, WEIGHTS, RankShare
from dolmen.planning.steady_state import shorten_step, uneven_stages
from dolmen.training import loop
from dolmen.training.config import RunConfig, TrainConfig
from dolmen.training.initialize import make_state
from dolmen.training.resolve import resolve
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
SHALLOW = {**LLAMA, "num_hidden_layers": 2}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
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
    options = {"global_batch_size": 8, **train}
    config = TrainConfig(sequence_length=LENGTH, microbatch_size=1, **options)
    return RunConfig(model=ModelConfig(model), layout=layout, train=config)


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

    def reported(storage, size):
        resize(storage, size)
        if storage._cdata in mode.known:
            mode.look(storage)

    torch.UntypedStorage.resize_ = reported
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


def really(run: RunConfig) -> list[Found]:
    """A step of the processes that have joined, of every rank."""
    mesh = run.layout.mesh(torch.device("cpu"))
    rows = run.train.global_batch_size // (run.layout.dp or 1)
    tokens = torch.arange(rows * LENGTH).view(rows, LENGTH) % 96
    batch = Batch(tokens, tokens.flip(0))
    gc.collect()
    mode = Real()
    with resized(mode), mode:
        state = make_state(resolve(run, None), mesh, steps=1)
        gc.collect()
        rest = mode.peak = mode.now
        mode.sent.clear()
        mode.groups = Real().groups
        with loop.manual_gc():
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


def four(model: dict[str, Any], layout: Layout, **train: Any) -> RunConfig:
    """Four microbatches of one sequence on each rank of dp."""
    return run_of(model, layout, global_batch_size=4 * (layout.dp or 1), **train)


CASES = {
    "tp": four(SHALLOW, Layout(tp=2, dp=1)),
    "tp, sequence parallel": four(SHALLOW, Layout(tp=2, dp=1, sequence_parallel=True)),
    "tp, recomputed": four(SHALLOW, Layout(tp=2, dp=1, recompute="selective")),
    "zero 0": four(SHALLOW, Layout(dp=2, zero=0)),
    "zero 1": four(SHALLOW, Layout(dp=2, zero=1), dtype="bfloat16"),
    "zero 2": four(SHALLOW, Layout(dp=2, zero=2)),
    "zero 3": four(SHALLOW, Layout(dp=2, zero=3), dtype="bfloat16"),
    "pp": four(LLAMA, Layout(pp=2, dp=1)),
    "zero-bubble": four(LLAMA, Layout(pp=2, dp=1, schedule="zero-bubble")),
    "ring": four(SHALLOW, Layout(cp=2, dp=1)),
    "gather": four(SHALLOW, Layout(cp=2, dp=1, context="gather")),
    "dropout": four(GPT | {"n_layer": 2}, Layout(tp=2, dp=1), dropout=0.1),
    "tp and dp": four(GPT, Layout(tp=2, dp=2, sequence_parallel=True), dtype="bfloat16"),
    "tied over pp": four(GPT, Layout(pp=2, dp=2)),
    "interleaved": four(
        LLAMA, Layout(pp=2, dp=2, schedule="interleaved", virtual_stages=2, zero=2)
    ),
    "all": four(LLAMA, Layout(tp=2, pp=2, dp=1, sequence_parallel=True, recompute="full")),
}
# each axis, and each way to shard, send and recompute that the others do not have
SHORT = {"zero 3", "ring", "dropout", "interleaved", "all"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        Case(name, run.layout.world, partial(really, run), name not in SHORT).parameter
        for name, run in CASES.items()
    ],
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
    attention = count.attention_flops_per_token(run.spec, LENGTH)
    matrices = count.training_flops_per_token(run.spec, LENGTH) - attention
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
        run = run_of({**GPT, "n_layer": layers}, layout, global_batch_size=1)
        rows = [row for row in counted_for(run).rows if row.action == "F0"]
        kept.append(rows[-1].live.activation)
    formula = count.activation_bytes_per_layer(
        run.spec,
        1,
        LENGTH,
        tp=2,
        sequence_parallel=sequence,
        recompute=recompute,
        element_bytes=4,
    )
    assert kept[0] - kept[1] == formula


@pytest.mark.parametrize(
    "schedule, microbatches, hardware",
    [
        pytest.param(
            schedule,
            microbatches,
            hardware,
            id=f"{schedule}-{hardware.kind}",
            marks=[] if hardware is short else [pytest.mark.full],
        )
        for schedule, microbatches, short in (
            # 1F1B: test_the_fewest_microbatches_stand_for_all; one chunk and two, gloo and not
            ("1f1b", 6, None),
            ("interleaved", 10, H100),
            ("zero-bubble", 6, CPU),
            ("zero-bubble-v", 8, None),
        )
        for hardware in (H100, CPU)
    ],
)
def test_a_steady_state_stands_for_what_was_not_run(schedule, microbatches, hardware):
    """Operations, messages and the peak of every stage are those of all microbatches: over gloo
    too, where what was sent is held until its receiver has sent something back.
    """
    chunks = 2 if schedule in ("interleaved", "zero-bubble-v") else 1
    layout = Layout(pp=2, dp=1, schedule=schedule, virtual_stages=chunks)
    model = LLAMA if chunks == 2 else SHALLOW
    run = run_of(model, layout, dtype="bfloat16", global_batch_size=microbatches)
    for rank in range(2):
        assert shorten_step(run, rank).schedule.micros < microbatches
        short, whole = (
            dryrun(run, rank, hardware=hardware, exact=exact) for exact in (False, True)
        )
        assert short.flops == whole.flops and short.peak == whole.peak
        assert sent(short, run) == sent(whole, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule, pp, chunks, micros, dp, zero",
    (
        ("1f1b", 3, 1, 7, 2, 2),
        pytest.param("interleaved", 2, 2, 14, 1, 1, marks=pytest.mark.full),
        pytest.param("zero-bubble", 3, 1, 9, 1, 1, marks=pytest.mark.full),
        ("1f1b", 1, 1, 5, 2, 3),
    ),
)
def test_the_fewest_microbatches_stand_for_all(schedule, pp, chunks, micros, dp, zero):
    """The first and the last one gather, set and reduce, so none of them stands for others."""
    layout = Layout(pp=pp, dp=dp, schedule=schedule, virtual_stages=chunks, zero=zero)
    run = run_of(LLAMA, layout, dtype="bfloat16", global_batch_size=dp * micros)
    for rank in range(0, run.layout.world, dp):
        steps = shorten_step(run, rank)
        assert steps.schedule.micros < micros
        assert not {action.micro for action in steps.times} & {0, steps.schedule.micros - 1}
        short, whole = (dryrun(run, rank, hardware=H100, exact=exact) for exact in (False, True))
        assert short.flops == whole.flops and short.at_peak == whole.at_peak
        assert sent(short, run) == sent(whole, run)


def test_a_plan_adds_gradients_as_a_step_does():
    """Each microbatch, half precision to fp32; those of norms are too few for a plan."""
    run = run_of(LLAMA, Layout(dp=2, zero=1), dtype="bfloat16")
    spec, share = run.spec, RankShare(1, LENGTH)
    works = [block_rows(spec, number, share, OURS) for number in range(spec.layers)]
    works += [make(spec, share, OURS) for make in (embedding_rows, head_rows)]
    every = (row for work in works for row in (*work.forward, *work.backward))
    planned = moved(row for row in every if row.op == f"add of {WEIGHTS}")
    rows = dryrun(run, 0, hardware=H100, exact=True).rows
    added = moved(row for row in rows if row.action == "B1" and row.op == "add_")
    params = spec.params.values()
    norms = 10 * sum(param.shape[0] for param in params if len(param.shape) == 1)
    assert added == planned + norms == 10 * sum(math.prod(param.shape) for param in params)


def moved(rows: Iterable[LedgerRow]) -> int:
    """Bytes read and written."""
    return sum(row.read + row.written for row in rows)


SENT = {
    "tp": Layout(tp=2, dp=1),
    "sequence parallel": Layout(tp=2, dp=1, sequence_parallel=True),
    "ring": Layout(cp=2, dp=1),
    "experts": Layout(dp=2, ep=2),
}


@pytest.mark.parametrize("case", SENT)
def test_a_plan_multiplies_and_sends_as_a_step_does(case):
    """FLOPs of products and of attention, and bytes by collective, of two blocks against one: what
    a ring sends from rank to rank a plan counts as what it brings together.
    """
    layout, found, planned = SENT[case], [], Counter()
    named = MIXTRAL if case == "experts" else LLAMA
    for layers in (2, 1):
        run = run_of({**named, "num_hidden_layers": layers}, layout, dtype="bfloat16")
        micros = run.train.global_batch_size // (layout.dp or 1)
        rows = dryrun(run, 0, hardware=H100).rows
        found.append(counted(row for row in rows if row.axis not in ("dp", "edp", "world")))
    share = RankShare(1, LENGTH, layout.tp, layout.cp, layout.sequence_parallel, layout.ep)
    work = block_rows(run.spec, 0, share, OURS)
    planned = counted((*work.forward, *work.backward))
    found[0].subtract(found[1])
    # of a router's losses and counts, a few numbers; of scores a causal query sees itself whole
    for name, number in planned.items():
        if name == "cp":  # of two ranks each sends the half that the other lacks
            number = number // 2
        assert micros * number == pytest.approx(found[0][name], rel=0.02), (case, name)


def counted(rows: Iterable[LedgerRow]) -> Counter:
    """FLOPs by kind; bytes by axis, of all that is gathered, scattered, summed or sent."""
    out = Counter()
    for row in rows:
        if row.flops:
            out[row.kind] += row.flops * row.times
        if row.payload and row.op != "receive":
            out[row.axis] += row.payload * row.times
    return out


def test_a_group_of_one_rank_sends_nothing():
    """FSDP asks such a group for the sum of gradients where ZeRO 0 has one rank."""
    run = run_of(LLAMA, Layout(dp=1, zero=0), dtype="bfloat16")
    ledger = dryrun(run, 0, hardware=H100)
    assert {row.kind for row in ledger.rows} == {"product", "attention", "memory", "host"}


def test_the_rows_of_a_loaded_rank_are_so_many_times_as_many():
    """Products of experts grow with the load, and nothing else does; balanced, the ranks of ep do
    what one would.
    """
    layout = Layout(dp=2, ep=2, zero=1)
    run = run_of(MIXTRAL, layout, dtype="bfloat16", global_batch_size=4)
    even, loaded = (dryrun(run, 0, hardware=H100, max_load=load) for load in (1.0, 1.5))
    alone = counted_for(run, layout=Layout(dp=2, ep=1, zero=1))
    experts = [
        sum(row.flops * row.times for row in ledger.rows if row.op == "_grouped_mm")
        for ledger in (even, loaded, alone)
    ]
    assert experts[1] == 1.5 * experts[0] and experts[0] == experts[2] > 0
    assert loaded.flops - experts[1] == even.flops - experts[0]
    assert {row.axis for row in even.rows if row.op == "all-to-all"} == {"ep"}


def test_products_of_eight_bits_are_as_many():
    """Three of each matrix inside layers and of each sequence, which are torch's scaled products;
    all in all as without.
    """
    layout = Layout(dp=1, zero=0)
    plain, rounded = (
        dryrun(four(LLAMA, layout, dtype="bfloat16", precision=one), 0, hardware=H100)
        for one in (None, "fp8-rowwise")
    )
    assert rounded.flops == plain.flops
    params = ModelConfig(LLAMA).spec.params.items()
    inside = sum(param.elements for n, param in params if "layers." in n and param.role == "matrix")
    found = sum(row.flops * row.times for row in rounded.rows if row.dtype == "fp8")
    assert found == 4 * 3 * 2 * LENGTH * inside


QUICK = (
    "dryrun",
    "quickstart",
    "--layout.dp",
    "1",
    "--layout.tp",
    "2",
    "--train.global-batch-size",
    "2",
)


def test_the_command_tells_a_person_and_a_program(tmp_path):
    file = tmp_path / "found.json"
    shown = dolmen(*QUICK, "--ranks", "last,0", "--json", str(file), "--device", "a100")
    assert shown.code == 0 and "rank 1" in shown.out and "at the peak" in shown.out
    found = json.loads(file.read_text())
    assert list(found) == ["ranks"] and [one["rank"] for one in found["ranks"]] == [1, 0]
    for one in found["ranks"]:
        assert list(one) == ["rank", "peak_bytes", "live_bytes", "flops", "collectives"]
        assert list(one["live_bytes"]) == [
            "parameter",
            "compute copy",
            "gradient",
            "unsharded gradient",
            "optimizer",
            "activation",
            "buffer",
        ]
        assert sum(one["live_bytes"].values()) == one["peak_bytes"] > 0 < one["flops"]
        assert {"axis", "op", "count", "bytes"} == {*one["collectives"][0]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "2"), "--ranks has 2, but the layout has 2 ranks: give numbers of 0 to 1"),
        (("--ranks", "each"), "--ranks has 'each': give first, middle, last or numbers"),
        (("--max-load", "0"), "max-load is 0.0: it must be over 0"),
        (("--layout.tp", "3"), "num_attention_heads (4) is not divisible by tp (3)"),
        (("--device", "tpu"), "--device is 'tpu'"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_line(words, said):
    shown = dolmen(*QUICK, *words)
    assert shown.code == 2 and said in shown.err and shown.err.count("\n") == 1


def test_a_step_that_would_crash_is_told_in_a_line(monkeypatch):
    """Where, and the first line of what the code of the run raised."""

    def fails(hidden, head, batch):
        raise RuntimeError("the head is too small\nmore of it")

    monkeypatch.setattr(CrossEntropy, "__call__", lambda self, *given: fails(*given))
    shown = dolmen(*QUICK, "--ranks", "last")
    assert shown.code == 2
    line = shown.err.splitlines()[-1]
    assert line.endswith("rank 1 would fail at the start: the head is too small"), shown.err


def test_a_layout_that_cannot_be_is_refused_before_torch(monkeypatch):
    """35 stages of 32 layers; and 5 stages are run as they would train, which a line says."""
    from dolmen.planning import dryrun as dry

    monkeypatch.setattr(dry, "report", lambda *_, **__: pytest.fail("it was run"))
    words = "llama-8b", "--layout.pp"
    refused = dolmen("dryrun", *words, 35)
    assert refused.code == 2 and "= 35 stages, but there are num_hidden_layers" in refused.err
    assert "loading torch" not in refused.err
    assert "--ranks has 5" in dolmen("dryrun", *words, 5, "--ranks", 5).err
    run = run_of(LLAMA, Layout(pp=3))
    assert uneven_stages(run) == "4 layers are not divisible by 3 stages: each has 1 to 2"
    assert uneven_stages(run_of(LLAMA, Layout(pp=2))) == ""


def test_plans_and_refusals_import_no_torch():
    code = "import sys, dolmen.cli.planning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
