"""Which attention backend a run is timed to: candidates, memory, the shape that is timed, and one
choice for all ranks. No GPU: backends are timed by stand-ins.
"""

import json
from dataclasses import replace

import flash_kernel
import pytest
import torch
from spawning import run_spawned
from torch.nn import attention

from dolmen.core.mesh import SINGLE, Axis
from dolmen.data.config import DataConfig
from dolmen.families import ModelConfig
from dolmen.model.layout import Layout
from dolmen.ops.attention import BACKENDS, operators
from dolmen.ops.attention_support import AttentionChoice
from dolmen.ops.kernels import CPU, H100, Hardware
from dolmen.training import attention_timing
from dolmen.training.attention_timing import FILE, choose_run_attention, time_call
from dolmen.training.config import RunConfig, TrainConfig
from dolmen.training.folder import Unusable

A100 = Hardware("cuda", (8, 0), "NVIDIA A100-SXM4-80GB")
MILLISECONDS = {"cudnn": 2.0, "flash": 3.0, "flash3": 1.0}
TRAIN = TrainConfig(
    dtype="bfloat16", sequence_length=32, global_batch_size=4, microbatch_size=2, steps=1
)


def run_of(cache, *, model=None, layout=None, mask=False, **train) -> RunConfig:
    """A run of a small model, whose times are remembered in the folder `cache`."""
    fields = dict(
        model_type="llama",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return RunConfig(
        model=ModelConfig({**fields, **(model or {})}),
        layout=layout or Layout(dp=1),
        data=DataConfig(cache=str(cache), document_mask=mask),
        train=replace(TRAIN, **train),
    )


class Stopwatch:
    """Stands in for `measure_attention`: MILLISECONDS, and the backends that were measured."""

    def __init__(self):
        self.measured = []

    def __call__(self, backend, run, mesh) -> float:
        self.measured.append(backend)
        return MILLISECONDS[backend]


@pytest.fixture
def installed(monkeypatch):
    """FlashAttention-3 is."""
    monkeypatch.setattr(attention_timing, "is_installed", lambda backend: True)


def test_the_fastest_of_those_that_compute_it_is_taken_and_remembered(tmp_path, installed):
    watch, run = Stopwatch(), run_of(tmp_path / "cache")
    choice = choose_run_attention(run, SINGLE, H100, watch)
    assert choice == AttentionChoice("flash3", tuple(MILLISECONDS.items()))
    assert watch.measured == ["cudnn", "flash", "flash3"]
    assert choose_run_attention(run, SINGLE, H100, watch) == choice
    assert len(watch.measured) == 3
    # another shape, and another card, are measured anew, and the first is still known
    for other, hardware in (
        (run_of(tmp_path / "cache", sequence_length=64), H100),
        (run_of(tmp_path / "cache", mask=True), H100),
        (run_of(tmp_path / "cache", model={"num_key_value_heads": 4}), H100),
        (run, replace(H100, name="NVIDIA H200")),
    ):
        before = len(watch.measured)
        choose_run_attention(other, SINGLE, hardware, watch)
        assert len(watch.measured) == before + 3
    choose_run_attention(run, SINGLE, H100, watch)
    assert len(watch.measured) == 15
    assert len(json.loads((tmp_path / "cache" / FILE).read_text())) == 5


def test_what_was_not_there_is_measured_once_it_is(tmp_path, monkeypatch):
    watch, run = Stopwatch(), run_of(tmp_path)
    assert choose_run_attention(run, SINGLE, H100, watch).backend == "cudnn"
    assert watch.measured == ["cudnn", "flash"], "its module is not installed"
    monkeypatch.setattr(attention_timing, "is_installed", lambda backend: True)
    assert choose_run_attention(run, SINGLE, H100, watch).backend == "flash3"


def test_a_damaged_memory_is_replaced(tmp_path, installed):
    run, (file, watch) = run_of(tmp_path), (tmp_path / FILE, Stopwatch())
    for damage in ("{", '{"a": {"flash": "fast"}}', '{"a": {"flash": -1}}', "[" * 100_000):
        file.write_text(damage)
        assert choose_run_attention(run, SINGLE, H100, watch).backend == "flash3"
    assert len(watch.measured) == 12
    (tmp_path / "not a folder").write_text("")
    nowhere = run_of(tmp_path / "not a folder")
    assert choose_run_attention(nowhere, SINGLE, H100, watch).backend == "flash3"


@pytest.mark.parametrize(
    "changes, hardware, backend",
    [
        ({}, CPU, "auto"),
        ({}, A100, "auto"),  # FlashAttention-2 alone
        ({"dtype": "float32"}, H100, "auto"),
        ({"model": {"model_type": "bloom"}}, H100, "auto"),  # blocks alone
        ({"deterministic": True}, H100, "auto"),
        ({"dropout": 0.1}, H100, "auto"),
        ({"attention": "flash"}, H100, "flash"),
        ({"attention": "cudnn", "dropout": 0.1}, H100, "cudnn"),
    ],
    ids=str,
)
def test_what_is_not_timed(changes, hardware, backend, tmp_path, installed):
    if "model" in changes:
        fields = dict(model_type="bloom", vocab_size=64, hidden_size=64, n_head=4, n_layer=1)
        run = replace(run_of(tmp_path), model=ModelConfig(fields))
    else:
        run = run_of(tmp_path, **changes)
    watch = Stopwatch()
    assert choose_run_attention(run, SINGLE, hardware, watch) == AttentionChoice(backend)
    assert not watch.measured and not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    "changes, hardware, reason",
    [
        ({"attention": "flash3"}, H100, "No module named 'flash_attn_interface'"),
        ({"attention": "flash3"}, A100, "needs a GPU of compute capability 9.x"),
        ({"attention": "flash"}, CPU, "8.x or later (CPU)"),
        ({"attention": "cudnn", "deterministic": True}, H100, "has no deterministic backward"),
    ],
    ids=str,
)
def test_a_named_backend_that_cannot_is_refused_before_a_model_is_built(
    changes, hardware, reason, tmp_path
):
    """As what a rank finds unusable: one line, and exit code 2 (training/worker.py)."""
    with pytest.raises(Unusable, match=f"^train.attention {changes['attention']}: ") as raised:
        choose_run_attention(run_of(tmp_path, **changes), SINGLE, hardware, Stopwatch())
    assert reason in str(raised.value) and str(raised.value).endswith("--train.attention auto")


