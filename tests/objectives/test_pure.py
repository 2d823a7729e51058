"""Objectives as pure functions of tensors, each against a plain loop over rows and tokens written
from its paper, by the numbers of Python; their gradients by finite differences. What stands in the
holes of a mask is NaN everywhere here.
"""

import math
from itertools import pairwise as neighbours
from statistics import fmean, pstdev, stdev

import pytest
import torch
from torch import Tensor

from dolmen.objectives import advantage, policy, preference, reward
from dolmen.objectives.config import PairKind

NAN = math.nan
MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1],
        [0, 1, 1, 0, 1, 0],  # a prompt, a hole, padding
        [0, 0, 1, 0, 0, 0],  # one token
        [0, 0, 0, 0, 0, 0],  # none
        [1, 0, 0, 1, 1, 0],
    ]
)
ROWS, TOKENS = MASK.shape
EXACT = dict(rtol=1e-13, atol=1e-15)  # the order of sums in float64


def random_tensor(seed: int, scale: float = 1.0) -> Tensor:
    """[rows, tokens] in float64, NaN in holes."""
    made = torch.randn(ROWS, TOKENS, generator=torch.Generator().manual_seed(seed)).double()
    return torch.where(MASK == 1, scale * made, NAN)


NEW, OLD, REFERENCE, ADVANTAGES = (
    random_tensor(0, 0.4),
    random_tensor(1, 0.4),
    random_tensor(2, 0.4),
    random_tensor(3),
)
OF_ROWS = torch.tensor([1.5, 1.7, -2.0, 9.0, -0.3]).double()
LOW, HIGH = 0.2, 0.24


def places() -> list[list[tuple[int, int]]]:
    """Of each row the tokens that count."""
    return [[(i, t) for t in range(TOKENS) if MASK[i, t]] for i in range(ROWS)]


def of_mask(loss, reduce: str, rows: int) -> float:
    """The mean of `loss(i, t)` over tokens, or over so many rows of their means."""
    found = [[loss(i, t) for i, t in row] for row in places() if row]
    if reduce == "token-mean":
        return fmean(sum(found, []))
    return sum(map(fmean, found)) / rows


def surrogate(r: float, a: float, dual: float | None = None) -> float:
    loss = -min(r * a, min(max(r, 1 - LOW), 1 + HIGH) * a)
    return min(loss, -dual * a) if dual and a < 0 else loss


def ratio(i: int, t: int) -> float:
    return math.exp(NEW[i, t] - OLD[i, t])


def k3(d: float) -> float:
    return math.exp(-d) - 1 + d


