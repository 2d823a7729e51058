"""The loop: whose turn it is when, and how it stops."""

from itertools import count
from types import SimpleNamespace

import pytest

from dolmen.core.mesh import SINGLE
from dolmen.training import loop
from dolmen.training.loop import Stop, train_steps


@pytest.fixture
def made(monkeypatch):
    """Steps that cost nothing: what was asked for, in order."""
    calls = []

    def step(state, batch, mesh, signal):
        calls.append((state.step, batch))
        state.step += 1
        return SimpleNamespace(text=f"metrics {state.step}", signal=signal())

    monkeypatch.setattr(loop, "optimizer_step", step)
    return calls


class Whose(tuple):
    """Batch s of rank r of n: no tokens, so every model reads it as it is."""

    def read_by(self, spec):
        return self


class Batches:
    """Batch s of rank r of n is (s, r, n), for ever."""

    def starting_at(self, step, rank, ranks):
        for now in count(step):
            yield now, Whose((now, rank, ranks))


def go(start: int, steps: int, hooks, stop: Stop | None = None) -> int:
    return train_steps(
        SimpleNamespace(step=start, steps=steps, model=SimpleNamespace(spec=None), critic=None),
        Batches(),
        SINGLE,
        hooks,
        stop or Stop(),
    )


def test_hooks_have_their_turn_and_all_are_called_last(made):
    called = []
    hooks = [
        (every, lambda state, m, every=every: called.append((every, state.step, m.text)))
        for every in (1, 3, 0)
    ]
    assert go(2, 7, iter(hooks)) == 0
    assert made == [(s, (s, 0, 1)) for s in range(2, 7)]
    assert called == [
        (1, 3, "metrics 3"),
        (3, 3, "metrics 3"),
        (1, 4, "metrics 4"),
        (1, 5, "metrics 5"),
        (1, 6, "metrics 6"),
        (3, 6, "metrics 6"),
        *((every, 7, "metrics 7") for every in (1, 3, 0)),
    ]


def test_nothing_left(made):
    assert go(5, 5, []) == 0 and made == []


def test_a_request_ends_after_the_step_it_came_in_with_all_hooks(made):
    stop, called = Stop(), []

    def ask(state, m):
        if state.step == 3:
            stop.signal = 15

    assert go(0, 100, [(1, ask), (50, lambda state, m: called.append(state.step))], stop) == 15
    assert called == [4] and len(made) == 4 and stop.agreed_signal == 15


@pytest.mark.parametrize("sampled", (False, True))
def test_what_is_drawn_has_as_much_time_as_the_first_batch(made, sampled):
    beats = []
    watch = SimpleNamespace(beat=lambda step, phase, patient=False: beats.append((phase, patient)))
    state = SimpleNamespace(step=0, steps=2, model=SimpleNamespace(spec=None), critic=None)
    train_steps(state, Batches(), SINGLE, [], Stop(), watch, generates=sampled)
    assert ("the first batch", True) in beats and ("the next batch", sampled) in beats
