"""A cache changes no logit: whatever the pieces that texts are read in, and whoever else is in the
cache, each token's logits are those of one forward of its text. And its pages are what the lengths
of the texts say.

Tolerance: logits here reach 5; the same fp32 products, summed over other shapes, differ in the last
bits (seen: 3e-6).
"""

import random

import pytest
import torch
from decoders import DECODERS, MOST, decoder, tokens

from dolmen.core import mesh as meshes
from dolmen.model import head
from dolmen.parallel.vocabulary import gather_vocabulary
from dolmen.serving.block_table import BlockTable
from dolmen.serving.kv_cache import KVCache

PAGE = 4
HERE = torch.device("cpu")
# New tokens of each text, forward by forward; 0: it ends. Texts alike and not, one token and
# several in one forward, a prompt in pieces, and 4 and 5 in the pages of 2 and 3
READ = (
    {0: 3, 1: 3, 2: 6, 3: 1},
    {0: 1, 1: 1, 2: 1, 3: 1},
    {1: 5, 0: 1, 2: 1},
    {2: 0, 3: 0},
    {0: 1, 4: 5, 5: 2, 1: 1},
    {0: 1, 1: 1, 4: 1, 5: 1},
    {4: 9, 5: 9, 0: 9},
    {5: 0, 1: 0, 4: 0},
    {0: 1},
    {0: MOST - 17},
)
LENGTHS = {i: sum(new.get(i, 0) for new in READ) for i in range(6)}
TOLERANCE = 1e-5


def read(model, cache, text, done: dict[int, int], new: dict[int, int]) -> dict[int, torch.Tensor]:
    """Logits [new, vocabulary] of each text."""
    reading = cache.append(new, HERE, model.tp.axis.size if model.tp.sequence else 1)
    parts = [text[i, done[i] : done[i] + new[i]] for i in reading.sequences]
    filled = reading.positions.shape[2] - reading.num_tokens
    logits = model(torch.cat([*parts, text[0, :filled]])[None], head.compute_logits, reading)
    logits = gather_vocabulary(
        logits[0, : reading.num_tokens], model.spec.vocab_size, model.tp.axis
    )
    for i in reading.sequences:
        done[i] += new[i]
    return dict(
        zip(reading.sequences, logits.split([new[i] for i in reading.sequences]), strict=True)
    )


