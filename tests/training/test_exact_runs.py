"""--train.numerics exact as a run has it: what it refuses, its self-test, and a run that is
stopped, and resumed on two ranks, with the bits of one that never stopped.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tinyrun
import torch
import torch.distributed as dist
from rich.console import Console
from tinyrun import Material, losses, same, tensors

from dolmen.cli import command
from dolmen.core.config import to_dict
from dolmen.core.mesh import SINGLE
from dolmen.core.messages import BadInput
from dolmen.core.state import local_view
from dolmen.files import storage
from dolmen.files.gate import Refused
from dolmen.model.layout import Layout
from dolmen.model.spec import LayerRun
from dolmen.ops import invariant
from dolmen.ops.attention import blockwise, dropout
from dolmen.ops.numerics import Exact
from dolmen.planning import dryrun
from dolmen.planning.config import DryrunConfig, DryrunRequest
from dolmen.training import hooks, loop, receipt, replay, self_test
from dolmen.training.checks.exact import check_components, check_exact
from dolmen.training.checks.folder import check_resume, check_same_limit
from dolmen.training.config import RunConfig
from dolmen.training.folder import Unusable
from dolmen.training.request import ReplayConfig
from dolmen.training.run import run_training
from dolmen.training.self_test import ProductShape

material, one_thread = tinyrun.material, tinyrun.one_thread

EXACT = {"numerics": "exact", "exact": {"tp": 2}, "steps": 6, "sequence_length": 10}
CUT = {"exact": {"tp": 2, "cp": 2}, "sequence_length": 12}
UPDATE = {"lr": 1e-2, "warmup_steps": 2, "clip": 0.3}


def config(material: Material, train: dict | None = None, **sections) -> RunConfig:
    return material.config(train=EXACT | (train or {}), **sections)


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4}
LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
# what is set, and the words of the refusal; docs/concepts/numerics.md lists them
REFUSED = {
    "half precision": ({"train": {"dtype": "float16"}}, "train.dtype is float16"),
    "eight bits": ({"train": {"precision": "fp8-rowwise"}}, "train.precision is fp8-rowwise"),
    "compiled": ({"train": {"compile": True}}, "train.compile is True"),
    "on a GPU": ({"train": {"device": "cuda"}}, "train.device is cuda"),
    "chats": ({"data": {"rows": "chats"}}, "data.rows is chats"),
    "preferences": ({"objective": {"name": "dpo"}}, "objective.name is dpo"),
    "adapters": ({"adapter": {"rank": 4}}, "adapter.rank is 4"),
    "new rows": ({"train": {"new_rows": {"share": 0.5}}}, "train.new-rows.share is 0.5"),
    "cp over the limit": (
        {"layout": {"cp": 2, "context": "gather", "reduction": "fixed"}},
        r"layout.cp \(2\) does not divide train.exact.cp \(1\): set --layout.cp 1 or a larger",
    ),
    "a ring": (
        {"train": CUT, "layout": {"cp": 2, "reduction": "fixed"}},
        "layout.context is ring, .* set --layout.context gather",
    ),
    "cp and ep": (
        {
            "train": CUT,
            "layout": {"cp": 2, "dp": 2, "ep": 2, "context": "gather", "reduction": "fixed"},
        },
        "layout.ep is 2 and layout.cp 2, .* set --layout.ep 1 or --layout.cp 1",
    ),
    "sequences of a microbatch": (
        {
            "train": CUT | {"microbatch_size": 2},
            "layout": {"cp": 2, "context": "gather", "reduction": "fixed"},
        },
        r"train.microbatch-size \(2\): with layout.cp \(2\) .* set --train.microbatch-size 1",
    ),
    "chunks": (
        {"train": CUT | {"sequence_length": 10}},
        r"train.sequence-length \(10\) is not divisible by 4: 2 x train.exact.cp \(4\) chunks"
        ".* --train.sequence-length 12",
    ),
    "short chunks in bfloat16": (
        {"train": CUT | {"dtype": "bfloat16", "sequence_length": 96}},
        "is not divisible by 64: .* multiple of 16 tokens: set --train.sequence-length 128",
    ),
    "odd sequences with dropout": (
        {"train": {"dropout": 0.1}},
        r"\(10\) is not divisible by 8: a multiple of 8 tokens with train.dropout: "
        "set --train.sequence-length 16",
    ),
    "short chunks with dropout": (
        {"train": CUT | {"sequence_length": 24, "dropout": 0.1}},
        r"\(24\) is not divisible by 32: .* chunks of a multiple of 8 tokens",
    ),
    "tokens of a chunk": (
        {
            "model": {"num_attention_heads": 8, "num_key_value_heads": 8},
            "train": CUT | {"exact": {"tp": 4, "cp": 2}},
            "layout": {
                **{"tp": 4, "cp": 2, "sequence_parallel": True},
                **{"context": "gather", "reduction": "fixed"},
            },
        },
        "gives each of tp .* 1.5 of the 1 x 6 tokens .* leaves of 3: set .* multiple of 8",
    ),
    "rollouts in chunks": (
        {"train": CUT, "objective": {"name": "grpo"}, "data": {"rows": "prompts"}},
        "train.exact.cp is 2, and objective grpo .* set --train.exact.cp 1",
    ),
    "ZeRO 0": ({"layout": {"zero": 0}}, "layout.zero is 0, and train.numerics exact covers 1 or 2"),
    "sums in any order": ({"layout": {"tp": 2}}, "set --layout.reduction fixed"),
    "tp over the limit": (
        {"layout": {"tp": 4, "reduction": "fixed"}},
        r"layout.tp \(4\) does not divide train.exact.tp \(2\): set --layout.tp 2",
    ),
    "heads": ({"train": {"exact": {"tp": 4}}}, r"num_key_value_heads \(2\) .* --train.exact.tp 2"),
    "width": (
        {"model": {"intermediate_size": 47}},
        r"intermediate_size \(47\) is not divisible by train.exact.tp \(2\)",
    ),
    "vocabulary": (
        {
            "model": {"vocab_size": 33, "num_attention_heads": 8, "num_key_value_heads": 8},
            "train": {"exact": {"tp": 8}},
            "layout": {"tp": 4, "reduction": "fixed"},
        },
        r"vocab_size \(33\): tp \(4\) gives 9 rows .* blocks of 5",
    ),
    "microbatch": (
        {"train": {"global_batch_size": 12, "microbatch_size": 3}},
        r"train.microbatch-size \(3\) is no power of two",
    ),
    "sequences of a process": (
        {
            "train": {"global_batch_size": 12, "microbatch_size": 1},
            "layout": {"dp": 2, "reduction": "fixed"},
        },
        r"\(12\) / dp \(2\) = 6 sequences .* set --train.global-batch-size 8",
    ),
    "tokens": (
        {
            "train": {"sequence_length": 9, "microbatch_size": 1},
            "layout": {"tp": 2, "sequence_parallel": True, "reduction": "fixed"},
        },
        "sequence parallelism gives each of tp .* 4.5",
    ),
    "width of experts": (
        {"model": MIXTRAL | {"intermediate_size": 47}},
        r"moe_intermediate_size \(47\) is not divisible by train.exact.tp \(2\)",
    ),
    "ranks of experts": (
        {
            "model": MIXTRAL | {"num_local_experts": 6},
            "train": {"global_batch_size": 12},
            "layout": {"ep": 3, "dp": 6, "reduction": "fixed"},
        },
        r"layout.ep \(3\) is no power of two, .* of dp \(6\) by a tree: set --layout.ep 2",
    ),
    "experts that generate": (
        {"model": MIXTRAL, "objective": {"name": "grpo"}, "data": {"rows": "prompts"}},
        "objective.name is grpo, and .* with experts, latent .* or sinks for .* tokens alone",
    ),
    "a temperature": (
        {
            "objective": {"name": "grpo"},
            "data": {"rows": "prompts"},
            "rollout": {"temperature": 0.7},
        },
        "rollout.temperature is 0.7, and train.numerics exact covers 1.0 alone",
    ),
    "a generator's tp": (
        {"objective": {"name": "grpo"}, "data": {"rows": "prompts"}, "rollout": {"tp": 4}},
        r"rollout.tp \(4\) does not divide train.exact.tp \(2\): set --rollout.tp 2",
    ),
    "compiled steps": (
        {
            "objective": {"name": "grpo"},
            "data": {"rows": "prompts"},
            "rollout": {"compile": True},
        },
        "rollout.compile is True, and train.numerics exact covers False alone",
    ),
    "a reward model": (
        {"objective": {"name": "grpo"}, "data": {"rows": "prompts"}, "reward": ["runs/judge"]},
        "reward runs/judge is a model, whose scores depend on the layout",
    ),
    "a limit alone": (
        {"train": {"numerics": "fast"}},
        r"train.exact.tp \(2\) is a limit of exact numerics",
    ),
    "a limit of cp alone": (
        {"train": {"numerics": "fast", "exact": {"cp": 2}}},
        r"train.exact.cp \(2\) is a limit of exact numerics",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name, material):
    sections, words = REFUSED[name]
    with pytest.raises(ValueError, match=words) as refused:
        check_exact(config(material, **sections))
    assert "--train.numerics" in str(refused.value)


def test_other_fields_of_a_model_are_refused(material):
    """A mask by which tokens see later ones."""
    llama = config(material)
    block = replace(llama.spec.blocks[0], mixer=replace(llama.spec.blocks[0].mixer, mask="both"))
    spec = replace(llama.spec, runs=(LayerRun((block,), 2),))
    with pytest.raises(ValueError, match="AttentionSpec.mask is both.*exact covers causal alone"):
        check_components(spec)


def test_a_dry_run_is_refused(material):
    with pytest.raises(ValueError, match="does not cover train.numerics exact"):
        dryrun.report(DryrunRequest(config(material), DryrunConfig()))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"train": {"numerics": "fast", "exact": {"tp": 8}}},
        {"layout": {"tp": 2, "dp": 2, "zero": 3, "reduction": "fixed", "sequence_parallel": True}},
        {"train": {"global_batch_size": 24, "microbatch_size": 2}, "layout": {"pp": 2, "dp": 3}},
        {"train": {"global_batch_size": 6, "microbatch_size": 6}},
        {"model": {"model_type": "qwen2"}},
        {"model": {"model_type": "qwen3"}},
        {"model": {"mlp_bias": True}},
        {"model": {"model_type": "cohere", "use_qk_norm": True}},
        {"model": {"model_type": "olmo2"}},
        {"model": MIXTRAL},
        {"model": MIXTRAL, "layout": {"ep": 2, "dp": 4}},
        {"model": {"tie_word_embeddings": True}},
        {"model": LATENT},
        {"model": {"sliding_window": 4, "model_type": "mistral"}},
        {
            "train": {"dropout": 0.1, "sequence_length": 16},
            "optimizer": {"name": "muon"},
            "data": {"document_mask": True},
        },
        {"train": CUT | {"microbatch_size": 4}},
        {"train": CUT, "layout": {"cp": 2, "context": "gather", "tp": 2, "zero": 3}},
    ],
)
def test_is_covered(sections, material):
    sections = sections | {"layout": sections.get("layout", {}) | {"reduction": "fixed"}}
    check_exact(config(material, **sections))


def shape(m=64, k=48, n=40, leaf_m=32, leaf_n=20, transposed="") -> ProductShape:
    return ProductShape(m, k, n, leaf_m, leaf_n, transposed)


def test_the_self_test_names_what_breaks(monkeypatch, material):
    shapes = [shape(), shape(transposed="a"), shape(transposed="b", n=41), shape(m=7, leaf_m=1)]
    long = [shape(k=1536, transposed="a")]
    for dtype in (torch.float32, torch.bfloat16):
        assert self_test.find_broken_product([*shapes, *long], dtype) is None
    spec = config(material).spec
    self_test.check_machine(spec, Exact(2, 10), 4, SINGLE)
    self_test.check_machine(spec, Exact(2, 10), 4, SINGLE, torch.bfloat16)
    right = invariant.product

    def product(a, b):
        return right(a, b) if b.shape[1] != 41 else right(a, b) * (1 + 2**-23)

    monkeypatch.setattr(invariant, "product", product)
    words = "the product of 64 x 48 and 48 x 41 than in its part of 32 x 20"
    assert self_test.find_broken_product(shapes) == words
    monkeypatch.setattr(self_test, "find_broken_product", lambda *_: words)
    refusal = f"rank 0 has other bits in {words}, with 1 threads: set .* OMP_NUM_THREADS=1"
    with pytest.raises(ValueError, match=refusal):
        self_test.check_machine(spec, Exact(2, 10), 4, SINGLE)


@pytest.mark.parametrize("place", [(0, 0), (-1, -1), (-1, 0), (0, -1)])
def test_the_self_test_sees_the_first_leaf_and_the_last(monkeypatch, place):
    """Of a whole product one number has another last bit, in a corner; each leaf by itself has
    not.
    """
    right = invariant.product

    def product(a, b):
        out = right(a, b)
        if (len(a), b.shape[1]) == (64, 40):
            out[place] *= 1 + 2**-20
        return out

    monkeypatch.setattr(invariant, "product", product)
    found = self_test.find_broken_product([shape()])
    first_or_last = place[0] == place[1]
    assert (found is not None and "part of 32 x 20" in found) == first_or_last


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="breaks known of MKL")
def test_the_self_test_sees_what_is_not_padded(monkeypatch):
    monkeypatch.setattr(invariant, "product", torch.mm)
    sizes = [(k, m, n) for k in (25, 200, 512) for m in (1, 2, 3) for n in (4, 9)]
    small = [shape(m=40, n=40, k=k, leaf_m=m, leaf_n=n) for k, m, n in sizes]
    assert self_test.find_broken_product(small) is not None


def test_the_self_test_compares_with_one_thread(monkeypatch):
    """Threads follow from the layout, and with each number a product may agree with its parts: with
    4 threads that of 711 x 24 and 24 x 68 does, and differs from one thread (MKL).
    """
    right, threads = invariant.product, torch.get_num_threads()

    def product(a, b):
        return right(a, b) * (1 + 2**-23 * (torch.get_num_threads() > 1))

    monkeypatch.setattr(invariant, "product", product)
    torch.set_num_threads(2)
    try:
        found = self_test.find_broken_product([shape()])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert found == "the product of 64 x 48 and 48 x 40 than one thread"


def test_the_self_test_sees_single_tokens_where_they_are_generated(monkeypatch, material):
    right, spec = invariant.product, config(material).spec

    def product(a, b):
        return right(a, b) * (1 + 2**-23 * (len(a) == 1))

    monkeypatch.setattr(invariant, "product", product)
    self_test.check_machine(spec, Exact(2, 10), 4, SINGLE)
    with pytest.raises(ValueError, match="in its part of 1 x "):
        self_test.check_machine(spec, Exact(2, 10), 4, SINGLE, generates=True)


def refuse_other_bits(spec) -> None:
    """The second rank's products agree with their parts, and differ from the first's."""
    mesh, right = Layout(tp=2, dp=1).mesh(torch.device("cpu")), invariant.product
    self_test.check_machine(spec, Exact(2, 10), 4, mesh)
    if mesh.rank == 1:
        invariant.product = lambda a, b: right(a, b) * (1 + 2**-23)
    refusal = r"do not compute the same bits(.|\n)*rank 1 on (.|\n)*digest of product"
    with pytest.raises(ValueError, match=refusal):
        self_test.check_machine(spec, Exact(2, 10), 4, mesh)


def test_the_self_test_compares_the_ranks(material, spawn):
    spawn(2)(refuse_other_bits, config(material).spec)


def test_the_self_test_has_every_product(material):
    """Of q and o, of k and v, of gate and up and down, of the head, three each."""
    spec = config(material).spec
    shapes = self_test.product_shapes(spec, Exact(2, 10), 4, 1)
    q_and_o, kv, wide, head = 32 * 32, 16 * 32, 48 * 32, 300 * 32
    elements = [s.k * s.n for s in shapes if s.transposed == "b"]
    assert sorted(elements) == sorted([q_and_o, q_and_o // 2, kv, wide, wide // 2, head])
    assert {s.leaf_m for s in shapes if s.transposed != "a"} == {10}
    assert {s.m for s in shapes if s.transposed != "a"} == {10, 40}
    cut = self_test.product_shapes(spec, Exact(2, 12, 2), 1, 1, 2)
    assert {(s.m, s.leaf_m) for s in cut if s.transposed != "a"} == {(6, 6)}
    halves = self_test.product_shapes(spec, Exact(2, 10), 4, 2)
    assert all(s.leaf_n in (s.n, s.n // 2) for s in shapes)
    assert all((s.leaf_n, s.leaf_m) in ((s.n, s.m), (s.n, 10)) for s in halves)


def receipts(folder: Path) -> list[str]:
    """Its receipts, of each step."""
    return [row["receipt"] for row in receipt.read_receipts(folder / "receipts.jsonl")]


def test_a_digest_is_a_sum_over_parts_and_sees_each_bit():
    whole = torch.randn(24, 20, generator=torch.Generator().manual_seed(0))
    seen = {receipt.digest(whole)}
    for row, column, bit in ((0, 0, 0), (5, 19, 31), (23, 7, 22), (23, 8, 22)):
        flipped = whole.clone()
        flipped.view(torch.int32)[row, column] ^= -(2**31) if bit == 31 else 1 << bit
        seen.add(receipt.digest(flipped))
    seen |= {receipt.digest(whole.roll(1, dim)) for dim in (0, 1)}
    assert len(seen) == 7
    experts = whole.view(4, 6, 20)
    swapped = experts.clone()
    swapped[1, 2], swapped[2, 1] = experts[2, 1], experts[1, 2]
    seen |= {receipt.digest(experts), receipt.digest(swapped)}
    seen |= {receipt.digest(experts.roll(1, dim)) for dim in (0, 1, 2)}
    assert len(seen) == 12


def train(
    material: Material,
    out: Path,
    layout: Layout | None = None,
    resumed=False,
    model: dict | None = None,
    **options,
):
    layout = layout or Layout(dp=1)
    mesh = layout.mesh(torch.device("cpu")) if dist.is_initialized() else SINGLE
    sections = {"layout": vars(layout), "optimizer": UPDATE, "checkpoint": {"every": 3}}
    run = config(material, CUT | options, model=model or {}, **sections)
    return run_training(run, out, mesh, Console(quiet=True), resumed=resumed)


LAYOUTS = {
    "tp": Layout(tp=2, dp=1, sequence_parallel=True, reduction="fixed"),
    "dp": Layout(dp=2, zero=3, reduction="fixed"),
    "cp": Layout(cp=2, dp=1, context="gather", zero=2, reduction="fixed"),
    "pp": Layout(pp=2, dp=1, schedule="zero-bubble", reduction="fixed"),
}


EXPERTS = LAYOUTS | {"ep": Layout(dp=2, ep=2, zero=2, reduction="fixed")}


def resume_everywhere(material: Material, folder: Path, layouts: dict, model: dict) -> None:
    for name, layout in layouts.items():
        if dist.get_rank() == 0:
            shutil.copytree(folder / "half", folder / name)
        dist.barrier()
        train(material, folder / name, layout, resumed=True, model=model, microbatch_size=1)


@pytest.mark.parametrize(
    ("layouts", "model"),
    [(LAYOUTS, {}), pytest.param(EXPERTS, MIXTRAL, marks=pytest.mark.full)],
    ids=["dense", "experts"],
)
def test_a_run_goes_on_at_any_layout(layouts, model, material, tmp_path, spawn):
    """Its losses, norms, weights and moments; with validation, warm-up and clipping."""
    train(material, tmp_path / "whole", model=model)
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-00000006")
    spawn(2)(resume_everywhere, material, tmp_path, layouts, model)
    for name in layouts:
        assert losses(tmp_path / name) == losses(tmp_path / "whole"), name
        found, want = (receipts(tmp_path / folder) for folder in (name, "whole"))
        assert found == want and len(set(want)) == 6
        assert same(tensors(tmp_path / name, 6), tensors(tmp_path / "whole", 6)), name


def test_another_limit_is_refused_on_resume(material):
    saved, other = to_dict(config(material)), config(material, {"exact": {"tp": 1}})
    refusal = r"step 3 was trained with train.exact.tp 2, and 1 gives other bits: use --train.ex"
    with pytest.raises(Unusable, match=refusal):
        check_same_limit(saved, other, 3)
    refusal = r"trained with train.exact.cp 1, and 2 gives other bits: use --train.exact.cp 1, or"
    with pytest.raises(Unusable, match=refusal):
        check_same_limit(saved, config(material, CUT), 3)
    for run in (config(material), config(material, {"numerics": "fast", "exact": {"tp": 8}})):
        check_same_limit(saved, run, 3)
    check_same_limit(to_dict(run), other, 3)


FLIPPED = "layers.1.mlp.up.weight"


def train_with_a_flip(material: Material, folder: Path) -> None:
    """Record a run in which a bit of rank 1's part of a weight flips after step 5, and repeat it
    from step 3 without.
    """
    step = loop.optimizer_step

    def flip(state, *args):
        metrics = step(state, *args)
        if state.step == 5 and dist.get_rank() == 1:
            local_view(state.model.get_parameter(FLIPPED)).view(torch.int32)[0, 3] ^= 1 << 9
        return metrics

    loop.optimizer_step = flip
    train(material, folder / "faulty", LAYOUTS["dp"])
    loop.optimizer_step = step
    if dist.get_rank() == 0:
        shutil.copytree(folder / "faulty", folder / "repeated")
        shutil.rmtree(folder / "repeated" / "checkpoints" / "step-00000006")
    dist.barrier()
    train(material, folder / "repeated", LAYOUTS["dp"], resumed=True)


def test_a_flipped_bit_is_found(material, tmp_path, spawn):
    spawn(2)(train_with_a_flip, material, tmp_path)
    faulty, repeated = (
        {row["step"]: row for row in receipt.read_receipts(tmp_path / name / "receipts.jsonl")}
        for name in ("faulty", "repeated")
    )
    found = replay.first_difference(faulty, repeated, range(4, 7))
    words = f"{FLIPPED}, first in the part of rank 1, differs first in step 5, of 1 weights"
    assert found == words
    assert replay.first_difference(faulty, repeated, range(4, 5)) is None


def test_another_machine_is_refused(material):
    run = config(material)
    mine = self_test.digest_operators()
    options = ReplayConfig("runs/a", 5)
    replay.check(run, {5: {"operators": mine}}, options)
    with pytest.raises(ValueError, match="other bits than the run's in exp, tanh: replay on a CPU"):
        replay.check(run, {5: {"operators": mine | {"exp": "0", "tanh": "0"}}}, options)
    with pytest.raises(ValueError, match="no receipt of step 5; its last one is of step 4"):
        replay.check(run, {4: {"operators": mine}}, options)
    with pytest.raises(ValueError, match="train.numerics fast, and only"):
        replay.check(config(material, {"numerics": "fast"}), {}, options)


def test_a_step_is_replayed(material, tmp_path, capsys):
    """From the checkpoint of step 3, at the layout of the run; a forged receipt is seen."""
    train(material, tmp_path)
    options = ReplayConfig(str(tmp_path), 5)
    before = (tmp_path / "receipts.jsonl").read_text()
    assert replay.replay(options, lambda work: work()) == 0
    printed = capsys.readouterr().out
    assert "steps 4 to 5: the bits are those that were recorded" in printed
    # its folder is gone
    assert "dolmen export" not in printed and "written" not in printed
    assert (tmp_path / "receipts.jsonl").read_text() == before
    rows = receipt.read_receipts(tmp_path / "receipts.jsonl")
    rows[4]["loss"] = "0x1.0p+0"  # and the receipt as it was
    (tmp_path / "receipts.jsonl").write_text(receipt.dump_receipts(rows))
    assert replay.replay(options, lambda work: work()) == 1
    assert "steps 4 to 5: loss differs first in step 5, of 0 weights" in capsys.readouterr().out


def test_a_replay_with_other_data_names_the_data(material, tmp_path, capsys):
    """A changed text would look like a rank with other bits. Nothing is validated."""
    docs, out = tmp_path / "docs", tmp_path / "run"
    shutil.copytree(material.docs, docs)
    data = {**material.options()["data"], "path": [str(docs)]}
    run = config(material, layout={"dp": 1}, data=data, checkpoint={"every": 3})
    run_training(run, out, SINGLE, Console(quiet=True))
    text = (docs / "07.txt").read_text()
    (docs / "07.txt").write_text(text.upper())
    for step, span in ((5, "steps 4 to 5"), (2, "steps 1 to 2")):
        assert replay.replay(ReplayConfig(str(out), step), lambda work: work()) == 1
        printed = capsys.readouterr().out
        assert f"{span}: the data are not those of the run: data 1: 30 documents" in printed
        assert "validation loss" not in printed
    with pytest.raises(BadInput, match=r"\(8\): .* \(dolmen replay has the options"):
        replay.replay(ReplayConfig(str(out), 5, Layout(tp=8)), lambda work: work())


def test_a_replay_is_at_the_layout_of_the_run_unless_another_is_given(material):
    """Also where what is given has the values of the defaults."""
    run = config(material, layout={"tp": 2, "reduction": "fixed"})
    for words, tp in (((), 2), (("--layout.tp", "1"), 1), (("--layout.dp", "1"), 1)):
        options = command.read("replay", ["runs/a", "--step", "5", *words])
        assert replay.without_outputs(run, options.layout).layout.tp == tp


def test_a_replay_over_cp_has_microbatches_of_one_sequence(material):
    run = config(material, CUT | {"microbatch_size": 4})
    for layout, size in ((Layout(cp=2, context="gather"), 1), (Layout(tp=2), 4)):
        replayed = replay.without_outputs(run, layout)
        assert replayed.train.microbatch_size == size
        check_exact(replayed)


def test_the_self_test_has_the_attention_of_chunks(material, monkeypatch):
    """To fewer keys than a sequence has, of which one process computes all."""
    spec, right, seen = config(material).spec, blockwise.attention, []

    def attention(q, k, v, attend, later=0):
        seen.append((q.shape[1], k.shape[1]))
        return right(q, k, v, attend, later) * (1 + 2**-20 * (len(q) > 1 and k.shape[1] == 3))

    monkeypatch.setattr(blockwise, "attention", attention)
    found = self_test.find_broken_attention(spec, Exact(2, 12, 2), 4, 1)
    assert found is not None and found.startswith("attention over 12 tokens of 4 heads")
    assert set(seen) == {(3, 3), (3, 6), (3, 9), (3, 12)}


def test_the_self_test_has_dropout(material, monkeypatch):
    """Whose products of probabilities may have other bits for fewer heads."""
    spec, right = config(material).spec, dropout.attention
    arguments = spec, Exact(2, 16), 4, 1, torch.float32, 0.5
    assert self_test.find_broken_attention(*arguments) is None

    def attention(q, *others):
        return right(q, *others) * (1 + 2**-20 * (q.shape[2] == 4))

    monkeypatch.setattr(dropout, "attention", attention)
    assert self_test.find_broken_attention(*arguments[:-1]) is None
    found = self_test.find_broken_attention(*arguments)
    assert found == "attention over 16 tokens of 4 heads than of 2"


def test_a_step_of_a_run_at_a_url_is_replayed(material, tmp_path, monkeypatch):
    """By its URL, and by a folder whose checkpoints another machine has saved."""
    monkeypatch.setattr(storage, "COPIES", str(tmp_path / "copies"))
    url, out = f"file://{tmp_path}/bucket", tmp_path / "run"
    checkpoint = {"every": 3, "to": url}
    run = config(material, layout={"dp": 1}, optimizer=UPDATE, checkpoint=checkpoint)
    run_training(run, out, SINGLE, Console(quiet=True))
    for folder in (url, f"{url}/", str(out)):
        for file in (out / "checkpoints").rglob("*.distcp"):
            file.unlink()
        assert replay.replay(ReplayConfig(folder, 5), lambda work: work()) == 0


def test_no_other_receipts_are_overwritten(material, tmp_path):
    """A user's file of that name, a damaged one and a pipe, before anything is written."""
    run, file = config(material), tmp_path / "receipts.jsonl"
    file.write_text("my shop receipts\n")
    with pytest.raises(Unusable, match="receipts.jsonl, which dolmen did not write"):
        check_resume(run, tmp_path)
    (tmp_path / ".dolmen").write_text("receipts.jsonl\n")
    file.write_text("damaged\n{}\n")
    with pytest.raises(Refused, match="receipts.jsonl, line 1"):
        check_resume(run, tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(Refused, match="receipts.jsonl: is not a regular file"):
        receipt.read_receipts(file)  # it would wait for ever


def test_receipts_are_on_disk_before_a_checkpoint_is_saved(tmp_path, monkeypatch, capsys):
    file, done = tmp_path / "receipts.jsonl", []
    receipts = receipt.Receipts(file, 0, SINGLE, torch.float32)
    assert receipts.handle is not None
    receipts.handle.write("{}\n")
    synced = receipts.handle.fileno()
    monkeypatch.setattr(os, "fsync", lambda number: done.append((number, file.read_text())))
    made = hooks.TrainingHooks.__new__(hooks.TrainingHooks)
    made.receipts, made.history = receipts, SimpleNamespace(add=lambda *_: None)
    made.checkpoints = SimpleNamespace(save=lambda *_: done.append("save"))
    monkeypatch.setattr(made, "_checkpoint_state", lambda _: SimpleNamespace(meta=dict))
    made.save(SimpleNamespace(step=1, tensors=dict), SimpleNamespace())
    assert done == [(synced, "{}\n"), "save"]


def test_receipts_that_a_checkpoint_is_newer_than_are_named(tmp_path, capsys):
    row = {"loss": "0x1p+0", "grad_norm": "0x1p+0", "receipt": "1", "operators": {}, "weights": {}}
    file = tmp_path / "receipts.jsonl"
    for newest, warning in ((2, f"WARNING: {file} lacks the steps 3 to 4\n"), (5, "")):
        file.write_text(receipt.dump_receipts({"step": n, **row} for n in range(1, newest + 1)))
        receipt.Receipts(file, 4, SINGLE, torch.float32).close()
        assert capsys.readouterr().err == warning


def test_a_damaged_receipt_reaches_no_terminal(material, tmp_path, monkeypatch, capsys):
    """Names and digests are those of a file that may be anybody's."""
    row = {"step": 5, "loss": "0x1p+0", "grad_norm": "0x1p+0", "operators": {}}
    repeated = {5: row | {"receipt": "0", "weights": {}}}
    recorded = {5: row | {"receipt": "1", "weights": {"\x1b[2Jw": {"0": "zz"}}}}
    with pytest.raises(ValueError, match=r"receipts.jsonl is damaged: .* \['zz'\]"):
        replay.first_difference(recorded, repeated, range(5, 6))
    train(material, tmp_path)
    rows = receipt.read_receipts(tmp_path / "receipts.jsonl")
    rows[4] |= {"receipt": "0", "weights": {"\x1b[2Jw": {"0": "1"}}}
    (tmp_path / "receipts.jsonl").write_text(receipt.dump_receipts(rows))
    assert replay.replay(ReplayConfig(str(tmp_path), 5), lambda work: work()) == 1
    printed = capsys.readouterr().out
    assert "differs first in step 5" in printed and "\x1b[2J" not in printed
