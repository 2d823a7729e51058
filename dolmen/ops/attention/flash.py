"""The backend of torch's FlashAttention operators (2307.08691): half precision on a GPU.

`F.scaled_dot_product_attention` takes windows and documents as a mask only, which no flash kernel
has, and keeps the log-sum-exp to itself. So the operators below it are called by name
(operators.py), on what a run of queries sees of a run of keys:

    whole sequences, a gathered chunk      plain, window: dense     documents: varlen
    ring, a chunk with its own keys        the same
    ring, a chunk with an earlier one's    a rectangle, or a band of one: dense, sliced by the
                                           host's numbers; of documents only the one that reaches
                                           over both is seen

Every query of every call sees a key: what the kernels leave where one sees none is not relied on.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dolmen.ops.attention.operators import (
    ALL,
    CAUSAL,
    Flash,
    FlashCall,
    backward,
    forward,
    no_state,
)
from dolmen.ops.attention.spec import (
    Attend,
    Attended,
    Documents,
    Keys,
    LogSum,
    Place,
    Queries,
    Run,
    Values,
)


def attention(
    q: Queries, k: Keys, v: Values, attend: Attend, later: int = 0, *, cudnn: bool = False
) -> Attended:
    """Return softmax(scores) v of each query over the keys that it may see, by FlashAttention's
    kernels, with autograd: `spec.AttentionBackend.attention` without soft cap, ALiBi and prefixes,
    so `later` is 0. `cudnn`: use cuDNN's operators where they fit.
    """
    size, run, call = v.shape[3], _run(attend.documents), _call(q, attend, cudnn)
    # multi-head latent attention: q and k of 192, v of 128
    q, k, v = _pad_heads(q, k, v)
    if run is None:
        return _narrow(Flash.apply(q, k, v, attend.sinks, *call), size)
    out = Flash.apply(
        q.flatten(0, 1), _visible_keys(k, run), _visible_keys(v, run), attend.sinks, *call
    )
    return _narrow(out.view(q.shape), size)


def partial(
    q: Queries, k: Keys, v: Values, at: Place, *, cudnn: bool = False
) -> tuple[Attended, LogSum]:
    """Return (out, log_sum) of attention from a run of queries to their own keys, or to earlier
    ones, as if there were no other keys, by FlashAttention's kernels, without autograd:
    `spec.AttentionBackend.partial`. out has q's dtype, log_sum fp32. `cudnn`: use cuDNN's operators
    where they fit.
    """
    size, call = v.shape[3], _call(q, at.attend, cudnn)
    q, k, v = _pad_heads(q, k, v)
    if at.q_start == at.k_start:
        out, log_sum = _local_forward(q, k, v, call)
    else:
        out, log_sum = _earlier(q, k, v, at, call)
    return _narrow(out, size), log_sum


def partial_backward(
    g: Attended,
    q: Queries,
    k: Keys,
    v: Values,
    full: tuple[Attended, LogSum],
    at: Place,
    *,
    cudnn: bool = False,
) -> tuple[Queries, Keys, Values]:
    """Return what a run of keys adds to (dq, dk, dv), by FlashAttention's kernels, from the
    output's gradient g and `full`, which is (out, log_sum) of attention to all keys:
    `spec.AttentionBackend.partial_backward`. dk and dv are fp32. `cudnn`: use cuDNN's operators
    where they fit.
    """
    (out, log_sum), sizes = full, (q.shape[3], k.shape[3], v.shape[3])
    call = _call(q, at.attend, cudnn)
    g, q, k, v, out = _pad_heads(g, q, k, v, out)
    if at.q_start == at.k_start:
        grads = _local_backward(g, q, k, v, (out, log_sum), call)
    else:
        grads = _earlier_backward(g, q, k, v, (out, log_sum), at, call)
    dq, dk, dv = (_narrow(d, size) for d, size in zip(grads, sizes, strict=True))
    return dq, dk, dv


def _earlier(q: Tensor, k: Tensor, v: Tensor, at: Place, full: FlashCall) -> tuple[Tensor, Tensor]:
    """Return out and log_sum of a run of queries against keys that all lie before it; 0 and -inf
    where a query sees none. `full`: the call to own keys, for its scale.
    """
    # what `_pieces` leaves out sees no key: out 0, log_sum -inf
    out = torch.zeros_like(q)
    log_sum = torch.full_like(q[..., 0], -torch.inf, dtype=_wide(q))
    for rows, mine, theirs, bounds in _pieces(len(q), q.shape[1], k.shape[1], at):
        call = FlashCall.from_run(None, bounds, full.scale, full.cudnn)
        out[rows, mine], piece, _ = forward(q[rows, mine], k[rows, theirs], v[rows, theirs], call)
        log_sum[rows, mine] = piece.transpose(1, 2)
    return out, log_sum


def _earlier_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    full: tuple[Tensor, Tensor],
    at: Place,
    call: FlashCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of a run of queries against keys that all lie before it, dk and dv in
    fp32. `full`: out and log_sum of attention to all keys; `call`: for its scale.
    """
    dq, (out, log_sum) = torch.zeros_like(q), full
    dk, dv = (torch.zeros_like(t, dtype=_wide(q)) for t in (k, v))
    for rows, mine, theirs, bounds in _pieces(len(q), q.shape[1], k.shape[1], at):
        dq[rows, mine], more_k, more_v = backward(
            g[rows, mine],
            q[rows, mine],
            k[rows, theirs],
            v[rows, theirs],
            out[rows, mine],
            log_sum[rows, mine].transpose(1, 2),
            no_state(q),
            FlashCall.from_run(None, bounds, call.scale, call.cudnn),
        )
        # several pieces may share a key, so they add up
        dk[rows, theirs] += more_k
        dv[rows, theirs] += more_v
    return dq, dk, dv


