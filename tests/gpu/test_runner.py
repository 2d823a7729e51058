"""The runner, with stages that die, hang and are killed: what was found before stays, and what
follows is run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from benchmarks.gpu import packages, runner
from benchmarks.gpu.__main__ import arguments, finish, held, main, opened, table
from benchmarks.gpu.results import LOG, NAME, Results
from benchmarks.gpu.runner import Runner, Stage, share

pytestmark = pytest.mark.spawn
HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from benchmarks.gpu import children
from benchmarks.gpu.case import Case
def told(record):
    record.tell(told=1, pid=os.getpid())
def raises(record):
    raise ValueError("no such thing")
def off(record):
    record.check("x", float("nan"), 1.0, "NaN never passes")
def sleeps(record):
    record.tell(told=1, pid=os.getpid())
    asleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = subprocess.Popen(children.dying(asleep), start_new_session=True)
    record.tell(child=child.pid)
    time.sleep(60)
def hangs(record):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    record.tell(told=1, child=child.pid)
    time.sleep(60)
def breaks(record):
    record.tell(told=1)
    time.sleep(0.5)
    Path(os.environ["HERE"]).write_text("[" * 200000)
    time.sleep(60)
def full(record):
    Path(os.environ["HERE"]).with_suffix(".part").symlink_to("/dev/full")
    record.tell(told=1)
def filled(record):
    def replace(*_):
        raise OSError(28, "No space left on device")
    os.replace = replace
    record.tell(told=1)
    record.tell(told=2)
def killed(record):
    record.tell(told=1)
    os.kill(os.getpid(), signal.SIGKILL)
def leaves(record):
    print("the last words", flush=True)
    os._exit(7)
"""
MACHINE = {"python": "3", "system": "here", "commit": None, "packages": {}}
FAKES = {
    "good": "[Case(f.__name__, 0, f) for f in (told, raises, off)] + [Case('b', 0, told)]",
    "hangs": "[Case('a', 0, told), Case('hangs', 0, hangs, most=2), Case('b', 0, told)]",
    "dies": "[Case('killed', 0, killed), Case('leaves', 0, leaves), Case('b', 0, told)]",
    "apart": "[Case('a', 0, told, fresh=True), Case('b', 0, told), Case('c', 0, told)]",
    "slow": "[Case('a', 0, told), Case('long', 0, sleeps), Case('later', 0, told)]",
    "breaks": "[Case('a', 0, told), Case('breaks', 0, breaks), Case('b', 0, told)]",
    "full": "[Case('a', 0, told), Case('full', 0, full), Case('b', 0, told)]",
    "filled": "[Case('filled', 0, filled, fresh=True), Case('b', 0, told)]",
    "large": "[Case('a', 0, told), Case('too long', 1000, told), Case('b', 0, told)]",
}


