"""Every stage in miniature on the CPU, in this process; the report made of what it finds; and that
a comparison sees what is wrong.
"""

import importlib
import inspect
import math
import os
import time
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import clock, compare, house, packages, report, roofline, sections, shapes
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.case import Context, Record, plain
from benchmarks.gpu.results import NAME, Results
from benchmarks.gpu.stages import GROUPS, STAGES, chosen
from benchmarks.gpu.worker import START, run_stage
from dolmen.core import collectives, transfers
from dolmen.core.mesh import Axis
from dolmen.model.count import activation_bytes_per_layer, parameters, training_flops_per_token
from dolmen.model.layout import Layout
from dolmen.model.training import Training
from dolmen.ops import kernels
from dolmen.recipes import RECIPES

TINY = Context("cpu", "tiny")
# One of each kind of case; the others are of the full tier.
SHORT = {
    "device": ("facts", "copy", "matmul bf16"),
    "families": ("mixtral",),
    "golden": ("llama float32", "bfloat16-mixtral bfloat16"),
    "training": (),
    "ops": (
        "product fp32",
        "attention by blocks, ring bf16",
        "rms_norm fp32",
        "rms_norm bf16",
        "cross_entropy fp32",
        "AdamW",
    ),
    "fp8": ("fp8-rowwise",),
    "throughput": ("llama-1b, in turns", "llama-1b, floor", "llama-8b, whole, bf16 at rest"),
    "profile": ("llama-1b",),
    "memory": ("recompute selective, ZeRO 1",),
    "compiling": ("experts as qwen3-moe",),
    "generation": ("same tokens, fp32", "bf16, 1 at once"),
    "nccl": ("start", "collectives", "to itself"),
    "ranks": (),
}
MODULES = {stage.name: stage.module for stage in STAGES}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    return Results.new(
        tmp_path_factory.mktemp("gpu"),
        options={"device": "cpu", "shape": "tiny", "minutes": 1},
        machine={"python": "3", "system": "here", "commit": "abc", "packages": {}, "missing": []},
    )


def names() -> list:
    out = []
    for stage, module in MODULES.items():
        for case in importlib.import_module(module).cases(TINY):
            marks = [] if case.name in SHORT[stage] else [pytest.mark.full]
            marks += [pytest.mark.spawn] if stage in ("training", "ranks") else []
            out.append(pytest.param(stage, case.name, id=f"{stage}, {case.name}", marks=marks))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("stage, name", names())
def test_a_case_in_miniature(stage, name, results):
    """It runs, its checks hold, and what it leaves is JSON of the schema."""
    cases = list(importlib.import_module(MODULES[stage]).cases(TINY))
    run_stage(results, stage, cases, TINY, time.time() + 600, only=name)
    case = results.case(stage, name)
    assert case["status"] == "ok", case["error"] or case["checks"]
    assert case["values"] or case["checks"]
    assert Results.read(results.file).content == plain(results.content)


def test_norms_are_those_that_the_hardware_has(monkeypatch):
    device = torch.device("cpu")
    assert house.norms(device, torch.float32) == ["passes"]
    monkeypatch.setattr(kernels.Hardware, "from_device", lambda device: kernels.H100)
    assert house.norms(device, torch.bfloat16) == ["passes", "fused"]


def test_nccl_is_asked_for_each_collective():
    """What dolmen.core.collectives and transfers have in public, by one case or the other."""
    public = {
        name
        for module in (collectives, transfers)
        for name, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__ and name[0] != "_"
    }
    nccl = importlib.import_module(MODULES["nccl"])
    assert set(nccl.COVERED) == public - {"local_part", "tree_sum"}, "neither sends"
    requested = set()
    for called in nccl.COVERED.values():
        requested |= set(called)
    axis = Axis("made")
    assert requested == {*nccl.calls(axis), *nccl.to_itself_calls(axis)}


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_what_was_sent_to_itself_must_arrive(factor, monkeypatch):
    """With sends that arrive, as they do over NCCL: right, and wrong."""
    under_way = []

    def send(x, **_):
        under_way.append(factor * x)
        return Mock(spec=dist.Work)

    def receive(into, **_):
        into.copy_(under_way.pop())
        return Mock(spec=dist.Work)

    monkeypatch.setattr(dist, "isend", send)
    monkeypatch.setattr(dist, "irecv", receive)
    monkeypatch.setattr(dist, "P2POp", lambda op, x, **_: (op, x))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: [op(x) for op, x in ops])
    record = Record()
    importlib.import_module(MODULES["nccl"]).to_itself(TINY, record)
    assert [c["what"] for c in record.checks] == ["rotate", "send and receive"]
    assert record.ok == (factor == 1.0) and set(record.values.values()) == {"arrived"}


