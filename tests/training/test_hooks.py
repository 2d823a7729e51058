"""Hooks after a step, one by one, on states made by hand: what they write, say and count, by a
clock that is set.
"""

import math
from types import SimpleNamespace

import pytest

from dolmen.training import hooks
from dolmen.training.hooks import TrainingHooks


class Notes(list):
    """Takes what is written, said or added."""

    def __getattr__(self, name: str):
        return lambda *values: self.append(values if len(values) > 1 else values[0])


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=500.0)
    fake = SimpleNamespace(monotonic=lambda: now.seconds, time=lambda: 9e8 + now.seconds)
    monkeypatch.setattr(hooks, "time", fake)
    return now


def make(**more) -> TrainingHooks:
    """Hooks without a run: only what a test gives, and notes of what is written."""
    made = object.__new__(TrainingHooks)
    said, row, history = Notes(), Notes(), Notes()
    facts = {
        "line": said,
        "writers": [row],
        "trackers": [],
        "history": history,
        "stop": SimpleNamespace(agreed_signal=0, after=None),
        "receipts": None,
        "mesh": SimpleNamespace(size=1, rank=0, first=True),
        "run": options(),
        "loader": SimpleNamespace(extra_metrics={}, completions=[]),
        "skipped": 0,
        "skipped_in_a_row": 0,
        "max_skips": 3,
        "disagreed": False,
        "rewards_differed": False,
        "tokens_since": 0,
        "since": 500.0,
        "began": 100.0,
    }
    made.__dict__ |= facts | more
    return made


def options(**more):
    base = {
        "train": SimpleNamespace(spike_factor=4.0, dtype="float32"),
        "rollout": SimpleNamespace(weights="whole"),
        "log": SimpleNamespace(every=5, profile=None, validate_every=None),
        "evaluate": SimpleNamespace(every=None),
        "checkpoint": SimpleNamespace(every=40, snapshot_every=8),
    }
    return SimpleNamespace(**base | more)


def metrics(**more):
    base = dict(tokens=64, skipped=False, finite=True, critic=None, loss=2.0, grad_norm=1.5)
    base |= dict(lr=0.1, router={}, objective={}, tallies=None)
    return SimpleNamespace(**base | more)


def state(step: int, steps: int = 100, dynamic: bool = False, **more):
    scale = SimpleNamespace(dynamic=dynamic, value=512.0, good_steps=4)
    return SimpleNamespace(step=step, steps=steps, scale=scale, tokens=1000, **more)


SKIPPED = metrics(skipped=True, finite=False, loss=math.nan)


def test_skipped_steps_are_counted_and_end_a_run():
    documents = SimpleNamespace(
        extra_metrics={}, documents=lambda step: [f"{step}: a", f"{step}: b"]
    )
    found = make(loader=documents)
    for step, m in enumerate((SKIPPED, metrics(), SKIPPED, SKIPPED), 1):
        found.count(state(step), m)
    assert (found.skipped, found.skipped_in_a_row) == (3, 2) and found.tokens_since == 4 * 64
    assert found.finite is False and found.line == [
        f"step {step}: the loss is not finite (nan), the step is skipped" for step in (1, 3, 4)
    ]
    with pytest.raises(FloatingPointError) as error:
        found.count(state(5, dynamic=True), SKIPPED)
    assert found.line[-1].endswith("the step is skipped; loss scale now 512")
    assert str(error.value).startswith("the last 3 steps, up to step 5, were skipped")
    assert str(error.value).endswith("The last batch was\n  4: a\n  4: b")


@pytest.mark.parametrize(
    "m, reason",
    (
        (metrics(loss=math.inf, grad_norm=math.nan), "the loss is not finite (inf)"),
        (metrics(grad_norm=math.nan), "the gradient is not finite (nan)"),
        (metrics(grad_norm=9.12345), "the gradient norm 9.12 exceeds 4 times its running median"),
        (metrics(loss=math.nan, critic=metrics(skipped=False)), "the loss is not finite (nan)"),
        (
            metrics(critic=metrics(skipped=True, loss=math.nan)),
            "of the critic the loss is not finite (nan)",
        ),
    ),
)
def test_the_reason_of_a_skipped_step(m, reason):
    assert make().reason(m) == reason


def test_a_mismatch_is_told_once_and_equal_rewards_at_the_end():
    loader = SimpleNamespace(extra_metrics={hooks.warn.MISMATCH: math.nan})
    found = make(loader=loader)
    for step in (1, 2):
        found.count(state(step), metrics())
    assert len(found.line) == 1 and "after step 0 trainer and generator" in found.line[0]
    for spread in (0.0, 0.5):
        numbers = {"rollout/reward_std": 0.0, "rollout/reward": 1.0}
        loader = SimpleNamespace(extra_metrics=dict(numbers))
        found = make(loader=loader)
        found.count(state(98), metrics())
        loader.extra_metrics["rollout/reward_std"] = spread
        found.count(state(99), metrics())
        loader.extra_metrics["rollout/reward_std"] = 0.0
        found.count(state(100), metrics())
        assert len(found.line) == (1 if spread == 0 else 0)
    found = make()  # no rewards at all
    found.count(state(100), metrics())
    assert not found.line


