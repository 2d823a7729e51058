"""Every published config.json is read as transformers reads it, into the values that its makers
state.
"""

import math
from copy import deepcopy

import pytest
from published import (
    BLOOM,
    BLOOM_ALIASES,
    DEEPSEEK_V2,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    FALCON_7B,
    FALCON_11B,
    FALCON_40B,
    FALCON_CLASSIC,
    GEMMA2_9B,
    GEMMA2_27B,
    GEMMA_2B,
    GPT2,
    LLAMA_31,
    LLAMA_LINEAR,
    MISTRAL,
    MIXTRAL,
    PUBLISHED,
    QWEN_3,
    QWEN_3_MOE,
    QWEN_3_SPARSE_STEP,
    QWEN_25,
    QWEN_WINDOW,
    QWEN_YARN,
    by_transformers,
    each,
)

from dolmen.families import ModelConfig, explicit_fields, families, model_from_spec
from dolmen.model import count
from dolmen.model.spec import (
    AlibiSpec,
    FalconAlibiSpec,
    LatentAttentionSpec,
    LinearScaling,
    Llama3Scaling,
    LMHeadSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    ParallelResidual,
    RopeSpec,
    RouterSpec,
    SequentialResidual,
    YarnScaling,
)


@each([*PUBLISHED, *({"model_type": name} for name in families())])
def test_read_as_transformers_reads_it(content):
    model = ModelConfig(deepcopy(content))
    assert model.spec == ModelConfig(by_transformers(content)).spec
    assert model.config == content
    assert model.export_config() == {n: v for n, v in content.items() if n != "auto_map"}


@each()
def test_a_new_config_says_the_same_tree(content):
    spec = ModelConfig(content).spec
    made = model_from_spec(spec, ModelConfig(content).model_type)
    assert made.spec == spec and ModelConfig(by_transformers(made.config)).spec == spec
    assert (
        made.family.read(explicit_fields(ModelConfig(content))) == spec
    )  # and nothing is left to follow


def first(content):
    """The first layer that it says."""
    return ModelConfig(content).spec.blocks[0]


