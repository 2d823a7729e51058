"""Logits, loss, gradients and texts of every family and structure against transformers, on a
sequence longer than its window and its first context.
"""

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny import CASES, build, save
from transformers.core_model_loading import revert_weight_conversion

from dolmen.convert import hf, hf_export
from dolmen.core import state
from dolmen.families import weight_map
from dolmen.model.decoder import Decoder
from dolmen.serve import engine

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
    source = hf.read_config(folder)
    ours = Decoder(source.tree).eval()
    parameters = dict(ours.named_parameters())
    for p in parameters.values():
        p.fill_(float("nan"))
    hf.load_weights(folder, source, lambda name, full: state.write_region(parameters[name], full))
    tokens = torch.randint(0, source.tree.vocab_size, (2, 40))
    expected = theirs(tokens).logits
    assert expected.std() > 0.3
    # fp32, logits of size 1 to 10
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-4)
    norm = next(n for n in source.tree.leaves if n.startswith("layers.1.") and "norm" in n)
    felt = [name for name in (norm, *FELT) if name in parameters]
    assert len(felt) >= 3
    for name in felt:  # each is felt, 100 times the tolerance
        kept = parameters[name].clone()
        parameters[name].copy_(kept.flip(0))
        assert (ours(tokens) - expected).abs().max() > 1e-2, name
        parameters[name].copy_(kept)


# Of a gradient, by the largest element of the tensor; measured: 9e-6 and 7e-6. fp32: sums of 80
# tokens' products in another order. fp64: transformers computes rope's angles in fp32.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-5}


@pytest.fixture
def wide(monkeypatch):
    """What transformers computes in fp32 whatever the model is in, norms and softmax, is computed
    in fp64 where it is given that.
    """
    narrow, softmax = torch.Tensor.float, F.softmax
    monkeypatch.setattr(
        torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x)
    )
    monkeypatch.setattr(
        F,
        "softmax",
        lambda x, dim, dtype=None: softmax(
            x, dim, dtype=x.dtype if x.dtype == torch.float64 else dtype
        ),
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(case, dtype, tmp_path, wide):
    theirs, folder = build(case).to(dtype), save(build(case), tmp_path)
    theirs.set_experts_implementation("eager")  # the others take no fp64
    source = hf.read_config(folder)
    ours = Decoder(source.tree).to(dtype)
    parameters = dict(ours.named_parameters())
    with torch.no_grad():
        hf.load_weights(
            folder, source, lambda name, full: state.write_region(parameters[name], full.to(dtype))
        )
    tokens = torch.randint(0, source.tree.vocab_size, (2, 40))
    logits = theirs(tokens).logits[:, :-1]  # its own loss is in fp32 whatever the model is in
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss = ours(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE[dtype], atol=0)
    expected.backward()
    loss.backward()
    frozen = {name for name, leaf in source.tree.leaves.items() if not leaf.trained}
    grads = {n: torch.zeros_like(p) if n in frozen else p.grad for n, p in parameters.items()}
    stored = dict(hf_export.export_weights(source, grads.__getitem__))
    for entry in weight_map(source).entries.values():
        if entry.ours[0] in frozen:
            del stored[entry.hf]
    wanted = revert_weight_conversion(theirs, {n: p.grad for n, p in theirs.named_parameters()})
    assert stored.keys() == wanted.keys()
    largest = max(g.abs().max() for g in wanted.values())
    for name, g in wanted.items():
        # a key's bias shifts all scores of a query alike: its true gradient is 0
        off = (stored[name] - g).abs().max() / max(g.abs().max(), 1e-3 * largest)
        assert off < TOLERANCE[dtype], f"{name}: {off:.1e}"


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_greedy_text(case, tmp_path):
    """With a cache there as here."""
    theirs, ours = build(case), engine.load_decoder(save(build(case), tmp_path))
    prompts = torch.randint(0, ours.tree.vocab_size, (3, 7))
    theirs.generation_config = transformers.GenerationConfig()  # no token ends a text
    texts = theirs.generate(prompts, max_new_tokens=12, do_sample=False)[:, 7:]
    assert engine.generate(ours, prompts.tolist(), 12) == texts.tolist()


@torch.no_grad()
def test_falcon_beyond_what_bfloat16_counts(tmp_path):
    """400 tokens: from 256 on ALiBi of Falcon goes by steps, as in transformers."""
    theirs, ours = build("falcon-alibi"), engine.load_decoder(save(build("falcon-alibi"), tmp_path))
    tokens = torch.randint(0, ours.tree.vocab_size, (1, 400))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