@pytest.fixture
def stages(tmp_path, monkeypatch):
    """stages(*names): fakes, whose processes import no torch."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name, cases in FAKES.items():
        (folder / f"{name}.py").write_text(f"{HEAD}\ndef cases(context):\n    return {cases}\n")
    (folder / "broken.py").write_text("import no_such_package\n")
    path = os.pathsep.join([str(packages.ROOT), str(folder)])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("HERE", str(tmp_path / "out" / NAME))
    monkeypatch.setattr(runner, "START", 0.2)
    monkeypatch.syspath_prepend(folder)
    return lambda *names: [Stage(name, 10, name) for name in names]


def run(folder: Path, stages: list[Stage], seconds: float = 60) -> Results:
    folder.mkdir(exist_ok=True)
    options = {"device": "cpu", "shape": "tiny"}
    here = Runner(Results.new(folder, options=options, machine=MACHINE), time.time() + seconds)
    here.run(stages)
    assert not stages or Results.read(folder / NAME).content == here.results.content
    return here.results


def statuses(results: Results, stage: str) -> dict[str, str]:
    return {case["name"]: case["status"] for case in results.of(stage)}


def alive(pid: int) -> bool:
    file = Path(f"/proc/{pid}/stat")
    return file.exists() and file.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_case_that_fails_is_told_and_the_next_is_run(tmp_path, stages, capsys):
    results = run(tmp_path / "out", stages("good"))
    expected = {"told": "ok", "raises": "failed", "off": "wrong", "b": "ok"}
    assert statuses(results, "good") == expected
    assert "ValueError: no such thing" in results.case("good", "raises")["error"]
    assert results.case("good", "off")["checks"][0]["value"] == "nan"
    assert results.case("good", "b")["values"]["told"] == 1
    assert finish(results, stages("good")) == 1
    output = capsys.readouterr().out
    assert (
        "2 ok, 1 wrong, 1 failed" in output and "no such thing" in output and "x is nan" in output
    )


def test_what_hangs_is_ended_with_all_that_it_started(tmp_path, stages):
    results = run(tmp_path / "out", stages("hangs", "good"))
    assert statuses(results, "hangs") == {"a": "ok", "hangs": "late", "b": "ok"}
    case = results.case("hangs", "hangs")
    assert case["values"]["told"] == 1 and case["seconds"] > 2
    assert not alive(case["values"]["child"])
    assert statuses(results, "good")["b"] == "ok"


def test_a_process_that_dies_takes_its_case_alone(tmp_path, stages):
    results = run(tmp_path / "out", stages("dies"))
    assert statuses(results, "dies") == {"killed": "died", "leaves": "died", "b": "ok"}
    assert "SIGKILL" in results.case("dies", "killed")["error"]
    assert results.case("dies", "killed")["values"] == {"told": 1}
    left = results.case("dies", "leaves")["error"]
    assert "exit code 7" in left and "the last words" in left
    assert finish(results, stages("dies")) == 1


def test_a_stage_that_cannot_begin_is_told_and_the_next_is_run(tmp_path, stages):
    results = run(tmp_path / "out", stages("broken", "good"))
    row = results.content["stages"]["broken"]
    assert row["state"] == "died" and "no_such_package" in row["error"]
    assert statuses(results, "good")["b"] == "ok"
    assert "died: no case" in table(results, stages("broken"))
    assert finish(run(tmp_path / "alone", stages("broken")), stages("broken")) == 1


def test_a_heavy_case_leaves_its_process_to_nobody(tmp_path, stages):
    results = run(tmp_path / "out", stages("apart"))
    first, second, third = (results.case("apart", n)["values"]["pid"] for n in "abc")
    assert first != second and second == third


def test_time_that_is_up_cuts_and_what_was_done_is_not_run_again(tmp_path, stages, monkeypatch):
    results = run(tmp_path / "out", stages("slow", "good"), seconds=5)
    assert statuses(results, "slow") == {"a": "ok", "long": "cut", "later": "left"}
    assert results.content["stages"]["good"]["state"] == "left"
    first = results.case("slow", "a")["values"]["pid"]
    again = Runner(Results.read(results.file), time.time() + 60)
    again.results.case("slow", "long")["status"] = "ok"  # it would sleep again
    again.run(stages("slow", "good"))
    assert statuses(again.results, "slow") == {"a": "ok", "long": "ok", "later": "ok"}
    assert again.results.case("slow", "a")["values"]["pid"] == first
    assert statuses(again.results, "good")["b"] == "ok"
    third = Runner(Results.read(results.file), time.time() + 60)
    monkeypatch.setattr(Runner, "_process", None)  # all is there: no process is started
    third.run(stages("slow", "good"))
    assert third.results.content["stages"]["slow"]["state"] == "done"


def test_what_does_not_fit_is_left_and_smaller_cases_are_run(tmp_path, stages):
    results = run(tmp_path / "out", stages("large"))
    assert statuses(results, "large") == {"a": "ok", "too long": "left", "b": "ok"}
    assert finish(results, stages("large")) == 0


def test_shares():
    """As the estimates are, and at least half more; never more than there is."""
    stages = [Stage("a", 100, ""), Stage("b", 300, "")]
    assert share(stages[0], stages, 1000) == 250
    assert share(stages[0], stages, 200) == 150
    assert share(stages[0], stages, 20) == 20
    assert share(stages[1], stages[1:], 750) == 750


def test_the_command(tmp_path, stages, monkeypatch):
    """Options, the exit code, --resume, and results that are not overwritten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.gpu.__main__.chosen", lambda *_: stages("hangs"))
    words = ["--device", "cpu", "--shape", "tiny", "--out", "out", "--minutes", "1"]
    assert main([*words, "--plan"]) == 0 and not Path("out").exists()
    assert main(words) == 1
    assert b"=== hangs" in (tmp_path / "out" / LOG).read_bytes()
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    before = json.loads((tmp_path / "out" / NAME).read_text())["cases"]
    assert main([*words, "--resume"]) == 1
    content = json.loads((tmp_path / "out" / NAME).read_text())
    assert content["cases"] == before
    monkeypatch.chdir(tmp_path)
    retried = opened(arguments([*words[:4], "--out", "b", "--resume", "out", "--retry"]))
    assert statuses(retried, "hangs") == {"a": "ok", "b": "ok"}
    with pytest.raises(ValueError, match="resume with the same"):
        opened(arguments(["--out", "c", "--resume", "out"]))


