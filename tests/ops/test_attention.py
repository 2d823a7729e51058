"""Attention against the definition in float64: values, gradients, grouped heads, windows, caches; both backends."""

import pytest
import torch
import torch.nn.functional as F

from dolmen.ops import attention as ops

CASES = [  # queries, keys, heads, kv_heads, window
    (70, 70, 4, 4, None),                                  # more than one block
    (150, 150, 4, 2, None),                                # grouped
    (150, 150, 4, 1, 40),                                  # a window inside a block, and blocks that begin after key 0
    (100, 170, 6, 2, None),                                # a cache
    (100, 170, 4, 2, 80),
    (1, 33, 4, 2, None),                                   # one step of decoding
    (1, 33, 4, 2, 10),
    (5, 5, 2, 2, 100),                                     # a window longer than the text
]


def tensors(queries, keys, heads, kv_heads, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, h, 16, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
            for n, h in ((queries, heads), (keys, kv_heads), (keys, kv_heads))]


def definition(q, k, v, window):
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
    back = torch.arange(k.shape[1])[-q.shape[1]:, None] - torch.arange(k.shape[1])      # tokens from a query back to a key
    s = s.masked_fill((back < 0) | (back >= (window or k.shape[1])), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)


def run(fn, inputs):
    out = fn(*inputs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


@pytest.mark.parametrize("case", CASES, ids=str)
# float64 differs by the order of sums; bf16 rounds scores, probabilities and results to 8 bits (2^-9 each), and with errors of
# independent sign the norm of the difference stays below 1 %
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["64", "32", "16"])
def test_definition(case, dtype, tolerance):
    *sizes, window = case
    inputs = tensors(*sizes, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    for got, want in zip(run(lambda *t: ops.attention(*t, window), inputs), run(lambda *t: definition(*t, window), wide), strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() <= tolerance * want.norm()


def test_gradients_by_differences():
    inputs = [t[:1, :, :, :4].detach().requires_grad_() for t in tensors(67, 70, 2, 1)]
    torch.autograd.gradcheck(lambda *t: ops.attention(*t, 66), inputs, fast_mode=True)


def test_blocks_and_sdpa_agree():
    inputs = tensors(130, 130, 4, 2)
    sdpa = run(lambda q, k, v: F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                                                              enable_gqa=True).transpose(1, 2), inputs)
    for a, b in zip(run(ops.attention, inputs), sdpa, strict=True): torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_compiled_equals_eager():
    inputs = tensors(70, 90, 4, 2, torch.float32)
    compiled = run(torch.compile(lambda *t: ops.attention(*t, 66)), inputs)
    # fp32, sums in another order
    for a, b in zip(compiled, run(lambda *t: ops.attention(*t, 66), inputs), strict=True): torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_large_scores_do_not_overflow():
    q, k, v = tensors(80, 80, 2, 2, torch.float32)
    out = ops.attention(q * 1e4, k, v)                     # scores near 1e5: exp would overflow without the maximum
    assert out.isfinite().all()
