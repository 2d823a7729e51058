"""--log.profile STEP: what it leaves, what it refuses, and that it changes nothing else."""

import errno
import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import tinyrun
import torch
from tinyrun import dolmen, losses

from dolmen.core import profiling
from dolmen.core.mesh import SINGLE, Axis
from dolmen.training import folder, profile, profile_table
from dolmen.training import run as train_run
from dolmen.training.checks import warn

material, one_thread = tinyrun.material, tinyrun.one_thread


@pytest.fixture(scope="module")
def done(material, tmp_path_factory):
    """Folder and words of a run of four steps, of which the third was profiled."""
    out = tmp_path_factory.mktemp("profile") / "run"
    words = ("train", material.file, "--train.steps", 4, "--log.profile", 3)
    words += ("--layout.recompute", "full", "--checkpoint.every", 2, "--checkpoint.keep", 0)
    result = dolmen(*words, "--out", out)
    assert result.code == 0, result.err
    return out, result.out


def test_what_it_leaves(done):
    out, _ = done
    names = {path.name for path in (out / "profile" / "step-3").iterdir()}
    assert names == {"trace-rank-0.json.gz", "table.txt", "table.json"}
    assert "profile" in (out / folder.LIST).read_text().split() and not folder.foreign_entries(out)


def test_the_trace_is_of_one_step_and_its_events_are_nested(done):
    out, _ = done
    written = json.loads(
        gzip.decompress((out / "profile/step-3/trace-rank-0.json.gz").read_bytes())
    )
    spans = [e for e in written["traceEvents"] if e["ph"] == "X"]
    (step,) = [e for e in spans if e["name"] == profile_table.STEP]
    inside = [e for e in spans if e["tid"] == step["tid"] and e["ts"] >= step["ts"]]
    open_ = []
    for e in sorted(inside, key=lambda e: (e["ts"], -e["dur"])):
        while open_ and open_[-1] <= e["ts"] + 0.002:  # a trace has nanoseconds, rounded
            open_.pop()
        end = e["ts"] + e["dur"]
        assert not open_ or end <= open_[-1] + 0.002, e
        open_.append(end)
    names = {e["name"] for e in spans}
    kinds = {"norm", "attention", "loss", "recompute", "optimizer norm", "optimizer update"}
    assert {f"{profiling.PREFIX}{kind}" for kind in kinds} <= names


def test_the_table_adds_up_to_the_step_and_is_told(done):
    out, metrics = done
    table = json.loads((out / "profile/step-3/table.json").read_text())
    (rank,) = table["ranks"]
    assert (table["step"], rank["rank"], rank["stage"]) == (3, 0, 0)
    assert sum(row["seconds"] for row in rank["rows"]) == pytest.approx(rank["seconds"], rel=1e-9)
    assert table["tokens_per_second"] == pytest.approx(64 / rank["seconds"], rel=1e-12)
    assert 0 < table["mfu_measured"] < 1
    found = {row["kind"]: row for row in rank["rows"]}
    kinds = (
        profile_table.PRODUCTS,
        profile_table.ATTENTION,
        profile_table.NORMS,
        profile_table.LOSS,
    )
    assert all(
        found[kind]["seconds"] > 0 for kind in (*kinds, profile_table.OPTIMIZER, profile_table.IDLE)
    )
    # q, k, v, o, gate, up, down, twice forward and twice backward, less what recomputation may
    # stop before; the head three times
    assert 2 * 7 * 4 - 2 * 3 <= found[profile_table.PRODUCTS]["calls"] <= 2 * 7 * 4 + 3
    assert 0 < rank["recomputed"] < rank["seconds"]
    text = (out / "profile/step-3/table.txt").read_text()
    kinds, operators = text.split("\n\n", 1)
    assert all(line in metrics for line in kinds.splitlines()) and "matrix products" in kinds
    assert "aten::mm" in operators and "Self CPU" in operators


def test_it_changes_no_number(done, material, tmp_path):
    words = ("train", material.file, "--train.steps", 4, "--layout.recompute", "full")
    assert dolmen(*words, "--out", tmp_path / "plain").code == 0
    assert losses(tmp_path / "plain") == losses(done[0])
    assert not (tmp_path / "plain" / "profile").exists()


def test_overwrite_deletes_it_and_nothing_else(done):
    """Last, as it takes the run away."""
    out, _ = done
    (out / "profile" / "mine.txt").write_text("mine")
    with pytest.raises(folder.Unusable, match="also contains profile/mine.txt"):
        folder.clear_run(out)
    (out / "profile" / "mine.txt").unlink()
    folder.clear_run(out)
    assert not list(out.iterdir())


