"""`dolmen train` from end to end in this process: what it leaves, what running it again and
resuming it give.
"""

import json
import math
import shutil
from dataclasses import replace

import pytest
import tinyrun
import yaml
from tinyrun import dolmen, losses, rows, same, steps, tensors

from dolmen.files import kinds
from dolmen.files.write import Tail
from dolmen.training.config import CheckpointConfig
from dolmen.training.request import read_run

material, one_thread = tinyrun.material, tinyrun.one_thread
finished_run = tinyrun.finished_run


@pytest.fixture(scope="module")
def whole(finished_run, tmp_path_factory):
    """Six steps, saved after each third, validated after each third; and what was printed."""
    out = shutil.copytree(finished_run, tmp_path_factory.mktemp("runs") / "whole")
    return out, (finished_run.parent / "stdout.txt").read_text()


def test_metrics(whole):
    out, _ = whole
    found = rows(out)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    for row in found:
        assert {
            "step",
            "loss",
            "grad_norm",
            "lr",
            "tokens",
            "tokens_per_second",
            "mfu_measured",
            "memory_gib",
            "time",
        } <= row.keys()
        assert (
            row["tokens"] == row["step"] * 4 * 16
            and row["tokens_per_second"] > 0
            and 0 < row["mfu_measured"] < 1
            and 0.05 < row["memory_gib"] < 64
        )
    # warm-up of 2, then cosine
    assert [row["lr"] for row in found[:2]] == [0.005, 0.01] and found[5]["lr"] < found[2]["lr"]
    assert abs(found[0]["loss"] - math.log(300)) < 0.1 and found[5]["loss"] < found[0]["loss"] - 0.5
    validation = rows(out, "val_loss")
    assert [row["step"] for row in validation] == [3, 6] and validation[1]["val_loss"] < validation[
        0
    ]["val_loss"]
    assert [row["time"] for row in found] == sorted(row["time"] for row in found)


def test_what_a_run_leaves(whole):
    out, said = whole
    names = {p.name for p in out.iterdir()}
    assert names == {
        "config.yaml",
        "metrics.jsonl",
        "history.jsonl",
        "loss.png",
        "tensorboard",
        "checkpoints",
        "tokenizer",
        "summary.json",
        "goodput.json",
        ".dolmen",
    }
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG") and list(
        (out / "tensorboard").glob("events*")
    )
    assert steps(out) == [3, 6] and (out / "tokenizer" / "tokenizer.json").is_file()
    summary = json.loads((out / "summary.json").read_text())
    assert (
        summary["steps"] == 6
        and summary["val_loss"] == rows(out, "val_loss")[-1]["val_loss"]
        and summary["signal"] == 0
    )
    # the header says what is about to happen, a line a step what does, the end what has; no escape
    # code without a terminal
    for words in (
        "llama, 34.7 k parameters",
        "random weights, seed 0",
        "tp 1 x dp 1, ZeRO 1: 1 process",
        "4 sequences of 16 = 64 tokens",
        "0.4 MiB of weights and optimizer state",
        "step 1/6  loss 5.",  # about ln 300
        "step 6/6",
        "step 3: validation loss",
        "bits per byte",
        "6 steps in",
    ):
        assert words in said, words
    lines = said.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("model "))
    header = [line[:11].strip() for line in lines[start : start + 8]]
    assert header == ["model", "start", "layout", "data", "validation", "batch", "run", "out"]
    assert not any(name in said for name in ("kernels", "experts", "GFLOP"))
    assert "\x1b" not in said and said.count("\nstep 4/6") == 1


def test_the_summary_is_in_bits_of_the_text(whole, material):
    """Bits per byte = nats of all held-out tokens / ln 2 / bytes of the held-out files."""
    out, _ = whole
    summary = json.loads((out / "summary.json").read_text())
    held = [open(f, "rb").read() for f in summary["validation_files"]]
    assert held and all(f.startswith(str(material.docs)) for f in summary["validation_files"])
    assert summary["bits_per_byte"] == pytest.approx(
        summary["val_loss"] * summary["val_tokens"] / math.log(2) / sum(map(len, held)), rel=1e-12
    )


