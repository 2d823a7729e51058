"""Dropout in absolute numbers: what is kept, how it is scaled, where, and how often it changes.

Every layout agrees on a mask that is wrong, so nothing here compares layouts. The masks are read
off the activations of real steps, from outside: what a sub-layer gave, against what was added.
Five standard errors: one of about 100 numbers falls outside by chance once in 20,000 runs, and the
hash is fixed, so what passes once passes always.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from tiny_models import Flat, Tiny, build, initialize, tiny
from torch import Tensor

from dolmen.core.mesh import SINGLE
from dolmen.data.batch import Batch, document_starts
from dolmen.evaluation.validate import mean_loss
from dolmen.model import head
from dolmen.model.decoder import Decoder
from dolmen.ops import elementwise
from dolmen.ops.attention import Documents
from dolmen.ops.elementwise import Noise, keep
from dolmen.optim.optimizer import OptimizerConfig, adamw
from dolmen.parallel.simulation import make_schedule
from dolmen.serving.engine import generate
from dolmen.training.state import TrainState
from dolmen.training.step import optimizer_step

P, LAYERS, ROWS, LENGTH, VOCABULARY = 0.3, 3, 8, 16, 71
HEADS, KV_HEADS = 4, 2
CONFIG = Flat(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=LENGTH,  # so many as keys: probabilities can be solved for
    initializer_range=0.1,
    dropout=P,
)
STILL = OptimizerConfig(lr=0.0, schedule="constant", clip=0.0)  # nothing but the masks changes


def batch(documents: bool = False) -> Batch:
    made = torch.Generator().manual_seed(3)
    windows = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=made).numpy()
    whole = Batch.from_windows(windows)
    starts = document_starts(whole.tokens % 4, 0)
    return Batch(whole.tokens, whole.labels, Documents.from_starts(starts) if documents else None)


def decoder(config: Flat | Tiny = CONFIG) -> Decoder:
    model = build(config, SINGLE, dtype=torch.float64)
    initialize(model, 0)
    return model.train()


def steps(config: Flat, of: Batch, number: int, seed: int = 0, watch=None) -> list[float]:
    """Losses of `number` steps on the same batch, of two microbatches each, at lr 0."""
    model = decoder(config)
    if watch is not None:
        watch(model)
    state = TrainState(
        model, adamw(model, STILL), STILL, number, 0, make_schedule("1f1b", 1, 2), seed
    )
    return [optimizer_step(state, of, SINGLE).loss for _ in range(number)]


class Sites:
    """What each site left of what it was given, one entry a forward: ratios, 0 or 1 / (1 - p)."""

    def __init__(self, model: Decoder):
        self.found: dict[str, list[Tensor]] = {}
        embedded = {}
        model.embed.register_forward_hook(lambda m, args, y: embedded.update(y=y.detach()))
        for block in model.layers.values():
            self.watch(block, embedded if block.layer == 0 else None)

    def add(self, site: str, got: Tensor, given: Tensor) -> None:
        self.found.setdefault(site, []).append((got / given).detach())

    def watch(self, block, embedded: dict | None) -> None:
        name, seen = str(block.layer), {}

        def entered(module, args):
            seen["x"] = args[0].detach()
            if embedded is not None:
                self.add("embedding", seen["x"], embedded["y"])

        def attended(module, args, y):
            seen["attention"] = y.detach()
            with torch.no_grad():
                dropped, whole = (probabilities(module, args[0], g) for g in masked(args[1]))
            seen_by = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            self.add(f"{name} probabilities", dropped[..., seen_by], whole[..., seen_by])

        def between(module, args):
            seen["middle"] = args[0].detach()
            self.add(f"{name} attention", seen["middle"] - seen["x"], seen["attention"])

        def left(module, args, y):
            self.add(f"{name} mlp", y.detach() - seen["middle"], seen["mlp"])

        block.register_forward_pre_hook(entered)
        block.attn.register_forward_hook(attended)
        block.mlp_norm.register_forward_pre_hook(between)
        block.mlp.register_forward_hook(lambda m, args, y: seen.update(mlp=y.detach()))
        block.register_forward_hook(left)


def masked(given) -> tuple:
    return given, given._replace(noise=None)


def probabilities(attn, x: Tensor, given) -> Tensor:
    """[batch, heads, queries, keys]: what the values were weighted with, solved for from what came
    out of them, as a head is as wide as there are keys.
    """
    taken = {}
    hook = attn.o.register_forward_pre_hook(lambda m, args: taken.update(y=args[0]))
    calls = attn._forward_hooks.copy()
    attn._forward_hooks.clear()
    try:
        attn(x, given)
    finally:
        attn._forward_hooks.update(calls)
        hook.remove()
    v = (x @ attn.v.weight.T).view(given.batch, LENGTH, KV_HEADS, LENGTH)
    v = v.repeat_interleave(HEADS // KV_HEADS, 2).transpose(1, 2)
    y = taken["y"].view(given.batch, LENGTH, HEADS, LENGTH).transpose(1, 2)
    return torch.linalg.solve(v, y, left=False)


@pytest.fixture(scope="module")
def masks() -> dict[str, list[Tensor]]:
    """{site: its ratios in each microbatch of two steps of seed 0 and one of seed 1}."""
    found = {}

    def watch(model):
        found[len(found)] = Sites(model)

    steps(CONFIG, batch(), 2, seed=0, watch=watch)
    steps(CONFIG, batch(), 1, seed=1, watch=watch)
    return {site: found[0].found[site] + found[1].found[site] for site in found[0].found}


def test_a_mask_is_what_it_has_always_been():
    """Checkpoints go on with the masks they were trained with, so the hash never changes."""
    noise = Noise(torch.tensor(7), torch.arange(2), torch.tensor(1))
    index = torch.arange(8)
    kept = keep(0.3, noise.key, noise.site(1), index[:, None], index)
    assert torch.equal(kept, keep(0.3, noise.key, 4, index[:, None], index))
    rows = [sum(bit << i for i, bit in enumerate(row)) for row in kept.tolist()]
    assert rows == [126, 183, 125, 175, 153, 93, 228, 188]


def test_every_site_is_there(masks):
    kinds = ("probabilities", "attention", "mlp")
    assert set(masks) == {"embedding"} | {f"{i} {kind}" for i in range(LAYERS) for kind in kinds}
    assert all(len(ratios) == 6 for ratios in masks.values())  # two steps and one, of two each


def test_kept_with_1_minus_p_and_scaled_by_its_inverse(masks):
    """Over the 16,000 to 25,000 elements of each site."""
    for site, ratios in masks.items():
        kept = torch.cat([r.flatten() for r in ratios])
        # solved for in fp64, with values whose condition is up to some thousands
        near_one = (kept * (1 - P) - 1).abs() < 1e-6
        near_zero = kept.abs() < 1e-6
        assert bool((near_one | near_zero).all()), f"{site}: {kept[~(near_one | near_zero)][:5]}"
        rate = float(near_one.double().mean())
        error = math.sqrt(P * (1 - P) / len(kept))
        assert abs(rate - (1 - P)) < 5 * error, f"{site} keeps {rate:.4f} of {len(kept)}"


def test_no_two_masks_are_alike(masks):
    """Of two layers, kinds, steps, microbatches or seeds: correlation within five standard
    errors, 1 / sqrt(elements).
    """
    by_shape = {}
    for site, ratios in masks.items():
        for i, ratio in enumerate(ratios):
            mask = (ratio > 0.5).double().flatten()
            by_shape.setdefault(len(mask), []).append((f"{site}, {i}", mask - mask.mean()))
    assert sorted(map(len, by_shape.values())) == [6 * LAYERS, 6 * (1 + 2 * LAYERS)]
    for number, named in by_shape.items():
        for (one, a), (other, b) in itertools.combinations(named, 2):
            correlation = float((a @ b) / (a.norm() * b.norm()))
            assert abs(correlation) < 5 / math.sqrt(number), f"{one} and {other}: {correlation:.3f}"


def test_rows_columns_and_heads_are_not_alike(masks):
    """Within a mask: neighbours along each of its dims, the heads' and the sequences' too."""
    for site, ratios in masks.items():
        mask = (torch.stack(ratios) > 0.5).double() - (1 - P)
        for dim in range(1, mask.dim()):
            n = mask.shape[dim] - 1
            pairs = mask.narrow(dim, 0, n) * mask.narrow(dim, 1, n)
            error = P * (1 - P) / math.sqrt(pairs.numel())
            assert abs(float(pairs.mean())) < 5 * error, f"{site}, dim {dim}"


@pytest.mark.parametrize("norms", (1, 2))
def test_side_by_side_is_dropped_as_one(monkeypatch, norms):
    """What attention and the feed-forward layer add together has one mask per layer."""
    config = tiny(
        "falcon",
        dropout=P,
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        new_decoder_architecture=True,
        num_ln_in_parallel_attn=norms,
        initializer_range=0.1,
    )
    model, streams, dropped, residual = decoder(config), [], [], elementwise.dropout

    def watched(y, p, noise, site, rows):
        out = residual(y, p, noise, site, rows)
        dropped.append((out, y))
        return out

    monkeypatch.setattr(elementwise, "dropout", watched)
    for block in model.layers.values():
        block.register_forward_hook(lambda m, args, y: streams.append(y - args[0]))
    model(batch().tokens, noise=Noise(torch.tensor(5), torch.arange(ROWS)))
    assert len(dropped) == 1 + LAYERS == 1 + len(streams)
    masks = []
    for added, (out, y) in zip(streams, dropped[1:], strict=True):
        torch.testing.assert_close(added, out)
        assert torch.equal(out[out != 0], y[out != 0] / (1 - P))
        masks.append(out != 0)
        assert abs(float(masks[-1].double().mean()) - (1 - P)) < 5 * math.sqrt(
            P * (1 - P) / y.numel()
        )
    assert not torch.equal(masks[0], masks[1])


def test_norms_after_layers_come_before_dropout(monkeypatch):
    """What is dropped is what is added to the residual stream, scaled as its norm has it."""
    config = tiny(
        "gemma2",
        dropout=P,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        head_dim=LENGTH,
        initializer_range=0.1,
    )
    model, dropped, residual = decoder(config), [], elementwise.dropout

    def watched(y, *rest):
        dropped.append(y)
        return residual(y, *rest)

    monkeypatch.setattr(elementwise, "dropout", watched)
    model(batch().tokens, noise=Noise(torch.tensor(5), torch.arange(ROWS)))
    embedding, *added = dropped
    assert len(added) == 2
    for y in added:  # weights are 1 at first; eps is 1e-6
        squares = y.square().mean(-1)
        torch.testing.assert_close(squares, torch.ones_like(squares), rtol=1e-3, atol=0)
    assert embedding.square().mean() < 0.7  # 0.1^2, times hidden_size: not a norm's output


def test_losses_differ_by_step_and_seed():
    first, second = steps(CONFIG, batch(), 2)
    assert first != second and steps(CONFIG, batch(), 2) == [first, second]
    assert steps(CONFIG, batch(), 1, seed=1)[0] not in (first, second)
    still = steps(replace(CONFIG, dropout=0.0), batch(), 2)
    assert still[0] == still[1]  # so nothing else has changed


def logits(config: Flat, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
    noise = Noise(torch.tensor(5), torch.arange(len(tokens)))
    documents = None if starts is None else Documents.from_starts(starts)
    with torch.no_grad():
        return decoder(config)(tokens, head.compute_logits, noise=noise, documents=documents)


def changed(config: Flat, at: int, starts: Tensor | None = None) -> list[bool]:
    """Whether the logits of each position feel another token at `at`, with the same masks."""
    tokens = batch().tokens
    other = tokens.clone()
    other[:, at] = (other[:, at] + 1) % VOCABULARY
    same = logits(config, tokens, starts) == logits(config, other, starts)
    return (~same.all(-1)).any(0).tolist()


ONE_LAYER = replace(CONFIG, num_hidden_layers=1)


def test_nothing_leaks_out_of_the_window_or_from_the_future():
    """One layer, a window of 5: the token at 4 is felt at 4 to 8, bitwise nowhere else."""
    windowed = replace(ONE_LAYER, sliding_window=5)
    assert changed(windowed, 4) == [4 <= i < 9 for i in range(LENGTH)]
    assert changed(ONE_LAYER, 4) == [4 <= i for i in range(LENGTH)]


def test_nothing_leaks_between_documents():
    """Three layers; documents begin at 0, 6 and 11."""
    starts = torch.tensor([0] * 6 + [6] * 5 + [11] * 5).expand(ROWS, -1)
    assert changed(CONFIG, 7, starts) == [7 <= i < 11 for i in range(LENGTH)]


def test_off_in_validation_and_generation_and_on_again():
    """A model with dropout gives the numbers of the same weights without, twice; training after it
    drops as before.
    """
    dropping, plain = decoder(), decoder(replace(CONFIG, dropout=0.0))
    want = mean_loss(plain, [batch()], SINGLE)
    assert mean_loss(dropping, [batch()], SINGLE) == want == mean_loss(dropping, [batch()], SINGLE)
    prompts = batch().tokens[:, :5].tolist()
    assert generate(dropping, prompts, 8) == generate(plain, prompts, 8)
    noise = Noise(torch.tensor(5), torch.arange(ROWS))
    dropped, whole = (
        m(batch().tokens, head.compute_logits, noise=noise).detach() for m in (dropping, plain)
    )
    assert float((dropped - whole).abs().mean()) > 0.1 * float(whole.abs().mean())


def test_noise_is_required_in_training_and_unused_elsewhere():
    model, tokens = decoder(), batch().tokens
    with pytest.raises(ValueError, match="--train.dropout 0"):
        model(tokens)
    noise = Noise(torch.tensor(5), torch.arange(ROWS))
    with torch.no_grad():
        assert torch.equal(
            model.eval()(tokens, head.compute_logits, noise=noise),
            model(tokens, head.compute_logits),
        )
