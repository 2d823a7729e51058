"""The numbers in metrics.jsonl, absolutely: what each should be follows here from the run's
settings, by hand, under a clock that is ours.
"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tinyrun
import torch
import transformers
from rich.console import Console
from tiny_models import Flat, build, initialize
from tinyrun import MODEL, rows

from dolmen.core.mesh import SINGLE, Axis
from dolmen.data.batch import Batch
from dolmen.evaluation import validate
from dolmen.model import count
from dolmen.model.mlp import Router
from dolmen.optim.optimizer import OptimizerConfig, adamw
from dolmen.parallel.simulation import make_schedule
from dolmen.recipes import RECIPES
from dolmen.training import evaluate, hooks, report
from dolmen.training import mfu as devices
from dolmen.training.config import RunConfig
from dolmen.training.mfu import Peak
from dolmen.training.run import run_training
from dolmen.training.state import TrainState
from dolmen.training.step import optimizer_step

material, one_thread = tinyrun.material, tinyrun.one_thread

MEASURED, PROMISED = 3e9, 8e9
# Multiply-adds per token of tinyrun.MODEL, 2 layers of width 32: q 32 x 32, k and v 32 x 16, o 32 x
# 32, three of 32 x 48; head 32 x 300; scores and their use, 4 heads of 8, over (16 + 1) / 2 keys.
# Times 2 for a multiply and an add, times 3 for forward and a backward of two products.
FLOPS = 6 * (2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 2 * 4 * 8 * 8.5) + 32 * 300)


@pytest.fixture(scope="module")
def ran(material, tmp_path_factory):
    """Folder and outcome of six steps of 4 x 16 tokens, validated after 3 and 6; each look at the
    clock takes a second, each validation a hundred more.
    """
    out, clock = tmp_path_factory.mktemp("numbers"), itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        time = SimpleNamespace(monotonic=lambda: float(next(clock)), time=lambda: 0.0)
        patch.setattr(hooks, "time", time)

        def slow_loss(*args):
            for _ in range(100):
                next(clock)
            return validate.mean_loss(*args)

        patch.setattr(evaluate, "mean_loss", slow_loss)
        patch.setattr(devices, "peak", lambda *_: Peak(MEASURED, PROMISED))
        outcome = run_training(material.config(), out / "run", SINGLE, Console(quiet=True))
    return out / "run", outcome


@pytest.fixture
def found(ran):
    return ran[0]


def test_flops_by_hand():
    assert count.training_flops_per_token(Flat(**MODEL).spec, 16) == FLOPS


def test_flops_of_a_window_and_of_experts_by_hand():
    """A window of 4 over 16 tokens: 1, 2, 3 keys and 13 times 4. Two experts of four, and the
    router.
    """
    window = Flat(**MODEL, sliding_window=4).spec
    keys = (1 + 2 + 3 + 13 * 4) / 16
    fewer = 6 * 2 * 2 * 4 * 8 * (8.5 - keys)
    assert count.training_flops_per_token(window, 16) == pytest.approx(FLOPS - fewer, rel=1e-12)
    experts = Flat(**MODEL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20).spec
    more = 6 * 2 * (2 * 3 * 32 * 20 + 32 * 4 - 3 * 32 * 48)
    assert count.training_flops_per_token(experts, 16) == FLOPS + more


@pytest.mark.parametrize("length, factor", [(4096, 1.067), (32768, 1.364)])
def test_the_8b_shape_by_the_fields_count(length, factor):
    """PaLM's 6 N + 12 L H Q T, N without the embedding, whose rows are looked up (torchtitan,
    nanochat); Megatron-LM halves the second term, as we do. docs/performance.md has these.
    """
    c = RECIPES["llama-8b"]().model.spec
    n = count.parameters(c) - c.vocab_size * c.hidden_size
    norms = (2 * 32 + 1) * 4096  # 0.004 % of N, which multiply nothing but elements
    palm = count.training_flops_per_token(c, length, "full")
    assert palm == 6 * (n - norms) + 12 * 32 * 32 * 128 * length
    ours = count.training_flops_per_token(c, length)
    assert ours == 6 * (n - norms) + 6 * 32 * 32 * 128 * (length + 1)
    assert palm / ours == pytest.approx(factor, abs=5e-4)
    window = Flat(**MODEL, sliding_window=4).spec
    full = count.training_flops_per_token(Flat(**MODEL).spec, 16, "full")
    assert count.training_flops_per_token(window, 16, "full") == full


def test_both_are_named_in_the_line_and_the_header():
    row = {"mfu_measured": 0.551, "mfu_datasheet": 0.412}
    assert report._mfu(row) == "MFU 41.2% of datasheet peak, 55.1% of measured peak"
    assert report._mfu({"mfu_measured": 0.551}) == "MFU 55.1% of measured peak"
    assert "104.0% of measured peak (which was measured" in report._mfu({"mfu_measured": 1.04})
    reported = report.describe_mfu(replace(RunConfig(), model=RECIPES["llama-8b"]().model))
    assert reported == (
        "of 45.43 GFLOP per token, attention to the keys that queries see; with all keys, as "
        "torchtitan counts, 45.83: 1.009 times the MFU"
    )


def test_tokens_per_second_and_both_mfu(found):
    """One second per step; what a validation takes is not the training's, but looking at the clock
    before and after it costs a second of the step after it.
    """
    assert [row["step"] for row in rows(found)] == [1, 2, 3, 4, 5, 6]
    for row in rows(found):
        seconds = 2 if row["step"] == 4 else 1
        assert row["tokens"] == row["step"] * 64
        assert row["tokens_per_second"] == 64 / seconds
        assert row["mfu_measured"] == pytest.approx(64 / seconds * FLOPS / MEASURED, rel=1e-12)
        assert row["mfu_datasheet"] == pytest.approx(64 / seconds * FLOPS / PROMISED, rel=1e-12)


def test_the_peak_is_that_of_all_ranks():
    assert Peak(2e12, 4e12).utilization(1e12, 1) == {"mfu_measured": 0.5, "mfu_datasheet": 0.25}
    assert Peak(2e12, 4e12).utilization(1e12, 4) == {"mfu_measured": 1 / 8, "mfu_datasheet": 1 / 16}
    assert Peak(2e12, None).utilization(1e12, 4) == {"mfu_measured": 1 / 8}


def test_a_run_of_several_ranks_divides_by_all_of_them(found, material, tmp_path, monkeypatch):
    """The hooks of one of four: the step's tokens are those of all."""
    written = []
    made = hooks.TrainingHooks.__new__(hooks.TrainingHooks)
    made.mesh = replace(SINGLE, world=Axis("world", 4, 1))
    made.peak, made.flops = Peak(MEASURED, PROMISED), FLOPS
    made.since, made.tokens_since, made.skipped, made.began = 10.0, 640, 0, 2.0
    made.writers = [SimpleNamespace(write=written.append)]
    made.loader = SimpleNamespace(epochs=lambda step: {}, extra_metrics={}, completions=[])
    clock = SimpleNamespace(monotonic=lambda: 12.0, time=lambda: 0.0)
    monkeypatch.setattr(hooks, "time", clock)
    scale = SimpleNamespace(dynamic=False)
    state = SimpleNamespace(step=1, tokens=640, scale=scale)
    reported = dict(loss=1.0, grad_norm=1.0, lr=1.0, router={}, objective={}, critic=None)
    made.log(state, SimpleNamespace(**reported))
    assert written[0]["tokens_per_second"] == 320
    assert written[0]["mfu_measured"] == pytest.approx(320 * FLOPS / MEASURED / 4, rel=1e-12)
    assert written[0]["seconds"] == 10 and "skipped_steps" not in written[0]
    # a peak that was measured under load is exceeded: no share is over 1
    made.peak, made.since, made.tokens_since = Peak(320 * FLOPS / 8, PROMISED), 10.0, 640
    made.log(state, SimpleNamespace(**reported))
    made.since, made.tokens_since = 10.0, 320
    made.log(state, SimpleNamespace(**reported))
    assert [row["mfu_measured"] for row in written[1:]] == [1, 0.5]


