"""Which kernels are chosen for which hardware, and that a model is told of it where it is built."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import Flat, build, tiny

from dolmen.core.mesh import SINGLE
from dolmen.model.build import choose_kernels
from dolmen.ops.attention import BACKENDS, Attend
from dolmen.ops.attention.score_bias import alibi_slopes
from dolmen.ops.attention_support import SUPPORT, AttentionChoice, support_table
from dolmen.ops.kernels import CPU, H100, Hardware, Kernels, choose

A100 = Hardware("cuda", (8, 0), "NVIDIA A100-SXM4-80GB")
HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "hardware, dtype, head_dim, attention",
    [
        (H100, HALF, 128, "cudnn"),
        (H100, HALF, 136, "flash"),
        (A100, torch.float16, 64, "flash"),
        (H100, HALF, 256, "flash"),
        (CPU, HALF, 128, "blocks"),
        (H100, FULL, 128, "blocks"),  # flash has no fp32
        (H100, torch.float64, 128, "blocks"),
        (H100, HALF, 100, "blocks"),  # rows of 200 bytes
        (H100, HALF, 264, "blocks"),
        (Hardware("cuda", (7, 5), "T4"), HALF, 64, "blocks"),
        (Hardware("cuda", (8, 9), "L40S"), HALF, 192, "flash"),
        (Hardware("cuda", (8, 9), "L40S"), HALF, 200, "blocks"),
        (Hardware("cuda", (12, 0), "RTX 5090"), HALF, 256, "blocks"),
        (Hardware("cuda", (10, 0), "B200"), HALF, 256, "flash"),
        (Hardware("cuda", (10, 0), "B200"), HALF, 128, "cudnn"),
    ],
    ids=str,
)
def test_attention(hardware, dtype, head_dim, attention):
    assert choose(hardware, dtype, head_dim).attention == attention


REFUSED = [  # backend, hardware, dtype, head size, attention, deterministic -> what is missing
    ("flash", CPU, HALF, 64, Attend(), False, "needs a GPU of compute capability 8.x or later"),
    ("flash3", A100, HALF, 64, Attend(), False, "needs a GPU of compute capability 9.x"),
    ("cudnn", A100, HALF, 64, Attend(), False, "needs a GPU of compute capability 9.x to 10.x"),
    ("flash3", H100, FULL, 64, Attend(), False, "computes float16 and bfloat16, not float32"),
    ("flash3", H100, HALF, 100, Attend(), False, "multiples of 8 up to 256, not 100"),
    ("cudnn", H100, HALF, 136, Attend(), False, "multiples of 8 up to 128, not 136"),
    ("flash3", H100, HALF, 64, Attend(soft_cap=2.0), False, "has no soft cap"),
    ("cudnn", H100, HALF, 64, Attend(mask="prefix"), False, "has no prefix mask"),
    ("cudnn", H100, HALF, 64, Attend(), True, "has no deterministic backward (NVIDIA H100"),
    ("flash3", H100, HALF, 200, Attend(), True, "no deterministic backward for heads above 192"),
]


@pytest.mark.parametrize("backend, hardware, dtype, head_dim, attend, same, lack", REFUSED)
def test_a_requested_backend_that_cannot_is_refused(
    backend, hardware, dtype, head_dim, attend, same, lack
):
    with pytest.raises(ValueError) as raised:
        choose(
            *(hardware, dtype, head_dim, (), [attend]),
            attention=AttentionChoice(backend),
            deterministic=same,
        )
    message = str(raised.value)
    assert message.startswith(f"train.attention {backend}: {SUPPORT[backend].title} ")
    assert lack in message and message.endswith("use --train.attention auto")


def test_a_requested_backend_that_can_is_taken():
    window = [Attend(window=5)]
    for backend in ("blocks", "flash", "flash3", "cudnn"):
        kernels = choose(H100, HALF, 64, (), window, attention=AttentionChoice(backend))
        assert kernels.attention == backend
        assert f"attention by {backend} (train.attention)" in kernels.describe(False)
    same = dict(attention=AttentionChoice("flash3"), deterministic=True)
    assert choose(H100, HALF, 192, (), window, **same).attention == "flash3"
    assert choose(CPU, FULL, 64, attention=AttentionChoice("blocks")) == Kernels()


def test_times_of_a_timed_choice_are_said():
    timed = AttentionChoice("flash", (("cudnn", 2.0), ("flash", 1.004)))
    kernels = choose(H100, HALF, 128, attention=timed)
    said = "attention by flash (timed: cudnn 2.00 ms, flash 1.00 ms)"
    assert kernels.attention == "flash" and said in kernels.describe(False)


def test_deterministic_mode_has_backends_that_are(monkeypatch):
    """By the rule, and where a model is built: torch's own flag is what counts."""
    assert choose(H100, HALF, 128, deterministic=True).attention == "flash"
    spec = tiny("llama", hidden_size=128, num_attention_heads=8, vocab_size=71).spec
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose_kernels(spec, SINGLE, HALF, H100).attention == "flash"


def test_the_documentation_has_the_table_of_what_each_computes():
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    assert support_table().splitlines() == [
        line.strip() for line in page.splitlines() if line.strip() in support_table().splitlines()
    ]