def test_a_row_has_the_rate_since_the_row_before(clock, monkeypatch):
    monkeypatch.setattr(hooks, "memory_gib", lambda _: 1.25)
    tracker, shown = Notes(), Notes()
    loader = SimpleNamespace(
        extra_metrics={"x": 1.0}, completions=["c"], epochs=lambda step: {"a": step / 8}
    )
    peak = SimpleNamespace(utilization=lambda flops, ranks: {"mfu_measured": flops / ranks})
    reached = []
    peak.raise_to = lambda flops: (reached.append(flops), peak)[1]
    found = make(loader=loader, trackers=[tracker], peak=peak, flops=10.0, line=shown)
    found.mesh = SimpleNamespace(size=2, first=False)
    found.tokens_since, clock.seconds = 640, 532.0
    found.log(state(4), metrics(objective={"margin": 0.5}, router={"router/load": 1.1}))
    (row,) = found.writers[0]
    assert row == {
        "step": 4,
        "loss": 2.0,
        "grad_norm": 1.5,
        "lr": 0.1,
        "tokens": 1000,
        "tokens_per_second": 20.0,
        "mfu_measured": 100.0,
        "memory_gib": 1.25,
        "time": 9e8 + 532,
        "seconds": 432.0,
        "router/load": 1.1,
        "margin": 0.5,
        "x": 1.0,
        "epoch/a": 0.5,
    }
    assert (found.since, found.tokens_since) == (532.0, 0) and not shown
    assert reached == [100.0]  # FLOP/s of one of the two
    assert tracker == [["c"]] and loader.completions == []
    found.mesh, found.skipped = SimpleNamespace(size=1, first=True), 2
    found.log(state(5, dynamic=True), metrics())
    later = found.writers[0][1]
    assert (later["loss_scale"], later["skipped_steps"]) == (512.0, 2) and shown == [later]
    assert len(tracker) == 1


@pytest.mark.parametrize("size", (1, 2))
def test_ranks_are_recorded_first_and_ten_times(monkeypatch, size):
    monkeypatch.setattr(hooks, "memory_gib", lambda _: 1.23456)
    monkeypatch.setattr(hooks.metrics, "gather_ranks", lambda value, mesh: [value] * mesh.size)
    monkeypatch.setattr(hooks.balance, "expert_loads", lambda spec, tallies: tallies)
    waits = []
    timeline = SimpleNamespace(add_waits=lambda: waits.append(1))
    found = make(first=3, tenth=4, timeline=timeline, mesh=SimpleNamespace(size=size))
    found.run = options(spec=None)
    for step in range(3, 13):
        found.ranks(state(step), metrics(tallies={0: [1.0]} if step == 8 else None))
    assert [step for step, _ in found.history] == [3, 4, 8, 12]
    assert found.history[0] == (3, {"memory_gib": [1.2346] * size})
    assert found.history[2][1] == {"memory_gib": [1.2346] * size, "router_load": {0: [1.0]}}
    assert len(waits) == (4 if size == 2 else 0)


def test_what_is_no_training_takes_no_time_of_it(clock):
    def takes(seconds: float, value):
        def call(*_):
            clock.seconds += seconds
            return value

        return call

    evaluator = SimpleNamespace(
        scores=takes(3.0, {"tasks/arc/acc": 0.25}),
        samples=takes(4.0, ["a\n time"]),
        prompts=["Once upon"],
    )
    found = make(
        validator=SimpleNamespace(measure=takes(7.0, ({"step": 8, "val_loss": 2.5}, ["shown"]))),
        profile=SimpleNamespace(write=takes(11.0, ["profiled"])),
        evaluator=evaluator,
    )
    found.run = options(log=SimpleNamespace(profile=8))
    found.validate(state(8), None)
    assert found.since == 507.0 and found.line == ["shown"]
    row = {"step": 8, "val_loss": 2.5, "time": 9e8 + 507, "seconds": 400.0}
    assert found.writers[0] == [row]
    found.evaluate(state(8), metrics())
    assert found.since == 514.0
    assert found.writers[0][1] == {"step": 8, "tasks/arc/acc": 0.25, "time": 9e8 + 514}
    assert found.line[1:] == ["step 8: arc/acc 0.2500", "step 8: Once upona time"]
    for step in (7, 8, 9):
        found.write_profile(state(step), metrics())
    assert found.since == 525.0 and found.line[3:] == ["profiled"]
    found.stop.agreed_signal = 15  # the time left is for saving
    found.validate(state(9), None)
    found.evaluate(state(9), metrics())
    assert found.since == 525.0 and len(found.writers[0]) == 2


