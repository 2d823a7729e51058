"""What the page shows of a run's files: bounds, facts and history, from a folder without a page."""

import json
import random
from pathlib import Path

import pytest

from dolmen.watching.run import WatchedRun, labels


def watched(folder: Path, config: dict | None = None, **files: list[dict]) -> WatchedRun:
    """A run with these options and rows of its files, which has been read."""
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps(config or {}))
    for name, rows in files.items():
        file = folder / (f"rollouts/{name}" if name == "completions" else name)
        file.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = WatchedRun(folder, "run")
    run.read()
    return run


def completion(step: int, **more) -> dict:
    return {
        "step": step,
        "prompt": "2+2=",
        "completion": "4",
        "tokens": 1,
        "finished": True,
        **more,
    }


def test_samples_are_bounded_in_number_and_length(tmp_path):
    """50 prompts, 16 completions of an iteration; of 30 steps 12, the first and the last too."""
    long = ["x" * 4000, "y" * 4001, *(f"prompt {i}" for i in range(60))]
    samples = [{"step": step, "prompt": "first", "text": str(step)} for step in range(30, 0, -1)]
    samples += [{"step": 3, "prompt": prompt, "text": "text"} for prompt in long]
    samples += [{"step": 31, "prompt": "first", "text": "31"}]
    rows = [completion(step, completion=str(i)) for step in (1, 2) for i in range(15 + step)]
    tables = watched(tmp_path, samples=samples, completions=rows).as_dict()["samples"]
    titles = [table["prompt"] for table in tables]
    assert titles[:3] == ["first", "x" * 4000, "y" * 4000 + " ... (4,001 characters)"]
    assert titles[3:50] == [f"prompt {i}" for i in range(47)]
    assert titles[50:] == [f"Completion {i} of each iteration" for i in range(1, 17)]
    steps = [step for step, _ in tables[0]["texts"]]
    assert len(steps) == 12 and (steps[0], steps[-1]) == (1, 31)
    assert {after - step for step, after in zip(steps, steps[1:], strict=False)} == {2, 3}
    assert all(text == str(step) for step, text in tables[0]["texts"])
    assert [step for step, _ in tables[65]["texts"]] == [1, 2]
    assert tables[65]["texts"][1][1].endswith("2+2= \u2192 15")


@pytest.mark.parametrize(
    "more, text",
    [
        ({}, "[no reward, 1 token, finished]"),
        ({"reward": 0}, "[reward 0, 1 token, finished]"),
        ({"reward": 1 / 3, "tokens": 1200}, "[reward 0.3333, 1,200 tokens, finished]"),
        ({"tokens": 0, "finished": False}, "[no reward, 0 tokens, truncated]"),
    ],
)
def test_a_completion_is_a_text_of_its_row(tmp_path, more, text):
    run = watched(tmp_path, completions=[completion(7, **more)])
    assert run.as_dict()["samples"][0]["texts"] == [[7, f"{text}  2+2= \u2192 4"]]


def test_options_are_bounded_in_number_and_length(tmp_path):
    options = {"a": "x" * 400, "b": "y" * 401, "c": [1, "2"], "d": None}
    many = {f"option {i}": i for i in range(2000)}
    shown = watched(tmp_path, {**options, **many}).as_dict()["options"]
    assert len(shown) == 2000 and list(shown)[-1] == "option 1995"
    assert (shown["a"], shown["b"]) == ("x" * 400, "y" * 400 + " ...")
    assert (shown["c"], shown["d"], shown["option 7"]) == ('[1, "2"]', "null", "7")


@pytest.mark.parametrize(
    "config, layout, batch",
    [
        ({}, None, None),
        ({"layout": {"tp": 1, "dp": 1, "zero": 3}}, "one process", None),
        ({"layout": {"tp": 2, "dp": 4, "zero": 1}}, "tp 2 x dp 4 x ZeRO 1", None),
        (
            {"layout": {"dp": 2, "cp": 2, "ep": 2, "pp": 2, "zero": 0}},
            "cp 2 x pp 2 x dp 2 x ep 2",
            None,
        ),
        ({"layout": {"tp": "2", "dp": [4], "zero": "1"}}, "one process", None),
        ({"train": {"global_batch_size": 1}}, "one process", "1 sequence"),
        (
            {"train": {"global_batch_size": 64, "sequence_length": 2048}},
            "one process",
            "64 sequences of 2,048 tokens",
        ),
        ({"train": {"global_batch_size": "64", "sequence_length": 8}}, "one process", None),
    ],
)
def test_layout_and_batch_are_those_of_the_options(tmp_path, config, layout, batch):
    facts = dict(watched(tmp_path, config).as_dict()["facts"])
    assert (facts.get("layout"), facts.get("batch")) == (layout, batch)


