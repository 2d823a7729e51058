"""Rows of published runs: what may stand in them is understood, and what nobody knows is left
empty, with a warning."""

import pytest

from benchmarks.planning.clusters import cluster_of, network
from benchmarks.planning.jobs import jobs
from benchmarks.planning.predict import predict
from benchmarks.planning.published import FOLDER, bare, read_rows, understood
from dolmen.model.spec import MoESpec
from dolmen.planning.step import ErrorSpread

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
    return predict(row_of(**changes), lambda device: ErrorSpread(0.1, 0, False))


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


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("gpu_mem_gb", "80 GB", 80),
        ("step_time_s", "31.4 sec", 31.4),
        ("step_time_s", "~105", 105),
        ("step_time_s", "900 ms", 0.9),
        ("seq", "8K", 8192),
        ("seq", "1 024", 1024),
        ("gbs", "2,048", 2048),
        ("tflops_per_gpu", "400 TFLOPS", 400),
        ("params_b", "1.7T", 1700),
        ("mfu_pct", "38-43%", 40.5),
    ],
)
def test_numbers_with_units(name, text, value):
    row = row_of(**{name: text})
    assert row.numbers[name] == pytest.approx(value)
    assert [words for words in row.warnings if "range" not in words] == []


STRANGERS = [
    dict(
        gpu="NVIDIA A100 80GB (Jean Zay)", num_gpus="384", framework="Megatron-DeepSpeed",
        interconnect="4x Omni-Path 100 Gbps (per node)", model="BLOOM 176B", layers="70",
        hidden="14336", heads="112", vocab="250880", tp="4", pp="12", gbs="2048",
        zero_or_fsdp="ZeRO-1", step_time_s="~105", source="arXiv 2211.05100",
    ),
    dict(
        num_gpus="992", framework="metaseq (FSDP + Megatron TP)", model="OPT-175B", layers="96",
        hidden="12288", heads="96", vocab="50272", tp="8", pp="1", mbs="8", gbs="~992",
        precision="fp16", zero_or_fsdp="fsdp", tflops_per_gpu="147",
        flops_convention="hardware FLOPs", source="arXiv 2205.01068",
    ),
    dict(
        gpu="A100 80GB", num_gpus="2048", framework="internal", model="LLaMA-1 65B", layers="80",
        hidden="8192", heads="64", ffn="22016", vocab="32000", tp="", pp="", mbs="", gbs="2,048",
        recompute="selective", zero_or_fsdp="fsdp", tokens_s_gpu="380 tokens/s",
    ),
    dict(
        gpu="TPU v4", gpus_per_node="4", num_gpus="6144", framework="JAX", model="PaLM 540B",
        layers="118", hidden="18432", heads="48", kv_heads="1", vocab="256000", tp="12", pp="1",
        mbs="", gbs="2048", recompute="full", mfu_pct="46.2", flops_convention="PaLM, appendix B",
    ),
    dict(
        gpu="H100 80GB", gpus_per_node="", num_gpus="16384", interconnect="400 Gbps RoCE",
        framework="internal", model="LLaMA 3 405B", layers="126", hidden="16384", heads="128",
        kv_heads="8", ffn="53248", seq="8K", vocab="128256", tp="8", pp="16", mbs="1", gbs="2048",
        recompute="none", zero_or_fsdp="FSDP", schedule="interleaved", mfu_pct="38-43%",
        flops_convention="model FLOPs",
    ),
    dict(
        gpu="V100 16GB x 8 (p3.16xlarge)", num_gpus="8", interconnect="25 Gbit/s", tp="", pp="",
        framework="fairseq", model="GPT-2 medium", layers="24", hidden="1024", heads="16",
        seq="1 024", vocab="50257", mbs="0", gbs="64", precision="FP16 (AMP)", recompute="none",
        zero_or_fsdp="DDP", schedule="-", step_time_s="0",
    ),
]  # fmt: skip