def test_a_profiled_step_has_its_own_rate(clock):
    facts = []

    def write(of):
        facts.append(of(0.5))
        return []

    peak = SimpleNamespace(utilization=lambda flops, ranks: {"mfu_measured": flops * ranks})
    mesh = SimpleNamespace(size=2)
    found = make(profile=SimpleNamespace(write=write), peak=peak, flops=3.0, mesh=mesh)
    found.run = options(log=SimpleNamespace(profile=2))
    found.write_profile(state(2), metrics())
    assert facts == [{"tokens_per_second": 128.0, "mfu_measured": 768.0}]


def test_hooks_come_in_order_and_as_often_as_asked():
    found = make(tenth=10, receipts=None, evaluator=None, snapshots=None)
    found.loader = SimpleNamespace(validation_tokens=0)

    def shown() -> list[tuple[int, str]]:
        return [(every, hook.__name__) for every, hook in found.table()]

    last = [(1, "ranks"), (40, "save"), (8, "snapshot"), (1, "poll"), (1, "collect_garbage")]
    assert shown() == [(1, "count"), (5, "log"), *last]
    found.loader.validation_tokens = 9
    found.receipts, found.evaluator = SimpleNamespace(add=len), object()
    assert [every for every, _ in shown()] == [1, 1, 5, 10, 10, 1, 40, 8, 1, 1]
    assert shown()[1] == (1, "len") and [name for _, name in shown()][3:5] == [
        "validate",
        "evaluate",
    ]
    found.run = options(
        log=SimpleNamespace(every=2, profile=6, validate_every=0),
        evaluate=SimpleNamespace(every=3),
    )
    assert shown()[2:6] == [(2, "log"), (6, "write_profile"), (0, "validate"), (3, "evaluate")]


class Kept:
    """Checkpoints, or snapshots, that take notes, or fail."""

    def __init__(self, error: Exception | None = None, done: bool = True):
        self.saved, self.error, self.done, self.finished = [], error, done, 0

    def save(self, step: int, tensors, meta) -> None:
        if self.error:
            raise self.error
        self.saved.append((step, tensors, meta))

    def poll(self) -> bool:
        return self.done

    def finish(self) -> None:
        self.finished += 1


def saving(monkeypatch, **more) -> TrainingHooks:
    found = make(**more)
    meta = SimpleNamespace(meta=lambda: "meta")
    monkeypatch.setattr(TrainingHooks, "_checkpoint_state", lambda *_: meta)
    return found


def test_a_checkpoint_is_saved_and_recorded(monkeypatch):
    found = saving(monkeypatch, checkpoints=Kept())
    found.save(state(40, tensors=lambda: "tensors"), metrics())
    assert found.checkpoints.saved == [(40, "tensors", "meta")]
    assert found.history == [(40, {"saved": True})]


@pytest.mark.parametrize("done", (True, False))
def test_a_save_in_progress_is_not_waited_for(done):
    found = make(checkpoints=Kept(done=done))
    found.poll(state(1), metrics())
    assert found.checkpoints.finished == done


def test_snapshots_are_of_every_eighth_step_and_may_fail(monkeypatch, capsys):
    found = saving(monkeypatch, snapshots=Kept())
    for step in (7, 8, 9, 16, 100):
        found.snapshot(state(step, tensors=lambda: "tensors"), metrics())
    assert [step for step, *_ in found.snapshots.saved] == [8, 16]
    for first in (True, False):
        broken = saving(monkeypatch, snapshots=Kept(OSError("full")))
        broken.mesh = SimpleNamespace(first=first, rank=3)
        broken.snapshot(state(8, tensors=dict), metrics())
        text = "the last snapshot in memory was not saved: full"
        assert broken.line == ([f"WARNING: {text}"] if first else [])
        assert capsys.readouterr().err == ("" if first else f"WARNING: rank 3: {text}\n")
    none = saving(monkeypatch, snapshots=None)
    none.snapshot(state(8), metrics())


def test_a_start_is_recorded_with_the_steps_that_were_reached(monkeypatch):
    monkeypatch.setattr(hooks, "describe_device", lambda *_: "CPU")
    monkeypatch.setattr(hooks.count, "parameters", lambda spec: 1234)
    run = options(train=SimpleNamespace(device="auto"), spec=None)
    mesh = SimpleNamespace(size=4, device=None)
    for reached, want in ((27, 27), (12, 20)):
        timeline, record = SimpleNamespace(reached=22), SimpleNamespace(reached=reached)
        found = make(run=run, mesh=mesh, timeline=timeline, record=record, run_id="id")
        found.begin(state(20), "restarted", ["lr"])
        ((step, row),) = found.history
        assert (step, row["begun"], row["changed"], row["processes"]) == (
            20,
            "restarted",
            ["lr"],
            4,
        )
        assert (row["steps"], row["parameters"], row["run_id"]) == (100, 1234, "id")
        assert row["reached"] == want and timeline.reached == max(22, reached)
    other = make(run=run, mesh=mesh, timeline=None, record=None, run_id="")
    other.begin(state(0), "new", [])
    assert "reached" not in other.history[0][1]
