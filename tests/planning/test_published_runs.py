"""Rows of published runs: what may stand in them is understood, and what nobody knows is left
empty, with a warning."""

import pytest

from dolmen.model.tree import Experts
from dolmen.planning.compared import cluster_of, jobs, network, predict
from dolmen.planning.published import FOLDER, bare, read_rows, understood
from dolmen.planning.step import Spread

ROW = {
    "gpu": "A100-SXM4-80GB",
    "gpus_per_node": "8",
    "num_gpus": "16",
    "framework": "Megatron-LM",
    "model": "GPT 1.7B",
    "layers": "24",
    "hidden": "2304",
    "heads": "24",
    "seq": "2048",
    "vocab": "51200",
    "tp": "1",
    "pp": "2",
    "mbs": "2",
    "gbs": "64",
    "precision": "bf16",
    "recompute": "full",
}


def row_of(**changes: str):
    return understood({**ROW, **changes}, "mine", 0)


def predicted(**changes: str):
    return predict(row_of(**changes), lambda device: Spread(0.1, 0, False))


def test_every_published_file_is_read_without_a_warning():
    rows = read_rows(sorted(FOLDER.glob("*.csv")))
    assert len({row.row_id for row in rows}) == len(rows) >= 33
    assert not [warning for row in rows for warning in row.warnings]


@pytest.mark.parametrize(
    "name, text, field, value",
    [
        ("precision", "bf16/fp16", "precision", "bf16"),
        ("precision", "fp16/bf16 mixed", "precision", "fp16"),
        ("precision", "fp8 (tensorwise)", "precision", "fp8"),
        ("recompute", "selective (op-level)", "recompute", "op"),
        ("recompute", "full (per layer)", "recompute", "full"),
        ("zero_or_fsdp", "fsdp2/zero3", "zero", 3),
        ("zero_or_fsdp", "zero2-style", "zero", 2),
        ("zero_or_fsdp", "1", "zero", 1),
        ("schedule", "interleaved 1F1B v=6", "schedule", "interleaved"),
        ("schedule", "1F1B (async)", "schedule", "1f1b"),
        ("seq_parallel", "yes", "sequence_parallel", True),
    ],
)
def test_values_of_the_columns(name, text, field, value):
    row = row_of(**{name: text})
    assert (getattr(row, field), row.warnings) == (value, [])


def test_virtual_stages_may_stand_in_the_schedule():
    assert row_of(schedule="interleaved 1F1B v=6").count("vp") == 6


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("precision", "int3", "is not known"),
        ("recompute", "sometimes", "is not known"),
        ("zero_or_fsdp", "zero9", "is not known"),
        ("schedule", "chimera", "is not known"),
        ("seq_parallel", "maybe", "is not known"),
        ("tp", "eight", "is no number"),
        ("tp", "2.5", "is no count"),
        ("tp", "-1", "is no number"),
        ("step_time_s", "3e9", "cannot be in its unit"),
        ("mfu_pct", "140", "cannot be in its unit"),
    ],
)
def test_what_nobody_knows_is_empty_with_a_warning(name, text, words):
    row = row_of(**{name: text})
    assert name not in row.numbers
    assert len(row.warnings) == 1 and words in row.warnings[0] and name in row.warnings[0]


def test_remarks_are_dropped():
    assert bare("fp16 (mixed (of two))") == "fp16"


def test_seconds_are_said_or_follow():
    assert row_of(step_time_s="3.5").measured() == 3.5
    assert row_of(tokens_s_gpu="8192").measured() == 64 * 2048 / (8192 * 16)
    whole = row_of(tflops_per_gpu="100", flops_convention="hardware FLOPs").measured()
    model = row_of(tflops_per_gpu="100", flops_convention="model FLOPs").measured()
    assert model is not None and whole is not None and 1.3 < whole / model < 4 / 3
    assert row_of().measured() is None


def test_seconds_follow_from_a_share_of_the_peak_where_it_is_said_what_counts():
    """24 layers of 2,304: 72 B s l h^2 (1 + s / 6 h + V / 16 l h), 2104.04473, eq. 2."""
    flops = 72 * 64 * 2048 * 24 * 2304**2 * (1 + 2048 / (6 * 2304) + 51200 / (12 * 24 * 2304))
    said = predicted(mfu_pct="40", flops_convention="model FLOPs, 2104.04473")
    assert said.measured == pytest.approx(flops / (0.4 * 312e12 * 16), rel=1e-3)
    again = predicted(hfu_pct="40", flops_convention="hardware FLOPs")
    assert said.measured is not None and again.measured is not None
    assert 1.3 < again.measured / said.measured < 4 / 3
    short = predicted(mfu_pct="40", params_b="1.7", flops_convention="6ND")
    assert short.measured == pytest.approx(6 * 1.7e9 * 64 * 2048 / (0.4 * 312e12 * 16))
    none = predicted(mfu_pct="40")
    assert none.measured is None and "nothing is measured" in none.warnings[-1]


@pytest.mark.parametrize(
    "empty", ["tp", "pp", "mbs", "recompute", "heads", "vocab", "gpu", "framework", "precision"]
)
def test_the_interval_spans_the_choices_for_an_empty_cell(empty):
    known, open_ = predicted(), predicted(**{empty: ""})
    assert open_.forecast is not None and known.forecast is not None
    assert open_.low <= open_.forecast.estimate.seconds <= open_.high
    if empty in ("tp", "pp", "mbs"):
        assert "the median of" in open_.chosen
        assert open_.high / open_.low > known.high / known.low


