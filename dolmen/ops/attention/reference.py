"""The definition, every score at once: what tests and benchmarks hold the backends to.

for name, case in CASES.items():
    errors("flash", case, torch.bfloat16, torch.device("cuda"))
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Int64
from torch import Tensor

from dolmen.ops.attention import BACKENDS, Attend, spec
from dolmen.ops.attention.score_bias import alibi_slopes
from dolmen.ops.attention.spec import Attended, Keys, Place, Queries, Values
from dolmen.ops.attention_support import SUPPORT, AttentionName


def definition(q: Queries, k: Keys, v: Values, attend: Attend = Attend()) -> Attended:
    """Return softmax(scores) v as `spec.AttentionBackend.attention` defines it, with autograd, in
    the dtype of q: float64 where it is a reference. Forms every score, so memory is O(batch heads
    queries keys). It reads the fields of `attend` by itself, and calls none of the methods that
    backends do: what these get wrong, it does not.
    """
    group = q.shape[2] // k.shape[2]
    # grouped-query attention: each key head serves `group` query heads
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k)
    s = s / q.shape[3] ** 0.5 if attend.scale is None else s * attend.scale
    if attend.soft_cap is not None:
        s = attend.soft_cap * torch.tanh(s / attend.soft_cap)
    column = torch.arange(k.shape[1], device=q.device)
    back = column[-q.shape[1] :, None] - column  # tokens from a query back to a key
    if attend.slopes is not None:
        slopes = attend.slopes[attend.first_head :][: q.shape[2]]
        s = s - torch.tensor(slopes, dtype=s.dtype).to(s.device)[:, None, None] * back
    hidden = (back < 0).expand(len(q), *back.shape)
    if attend.documents is not None:
        if attend.mask == "prefix" and attend.documents.reach is not None:
            hidden = hidden & (column >= attend.documents.reach[..., None])
        hidden = hidden | (column < attend.documents.starts[..., None])
    hidden = hidden | (back >= (attend.window or k.shape[1]))
    s = s.masked_fill(hidden[:, None], -torch.inf)
    if attend.sinks is not None:  # one more key, which all see, and whose value is 0
        sinks = attend.sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)
        s, v = torch.cat((s, sinks), -1), F.pad(v, (0, 0, 0, 0, 0, 1))
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)


@dataclass(frozen=True)
class Case:
    """Shapes and attention of one comparison: sequences of `length` tokens, with or without
    documents.
    """

    length: int = 192
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int | None = None
    """None: head_dim."""
    attend: Attend = Attend()
    documents: tuple[tuple[int, ...], ...] | None = None
    """Lengths of the documents of each sequence."""
    batch: int = 2
    prefixes: tuple[tuple[int, ...], ...] | None = None
    """Length of each document's prefix."""

    @property
    def starts(self) -> Int64[Tensor, "batch length"] | None:
        """Index of the first token of each token's document, [batch, length] on the host; None
        without documents.
        """
        return (
            None
            if self.documents is None
            else self._add_to_starts(tuple((0,) * len(d) for d in self.documents))
        )

    @property
    def reach(self) -> Int64[Tensor, "batch length"] | None:
        """Index behind the last token of the prefix of each token's document, [batch, length] on
        the host; None without documents or prefixes.
        """
        if self.documents is None or self.prefixes is None:
            return None
        return self._add_to_starts(self.prefixes)

    @property
    def whole(self) -> spec.Documents | None:
        """The `Documents` of the unsplit sequences of this case, on the host; None without
        documents.
        """
        return None if self.starts is None else spec.Documents.from_starts(self.starts, self.reach)

    def _add_to_starts(self, more: tuple[tuple[int, ...], ...]) -> Int64[Tensor, "batch length"]:
        """Return, per token, its document's start plus the number that `more` has for that
        document.
        """
        assert self.documents is not None
        rows = [
            [sum(lengths[:i]) + extra[i] for i, n in enumerate(lengths) for _ in range(n)]
            for lengths, extra in zip(self.documents, more, strict=True)
        ]
        return torch.tensor(rows)

    def tensors(
        self, dtype: torch.dtype, device: torch.device
    ) -> tuple[Queries, Keys, Values, Attended]:
        """Return q, k, v and a gradient of the output, standard normal from a fixed seed, the same
        on every device.
        """
        # on the CPU, so that every device gets the same numbers
        g = torch.Generator().manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        value_dim = self.value_dim or self.head_dim
        sizes = (self.head_dim, self.head_dim, value_dim, value_dim)
        q, k, v, grad = (
            torch.randn(self.batch, self.length, h, size, generator=g).to(device, dtype)
            for h, size in zip(heads, sizes, strict=True)
        )
        return q, k, v, grad