@pytest.mark.parametrize(
    "name, dtype, want",
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4e12),
        ("NVIDIA H100 80GB HBM3", torch.float32, 67e12),
        ("NVIDIA H100 PCIe", torch.float16, 756.5e12),
        ("NVIDIA H200", torch.bfloat16, 989.4e12),
        ("NVIDIA H200 NVL", torch.bfloat16, 835.5e12),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA A100 80GB PCIe", torch.float32, 19.5e12),
        ("NVIDIA B200", torch.bfloat16, 2250e12),
        ("NVIDIA B200", torch.float32, None),
        ("NVIDIA GB200", torch.float16, 2500e12),
        ("NVIDIA A10", torch.bfloat16, 125e12),
        ("NVIDIA A10G", torch.bfloat16, None),
        ("NVIDIA L4", torch.float16, 121e12),
        ("NVIDIA L40S", torch.float16, 362.05e12),
        ("NVIDIA L40", torch.float16, None),
        ("NVIDIA H20", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 5090", torch.float32, 104.8e12),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", torch.float32, None),
        ("Tesla V100-SXM2-32GB", torch.float16, 125e12),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, None),
        ("Tesla V100-PCIE-16GB", torch.float32, 14e12),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, None),
        ("", torch.bfloat16, None),
        ("NVIDIA H200", torch.float64, None),
        ("Some GPU", torch.float32, None),
    ],
)
def test_the_datasheets(name, dtype, want):
    assert devices.datasheet(name, dtype) == want


