"""SimPO, ORPO and KTO against loops over answers, as TRL has published them (cpo_trainer.py,
orpo_trainer.py, kto_trainer.py), in float64.
"""

import math
from functools import partial

import pytest
import torch

from dolmen.objectives.preference import (
    DPO,
    KTO,
    REFERENCE,
    ReferenceFreePreference,
    dpo,
    kto,
    orpo,
    simpo,
)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


@pytest.fixture
def random_pairs():
    """Summed log-probabilities of five pairs, and tokens of their answers."""
    made = torch.Generator().manual_seed(3)
    lengths = tuple(torch.randint(1, 9, (5,), generator=made) for _ in range(2))
    found = [
        -(0.05 + torch.rand(5, generator=made).double()) * length for length in (*lengths, *lengths)
    ]
    return found, lengths


@pytest.mark.parametrize("beta, gamma, smoothing", [(2.0, 0.5, 0.0), (2.5, 1.4, 0.1)])
def test_simpo(random_pairs, beta, gamma, smoothing):
    (chosen, rejected, *_), lengths = random_pairs
    options = dict(beta=beta, gamma=gamma, label_smoothing=smoothing)
    loss, metrics = simpo(chosen, rejected, lengths=lengths, **options)
    total = 0.0
    for c, r, long, other in zip(
        chosen.tolist(), rejected.tolist(), *(one.tolist() for one in lengths), strict=True
    ):
        logits = (c / long - r / other) - gamma / beta  # TRL: simpo_gamma / beta
        total += -log_sigmoid(beta * logits) * (1 - smoothing)
        total += -log_sigmoid(-beta * logits) * smoothing
    assert float(loss) == pytest.approx(total / 5, rel=1e-12)
    assert 0 <= metrics["accuracy"] <= 1


def test_orpo(random_pairs):
    (chosen, rejected, *_), lengths = random_pairs
    loss, metrics = orpo(chosen, rejected, lengths=lengths, beta=0.3)
    total, ahead = 0.0, 0
    for c, r, long, other in zip(
        chosen.tolist(), rejected.tolist(), *(one.tolist() for one in lengths), strict=True
    ):
        c, r = c / long, r / other
        odds = (c - r) - (math.log1p(-math.exp(c)) - math.log1p(-math.exp(r)))
        total += -c - 0.3 * log_sigmoid(odds)
        ahead += c > r
    assert float(loss) == pytest.approx(total / 5, rel=1e-12)
    assert metrics["accuracy"] == pytest.approx(ahead / 5)


def test_orpo_of_an_answer_that_is_certain():
    """Whose odds are infinite: the loss is a number, and so is its gradient."""
    chosen = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    loss, _ = orpo(chosen, chosen.detach() - 1, lengths=(torch.ones(2), torch.ones(2)))
    loss.backward()
    assert loss.isfinite() and chosen.grad.isfinite().all()


@pytest.mark.parametrize("kl", [-0.7, 0.0, 1.3])
def test_kto(random_pairs, kl):
    (policy, other, *_), _ = random_pairs
    reference, wanted = other.flip(0), torch.tensor([1, 0, 1, 1, 0])
    given = torch.tensor(kl, dtype=torch.float64, requires_grad=True)
    policy = policy.requires_grad_()
    loss, metrics = kto(
        policy,
        reference,
        wanted,
        kl=given,
        beta=0.2,
        desirable_weight=1.5,
        undesirable_weight=0.5,
    )
    zero, losses, rewards = max(0.0, kl), [], {True: [], False: []}
    for p, r, good in zip(policy.tolist(), reference.tolist(), wanted.tolist(), strict=True):
        ratio = p - r
        sign, weight = (1, 1.5) if good else (-1, 0.5)
        losses.append(weight * (1 - 1 / (1 + math.exp(-0.2 * sign * (ratio - zero)))))
        rewards[bool(good)].append(0.2 * ratio)
    assert loss.item() == pytest.approx(sum(losses) / 5, rel=1e-12)
    assert float(metrics["desirable"]) == pytest.approx(sum(rewards[True]) / 3)
    assert float(metrics["undesirable"]) == pytest.approx(sum(rewards[False]) / 2)
    loss.backward()
    assert given.grad is None
    assert torch.equal(policy.grad < 0, wanted > 0)  # the wanted ones are raised


def test_what_compares_with_no_other_model():
    assert ReferenceFreePreference("simpo", 2.0).names == DPO().names and REFERENCE


@pytest.mark.parametrize("beta", [0.0, -1.0, math.inf, math.nan])
def test_every_objective_of_preferences_checks_its_beta(beta):
    for make in (DPO, KTO, partial(ReferenceFreePreference, "orpo")):
        with pytest.raises(ValueError, match=f"beta is {beta}: it must be "):
            make(beta=beta)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.inf, math.nan])
def test_every_loss_of_preferences_checks_its_beta(beta):
    """The functions, without an objective around them."""
    two, ones = torch.zeros(2), torch.ones(2, dtype=torch.int64)
    for call in (
        lambda: kto(two, two, ones, kl=0.0, beta=beta),
        lambda: orpo(two, two, lengths=(ones, ones), beta=beta),
        lambda: simpo(two, two, lengths=(ones, ones), beta=beta),
        lambda: dpo(two, two, two, two, beta=beta),
    ):
        with pytest.raises(ValueError, match=f"beta is {beta}: it must be "):
            call()