def test_a_feature_is_computed_as_the_table_says():
    """What the table denies, the backend itself refuses; what it has is in tests/ops/test_flash."""
    q = torch.zeros(1, 4, 2, 8)
    for name, attend in {
        "soft cap": Attend(soft_cap=1.0),
        "ALiBi": Attend(slopes=(1.0, 0.5)),
        "prefix mask": Attend(mask="prefix"),
    }.items():
        for backend, support in SUPPORT.items():
            if name not in support.features:
                with pytest.raises(AssertionError, match="supports no soft cap"):
                    BACKENDS[backend].attention(q, q, q, attend)
            else:
                BACKENDS[backend].attention(q, q, q, attend)


def test_weight_gradients_are_turned_for_tiles_alone():
    """Of AMX, whose products are of bfloat16; any other CPU would be slower by the turning."""
    tiles = Hardware("cpu", tiles=True)
    chosen = [choose(one, dtype, 64).turned for one in (tiles, CPU, H100) for dtype in (HALF, FULL)]
    assert chosen == [True, False, False, False, False, False]


@pytest.mark.parametrize(
    "hardware, dtype, widths, grouped",
    [
        (H100, HALF, (64, 96), "grouped_mm"),
        (A100, HALF, (64, 96), "loop"),
        (Hardware("cuda", (10, 0), "B200"), HALF, (64, 96), "loop"),
        (H100, torch.float16, (64, 96), "loop"),  # documented for bfloat16 alone
        (H100, FULL, (64, 96), "loop"),
        (H100, HALF, (64, 100), "loop"),
        (H100, HALF, (), "loop"),
        (CPU, HALF, (64, 96), "loop"),
        (Hardware("cuda", (7, 5), "T4"), HALF, (64, 96), "loop"),
    ],
    ids=str,
)
def test_experts(hardware, dtype, widths, grouped):
    assert choose(hardware, dtype, 64, widths).grouped == grouped


def test_a_model_with_alibi_has_blocks():
    """What its layers' attention is reaches the choice."""
    kernels = {
        name: choose_kernels(
            tiny(name, hidden_size=128, num_attention_heads=8, vocab_size=71).spec,
            SINGLE,
            HALF,
            H100,
        )
        for name in ("bloom", "llama")
    }
    assert (kernels["llama"].attention, kernels["llama"].attention_reason) == ("cudnn", "")
    bloom = kernels["bloom"]
    assert (bloom.attention, bloom.attention_reason) == ("blocks", "flash has no ALiBi")


@pytest.mark.parametrize("hidden, attention", [(64, "cudnn"), (496, "flash"), (512, "blocks")])
def test_what_keys_carry_is_part_of_their_size(hidden, attention):
    """Flash takes heads of 256: 248, and 8 that keys carry."""
    fields = dict(alibi=True, multi_query=False, hidden_size=hidden, num_attention_heads=2)
    model = tiny("falcon", vocab_size=71, **fields)
    assert choose_kernels(model.spec, SINGLE, HALF, H100).attention == attention


def test_a_cpu_has_the_defaults_and_is_what_a_device_of_it_says():
    assert choose(CPU, HALF, 64, (64, 64)) == Kernels()
    assert replace(Hardware.from_device(torch.device("cpu")), tiles=False) == CPU
    gpu = choose(H100, FULL, 64)
    assert (gpu.logits_at_once, gpu.squares, gpu.norm) == (1 << 28, "whole", "fused")
    assert "attention by blocks" in gpu.describe(True) and "256 Mi logits at once" in gpu.describe(
        True
    )


@pytest.mark.parametrize(
    "attends, attention, said",
    [
        ([Attend(window=5, scale=0.3)], "cudnn", "attention by cudnn, experts"),
        ([Attend(), Attend(soft_cap=50.0)], "blocks", "by blocks (flash has no soft cap), experts"),
        ([Attend(slopes=alibi_slopes(4))], "blocks", "by blocks (flash has no ALiBi), experts"),
        ([Attend(soft_cap=1.0, slopes=(1.0,))], "blocks", "(flash has no soft cap and no ALiBi)"),
    ],
)
def test_what_flash_lacks_is_computed_by_blocks_and_said(attends, attention, said):
    kernels = choose(H100, HALF, 128, (), attends)
    assert kernels.attention == attention and said in kernels.describe(True)
    assert choose(CPU, HALF, 128, (), attends) == Kernels()


CONFIG = Flat(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=2,
    moe_intermediate_size=24,
)


def test_a_model_is_told_where_it_is_built():
    assert build(CONFIG, SINGLE).split.kernels == Kernels()
    here = build(CONFIG, SINGLE, compute=HALF).split.kernels
    assert replace(here, turned=False) == Kernels()  # the machine's own, where it has tiles
    gpu = build(CONFIG, SINGLE, compute=HALF, hardware=H100).split.kernels
    assert (gpu.attention, gpu.grouped) == ("cudnn", "grouped_mm")
    odd = build(replace(CONFIG, moe_intermediate_size=20), SINGLE, dtype=HALF, hardware=H100)
    assert (odd.split.kernels.attention, odd.split.kernels.grouped) == ("cudnn", "loop")
    capped = tiny("gemma2", vocab_size=32, hidden_size=32, num_hidden_layers=1, intermediate_size=8)
    kernels = build(capped, SINGLE, compute=HALF, hardware=H100).split.kernels
    assert (kernels.attention, kernels.attention_reason) == ("blocks", "flash has no soft cap")
    dense = build(replace(CONFIG, num_experts=0), SINGLE, hardware=H100).split.kernels
    assert (dense.attention, dense.grouped) == ("blocks", "loop")
