"""Models that a plan knows by name, held to what their papers say of them."""

import pytest

from dolmen.model import count
from dolmen.model.spec import AttentionSpec
from dolmen.recipes import RECIPES

# 2104.04473, table 1: parameters in billions as printed, heads, hidden size, layers, batch
TABLE_1 = {
    "gpt-1.7b": (1.7, 24, 2304, 24, 512),
    "gpt-3.6b": (3.6, 32, 3072, 30, 512),
    "gpt-7.5b": (7.5, 32, 4096, 36, 512),
    "gpt-18b": (18.4, 48, 6144, 40, 1024),
    "gpt-39b": (39.1, 64, 8192, 48, 1536),
    "gpt-76b": (76.1, 80, 10240, 60, 1792),
    "gpt-145b": (145.6, 96, 12288, 80, 2304),
    "gpt-310b": (310.1, 128, 16384, 96, 2160),
    "gpt-530b": (529.6, 128, 20480, 105, 2520),
    "gpt-1t": (1008.0, 160, 25600, 128, 3072),
}
# 2205.05198, table 3, which pads the vocabulary alike; the other two are table 1's
TABLE_3 = {"gpt-22b": (22, 64, 6144, 48, 4), "gpt-175b": (175, 96, 12288, 96, 64)}


@pytest.mark.parametrize("name", {**TABLE_1, **TABLE_3})
def test_gpts_are_those_of_the_papers(name):
    """Parameters as printed, and as 2104.04473, eq. 2 has them, which leaves out the last norm."""
    billions, heads, h, layers, batch = {**TABLE_1, **TABLE_3}[name]
    run = RECIPES[name]()
    spec = run.spec
    mixer = spec.blocks[0].mixer
    assert isinstance(mixer, AttentionSpec)
    assert (mixer.heads, spec.hidden_size, spec.layers) == (heads, h, layers)
    assert (spec.vocab_size, run.sequence_length) == (51200, 2048)
    assert run.train.global_batch_size == batch
    found = count.parameters(spec)
    digits = len(str(billions).partition(".")[2])
    assert round(found / 1e9, digits) == billions
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (51200 + 2048) / (12 * layers * h))
    assert found - formula == pytest.approx(2 * h, rel=1e-3)


# Of the files that their makers published.
LLAMAS = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", LLAMAS)
def test_llamas_have_the_parameters_of_their_files(name):
    assert count.parameters(RECIPES[name]().spec) == LLAMAS[name]