def test_values_of_llama():
    mixer = first(LLAMA_31).mixer
    assert mixer.positions == RopeSpec(128, 500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    mixer = first(LLAMA_LINEAR).mixer
    assert mixer.positions == RopeSpec(128, 10000.0, LinearScaling(4.0))
    assert mixer.kv_heads == 40 and mixer.head_size == 128


def test_values_of_mistral_and_mixtral():
    assert first(MISTRAL).mixer.window == 4096
    mixtral = first(MIXTRAL).mlp
    assert (mixtral.number, mixtral.size) == (8, 14336)
    assert mixtral.router.normalise and mixtral.router.aux_loss_coef == 0.02


def test_values_of_qwen():
    last = ModelConfig(QWEN_25).spec.blocks[23].mixer
    assert last.window is None and last.q_bias and last.k_bias and last.v_bias and not last.o_bias
    windowed = ModelConfig(QWEN_WINDOW).spec
    assert [windowed.blocks[i].mixer.window for i in (20, 21)] == [None, 512]
    assert [run.repeat for run in windowed.runs] == [21, 3]
    stretched = first(QWEN_YARN).mixer.positions.scaling
    assert stretched == YarnScaling(4.0, 32768, attention_factor=0.1 * math.log(4) + 1)
    third = first(QWEN_3).mixer
    assert third.head_size == 128 and third.qk_norm == NormSpec("rmsnorm", 1e-6)
    sparse = first(QWEN_3_MOE).mlp
    assert sparse.size == 768 and sparse.per_token == 8
    layers = ModelConfig(QWEN_3_SPARSE_STEP).spec.blocks
    assert [i for i in range(8) if layers[i].mlp.experts] == [1, 5, 7]


def test_values_of_falcon():
    falcon = first(FALCON_7B)
    assert (falcon.mixer.heads, falcon.mixer.kv_heads, falcon.mixer.head_size) == (71, 1, 64)
    assert falcon.arrangement == ParallelResidual(1) and falcon.mlp.size == 4 * 4544
    assert count.parameters(ModelConfig(FALCON_7B).spec) == 6_921_720_704
    falcon = first(FALCON_40B)
    assert falcon.mixer.kv_heads == 8 and falcon.arrangement == ParallelResidual(2)
    falcon = first(FALCON_11B)
    assert falcon.arrangement == ParallelResidual(1) and falcon.mixer.positions.theta == 500042
    falcon = first(FALCON_CLASSIC)
    assert (
        ModelConfig(FALCON_CLASSIC).spec.hidden_size == 2048
        and falcon.arrangement == SequentialResidual()
    )
    assert (
        falcon.mixer.kv_heads == 32
        and falcon.mlp.bias
        and falcon.mixer.positions == FalconAlibiSpec()
    )


def test_values_of_gemma():
    gemma = ModelConfig(GEMMA_2B).spec
    assert gemma.blocks[0].mlp.activation == "gelu_tanh" and gemma.embedding.scale == 2048**0.5
    assert gemma.final_norm == gemma.blocks[0].norm == NormSpec("rmsnorm", 1e-6, zero_centred=True)
    assert (
        gemma.head == LMHeadSpec(tied=True) and gemma.blocks[0].arrangement == SequentialResidual()
    )
    assert count.parameters(gemma) == 2_506_172_416


def test_values_of_gemma_2():
    gemma = ModelConfig(GEMMA2_27B).spec
    one, two = (block.mixer for block in gemma.blocks[:2])
    assert (one.window, two.window) == (4096, None)
    assert first(GEMMA2_27B).arrangement == SequentialResidual("sandwich")
    assert one.soft_cap == 50 and one.scale == 1 / 12 and gemma.head == LMHeadSpec(True, 30.0)
    assert [run.repeat for run in gemma.runs] == [23]
    assert count.parameters(gemma) == 27_227_128_320
    gemma = ModelConfig(GEMMA2_9B).spec
    assert gemma.blocks[0].mixer.scale is None  # of heads of 256
    assert count.parameters(gemma) == 9_241_705_984
    # 6 per element; 12 per layer, head, its size and mean key of 8192 causal ones, or of a window
    norms, keys = (42 * 4 + 1) * 3584, (8193 / 2, (4096 * 4097 / 2 + 4096 * 4096) / 8192)
    assert count.training_flops_per_token(gemma, 8192) == pytest.approx(
        6 * (9_241_705_984 - norms) + 12 * 21 * 16 * 256 * sum(keys), rel=1e-12
    )


def test_values_of_bloom():
    bloom = ModelConfig(BLOOM).spec
    assert bloom.hidden_size == 14336 and bloom.embedding.norm == bloom.final_norm
    assert bloom.blocks[0].mixer.positions == AlibiSpec() and bloom.blocks[0].mixer.heads == 112
    assert (bloom.layers, bloom.max_position_embeddings, bloom.head.tied) == (70, 2048, True)
    assert count.parameters(bloom) == 176_247_271_424
    assert ModelConfig(BLOOM_ALIASES).spec.layers == 24


def test_values_of_deepseek():
    lite, v2, v3 = (
        ModelConfig(content).spec for content in (DEEPSEEK_V2_LITE, DEEPSEEK_V2, DEEPSEEK_V3)
    )
    yarn = YarnScaling(40.0, 4096, attention_factor=1.0)  # of equal mscales
    latent = NormSpec("rmsnorm", 1e-6)
    turned = RopeSpec(64, 10000.0, yarn, interleaved=True)
    assert lite.blocks[0].mixer == LatentAttentionSpec(
        16, None, 512, 128, 128, latent, turned, 0.707
    )
    assert v3.blocks[0].mixer == LatentAttentionSpec(128, 1536, 512, 128, 128, latent, turned, 1.0)
    # both as the original code has them: (0.1 ln 40 + 1)^2 / sqrt(192), with 0.707 in V2-Lite
    assert v3.blocks[0].mixer.scale == pytest.approx(1.3688879454113936**2 / 192**0.5, rel=1e-12)
    assert lite.blocks[0].mixer.scale == pytest.approx(1.2608037774**2 / 192**0.5, rel=1e-9)
    assert [run.repeat for run in v3.runs] == [3, 58] and lite.blocks[0].mlp == MLPSpec(10944)
    assert v2.blocks[1].mlp == MoESpec(
        160,
        6,
        1536,
        router=RouterSpec("softmax", False, 16.0, 8, 3, "max", aux_loss_coef=0.001),
        shared=MLPSpec(2 * 1536),
    )
    assert v3.blocks[3].mlp == MoESpec(
        256,
        8,
        2048,
        router=RouterSpec("sigmoid", True, 2.5, 8, 4, "top2", bias=True, aux_loss_coef=0.001),
        shared=MLPSpec(2048),
    )


def test_values_of_gpt2():
    gpt2 = ModelConfig(GPT2).spec
    assert gpt2.blocks[0].mlp.size == 3072 and gpt2.head.tied
    assert gpt2.embedding.positions.length == 1024 and gpt2.final_norm.bias
