"""Who hangs, by what every rank has told; the watch itself in one process. Real ranks that hang:
tests/cli/test_survive.py.
"""

import json
import time
from types import SimpleNamespace

import pytest

from dolmen.core.messages import Failed
from dolmen.launch import watchdog as watches
from dolmen.launch.watchdog import Watch, verdict
from dolmen.training.worker import explain_errors


def row(passed: int, waits: bool = False) -> dict:
    return {
        "host": "h",
        "pid": 7,
        "parent": 1,
        "tick": 3,
        "passed": passed,
        "step": 5,
        "phase": "a step",
        "still": 9.0,
        "waits": waits,
    }


def test_the_one_behind_is_named():
    said = verdict({0: row(12, True), 1: row(11), 2: row(12, True)}, [], {1: "its stack"})
    assert said.startswith(
        "dolmen: rank 1 (h, pid 7) hangs after step 5, in a step: it makes no progress\nstack of "
        "rank 1:\nits stack\n2 of 3 ranks are waiting for it"
    )


def test_of_two_at_the_same_point_the_one_that_does_not_wait():
    assert "rank 1 (" in verdict(
        {0: row(12, True), 1: row(12)}, [], {}
    ) and "rank 0 (" not in verdict({0: row(12, True), 1: row(12)}, [], {})


def test_a_silent_process_is_named_first():
    said = verdict({0: row(12, True), 1: row(12), 2: {}}, [2], {})
    assert (
        said.startswith("dolmen: rank 2 (unknown host")
        and "does not respond" in said
        and "rank 1 (" not in said
    )


def test_where_all_wait_nobody_is_blamed_alone():
    said = verdict({r: row(12, True) for r in range(2)}, [], {})
    assert "like all other" in said and said.endswith("2 of 2 ranks hang")


def until(done) -> None:
    """Wait, for as long as a busy machine may take."""
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def passes(monkeypatch):
    """passes(watch, seconds): time passes on the watch's clock alone, and the watch has looked."""
    clock = SimpleNamespace(now=0.0)
    held = SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep, ctime=time.ctime)
    monkeypatch.setattr(watches, "time", held)
    monkeypatch.setattr(watches.faulthandler, "dump_traceback_later", lambda *a, **k: None)

    def passing(watch: Watch, seconds: float) -> None:
        clock.now += seconds
        tick = watch.tick
        until(lambda: watch.tick >= tick + 2 or not watch.thread.is_alive())

    return passing


def test_a_main_thread_that_sleeps_is_told_with_its_stack(tmp_path, passes):
    messages = []
    watch = Watch(tmp_path / "hang", 0, 1, 0.2, messages.append)
    with watch.watching():
        for step in range(4):  # progress, slower than a tick and faster than the limit
            watch.beat(step, "a step")
            passes(watch, 0.15)
        assert (
            not messages
            and json.loads((tmp_path / "hang" / "rank-0.json").read_text())["phase"] == "a step"
        )
        passes(watch, 1.0)
        until(lambda: messages)
    assert (
        len(messages) == 1 and "hangs after step 3, in a step: it makes no progress" in messages[0]
    )
    assert (
        "test_a_main_thread_that_sleeps_is_told_with_its_stack" in messages[0]
        and "0 of 1 ranks are waiting for it" in messages[0]
    )
    assert "Current thread" in (tmp_path / "hang" / "rank-0.txt").read_text()


def test_start_up_has_longer_and_nothing_is_left(tmp_path, passes):
    messages = []
    with Watch(tmp_path / "hang", 0, 1, 0.1, messages.append).watching() as watch:
        for _ in range(5):
            passes(watch, 0.12)
        assert watch.thread.is_alive()
    assert not messages and not (tmp_path / "hang").exists()
    with Watch(tmp_path / "hang", 0, 1, None, messages.append).watching() as watch:
        watch.beat(0, "a step")
    assert not (tmp_path / "hang").exists()


def test_a_link_in_its_place_is_not_followed(tmp_path, passes):
    """It is told by `train` in a sentence, with what is saved."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "hang").symlink_to(tmp_path / "elsewhere")
    watch = Watch(tmp_path / "hang", 0, 1, 9.0, [].append)
    with (
        pytest.raises(Failed, match="hang: it is a link or a file, not a folder. "),
        explain_errors(tmp_path),
        watch.watching(),
    ):
        pass
    assert not list((tmp_path / "elsewhere").iterdir())