# Lengths of documents: across the edges of chunks of 24 (cp 4) and 48 (cp 2), of one token, whole
TEXTS = ((50, 1, 141), (192,))
WHOLE = ((192,), (192,))
PREFIX = Attend(mask="prefix")
CASES = {
    "plain": Case(kv_heads=4),
    "grouped": Case(),
    "one key head": Case(kv_heads=1),
    "window in a chunk": Case(attend=Attend(window=9)),
    "window of chunks": Case(attend=Attend(window=70)),
    "window of two tokens": Case(attend=Attend(window=2)),
    "window longer than the text": Case(attend=Attend(window=500)),
    "documents": Case(documents=TEXTS),
    "equal documents": Case(documents=((100, 92), (100, 92))),
    "documents of a token": Case(documents=((1,) * 192, (191, 1))),
    "documents and window": Case(documents=TEXTS, attend=Attend(window=30)),
    "documents and a long window": Case(documents=TEXTS, attend=Attend(window=130)),
    "one sequence": Case(documents=((30, 12, 100, 50),), attend=Attend(window=64), batch=1),
    "another scale": Case(attend=Attend(scale=0.1)),
    "narrow values": Case(head_dim=24, value_dim=8, documents=TEXTS),
    "wide values": Case(head_dim=8, value_dim=24, attend=Attend(window=30)),
}


# What flash's kernels do not know. Prefixes across the edges of chunks, of no token and of all. A
# cap of 1.5 bends scores of standard deviation 1 by a quarter.
# The last of six slopes is 0.35, the others fall from 0.25 to 1/256
SCORES = {
    "soft cap": Case(attend=Attend(soft_cap=1.5)),
    "slopes": Case(kv_heads=4, attend=Attend(slopes=alibi_slopes(4))),
    "slopes of grouped heads": Case(heads=6, kv_heads=3, attend=Attend(slopes=alibi_slopes(6))),
    "slopes of the last heads": Case(attend=Attend(slopes=alibi_slopes(6), first_head=2)),
    "slopes in documents": Case(documents=TEXTS, attend=Attend(slopes=alibi_slopes(4), window=70)),
    "prefix": Case(documents=WHOLE, prefixes=((70,), (0,)), attend=PREFIX),
    "both ways": Case(documents=WHOLE, prefixes=((192,), (192,)), attend=PREFIX),
    "prefixes of documents": Case(documents=TEXTS, prefixes=((30, 1, 100), (97,)), attend=PREFIX),
    "prefix and window": Case(
        documents=TEXTS, prefixes=((50, 0, 90), (30,)), attend=PREFIX._replace(window=20)
    ),
    "prefixes that are not seen": Case(documents=TEXTS, prefixes=((30, 1, 100), (97,))),
    "all at once": Case(
        heads=6,
        head_dim=24,
        value_dim=16,
        documents=TEXTS,
        attend=Attend(100, scale=0.3, soft_cap=2.0, slopes=alibi_slopes(12), first_head=6),
    ),
}
KNOWN = dict.fromkeys(SUPPORT, CASES) | {"blocks": CASES | SCORES}
"""Cases that each backend supports."""


Road = Callable[[Tensor, Tensor, Tensor], Tensor]