@torch.no_grad()
def difference(model, cache=None) -> float:
    """Largest difference between logits of texts that are read together in pieces, and of each at
    once; for a tp model, of all ranks' vocabulary.
    """
    text, cache = tokens(6), cache or KVCache(model.spec, PAGE)
    found, done = {i: [] for i in LENGTHS}, dict.fromkeys(LENGTHS, 0)
    for new in READ:
        if 0 in new.values():
            for i in new:
                cache.remove(i)
            continue
        for i, logits in read(model, cache, text, done, new).items():
            found[i].append(logits)
    assert done == LENGTHS and done[0] == MOST
    off = []
    for i, length in LENGTHS.items():
        even = -(-length // 2) * 2  # what sequence parallelism splits
        whole = model(text[i : i + 1, :even], head.compute_logits)[0, :length]
        whole = gather_vocabulary(whole, model.spec.vocab_size, model.tp.axis)
        assert whole.abs().max() > 1
        off.append((torch.cat(found[i]) - whole).abs().max())
    return float(max(off))


@pytest.mark.parametrize("name", DECODERS)
def test_texts_of_any_lengths_equal_each_alone(name):
    assert difference(decoder(name)) < TOLERANCE


def two_ranks():
    mesh = meshes.build_mesh(1, 2, HERE)
    heads = decoder("grouped", mesh).layers["0"].attn.kv_heads
    found = {name: difference(decoder(name, mesh)) for name in DECODERS}
    by_sequence = decoder("grouped", mesh, sequence_parallel=True)
    return heads, found | {"grouped, by sequence": difference(by_sequence)}


def test_texts_of_any_lengths_equal_each_alone_on_two_ranks(spawn):
    """With one key-value head both ranks hold it; with two, each holds its own."""
    heads, differences = spawn(2)(two_ranks)
    assert heads == 1
    assert all(d < TOLERANCE for d in differences.values()), differences


class Forgetful(BlockTable):
    """After the first forward two texts have each other's pages."""

    def append(self, new):
        out = super().append(new)
        if self.lengths.get(0) == 4:
            self.pages[0], self.pages[1] = self.pages[1], self.pages[0]
        return out


class Leaking(BlockTable):
    """What one text gives back, another has still."""

    def remove(self, sequence):
        page = self.pages[sequence][0]
        super().remove(sequence)
        self.pages[0][0] = page


@pytest.mark.parametrize("kind", [Forgetful, Leaking])
def test_a_page_of_another_text_is_seen(kind):
    """Negative control."""
    model = decoder("grouped")
    cache = KVCache(model.spec, PAGE)
    cache.table = kind(PAGE)
    assert difference(model, cache) > 1000 * TOLERANCE


@torch.no_grad()
def test_a_latent_is_what_is_kept():
    """Of each token and layer one latent and one rope key, whatever the number of heads."""
    model = decoder("latent")
    cache = KVCache(model.spec, PAGE)
    model(tokens(1), cache=cache.append({0: MOST}, HERE))
    for pool in cache.pools:
        assert [tuple(kept.shape) for kept in pool.kept] == [(MOST // PAGE, 1, PAGE, 12 + 4)]


@pytest.mark.parametrize("size", [1, 4, 32])
def test_pages_follow_from_lengths(size):
    """Texts come, grow and end by chance: no page is of two texts, and none is lost; pages in use
    are those that the lengths fill, and the pool is no larger than it has to be.
    """
    chance, table, lengths, moves = random.Random(size), BlockTable(size), {}, 0
    for step in range(800):
        ending = [t for t in lengths if chance.random() < (0.02 if step % 400 < 300 else 0.5)]
        for text in ending:
            table.remove(text)
            del lengths[text]
        new = {t: 1 for t in lengths} | {step: chance.randint(1, 200)}
        before = {t: list(pages) for t, pages in table.pages.items()}
        moved = table.append(new)
        lengths = {t: lengths.get(t, 0) + n for t, n in new.items()}
        assert table.lengths == lengths and table.pages.keys() == lengths.keys()
        own = [page for pages in table.pages.values() for page in pages]
        assert len(own) == len(set(own)) == table.in_use and set(own) <= set(range(table.total))
        assert {t: len(pages) for t, pages in table.pages.items()} == {
            t: -(-n // size) for t, n in lengths.items()
        }
        assert table.total <= 2 * table.in_use
        if moved is not None:
            moves += 1
            for text, pages in before.items():
                assert [moved[page] for page in table.pages[text][: len(pages)]] == pages
        else:
            assert all(table.pages[t][: len(pages)] == pages for t, pages in before.items())
    assert moves > 3


@torch.no_grad()
@pytest.mark.parametrize(
    "name, per_token",  # of two layers, in fp32
    [
        ("grouped", 2 * 4 * 2 * 2 * 8),  # keys and values, 2 heads of 8
        ("one-kv-qk-norm", 2 * 4 * 2 * 1 * 8),
        ("latent", 2 * 4 * (12 + 4)),
        ("alibi-in-keys", 2 * 4 * 6 * (16 + 8)),  # keys carry 8 numbers more
    ],
)
def test_bytes_are_those_of_the_pages(name, per_token):
    """What is allocated is pages times their bytes, by a closed form of the model's sizes."""
    model = decoder(name)
    cache, text, done = KVCache(model.spec, PAGE), tokens(6), dict.fromkeys(LENGTHS, 0)
    lengths, in_use, rectangle = {}, 0, 0
    for new in READ:
        if 0 in new.values():
            for i in new:
                cache.remove(i)
                del lengths[i]
            continue
        read(model, cache, text, done, new)
        lengths |= {i: done[i] for i in new}
        in_use = max(in_use, sum(-(-n // PAGE) for n in lengths.values()))
        rectangle = max(rectangle, len(lengths) * max(lengths.values()))
        assert cache.table.in_use == sum(-(-n // PAGE) for n in lengths.values())
        held = sum(t.untyped_storage().nbytes() for pool in cache.pools for t in pool.kept)
        assert held == cache.table.total * PAGE * per_token
    memory = cache.usage
    assert (memory.in_use, memory.rectangle, memory.bytes_per_token) == (
        in_use,
        rectangle,
        per_token,
    )
    assert in_use <= memory.allocated <= in_use * 5 // 4 + 1
    assert in_use * PAGE < rectangle