def test_what_stages_start_dies_with_them(monkeypatch):
    """The ranks, and the command."""
    ranks, training = (importlib.import_module(MODULES[n]) for n in ("ranks", "training"))
    called = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(ranks.children, "die_with", called)
    monkeypatch.setattr(ranks.torch, "set_num_threads", Mock(side_effect=AssertionError("late")))
    with pytest.raises(InterruptedError):
        ranks._rank("tp 2", "cpu", 0, "", 123)
    called.assert_called_once_with(123)
    monkeypatch.setattr(training.subprocess, "run", called)
    with pytest.raises(InterruptedError):
        training.command(TINY, Record())
    assert called.call_args.args[0][1:4] == ["-m", "benchmarks.gpu.children", str(os.getpid())]


def test_all_that_was_named_is_there():
    for stage, short in SHORT.items():
        known = {c.name for c in importlib.import_module(MODULES[stage]).cases(TINY)}
        assert set(short) <= known, stage
    assert set(SHORT) == set(MODULES) == set(report.TITLES) == set(report.TOLD)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_estimates_of_a_stage_are_those_of_its_cases(stage):
    cases = list(importlib.import_module(stage.module).cases(Context("cpu", "full")))
    assert len({case.name for case in cases}) == len(cases)
    whole = sum(c.seconds for c in cases) + START * (1 + sum(c.fresh for c in cases))
    assert stage.seconds == pytest.approx(whole, rel=0.1)


def test_25_minutes_are_enough():
    """With a twentieth to spare, as the estimates are of a machine that nobody has seen."""
    assert sum(stage.seconds for stage in STAGES) < 0.95 * 25 * 60


def test_the_plan_names_each_case(capsys):
    assert main(["--plan", "--stages", "throughput", "nccl"]) == 0
    output = capsys.readouterr().out
    assert "523 s  of 1500" in output and "nccl: 4 cases, 1 processes of 10 s to start" in output
    assert "   130 s  llama-1b, in turns\n" in output


def test_stages_are_chosen_by_name_and_group():
    assert [s.name for s in chosen(["ops", "device"], None)] == ["device", "ops"]
    assert {s.name for s in chosen(["smoke"], ["ranks"])} == {*GROUPS["smoke"]} - {"ranks"}
    assert chosen(None, None) == list(STAGES)
    with pytest.raises(ValueError, match="opps is no stage"):
        chosen(["opps"], None)


def test_a_comparison_sees_what_is_not_equal():
    x = torch.randn(50, dtype=torch.float64)
    nan = x.clone()
    nan[3] = math.nan
    assert compare.relative(x, x) == 0.0
    assert compare.relative(1.5 * x, x) == pytest.approx(0.5)
    assert math.isnan(compare.relative(nan, x)) and math.isnan(compare.relative(x / 0, x))
    assert compare.relative(x[:3], x) == compare.relative(x, 0 * x) == math.inf
    assert compare.relative(0 * x, 0 * x) == 0.0
    assert compare.unequal(x, x) == 0.0 and compare.unequal(x + (x == x[7]), x) == 1 / 50
    assert compare.unequal(nan, nan) == 1 / 50
    assert compare.unequal(x.float(), x) == compare.unequal(x[:3], x) == math.inf
    assert compare.apart([1.0, 2.0], [1.0, 2.0]) == 0.0
    assert compare.apart([1.0, 3.0], [1.0, 2.0]) == 0.5
    assert compare.apart([1.0], [1.0, 2.0]) == math.inf
    assert math.isnan(compare.apart([math.nan], [1.0]))