def gradients(function, *tensors: Tensor) -> None:
    """By finite differences; in holes 0, which no NaN reaches."""
    leaves = [torch.where(MASK == 1, t, 0.0).requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(lambda *given: function(*given)[0], leaves)
    leaves = [t.clone().requires_grad_() for t in tensors]
    found = torch.autograd.grad(function(*leaves)[0], leaves)
    for one in found:
        assert torch.isfinite(one).all() and not one[MASK == 0].any() and one.any()


CLIPPED = dict(clip_low=LOW, clip_high=HIGH)


@pytest.mark.parametrize("dual", [None, 1.1])
@pytest.mark.parametrize(
    "reduce, empty, rows",
    [
        ("token-mean", "left-out", 0),
        ("sequence-mean", "left-out", 4),
        ("sequence-mean", "counted", 5),
    ],
)
def test_clipped(dual, reduce, empty, rows):
    settings = dict(**CLIPPED, dual_clip=dual, reduce=reduce, empty=empty)
    loss, metrics = policy.ppo_loss(NEW, OLD, ADVANTAGES, MASK, **settings)
    want = of_mask(lambda i, t: surrogate(ratio(i, t), ADVANTAGES[i, t].item(), dual), reduce, rows)
    assert loss.item() == pytest.approx(want, rel=1e-13)
    gradients(lambda new: policy.ppo_loss(new, OLD, ADVANTAGES, MASK, **settings), NEW)

    # clipped: a better action that is likelier by more than HIGH, a worse one the other way
    every = sum(places(), [])
    outside = [
        ratio(i, t) > 1 + HIGH if ADVANTAGES[i, t] > 0 else ratio(i, t) < 1 - LOW for i, t in every
    ]
    assert metrics["clip_fraction"].item() == pytest.approx(fmean(outside)) and any(outside)
    off = [(OLD[i, t] - NEW[i, t]).item() for i, t in every]
    assert metrics["kl_k1"].item() == pytest.approx(fmean(off))
    assert metrics["kl_k3"].item() == pytest.approx(fmean(map(k3, off)))
    assert metrics["ratio"].item() == pytest.approx(fmean(math.exp(-d) for d in off))
    assert not any(each.requires_grad for each in metrics.values())
    if dual:
        bounded = [ADVANTAGES[i, t] < 0 and ratio(i, t) > dual for i, t in every]
        assert metrics["dual_clip_fraction"].item() == pytest.approx(fmean(bounded)) and any(
            bounded
        )


def test_clipped_by_hand():
    """Ratios 2 and 1/2, advantages 1 and -1: of each the clipped one is the worse."""
    new, old = torch.tensor([[2.0, 0.5]]).log(), torch.zeros(1, 2)
    a, mask = torch.tensor([[1.0, -1.0]]), torch.ones(1, 2)
    settings = dict(clip_low=0.2, clip_high=0.28, reduce="token-mean")
    loss, metrics = policy.ppo_loss(new, old, a, mask, dual_clip=None, **settings)
    assert loss.item() == pytest.approx((-1.28 + 0.8) / 2) and metrics["clip_fraction"] == 1
    # of the other signs nothing is clipped, until the dual clip bounds the ratio of 2 by 1.5
    loss, metrics = policy.ppo_loss(new, old, -a, mask, dual_clip=None, **settings)
    assert loss.item() == pytest.approx((2 - 0.5) / 2) and metrics["clip_fraction"] == 0
    loss, metrics = policy.ppo_loss(new, old, -a, mask, dual_clip=1.5, **settings)
    assert loss.item() == pytest.approx((1.5 - 0.5) / 2) and metrics["dual_clip_fraction"] == 0.5


MAX_LENGTH, BETA = 11, 0.3


def of_group(kind: str, level: str, advantages: Tensor, rows: int) -> float:
    def loss(i: int, t: int) -> float:
        off = [(NEW[at] - OLD[at]).item() for at in places()[i]]
        r = math.exp(fmean(off)) if level == "sequence" or kind == "gspo" else ratio(i, t)
        a = (advantages[i] if advantages.ndim == 1 else advantages[i, t]).item()
        away = BETA * k3((NEW[i, t] - REFERENCE[i, t]).item())
        if kind == "cispo":
            return -min(max(r, 1 - LOW), 1 + HIGH) * a * NEW[i, t].item() + away
        return surrogate(r, a) + away

    if kind == "dr-grpo":
        return sum(loss(i, t) for i, t in sum(places(), [])) / (rows * MAX_LENGTH)
    return of_mask(loss, "sequence-mean" if kind in ("grpo", "gspo") else "token-mean", rows)


@pytest.mark.parametrize("empty, rows", [("counted", 5), ("left-out", 4)])
@pytest.mark.parametrize("advantages", [OF_ROWS, ADVANTAGES], ids=["of-rows", "of-tokens"])
@pytest.mark.parametrize("level", policy.Level.__args__)
@pytest.mark.parametrize("kind", policy.Kind.__args__)
def test_group(kind, level, advantages, empty, rows):
    settings = dict(**CLIPPED, beta=BETA, level=level, max_length=MAX_LENGTH, kind=kind)
    settings |= dict(empty=empty)
    loss, metrics = policy.grpo_loss(NEW, OLD, REFERENCE, advantages, MASK, **settings)
    assert loss.item() == pytest.approx(of_group(kind, level, advantages, rows), rel=1e-13)
    away = [(NEW[i, t] - REFERENCE[i, t]).item() for i, t in sum(places(), [])]
    assert metrics["reference_kl"].item() == pytest.approx(fmean(map(k3, away)))
    assert metrics["clip_fraction"] > 0 and not any(each.requires_grad for each in metrics.values())
    token_gspo = kind == "gspo" and level == "token" and advantages.ndim == 2
    if kind != "cispo" and not token_gspo:
        gradients(
            lambda new: policy.grpo_loss(new, OLD, REFERENCE, advantages, MASK, **settings), NEW
        )


def test_gradients_that_are_no_derivatives():
    """Of CISPO -sg(clip(r)) A, and of GSPO-token -s A / |row| per token, where not clipped: each
    token's own.
    """
    settings = dict(**CLIPPED, beta=0.0, level="token", max_length=None)
    new = NEW.clone().requires_grad_()
    loss, _ = policy.grpo_loss(new, OLD, None, ADVANTAGES, MASK, kind="cispo", **settings)
    (found,) = torch.autograd.grad(loss, new)
    for i, t in sum(places(), []):
        r = min(max(ratio(i, t), 1 - LOW), 1 + HIGH)
        assert found[i, t] == pytest.approx(-r * ADVANTAGES[i, t].item() / MASK.sum().item())
    loss, _ = policy.grpo_loss(new, OLD, None, ADVANTAGES, MASK, kind="gspo", **settings)
    (found,) = torch.autograd.grad(loss, new)
    for row in filter(None, places()):
        s = math.exp(fmean((NEW[at] - OLD[at]).item() for at in row))
        for at in row:
            a = ADVANTAGES[at].item()
            free = -surrogate(s, a) == s * a
            assert found[at] == pytest.approx(-s * a * free / len(row) / ROWS)


def test_group_kinds_by_hand():
    """One row of one token and one of three, of ratio 1, advantages 1 and -1."""
    zero, mask = torch.zeros(2, 4), torch.tensor([[1, 0, 0, 0], [1, 1, 0, 1]])
    a = torch.tensor([1.0, -1.0])
    settings = dict(**CLIPPED, beta=0.0, level="token", max_length=8)
    want = {"grpo": 0, "gspo": 0, "bnpo": 0.5, "dapo": 0.5, "dr-grpo": 2 / 16, "cispo": 0}
    for kind, number in want.items():
        assert policy.grpo_loss(zero, zero, None, a, mask, kind=kind, **settings)[0] == number


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value(clip):
    returns = random_tensor(4)

    def loss(i: int, t: int) -> float:
        v, old, r = (x[i, t].item() for x in (NEW, OLD, returns))
        squares = [(v - r) ** 2]
        if clip:
            squares += [(old + min(max(v - old, -clip), clip) - r) ** 2]
        return max(squares) / 2

    found, metrics = policy.value_loss(NEW, OLD, returns, MASK, clip=clip)
    assert found.item() == pytest.approx(of_mask(loss, "token-mean", 0), rel=1e-13)
    assert (metrics["clip_fraction"] > 0) == (clip is not None)
    free = of_mask(lambda i, t: (NEW[i, t] - returns[i, t]).item() ** 2, "token-mean", 0)
    assert metrics["squared_error"].item() == pytest.approx(free)
    gradients(lambda new: policy.value_loss(new, OLD, returns, MASK, clip=clip), NEW)


def test_estimators_of_kl():
    p, q = torch.tensor([[-1.0, -2.0, -2.0]]), torch.tensor([[-2.0, -1.0, -2.0]])
    for estimator, want in (
        ("k1", [1, -1, 0]),
        ("k2", [0.5, 0.5, 0]),
        ("k3", [math.exp(-1), math.exp(1) - 2, 0]),
    ):
        found = advantage.kl(p, q, estimator=estimator)
        torch.testing.assert_close(found, torch.tensor([want], dtype=found.dtype))
    # k1 and k3 have the mean of the KL of what p draws; the digits of a small one are there
    p, q = torch.tensor([[0.7, 0.2, 0.1]]).double(), torch.tensor([[0.5, 0.1, 0.4]]).double()
    want = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        found = (p * advantage.kl(p.log(), q.log(), estimator=estimator)).sum()
        torch.testing.assert_close(found, want)
    near = advantage.kl(torch.tensor([[1e-4]]), torch.zeros(1, 1), estimator="k3")
    assert near.item() == pytest.approx(5e-9, rel=1e-3)


@pytest.mark.parametrize("clip, bounds", [(None, None), (0.9, (-0.9, 0.9)), ((-1.0, 0.5),) * 2])
@pytest.mark.parametrize("estimator", advantage.Estimator.__args__)
def test_rewards_of_tokens(estimator, clip, bounds):
    """A score of 9 of a row without tokens is nowhere; the KL is larger than what bounds scores."""
    policy_, reference = 9 * NEW, OLD
    found = advantage.token_rewards(
        OF_ROWS, policy_, reference, MASK, kl=estimator, kl_coef=0.5, clip=clip
    )
    estimate = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": k3}[estimator]
    want = torch.zeros(ROWS, TOKENS).double()
    for i, row in enumerate(places()):
        for at in row:
            want[at] = -0.5 * estimate((policy_[at] - reference[at]).item())
        if row:
            score = OF_ROWS[i].item()
            want[row[-1]] += score if bounds is None else min(max(score, bounds[0]), bounds[1])
    torch.testing.assert_close(found, want, **EXACT)
    assert want.abs().max() > 2


def discounted(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Equation 16 as it stands: a sum over all later tokens, of rows without holes."""
    made = torch.zeros(ROWS, TOKENS).double()
    for row in places():
        v = [values[at].item() for at in row] + [0.0]
        delta = [
            rewards[at].item() + gamma * after - now
            for at, (now, after) in zip(row, neighbours(v), strict=True)
        ]
        for n, at in enumerate(row):
            made[at] = sum((gamma * lam) ** k * d for k, d in enumerate(delta[n:]))
    return made


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.9, 0.0)])
def test_gae(gamma, lam):
    rewards, values = random_tensor(5), random_tensor(6)
    found, returns = advantage.gae(rewards, values, MASK, gamma=gamma, lam=lam)
    want = discounted(rewards, values, gamma, lam)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-14)
    after = torch.where(MASK == 1, want + values, 0.0)
    torch.testing.assert_close(returns, after, rtol=1e-12, atol=1e-14)


def test_gae_by_hand():
    """Nothing after the last token counts, and a hole costs no discount unless it is a step."""
    rewards, values = torch.tensor([[0.0, 9.0, 1.0, 9.0]]), torch.tensor([[0.5, 7.0, 0.25, 7.0]])
    mask = torch.tensor([[1, 0, 1, 0]])
    found, returns = advantage.gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert found.tolist() == [[0.5 * 0.25 - 0.5 + 0.25 * 0.75, 0, 0.75, 0]]
    assert returns.tolist() == [[found[0, 0] + 0.5, 0, 1, 0]]
    # between them is a state of value and reward 0, whose own delta is half of what comes
    steps, _ = advantage.gae(rewards, values, mask, gamma=0.5, lam=0.5, holes="steps")
    assert steps.tolist() == [[-0.5 + 0.25 * (0.5 * 0.25 + 0.25 * 0.75), 0, 0.75, 0]]


SCORES = torch.tensor([1.0, 5.0, 2.0, 4.0, 7.0, 4.0, 3.0]).double()
GROUPS = torch.tensor([8, -3, 8, 5, 8, 5, -3])


@pytest.mark.parametrize("variance, deviation", [("unbiased", stdev), ("biased", pstdev)])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_normalised(scale, variance, deviation):
    """Groups of three and two, in any order, and one of equal scores."""
    found = advantage.normalize_by_group(SCORES, GROUPS, eps=1e-3, variance=variance, scale=scale)
    want = []
    for score, name in zip(SCORES.tolist(), GROUPS.tolist(), strict=True):
        own = [s for s, g in zip(SCORES.tolist(), GROUPS.tolist(), strict=True) if g == name]
        among = own if scale == "group" else SCORES.tolist()
        by = 1 if scale == "none" else deviation(among) + 1e-3
        want.append((score - fmean(own)) / by)
    assert found.tolist() == pytest.approx(want, rel=1e-12)
    assert found[3] == found[5] == 0 != found[0]


def test_a_group_of_one_or_of_equals_says_nothing():
    found = advantage.normalize_by_group(torch.tensor([3.0, 1.0, 1.0]), GROUPS[[0, 1, 1]], eps=0.0)
    assert found.tolist() == [0, 0, 0]


EQUAL = (-237.3, 0.1, 1e30, -1e-30, 7.0)


@pytest.mark.parametrize("samples", [2, 3, 7, 8, 64])
@pytest.mark.parametrize("score", EQUAL)
def test_equal_scores_have_no_advantage_whatever_they_are(score, samples):
    """In fp32 the mean of eight scores of -237.3 is another number."""
    groups = torch.tensor([3, 1]).repeat(samples)
    scores = torch.where(groups == 3, score, 2 * score)
    for scale in ("group", "batch", "none"):
        found = advantage.normalize_by_group(scores, groups, scale=scale)
        assert not found.any(), (scale, found)
    assert not advantage.leave_one_out(scores, groups).any()
    row = torch.full((2, samples), score)
    assert not advantage.whiten(row, torch.ones_like(row)).any()


def test_advantages_of_close_scores_are_those_of_float64():
    """Scores far from 0 that differ by little: fp32 rounds their differences and not their sum."""
    scores = torch.tensor([-237.3, -237.2999, -237.3001, -237.3, 1000.25, 1000.5])
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    for scale in ("group", "batch", "none"):
        found = advantage.normalize_by_group(scores, groups, scale=scale)
        want = advantage.normalize_by_group(scores.double(), groups, scale=scale)
        assert found.tolist() == pytest.approx(want.tolist(), rel=1e-5, abs=1e-9), scale


def test_leave_one_out():
    """Of groups of three and two in any order, and of one alone."""
    scores, groups = SCORES.tolist(), GROUPS.tolist()
    want = [
        score - fmean(s for j, s in enumerate(scores) if j != i and groups[j] == groups[i])
        for i, score in enumerate(scores)
    ]
    assert advantage.leave_one_out(SCORES, GROUPS).tolist() == pytest.approx(want, rel=1e-12)
    assert advantage.leave_one_out(torch.tensor([3.0]), torch.tensor([7])).tolist() == [0]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce(gamma):
    """Rewards from each token on, at mean 0 and variance 1 over all tokens."""
    rewards = random_tensor(5)
    returns = {
        (i, t): sum(gamma**n * float(rewards[i, u]) for n, (_, u) in enumerate(row[place:]))
        for i, row in enumerate(places())
        for place, (_, t) in enumerate(row)
    }
    mean, deviation = fmean(returns.values()), stdev(returns.values())
    found = advantage.reinforce(rewards, MASK, gamma=gamma)
    for (i, t), value in returns.items():
        assert float(found[i, t]) == pytest.approx((value - mean) / deviation, rel=1e-6)
    assert not found[MASK == 0].any()


def test_the_gradient_of_what_is_taught_is_that_of_the_reverse_kl():
    """Of distributions over five tokens: the expectation over draws, by hand."""
    logits = torch.randn(5, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    teacher = torch.randn(5, generator=torch.Generator().manual_seed(1)).double().log_softmax(-1)
    log = logits.log_softmax(-1)
    kl = (log.exp() * (log - teacher)).sum()
    found = advantage.distillation(log.detach()[:, None], teacher[:, None], torch.ones(5, 1))[:, 0]
    expected = -(log.exp().detach() * found * log).sum()
    want, got = (torch.autograd.grad(of, logits, retain_graph=True)[0] for of in (kl, expected))
    torch.testing.assert_close(got, want, **EXACT)


def test_overlong_by_hand():
    """2503.14476, equation 13, of 20 tokens, the last 8 of which cost."""
    lengths = torch.tensor([1, 12, 13, 16, 20, 25])
    found = advantage.overlong_penalty(lengths, max_length=20, buffer=8)
    assert found.tolist() == [0, 0, -1 / 8, -1 / 2, -1, -1]


def test_importance_by_hand():
    trained, own = torch.tensor([[-1.0, -1.0, -2.0, NAN]]), torch.tensor([[-1.0, -3.0, -1.0, NAN]])
    found = advantage.importance_weights(trained, own, torch.tensor([[1, 1, 1, 0]]), cap=2.0)
    assert found.tolist()[0] == pytest.approx([1, 2, math.exp(-1), 0])


CHOSEN, REJECTED, FIRST, SECOND = (
    torch.randn(5, generator=torch.Generator().manual_seed(seed)).double() * 3
    for seed in (10, 11, 12, 13)
)
LENGTHS = torch.tensor([1, 4, 2, 9, 3]), torch.tensor([5, 1, 2, 3, 8])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def of_pair(kind: str, c: float, r: float, lengths: tuple[int, int], beta: float, s: float):
    d, log = beta * (c - r), lambda x: math.log(sigmoid(x))
    p, q = sigmoid(d), sigmoid(-d)
    return {
        "sigmoid": -(1 - s) * log(d) - s * log(-d),
        "robust": (-(1 - s) * log(d) + s * log(-d)) / (1 - 2 * s),
        "hinge": max(0.0, 1 - d),
        "ipo": (c / lengths[0] - r / lengths[1] - 1 / (2 * beta)) ** 2,
        "sppo": (c - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2,
        "apo-zero": 1 - sigmoid(beta * c) + sigmoid(beta * r),
        "exo": p * math.log(p / (1 - (s or 1e-3))) + q * math.log(q / (s or 1e-3)),
    }[kind]


@pytest.mark.parametrize("smoothing, alpha", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.7)])
@pytest.mark.parametrize("kind", PairKind.__args__)
def test_dpo(kind, smoothing, alpha):
    settings = dict(beta=0.4, kind=kind, label_smoothing=smoothing, lengths=LENGTHS)
    settings["rpo_alpha"] = alpha
    given = [t.clone().requires_grad_() for t in (CHOSEN, REJECTED)]
    loss, metrics = preference.dpo(*given, FIRST, SECOND, **settings)
    c, r = (CHOSEN - FIRST).tolist(), (REJECTED - SECOND).tolist()
    lengths = zip(*(each.tolist() for each in LENGTHS), strict=True)
    want = [of_pair(kind, *pair, n, 0.4, smoothing) for *pair, n in zip(c, r, lengths, strict=True)]
    likely = zip(CHOSEN.tolist(), LENGTHS[0].tolist(), strict=True)
    want = [one - alpha * p / n for one, (p, n) in zip(want, likely, strict=True)]
    assert loss.item() == pytest.approx(fmean(want), rel=1e-13)
    assert torch.autograd.gradcheck(
        lambda a, b: preference.dpo(a, b, FIRST, SECOND, **settings)[0], given
    )
    assert metrics["accuracy"] == fmean(a > b for a, b in zip(c, r, strict=True))
    assert metrics["margin"].item() == pytest.approx(0.4 * (fmean(c) - fmean(r)))
    assert metrics["chosen"].item() == pytest.approx(0.4 * fmean(c))
    assert not any(each.requires_grad for each in metrics.values())


def test_dpo_by_hand():
    """A policy that is the reference, and one that is sure."""
    one, far = torch.ones(1), torch.full((1,), 1e4)
    same = {"sigmoid": math.log(2), "hinge": 1, "ipo": 25, "sppo": 50, "apo-zero": 1}
    for kind, want in same.items():
        for n in (one, 7 * one):
            settings = dict(beta=0.1, kind=kind, lengths=(n, n))
            loss, metrics = preference.dpo(one, one, one, one, **settings)
            assert loss.item() == pytest.approx(want) and metrics["accuracy"] == 0
    for kind in ("sigmoid", "hinge", "apo-zero", "robust"):
        assert preference.dpo(far, -far, one, one, beta=0.1, kind=kind)[0] == 0
        assert torch.isfinite(preference.dpo(-far, far, one, one, beta=0.1, kind=kind)[0])


@pytest.mark.parametrize("margin", [None, 0.7, torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0]).double()])
@pytest.mark.parametrize("center", [None, 0.01])
def test_pairwise(margin, center):
    given = [t.clone().requires_grad_() for t in (CHOSEN, REJECTED)]
    loss, metrics = reward.pairwise(*given, margin=margin, center=center)
    by = [margin or 0.0] * 5 if not isinstance(margin, Tensor) else margin.tolist()
    want = [
        -math.log(sigmoid(c - r - m)) + (center or 0) * (c + r) ** 2
        for c, r, m in zip(CHOSEN.tolist(), REJECTED.tolist(), by, strict=True)
    ]
    assert loss.item() == pytest.approx(fmean(want), rel=1e-13)
    assert torch.autograd.gradcheck(
        lambda a, b: reward.pairwise(a, b, margin=margin, center=center)[0], given
    )
    assert metrics["accuracy"] == (CHOSEN > REJECTED).double().mean()
    assert metrics["margin"].item() == pytest.approx((CHOSEN - REJECTED).mean().item())


def test_rows_without_a_token_are_no_numbers_away():
    """Of a batch with nothing to learn from, losses and metrics are 0, and so are gradients."""
    none, a = torch.zeros_like(MASK), torch.full((ROWS, TOKENS), NAN)
    new = a.clone().requires_grad_()
    settings = dict(**CLIPPED, beta=0.1, level="sequence", max_length=4)
    found = [policy.value_loss(new, a, a, none, clip=0.2)]
    for reduce in ("token-mean", "sequence-mean"):
        found += [policy.ppo_loss(new, a, a, none, **CLIPPED, dual_clip=3.0, reduce=reduce)]
    found += [
        policy.grpo_loss(new, a, a, OF_ROWS, none, kind=kind, empty=empty, **settings)
        for kind in policy.Kind.__args__
        for empty in ("counted", "left-out")
    ]
    for loss, reported in found:
        assert loss == 0 and not any(reported.values())
        assert not torch.autograd.grad(loss, new)[0].any()
    assert not any(t.any() for t in advantage.gae(a, a, none, gamma=1.0, lam=0.95))
    assert not advantage.token_rewards(OF_ROWS, a, a, none, kl="k1", kl_coef=1.0, clip=5.0).any()


GROUP = dict(**CLIPPED, beta=0.0, level="token", max_length=None, kind="grpo")
ALL = NEW, OLD, ADVANTAGES, MASK
REFUSED = {
    "a dual clip": (
        lambda: policy.ppo_loss(*ALL, **CLIPPED, dual_clip=1.0, reduce="token-mean"),
        "dual_clip is 1.0",
    ),
    "a reduction": (
        lambda: policy.ppo_loss(*ALL, **CLIPPED, dual_clip=None, reduce="mean"),
        "'mean'",
    ),
    "no reference": (
        lambda: policy.grpo_loss(NEW, OLD, None, *ALL[2:], **{**GROUP, "beta": 0.1}),
        "beta is 0.1",
    ),
    "no length": (
        lambda: policy.grpo_loss(NEW, OLD, None, *ALL[2:], **{**GROUP, "kind": "dr-grpo"}),
        "max_length is None",
    ),
    "a kind": (
        lambda: policy.grpo_loss(NEW, OLD, None, *ALL[2:], **{**GROUP, "kind": "ppo"}),
        "'ppo'",
    ),
    "a level": (
        lambda: policy.grpo_loss(NEW, OLD, None, *ALL[2:], **{**GROUP, "level": "row"}),
        "'row'",
    ),
    "a negative clip": (lambda: policy.value_loss(*ALL, clip=-1.0), "clip is -1.0"),
    "an estimator": (lambda: advantage.kl(NEW, OLD, estimator="k4"), "'k4'"),
    "no lengths": (
        lambda: preference.dpo(CHOSEN, REJECTED, FIRST, SECOND, beta=0.1, kind="ipo"),
        "lengths=",
    ),
    "half wrong": (
        lambda: preference.DPO(kind="robust", label_smoothing=0.5),
        "label-smoothing is 0.5",
    ),
    "no beta": (lambda: preference.DPO(beta=0.0), "beta is 0.0"),
    "no lengths of what is chosen": (
        lambda: preference.dpo(CHOSEN, REJECTED, FIRST, SECOND, rpo_alpha=1.0),
        "rpo_alpha needs a mean over tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, said = REFUSED[case]
    with pytest.raises(Exception, match=said):
        call()
