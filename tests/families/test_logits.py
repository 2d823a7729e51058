"""Logits, loss, gradients and texts of every family and structure against transformers, on a
sequence longer than its window and its first context.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
import transformers
from stored import exported_trained
from tiny import CASES, build, save
from transformers.core_model_loading import revert_weight_conversion
from wide import Wide, double

from dolmen.conversion.source import load_weights, open_source
from dolmen.core import state
from dolmen.model import head
from dolmen.model.decoder import Decoder
from dolmen.serving import engine

FELT = [
    f"layers.1.{name}"
    for name in (
        "attn.k.weight",
        "attn.q_a_norm.weight",
        "attn.kv_a.weight",
        "attn.kv_a_norm.weight",
        "attn.kv_b.weight",
        "mlp.up.weight",
        "mlp.experts.down.weight",
        "mlp.router.weight",
        "mlp.router.bias",
        "mlp.shared.down.weight",
    )
]


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits(case, tmp_path):
    theirs, folder = build(case), save(build(case), tmp_path)
    source = open_source(folder)
    ours = Decoder(source.tree).eval()
    parameters = dict(ours.named_parameters())
    for p in parameters.values():
        p.fill_(float("nan"))
    load_weights(source, lambda name, full: state.write_region(parameters[name], full))
    tokens = torch.randint(0, source.tree.vocab_size, (2, 40))
    expected = theirs(tokens).logits
    assert expected.std() > 0.3
    # fp32, logits of size 1 to 10
    torch.testing.assert_close(ours(tokens, head.logits), expected, rtol=0, atol=1e-4)
    norm = next(n for n in source.tree.leaves if n.startswith("layers.1.") and "norm" in n)
    felt = [name for name in (norm, *FELT) if name in parameters]
    assert len(felt) >= 3
    for name in felt:  # each is felt, 100 times the tolerance
        kept = parameters[name].clone()
        parameters[name].copy_(kept.flip(0))
        assert (ours(tokens, head.logits) - expected).abs().max() > 1e-2, name
        parameters[name].copy_(kept)


# Of a gradient, by the largest element of the tensor; measured: 1.7e-5 and 1.4e-14, which is the
# order of sums: the heads of a key-value head, 80 tokens and what they add to one weight.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(case, dtype, tmp_path):
    stored, folder = build(case), save(build(case), tmp_path)
    theirs, mode = stored, nullcontext()
    if dtype == torch.float64 and CASES[case].plain:
        theirs = stored.double()
    elif dtype == torch.float64:
        theirs, mode = double(stored.config), Wide()
        theirs.load_state_dict(stored.state_dict())
    source = open_source(folder)
    ours = Decoder(source.tree).to(dtype)
    parameters = dict(ours.named_parameters())
    with torch.no_grad():
        load_weights(
            source, lambda name, full: state.write_region(parameters[name], full.to(dtype))
        )
    tokens = torch.randint(0, source.tree.vocab_size, (2, 40))
    with mode:
        logits = theirs(tokens).logits[:, :-1]
    assert logits.dtype == dtype
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss = ours(tokens[:, :-1], head.loss_of(tokens[:, 1:])) / tokens[:, 1:].numel()
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE[dtype], atol=0)
    expected.backward()
    loss.backward()
    got = dict(exported_trained(source.model, lambda name: parameters[name].grad))
    wanted = {n: p.grad for n, p in theirs.named_parameters()}
    if not CASES[case].plain:
        wanted = revert_weight_conversion(theirs, wanted)
    assert got.keys() == wanted.keys()
    largest = max(g.abs().max() for g in wanted.values())
    for name, g in wanted.items():
        # a key's bias shifts all scores of a query alike: its true gradient is 0
        off = (got[name] - g).abs().max() / max(g.abs().max(), 1e-3 * largest)
        assert off < TOLERANCE[dtype], f"{name}: {off:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_greedy_text(case, tmp_path):
    """With a cache there as here."""
    theirs, ours = build(case), engine.load_decoder(open_source(save(build(case), tmp_path)))
    prompts = torch.randint(0, ours.tree.vocab_size, (3, 7))
    theirs.generation_config = transformers.GenerationConfig()  # no token ends a text
    texts = theirs.generate(prompts, max_new_tokens=12, do_sample=False)[:, 7:]
    assert engine.generate(ours, prompts.tolist(), 12) == texts.tolist()


@torch.no_grad()
def test_falcon_beyond_what_bfloat16_counts(tmp_path):
    """400 tokens: from 256 on ALiBi of Falcon goes by steps, as in transformers."""
    theirs = build("falcon-alibi")
    ours = engine.load_decoder(open_source(save(build("falcon-alibi"), tmp_path)))
    tokens = torch.randint(0, ours.tree.vocab_size, (1, 400))
    torch.testing.assert_close(ours(tokens, head.logits), theirs(tokens).logits, rtol=0, atol=1e-4)
