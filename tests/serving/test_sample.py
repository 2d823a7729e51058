"""Each filter against a loop that follows its definition, and the draw against the
probabilities.
"""

import math

import pytest
import torch

from dolmen.serving import sampling
from dolmen.serving.request import SamplingParams

LOGITS = 3 * torch.randn(20, 17, generator=torch.Generator().manual_seed(0))


def sample_tokens(scores, uniforms, temperature: float, **options) -> torch.Tensor:
    return sampling.select_tokens(scores, uniforms, SamplingParams(temperature, **options))[0]


def kept(logits) -> list[set[int]]:
    return [{i for i, x in enumerate(row) if x > -math.inf} for row in logits.tolist()]


@pytest.mark.parametrize("k", [1, 2, 5, 17, 100])
def test_top_k_keeps_the_largest(k):
    want = [set(sorted(range(17), key=lambda i, row=row: -row[i])[:k]) for row in LOGITS.tolist()]
    got = sampling.keep_top_k(LOGITS, k)
    assert kept(got) == want and torch.equal(got[got > -math.inf], LOGITS[got > -math.inf])


def nucleus(row: list[float], p: float) -> set[int]:
    weights = [math.exp(x) for x in row]
    chosen, total = set(), 0.0
    for i in sorted(range(len(row)), key=lambda i: -weights[i]):
        if total >= p and chosen:
            break
        chosen.add(i)
        total += weights[i] / sum(weights)
    return chosen


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_fewest_that_reach_p(p):
    assert kept(sampling.keep_top_p(LOGITS, p)) == [nucleus(row, p) for row in LOGITS.tolist()]


@pytest.mark.parametrize("p", [0.5, 0.9])
def test_a_nucleus_is_found_beyond_the_likeliest(p, monkeypatch):
    """Where these do not hold it; and of equal scores, of which some are in it."""
    whole = sampling.keep_top_p(LOGITS, p)
    assert len(set(map(len, kept(whole)))) > 1
    even = LOGITS.round()
    level = sampling.keep_top_p(even, p)
    monkeypatch.setattr(sampling, "NUCLEUS", 2)
    assert torch.equal(sampling.keep_top_p(LOGITS, p), whole)
    assert torch.equal(sampling.keep_top_p(even, p), level)
    assert [len(row) for row in kept(level)] == [len(nucleus(row, p)) for row in even.tolist()]


def test_top_p_of_one_keeps_all():
    assert kept(sampling.keep_top_p(LOGITS, 1.0)) == [set(range(17))] * 20


def test_ties_at_the_edge():
    """Of equal logits top-k keeps all; top-p keeps the first ones, as few as reach p."""
    flat = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert kept(sampling.keep_top_k(flat, 2)) == [{0, 1, 2}]
    assert kept(sampling.keep_top_p(flat, 0.4)) == [{0, 1}]


