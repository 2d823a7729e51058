"""Sizes that tp does not divide: a vocabulary of 711 or 71 and few key-value heads work at every
tp; heads that tp does not divide, and a rank without a row of the vocabulary, are refused with the
numbers. The fused loss against plain cross-entropy, with logits soft-capped or not.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from backward import backward
from spawning import run_spawned
from tiny_models import Flat, Tiny, build, decoder, initialize

from dolmen.core import mesh as meshes
from dolmen.core import state
from dolmen.core.mesh import SINGLE, Axis
from dolmen.data.batch import IGNORED
from dolmen.model import head
from dolmen.model.decoder import Decoder
from dolmen.model.layout import Layout
from dolmen.model.split import single_process
from dolmen.ops.kernels import Kernels
from dolmen.parallel import vocabulary as loss
from dolmen.parallel.data import inference
from dolmen.parallel.tensor import TensorParallel
from dolmen.parallel.vocabulary import gather_vocabulary, vocabulary_range

# vocabulary, heads, key-value heads
CASES = {
    2: [(711, 4, 2), (711, 4, 1), (3, 4, 4), (711, 6, 3)],
    3: [(711, 12, 2), (71, 12, 4), (71, 3, 3), (5, 3, 1)],
    4: [(711, 8, 2), (711, 12, 2), (71, 12, 6), (7, 4, 1)],
}


def sized(vocab_size, heads, kv_heads, **more) -> Flat:
    sizes = dict(
        vocab_size=vocab_size,
        hidden_size=24,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=4,
        initializer_range=0.2,
    )
    return Flat(**sizes | more)


def capped(flat: Flat, cap: float | None) -> Tiny:
    """The same with a soft cap of its logits."""
    return Tiny(replace(flat.spec, head=replace(flat.spec.head, soft_cap=cap)))


def step(config, mesh, sequence=False) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    """(loss, whole gradients, whole logits) of one batch in fp64."""
    model = build(config, mesh, Layout(sequence_parallel=sequence, zero=0), dtype=torch.float64)
    initialize(model, 0)
    vocabulary = config.spec.vocab_size
    tokens = torch.randint(vocabulary, (3, 4), generator=torch.Generator().manual_seed(5))
    labels = tokens.roll(1, 1)
    labels[0, 1:3] = IGNORED
    total = model(tokens, head.cross_entropy_function(labels))
    backward(total / mesh.dp.size, model, last=True, zero=0)  # every rank of dp has the same batch
    gradients = {name: state.gather_full(p.grad) for name, p in model.named_parameters()}
    with inference(model):
        logits = gather_vocabulary(model(tokens, head.compute_logits), vocabulary, mesh.tp)
    return float(total.detach()), gradients, logits


def compare(dp: int, tp: int) -> list[float]:
    """For each case of this tp, the second and fourth sequence parallel: the largest difference
    from one process. The last of them has soft-capped logits.
    """
    out = []
    for number, case in enumerate(CASES[tp]):
        config = sized(*case, qk_norm=case[2] != 2)
        if case == CASES[tp][-1]:
            config = capped(config, 0.5)
        want_loss, want, want_logits = step(config, SINGLE)
        mesh = meshes.build_mesh(dp, tp, torch.device("cpu"))
        got_loss, got, logits = step(config, mesh, sequence=number % 2 == 1)
        off = [
            abs(got_loss / want_loss - 1),
            float((logits - want_logits).abs().max() / want_logits.abs().max()),
            *(float((got[n] - g).abs().max() / g.abs().max()) for n, g in want.items()),
        ]
        out.append(max(off))
    return out


def in_four() -> dict[int, list[float]]:
    return {2: compare(2, 2), 4: compare(1, 4)}


@cache
def four() -> dict[int, list[float]]:
    return run_spawned(4, in_four)


@pytest.mark.parametrize("tp", CASES)
def test_any_vocabulary_and_any_number_of_key_value_heads(tp):
    """fp64, but rope rounds to fp32: a difference of 1e-16 before it may come out as 1e-7."""
    differences = run_spawned(3, compare, 1, 3) if tp == 3 else four()[tp]
    assert len(differences) == 4 and max(differences) < 1e-6, differences


def shaped(config, tp, rank=0) -> Decoder:
    with torch.device("meta"):
        return decoder(
            config,
            replace(
                single_process(config.num_hidden_layers), tp=TensorParallel(Axis("tp", tp, rank))
            ),
        )


@pytest.mark.parametrize(
    ("config", "tp", "said"),
    [
        (sized(711, 12, 2), 5, ("num_attention_heads (12)", "tp (5)", "--layout.tp")),
        (
            sized(711, 12, 2, intermediate_size=22),
            4,
            ("intermediate_size (22)", "tp (4)", "--layout.tp"),
        ),
        (sized(3, 8, 2), 4, ("vocab_size (3)", "tp (4)", "--layout.tp")),
        (sized(9, 4, 2), 4, ("vocab_size (9)", "tp (4)", "--layout.tp")),  # 3 + 3 + 3 + 0
    ],
    ids=("heads", "intermediate", "vocabulary", "last rank empty"),
)
def test_refused_with_the_numbers(config, tp, said):
    with pytest.raises(ValueError) as error:
        shaped(config, tp)
    assert all(words in str(error.value) for words in said), error.value


def test_every_accepted_vocabulary_is_covered_once():
    for tp in (1, 2, 3, 4, 8):
        for vocab_size in range(1, 100):
            ranges = [vocabulary_range(vocab_size, Axis("tp", tp, r)) for r in range(tp)]
            if min(n for _, n in ranges) < 1:
                with pytest.raises(ValueError):
                    shaped(sized(vocab_size, 24, 24, intermediate_size=48), tp)
            else:
                assert [first + i for first, n in ranges for i in range(n)] == list(
                    range(vocab_size)
                )


@pytest.mark.parametrize("soft_cap", (None, 0.5))
@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("at_once", (1 << 22, 3 * 711), ids=("one chunk", "chunks of three tokens"))
def test_loss_and_gradients_against_cross_entropy(tied, at_once, soft_cap):
    """The decoder's own loss, whose gradient is formed in forward, and its log-probabilities, whose
    logits are formed twice, against F.cross_entropy on its logits, all in fp64.
    """
    config = sized(711, 4, 2, tie_word_embeddings=tied, num_hidden_layers=2)
    model = build(capped(config, soft_cap), SINGLE, dtype=torch.float64)
    model.split = replace(model.split, kernels=Kernels(logits_at_once=at_once))
    initialize(model, 0)
    tokens = torch.randint(711, (2, 7), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = IGNORED
    parameters = list(model.parameters())
    assert (model(tokens, head.compute_logits).abs().max() < 0.5) == (
        soft_cap is not None
    )  # and is felt
    plain = F.cross_entropy(
        model(tokens, head.compute_logits).view(-1, 711),
        labels.view(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )
    fused = model(tokens, head.cross_entropy_function(labels))
    assert abs(float((fused / plain).detach()) - 1) < 1e-14
    each = -model(tokens, lambda hidden, end: end.log_probabilities(hidden, labels))
    assert each.shape == labels.shape and float(each[:, -1].detach().abs().max()) == 0
    assert abs(float((each.sum() / plain).detach()) - 1) < 1e-14
    totals = plain, fused, each.sum()
    wanted, *found = (torch.autograd.grad(total / 12, parameters) for total in totals)
    for got in found:
        for want, g in zip(wanted, got, strict=True):
            torch.testing.assert_close(g, want, rtol=0, atol=1e-13 * float(want.abs().max()))
    with torch.no_grad():
        # no gradient asked for, none formed
        assert float(model(tokens, head.cross_entropy_function(labels))) == float(fused)


@pytest.mark.parametrize("bits", (torch.float32, torch.bfloat16), ids=str)
def test_loss_of_large_logits(bits):
    """Logits of +-300 overflow exp in fp32: the loss stays finite, is right, and bfloat16 weights
    still sum it in fp32.
    """
    weight = (torch.eye(8) * 300).to(bits)
    x, labels = torch.eye(8).to(bits), torch.tensor([0, 1, 2, 3, 4, 5, 6, 0])
    total = loss.linear_cross_entropy(x, weight, labels, 8, TensorParallel(Axis("tp", 1, 0)))
    assert total.dtype == torch.float32 and float(total) == 300.0
