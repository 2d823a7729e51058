"""Context parallelism with exact numerics, without processes: every cp has one order of tokens, and
attention and its gradients have the bits of one process. Each rank is given the keys that it would
gather.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dolmen.core.mesh import Axis
from dolmen.core.reduction import tree_sum, widen
from dolmen.ops import invariant
from dolmen.ops.attention import Attend, Documents, blockwise
from dolmen.ops.elementwise import Dropout, Noise
from dolmen.parallel.context import ContextParallel

LIMIT, SEQUENCES, HEADS, KV_HEADS, SIZE = 4, 2, 4, 2, 12
ONE = ContextParallel(Axis("cp"), limit=LIMIT)


@dataclass(frozen=True)
class GivenKeys(ContextParallel):
    """A rank that is given the keys and values of all."""

    keys: tuple[Tensor, ...] = ()

    def gather_keys(self, k, v):
        return self.keys


def tensors(length: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output, in the order of the sequence."""
    seeded = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(SEQUENCES, length, n, SIZE, generator=seeded).to(dtype) for n in heads]


def dropped(first: int, number: int) -> Dropout:
    """Dropout of so many sequences, of which `first` is the first one's number."""
    return Dropout(0.2, Noise(torch.tensor(5), torch.arange(first, first + number)), 3)


def documents(length: int) -> Documents:
    """The first sequence is cut in the middle of its last chunk but one; the second is whole."""
    starts, begin = torch.zeros(SEQUENCES, length, dtype=torch.int64), length - length // 6
    starts[0, begin:] = begin
    return Documents.from_starts(starts)


ATTENDS = {
    "plain": Attend(),
    "window and cap": Attend(window=7, soft_cap=3.0),
    "ALiBi": Attend(slopes=(0.5, 0.25, 0.125, 0.0625)),
    "documents": Attend(),
    "dropout": Attend(window=9),
}


def attend_of(name: str, cp: ContextParallel, sequence: int, length: int) -> Attend:
    """The attention to a sequence by itself, on a rank."""
    attend = ATTENDS[name].fix_scale(SIZE)
    if name == "dropout":
        return attend._replace(dropout=dropped(sequence, 1))
    if name == "documents":
        return attend.with_documents(cp.documents(documents(length))).sequence(sequence)
    return attend


def attend_alone(name: str, dtype: torch.dtype, length: int) -> list[Tensor]:
    """The output and the gradients of q, k and v of one process, in the order in which it has
    tokens; of all sequences at once where none has documents.
    """
    *inputs, g = (ONE.split(t, 1) for t in tensors(length, dtype))
    q, k, v = (t.requires_grad_() for t in inputs)
    if name == "documents":
        parts = [
            ONE.attention(*(t[i : i + 1] for t in (q, k, v)), attend_of(name, ONE, i, length))
            for i in range(SEQUENCES)
        ]
        y = torch.cat(parts)
    else:
        attend = ATTENDS[name].fix_scale(SIZE)
        if name == "dropout":
            attend = attend._replace(dropout=dropped(0, SEQUENCES))
        y = ONE.attention(q, k, v, attend)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), g)]


def attend_on_ranks(name: str, dtype: torch.dtype, length: int, size: int) -> list[Tensor]:
    """The same of ranks, a sequence at a time, whose gradients of keys are added by a tree."""
    found = []
    for i in range(SEQUENCES):
        q, k, v, g = (t[i : i + 1] for t in tensors(length, dtype))
        parts = []
        for rank in range(size):
            keys = tuple(widen(t).detach().requires_grad_() for t in (k, v))
            cp = GivenKeys(Axis("cp", size, rank), "gather", limit=LIMIT, keys=keys)
            here = cp.split(q, 1).requires_grad_()
            y = cp.attention(here, k, v, attend_of(name, cp, i, length))
            parts.append((y.detach(), *torch.autograd.grad(y, (here, *keys), cp.split(g, 1))))
        y, dq, dk, dv = zip(*parts, strict=True)
        dkv = [ONE.split(tree_sum(torch.stack(t)).to(dtype), 1) for t in (dk, dv)]
        found.append([torch.cat(y, 1), torch.cat(dq, 1), *dkv])
    return [torch.cat(rows) for rows in zip(*found, strict=True)]


def differences(name: str, dtype: torch.dtype, length: int, size: int) -> list[str]:
    """Which of the output and the gradients differ in a bit."""
    pairs = zip(
        ("y", "dq", "dk", "dv"),
        attend_on_ranks(name, dtype, length, size),
        attend_alone(name, dtype, length),
        strict=True,
    )
    return [which for which, a, b in pairs if not torch.equal(a, b)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ATTENDS)
def test_attention_has_the_bits_of_one_process(name, size):
    """In chunks of 3 tokens, and of 80, which are two blocks where a document ends in them."""
    for dtype in (torch.float32, torch.bfloat16):
        for length in (24, 640):
            assert differences(name, dtype, length, size) == [], (dtype, length)


def test_gradients_added_in_the_order_of_autograd_are_seen(monkeypatch):
    monkeypatch.setattr(invariant, "copies", lambda x, number: (x,) * number)
    assert differences("plain", torch.float32, 640, 2) == ["dk", "dv"]


def test_gradients_rounded_before_ranks_add_them_are_seen(monkeypatch):
    monkeypatch.setattr("dolmen.parallel.context.widen", lambda x: x)
    monkeypatch.setattr(f"{__name__}.widen", lambda x: x)
    assert differences("plain", torch.bfloat16, 640, 4) == ["dk", "dv"]


@pytest.mark.parametrize("name", ATTENDS)
def test_attention_is_that_of_whole_sequences(name):
    """In float64, against no chunks."""
    length, whole = 48, ContextParallel(Axis("cp"))
    natural = ONE.indices(length, torch.device("cpu")).argsort()
    for i in range(SEQUENCES):
        q, k, v, _ = (t[i : i + 1] for t in tensors(length, torch.float64))
        want = whole.attention(q, k, v, attend_of(name, whole, i, length))
        cut = (ONE.split(t, 1) for t in (q, k, v))
        got = ONE.attention(*cut, attend_of(name, ONE, i, length))[:, natural]
        assert torch.allclose(got, want, rtol=0, atol=1e-13)
    if name == "plain":
        assert torch.equal(want, blockwise.attention(q, k, v, ATTENDS[name].fix_scale(SIZE)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_size_has_one_order_of_tokens(size):
    ranks = [replace(ONE, axis=Axis("cp", size, rank)) for rank in range(size)]
    parts = [cp.indices(24, torch.device("cpu")) for cp in ranks]
    pairs = [(0, 7), (1, 6), (2, 5), (3, 4)]
    want = [chunk * 3 + i for pair in pairs for chunk in pair for i in range(3)]
    assert torch.cat(parts).tolist() == want
    # each rank has as many pairs of a query and a key
    assert len({int((part + 1).sum()) for part in parts}) == 1


def test_gathered_keys_are_in_the_order_of_the_sequence():
    _, k, v, _ = tensors(24, torch.float32)
    found = ONE.gather_keys(ONE.split(k, 1), ONE.split(v, 1))
    assert torch.equal(found[0], k) and torch.equal(found[1], v)


def test_an_indivisible_length_is_refused():
    refusal = r"90 tokens is not divisible by 2 x train.exact.cp \(8\): use .* --train.exact.cp"
    with pytest.raises(ValueError, match=refusal):
        ONE.split(torch.zeros(2, 90), 1)