def test_config_yaml_can_be_run_again(whole, tmp_path):
    out, _ = whole
    assert dolmen("train", out / "config.yaml", "--out", tmp_path / "again").code == 0
    assert losses(tmp_path / "again") == losses(out)
    assert (tmp_path / "again" / "config.yaml").read_text() == (out / "config.yaml").read_text()
    assert same(tensors(tmp_path / "again", 6), tensors(out, 6))


def test_config_yaml_is_the_resolved_run(whole, material):
    out, _ = whole
    values = yaml.safe_load((out / "config.yaml").read_text())
    assert values.keys() == {
        *("name", "model", "layout", "data", "optimizer", "train", "checkpoint", "log")
    }
    assert None not in values["train"].values() and "fp8" not in values["train"]
    assert "dp" not in values["layout"] and "microbatch_size" not in values["train"]
    written, expected = read_run(out / "config.yaml"), material.config()
    expected = replace(expected, checkpoint=CheckpointConfig(every=3, keep=0))
    assert written == replace(expected, name=written.name)


def test_resumed_is_bitwise_never_stopped(whole, tmp_path):
    """As if killed between step 5 and its end: rows of the record are cut back to step 3 and done
    again, the same.
    """
    out, _ = whole
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    before = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(before[:-2]) + before[-2][:20])  # a row cut short
    with open(copy / "history.jsonl", "a") as history:
        history.write('{"step": 6, "ti')
    result = dolmen("train", copy / "config.yaml", "--out", copy, "--resume")
    assert (
        result.code == 0 and "resuming from step 3\n" in result.out and "changed" not in result.out
    )
    assert losses(copy) == losses(out)
    after = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    # 3 steps and a validation
    assert after[:4] == before[:4] and len(after) == len(before) == 8 and after[5] != before[5]
    assert [row["tokens"] for row in rows(copy)] == [row["tokens"] for row in rows(out)]
    assert same(tensors(copy, 6), tensors(out, 6))
    reported = list(Tail(copy / "history.jsonl", kinds.HISTORY_ROW).read())
    assert [row["step"] for row in reported if "begun" in row] == [0, 3]
    assert [row["begun"] for row in reported if "begun" in row] == ["new", "resumed"]
    assert [row["reached"] for row in reported if "begun" in row] == [0, 5]
    assert len({row["run_id"] for row in reported if "begun" in row}) == 1
    assert [(row["step"], row["ended"]) for row in reported if "ended" in row] == [(6, "done")] * 2
    assert [row["step"] for row in reported if "saved" in row] == [3, 6, 6]
    assert all(0.05 < gib < 64 for row in reported for gib in row.get("memory_gib", ()))


def test_resume_with_nothing_saved_says_so_and_starts(whole, material, tmp_path):
    result = dolmen("train", material.file, "--out", tmp_path / "new", "--resume")
    assert result.code == 0 and "--resume: no checkpoint yet, starting from step 0" in result.out
    assert losses(tmp_path / "new") == losses(whole[0])


def test_resume_says_what_changed(whole, material, tmp_path):
    """Another learning rate, batch, length of the run and data; tokens go on counting from what
    they were.
    """
    out, _ = whole
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    result = dolmen(
        "train",
        copy / "config.yaml",
        "--out",
        copy,
        "--resume",
        "--train.steps",
        8,
        "--optimizer.lr",
        0.002,
        "--train.global-batch-size",
        2,
        "--data.path",
        material.docs / "0*.txt",
    )
    assert result.code == 0 and "resuming from step 6" in result.out
    reported = [line.strip() for line in result.out.splitlines() if line.startswith("  changed: ")]
    for words in (
        "optimizer.lr: 0.01 -> 0.002",
        "train.global_batch_size: 4 -> 2",
        "train.steps: 6 -> 8",
        "data.path: ",
        "data 1: 30 documents",
        "checkpoint",
        "layout",
    ):
        assert (words not in ("checkpoint", "layout")) == any(
            line.startswith(f"changed: {words}") for line in reported
        ), (words, reported)
    assert [row["tokens"] for row in rows(copy)][5:] == [384, 416, 448] and rows(copy)[-1][
        "lr"
    ] < 0.002


