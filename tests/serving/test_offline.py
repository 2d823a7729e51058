"""Rows of a file of prompts: how they are shared out, how fast they are said to be, and what is cut
off a long prompt.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from dolmen.serving import offline, sampling
from dolmen.serving.offline import Meter, RowQueue
from dolmen.serving.prompt_file import PromptFile
from dolmen.serving.request import FinishedSequence, LogProb, NewToken, StepOutput


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(offline.time, "monotonic", lambda: now.seconds)
    return now


def test_the_rate_is_that_of_the_last_minute(clock):
    meter = Meter(256, 6)
    assert str(meter).startswith("6 of 256 rows, 0 tokens/s, -:-- left")
    for second in range(1, 201):  # ten tokens a second, then a hundred
        clock.seconds = 1000.0 + second
        meter.count(int(second % 10 == 0), 10 if second <= 100 else 100)
    rows, rate, left = str(meter).split(", ")
    assert rows == "26 of 256 rows" and rate == "100 tokens/s"
    # a row in ten seconds, and 230 are left
    minutes, seconds = (int(part) for part in left.removesuffix(" left").split(":"))
    assert 60 * minutes + seconds == pytest.approx(2300, rel=0.08)
    assert meter.seconds == 200 and len(meter._marks) <= 21
    assert all(clock.seconds - mark[0] <= 60 for mark in meter._marks[1:])


def test_a_line_is_due_every_half_minute(clock):
    meter, due = Meter(3, 0), []
    for second in range(100):
        clock.seconds = 1000.0 + second
        due += [second] if meter.is_due() else []
    assert due == [30, 60, 90]


class Counter(dict):
    """torch's store, in one process."""

    def add(self, key: str, number: int) -> int:
        self[key] = self.get(key, 0) + number
        return self[key]

    def set(self, key: str, value: str) -> None:
        assert key not in self
        self[key] = value.encode()

    def delete_key(self, key: str) -> None:
        del self[key]


def queue(rows: list[int], replica: int, size: int, tp: int, store) -> RowQueue:
    axes = {"dp": (replica, size), "tp": (tp, 2), "pp": (0, 1)}
    mesh = SimpleNamespace(**{n: SimpleNamespace(rank=r, size=s) for n, (r, s) in axes.items()})
    made = RowQueue(rows, mesh)
    made.store = store
    return made


@pytest.mark.parametrize("replicas", (2, 3))
@pytest.mark.parametrize("count", (1, 7, 40))
def test_every_row_is_taken_once_and_by_all_ranks_of_a_replica(monkeypatch, count, replicas):
    monkeypatch.setattr(offline.processes, "store", lambda _: None)
    rows, store = [100 + i for i in range(count)], Counter()
    queues = [[queue(rows, r, replicas, tp, store) for tp in (0, 1)] for r in range(replicas)]
    running, taken, alive = [0] * replicas, [], set(range(replicas))
    for turn in range(10 * count + 20):
        replica = turn % replicas
        numbers = [each.take(running[replica]) for each in queues[replica]]
        assert numbers[0] == numbers[1]
        if numbers[0] is not None:
            taken.append(numbers[0])
            running[replica] += 1
        elif running[replica]:
            running[replica] -= 1  # one of its rows has ended
        else:
            alive.discard(replica)
    assert sorted(taken) == rows and not alive


def test_a_replica_leaves_the_last_rows_to_others(monkeypatch):
    monkeypatch.setattr(offline.processes, "store", lambda _: None)
    store = Counter()
    first = queue(list(range(8)), 0, 2, 0, store)
    taken = [first.take(running) for running in range(8)]
    # with four rows at work and four left, the share of each of two replicas is four
    assert taken == [0, 1, 2, 3, None, None, None, None] and first.take(0) == 4


def test_alone_rows_come_in_order():
    axis = SimpleNamespace(rank=0, size=1)
    alone = RowQueue([5, 7], SimpleNamespace(dp=axis, tp=axis, pp=axis))
    assert [alone.take(0), alone.take(1), alone.take(2), alone.take(0)] == [5, 7, None, None]


