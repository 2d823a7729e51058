"""Scores and samples while a run trains: written, and nothing of the training is touched."""

import json
from dataclasses import replace

import pytest
import tinyrun
from tinyrun import dolmen, losses, same, tensors

from dolmen.core.mesh import SINGLE
from dolmen.evaluation.config import DuringConfig
from dolmen.files import kinds
from dolmen.files.write import Tail
from dolmen.model.layout import Layout
from dolmen.training import initialize
from dolmen.training.metrics import read_metrics

material, one_thread = tinyrun.material, tinyrun.one_thread


@pytest.fixture(scope="module")
def command(material, tmp_path_factory):
    """Options: a task of two questions, and two prompts."""
    root = tmp_path_factory.mktemp("judged")
    rows = [{"q": "abc", "a": 0}, {"q": "d e", "a": 1}]
    (root / "rows.json").write_text(json.dumps(rows))
    (root / "choice.yaml").write_text(
        "task: choice\ndataset_path: json\ntest_split: test\noutput_type: multiple_choice\n"
        f"dataset_kwargs: {{data_files: {{test: {root}/rows.json}}}}\n"
        "doc_to_text: '{{q}}'\ndoc_to_choice: [' ab', ' c']\ndoc_to_target: '{{a}}'\n"
        "metric_list: [{metric: acc}]\n"
    )
    (root / "prompts.txt").write_text("abc\n\nd e\n")
    return (
        *("--evaluate.tasks", "choice", "--evaluate.tasks-path", root),
        *("--evaluate.samples", root / "prompts.txt", "--evaluate.max-new-tokens", 5),
        *("--evaluate.temperature", 1, "--evaluate.every", 2),
    )


def samples(out):
    return list(Tail(out / "samples.jsonl", kinds.SAMPLE_ROW).read())


@pytest.mark.parametrize(
    "layout, separate",
    [
        (Layout(dp=1, cp=2), True),
        (Layout(dp=1, pp=2, virtual_stages=2), True),
        (Layout(tp=2), False),
    ],
)
def test_what_cannot_write_is_judged_in_a_layout_that_can(material, layout, separate, monkeypatch):
    """Tasks write too, with no samples asked."""
    monkeypatch.setattr(initialize, "GenerationModel", lambda *given, **options: "another")
    run = replace(material.config(), layout=layout, evaluate=DuringConfig(tasks="choice"))
    assert initialize.make_evaluation_generator(run, SINGLE) == ("another" if separate else None)


def test_scores_and_samples_are_written_and_training_is_the_same(material, command, tmp_path):
    """To the bit: nothing that a run draws is drawn by what judges it."""
    words = ("train", material.file, "--train.steps", 4, "--train.dropout", 0.1)
    plain = dolmen(*words, "--out", tmp_path / "plain")
    scored = dolmen(*words, "--out", tmp_path / "judged", *command)
    assert plain.code == scored.code == 0, plain.err + scored.err
    assert losses(tmp_path / "plain") == losses(tmp_path / "judged")
    assert same(tensors(tmp_path / "plain", 4), tensors(tmp_path / "judged", 4))
    found = samples(tmp_path / "judged")
    assert [(row["step"], row["prompt"]) for row in found] == [
        (2, "abc"),
        (2, "d e"),
        (4, "abc"),
        (4, "d e"),
    ]
    rows = read_metrics(tmp_path / "judged" / "metrics.jsonl")
    scores = {row["step"]: row["tasks/choice/acc"] for row in rows if "tasks/choice/acc" in row}
    assert scores.keys() == {2, 4} and set(scores.values()) <= {0.0, 0.5, 1.0}
    assert "step 4: choice/acc " in scored.out
    again = dolmen(*words, "--out", tmp_path / "judged", *command, "--overwrite")
    assert again.code == 0 and len(samples(tmp_path / "judged")) == 4
    assert [row["text"] for row in samples(tmp_path / "judged")] == [row["text"] for row in found]


REFUSED = {
    "no task": (("--evaluate.tasks", "choise"), "lm_eval knows no task choise"),
    "no file": (("--evaluate.samples", "/nowhere.txt"), "/nowhere.txt"),
    "nothing": (("--evaluate.every", 2), "evaluate.every is 2, but there is nothing to evaluate"),
    "no steps": (("--evaluate.every", 0), "evaluate.every is 0: it must be at least 1"),
    "too long": (("--evaluate.max-new-tokens", 64), "prompt 1 has 3 tokens, with 64 new ones"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(material, command, tmp_path, case, monkeypatch):
    """Before anything is written."""
    options, said = REFUSED[case]
    monkeypatch.setattr("dolmen.evaluation.harness.TaskManager", Listed)
    base = command[4:6] if case == "too long" else ()
    out = tmp_path / "out"
    shown = dolmen("train", material.file, "--out", out, *base, *options)
    assert shown.code == 2 and said in shown.err, shown
    assert shown.err.count("\n") == 1 and not out.exists()


class Listed:
    all_tasks = ("choice",)

    def __init__(self, **_):
        pass