def test_a_backend_that_does_not_load_is_left_out(tmp_path, installed):
    """The measurement of flash3 fails as it does where its module is broken. The times of the
    others are remembered.
    """
    watch = Stopwatch()

    def measure(backend, run, mesh):
        if backend == "flash3":
            operators.activate_attention(backend)
        return watch(backend, run, mesh)

    for _ in range(2):
        choice = choose_run_attention(run_of(tmp_path), SINGLE, H100, measure)
        assert choice == AttentionChoice("cudnn", (("cudnn", 2.0), ("flash", 3.0)))
    assert watch.measured == ["cudnn", "flash"]


def test_flash3_without_its_module_is_refused():
    with pytest.raises(ValueError, match=r"^train.attention flash3: .*No module named 'flash_attn"):
        operators.activate_attention("flash3")
    operators.activate_attention("cudnn")
    assert attention.current_flash_attention_impl() is None


def test_flash3_is_active_while_it_is_timed_alone(monkeypatch):
    """By torch's own registry, in which a stand-in registers nothing."""

    class Handle:
        removed = 0

        def remove(self):
            Handle.removed += 1

    monkeypatch.setitem(
        attention._registry._FLASH_ATTENTION_IMPLS, operators.FLASH3, lambda: Handle()
    )
    for backend in ("flash", "flash3"):
        with operators.attention_activated(backend):
            active = attention.current_flash_attention_impl()
            assert active == ("FA3" if backend == "flash3" else None)
    assert attention.current_flash_attention_impl() is None and Handle.removed == 1
    operators.activate_attention("flash3")
    operators.activate_attention("flash3")  # once
    with operators.attention_activated("flash3"):
        pass
    assert attention.current_flash_attention_impl() == "FA3" and Handle.removed == 1
    attention.restore_flash_attention_impl()