@pytest.mark.parametrize("begin", (1, 50))
def test_a_cut_prompt_keeps_its_end_and_its_beginning_token(begin):
    tokens = [begin, *range(2, 12)]
    file = SimpleNamespace(tokenizer=SimpleNamespace(bos_token_id=1))
    for most in range(1, 12):
        cut = PromptFile._cut(file, tokens, most)
        assert len(cut) == most
        assert cut == ([1, *tokens[len(tokens) - most + 1 :]] if begin == 1 else tokens[-most:])


@pytest.mark.parametrize("size, p", ((40, 0.3), (3000, 0.5), (3000, 0.9999)))
def test_a_nucleus_is_the_beginning_of_the_sorted_logits(size, p):
    """Enough of them: those that are left out are those after probability p."""
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(size)).double() * 3
    total = logits.logsumexp(-1, keepdim=True)
    found = sampling._nucleus(logits, total, p)
    ordered = logits.sort(-1, descending=True).values
    assert torch.equal(found, ordered[:, : found.shape[1]])
    assert ((found - total).exp().sum(-1) >= p).all()
    kept = sampling.keep_top_p(logits, p).isfinite()
    for row, mask in zip(logits, kept, strict=True):
        shares = row.softmax(-1).sort(descending=True).values.cumsum(-1)
        assert int(mask.sum()) == int((shares < p).sum()) + 1
        assert row[mask].min() > row.masked_fill(mask, -math.inf).max()


def test_what_is_left_out_cut_or_limited_is_counted(capsys):
    config = SimpleNamespace(max_input_tokens=5)

    def shown(**counts) -> list[str]:
        summary = SimpleNamespace(**{"bad": 0, "cut": 0, "short": 0} | counts)
        offline._print_summary(summary, config, True)
        return capsys.readouterr().err.splitlines()

    assert shown() == []
    assert shown(bad=1) == ["1 row skipped: they are invalid"]
    assert shown(cut=2) == ["2 prompts truncated to 5 tokens, from the left"]
    assert shown(short=3) == ["3 rows may end before --max-new-tokens, at max_position_embeddings"]
    offline._print_summary(SimpleNamespace(bad=1, cut=1, short=1), config, False)
    assert capsys.readouterr().err == ""


class Stops:
    """Stop strings: none; a sample's text are its tokens."""

    def __init__(self, tokenizer, stop):
        assert (tokenizer, stop) == ("tokenizer", ("!",))

    def finish(self, engine, output):
        return output.finished

    def take_text(self, sequence):
        return "".join(map(chr, sequence.tokens)), sequence.finish_reason


class Engine:
    """Takes requests, and numbers them from 100 on."""

    def __init__(self, rows: int):
        self.limits, self.requests = SimpleNamespace(rows=rows), []

    def add(self, request) -> int:
        self.requests.append(request)
        return 99 + len(self.requests)

    @property
    def busy(self) -> bool:
        return bool(self.requests)


class Prompts:
    """Six rows of a file, of which rows 1, 3 and 4 are valid."""

    tokenizer = "tokenizer"

    def __init__(self, samples: int, logprobs: int | None):
        self.config = SimpleNamespace(num_samples=samples, stop=("!",), logprobs=logprobs)

    def rows_at(self, places):
        for place in places:
            yield SimpleNamespace(fields={"prompt": f"p{place}"}, where=f"file:{place}")

    def request(self, row):
        return row.fields["prompt"], True


class Output(dict):
    def add(self, number: int, row) -> None:
        assert number not in self
        self[number] = row


def finished(number: int, sample: int, text: str, why: str = "stop", close: int = 0):
    logprobs = [LogProb(-0.5 * i, ()) for i in range(len(text))]
    tokens = [*map(ord, text)]
    return FinishedSequence(number, sample, 0, tokens, why, logprobs, [], close)


def runner(rows: list[int], samples: int, logprobs: int | None = None, done: int = 0):
    prompts = Prompts(samples, logprobs)
    job = SimpleNamespace(
        prompts=prompts, config=prompts.config, summary=SimpleNamespace(places=[1, 3, 4])
    )
    axis = SimpleNamespace(rank=0, size=1)
    queue = RowQueue(rows, SimpleNamespace(dp=axis, tp=axis, pp=axis))
    return offline.RowRunner(job, queue, Output(), Meter(3, done))


def step(*ends, new: int = 0) -> StepOutput:
    return StepOutput([NewToken(0, 0, 1, None)] * new, list(ends))