def test_two_runs_in_one_folder_are_kept_apart(tmp_path, stages, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.gpu.__main__.chosen", lambda *_: stages("good"))
    out = str(tmp_path / "out")
    words = ["--device", "cpu", "--shape", "tiny", "--out", out, "--minutes", "1"]
    for more in ([], ["--resume"]):
        with held(tmp_path / "out"):
            assert main([*words, *more]) == 2
        output = capsys.readouterr().err
        assert output.count("\n") == 1 and "out is in use by another run" in output
        assert not (tmp_path / "out" / NAME).exists()
    held_by = []
    monkeypatch.setattr(Runner, "run", lambda *_: held_by.append(main(words)))
    main(words)
    assert held_by == [2]  # for the life of the runner
    (tmp_path / "a file").touch()
    assert main([*words[:4], "--out", str(tmp_path / "a file")]) == 2


def test_a_broken_file_is_told_and_the_next_stage_is_run(tmp_path, stages):
    results = run(tmp_path / "out", stages("breaks", "good"))
    row = results.content["stages"]["breaks"]
    assert row["state"] == "broken" and "200,000 brackets" in row["error"]
    assert statuses(results, "breaks") == {"a": "ok", "breaks": "died", "b": "left"}
    assert results.case("breaks", "breaks")["values"] == {"told": 1}
    assert statuses(results, "good")["b"] == "ok"
    results.content["cases"] = []  # broken before its first case
    assert finish(results, stages("breaks", "good")) == 1


def test_a_full_disk_is_told_once_and_the_rest_is_run(tmp_path, stages, monkeypatch, capsys):
    results = run(tmp_path / "out", stages("full", "filled", "good"))
    assert statuses(results, "full") == {"a": "ok", "full": "ok", "b": "ok"}
    assert statuses(results, "filled") == {"filled": "died", "b": "ok"}
    assert statuses(results, "good")["b"] == "ok"
    log = (tmp_path / "out" / LOG).read_text()
    assert log.count("cannot be saved: [Errno 28]") == 2  # by each of the two
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "full")))
    results.save()
    results.save()
    output = capsys.readouterr().err
    assert output.count("cannot be saved") == 1 and results.unsaved
    monkeypatch.undo()
    results.save()
    assert not results.unsaved


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_runner_that_is_stopped_leaves_nothing_running(tmp_path, stages, how):
    code = (
        "import sys; from benchmarks.gpu import __main__ as m; from benchmarks.gpu.runner import "
        "Stage; m.chosen = lambda *_: [Stage('slow', 10, '')]; sys.exit(m.main(sys.argv[1:]))"
    )
    words = ["--device", "cpu", "--shape", "tiny", "--out", str(tmp_path / "out")]
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE)
    file, child = tmp_path / "out" / NAME, None
    end = time.monotonic() + 30
    while child is None and time.monotonic() < end:
        time.sleep(0.05)
        case = Results.read(file).case("slow", "long") if file.exists() else None
        child = case["values"].get("child") if case else None
    worker = case["values"]["pid"]
    process.send_signal(how)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == (143 if how == signal.SIGTERM else -how) and b"slow" in out
    while (alive(child) or alive(worker)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive(child) and not alive(worker)


def test_the_log_keeps_its_end(tmp_path):
    log = tmp_path / LOG
    log.write_bytes(b"a" * 100 + b"b" * 100)
    runner.keep_tail(log, 100)
    assert log.read_bytes().endswith(b"\n" + b"b" * 100) and b"a" * 10 not in log.read_bytes()
