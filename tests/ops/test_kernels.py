"""Which kernels are chosen for which hardware, and that a model is told of it where it is built."""

from dataclasses import replace

import pytest
import torch
from tiny_models import Flat, build, tiny

from dolmen.core.mesh import SINGLE
from dolmen.model.build import choose_kernels
from dolmen.ops.attention import Attend
from dolmen.ops.attention.score_bias import alibi_slopes
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
    assert (kernels["llama"].attention, kernels["llama"].without) == ("cudnn", "")
    assert (kernels["bloom"].attention, kernels["bloom"].without) == ("blocks", "ALiBi")


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
    # where flash would not be chosen, it is not what is missing
    assert "flash" not in choose(H100, FULL, 128, (), attends).describe(True)
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
    assert (kernels.attention, kernels.without) == ("blocks", "soft cap")
    dense = build(replace(CONFIG, num_experts=0), SINGLE, hardware=H100).split.kernels
    assert (dense.attention, dense.grouped) == ("blocks", "loop")