def test_a_check_holds_its_bound_and_nan_never_passes():
    record = Record()
    assert record.check("a", 1.0, 1.0, "") and record.ok
    for value in (1.1, math.nan, math.inf):
        fresh = Record()
        assert not fresh.check("b", value, 1.0, "") and not fresh.ok
    assert not record.check("c", math.nan, 1.0, "") and not record.ok
    assert plain({"a": [math.nan, (1, math.inf)]}) == {"a": ["nan", [1, "inf"]]}


def test_time_is_the_median():
    device = torch.device("cpu")
    assert clock.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "least": 1.0, "most": 3.0, "times": 3}
    calls = []
    assert clock.timed(lambda: calls.append(1), device, 5, 2)["times"] == 5 and len(calls) == 7
    assert 0.002 <= clock.rate(lambda: time.sleep(0.002), device, 3, 3) < 0.1  # of one call


def test_the_floor_is_the_formulas():
    """Products and attention are all that model/count.py counts."""
    c = shapes.of(Context("cpu"), "llama-1b", sliding_window=1000).spec
    found = roofline.parts(c, 2, 4096, flops=1e15, bandwidth=3e12)
    whole = 2 * 4096 * training_flops_per_token(c, 4096) / 1e15
    assert found["products"] + found["attention"] == pytest.approx(whole)
    keys = (1000 * 1001 / 2 + 3096 * 1000) / 4096
    assert found["attention"] == pytest.approx(2 * 4096 * 12 * 16 * 2048 * keys / 1e15)
    assert found["optimizer"] == pytest.approx(52 * parameters(c) / 3e12)
    assert found["loss"] == pytest.approx(8 * 8192 * 128256 / 3e12)


def test_layers_that_fit_grow_with_memory():
    model = RECIPES["llama-8b"]().model
    few, more, all_ = (shapes.layers_that_fit(model, 4096, m << 30) for m in (40, 79, 400))
    assert 1 <= few < more < all_ == 32
    own = parameters(shapes.with_layers(model, more).spec) * shapes.BYTES_PER_PARAMETER
    assert own < 79 << 30


def test_memory_is_held_to_its_closed_forms():
    memory = importlib.import_module(MODULES["memory"])
    ratios = {"states": 1.0, "activations": 1.0, "gradients": 1.0}
    for name, off in (("states", 1.02), ("activations", 1.1), ("gradients", 0.9), ("", 1)):
        record = Record({"ratios": ratios | ({name: off} if name else {})})
        memory._hold(record, False)
        assert record.ok == (name == "")
    record = Record({"ratios": ratios | {"activations": 0.5}})
    memory._hold(record, True)
    assert record.ok


@pytest.mark.parametrize("kind", ["none", "full"])
def test_memory_of_a_layer_is_half_of_what_two_make(kind, monkeypatch):
    """Of counters that follow the closed forms, beside what does not grow with layers."""
    memory = importlib.import_module(MODULES["memory"])
    shape = shapes.of(Context("cpu"), "llama-1b")
    layout = Layout(recompute=kind)
    kept = activation_bytes_per_layer(shape.spec, 1, 4096, recompute=kind)
    counts = [parameters(shape.with_num_layers(n).spec) for n in (2, 4)]
    own = (counts[1] - counts[0]) // 2

    def step(mesh, shape, layout, compile):
        n = shape.spec.layers
        reported = {"between steps": 12 * own, "after forward": 2 * own + kept}
        reported |= {"after backward": 4 * own, "peak": 6 * own + kept}
        return {name: 1e9 + n * count for name, count in reported.items()}

    monkeypatch.setattr(memory, "_step", step)
    record = Record()
    memory.memory(TINY, shape, layout, False, record)
    assert record.ok and len(record.checks) == 3
    assert record.values["ratios"] == pytest.approx({"states": 1, "activations": 1, "gradients": 1})
    assert record.values["per_layer"]["peak"] == 6 * own + kept


def test_a_whole_model_is_told_by_its_layers():
    def case(seconds: float) -> dict:
        step = {"dolmen": {"median": seconds, "tokens_per_second": 1.0}}
        return {"values": step, "status": "ok"}

    own = {f"llama-8b, {n} layers, dolmen, 1 at once": case(0.05 + 0.02 * n) for n in (11, 5)}
    reported = sections.extrapolated(own | {"llama-8b, 11 layers, dolmen, 2 at once": case(9.0)})
    assert "takes 20.00 ms" in reported and "all 32 would take 690 ms" in reported
    assert sections.extrapolated({}) == ""


