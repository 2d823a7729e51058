"""Mixture of experts against a loop over tokens in float64, gradients included, and the losses
against their definitions.
"""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck

from dolmen.ops import moe
from dolmen.ops.elementwise import clamped_swiglu

N, K, E, H, WIDTH = 12, 3, 5, 4, 6


def random(*shape, seed=0):
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))
    )


def by_tokens(x, logits, gate, up, down, normalize, bias=None):
    """The layer as the papers write it: for every token, the weighted sum of its k best experts."""
    out = []
    for row, scores in zip(x, logits, strict=True):
        p = scores.softmax(0)
        best = sorted(
            range(E), key=lambda e: -float(p[e].detach() + (0 if bias is None else bias[e]))
        )[:K]
        whole = sum(p[e] for e in best) if normalize else 1
        out.append(
            sum(p[e] / whole * (down[e] @ (F.silu(gate[e] @ row) * (up[e] @ row))) for e in best)
        )
    return torch.stack(out)


def by_groups(x, logits, gate, up, down, normalize, bias=None):
    routing = moe.route(logits, K, normalize, bias)
    order = moe.sort(routing.experts, E)
    counts = order.counts.tolist()
    rows = moe.spread(x, order)
    hidden = F.silu(moe.grouped_linear(rows, gate, counts)) * moe.grouped_linear(rows, up, counts)
    return moe.combine(moe.grouped_linear(hidden, down, counts), routing.weights, order)


@pytest.mark.parametrize("normalize", (True, False))
@pytest.mark.parametrize("bias", (None, torch.tensor([0.0, 0.9, 0.0, -0.9, 0.1])))
def test_the_layer_is_a_sum_over_chosen_experts(normalize, bias):
    inputs = [
        random(N, H),
        random(N, E),
        random(E, WIDTH, H),
        random(E, WIDTH, H, seed=1),
        random(E, H, WIDTH),
    ]
    inputs[1][:, 4] -= 100  # an expert that nobody chooses
    sent, results = random(N, H, seed=2), []
    for layer in (by_tokens, by_groups):
        leaves = [t.clone().requires_grad_() for t in inputs]
        y = layer(*leaves, normalize, bias)
        results.append((y, *torch.autograd.grad(y, leaves, sent)))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert (results[1][3][4] == 0).all() or bias is not None


def test_bias_changes_the_choice_and_not_the_weights():
    logits, bias = random(N, E), torch.tensor([0.0, 0.0, 2.0, 0.0, 0.0])
    plain, moved = moe.route(logits, 1, False), moe.route(logits, 1, False, bias)
    assert (moved.experts == 2).all() and not (plain.experts == 2).all()
    assert torch.equal(moved.weights[:, 0], logits.softmax(-1)[:, 2])


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("score, group_score", (("softmax", "max"), ("sigmoid", "top2")))
def test_groups_of_experts(score, group_score, bias):
    """DeepSeek-V2's and V3's choice, a token at a time: the best two groups of four, then the best
    three experts within those.
    """
    number, groups, kept, k, scale = 12, 4, 2, 3, 2.5
    logits = random(40, number).requires_grad_()
    offset = random(number, seed=3) if bias else None
    found = moe.route(
        logits,
        k,
        True,
        offset,
        score=score,
        scale=scale,
        groups=groups,
        groups_per_token=kept,
        group_score=group_score,
    )
    differ = 0
    for token, row in enumerate(logits):
        scores = row.softmax(0) if score == "softmax" else row.sigmoid()
        ranked = [
            float(s) + (0 if offset is None else float(offset[e]))
            for e, s in enumerate(scores.detach())
        ]
        members = [range(g * 3, g * 3 + 3) for g in range(groups)]
        most = 1 if group_score == "max" else 2
        value = [sum(sorted((ranked[e] for e in m), reverse=True)[:most]) for m in members]
        best = sorted(range(groups), key=value.__getitem__, reverse=True)[:kept]
        allowed = [e for g in best for e in members[g]]
        chosen = sorted(allowed, key=ranked.__getitem__, reverse=True)[:k]
        differ += chosen != sorted(range(number), key=ranked.__getitem__, reverse=True)[:k]
        assert found.experts[token].tolist() == chosen
        want = scores[chosen] / scores[chosen].sum() * scale
        torch.testing.assert_close(found.weights[token], want, rtol=0, atol=1e-14)
        torch.testing.assert_close(
            found.probabilities[token], scores / scores.sum(), rtol=0, atol=1e-15
        )
    assert differ > 5  # groups matter
    (gradient,) = torch.autograd.grad((found.weights * random(40, k)).sum(), logits)
    assert gradient.abs().max() > 1e-3


