"""What trackers are asked for, by programs that only take notes."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dolmen.core.torch_private import strings
from dolmen.training import loop, metrics
from dolmen.training import run as train_run
from dolmen.training.metrics import TrackedRun, Trackio, WandB

RUN = TrackedRun(Path("out"), "a run", "0123456789abcdef", 0, {"train": {"steps": 3}})
ROWS = [
    {"step": 4, "prompt": "p", "completion": "c", "reward": 1.5, "tokens": 2, "finished": True},
    {"step": 4, "prompt": "q", "completion": "d", "tokens": 3, "finished": False},
    {"step": 6, "prompt": "r", "completion": "e", "reward": 0.0, "tokens": 1, "finished": True},
]


class Notes:
    """A module of a tracker: what it was asked for."""

    def __init__(self, monkeypatch, name: str, mode: str = "online", key: bool = False):
        self.asked, self.logged, self.ended = {}, [], 0
        self.logins = 0
        self.Table = lambda columns, data: ("table", columns, data)
        self.Settings = lambda **options: options
        self.mode, self.key = mode, key
        self.settings = SimpleNamespace(sync_dir="here/run")
        monkeypatch.setitem(sys.modules, name, self)

    def setup(self):
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode, project=None))

    def login(self, **_) -> bool:
        self.logins += 1
        return self.key

    def init(self, **options):
        self.asked = options
        return self

    def log(self, row, step):
        self.logged.append((step, row))

    def finish(self):
        self.ended += 1


@pytest.mark.parametrize("step", (0, 7))
@pytest.mark.parametrize(
    "mode, key, logins, asked, resumes",
    (
        ("online", True, 1, None, True),
        ("online", False, 1, "offline", False),
        ("offline", False, 0, None, False),
        ("disabled", True, 0, None, False),
    ),
)
def test_wandb_is_offline_without_a_key_and_as_the_user_says(
    monkeypatch, mode, key, logins, asked, resumes, step
):
    notes = Notes(monkeypatch, "wandb", mode, key)
    tracker = WandB(RUN._replace(step=step))
    assert notes.logins == logins and notes.asked["mode"] == asked
    assert notes.asked["resume"] == ("allow" if resumes and step else None)
    assert (notes.asked["name"], notes.asked["id"]) == ("a run", RUN.identity)
    assert notes.asked["config"] == RUN.config and notes.asked["project"] == "dolmen"
    assert notes.asked["settings"] == {"console": "off", "silent": True}
    offline = (
        "wandb: no API key, so the run is recorded offline; upload it with: wandb sync here/run"
    )
    assert tracker.notice == (offline if asked else "")


@pytest.mark.parametrize("step", (0, 7))
def test_trackio_knows_a_run_by_its_name(monkeypatch, step):
    notes = Notes(monkeypatch, "trackio")
    tracker = Trackio(RUN._replace(step=step))
    assert notes.asked == {
        "project": "dolmen",
        "name": "a run-012345",
        "config": RUN.config,
        "resume": "allow" if step else "never",
        "embed": False,
        "auto_log_gpu": False,
        "auto_log_cpu": False,
    }
    tracker.close()
    assert notes.ended == 1 and tracker.notice == ""


def test_rows_and_completions_are_logged_at_their_steps(monkeypatch):
    notes = Notes(monkeypatch, "wandb", key=True)
    tracker = WandB(RUN)
    tracker.write({"step": 3, "time": 1e9, "loss": 2.5})
    assert notes.logged == [(3, metrics._numbers({"step": 3, "time": 1e9, "loss": 2.5}))]
    assert notes.logged[0][1]["loss"] == 2.5 and "step" not in notes.logged[0][1]
    notes.logged.clear()
    tracker.write_completions(ROWS)
    columns = ["step", "prompt", "completion", "reward", "tokens", "finished"]
    # at the step of the first update after each iteration
    assert notes.logged == [
        (
            5,
            {
                "completions": (
                    "table",
                    columns,
                    [
                        [5, "p", "c", 1.5, 2, True],
                        [5, "q", "d", None, 3, False],
                    ],
                )
            },
        ),
        (7, {"completions": ("table", columns, [[7, "r", "e", 0.0, 1, True]])}),
    ]
    tracker.close()
    assert notes.ended == 1


def test_a_compiler_that_gives_up_is_told_in_a_sentence():
    told: list[str] = []
    handler = loop._RecompileLimitHandler(told.append)
    reason = "size of x  # in layer.py:3 # stack"
    args = ("recompile_limit", 8, "forward (layer.py:3)", reason, "more")
    handler.emit(logging.LogRecord("", 30, "", 1, f"{strings.GAVE_UP} %s %s %s %s %s", args, None))
    handler.emit(logging.LogRecord("", 30, "", 1, "anything else %s", ("x",), None))
    assert told == [
        "WARNING: torch.compile gave up on forward (layer.py:3) after 8 programs "
        "(recompile_limit): further calls run uncompiled, and slower; the last one differed in "
        "size of x"
    ]


@pytest.mark.parametrize(
    "lengths, option",
    (
        (dict(tokens=5, epochs=None, steps=None), "tokens"),
        (dict(tokens=None, epochs=2.0, steps=None), "epochs"),
        (dict(tokens=None, epochs=None, steps=9), "steps"),
        (dict(tokens=None, epochs=None, steps=None), "steps"),
    ),
)
def test_the_option_of_a_runs_length(lengths, option):
    config = SimpleNamespace(train=SimpleNamespace(**lengths))
    assert train_run.length_option(config) == option
