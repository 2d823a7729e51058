"""One query of each text to keys in pages, against the definition in float64, text by text."""

from dataclasses import replace

import pytest
import torch

from dolmen.ops.attention import decode, reference
from dolmen.ops.attention.reference import CASES, SCORES

LENGTHS = (1, 7, 8, 9, 40, 95)
SIZE = 8
KNOWN = {name: case for name, case in (CASES | SCORES).items() if case.documents is None}
KNOWN["all at once"] = replace(SCORES["all at once"], documents=None)
TYPES = pytest.mark.parametrize(
    "dtype, tolerance",  # as in test_attention.py
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)],
    ids=["64", "32", "16"],
)


def laid(texts, strange: float = 7.0):
    """k and v [length, kv_heads, size] of each text -> pools whose pages are shuffled, some of them
    nobody's, and what they hold. What is in no text is `strange`.
    """
    counts = [-(-len(k) // SIZE) for k, _ in texts]
    free = torch.randperm(sum(counts) + 5, generator=torch.Generator().manual_seed(0)).tolist()
    pools = [
        torch.full((len(free), t.shape[1], SIZE, t.shape[2]), strange, dtype=t.dtype)
        for t in texts[0]
    ]
    owner = torch.zeros(len(free), dtype=torch.int64)
    back = torch.full((len(free), SIZE), -1)
    for i, (text, count) in enumerate(zip(texts, counts, strict=True)):
        for n in range(count):
            page, tokens = free.pop(), slice(n * SIZE, (n + 1) * SIZE)
            owner[page] = i
            back[page] = len(text[0]) - 1 - n * SIZE - torch.arange(SIZE)
            for pool, t in zip(pools, text, strict=True):
                part = t[tokens].transpose(0, 1)
                pool[page, :, : part.shape[1]] = part
    return *pools, decode.Pages(owner, back)


def alone(q, k, v, attend):
    """The last query [heads, size] of one text, whose pages are shuffled; asked by itself."""
    *pools, pages = laid([(k, v)])
    order = pages.back[:, 0].argsort(descending=True)[: -(-len(k) // SIZE)]
    for pool in pools:  # what an earlier sequence has left behind the last token
        pool[order[-1], :, len(k) - SIZE * (len(order) - 1) :] = torch.nan
    return decode.attend_pages(q[None], *pools, attend, decode.Alone(order, len(k)))[0]


def both(case, dtype, together=True, **changed):
    """Of each text the last query: of pages, and by definition."""
    case = replace(case, batch=len(LENGTHS), length=max(LENGTHS))
    q, k, v, _ = case.tensors(dtype, torch.device("cpu"))
    last = torch.stack([q[i, n - 1] for i, n in enumerate(LENGTHS)])
    texts, attend = [(k[i, :n], v[i, :n]) for i, n in enumerate(LENGTHS)], case.attend
    attend = attend._replace(**changed)
    if together:
        *pools, pages = laid(texts)
        got = decode.attend_pages(last, *pools, attend, pages)
    else:
        each = zip(last, texts, strict=True)
        got = torch.stack([alone(own, *text, attend) for own, text in each])
    want = [
        reference.definition(
            last[i, None, None].double(),
            k[i : i + 1, :n].double(),
            v[i : i + 1, :n].double(),
            case.attend,
        )[0, 0]
        for i, n in enumerate(LENGTHS)
    ]
    return got, torch.stack(want)


ROADS = pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])


@ROADS
@pytest.mark.parametrize("name", KNOWN)
@TYPES
def test_definition(name, dtype, tolerance, together):
    got, want = both(KNOWN[name], dtype, together)
    assert got.dtype == dtype
    for a, b in zip(got.double(), want, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("window in a chunk", dict(window=None)),
        ("soft cap", dict(soft_cap=None)),
        ("slopes", dict(slopes=None)),
        ("slopes of the last heads", dict(first_head=0)),
        ("another scale", dict(scale=None)),
    ],
)
@ROADS
def test_what_each_changes_is_seen(name, wrong, together):
    """Negative control."""
    got, want = both(KNOWN[name], torch.float64, together, **wrong)
    assert (got - want).norm() > 0.05 * want.norm()


def test_scores_that_differ_by_much_between_texts():
    """Each text has a maximum of its own: exp of scores 1000 apart is no number, or 0."""
    case = replace(CASES["grouped"], batch=2, length=20)
    q, k, v, _ = case.tensors(torch.float32, torch.device("cpu"))
    q[1] *= 1000
    k_pool, v_pool, pages = laid([(k[i], v[i]) for i in range(2)], strange=1e4)
    got = decode.attend_pages(q[:, -1], k_pool, v_pool, case.attend, pages)
    wide = [t.double() for t in (q[:, -1:], k, v)]
    want = reference.definition(*wide, case.attend)[:, 0]
    assert (got - want).norm() <= 1e-4 * want.norm()  # scores of 1e4 are rounded to 1e-3
