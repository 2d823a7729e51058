"""The dry run of a plan's first layout: what it says, what it strikes off, and that it is kept."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import tinyrun
import yaml
from tinyrun import dolmen

from dolmen.families import replace_fields
from dolmen.ops.kernels import KNOWN
from dolmen.planning import answer, search, winner
from dolmen.planning import dryrun as dry
from dolmen.planning.config import PlanConfig, PlanRequest, StepConfig
from dolmen.planning.dryrun import dryrun
from dolmen.planning.plan import Plan
from dolmen.planning.question import Question
from dolmen.planning.space import Pins
from dolmen.recipes import RECIPES

ASKED = PlanConfig(
    cluster="dgx-a100:1",
    layout=Pins(tp=2, pp=2, dp=2, zero=1, schedule="1f1b", recompute="none"),
    train=StepConfig(global_batch_size=16, sequence_length=128, microbatch_size=2, dropout=0),
    top=2,
)


def question(requested: PlanConfig = ASKED) -> Question:
    run = RECIPES["gpt-1.7b"]()
    model = replace_fields(
        run.known_model, {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 512}
    )
    return Question.from_request(PlanRequest("small", replace(run, model=model), requested))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(winner, "measured_at", lambda: tmp_path)


def shown_plan(found: Plan) -> str:
    return "\n".join(str(line) for line in answer.dry_run_lines(found))


@pytest.mark.slow
def test_it_is_the_real_step_of_the_first_layout_and_is_kept(home, monkeypatch):
    question_ = question()
    found = search.make_plan(question_, ASKED)
    assert found.dry is not None and not found.dry.rejected and not found.dry.left_out
    run = question_.run_with_layout(found.ranked[0].layout)
    ledgers = [dryrun(run, rank, hardware=KNOWN["a100"]) for rank in (0, 4, 7)]
    assert [one.rank for one in found.dry.ranks] == [one.rank for one in ledgers]
    assert [one.peak.counted for one in found.dry.ranks] == [one.peak for one in ledgers]
    for one in found.dry.ranks:
        assert sum(kind.counted for kind in one.held) == one.peak.counted
        assert sum(kind.closed_form for kind in one.held) == one.peak.closed_form
        for axis in one.sent:  # what closed forms leave out is the loss's, and small
            assert axis.off == pytest.approx(0, abs=0.1), (one.rank, axis)
    monkeypatch.setattr(dry, "report", lambda *_: pytest.fail("it was run once more"))
    assert search.make_plan(question(), ASKED).dry == found.dry


RUN = {
    "name": "tiny",
    "model": tinyrun.CONFIG,
    "layout": {"tp": 4, "schedule": "gpipe", "recompute": "full"},
    "train": {"dtype": "float32", "dropout": 0.1, "compile": True, "global_batch_size": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("zero", (2, pytest.param(3, marks=pytest.mark.full)))
def test_what_is_gathered_and_scattered_is_counted_as_it_is_sent(zero, home):
    """With four microbatches, ZeRO 2 gathers for each, and ZeRO 3 twice."""
    layout = replace(ASKED.layout, tp=1, pp=1, dp=8, zero=zero)
    train = replace(ASKED.train, global_batch_size=32, microbatch_size=1)
    question_ = question(replace(ASKED, layout=layout, train=train))
    (choice,) = question_.space().choices()
    (rank, *_) = winner.confirm(question_, [choice], False).ranks
    assert [axis.name for axis in rank.sent] == ["dp"]
    # fsdp pads what dp does not divide, and ZeRO 3 gathers the ends once less
    assert rank.sent[0].off == pytest.approx(0, abs=0.02 if zero == 2 else 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("model", ("a b.yaml", pytest.param("a folder", marks=pytest.mark.full)))
def test_the_command_that_is_printed_is_that_dry_run(model, home, tmp_path, monkeypatch):
    """Word by word as a shell would take them: the same bytes and messages of each rank."""
    monkeypatch.chdir(tmp_path)
    Path("a b.yaml").write_text(yaml.safe_dump(RUN))
    Path("a folder").mkdir()
    Path("a folder/config.json").write_text(json.dumps(tinyrun.CONFIG))
    words = (
        "--cluster dgx-a100:1 --layout.pp 2 --layout.recompute selective --layout.recompute-layers "
        "1 --train.sequence-length 32 --train.global-batch-size 16 --train.dropout 0.2 --top 1"
    )
    planned = dolmen("plan", model, *words.split())
    line = next(one for one in planned.out.splitlines() if one.startswith("Exact memory: "))
    result = dolmen(*shlex.split(line)[3:], "--json", "run.json")
    assert (planned.code, result.code) == (0, 0), (planned.err, result.err)
    (kept,) = (tmp_path / "winners").iterdir()
    assert json.loads(Path("run.json").read_text()) == json.loads(kept.read_text())


def counted(peak: int) -> list[dict]:
    live = dict.fromkeys(winner.WORDS.values(), 0) | {"parameter": peak}
    return [{"rank": 0, "peak_bytes": peak, "live_bytes": live, "collectives": []}]


def test_what_it_finds_too_large_or_crashing_is_not_listed(monkeypatch):
    free = replace(ASKED, layout=Pins(tp=2))
    question_ = question(free)
    plain = search.make_plan(question_, replace(free, dryrun=False, top=9))
    results = iter([ValueError("it would crash"), counted(1 << 40), counted(1 << 20)])

    def result(*_):
        one = next(results)
        if isinstance(one, Exception):
            raise one
        return one

    monkeypatch.setattr(winner, "count_ranks", result)
    found = search.make_plan(question_, free)
    assert found.dry is not None and len(found.dry.rejected) == 2
    assert found.ranked == plain.ranked[2:4]
    assert "it would crash" in found.dry.rejected[0]
    assert "1026.00 GiB by the dry run, 950.00 GiB too much" in found.dry.rejected[1]
    assert "excluded by the dry run: tp 2" in shown_plan(found)


def test_a_run_of_which_no_layout_passes_keeps_its_ranking(monkeypatch):
    free = replace(ASKED, layout=Pins(tp=2))
    question_ = question(free)
    monkeypatch.setattr(winner, "count_ranks", lambda *_: counted(1 << 40))
    found = search.make_plan(question_, free)
    assert found.ranked == search.make_plan(question_, replace(free, dryrun=False)).ranked
    assert "No dry run of the first layout: none of the first 3 layouts passes" in shown_plan(found)


def test_what_takes_minutes_is_left_out(home, monkeypatch):
    split = replace(ASKED, layout=replace(ASKED.layout, schedule="zero-bubble"))
    monkeypatch.setattr(winner, "MOST", 10)
    found = search.make_plan(question(split), split)
    assert "blocks one by one, which takes minutes" in shown_plan(found)
