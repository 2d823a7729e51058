"""Attention against the definition in float64: values, gradients, grouped heads, windows, caches,
documents; both backends, and the form that attends to one run of keys at a time.
"""

import pytest
import torch
import torch.nn.functional as F

from dolmen.ops import elementwise
from dolmen.ops.attention import Attend, Documents, blocks, dropout, operators
from dolmen.ops.attention import blockwise as ops
from dolmen.ops.attention.reference import definition
from dolmen.ops.attention.spec import Place

CASES = [  # queries, keys, heads, kv_heads, window
    (70, 70, 4, 4, None),  # more than one block
    (150, 150, 4, 2, None),  # grouped
    (150, 150, 4, 1, 40),  # a window inside a block, and blocks that begin after key 0
    (100, 170, 6, 2, None),  # a cache
    (100, 170, 4, 2, 80),
    (1, 33, 4, 2, None),  # one step of decoding
    (1, 33, 4, 2, 10),
    (5, 5, 2, 2, 100),  # a window longer than the text
]


def tensors(queries, keys, heads, kv_heads, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, n, h, 16, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
        for n, h in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    ]


def documents(*sequences):
    """Starts [batch, length] of documents of these lengths, one list a sequence."""
    return torch.stack(
        [
            torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])
            for lengths in sequences
        ]
    )


def run(fn, inputs):
    out = fn(*inputs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


# float64 differs by the order of sums; bf16 rounds scores, probabilities and results to 8 bits
# (2^-9 each), and with errors of independent sign the norm of the difference stays below 1 %
TYPES = pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)],
    ids=["64", "32", "16"],
)


def close(got, want, dtype, tolerance):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("case", CASES, ids=str)
@TYPES
def test_definition(case, dtype, tolerance):
    *sizes, window = case
    inputs = tensors(*sizes, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    close(
        run(lambda *t: ops.attention(*t, Attend(window)), inputs),
        run(lambda *t: definition(*t, Attend(window)), wide),
        dtype,
        tolerance,
    )


DOCUMENTS = {  # queries, keys, heads, kv_heads, window, lengths of the documents of two sequences
    "documents": (
        150,
        150,
        4,
        2,
        None,
        [30, 1, 119],
        [128, 22],
    ),  # the last blocks see no key of the first document
    "window": (150, 150, 4, 2, 40, [30, 1, 119], [128, 22]),
    "cache": (70, 170, 4, 1, None, [120, 50], [90, 10, 70]),
    "step": (1, 33, 4, 2, None, [20, 13], [33]),
}


@pytest.mark.parametrize("case", DOCUMENTS)
@TYPES
def test_documents(case, dtype, tolerance):
    *sizes, window, first, second = DOCUMENTS[case]
    starts = documents(first, second)[:, -sizes[0] :]
    attend = Attend(window).with_documents(Documents.from_starts(starts))
    inputs = tensors(*sizes, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    close(
        run(lambda *t: ops.attention(*t, attend), inputs),
        run(lambda *t: definition(*t, attend), wide),
        dtype,
        tolerance,
    )


def test_a_document_is_as_if_alone():
    q, k, v = tensors(150, 150, 4, 2)
    together = ops.attention(
        q, k, v, Attend().with_documents(Documents.from_starts(documents([60, 90], [60, 90])))
    )
    alone = [
        ops.attention(*(t[:, part] for t in (q, k, v)), Attend())
        for part in (slice(0, 60), slice(60, 150))
    ]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-12, atol=1e-13)


def test_keys_of_other_documents_are_not_multiplied(monkeypatch):
    keys, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: keys.append(b.shape[2]) or bmm(a, b))
    q, k, v = (t.detach() for t in tensors(256, 256, 1, 1))
    ops.attention(
        q,
        k,
        v,
        Attend().with_documents(Documents.from_starts(documents([128, 128], [100, 28, 128]))),
    )
    # four blocks of 64 queries; the third and fourth begin at key 128
    assert keys[::2] == [64, 128, 64, 128]


