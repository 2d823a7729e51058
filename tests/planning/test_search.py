"""`dolmen plan` and `dolmen.plan`: what they answer, and what they refuse, without torch's work."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import plans
import pytest
import tinyrun
import yaml
from rich.console import Console
from tinyrun import dolmen

import dolmen as package
from dolmen.cli.command import read
from dolmen.planning import answer, pricing, search
from dolmen.planning.config import PlanConfig, PlanRequest, StepConfig
from dolmen.planning.plan import Compared, DryRun, RankRun
from dolmen.planning.question import Question
from dolmen.planning.space import Pins
from dolmen.recipes import RECIPES

material, one_thread = tinyrun.material, tinyrun.one_thread


def question(name: str, cluster: str, pins: Pins | None = None, **step) -> Question:
    config = PlanConfig(cluster=cluster, layout=pins or Pins(), train=StepConfig(**step))
    return Question.from_request(PlanRequest(name, RECIPES[name](), config))


def test_the_answer_is_the_fastest_of_what_fits():
    """Beside all layouts, simulated one by one; those listed are sorted, and differ in more than
    ZeRO.
    """
    pins = Pins(tp=8, zero=1, recompute="full")
    question_ = question("gpt-39b", "dgx-a100:2", pins, global_batch_size=64, compile=False)
    found = search.make_plan(question_, PlanConfig(top=5, dryrun=False))
    every = list(question_.space().choices())
    fitting = [choice for choice in every if question_.fits(choice)]
    assert (found.considered, found.fitting) == (len(every), len(fitting))
    assert found.fitting < found.considered
    best = min(question_.pricing.full(choice).estimate.seconds for choice in fitting)
    seconds = [one.estimate.seconds for one in found.ranked]
    assert seconds == sorted(seconds) and seconds[0] <= 1.01 * best
    for one in found.ranked:
        assert one.fullest <= question_.cluster.device.memory
        assert one.estimate.low < one.estimate.seconds < one.estimate.high
        assert sum(one.estimate.parts.values()) == pytest.approx(one.estimate.seconds)
        assert 0 < one.mfu < one.hfu <= 1  # all is computed again
        assert one.layout["layout.recompute"] == "full"


def test_a_headroom_is_left_free():
    """By what is listed, by changes of it and by the dry run; 0 fills the device."""
    pins, found = Pins(tp=8, zero=1, recompute="none"), {}
    for headroom in (0.0, 0.3):
        config = PlanConfig(
            cluster="dgx-a100:2",
            layout=pins,
            train=StepConfig(global_batch_size=64),
            headroom=headroom,
        )
        asked = Question.from_request(PlanRequest("gpt-7.5b", RECIPES["gpt-7.5b"](), config))
        found[headroom] = search.make_plan(asked, replace(config, dryrun=False))
        limit = (1 - headroom) * asked.cluster.device.memory
        assert max(one.fullest for one in found[headroom].ranked) <= limit
        text = "fit into 80.00 GiB" + (" less a headroom of 30%" if headroom else "")
        assert answer.title(found[headroom]).endswith(text)
    assert found[0.3].fitting < found[0.0].fitting and found[0.3].considered
    assert PlanConfig().headroom == 0.05


def test_keys_are_not_gathered_where_a_ring_is_as_fast():
    """What a rank holds is counted as of a ring, which never has the keys of a whole sequence."""
    pins = Pins(tp=1, cp=8, pp=1, zero=3, recompute="full")
    question_ = question("llama-8b", "hgx-h100:1", pins, sequence_length=32768, global_batch_size=8)
    found = search.search_layouts(question_)
    assert {choice.context for choice in found.best} == {"ring"}
    assert {choice.context for choice in question_.space().choices()} == {"ring", "gather"}


def test_changes_are_of_one_thing_and_say_what_they_lack():
    question_ = question("gpt3-175b", "dgx-a100:16", global_batch_size=128)
    (plain,) = search.make_plan(question_, PlanConfig(top=1, dryrun=False)).ranked
    (best,) = search.make_plan(question_, PlanConfig(top=1, dryrun=False, explain=True)).ranked
    assert not plain.changes and plain == replace(best, changes=())
    reported = {change.words: change for change in best.changes}
    assert any(not change.fits for change in reported.values())
    memory = question_.cluster.device.memory
    assert all(change.fits == (change.held <= memory) for change in reported.values())
    names = {word for change in reported for word in change.split() if not word.isdigit()}
    assert names & {"tp", "pp"} and "dp" not in names


def test_what_does_not_fit_is_told_with_what_does():
    """By how much, on which layout; what is nearest with fewer parts given, or on more nodes."""
    pins = Pins(tp=1, pp=1, zero=1)
    pinned = question("llama-70b", "hgx-h100:8", pins, global_batch_size=64)
    with pytest.raises(ValueError, match="GiB too many; the nearest that fits is ") as refusal:
        search.make_plan(pinned, PlanConfig())
    assert "none of " in str(refusal.value) and "\n" not in str(refusal.value)
    small = question("llama-70b", "hgx-h100:1", global_batch_size=8)
    with pytest.raises(ValueError, match="too many: use --cluster hgx-h100:2 or more"):
        search.make_plan(small, PlanConfig())


def test_a_million_layouts_are_no_more_work_than_their_kinds(monkeypatch):
    """The rows of a block are made once for all layouts that give it the same sizes."""
    question_ = question("gpt-1t", "dgx-a100:384", Pins(tp=8))
    made = []
    real = pricing.block_rows
    monkeypatch.setattr(pricing, "block_rows", lambda *a: made.append(a) or real(*a))
    found = search.search_layouts(question_)
    assert found.considered > 10_000 and len(made) < 200


def test_a_change_takes_what_its_own_plan_says():
    """Each is simulated, as the layout is that it is told beside: of uneven chunks the closed form
    is off by a third.
    """
    pins = Pins(tp=2, pp=4, zero=1, schedule="interleaved", virtual_stages=6)
    question_ = question("gpt-7.5b", "dgx-a100:2", pins, global_batch_size=32, microbatch_size=2)
    (best,) = search.make_plan(question_, PlanConfig(top=1, dryrun=False, explain=True)).ranked
    reported = {change.words: change for change in best.changes}
    for words, pin in (
        ("virtual-stages 5", dict(virtual_stages=5, recompute="none")),
        ("recompute full", dict(recompute="full")),
    ):
        other = replace(question_, pins=replace(pins, **pin))
        (alone,) = search.make_plan(other, PlanConfig(top=1, dryrun=False)).ranked
        change = reported[words]
        assert change.seconds == pytest.approx(alone.estimate.seconds)
        assert change.held == alone.fullest


REFUSED = {
    "gpt-1tt --cluster dgx-a100": "did you mean gpt-1t",
    "gpt-1t --cluster dgx-a10": "did you mean dgx-a100",
    "gpt-1t": "missing --cluster",
    "--cluster dgx-a100": "name a model first",
    "gpt-1t --cluster dgx-a100:0": "has no nodes: use 1 or more",
    "gpt-1t --cluster dgx-a100:561": "560 nodes, but 561 are requested",
    "gpt-1t --cluster dgx-a100:384 --layout.tp 3": "not divisible by tp (3)",
    "gpt-1t --cluster dgx-a100:384 --layout.pp 5": "layout.pp (5) is not a divisor of the 3,072",
    "gpt-1t --cluster dgx-a100:384 --layout.tp 0": "layout.tp is 0: it must be at least 1",
    "gpt-1t --cluster dgx-a100:384 --layout.tp 2 --layout.dp 4096": "but there are 3072",
    "gpt-1t --cluster dgx-a100:384 --layout.ep 2": "the model has none",
    "gpt-1t --cluster dgx-a100:384 --layout.recompute none --layout.recompute-layers 2": "full",
    "gpt-1t --cluster dgx-a100:384 --train.sequence-length 4096": "exceeds the model's max",
    "gpt-1.7b --cluster dgx-a100:384 --train.global-batch-size 7": "by any possible dp",
    "gpt-1t --cluster dgx-a100:384 --train.global-batch-size 0": "must be at least 1",
    "gpt-1t --cluster dgx-a100 --train.microbatch-size 7": "train.microbatch-size",
    "gpt-1t --cluster dgx-a100 --top 0": "top is 0: it must be at least 1",
    "gpt-1t --cluster dgx-a100 --batch 8": "--batch and --length are for generation: add",
    "gpt-1t --cluster dgx-a100 --tokens -1": "tokens is -1",
    "gpt-1t --cluster dgx-a100 --layout.schedule zero-bubble --train.compile": "exclude each other",
    "gpt-1t --cluster dgx-2h --train.dtype bfloat16": "has no peak rate for bf16",
    "bert --cluster dgx-a100 --inference": "which cannot generate",
    "llama-8b --cluster dgx-a100 --inference --layout.pp 2": "is for training",
    "llama-8b --cluster dgx-a100 --inference --headroom 0.2": "headroom (0.2) is for training",
    "llama-8b --cluster dgx-a100 --inference --length 999999": "max_position_embeddings",
    "pretrain --cluster dgx-a100": "has no model of its own",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_one_line_and_exit_2(words):
    result = dolmen("plan", *words.split())
    assert result.code == 2 and not result.out
    assert REFUSED[words] in result.err and result.err.count("\n") == 1, result.err


def test_a_folder_is_refused_by_what_it_lacks(tmp_path):
    result = dolmen("plan", tmp_path, "--cluster", "dgx-a100")
    assert result.code == 2 and "has neither a config.json nor a config.yaml" in result.err
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    found = package.plan(
        str(tmp_path), "hgx-h100:2", train={"global_batch_size": 32}, top=1, dryrun=False
    )
    assert found.parameters == 6_738_415_616 and found.dtype == "bf16"
    assert found.assumed == ("train.sequence-length",)


def test_a_plan_of_exact_numerics_warns(tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text("model: {model_type: llama}\ntrain: {numerics: exact}\n")
    words = "--cluster", "hgx-h100:1", "--no-dryrun", "--layout.tp", 8, "--layout.recompute", "full"
    plan = dolmen("plan", run, *words)
    assert plan.code == 0 and "WARNING: plans count fast numerics" in plan.err


def test_a_batch_and_a_length_that_nobody_says_are_told(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    words = "--cluster", "hgx-h100:1", "--no-dryrun", "--layout.tp", 8, "--layout.recompute", "full"
    result = dolmen("plan", tmp_path, *words)
    knobs = "--train.global-batch-size and --train.sequence-length"
    said = f"(a default; set {knobs})"
    assert "8 sequences of 512 = " in result.out and said in " ".join(result.out.split())
    given = knobs.replace(" and", " 8").split()
    assert "default" not in dolmen("plan", tmp_path, *words, *given, 512).out
    assert "default" not in dolmen("plan", "gpt-1.7b", *words).out


def test_the_verb_and_the_function_say_the_same(tmp_path):
    words = "gpt-7.5b --cluster dgx-a100:4 --layout.tp 4 --layout.sequence-parallel --top 2"
    said = json.loads(dolmen("plan", *words.split(), "--no-dryrun", "--json").out)
    found = package.plan(
        "gpt-7.5b", "dgx-a100:4", layout={"tp": 4, "sequence_parallel": True}, top=2, dryrun=False
    )
    assert [one["layout"] for one in said["ranked"]] == [one.layout for one in found.ranked]
    assert [one["seconds"] for one in said["ranked"]] == [
        one.estimate.seconds for one in found.ranked
    ]
    stages = said["ranked"][0]["stages"]
    assert max(stage["total"] for stage in stages) == found.ranked[0].fullest
    with pytest.raises(ValueError, match="^layout.tp is 0"):
        package.plan("gpt-7.5b", "dgx-a100:4", layout={"tp": 0})
    with pytest.raises(ValueError, match="^the model is 3: it must be a recipe"):
        package.plan(3, "dgx-a100:4")  # type: ignore[arg-type]


@pytest.mark.parametrize("name, file", [("page", "page/index.html"), ("to/a.html", "to/a.html")])
def test_a_page_is_written_beside_the_table(tmp_path, name, file):
    result = dolmen(
        "plan", *"gpt-1.7b --cluster dgx-a100:2 --no-dryrun --report".split(), tmp_path / name
    )
    assert result.code == 0 and f"wrote {tmp_path / file}" in result.out
    assert "gpt-1.7b" in (tmp_path / file).read_text()


@pytest.mark.parametrize(
    "option, name",
    [
        ("--report", "file"),
        ("--report", "file/page"),
        ("--as-recipe", "none/made.yaml"),
        ("--as-recipe", "folder.yaml"),
        ("--json", "folder.yaml"),
        ("--json", "file"),
        ("--as-recipe", "mine.yaml"),
        ("--report", "site"),
        ("--report", "site/index.html"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_planned(
    option, name, tmp_path, monkeypatch
):
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "site").mkdir()
    mine = [tmp_path / name for name in ("file", "mine.yaml", "site/index.html")]
    for file in mine:
        file.write_text("model: mine\n")
    monkeypatch.setattr(search, "make_plan", lambda *_, **__: pytest.fail("it was planned"))
    refused = dolmen("plan", "gpt-1.7b", "--cluster", "dgx-a100:2", option, tmp_path / name)
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert f"{option} {tmp_path / name}" in refused.err
    assert {one.name for one in tmp_path.iterdir()} == {"file", "folder.yaml", "mine.yaml", "site"}
    assert {file.read_text() for file in mine} == {"model: mine\n"}
    dry = dolmen("dryrun", "gpt-1.7b", "--json", mine[0])
    assert dry.code == 2 and "file exists: give another name" in dry.err


def test_a_terminal_is_told_what_bounds_and_what_it_costs(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    words = (
        "gpt-7.5b --cluster dgx-a100:4 --explain --top 3 --tokens 1e11 --rent 2 --node-price 2e5 "
        "--no-dryrun"
    )
    result = dolmen("plan", *words.split())
    lines = result.out.splitlines()
    table = lines[: next(i for i, line in enumerate(lines) if line.startswith("GiB:"))]
    assert result.code == 0 and all(len(line) <= 100 for line in table)
    assert "MFU: floating-point operations of the model" in result.out
    command = next(line for line in lines if line.startswith("Exact memory: dolmen dryrun "))
    requested = read("dryrun", command.split()[4:])
    assert requested.run.layout.world == 32 and requested.options.device == "a100"
    assert "100 B tokens" in result.out and "rented: " in result.out and "owned: " in result.out
    assert result.out.count("bound by ") == 3 and "more time" in result.out


def test_layouts_within_the_interval_of_the_fastest_are_one_group():
    """Each group is measured from its own first layout, so that no chain of ties grows long."""
    found = plans.plan()
    assert found.ties == (1, 1, 1, 1, 2, 2, 2, 2)  # 98 s, to 110.7, in steps of 3.27 s
    reported = StringIO()
    Console(file=reported, width=120).print(answer.table(found))
    letters = [line.split()[1] for line in reported.getvalue().splitlines() if line[:1].isdigit()]
    assert letters == list("AAAABBBB")
    assert [one["tie"] for one in answer.plan_dict(found)["ranked"]] == list(found.ties)


def test_the_seconds_of_bytes_that_closed_forms_miss_are_told():
    """A quarter of the bytes is missing of a link that is busy for 3 s: 1 s more, of 98."""
    sent = (Compared("dp", 400, 300, seconds=3.0), Compared("tp", 1000, 1001, seconds=50.0))
    rank = RankRun(0, Compared("peak", 8, 8), (), sent)
    (line,) = [
        x
        for x in answer.dry_run_lines(replace(plans.plan(), dry=DryRun((rank,))))
        if "busy" in str(x)
    ]
    assert isinstance(line, str) and line.startswith("dp: links are busy for 1 s per step longer")
    assert "(-25.0% of bytes)" in line and "which changes its 98 s by at most +1.0%" in line


CLUSTER = """
device: {device}
gpus_per_node: 2
nodes: 1
inside: {{gb_s: 10, latency_us: 20, share: 0.8}}
sources: {{}}
"""


def test_a_recipe_has_what_was_given_and_says_what_it_lacks(tmp_path):
    """The tokens that were planned, and a tokenizer that lies beside the model."""
    folder, made = tmp_path / "a model", tmp_path / "made.yaml"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    words = "--cluster", "hgx-h100:1", "--no-dryrun", "--layout.tp", 8, "--layout.recompute", "full"
    words += "--train.global-batch-size", 16, "--as-recipe", made
    bare = dolmen("plan", folder, *words)
    assert f": dolmen train {made} --data.path TEXT --data.tokenizer FOLDER\n" in bare.out
    assert yaml.safe_load(made.read_text())["train"]["tokens"] is None
    (folder / "tokenizer.json").write_text("{}")
    made.unlink()
    result = dolmen("plan", folder, *words, "--tokens", "1e9")
    assert result.out.endswith(f": dolmen train {made} --data.path TEXT\n")
    run = yaml.safe_load(made.read_text())
    assert run["data"]["tokenizer"] == str(folder) and run["train"]["tokens"] == 1e9
    assert run["train"]["global_batch_size"] == 16 and run["train"]["steps"] is None


@pytest.mark.slow
@pytest.mark.spawn
def test_a_plan_is_a_run_that_trains(material, tmp_path, forked_ranks):
    """On two processes, from the file of --as-recipe."""
    cluster, run = tmp_path / "two.yaml", tmp_path / "run.yaml"
    cluster.write_text(CLUSTER.format(device="h100"))
    run.write_text(yaml.safe_dump(material.options(), sort_keys=False))
    made = tmp_path / "made.yaml"
    words = ("--layout.tp", 2, "--train.dtype", "float32", "--no-dryrun", "--as-recipe", made)
    result = dolmen("plan", run, "--cluster", cluster, *words)
    assert result.code == 0 and f"wrote {made}: dolmen train {made}" in result.out
    layout = yaml.safe_load(made.read_text())["layout"]
    assert (layout["tp"], layout["dp"]) == (2, 1)
    trained = dolmen("train", made, "--out", tmp_path / "out", "--nproc", 2, "--train.steps", 2)
    assert trained.code == 0, trained.err
    assert Path(tmp_path / "out/metrics.jsonl").read_text().count("loss") >= 2


def test_inference_is_weights_and_cache():
    """Of Llama 3.1 70B, in bytes by hand: 2 for each parameter; 80 layers of 8 heads of 128, twice,
    for each token.
    """
    found = package.plan_inference("llama-70b", "hgx-h100:1", batch=4, length=8192)
    rows = {row.tp: row for row in found.rows}
    assert {*rows} == {1, 2, 4, 8}
    assert rows[1].weights == 2 * 70_553_706_496 and not rows[1].fits
    assert rows[1].cache == 4 * 8192 * 80 * 8 * 128 * 2 * 2 == 8 * rows[8].cache
    assert rows[8].fits and rows[8].most_texts > 4
    device = found.cluster.device
    read = (rows[8].weights + rows[8].cache) / (device.bandwidth * device.streaming)
    assert rows[8].seconds > read and rows[8].bound == "memory"
    many = package.plan_inference("llama-70b", "hgx-h100:1", batch=4096, length=128, tp=8)
    assert many.rows[0].bound == "compute"
    result = dolmen("plan", "llama-70b", "--cluster", "hgx-h100:1", "--inference", "--batch", 4)
    assert result.code == 0 and "ms/token" in result.out