def test_somebody_elses_folder_is_in_the_way_only_if_it_would_be_written_to(tmp_path):
    (tmp_path / "profile").mkdir()
    folder.check_names_free(tmp_path)
    with pytest.raises(folder.Unusable, match="would overwrite profile"):
        folder.check_names_free(tmp_path, "profile")


@pytest.mark.parametrize("number", [0, -3])
def test_steps_are_counted_from_1(material, number):
    with pytest.raises(ValueError, match=f"log.profile is {number}: it must be at least 1"):
        material.config(log={"profile": number})


def test_a_step_that_never_comes_is_refused(material, tmp_path):
    run = material.config(log={"profile": 7})
    with pytest.raises(ValueError, match=r"log.profile \(7\) exceeds the run's 6 steps: use --log"):
        tinyrun.check_run(run, None)
    tinyrun.check_run(material.config(log={"profile": 6}), None)
    # an epoch is 172 batches of 4
    words = ("train", material.file, "--train.steps", "None", "--log.profile", 173)
    result = dolmen(*words, "--out", tmp_path / "run")
    assert result.code == 2 and "(173) exceeds the run's 172 steps" in result.words
    assert not (tmp_path / "run").exists()


def test_a_run_that_goes_on_after_it_says_so(material):
    run = material.config(log={"profile": 4})
    assert warn.profile_out_of_range(run, 3, 6) is None
    assert warn.profile_out_of_range(run, 4, 6) == (
        "log.profile (4) is not profiled: the run is from step 5 to 6; set --log.profile 6"
    )
    assert "from step 1 to 3; set --log.profile 2" in warn.profile_out_of_range(run, 0, 3)


def test_the_first_step_and_one_that_fails(tmp_path):
    """Without a step before it; and after an exception torch's profiler is free again."""
    made = profile.Profile(1, SINGLE, tmp_path)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), made.around(1):
            _ = 1 / 0
        made = profile.Profile(1, SINGLE, tmp_path)
    with made.around(1):
        torch.ones(3).add(1)
    assert made.write(lambda seconds: {})[0].startswith("step 1, rank 0, stage 0:")


def test_the_other_ranks_of_a_stage_write_nothing(tmp_path, monkeypatch):
    mesh = replace(SINGLE, dp=Axis("dp", 2, 1), world=Axis("world", 2, 1))
    messages = []
    monkeypatch.setattr(
        profile.consensus, "gather_objects", lambda mine: messages.append(mine) or [mine]
    )
    monkeypatch.setattr(profile, "_least", lambda took, mesh: {})
    made = profile.Profile(1, mesh, tmp_path)
    with made.around(1):
        torch.ones(3).add(1)
    assert (
        made.write(lambda seconds: {}) == []
        and messages == [(None, 1, [])]
        and not list(tmp_path.iterdir())
    )


def recorded(out, mesh=SINGLE) -> profile.Profile:
    made = profile.Profile(1, mesh, out)
    with made.around(1):
        torch.ones(3).add(1)
    return made


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there")


NOT = "the profile of step 1 is not written on rank 0: "


def test_a_profile_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    """And what it found, where that is known."""
    with monkeypatch.context() as patch:
        patch.setattr(profile.write, "replace", full_disk)
        first, *_, last = recorded(tmp_path).write(lambda seconds: {})
    assert first.startswith("step 1, rank 0") and last == f"{NOT}there: No space left on device"
    with monkeypatch.context() as patch:
        patch.setattr(profile.tempfile, "TemporaryDirectory", full_disk)
        first, *_, last = recorded(tmp_path).write(lambda seconds: {})
    assert first.startswith("step 1, rank 0") and last == f"{NOT}there: No space left on device"
    with monkeypatch.context() as patch:
        patch.setattr(profile.Path, "read_bytes", lambda self: b'{"traceEvents": [')
        *_, line = recorded(tmp_path).write(lambda seconds: {})
    assert line.startswith(f"{NOT}the trace in ") and line.endswith(": it is truncated")
    assert not list(tmp_path.rglob("trace*"))


