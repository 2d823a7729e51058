"""Logits of every family and structure against transformers, on a sequence longer than its window
and its first context.
"""

import pytest
import torch
from tiny import CASES, build, save

from dolmen.convert import hf
from dolmen.core import state
from dolmen.model.decoder import Decoder


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits(case, tmp_path):
    theirs, folder = build(case), save(build(case), tmp_path)
    source = hf.read_config(folder)
    ours = Decoder(source.tree).eval()
    parameters = dict(ours.named_parameters())
    for p in parameters.values():
        p.fill_(float("nan"))
    hf.load(folder, source, lambda name, full: state.write(parameters[name], full))
    tokens = torch.randint(0, source.tree.vocab_size, (2, 40))
    expected = theirs(tokens).logits
    assert expected.std() > 0.3
    # fp32, logits of size 1 to 10
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-4)
    mlp = (
        ("mlp.experts.down.weight", "mlp.router.weight")
        if source.tree.blocks[1].mlp.experts
        else ("mlp.up.weight",)
    )
    for p in ("attn.k.weight", "attn_norm.weight", *mlp):  # each is felt, 100 times the tolerance
        kept = parameters[f"layers.1.{p}"].clone()
        parameters[f"layers.1.{p}"].copy_(kept.flip(0))
        assert (ours(tokens) - expected).abs().max() > 1e-2
        parameters[f"layers.1.{p}"].copy_(kept)
