"""The engine draws tokens by their probability: frequencies of thousands of draws against the exact
distribution, which is computed here from the logits, in fp64.
"""

import math

import pytest
import torch
from decoders import VOCABULARY, decoder

from dolmen.model import head
from dolmen.serving.engine import generate

PROMPT, DRAWS = [5, 6, 7], 3000
# (temperature, top_k, top_p)
SETTINGS = [
    (1.5, None, 0.6),
    (0.7, 9, 0.8),
    pytest.param(1.0, None, None, marks=pytest.mark.full),
    pytest.param(0.5, None, None, marks=pytest.mark.full),
    pytest.param(2.0, None, None, marks=pytest.mark.full),
    pytest.param(1.0, 4, None, marks=pytest.mark.full),
]


def exact(logits: list[float], temperature: float, k: int | None, p: float | None) -> list[float]:
    """Probabilities by the definition: divide, take the k largest, then the fewest that reach p."""
    weights = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[: k or len(weights)]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if p is not None and mass >= p:
            break
        kept.append(i)
        mass += weights[i] / total
    kept_weight = sum(weights[i] for i in kept)
    return [weights[i] / kept_weight if i in kept else 0.0 for i in range(len(weights))]


def hold(counts: list[int], probabilities: list[float]) -> None:
    """What has no probability is never drawn; the rest by Pearson's chi-square, rare tokens put
    together so that each bin expects five draws or more. Its mean is the degrees of freedom, its
    variance twice that: five standard deviations.
    """
    n, bins, rare = sum(counts), [], [0, 0.0]
    for count, p in zip(counts, probabilities, strict=True):
        assert p > 0 or count == 0
        if n * p >= 5:
            bins.append((count, n * p))
        else:
            rare = [rare[0] + count, rare[1] + n * p]
    if rare[1] >= 5:
        bins.append(tuple(rare))
    else:
        assert rare[0] < rare[1] + 5 * math.sqrt(rare[1]) + 5
    freedom = len(bins) - 1
    square = sum((count - expected) ** 2 / expected for count, expected in bins)
    assert abs(square - freedom) < 5 * math.sqrt(2 * freedom), f"{square:.1f} of {freedom}"


@pytest.mark.slow
@pytest.mark.parametrize("temperature, k, p", SETTINGS)
def test_frequencies_of_the_first_token_and_of_the_next(temperature, k, p):
    """The same prompt DRAWS times: the first token against the prompt's logits, the second, where
    the first was the most frequent one, against the logits after it. Seed 0, then another.
    """
    model = decoder("grouped")
    texts = [
        text
        for seed in (0, 1)
        for text in generate(model, [PROMPT] * DRAWS, 2, temperature, k, p, seed=seed)
    ]
    assert texts[:DRAWS] != texts[DRAWS:]
    counts = torch.tensor([t[0] for t in texts]).bincount(minlength=VOCABULARY)
    hold(counts.tolist(), exact(last(model, PROMPT), temperature, k, p))
    most = int(counts.argmax())
    second = torch.tensor([t[1] for t in texts if t[0] == most]).bincount(minlength=VOCABULARY)
    hold(second.tolist(), exact(last(model, [*PROMPT, most]), temperature, k, p))


def last(model, prompt: list[int]) -> list[float]:
    """Logits of what follows."""
    with torch.no_grad():
        return model(torch.tensor([prompt]), head.compute_logits)[0, -1].double().tolist()


def test_the_first_and_the_second_token_use_other_random_numbers():
    """With equal logits at both steps the two tokens would be equal if the numbers were. Here: two
    tokens of the same text are no more often equal than their frequencies say.
    """
    model = decoder("grouped")
    with torch.no_grad():
        model.head.weight.zero_()  # all tokens alike
    texts = generate(model, [PROMPT] * DRAWS, 3, 1.0, seed=0)
    expected = DRAWS / VOCABULARY
    for i, j in ((0, 1), (0, 2), (1, 2)):
        equal = sum(t[i] == t[j] for t in texts)
        assert abs(equal - expected) < 5 * math.sqrt(expected)
    neighbours = sum(a[0] == b[0] for a, b in zip(texts, texts[1:], strict=False))
    assert abs(neighbours - expected) < 5 * math.sqrt(expected)