def test_recompilations_are_counted():
    compiling = importlib.import_module(MODULES["compiling"])
    with compiling.recompilations() as reasons:
        run = torch.compile(lambda x, n: x * n, backend="eager", dynamic=False)
        for n in (2, 3, 4):
            run(torch.ones(3), n)
    torch._dynamo.reset()
    assert len(reasons) == 2 and "n" in reasons[0]


def test_the_report_tells_every_stage_and_what_failed(results, tmp_path):
    """Of what the cases above left, with some of a GPU's besides."""
    content = plain(results.content)
    cases = {(c["stage"], c["name"]): c for c in content["cases"]}
    if len({stage for stage, _ in cases}) < len(STAGES) - 2:
        pytest.skip("the cases were not run")
    layer = {"between steps": 2**20, "after forward": 3.0, "after backward": 4.0, "peak": 5.0}
    ratios = {"states": 1.001, "activations": 0.987, "gradients": 1.0}
    values = {"per_layer": layer, "activations": 2.0**21, "ratios": ratios}
    memory = cases["memory", "recompute selective, ZeRO 1"]
    ops = cases["ops", "AdamW"]
    other = Results.new(tmp_path, options=content["options"], machine=content["machine"])
    other.content["cases"] = [
        memory | {"values": values},
        ops | {"status": "wrong", "checks": [ops["checks"][0] | {"value": "nan", "ok": False}]},
        ops | {"name": "hangs", "status": "late", "error": "over 5 s\nthe end | of the log"},
        ops | {"name": "not begun", "status": "left", "error": ""},
    ]
    other.save()
    first = Results(results.file, content)
    text = report.section([first, Results.read(tmp_path / NAME)])
    for title in (t for stage, t in report.TITLES.items() if SHORT[stage]):
        assert f"### {title}\n" in text, title
    for reported in (
        "0.987",
        "ops/hangs | late | the end / of the log",
        "AdamW | wrong | 1 of 1",
        "nan",
    ):
        assert reported in text, reported
    assert "In miniature" in text and "1 late, 1 left" in text
    page = report.PAGE.read_text()
    new = report.replaced(page, text)
    assert report.replaced(new, "x") == report.replaced(page, "x")
    assert report.replaced(report.replaced(new, "x"), text) == new
    for bad in ("", page + report.BEGIN, page.replace(report.END, "")):
        with pytest.raises(ValueError, match="once each"):
            report.replaced(bad, text)


def test_the_report_is_a_command(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "gpu.json" in capsys.readouterr().err


def test_wheels_are_installed_for_what_is_missing_alone(tmp_path, monkeypatch):
    for name in ("pydantic-1.0-py3-none-any.whl", "pydantic_core-0.1-py3-none-any.whl"):
        (tmp_path / name).touch()
    assert set(packages.wheels(tmp_path)) == {"pydantic", "pydantic-core"}
    assert {"torch", "pydantic", "datasets", "zstandard"} <= set(packages.required())
    assert packages.missing() == [] and packages.install(tmp_path) is None
    calls = []

    def run(words, **_):
        calls.append(words)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(packages.subprocess, "run", run)
    known = packages.version
    monkeypatch.setattr(packages, "version", lambda n: None if n == "pydantic" else known(n))
    site = packages.install(tmp_path)
    site.rmdir()
    assert [w for w in calls[0] if w.endswith(".whl")] == [
        str(tmp_path / "pydantic-1.0-py3-none-any.whl")
    ]
    assert "--no-index" in calls[0] and "--no-deps" in calls[0]


def test_a_shape_in_miniature_keeps_its_structure():
    qwen = shapes.of(TINY, "qwen3-30b-a3b").spec
    assert qwen.experts == 4 and qwen.blocks[0].mixer.qk_norm and qwen.hidden_size == 64
    window = shapes.of(TINY, "llama-1b", sliding_window=1024).spec
    assert window.blocks[0].mixer.window == 8
    full = shapes.of(Context("cpu"), "llama-8b")
    assert full.spec.layers == 32 and full.training == Training()