def _local_forward(q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
    """Return out and log_sum of consecutive queries against the keys of the same tokens, without
    autograd.
    """
    if call.queries is None:
        out, log_sum, _ = forward(q, k, v, call)
        return out, log_sum.transpose(1, 2)
    out, log_sum, _ = forward(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), call)
    # varlen's log_sum is [heads, tokens]
    return out.view(q.shape), log_sum.t().reshape(q.shape[:3])


def _local_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, full: tuple[Tensor, Tensor], call: FlashCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of a run of queries against its own keys, dk and dv in fp32. `full`: out
    and log_sum of attention to all keys.
    """
    out, log_sum = full
    if call.queries is None:
        # the kernel's layout is heads first, ours tokens first
        by_head = log_sum.transpose(1, 2)
        dq, dk, dv = backward(g, q, k, v, out, by_head, no_state(q), call)
    else:
        flat_g, flat_q, flat_k, flat_v, flat_out = (t.flatten(0, 1) for t in (g, q, k, v, out))
        by_head = log_sum.flatten(0, 1).t()
        grads = backward(flat_g, flat_q, flat_k, flat_v, flat_out, by_head, no_state(q), call)
        dq, dk, dv = (d.view(t.shape) for d, t in zip(grads, (q, k, v), strict=True))
    return dq, dk.to(_wide(q)), dv.to(_wide(q))


def _call(q: Tensor, attend: Attend, cudnn: bool) -> FlashCall:
    """Return the arguments of the kernels for queries and all earlier keys; q is not yet padded by
    `_pad_heads`, as the scale is that of its size. Asserts that there are no soft cap, slopes or
    prefixes.
    """
    assert attend.plain and attend.mask == "causal", (
        "flash attention supports no soft cap, no slopes and no prefixes (ops/kernels.py "
        "chooses other kernels for them)"
    )
    scale = attend.scale_of(q.shape[3])
    return FlashCall.from_run(_run(attend.documents), _causal(attend.window), scale, cudnn)


def _pad_heads(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors [batch, length, heads, size] with heads padded with zeros to the largest
    size, as the kernels take one size: zeros add nothing to a product, and come out as zeros.
    """
    size = max(t.shape[3] for t in tensors)
    return [t if t.shape[3] == size else F.pad(t, (0, size - t.shape[3])) for t in tensors]


def _narrow(t: Tensor, size: int) -> Tensor:
    """Return t cut to its first `size` numbers per head: without the padding of `_pad_heads`."""
    return t if t.shape[3] == size else t[..., :size]


def _wide(x: Tensor) -> torch.dtype:
    """Return fp32 as the dtype for sums of x, or x's own if it is wider (in tests)."""
    return torch.promote_types(x.dtype, torch.float32)


def _causal(window: int | None) -> tuple[int, int]:
    """Return how many keys a query sees before its own and after it, as the kernels take them: (-1
    for all, 0), or with a window, which counts the query itself, (window - 1, 0).
    """
    return CAUSAL if window is None else (window - 1, 0)