def test_a_cpu_has_no_datasheet_and_says_so():
    found = devices.peak(torch.device("cpu"), torch.float32)
    assert found.datasheet is None and "no datasheet figure" in str(found)
    assert list(found.utilization(1.0, 1)) == ["mfu_measured"]


def test_the_measured_peak_is_two_flops_per_multiply_add(monkeypatch):
    """A product that takes an hour by the clock."""
    clock = itertools.count(0, 3600)
    monkeypatch.setattr(devices, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    found = devices.matmul_peak(torch.device("cpu"), torch.float32)
    assert found == pytest.approx(2 * 1024**3 / 3600)


@pytest.mark.parametrize("other, epochs", [(0.25, "1 to 5"), (0.05, "1")])
def test_epochs_that_are_left_are_a_range_where_sources_differ(other, epochs):
    rates = {"a": 0.05, "b": other}
    loader = SimpleNamespace(epochs=lambda step: {name: step * r for name, r in rates.items()})
    text = report.describe_length(SimpleNamespace(step=5, steps=25), loader, 1000)
    assert text == f"steps 5 to 25, 20 k tokens, {epochs} epochs"


def test_epochs(ran, material):
    """Samples read over those of an epoch: one per 16 tokens of the training text."""
    found, outcome = ran
    (name,) = [name for name in rows(found)[0] if name.startswith("epoch/")]
    values = [row[name] for row in rows(found)]
    assert values == pytest.approx([values[0] * step for step in range(1, 7)], rel=1e-12)
    corpus = tokens_of(material, set(outcome.validation_files))
    assert 4 / values[0] == pytest.approx(corpus / 16, abs=1)


def tokens_of(material, held: set[str]) -> int:
    """Tokens of the documents that are not held out, an end of text after each."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(material.tokenizer)
    texts = [p.read_text() for p in sorted(material.docs.iterdir()) if str(p) not in held]
    assert held and texts
    return sum(len(tokenizer.encode(t, add_special_tokens=False)) + 1 for t in texts)


def test_memory_is_the_most_this_process_held():
    """Of a CPU, what the kernel says in kB."""
    with open("/proc/self/status") as status:
        most = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    assert hooks.memory_gib(SINGLE) == pytest.approx(most / 2**20, rel=0.02)


def test_router_numbers_by_their_definition():
    """Of the logits that the routers gave: pairs of token and expert are counted, and the losses
    averaged over sequences and layers. Microbatches do not matter.
    """
    layers, experts, k, length = 3, 6, 2, 8
    config = Flat(
        **MODEL | dict(num_hidden_layers=layers, initializer_range=0.3),
        num_experts=experts,
        num_experts_per_tok=k,
        moe_intermediate_size=20,
    )
    model, logits = build(config, SINGLE, dtype=torch.float64), {i: [] for i in range(layers)}
    initialize(model, 0)
    for i, block in model.layers.items():
        assert isinstance(block.mlp.router, Router)
        block.mlp.router.register_forward_hook(
            lambda m, args, y, i=int(i): logits[i].append(y[0].detach())
        )
    windows = torch.randint(300, (4, length + 1), generator=torch.Generator().manual_seed(0))
    still = OptimizerConfig(lr=0.0, schedule="constant")
    state = TrainState(model, adamw(model, still), still, 1, 0, make_schedule("1f1b", 1, 2))
    metrics = optimizer_step(state, Batch.from_windows(windows.numpy()), SINGLE).router
    balance, z, worst = [], [], 0.0
    for layer in logits.values():
        scores = torch.cat(layer).view(4, length, experts)
        chosen = torch.zeros_like(scores).scatter_(-1, scores.topk(k).indices, 1.0)
        loads = chosen.sum((0, 1))
        worst = max(worst, float(loads.max() / loads.mean()))
        share, probability = chosen.mean(1) / k, scores.softmax(-1).mean(1)
        balance.append(float(experts * (share * probability).sum(-1).mean()))
        z.append(float(scores.exp().sum(-1).log().square().mean()))
    assert metrics["router/max_load"] == pytest.approx(worst, rel=1e-9) and worst > 1
    assert metrics["router/aux_loss"] == pytest.approx(sum(balance) / layers, rel=1e-9)
    assert metrics["router/z_loss"] == pytest.approx(sum(z) / layers, rel=1e-9)


def test_bits_per_byte_of_a_held_out_end(material, tmp_path):
    """Of a single document its end is held out: the bytes are those of the text after what was
    trained on.
    """
    text = (material.docs / "00.txt").read_text() * 40
    (tmp_path / "one.txt").write_text(text)
    data = {"path": [str(tmp_path / "one.txt")], "validation_fraction": 0.1}
    config = material.config(data=data, train={"steps": 1})
    outcome = run_training(config, tmp_path / "run", SINGLE, Console(quiet=True))
    tokenizer = transformers.AutoTokenizer.from_pretrained(material.tokenizer)
    ids = tokenizer(text)["input_ids"]  # and the end of text
    assert outcome.val_tokens == round(0.1 * (len(ids) + 1))
    end = tokenizer.decode(ids[1 - outcome.val_tokens :])
    assert text.endswith(end)
    bits = outcome.val_loss * outcome.val_tokens / math.log(2) / len(end.encode())
    assert outcome.bits_per_byte == pytest.approx(bits, rel=1e-12)


def test_a_part_of_the_held_out_text_has_no_bits_per_byte(material, tmp_path):
    """Its bytes are not known; its loss and tokens are told: as many as were trained on."""
    log = {"validate_every": 1, "validation_tokens": 32}
    config = material.config(train={"steps": 1}, log=log)
    outcome = run_training(config, tmp_path / "run", SINGLE, Console(quiet=True))
    assert outcome.bits_per_byte is None
    assert outcome.val_tokens == 64 < outcome.held_out_tokens and outcome.val_loss > 0