SHAPES = {  # cp, its kind, documents, key-value heads, tp -> q, k of each call
    "whole": (1, "ring", False, 1, {((2, 32, 4, 16), (2, 32, 2, 16))}),
    "tp 2": (1, "ring", False, 2, {((2, 32, 2, 16), (2, 32, 1, 16))}),
    "documents": (1, "ring", True, 1, {((2, 32, 4, 16), (2, 32, 2, 16))}),
    "gather": (
        *(2, "gather", False, 1),
        {((2, 8, 4, 16), (2, 8, 2, 16)), ((2, 8, 4, 16), (2, 32, 2, 16))},
    ),
    "ring": (2, "ring", False, 1, {((2, 8, 4, 16), (2, 8, 2, 16))}),
    "ring of documents": (2, "ring", True, 1, {((2, 8, 4, 16), (2, 8, 2, 16))}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_runs_own_shape_is_timed(name, tmp_path, monkeypatch):
    cp, kind, mask, tp, shapes = SHAPES[name]
    run = run_of(tmp_path, layout=Layout(dp=1, cp=cp, tp=tp, context=kind), mask=mask)
    mesh = replace(SINGLE, cp=Axis("cp", cp, cp - 1), tp=Axis("tp", tp, 0))
    seen, backward = [], []

    def time_once(work, device):
        work()
        return 1.5

    def record(function, calls):
        def recorded(q, k, *rest, **options):
            calls.append((tuple(q.shape), tuple(k.shape)))
            return function(q, k, *rest, **options)

        return recorded

    monkeypatch.setattr(attention_timing, "time_call", time_once)
    backend = BACKENDS["flash"]
    monkeypatch.setattr(backend, "attention", record(backend.attention, seen))
    monkeypatch.setattr(backend, "partial", record(backend.partial, seen))
    monkeypatch.setattr(backend, "partial_backward", record(backend.partial_backward, backward))
    with flash_kernel.on_cpu() as calls:
        assert attention_timing.measure_attention("flash", run, mesh) == 3.0  # two equal layers
    assert {*seen} == shapes and len(backward) == (len(seen) if name.startswith("ring") else 0)
    assert ("varlen" in calls) == mask
    # zigzag of two ranks: the first and the last of four chunks see 1 + 4 of them
    assert len(seen) == {"ring": 5, "ring of documents": 5, "gather": 2}.get(name, 1)


def test_documents_are_timed_as_documents(tmp_path):
    with flash_kernel.on_cpu() as calls:
        attention_timing.measure_attention("cudnn", run_of(tmp_path, mask=True), SINGLE)
    assert {*calls} == {"varlen"}
    with flash_kernel.on_cpu() as calls:
        attention_timing.measure_attention("cudnn", run_of(tmp_path), SINGLE)
    assert {*calls} == {"cudnn"}


def test_layers_of_a_kind_are_timed_once_and_counted(tmp_path):
    fields = dict(
        model_type="gemma3_text",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
    )
    shapes = attention_timing.layer_shapes(ModelConfig(fields).spec, 2)
    assert sorted((s.window or 0, count) for s, count in shapes.items()) == [(0, 1), (8, 5)]
    assert {s[:4] for s in shapes} == {(2, 1, 16, 16)}


def test_the_first_calls_do_not_count():
    clock = iter([0.0, 9.0, 9.0, 18.0, *(t for s in (5, 1, 4, 2, 3) for t in (20.0, 20.0 + s))])
    calls = []
    median = time_call(lambda: calls.append(1), torch.device("cpu"), lambda: next(clock))
    assert median == 3000.0 and len(calls) == 7


def choose_on_ranks(cache):
    """The second rank is faster with another backend, but is not asked."""
    rank = torch.distributed.get_rank()

    def measure(backend, run, mesh):
        assert rank == 0, "the first rank alone measures"
        return MILLISECONDS[backend]

    mesh = Layout(dp=2).mesh(torch.device("cpu"))
    choice = choose_run_attention(run_of(cache / str(rank)), mesh, H100, measure)
    gathered = [None, None]
    torch.distributed.all_gather_object(gathered, choice)
    return gathered


@pytest.mark.spawn
def test_all_ranks_take_the_choice_of_the_first(tmp_path):
    first, second = run_spawned(2, choose_on_ranks, tmp_path)
    assert first == second == AttentionChoice("cudnn", (("cudnn", 2.0), ("flash", 3.0)))
