"""Modules that own parameters, beside transformers' where half precision tells them apart."""

import math

import pytest
import torch
from tiny_models import Tiny, build, initialize, tiny
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm, Gemma2TextScaledWordEmbedding

from dolmen.core.mesh import SINGLE
from dolmen.model.spec import NormSpec


def gemma(hidden_size: int) -> Tiny:
    return tiny(
        "gemma2",
        vocab_size=31,
        hidden_size=hidden_size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_scale_of_an_embedding_has_its_dtype(dtype):
    """sqrt(3072) = 55.43 is 55.5 in bf16, which Gemma was trained with."""
    model = build(gemma(3072), SINGLE, dtype=dtype)
    initialize(model, 0)
    theirs = Gemma2TextScaledWordEmbedding(31, 3072, None, math.sqrt(3072)).to(dtype)
    theirs.weight = model.embed.weight
    tokens = torch.arange(31)
    assert torch.equal(model.embed(tokens), theirs(tokens))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_norm_less_one(dtype):
    """Bit for bit; new weights are 0."""
    model = build(gemma(64), SINGLE, dtype=dtype)
    initialize(model, 0)
    ours, theirs = model.layers["0"].attn_post_norm, Gemma2RMSNorm(64).to(dtype)
    assert not ours.weight.any()
    with torch.no_grad():
        ours.weight.normal_(generator=torch.Generator().manual_seed(0))
    theirs.weight = ours.weight
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(ours(x), theirs(x))


def test_a_layernorm_less_one_is_refused():
    with pytest.raises(ValueError, match="zero_centred=True.*only rmsnorm"):
        NormSpec("layernorm", zero_centred=True)