def gradients(road: Road, q: Queries, k: Keys, v: Values, g: Attended) -> list[Tensor]:
    """Return out, dq, dk, dv of `road(q, k, v)`, a function that computes attention, by autograd, g
    being the output's gradient.
    """
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = road(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


def reference_gradients(case: Case, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return the exact out, dq, dk, dv of a case in float64, from inputs rounded to `dtype`
    first.
    """
    q, k, v, g = (t.double() for t in case.tensors(dtype, device))
    attend = _attend(case, 0, case.length, device)
    return gradients(lambda q, k, v: definition(q, k, v, attend), q, k, v, g)


def run_whole(
    backend: AttentionName, case: Case, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Return out, dq, dk, dv of a backend's `attention`, called once on the whole sequences of a
    case.
    """
    by, attend = BACKENDS[backend], _attend(case, 0, case.length, device)
    return gradients(lambda q, k, v: by.attention(q, k, v, attend), *case.tensors(dtype, device))


def run_gathered(
    backend: AttentionName, case: Case, dtype: torch.dtype, device: torch.device, chunks: int = 8
) -> list[Tensor]:
    """Return out, dq, dk, dv of a backend called once per chunk of queries, as context parallelism
    with gathered keys does: against all keys up to the chunk's end, or all keys where there are
    prefixes.
    """
    by, n = BACKENDS[backend], case.length // chunks
    attends = [(mine, _attend(case, mine.start, n, device)) for mine in _slices(case.length, n)]
    # a prefix may reach past the chunk, so all keys are given
    stops = [mine.stop if case.prefixes is None else case.length for mine, _ in attends]

    def road(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the outputs of all chunks of queries, concatenated."""
        return torch.cat(
            [
                by.attention(q[:, mine], k[:, :stop], v[:, :stop], attend, stop - mine.stop)
                for (mine, attend), stop in zip(attends, stops, strict=True)
            ],
            1,
        )

    return gradients(road, *case.tensors(dtype, device))


def run_ring(
    backend: AttentionName, case: Case, dtype: torch.dtype, device: torch.device, chunks: int = 8
) -> list[Tensor]:
    """Return out, dq, dk, dv of a backend called once per pair of query chunk and key chunk, as
    ring attention does, merged by their log-sums.
    """
    by, n = BACKENDS[backend], case.length // chunks
    q, k, v, g = case.tensors(dtype, device)
    out, dq, dk, dv = (torch.zeros_like(t, dtype=torch.float64) for t in (g, q, k, v))
    for mine in _slices(case.length, n):
        attend = _attend(case, mine.start, n, device, back=False)
        seen = mine.stop if case.prefixes is None else case.length
        place = [(theirs, Place(mine.start, theirs.start, attend)) for theirs in _slices(seen, n)]
        pieces = [by.partial(q[:, mine], k[:, t], v[:, t], at) for t, at in place]
        # merging in float64 adds no error of its own
        log_sum = torch.stack([part.double() for _, part in pieces]).logsumexp(0)
        for o, part in pieces:
            out[:, mine] += o.double() * (part - log_sum).exp()[..., None]
        final = out[:, mine].to(dtype), log_sum.to(pieces[0][1].dtype)
        for t, at in place:
            grads = by.partial_backward(g[:, mine], q[:, mine], k[:, t], v[:, t], final, at)
            for total, grad in zip((dq[:, mine], dk[:, t], dv[:, t]), grads, strict=True):
                # each pair adds its share: dq over key chunks, dk and dv over query chunks
                total += grad
    return [t.to(dtype) for t in (out, dq, dk, dv)]


ROADS = {"whole": run_whole, "gathered": run_gathered, "ring": run_ring}


def errors(
    backend: AttentionName,
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    road: str = "whole",
) -> dict[str, float]:
    """Return the relative error (norm of the difference from the definition over the definition's
    norm) of a backend's out, dq, dk and dv on a case; NaN where anything is. `road`: whole,
    gathered or ring, how the backend is called (ROADS).
    """
    got, want = ROADS[road](backend, case, dtype, device), reference_gradients(case, dtype, device)
    return {
        name: float((a.double() - b).norm() / b.norm())
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True)
    }


def _slices(length: int, n: int) -> Iterator[slice]:
    """Yield consecutive slices of n tokens that cover `length`; the last may end past it."""
    return (slice(i, i + n) for i in range(0, length, n))


def _attend(case: Case, first: int, length: int, device: torch.device, back: bool = True) -> Attend:
    """Return the attention of the queries [first, first + length) of a case on `device`, with the
    run that flash's kernels need. `back`: see `spec.run`.
    """
    run_whole = case.whole
    if run_whole is None:
        return case.attend
    run = spec.run(spec.begins(run_whole.host_starts), first, length, device, back)
    run_whole = replace(run_whole, runs=(run,))
    return case.attend.with_documents(
        run_whole.part(slice(first, first + length)).to_device(device)
    )