@pytest.fixture
def stops(monkeypatch):
    monkeypatch.setattr(offline, "StopStrings", Stops)


def test_a_row_is_written_with_its_last_sample(stops):
    run, engine = runner([0, 1, 2], samples=2), Engine(rows=5)
    assert run.feed(engine) and engine.requests == ["p1", "p3"]  # two rows of two samples fit
    run.handle(engine, step(finished(101, 1, "bb", close=2), finished(100, 0, "a"), new=5))
    assert run.output == {} and not run.write_finished() and run.meter.tokens == 5
    run.handle(engine, step(finished(101, 0, "b", "length", close=1), new=2))
    samples = [
        {"text": "b", "tokens": [98], "finish_reason": "length"},
        {"text": "bb", "tokens": [98, 98], "finish_reason": "stop"},
    ]
    assert run.output == {1: {"prompt": "p3", "samples": samples}}
    assert (run.meter.done, run.meter.tokens, run.close) == (1, 7, 3)
    run.feed(engine)
    assert engine.requests == ["p1", "p3", "p4"]
    ends = finished(100, 1, "c"), finished(102, 0, "d"), finished(102, 1, "e")
    run.handle(engine, step(*ends))
    assert set(run.output) == {0, 1, 2} and run.write_finished()
    assert [s["text"] for s in run.output[0]["samples"]] == ["a", "c"]


def test_rows_that_are_written_are_not_generated_again(stops):
    run, engine = runner([2], samples=1, logprobs=0, done=2), Engine(rows=1)
    run.feed(engine)
    assert engine.requests == ["p4"]
    run.handle(engine, step(finished(100, 0, "xy"), new=2))
    one = {"text": "xy", "tokens": [120, 121], "finish_reason": "stop", "logprobs": [-0.0, -0.5]}
    assert run.output == {2: {"prompt": "p4"} | one} and run.write_finished()
    small = runner([0], samples=4)  # more samples than the engine takes at once
    small.feed(engine)
    assert engine.requests == ["p4", "p1"]
    small.output = None
    assert small.write_finished()  # of ranks that write nothing


def test_a_row_of_a_model_that_has_diverged_is_named(stops):
    run, engine = runner([0, 1], samples=1), Engine(rows=9)
    run.feed(engine)
    with pytest.raises(ValueError, match="^file:3: the logits of new token 4 are not finite"):
        run.handle(engine, step(finished(100, 0, "a"), finished(101, 0, "abc", "not finite")))


def test_a_summary_has_the_rate_and_near_ties(clock):
    meter = Meter(3, 0)
    clock.seconds += 8.0
    meter.count(3, 4000)
    job = SimpleNamespace(output="out.jsonl", summary=SimpleNamespace(places=[1, 2, 3]))
    text = "wrote out.jsonl: 3 rows; 4,000 new tokens in 8.0 s, 500 per second"
    assert offline._summary(job, meter, 0) == text
    ties = "; 1 token had a runner-up within 1e-4, which another batch or layout may choose"
    assert offline._summary(job, meter, 1) == text + ties


def test_rows_that_an_output_lacks_are_listed():
    job = SimpleNamespace(summary=SimpleNamespace(places=range(5)))
    output = SimpleNamespace(has=lambda row: row in (0, 3))
    mesh = SimpleNamespace(size=1)
    assert offline._list_unfinished_rows(job, output, mesh) == [1, 2, 4]


def test_rows_of_replicas_are_collected_once_in_order(monkeypatch):
    monkeypatch.setattr(offline.processes, "store", lambda _: None)
    store = Counter()
    first, other = (queue([0, 1, 2], replica, 2, 0, store) for replica in (0, 1))
    silent = queue([0, 1, 2], 1, 2, 1, store)
    silent.finish(9, {"text": "not the first rank of its replica"})
    assert [*first.collect()] == []
    other.finish(1, {"text": "b"})
    first.finish(0, {"text": "a"})
    assert [*first.collect()] == [(1, {"text": "b"}), (0, {"text": "a"})]
    other.finish(2, {"text": "c"})
    assert [*first.collect()] == [(2, {"text": "c"})] and [*first.collect()] == []
    assert not [key for key in store if key.startswith("ask")]