def test_no_rank_waits_for_one_that_cannot_write(tmp_path, monkeypatch):
    """It calls the same collectives; what failed on another is told by the first."""
    mesh = replace(SINGLE, dp=Axis("dp", 2), world=Axis("world", 2))
    calls, other = [], (None, 1, ["there: full"])
    monkeypatch.setattr(profile, "_least", lambda took, mesh: calls.append("least") or {})
    monkeypatch.setattr(
        profile.consensus, "gather_objects", lambda mine: calls.append("gathered") or [mine, other]
    )
    *_, line = recorded(tmp_path, mesh).write(lambda seconds: {})
    assert line == "the profile of step 1 is not written on rank 1: there: full"
    monkeypatch.setattr(profile.tempfile, "TemporaryDirectory", full_disk)
    *_, line = recorded(tmp_path, mesh).write(lambda seconds: {})
    assert line == f"{NOT}there: No space left on device (and on 1 other rank)"
    assert calls == ["least", "gathered"] * 2


@pytest.mark.parametrize("name", ["profile", "profile/step-1"])
def test_it_is_written_through_no_link(tmp_path, name):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(elsewhere)
    reported = recorded(run).write(lambda seconds: {})
    assert reported[-1] == f"{NOT}{run / name}: it is a link or a file, not a folder"
    (run / name).unlink()
    (run / name).write_text("mine")
    assert recorded(run).write(lambda seconds: {})[-1] == reported[-1]
    assert not list(elsewhere.iterdir()) and (run / name).read_text() == "mine"


def test_a_run_goes_on_without_its_profile(material, tmp_path, monkeypatch):
    """Its save comes in the same step."""
    monkeypatch.setattr(profile.write, "folder", full_disk)
    monkeypatch.setattr(train_run, "write_tokenizer", lambda *_: None)
    words = ("train", material.file, "--train.steps", 2, "--log.profile", 1)
    words += ("--train.hang-seconds", "None")
    result = dolmen(*words, "--checkpoint.every", 1, "--out", tmp_path / "run")
    assert result.code == 0, result.err
    assert NOT + "there: No space left on device" in " ".join(result.out.split())
    assert (tmp_path / "run/checkpoints/step-00000002").is_dir()


@pytest.mark.full
def test_each_stage_of_a_pipeline_has_its_trace(material, tmp_path):
    """Two processes; what their collectives waited for each other is told apart."""
    words = ("train", material.file, "--log.profile", 2, "--train.steps", 2)
    out = tmp_path / "pp"
    words += ("--layout.pp", 2, "--layout.dp", 1, "--train.microbatch-size", 1)
    assert (
        subprocess.run(
            [sys.executable, "-m", "dolmen", *map(str, words), "--out", str(out)],
            env=os.environ | {"PYTHONPATH": tinyrun.path_of()},
            capture_output=True,
        ).returncode
        == 0
    )
    names = {path.name for path in (out / "profile/step-2").iterdir()}
    assert {"trace-rank-0.json.gz", "trace-rank-1.json.gz"} <= names
    ranks = json.loads((out / "profile/step-2/table.json").read_text())["ranks"]
    assert [(rank["rank"], rank["stage"]) for rank in ranks] == [(0, 0), (1, 1)]
    for rank in ranks:
        found = {row["kind"]: row["seconds"] for row in rank["rows"]}
        assert found["collectives pp"] > 0 and found["collectives world"] >= 0
        assert sum(found.values()) == pytest.approx(rank["seconds"], rel=1e-9)


def test_a_run_that_ends_after_the_warm_up_leaves_the_profiler_free(tmp_path):
    made = profile.Profile(2, SINGLE, tmp_path)
    with made.around(1):
        pass
    recording = made.recording
    assert recording is not None and recording.started
    made.close()
    assert not recording.started


def test_it_is_of_use_without_a_run():
    with profile.record(torch.device("cpu")) as recording:
        torch.ones(8, 8) @ torch.ones(8, 8)
    (row,) = [row for row in recording.tabulate()[0].rows if row.kind == profile_table.PRODUCTS]
    assert row.calls == 1


def test_a_range_is_nothing_where_no_profile_records():
    entered = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.profiler, "record_function", entered.append)
        with profiling.record_range("attention"):
            pass
    assert entered == []


def test_a_range_is_nothing_to_the_compiler():
    """Neither a break of the graph nor a part of it."""

    def work(x):
        with profiling.record_range("attention"):
            return x.sin()

    graphs = []

    def backend(graph, inputs):
        graphs.append([node.op for node in graph.graph.nodes])
        return graph.forward

    with profile.record(torch.device("cpu")):
        torch.compile(work, backend=backend, fullgraph=True)(torch.ones(2))
    assert graphs == [["placeholder", "call_method", "output"]]