@pytest.mark.parametrize("empty", ["layers", "num_gpus", "hidden"])
def test_a_row_that_says_too_little_is_told_and_not_fatal(empty):
    none = predicted(**{empty: ""})
    assert none.forecast is None and "it does not say" in none.warnings[-1]


@pytest.mark.parametrize(
    "cells, words",
    [
        (dict(num_gpus="7"), "does not divide num_gpus 7"),
        (dict(layers="1000000000"), "layers '1000000000' cannot be in its unit"),
        (dict(num_gpus="1000000000"), "num_gpus '1000000000' cannot be in its unit"),
        (dict(gbs="1000000000"), "are too many to simulate"),
    ],
)
def test_no_row_is_fatal(cells, words):
    none = predicted(**cells)
    assert none.forecast is None and any(words in warning for warning in none.warnings)


def test_replicas_are_those_that_the_other_cells_leave():
    """Where they differ the cell of dp is wrong, as no run has more ranks than GPUs; where tp and
    pp are empty it says what these may be.
    """
    known = predicted(dp="")
    other = predicted(dp=str(3 * (known.row.count("num_gpus") or 0)))
    assert other.known == known.known and "dp taken as" in other.warnings[-1]
    row = row_of(tp="", pp="", cp="1", dp="16")
    found = {job.placement.topology for _, job in jobs(row, cluster_of(row, []), [])}
    assert found and all(t.size == row.count("num_gpus") and t.dp == 16 for t in found)


def test_experts_follow_from_a_name_or_a_remark():
    """Mixtral's, or those that a note says; of others a warning. Of a token's rows one goes to each
    node where DeepEP sends them.
    """
    llama = dict(heads="32", kv_heads="8", hidden="4096", layers="32", tp="2", pp="1", gbs="64")
    cells = {**llama, "model": "Mixtral 8x7B", "ffn": "14336", "num_gpus": "16", "ep": "8"}
    (found,) = {job for _, job in jobs(row_of(**cells), cluster_of(row_of(**cells), []), [])}
    mlp = found.tree.blocks[0].mlp
    assert isinstance(mlp, Experts) and (mlp.number, mlp.per_token, mlp.size) == (8, 2, 14336)
    assert (found.topology.ep, found.folded, found.copies) == (8, 1, None)
    folded = row_of(**{**cells, "notes": "ETP 1, DeepEP"})
    (job,) = {job for _, job in jobs(folded, cluster_of(folded, []), [])}
    assert (job.topology.ep, job.folded, job.copies) == (1, 8, None)
    wide = row_of(
        **{**cells, "ep": "16", "notes": "64 experts, top 2, DeepEP, capacity factor 1.25"}
    )
    (job,) = {job for _, job in jobs(wide, cluster_of(wide, []), [])}
    assert job.folded == 16 and job.copies == 2 * (1 - (1 / 2) ** 2) and job.load == 1.25
    assert (
        predicted(**cells).known.estimate.seconds
        < predicted(**{**cells, "notes": "64 experts, top 4"}).known.estimate.seconds
    )
    assert "what experts it has" in predicted(model="a MoE of ours").warnings[-1]


@pytest.mark.parametrize(
    "gpu, name",
    [
        ("A100-SXM4-80GB", "dgx-a100"),
        ("NVIDIA Ampere (A100 class)", "dgx-a100"),
        ("A100-SXM4-40GB", "dgx-a100-40gb"),
        ("H100-SXM5-80GB", "hgx-h100"),
        ("H100 96GB HBM2e 500W", "grand-teton"),
        ("V100-SXM3-32GB", "dgx-2h"),
        ("V100-SXM2-16GB", "dgx-1"),
        ("H200", "hgx-h200"),
        ("B200", "b200"),
        ("GB200", "gb200-nvl72"),
    ],
)
def test_a_device_by_the_names_that_people_give_it(gpu, name):
    warnings = []
    assert cluster_of(row_of(gpu=gpu, gpus_per_node=""), warnings).name == name
    assert not warnings


def test_networks_by_the_words_that_people_use():
    assert network("nvlink3/nvswitch 600gb/s per gpu; 8x200gb/s hdr ib per node", 8) == 200e9
    assert network("400 gb/s per gpu roce", 8) == 400e9
    assert network("ethernet", 8) is None
    # GB are bytes, Gb are bits
    assert network("InfiniBand 8x50 GB/s", 8) == network("8 x 400 Gb/s", 8) == 400e9
    assert network("50 GB/s per GPU", 8) == 400e9


def test_a_job_does_not_grow_beyond_its_choices():
    row = row_of(tp="", pp="", mbs="", recompute="", schedule="")
    assert len(list(jobs(row, cluster_of(row, []), []))) <= 48


def test_files_that_are_none_are_refused(tmp_path):
    for text, words in (("", "has no row"), ("a,b\n1,2\n", "no column num_gpus")):
        (tmp_path / "rows.csv").write_text(text)
        with pytest.raises(ValueError, match=words):
            read_rows([tmp_path / "rows.csv"])