def test_facts_are_those_of_the_last_start_and_the_last_rows(tmp_path):
    metrics = [
        {"step": 1, "loss": 2.0, "tokens": 8, "lr": 1.0, "skipped_steps": 1200},
        {"step": 1500, "val_loss": 1.5},
    ]
    starts = [
        {"step": 0, "time": 1.0, "begun": "new", "steps": 9, "processes": 3, "device": "CPU"},
        {"step": 0, "time": 2.0, "begun": "resumed", "steps": 4000, "processes": 1},
    ]
    config = {"model": {"model_type": "llama"}, "train": {"steps": 70}}
    facts = dict(watched(tmp_path, config, metrics=metrics, history=starts).as_dict()["facts"])
    assert facts.pop("state").startswith("in progress, or killed; last update at ")
    assert facts == {
        "model": "llama",
        "layout": "one process",
        "processes": "1 process on ?",
        "steps": "1,500 of 4,000",
        "training loss": "2.0000",
        "validation loss": "1.5000",
        "skipped steps": "1,200",
    }
    facts = dict(watched(tmp_path / "new", config).as_dict()["facts"])
    assert facts["steps"] == "0 of 70" and "state" not in facts and facts["skipped steps"] == "0"


@pytest.mark.parametrize("seed", range(4))
def test_history_is_that_of_its_rows(tmp_path, seed):
    """Rows at random, some with several fields, and what a list of all rows says of them."""
    chance = random.Random(seed)
    rows: list[dict] = []
    for time in range(60):
        row = {"step": chance.randrange(40), "time": float(time)}
        if chance.random() < 0.2:
            row |= {"begun": "restarted", "changed": ["-"] * time, "reached": chance.randrange(40)}
        if chance.random() < 0.2:
            row["ended"] = chance.choice(("done", "stopped"))
        if chance.random() < 0.4:
            row["saved"] = chance.random() < 0.8
        if chance.random() < 0.2:
            row["memory_gib"] = [float(time)]
        if chance.random() < 0.2:
            row["router_load"] = {"0": [float(time)]}
        rows.append(row)
    found = watched(tmp_path, history=rows).as_dict()
    starts = [i for i, row in enumerate(rows) if "begun" in row]
    for place, start in enumerate(found["starts"]):
        first, last = starts[place], [*starts, len(rows)][place + 1]
        ends = [row for row in rows[first:last] if "ended" in row]
        follows = place + 1 < len(starts)
        killed = ("killed", rows[last]["reached"]) if follows else (None, None)
        end = (ends[-1]["ended"], ends[-1]["step"]) if ends else killed
        assert (start["ended"], start["until"]) == end
        assert start["changed"] == rows[first]["changed"][:50]
        assert {name: start[name] for name in ("step", "time", "begun")} == {
            name: rows[first][name] for name in ("step", "time", "begun")
        }
    assert len(found["starts"]) == len(starts)
    saved: list[int] = []
    for row in rows:
        if "begun" in row:
            saved = [step for step in saved if step <= row["step"]]
        if row.get("saved") and saved[-1:] != [row["step"]]:
            saved.append(row["step"])
    assert found["saved"] == saved
    with_memory = [row for row in rows if "memory_gib" in row][-1]
    assert found["memory"] == {"step": with_memory["step"], "gib": with_memory["memory_gib"]}
    with_load = [row for row in rows if "router_load" in row][-1]
    assert found["load"] == {"step": with_load["step"], "layers": with_load["router_load"]}


def test_history_is_bounded(tmp_path):
    """500 starts and the newest 500 saves."""
    rows = [{"step": 0, "time": 1.0, "begun": "restarted"} for _ in range(501)]
    rows += [{"step": step, "time": 1.0, "saved": True} for step in range(1, 502)]
    found = watched(tmp_path, history=rows).as_dict()
    assert len(found["starts"]) == 500 and found["saved"] == [*range(2, 502)]


@pytest.mark.parametrize("seed", range(3))
def test_labels_are_the_shortest_that_tell_folders_apart(seed):
    chance = random.Random(seed)
    paths = [Path("/", *chance.choices("ab", k=5)) for _ in range(6)]
    names = labels(paths)
    depth = len(names[0].split("/"))
    assert names == ["/".join(path.parts[-depth:]) for path in paths]
    assert len({*names}) == len({*paths})
    if depth > 1:
        assert len({path.parts[-depth + 1 :] for path in paths}) < len({*paths})
