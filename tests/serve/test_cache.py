"""A cache changes no logit: whatever the pieces a text is read in, each token's logits are those of
one forward.

Tolerance: logits here reach 5; the same fp32 products, summed over other shapes, differ in the last
bits (seen: 3e-6).
"""

import pytest
import torch
from decoders import DECODERS, decoder, tokens

from dolmen.core import mesh as meshes
from dolmen.parallel.vocabulary import gather_vocabulary
from dolmen.serve.cache import Cache, LayerCache

PIECES = (3, 1, 1, 6, 1, 4, 1, 1, 14)  # 32: the first without a past, then one or several tokens
TOLERANCE = 1e-5


def difference(model) -> float:
    """Largest difference between logits read in pieces and at once; for a tp model, of all ranks'
    vocabulary.
    """
    text, cache = tokens(), Cache(model.tree, 32)
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in text.split(PIECES, 1)]
        whole = model(text)
    gathered = [
        gather_vocabulary(x, model.tree.vocab_size, model.tp.axis)
        for x in (torch.cat(pieces, 1), whole)
    ]
    assert cache.length == 32 and gathered[0].shape == gathered[1].shape == (
        2,
        32,
        model.tree.vocab_size,
    )
    assert gathered[1].abs().max() > 1
    return float((gathered[0] - gathered[1]).abs().max())


@pytest.mark.parametrize("name", DECODERS)
def test_pieces_equal_the_whole(name):
    assert difference(decoder(name)) < TOLERANCE


def two_ranks():
    mesh = meshes.grid(1, 2, torch.device("cpu"))
    heads = decoder("grouped", mesh).layers["0"].attn.kv_heads
    return heads, {name: difference(decoder(name, mesh)) for name in DECODERS}


def test_pieces_equal_the_whole_on_two_ranks(spawn):
    """With one key-value head both ranks hold it; with two, each holds its own."""
    heads, differences = spawn(2)(two_ranks)
    assert heads == 1
    assert all(d < TOLERANCE for d in differences.values()), differences


def test_a_forgotten_past_is_seen():
    """Negative control: a cache that keeps positions and loses the first key."""

    class Forgetful(LayerCache):
        def append(self, k, v):
            k, v = super().append(k, v)
            return (k, v) if k.shape[1] <= 3 else (torch.cat((k[:, 1:2], k[:, 1:]), 1), v)

    model, text = decoder("grouped"), tokens()
    cache = Cache(model.tree, 32)
    cache.layers = [Forgetful(32) for _ in cache.layers]
    with torch.no_grad():
        pieces = torch.cat([model(piece, cache=cache) for piece in text.split(PIECES, 1)], 1)
        assert (pieces - model(text)).abs().max() > 1000 * TOLERANCE


def test_a_latent_is_what_is_kept():
    """Of each token and layer one latent and one rope key, whatever the number of heads."""
    model, text = decoder("latent"), tokens()
    cache = Cache(model.tree, 32)
    with torch.no_grad():
        model(text, cache=cache)
    for layer in cache.layers:
        assert [tuple(kept.shape) for kept in layer.kept] == [(2, 32, 1, 12), (2, 32, 1, 4)]


def test_memory_doubles_up_to_the_maximum():
    layer, made = LayerCache(maximum=20), []
    for new in (3, 1, 1, 1, 1, 8, 5):
        k = torch.full((1, new, 1, 2), float(layer.length))
        keys, values = layer.append(k, -k)
        made.append(layer.kept[0].shape[1])
        assert (
            keys.shape[1] == layer.length
            and torch.equal(keys, -values)
            and torch.equal(keys[:, -new:], k)
        )
    assert made == [3, 6, 6, 6, 12, 15, 20]
    assert keys[0, :, 0, 0].tolist() == [0, 0, 0, 3, 4, 5, 6, *[7] * 8, *[15] * 5]
    with pytest.raises(ValueError, match=r"21 tokens .* maximum \(20\)"):
        layer.append(k[:, :1], k[:, :1])