@pytest.mark.parametrize("options", [{}, dict(top_k=3), dict(top_p=0.7), dict(top_k=5, top_p=0.7)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_by_their_probability(temperature, options):
    """An even grid of uniform numbers hits each token in proportion, to one grid point; top-p after
    top-k.
    """
    row, n = LOGITS[:1], 4000
    weights = [math.exp(x / temperature) for x in row[0].tolist()]
    allowed = set(range(17))
    if "top_k" in options:
        allowed = set(sorted(allowed, key=lambda i: -weights[i])[: options["top_k"]])
    scaled = [x / temperature if i in allowed else -math.inf for i, x in enumerate(row[0].tolist())]
    if "top_p" in options:
        allowed = nucleus(scaled, options["top_p"])
    grid = torch.arange(n, dtype=torch.float64) / n
    counts = (
        sample_tokens(row.expand(n, -1), grid, temperature, **options)
        .bincount(minlength=17)
        .tolist()
    )
    total = sum(weights[i] for i in allowed)
    for i in range(17):
        assert abs(counts[i] - n * weights[i] / total) <= 1 if i in allowed else counts[i] == 0


def test_temperature_zero_is_greedy_and_cold_is_nearly():
    u = torch.full((20,), 0.5, dtype=torch.float64)
    assert torch.equal(sample_tokens(LOGITS, u, 0.0), LOGITS.argmax(-1))
    assert torch.equal(sample_tokens(LOGITS, u, 1e-6, top_k=3, top_p=0.5), LOGITS.argmax(-1))


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(3, -1)
    assert sample_tokens(
        logits, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64), 1.0
    ).tolist() == [1, 3, 3]


@pytest.mark.parametrize(
    "options",
    [
        SamplingParams(),
        SamplingParams(0.7, 9),
        SamplingParams(1.5, None, 0.8),
        SamplingParams(2.0, None, None, 0.2),
        SamplingParams(1.2, 30, 0.95, 0.05),
        SamplingParams(0.0),
    ],
    ids=["all", "top-k", "top-p", "min-p", "cuts", "greedy"],
)
def test_where_scores_that_differ_in_their_last_bits_give_others_is_said(options):
    """Scores as of another batch, 3e-5 off, the first half above and the other below: another token
    is drawn only where that is said to be close, which few are.
    """
    chance, rows = torch.Generator().manual_seed(0), 50_000
    scores = torch.randn(rows, 40, generator=chance)
    other = scores + 3e-5 * (torch.arange(40) < 20).double().mul(2).sub(1)
    uniforms = torch.rand(rows, generator=chance, dtype=torch.float64)
    tokens, close, _ = sampling.select_tokens(scores, uniforms, options)
    differ = tokens != sampling.select_tokens(other, uniforms, options)[0]
    assert differ.any() and (close & differ).equal(differ)
    assert close.double().mean() < 0.02


def test_uniform_numbers_differ_by_seed_id_sample_and_step():
    numbers = [
        sampling.uniform(seed, id, number, step)
        for seed in range(10)
        for id in (*range(5), "a", "a/0", "0/a", "b", "")
        for number in range(3)
        for step in range(10)
    ]
    assert len(set(numbers)) == 3000 and all(0 <= u < 1 for u in numbers)
    assert abs(sum(numbers) / 3000 - 0.5) < 4 / math.sqrt(12 * 3000)  # four standard deviations
    assert numbers[300 + 30 + 10 + 3] == sampling.uniform(1, 1, 1, 3)


@pytest.mark.parametrize(
    "options, message",
    [
        ((-0.5, None, None), "--temperature is -0.5: it must be at least 0"),
        ((math.nan, None, None), "--temperature is nan: it must be finite"),
        ((1.0, 0, None), "--top-k is 0: it must be at least 1"),
        ((1.0, None, 0.0), "--top-p is 0.0: it must be over 0"),
        ((1.0, None, 1.5), "--top-p is 1.5: it must be at most 1"),
    ],
)
def test_meaningless_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(*options)


def edge_rows(kind: str, distance: float) -> tuple[torch.Tensor, SamplingParams]:
    """Rows of different logits, with options whose edge is `distance` from one of them in row 0,
    and far from all in row 1.
    """
    row = torch.arange(12, dtype=torch.float64).flip(0) * 0.4
    row = row[torch.randperm(12, generator=torch.Generator().manual_seed(5))]
    order = row.argsort(descending=True)
    near = row.clone()
    if kind == "top_k":
        near[order[4]] = row[order[3]] - distance
        return torch.stack((near, row)), SamplingParams(1.0, top_k=4)
    if kind == "min_p":
        share = math.exp(-1.4)  # between the fourth and the fifth
        near[order[6]] = row.max() - 1.4 + distance
        return torch.stack((near, row)), SamplingParams(1.0, min_p=share)
    shares = row.softmax(-1).sort(descending=True).values.cumsum(-1)
    params = SamplingParams(1.0, top_p=float(shares[3]) - distance)
    return torch.stack((row, row * 1.3)), params


@pytest.mark.parametrize(
    "kind, distance",
    [
        (kind, distance)
        for kind in ("top_k", "top_p", "min_p")
        for distance in (4e-5, 3e-4, -4e-5, -3e-4)
        if kind != "top_k" or distance > 0  # else the fifth is the fourth
    ],
)
def test_a_filter_is_uncertain_where_a_token_lies_at_its_edge(kind, distance):
    scores, params = edge_rows(kind, distance)
    (filter_,) = sampling._filters(params)
    kept = filter_.keep(scores)
    found = sampling._uncertainty(scores, kept, filter_)
    assert found[1] == 0 and (found[0] > 0) == (abs(distance) < sampling.CLOSE)
    if not found[0]:
        return
    # each token enters or leaves: no sum of probabilities moves by more than is said
    probability = kept[0].softmax(-1)
    for token in range(12):
        for by in (2 * sampling.CLOSE, -2 * sampling.CLOSE):
            moved = scores[:1].clone()
            moved[0, token] += by
            other = filter_.keep(moved)[0].softmax(-1)
            change = (other.cumsum(-1) - probability.cumsum(-1)).abs().max()
            assert change <= found[0] * 1.01 + 4 * sampling.CLOSE
