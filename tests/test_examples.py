"""The programs of examples/ do what their first lines say, and each is short."""

import math
import sys
from importlib import import_module
from pathlib import Path

import pytest

from dolmen.core.mesh import SINGLE

FOLDER = Path(__file__).parents[1] / "examples"
PROGRAMS = sorted(FOLDER.glob("*.py"))


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """The folder can be imported from, and what they write goes elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # the cache of tokens
    monkeypatch.syspath_prepend(str(FOLDER))
    yield tmp_path
    for program in PROGRAMS:
        sys.modules.pop(program.stem, None)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_a_program_is_short(program):
    assert len(program.read_text().splitlines()) <= 60


@pytest.mark.command
def test_train_and_export(examples):
    import export
    import train

    run = train.train(steps=4)
    assert {"metrics.jsonl", "loss.png", "tokenizer"} <= {
        p.name for p in (examples / run).iterdir()
    }
    ours, theirs = export.main(str(run))
    assert ours == theirs and ours.startswith(export.PROMPT) and len(ours) > len(export.PROMPT)


@pytest.mark.command
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "llama_lora",
        pytest.param("bloom", marks=pytest.mark.full),
        pytest.param("gptj", marks=pytest.mark.full),
    ],
)
def test_a_road_from_chats_to_a_reward(examples, name):
    """Each its last run raises what its reward model gives."""
    found = import_module(name).road("road")
    assert all(map(math.isfinite, found)) and sum(found[-3:]) / 3 > found[0] + 0.2, found
    assert ("llama" in name) == (examples / "road/adapters/adapter_model.safetensors").exists()


def test_a_module_of_ones_own(examples):
    import toymodel

    whole = toymodel.train(SINGLE)
    started = toymodel.train(SINGLE, steps=4, folder="toy")
    assert started + toymodel.train(SINGLE, folder="toy") == whole and whole[-1] < whole[0]


@pytest.mark.spawn
@pytest.mark.full  # two ranks import torch: 8 s
def test_a_schedule_of_ones_own(examples):
    import schedule

    assert schedule.main() < 1e-5
    assert (examples / "runs/schedule/mine.svg").exists()
