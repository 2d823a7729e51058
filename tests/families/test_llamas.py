"""Families like Llama at their published sizes: as many parameters as their makers count, and what
their layers are.
"""

import pytest
from cases import (
    baichuan,
    codellama,
    cohere,
    cohere2,
    granite,
    internlm2,
    olmo,
    olmo2,
    phi,
    phi3,
    qwen,
    stablelm,
)

from dolmen.families import ModelConfig
from dolmen.model import count
from dolmen.model.spec import NormSpec, ParallelResidual, RopeSpec, SequentialResidual

# as their makers count them
PARAMETERS = [
    (codellama.PUBLISHED[0], 6_738_546_688),
    (codellama.PUBLISHED[1], 33_743_970_304),
    (baichuan.BAICHUAN_7B, 7_000_559_616),
    (baichuan.BAICHUAN_13B, 13_264_901_120),
    (baichuan.BAICHUAN2_7B, 7_505_973_248),
    (baichuan.BAICHUAN2_13B, 13_896_668_160),
    (qwen.PUBLISHED[0], 7_721_324_544),
    (olmo.PUBLISHED[0], 6_888_095_744),
    (olmo2.PUBLISHED[0], 7_298_617_344),
    (phi.PUBLISHED[0], 2_779_683_840),
    (phi3.PUBLISHED[0], 3_821_079_552),
    (phi3.PUBLISHED[1], 14_659_507_200),
    (internlm2.PUBLISHED[0], 7_737_708_544),
    (cohere.PUBLISHED[0], 34_980_831_232),
    (cohere2.PUBLISHED[0], 8_028_033_024),
    (granite.PUBLISHED[0], 8_170_848_256),
]


@pytest.mark.parametrize("content, parameters", PARAMETERS)
def test_parameters(content, parameters):
    assert count.parameters(ModelConfig(content).spec) == parameters


def first(content):
    return ModelConfig(content).spec.blocks[0]


def test_values():
    assert first(codellama.PUBLISHED[0]).mixer.positions == RopeSpec(128, 1e6)
    assert first(stablelm.PUBLISHED[0]).arrangement == ParallelResidual(1)
    assert first(stablelm.PUBLISHED[0]).mixer.positions == RopeSpec(40)
    assert first(stablelm.PUBLISHED[0]).mixer.qk_norm == NormSpec("layernorm", 1e-5)
    assert first(stablelm.PUBLISHED[1]).arrangement == SequentialResidual()
    assert first(phi.PUBLISHED[0]).mixer.positions == RopeSpec(32)
    assert first(phi3.PUBLISHED[0]).mixer.window == 2047
    assert first(olmo2.PUBLISHED[0]).arrangement == SequentialResidual("output")
    assert first(olmo.PUBLISHED[1]).mixer.clip == 8
    assert first(cohere.PUBLISHED[0]).mixer.positions == RopeSpec(128, 8e6, interleaved=True)
    assert first(cohere.PUBLISHED[1]).mixer.qk_norm_of == "each head"
    layers = ModelConfig(cohere2.PUBLISHED[0]).spec.blocks
    assert [block.mixer.window for block in layers[:4]] == [4096] * 3 + [None]
    assert layers[3].mixer.positions is None
    spec = ModelConfig(granite.PUBLISHED[0]).spec
    assert (spec.embedding.scale, spec.head.scale) == (12, 1 / 16)
    assert (first(granite.PUBLISHED[0]).mixer.scale, spec.blocks[0].arrangement) == (
        0.0078125,
        SequentialResidual(branch_scale=0.22),
    )
    assert first(qwen.PUBLISHED[1]).mlp.size == 24576
    assert first(qwen.PUBLISHED[1]).mixer.positions == RopeSpec(128, 1e6)
    assert first(internlm2.PUBLISHED[0]).mixer.kv_heads == 8