@pytest.mark.parametrize("cells", STRANGERS, ids=lambda cells: cells["model"])
def test_rows_of_strangers_have_a_time_that_can_be(cells):
    """Papers that nothing was fitted to, entered as people do: within a factor of two of what was
    measured, and of no more than the device can; a device that is none of ours aside.
    """
    found = predicted(**cells)
    assert 0.05 < found.known.mfu < 0.7 and found.low < found.known.estimate.seconds < found.high
    if found.measured is not None and "TPU" not in found.row.gpu:
        assert 0.5 < found.known.estimate.seconds / found.measured < 2
    assert found.row.model == cells["model"]


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
    "empty",
    "tp pp mbs gbs seq recompute heads vocab gpu framework precision".split(),
)
def test_the_interval_spans_the_choices_for_an_empty_cell(empty):
    known, open_ = predicted(), predicted(**{empty: ""})
    assert open_.forecast is not None and known.forecast is not None
    assert open_.low <= open_.forecast.estimate.seconds <= open_.high
    if empty in ("tp", "pp", "mbs", "gbs", "seq"):
        assert "the median of" in open_.chosen
        assert open_.high / open_.low > known.high / known.low
    if empty in ("gbs", "seq"):
        assert f", {empty} " in open_.chosen
        assert any(f"{empty} is empty: " in warning for warning in open_.warnings)


@pytest.mark.parametrize(
    "cells, words",
    [
        (dict(gbs="65"), "gbs 65 is not divisible by dp 8 x mbs 2: taken as 64"),
        (dict(gbs="3"), "gbs 3 is not divisible by dp 8 x mbs 2: taken as 16"),
        (dict(gbs="48", schedule="interleaved"), "3 microbatches are not divisible by pp 2"),
        (dict(interconnect="fast ethernet"), "'fast ethernet' says no rate between nodes"),
        (dict(tp="", pp="", mbs="", schedule=""), "choices fit its empty cells: "),
    ],
)
def test_what_is_taken_for_something_else_is_told(cells, words):
    reported = predicted(**cells).warnings
    assert any(words in warning for warning in reported), reported
    assert not predicted(interconnect="NVLink; 200 Gb/s per GPU RoCE").warnings


def test_choices_that_are_left_out_are_so_evenly():
    """Both ends of each cell are tried, and of each what recomputes and what does not."""
    row = row_of(tp="", pp="", mbs="", recompute="", schedule="")
    found = [job for _, job in jobs(row, cluster_of(row, []), [])]
    assert {job.topology.tp for job in found} == {1, 2, 4, 8}
    assert len({job.recompute for job in found}) == 2
    assert len(found) % 2 == 0


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
    mlp = found.spec.blocks[0].mlp
    assert isinstance(mlp, MoESpec) and (mlp.number, mlp.per_token, mlp.size) == (8, 2, 14336)
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
    assert network("NVLink; 400 Gb/s per GPU RoCE", 8) == 400e9
    assert network("600 GB/s NVLink per GPU", 8) == network("NVLink 600 GB/s per GPU", 8) is None
    assert network("NVSwitch 300GB/s intra; 100GB/s (8x IB) inter-node", 16) == 100e9
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


@pytest.mark.parametrize(
    "name, text",
    [
        ("tp", "1e400"),
        ("num_gpus", "9" * 5000),
        ("step_time_s", "1e-300"),
        ("tokens_s_gpu", "1e-300"),
        ("step_time_s", "31,4 sec"),  # a comma of thousands has three digits behind it
    ],
)
def test_a_number_that_cannot_be_is_empty(name, text):
    found = row_of(**{name: text})
    assert any(f"{name} " in line and "taken as empty" in line for line in found.warnings)


def test_what_stands_in_square_brackets_is_a_remark_too():
    assert row_of(gbs="512 [global]").batch == 512


def test_a_model_that_cannot_be_made_is_told_and_no_row_is_fatal():
    found = predicted(model="llama", layers="80", hidden="8192", heads="60", ffn="28672")
    assert found.forecast is None and "head_dim" in " ".join(found.warnings)