def _run(documents: Documents | None) -> Run | None:
    """Return the one run of queries of the documents, which the kernels need; None without
    documents. Raises ValueError where `documents` has not exactly one run.
    """
    if documents is None:
        return None
    if len(documents.runs) != 1:
        raise ValueError(
            "flash attention to documents needs one run of queries, but got "
            f"{len(documents.runs)}: compute them with ContextParallel.documents"
        )
    return documents.runs[0]


def _visible_keys(t: Tensor, run: Run) -> Tensor:
    """Return the keys (or values) that the run's segments see, sequence after sequence: t [batch,
    keys, ...] -> [keys of all segments, ...].
    """
    flat = t.flatten(0, 1)
    return flat if run.kept is None else flat.index_select(0, run.kept)


def _pieces(
    batch: int, queries: int, keys: int, at: Place
) -> Iterator[tuple[slice, slice, slice, tuple[int, int]]]:
    """Yield what queries see of a run of keys that ends before they begin, as dense calls:
    (sequences, their queries, their keys, (number of keys seen left, right of the diagonal)).
    Neighbouring sequences with equal pieces are one call; sequences whose queries see none are left
    out.
    """
    pieces, run, offset = [], _run(at.attend.documents), at.q_start - at.k_start
    for sequence in range(batch):
        # only a document that reaches over both runs is seen
        rows, first = (queries, 0) if run is None else run.rectangle(sequence, at.k_start, keys)
        # host numbers only: the device is not read
        pieces.append(_window_pieces(rows, first, keys, offset, at.attend.window))
    first = 0
    for end in range(1, batch + 1):
        if end == batch or pieces[end] != pieces[first]:
            for piece in pieces[first]:
                yield slice(first, end), *piece
            first = end


def _window_pieces(
    queries: int, first: int, keys: int, offset: int, window: int | None
) -> tuple[tuple[slice, slice, tuple[int, int]], ...]:
    """Return the parts of the rectangle of queries [0, queries) and keys [first, keys) that a
    window leaves: query i is at key i + offset, beyond the last, so it sees keys j >= i + oldest.
    No, one or two pieces, each of queries, keys, and the numbers of keys seen left and right of the
    diagonal.

        keys   first .. keys
        query 0      x x x x         keys before `oldest`, and queries that see nothing, are cut
        query 1      x x x x         off first
        query 2      . x x x         `left` keys before the diagonal, which ends in the last query
        query 3      . . x x         and the last key, is what a query sees first
    """
    oldest = -queries if window is None else offset - window + 1
    first, queries = max(first, oldest), min(queries, keys - oldest)
    if queries <= 0 or first >= keys:
        return ()
    theirs, full = slice(first, keys), first - oldest + 1  # the queries that see all of them
    # no query has lost a key to the window: a plain rectangle
    if full >= queries:
        return ((slice(0, queries), theirs, ALL),)
    band = (keys - queries - oldest, -1)
    if queries <= keys - first:
        return ((slice(0, queries), theirs, band),)
    # FlashAttention-2 takes "no bound on the right" for as many keys as there are, which is too few
    # where more queries than keys lie before the end of the diagonal
    return ((slice(0, full), theirs, ALL), (slice(full, queries), theirs, band))


class Cudnn:
    """The backend of cuDNN's attention on Hopper and Blackwell: as this module, but whole sequences
    and chunks without documents or a window are computed by cuDNN's operators (operators.py
    explains which calls fit).
    """

    @staticmethod
    def attention(q: Queries, k: Keys, v: Values, attend: Attend, later: int = 0) -> Attended:
        """Return softmax(scores) v of each query over the keys that it may see, with autograd: this
        module's `attention`, by cuDNN's operators where they fit, else FlashAttention's.
        """
        return attention(q, k, v, attend, later, cudnn=True)

    @staticmethod
    def partial(q: Queries, k: Keys, v: Values, at: Place) -> tuple[Attended, LogSum]:
        """Return (out, log_sum) of attention from a run of queries to a run of keys: this module's
        `partial`, by cuDNN's operators where they fit, else FlashAttention's.
        """
        return partial(q, k, v, at, cudnn=True)

    @staticmethod
    def partial_backward(
        g: Attended, q: Queries, k: Keys, v: Values, full: tuple[Attended, LogSum], at: Place
    ) -> tuple[Queries, Keys, Values]:
        """Return what a run of keys adds to (dq, dk, dv): this module's `partial_backward`, by
        cuDNN's operators where they fit, else FlashAttention's.
        """
        return partial_backward(g, q, k, v, full, at, cudnn=True)
