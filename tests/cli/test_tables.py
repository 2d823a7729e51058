"""Tables and summaries that commands end with: every cell is the number that it stands for, and
columns of numbers are aligned on the right.
"""

import json
import math
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from rich.table import Table

from dolmen.cli import listings, planning
from dolmen.cli.parse import WIDTH, Option, OptionGroup, full_help
from dolmen.comparison import diff
from dolmen.comparison.compare import TensorComparison
from dolmen.core.config import Mark
from dolmen.evaluation import tasks, verify
from dolmen.files.gate import Refused
from dolmen.parallel.simulation import make_schedule, simulate
from dolmen.recipes import RECIPES
from dolmen.training import finish
from dolmen.training.run import read_summary
from dolmen.vocabulary.check import Counts
from dolmen.vocabulary.extend import Extended, Measurement


def columns(table: Table) -> dict[str, tuple[str, list]]:
    """Header -> where it is aligned, and its cells."""
    return {str(column.header): (column.justify, [*column.cells]) for column in table.columns}


def rows(table: Table) -> list[tuple]:
    return [*zip(*(column.cells for column in table.columns), strict=True)]


@pytest.fixture
def printed(monkeypatch) -> list:
    """Tables, and whatever else is printed to a console."""
    shown: list = []
    monkeypatch.setattr(Console, "print", lambda self, *values, **_: shown.extend(values))
    return shown


def test_recipes_have_their_sizes(printed):
    assert listings.run_recipes(None) == 0
    table = columns(printed[0])
    assert [table[name][0] for name in table] == ["left", "right", "right", "left"]
    named = dict(zip(table["recipe"][1], rows(printed[0]), strict=True))
    assert [*named] == [*RECIPES]
    run = RECIPES["llama-8b"]()
    assert named["llama-8b"][1:3] == ("8.03 B", f"{run.train.global_batch_size * 8192:,}")
    assert {row[1] for row in named.values() if row[2] == "set by options"} == {"of --init"}


def test_families_have_their_cases(printed):
    assert listings.run_families(None) == 0
    table = columns(printed[0])
    right = {name for name, (where, _) in table.items() if where == "right"}
    assert right == {"cases", "logits"} and table["model_type"][1] == sorted(table["model_type"][1])
    for _, _, cases, reference, logits, gradients, layouts in rows(printed[0]):
        if gradients == "not measured":
            assert (cases, reference, logits, layouts) == ("", "", "", "")
            continue
        assert int(cases.split(" of ")[0]) >= 1 and {*reference.split()} <= {"hf", "plain"}
        assert float(logits) < 1e-2 and float(gradients) < 1e-6 and "tp" in layouts
    llama = next(row for row in rows(printed[0]) if row[0] == "llama")
    found = listings.checked.cases_of("llama")
    assert llama[2].startswith(f"{len(found)} of ")
    assert float(llama[4]) == float(f"{max(case.logits for case in found):.0e}")


@pytest.mark.parametrize("kind, chunks", (("1f1b", 1), ("interleaved", 2)))
def test_a_schedule_has_a_row_of_each_rank(printed, capsys, kind, chunks):
    schedule = make_schedule(kind, 2, 4, chunks)
    simulation = simulate(schedule)
    planning.print_report(schedule, simulation, 1.5)
    title, table = printed
    more = ", 2 virtual stages per rank" if chunks > 1 else ""
    assert title == f"{kind}: 2 ranks, 4 microbatches{more}"
    assert all(where == "right" for where, _ in columns(table).values())
    for rank, cells in enumerate(rows(table)):
        times = simulation.times[rank]
        busy = sum(end - start for start, end in times)
        assert cells[:4] == (
            str(rank),
            "0" if (rank, chunks) == (0, 1) else "1" if chunks == 1 else f"{rank} {rank + 2}",
            str(8 * chunks),
            f"{busy:.6g}",
        )
        assert cells[4:] == (f"{1 - busy / simulation.span:.2%}", f"{simulation.peak[rank]:.4g}")
    idle = max(simulation.span - busy for busy in simulation.busy)
    assert capsys.readouterr().out.startswith(
        f"span {simulation.span:.6g}; idle {idle:.6g} (closed form 1.5): "
    )
    planning.print_report(schedule, simulation, None)
    assert "closed form" not in capsys.readouterr().out