@pytest.mark.spawn
def test_resume_at_another_number_of_processes_needs_no_option(whole, tmp_path, forked_ranks):
    """The same samples go on at dp 2, and then again in one process."""
    out, _ = whole
    copy, straight = (shutil.copytree(out, tmp_path / name) for name in ("copy", "straight"))
    for last, processes in ((8, 2), (10, 1)):
        for run, more in ((copy, ("--nproc", processes)), (straight, ())):
            words = ("--resume", "--train.steps", last, *more)
            assert dolmen("train", run / "config.yaml", *words).code == 0
    history = [json.loads(line) for line in (copy / "history.jsonl").read_text().splitlines()]
    changed = [row["changed"] for row in history if row.get("begun") == "resumed"]
    assert "layout.dp: 1 -> 2" in changed[0] and "layout.dp: 2 -> 1" in changed[1]
    found, expected = ([row["loss"] for row in rows(run)] for run in (copy, straight))
    assert found == pytest.approx(expected, abs=1e-5) and len(found) == 10
    assert "dp" not in yaml.safe_load((copy / "config.yaml").read_text())["layout"]


def test_resume_with_nothing_left(whole, tmp_path):
    out, _ = whole
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    result = dolmen("train", copy / "config.yaml", "--out", copy, "--resume")
    assert (
        result.code == 0
        and "nothing left to train; increase --train.steps to continue" in result.out
    )
    assert (copy / "metrics.jsonl").read_text() == (out / "metrics.jsonl").read_text() and steps(
        copy
    ) == [3, 6]


def test_resume_of_another_model_is_refused(whole, tmp_path):
    out, _ = whole
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    result = dolmen(
        "train",
        out / "config.yaml",
        "--out",
        out,
        "--resume",
        "--model.num-hidden-layers",
        3,
        "--train.steps",
        9,
    )
    assert (
        result.code == 2
        and "checkpoint of step 6 belongs to another model (model.num_hidden_layers: 2 -> 3)"
        in result.words
    )
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before


def test_resume_with_another_optimizer_is_refused(whole):
    out, _ = whole
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    words = ("--resume", "--optimizer.name", "muon", "--train.steps", 9)
    result = dolmen("train", out / "config.yaml", "--out", out, *words)
    assert result.code == 2 and "use --optimizer.name adamw, or give another --out" in result.words
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before


def test_a_run_is_not_overwritten_by_accident(whole, material, tmp_path):
    out, _ = whole
    assert dolmen("train", material.file, "--out", out).code == 2 and len(rows(out)) == 6
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    (copy / "notes").write_text("mine")
    words = ("train", material.file, "--out", copy, "--overwrite", "--train.steps", 2)
    assert dolmen(*words).code == 2 and len(rows(copy)) == 6
    (copy / "notes").unlink()
    assert dolmen(*words).code == 0 and len(rows(copy)) == 2 and steps(copy) == [2]


def test_keep_and_the_last_step(material, tmp_path):
    """Steps 2, 4, 6 and the last; the newest two stay."""
    assert (
        dolmen(
            "train",
            material.file,
            "--out",
            tmp_path / "out",
            "--train.steps",
            7,
            "--checkpoint.every",
            2,
            "--log.every",
            3,
        ).code
        == 0
    )
    assert steps(tmp_path / "out") == [6, 7]
    assert [row["step"] for row in rows(tmp_path / "out")] == [3, 6, 7]


def test_steps_unset_is_one_epoch_and_at_least_twenty(material, tmp_path):
    """One of the 30 documents is held out; of 20 steps here, 13 would do."""
    result = dolmen(
        "train",
        material.file,
        "--out",
        tmp_path / "out",
        "--train.steps",
        "None",
        "--train.sequence-length",
        64,
        "--train.global-batch-size",
        16,
        "--log.every",
        100,
    )
    last = rows(tmp_path / "out")[-1]
    assert result.code == 0 and last["step"] == 20
    (epochs,) = (value for name, value in last.items() if name.startswith("epoch/"))
    assert (
        1 < epochs < 2
        and yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["train"]["steps"] == 20
    )
