"""A gpu.json that somebody else has written: refused in one line, or told as far as it goes."""

import json

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.results import NAME, Results

MACHINE = {"python": "3", "system": "here", "commit": None, "packages": {}}


def content(**changed) -> dict:
    """Of a gpu.json with one case."""
    case = {"stage": "ops", "name": "x", "status": "ok", "expected": 1, "seconds": 1.0}
    case |= {"values": {}, "checks": [], "error": "", "repeat": ""}
    options = {"device": "cpu", "shape": "tiny", "minutes": 1}
    facts = {"options": options, "machine": MACHINE, "stages": {}, "running": None}
    facts |= {"format": 1, "made": "2026-01-01T00:00:00+00:00"}
    case = {name: changed.pop(name, value) for name, value in case.items()}
    return facts | {"cases": [case]} | changed


CHECK = {"what": "a", "value": 1.0, "bound": 2.0, "ok": True, "why": "w"}
HOSTILE = {
    "no machine": content(machine={}),
    "no options": content(options={}),
    "packages": content(machine=MACHINE | {"packages": [1]}),
    "a case": content(cases=[7]),
    "a check": content(checks=[5]),
    "a check's value": content(checks=[CHECK | {"value": "abc"}]),
    "a check's bound": content(checks=[CHECK | {"bound": None}]),
    "status": content(status="fine"),
    "made": content(made="zz|<script>"),
    "running": content(running={"stage": "ops"}),
    "format": content(format=2),
    "depth": "[" * 200_000,
    "cut": json.dumps(content())[:50],
    "digits": '{"format":1,"made":' + "9" * 6000 + "}",
    "bytes": b"\xff\xfe\x00",
}
INCOMPLETE = {
    "throughput": {"dolmen": {"tokens_per_second": "x"}},
    "profile": {"rows": 5},
    "memory": {"per_layer": 1},
    "device": {"driver": "x"},
    "ops": {"backends": {"flash": None}},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_gpu_json_is_refused_in_one_line(what, tmp_path, capsys):
    given = HOSTILE[what]
    given = json.dumps(given) if isinstance(given, dict) else given
    (tmp_path / NAME).write_bytes(given if isinstance(given, bytes) else given.encode())
    resume = ["--resume", "--device", "cpu", "--shape", "tiny", "--stages", "ops", "--out"]
    for words in (["report"], resume):
        assert main([*words, str(tmp_path)]) == 2
        output = capsys.readouterr().err
        assert str(tmp_path / NAME) in output and output.count("\n") == 1


@pytest.mark.parametrize("stage", INCOMPLETE)
def test_a_case_whose_values_are_incomplete_is_told(stage, tmp_path, capsys):
    name = "facts" if stage == "device" else "x"
    case = content(stage=stage, name=name, values=INCOMPLETE[stage])["cases"]
    other = content(stage="ops", name="y", checks=[CHECK])["cases"]
    (tmp_path / NAME).write_text(json.dumps(content(cases=case + other)))
    assert main(["report", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert f"| {stage}/{name} | incomplete | its values cannot be read" in output
    assert "1 cases, 1 of 1 checks held" in output


def test_a_running_case_that_is_not_there_ends_nothing(tmp_path):
    running = {"stage": "a", "name": "b", "since": 0.0, "limit": 1.0}
    assert Results(tmp_path / NAME, content(running=running)).end_running("cut", "") is None