def test_scores_of_tasks_are_rows():
    table = tasks.table(
        {"arc": {"acc,none": 0.25, "acc_norm,none": 0.5}, "wiki": {"bits": 1.23456}}
    )
    assert [column.justify for column in table.columns] == ["left", "left", "right"]
    assert rows(table) == [
        ("arc", "acc", "0.2500"),
        ("arc", "acc_norm", "0.5000"),
        ("wiki", "bits", "1.2346"),
    ]


def test_a_verification_says_what_differs():
    row = verify.VerifyRow
    found = (row("logits", 1e-5, 1e-4), row("loss", -3e-4, 1e-4, "a note"), row("x", math.nan, 9))
    report = verify.VerifyReport("title", found, ("one", "two"))
    assert rows(report.table()) == [
        ("logits", "1e-05", "0.0001", "ok", ""),
        ("loss", "-0.0003", "0.0001", "DIFFERS", "a note"),
        ("x", "nan", "9", "DIFFERS", ""),
    ]
    assert report.table().caption == "one\ntwo" and not report.ok
    assert verify.VerifyReport("title", found[:1]).ok
    assert verify.VerifyReport("title", found[:1]).table().caption is None


@pytest.mark.parametrize(
    "length, positions, both_ways",
    ((64, 32, False), (8, 512, False), (1, 4, False), (1, 1, False), (20, 32, True)),
)
def test_a_verification_reads_and_continues_within_positions(length, positions, both_ways):
    spec = SimpleNamespace(max_position_embeddings=positions, vocab_size=61, both_ways=both_ways)
    found = verify._tokens(spec, length, torch.device("cpu"), None)
    windows, prompt, new = (getattr(found, field.name) for field in fields(found))
    assert windows.shape == (verify.SEQUENCES, max(2, min(length + 1, positions)))
    assert (new == 0) == both_ways and new <= max(1, positions // 2)
    # the last new token is not read
    assert prompt + max(0, new - 1) <= positions and prompt <= windows.shape[1] - 1
    assert prompt == min(windows.shape[1] - 1, positions + 1 - new)


def test_least_multiples():
    for least in range(1, 30):
        for of in range(1, 12):
            found = diff._multiple(least, of)
            assert found % of == 0 and least <= found < least + of


def test_a_comparison_is_plain_values_and_a_table():
    found = (
        TensorComparison("weights", "embed.weight", 0.0, 1e-6),
        TensorComparison("forward", "layers.0", math.inf, math.nan, note="a note"),
    )
    report = diff.DiffReport("title", found, None, ("note",))
    values = report.as_dict()
    assert (values["title"], values["first"], values["notes"]) == ("title", None, ["note"])
    assert values["rows"][1]["difference"] is None and values["rows"][0]["allowed"] == 1e-6
    assert report.table().caption == "note"


def test_an_extended_vocabulary_is_counted():
    before = Measurement(Counts(100, 250, 300), 0.7)
    after = Measurement(Counts(80, 250, 300), math.log(2))
    grown = Extended(50, 70, 64, 128, "mean", before, after)
    assert grown.lines() == [
        "20 new tokens, ids 50 to 69, 14 of them in former padding rows; initial rows: mean",
        "64 rows before, 128 now",
        "before: 2.500 characters and 3.000 bytes per token (100 tokens), loss 0.700000 per byte "
        f"({0.7 / math.log(2):.6f} bits)",
        "after:  3.125 characters and 3.750 bytes per token (80 tokens), loss 0.693147 per byte "
        "(1.000000 bits)",
    ]
    assert (
        "20 new tokens, ids 50 to 69, 20 of"
        in Extended(50, 70, 99, 128, "m", None, None).lines()[0]
    )
    full = Extended(50, 70, 50, 128, "m", before, None).lines()
    assert ", 0 of them" in full[0] and len(full) == 2
    none = Measurement(Counts(1, 1, 1), None)
    assert none.bits_per_byte is None and "loss" not in str(none)


def outcome(**more) -> dict:
    base = dict(steps=30, seconds=75.0, goodput={}, val_loss=2.5, val_step=30, val_tokens=100)
    base |= dict(held_out_tokens=100, bits_per_byte=None, validation_files=[], signal=0)
    base |= dict(val_sources={}, val_sources_per_byte={}, val_sources_before={})
    return base | dict(slow_ranks={}, writer="") | more


def test_a_summary_has_the_fields_of_an_outcome_and_no_others(tmp_path):
    whole = outcome()
    (tmp_path / "summary.json").write_text(json.dumps(whole))
    assert asdict(read_summary(tmp_path)) == whole | {"validation_files": ()}
    short = {name: value for name, value in whole.items() if name != "goodput"}
    for damaged in (short, whole | {"seconds": -1}, whole | {"more": 1}):
        (tmp_path / "summary.json").write_text(json.dumps(damaged))
        with pytest.raises(Refused):
            read_summary(tmp_path)


def run(name: str = "tokens", loss_type: str = "dpo"):
    return SimpleNamespace(objective=SimpleNamespace(name=name, loss_type=loss_type))


@pytest.mark.parametrize(
    "name, loss_type, more, text",
    (
        ("tokens", "", {}, "2.5000 nats per token on 100 held-out tokens"),
        ("tokens", "", {"val_tokens": 64}, "2.5000 nats per token on 64 of 100 held-out tokens"),
        ("dpo", "dpo", {"val_step": 20}, "2.5000 per pair on 100 held-out tokens, after step 20"),
        ("dpo", "kto", {}, "2.5000 per completion on 100 held-out tokens"),
        ("reward", "", {}, "2.5000 per pair on 100 held-out completions"),
    ),
)
def test_a_validation_has_its_unit(name, loss_type, more, text):
    assert finish._validation(run(name, loss_type), outcome(**more)) == text


def summary(out, run, **more) -> list[tuple]:
    return rows(finish._summary(run, outcome(**more), out, None))


def finished_run(**more):
    """What a summary reads of a run's options."""
    base = dict(
        checkpoint=SimpleNamespace(to=None),
        data=SimpleNamespace(rows="text"),
        finish=SimpleNamespace(compressors=False, sample=None),
        spec=SimpleNamespace(both_ways=False),
    )
    return SimpleNamespace(**vars(run()) | base | more)


def test_a_summary_has_the_numbers_of_a_run(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr(finish, "gzip_xz_bits", lambda files: (float(len(files)), 2.0))
    more = dict(
        goodput={"steps": 0.9, "saves": 0.1},
        slow_ranks={"rank 3 delays all-reduce": 0.12},
        val_sources={"a": 1.5, "b": 3.0},
        val_sources_per_byte={"a": 1.0},
        val_sources_before={"a": 2.0},
        bits_per_byte=1.23456,
        validation_files=["x", "y"],
    )
    described = SimpleNamespace(compressors=True, sample=None)
    found = summary(tmp_path, finished_run(finish=described), **more)
    assert found[0] == ("done", "30 steps in 1:15")
    assert found[1][0] == "goodput" and found[1][1].startswith("90% of the wall time")
    assert found[2:6] == [
        ("", "rank 3 delays all-reduce: the others wait 12% of the wall time"),
        ("validation loss", "2.5000 nats per token on 100 held-out tokens"),
        ("", "1.5000 on a, 1.0000 bits per byte (before the first step 2.0000)"),
        ("", "3.0000 on b"),
    ]
    assert found[6] == (
        "bits per byte",
        "1.235   (gzip -9: 2.000, xz -9: 2.000, each of the 2 held-out files separately)",
    )
    assert found[7] == ("written", f"{tmp_path}/ {{metrics.jsonl}}") and found[8][0] == "next"
    for files in (["s3://x/y"], []):
        plain = summary(
            tmp_path, finished_run(finish=described), **more | {"validation_files": files}
        )
        assert ("bits per byte", "1.235") in plain
    bare = summary(tmp_path, finished_run(), val_loss=None)
    assert [name for name, _ in bare] == ["done", "written", "next"]
    for ok, text in ((True, "transformers computes the same"), (False, "THE EXPORTED DIRECTORY")):
        report = SimpleNamespace(ok=ok)
        (said,) = (
            words
            for name, words in rows(finish._summary(finished_run(), outcome(), tmp_path, report))
            if name == "transformers"
        )
        assert said.startswith(text)


@pytest.mark.parametrize(
    "more, command",
    (
        ({}, "dolmen generate {hf} --prompt 'Once upon a time'"),
        ({"finish": SimpleNamespace(sample=" A b\nc")}, "dolmen generate {hf} --prompt 'A b'"),
        ({"spec": SimpleNamespace(both_ways=True)}, "dolmen verify {hf}"),
        ({"data": SimpleNamespace(rows="chats")}, "dolmen chat {hf}"),
        (
            {"objective": SimpleNamespace(name="reward")},
            "dolmen train grpo --reward {hf} --init ... --data.path ...",
        ),
    ),
)
def test_the_next_command_is_that_of_the_run(tmp_path, more, command):
    made = finished_run(**more)
    assert finish._next(made, tmp_path) == f"dolmen export {tmp_path} --to model/"
    (tmp_path / "hf").mkdir()
    assert finish._next(made, tmp_path) == command.format(hf=tmp_path / "hf")


def test_help_says_all_that_is_known_of_a_verb():
    """Usage, each paragraph of the description, then each option with its text and default."""
    place = Option("model", str, "Folder of the model.", MISSING, (Mark.POSITIONAL,))
    top = Option("top", int, "How many " + "words " * 30 + "are shown.", 5)
    deep = Option("layout.tp", int, "Ranks of tensor parallelism.", 1)
    switch = Option("layout.sequence-parallel", bool, "Shard the stream.", True)
    about = "First paragraph.\n\n    dolmen verb  an example\n\nLast " + "paragraph " * 20
    shown = full_help(
        "verb",
        about,
        [OptionGroup("", "", (place, top)), OptionGroup("layout", "Axes.", (deep, switch))],
    )
    lines = shown.splitlines()
    assert lines[:5] == [
        "usage: dolmen verb [OPTIONS] MODEL",
        "",
        "First paragraph.",
        "",
        "    dolmen verb  an example",
    ]
    assert max(map(len, lines)) <= WIDTH and " ".join(shown.split()).count("paragraph") == 21
    assert shown.count("Folder of the model.") == 1 and "  MODEL" in lines
    joined = " ".join(shown.split())
    assert "words " * 30 + "are shown." in joined
    at = [lines.index(f"  {name}") for name in ("MODEL", "-h, --help")]
    titles = ("--top", "layout options: Axes.", "--layout.tp")
    at += [next(i for i, line in enumerate(lines) if name in line) for name in titles]
    assert at == sorted(at) and "--model" not in shown
    assert "are shown. (default: 5)" in joined and "parallelism. (default: 1)" in joined
    assert "model. (required)" in joined and "--layout.sequence-parallel, --layout.no-seq" in joined


def test_a_measured_machine_is_named_with_its_file(monkeypatch, capsys):
    from dolmen.planning import measure

    monkeypatch.setattr(planning, "measured_at", lambda: Path("here"))
    monkeypatch.setattr(measure, "measure", lambda folder: folder / "local.yaml")
    assert planning.measure_local_cluster() == 0
    assert capsys.readouterr().out == ("wrote here/local.yaml: dolmen plan MODEL --cluster local\n")