def test_order_is_stable_and_invertible():
    experts = torch.tensor([[2, 0], [0, 2], [3, 2]])
    order = moe.sort(experts, 5)
    assert order.pairs.tolist() == [1, 2, 0, 3, 5, 4] and order.counts.tolist() == [2, 0, 3, 1, 0]
    assert torch.equal(order.pairs[order.places], torch.arange(6))


@pytest.mark.parametrize("counts", ([3, 0, 4], [0, 0, 0], [0, 7, 0]))
def test_grouped_products(counts):
    x, weight = random(sum(counts), H).requires_grad_(), random(3, WIDTH, H).requires_grad_()
    assert moe.grouped_linear(x, weight, counts).shape == (sum(counts), WIDTH)
    assert (
        gradcheck(
            lambda x, w: moe.grouped_linear(x, w, counts), (x, weight), check_undefined_grad=False
        )
        if sum(counts)
        else True
    )
    moe.grouped_linear(x, weight, counts).sum().backward()
    assert [bool((g == 0).all()) for g in weight.grad] == [n == 0 for n in counts]


@pytest.mark.parametrize("counts", ([3, 0, 5], [0, 0, 0], [0, 7, 0], [1, 2, 1]))
def test_one_kernel_against_float64(counts):
    """fp32 on a CPU, where torch has a kernel for it that is a loop: the glue around it."""
    made = random(sum(counts), 8), random(3, 16, 8), random(sum(counts), 16, seed=5)
    wide = [t.requires_grad_() for t in made[:2]]
    narrow = [t.detach().float().requires_grad_() for t in made[:2]]
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    want = moe.grouped_linear(*wide, counts)
    got = moe.grouped_linear(*narrow, ends)
    wanted = (want, *torch.autograd.grad(want, wide, made[2]))
    found = (got, *torch.autograd.grad(got, narrow, made[2].float()))
    for a, b in zip(wanted, found, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(
            b.double(), a, rtol=0, atol=1e-5
        )  # sums of 16 fp32 products to 40
    assert [bool((g == 0).all()) for g in found[2]] == [n == 0 for n in counts]


def test_one_kernel_takes_what_a_gpu_demands():
    """Of bf16: torch's shape rule makes the checks of the CUDA kernel, strides of whole 16 bytes
    among them. The gradient comes expanded, as that of a sum does.
    """
    with FakeTensorMode():
        x = torch.empty(24, 16, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(3, 40, 16, dtype=torch.bfloat16, requires_grad=True)
        y = moe.grouped_linear(x, weight, torch.empty(3, dtype=torch.int32))
        y.sum().backward()
    assert y.shape == (24, 40) and y.is_contiguous()
    assert x.grad.shape == x.shape and x.grad.is_contiguous()
    assert weight.grad.shape == weight.shape and weight.grad.is_contiguous()


@pytest.mark.parametrize("counts", ([3, 0, 4], [0, 0, 0], [0, 7, 0]))
def test_biases_of_groups(counts):
    """By the counts of a loop and by the ends of a kernel, an empty group's gradient is zero."""
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    y, bias = random(sum(counts), H), random(len(counts), H)
    expected = y + bias.repeat_interleave(torch.tensor(counts), 0)
    for groups in (counts, ends):
        own = [t.clone().requires_grad_() for t in (y, bias)]
        got = moe.grouped_bias(*own, groups)
        assert torch.equal(got, expected)
        if sum(counts):
            assert gradcheck(lambda *ts: moe.grouped_bias(*ts, groups), own)  # noqa: B023


def test_clamped_swiglu():
    """On both sides of each limit, against numbers worked out by hand."""
    gate, up = torch.tensor([[-3.0, 0.5, 4.0]]).double(), torch.tensor([[-4.0, 0.25, 3.0]]).double()
    found = clamped_swiglu(gate, up, 1.702, 2.0)
    a, b = torch.tensor([[-3.0, 0.5, 2.0]]).double(), torch.tensor([[-1.0, 1.25, 3.0]]).double()
    torch.testing.assert_close(found, a / (1 + (-1.702 * a).exp()) * b, rtol=1e-15, atol=0)
    own = [t.clone().requires_grad_() for t in (gate, up)]
    assert gradcheck(lambda *ts: clamped_swiglu(*ts, 1.702, 2.0), own)


def test_permutations_have_the_gradient_of_indexing():
    order = moe.sort(torch.randint(0, E, (N, K), generator=torch.Generator().manual_seed(0)), E)
    assert gradcheck(lambda x: moe.spread(x, order), random(N, H).requires_grad_())
    assert gradcheck(
        lambda x: moe.permute(x, order.pairs, order.places), random(N * K, H).requires_grad_()
    )


def test_balance_loss():
    logits, length = random(2 * 6, E), 6
    routing = moe.route(logits, K, True)
    counts = moe.sequence_counts(routing.experts, 2, E)
    want = 0.0
    for s in range(2):
        mine = slice(s * length, (s + 1) * length)
        f = torch.bincount(routing.experts[mine].flatten(), minlength=E).double() * E / (K * length)
        want += (f * logits[mine].softmax(-1).mean(0)).sum()
    torch.testing.assert_close(
        moe.balance_losses(routing.probabilities, counts, length, K).sum(), want, rtol=1e-14, atol=0
    )
    # each sequence cut in two, as cp does
    halves = [logits.view(2, 2, 3, E)[:, i].reshape(-1, E) for i in range(2)]
    parts = [moe.balance_losses(half.softmax(-1), counts, length, K).sum() for half in halves]
    torch.testing.assert_close(sum(parts), want, rtol=1e-14, atol=0)


def test_balance_loss_of_even_and_one_sided_routing():
    even = torch.eye(E, dtype=torch.float64).repeat(2, 1) * 50
    for logits, worth in ((even, 1.0), (even[:1].expand(10, E), float(E))):
        routing = moe.route(logits, 1, False)
        (loss,) = moe.balance_losses(
            routing.probabilities, moe.sequence_counts(routing.experts, 1, E), 10, 1
        )
        torch.testing.assert_close(
            loss, torch.tensor(worth, dtype=torch.float64), rtol=1e-12, atol=0
        )


def test_z_loss():
    logits = random(8, E)
    want = sum(logits[s * 4 : s * 4 + 4].exp().sum(-1).log().square().mean() for s in range(2))
    torch.testing.assert_close(moe.z_losses(logits, 2, 4).sum(), want, rtol=1e-13, atol=0)


def test_of_one_sequence_and_one_layer_transformers_is_k_times_ours():
    """Its form is over all tokens of a batch and all layers at once, and not divided by k."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = random(12, E, seed=0).float()
    routing = moe.route(logits, K, True)
    counts = moe.sequence_counts(routing.experts, 1, E)
    (ours,) = moe.balance_losses(routing.probabilities, counts, 12, K) * K
    theirs = load_balancing_loss_func((logits,), E, K)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_with_exact_numerics_a_token_has_its_bits_beside_any_others(score, dtype):
    """Its routing, output, losses and gradients: of some sequences of five tokens, and of all."""
    number, k, length = 12, 4, 5

    def compute(logits, x, g) -> list[torch.Tensor]:
        logits, x = logits.clone().requires_grad_(), x.clone().requires_grad_()
        routing = moe.route(
            logits, k, True, score=score, scale=2.5, groups=4, groups_per_token=2, exact=True
        )
        order = moe.sort(routing.experts, number)
        # experts multiply a row by a number
        factor = torch.linspace(0.5, 2, number).repeat_interleave(order.counts)[:, None]
        rows = moe.spread(x, order, exact=True) * factor.to(dtype)
        y = moe.combine(rows, routing.weights, order, exact=True)
        batch = len(x) // length
        counts = moe.sequence_counts(routing.experts, batch, number)
        losses = moe.balance_losses(routing.probabilities, counts, length, k)
        losses = losses + moe.z_losses(logits, batch, length)
        grads = torch.autograd.grad((y, losses.sum()), (logits, x), (g, torch.ones(())))
        return [t.detach() for t in (routing.weights, y, losses.repeat_interleave(length), *grads)]

    seeded = torch.Generator().manual_seed(0)
    logits = torch.randn(8 * length, number, generator=seeded)
    x, g = (torch.randn(8 * length, 19, generator=seeded).to(dtype) for _ in range(2))
    whole = compute(logits, x, g)
    for first, last in ((0, 1), (3, 4), (2, 5), (1, 8)):
        some = slice(first * length, last * length)
        for part, full in zip(compute(logits[some], x[some], g[some]), whole, strict=True):
            assert torch.equal(part, full[some])