@pytest.mark.parametrize(
    "window, starts",
    [
        (None, None),
        (50, None),
        (None, documents([70, 70, 60], [200])),
        (50, documents([70, 70, 60], [200])),
    ],
    ids=["plain", "window", "documents", "both"],
)
@TYPES
def test_runs_of_keys_merge_to_the_whole(window, starts, dtype, tolerance):
    """Queries 100 to 199 to keys in runs of 50, which some queries see nothing of: values,
    log-sums, and gradients of each run.
    """
    q, k, v = (t.detach() for t in tensors(100, 200, 4, 2, dtype))
    here = None if starts is None else Documents.from_starts(starts[:, 100:])
    attend = Attend(window).with_documents(here)
    runs = [(i, k[:, i : i + 50], v[:, i : i + 50]) for i in range(0, 200, 50)]
    pieces = [ops.partial(q, a, b, Place(100, i, attend)) for i, a, b in runs]
    for out, log_sum in pieces:
        assert (
            out.isfinite().all()
            and (out[log_sum.isinf()] == 0).all()
            and (log_sum.isinf() | log_sum.isfinite()).all()
        )
    log_sum = torch.stack([part for _, part in pieces]).logsumexp(0)
    out = sum(o * (part - log_sum).exp()[..., None] for o, part in pieces).to(dtype)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(dtype)
    grads = [
        ops.partial_backward(weight, q, a, b, (out, log_sum), Place(100, i, attend))
        for i, a, b in runs
    ]
    got = [
        out,
        sum(g[0].to(log_sum.dtype) for g in grads),
        torch.cat([g[1] for g in grads], 1),
        torch.cat([g[2] for g in grads], 1),
    ]
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    close(
        [t.to(dtype) for t in got],
        run(lambda *t: definition(*t, attend), wide),
        dtype,
        tolerance,
    )


def test_scores_at_once_do_not_grow_with_the_square(monkeypatch):
    """A block has fewer queries as keys grow, down to BLOCK."""
    sizes, bmm = [], torch.bmm
    monkeypatch.setattr(blocks, "SCORES", 2**14)
    monkeypatch.setattr(
        torch, "bmm", lambda a, b: sizes.append(a.shape[1] * b.shape[2]) or bmm(a, b)
    )
    for queries, most in ((2048, 64 * 2048), (4096, 64 * 4096)):
        sizes.clear()
        ops.attention(*(torch.zeros(1, queries, 1, 8) for _ in range(3)), Attend())
        assert max(sizes[::2]) == most


def test_gradients_by_differences():
    inputs = [t[:1, :, :, :4].detach().requires_grad_() for t in tensors(67, 70, 2, 1)]
    torch.autograd.gradcheck(lambda *t: ops.attention(*t, Attend(66)), inputs, fast_mode=True)


def test_blocks_and_sdpa_agree():
    inputs = tensors(130, 130, 4, 2)
    sdpa = run(
        lambda q, k, v: F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        ).transpose(1, 2),
        inputs,
    )
    for a, b in zip(run(lambda *t: ops.attention(*t, Attend()), inputs), sdpa, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.spawn
@pytest.mark.full  # torch.compile starts a C++ compiler per kernel: 25 s
@pytest.mark.parametrize("starts", [None, documents([30, 40], [70])], ids=["one", "documents"])
def test_compiled_equals_eager(starts):
    attend = Attend(66).with_documents(None if starts is None else Documents.from_starts(starts))
    inputs = tensors(70, 70 if starts is not None else 90, 4, 2, torch.float32)
    compiled = run(torch.compile(lambda *t: ops.attention(*t, attend), fullgraph=True), inputs)
    # fp32, sums in another order
    for a, b in zip(compiled, run(lambda *t: ops.attention(*t, attend), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "operator, unpacked",
    [
        (torch.ops.dolmen.attention_forward, blocks.Rule),
        (torch.ops.dolmen.attention_backward, blocks.Rule),
        (torch.ops.dolmen.flash_forward, operators.FlashCall),
        (torch.ops.dolmen.flash_backward, operators.FlashCall),
    ],
    ids=str,
)
def test_operators_are_declared_to_take_what_is_unpacked_for_them(operator, unpacked):
    """One after the other: two options of one type that change places are of no wrong type."""
    names = [argument.name for argument in operator.default._schema.arguments]
    assert tuple(names[-len(unpacked._fields) :]) == unpacked._fields


def test_large_scores_do_not_overflow():
    q, k, v = tensors(80, 80, 2, 2, torch.float32)
    out = ops.attention(
        q * 1e4, k, v, Attend()
    )  # scores near 1e5: exp would overflow without the maximum
    assert out.isfinite().all()


def test_gradient_with_dropped_probabilities():
    """Against differences in float64: a mask depends on places alone, so it stands still."""
    q, k, v = tensors(4, 6, 4, 2)
    noise = elementwise.Noise(torch.tensor(7), torch.arange(2))
    attend, rows = (
        Attend().with_documents(None, elementwise.Dropout(0.4, noise, 3)),
        torch.arange(2, 6),
    )
    assert torch.autograd.gradcheck(lambda *t: dropout.attention(*t, attend, rows), (q, k, v))
