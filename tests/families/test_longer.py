"""Texts over the context that a model was first trained at, where their length tells how tokens are
turned.
"""

import math

import pytest
import torch
from cases.qwen import SIZES
from family_cases import build, save

from dolmen.conversion.source import open_source
from dolmen.families import ModelConfig
from dolmen.model import head
from dolmen.model.spec import DynamicScaling, LongRopeScaling, QwenScaling
from dolmen.serving import engine
from dolmen.serving.kv_cache import KVCache

QWEN = dict(seq_length=16, use_dynamic_ntk=True, use_logn_attn=True)


@pytest.mark.parametrize("ntk, log_n", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("length", [16, 17, 32, 40])
@torch.no_grad()
def test_qwen_in_evaluation_and_in_training(ntk, log_n, length, tmp_path):
    """40 tokens are 2.5 times 16: a base of 2^3 - 1 = 7; 17 and 32 have 3, and 16 have 1."""
    fields = QWEN | dict(use_dynamic_ntk=ntk, use_logn_attn=log_n)
    theirs = build("qwen", **fields)
    ours = engine.load_decoder(open_source(save(theirs, tmp_path)))
    tokens = torch.randint(0, SIZES["vocab_size"], (2, length))
    short = build("qwen", seq_length=64)(tokens).logits
    for model in (theirs, ours):
        model.eval()
    torch.testing.assert_close(
        ours(tokens, head.compute_logits), theirs(tokens).logits, rtol=0, atol=1e-4
    )
    felt = (theirs(tokens).logits - short).abs().max() > 1e-2
    assert felt == (length > 16)
    for model in (theirs, ours):
        model.train()
    torch.testing.assert_close(ours(tokens, head.compute_logits), short, rtol=0, atol=1e-4)


@torch.no_grad()
def test_qwen_goes_on_with_the_base_of_its_prompt(tmp_path):
    """With a cache, as its own code does: of 30 tokens it is 3 times what it was, of 50 it would be
    7 times. Two texts of which one is short.
    """
    theirs = build("qwen", **QWEN)
    ours = engine.load_decoder(open_source(save(theirs, tmp_path)))
    texts = [torch.randint(0, SIZES["vocab_size"], (1, n + 20)) for n in (12, 30)]
    lengths, cache = {0: 12, 1: 30}, KVCache(ours.spec)
    with torch.inference_mode():
        for new in (lengths, {0: 20, 1: 20}):
            reading = cache.append(new, torch.device("cpu"), lengths=lengths)
            past = {i: 0 if new is lengths else n for i, n in lengths.items()}
            parts = [texts[i][:, past[i] : past[i] + new[i]] for i in reading.sequences]
            got = ours(torch.cat(parts, 1), head.compute_logits, reading)[0]
    for i, logits in zip(reading.sequences, got.split(20), strict=True):
        want = theirs.logits(texts[i], length=lengths[i])[0, -20:]
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-4)


def test_values_of_phi_3_of_128k_and_of_what_is_dynamic():
    factors = dict(short_factor=[1.0] * 48, long_factor=[2.5] * 48, type="su")
    content = {"model_type": "phi3", "max_position_embeddings": 131072, "rope_scaling": factors}
    mixer = ModelConfig(content).spec.blocks[0].mixer
    grown = math.sqrt(1 + math.log(131072 / 4096) / math.log(4096))
    assert mixer.positions.scaling == LongRopeScaling(grown, (1.0,) * 48, (2.5,) * 48, 4096)
    with pytest.raises(ValueError, match="short_factor has 3 numbers, but rope rotates 48 pairs"):
        ModelConfig(content | {"rope_scaling": factors | {"short_factor": [1.0] * 3}})
    with pytest.raises(ValueError, match="is not supported by phi3: use default or longrope"):
        ModelConfig({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}})
    dynamic = {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert ModelConfig(dynamic).spec.blocks[0].mixer.positions.scaling == DynamicScaling(2.0, 2048)
    qwen = ModelConfig({"model_type": "qwen"}).spec.blocks[0].mixer.positions.scaling
    assert qwen == QwenScaling(2048, True, True)


@torch.no_grad()
def test_a_dynamic_base_is_that_of_transformers(tmp_path):
    """Of 40 tokens, where 16 are the first context."""
    rope = dict(rope_type="dynamic", factor=3.0, rope_theta=1000.0)
    theirs = build("llama", rope_parameters=rope, max_position_embeddings=16)
    ours = engine.load_decoder(open_source(save(theirs, tmp_path)))
    for length in (16, 40):
        tokens = torch.randint(0, ours.spec.vocab_size, (2, length))
        want = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens, head.compute_logits), want, rtol=0, atol=1e-4)
