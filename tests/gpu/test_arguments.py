"""What `make gpu` refuses in a line, before anything is run or written."""

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import report
from benchmarks.gpu.results import Results, named


@pytest.mark.parametrize(
    "words, message",
    [
        (["--minutes", "0"], "--minutes is 0: it must be over 0 and at most 1440"),
        (["--minutes", "nan"], "--minutes is nan"),
        (["--minutes", "1e9"], "--minutes is 1e+09"),
        (["--retry"], "needs --resume"),
        (["--resume", "/nowhere"], "--resume /nowhere: there is no gpu.json in it"),
        (["--skip", "smoke", "--stages", "device"], "--skip leaves nothing"),
        (["--stages", "opps"], "opps is no stage: use smoke, device, families"),
        (["--stages", "device"], "sees no GPU"),
    ],
)
def test_refused_in_a_line_with_nothing_written(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "gpu", lambda: False)
    assert command.main([*words, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not list(tmp_path.iterdir())


def test_cases_that_cannot_be_known_yet_are_told(monkeypatch):
    def lacking(module):
        raise ModuleNotFoundError("No module named 'zstandard'")

    monkeypatch.setattr(command.importlib, "import_module", lacking)
    reported = command.in_cases(command.STAGES[:1], command.Context("cpu", "tiny"))
    assert reported == (
        "\ndevice: No module named 'zstandard'; its cases are known once the wheels are there"
    )


def test_an_exception_is_told_by_its_name_and_not_by_the_end_of_its_message():
    error = "Traceback (most recent call last):\n  File x\nNotImplementedError: no kernel\n\nSee: y"
    assert named(error) == "NotImplementedError: no kernel"
    assert named("it said\nthat") == "that" and named("") == ""


def test_a_miniature_is_not_reported_with_a_whole_run(tmp_path):
    made = [
        Results.new(tmp_path, options={"device": "cuda", "shape": shape, "minutes": 1})
        for shape in ("tiny", "full")
    ]
    with pytest.raises(ValueError, match="of cuda, full and cuda, tiny: tell them apart"):
        report.section(made)
