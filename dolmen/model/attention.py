"""Attention over this rank's heads: projections, norms, rope, scores and the KV cache.

What every kind of attention ends in: the scores of this rank's queries and keys, and the sums of
values that they weigh. It is what selective recomputation computes again (2205.05198).

Attention over this rank's heads: norms and rope where its component says so, grouped queries,
and an optional cache.

With fewer key-value heads than tp ranks (or a count tp does not divide) k and v are stored whole on
every rank; a rank multiplies only the rows of the heads its queries use, and their gradient is
`Partial`.
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dolmen.core import ranges
from dolmen.core.autograd import again
from dolmen.core.state import local
from dolmen.model import positions, tree
from dolmen.model.branch import Branch
from dolmen.model.component import Given, LayerCache, Setting
from dolmen.model.layers import Column, Norm, Parameters, Row
from dolmen.model.tree import Leaves, under
from dolmen.ops import rope
from dolmen.ops.attention import BACKENDS, Attend, Documents, decode, score_bias
from dolmen.ops.attention.decode import Alone, Pages
from dolmen.ops.attention.spec import Attended, Keys, Queries, Values
from dolmen.ops.elementwise import SCORES, Dropout
from dolmen.parallel.norm import over_width
from dolmen.parallel.tensor import Linear

Sinks = Float[Tensor, " heads"]


class Scores(nn.Module):
    """Of heads that `attend` describes, of any microbatch. `spread`: the key-value head of each
    query, where groups of queries are not equal; None: they are.
    """

    def __init__(self, attend: Attend, setting: Setting, spread: Sequence[int] | None = None):
        super().__init__()
        self.attend, self.spread = attend, spread
        self.backend = BACKENDS[setting.split.kernels.attention]
        self.cp, self.dropout = setting.split.cp, setting.training.dropout
        self.selective = setting.split.recompute.of(setting.layer) == "selective"

    def forward(
        self, q: Queries, k: Keys, v: Values, given: Given, sinks: Sinks | None = None
    ) -> Attended:
        """softmax(scale q k^T) v."""
        if self.selective:
            return again(self._sums, q, k, v, given, sinks)
        return self._sums(q, k, v, given, sinks)

    @ranges.marked("attention")
    def _sums(self, q: Tensor, k: Tensor, v: Tensor, given: Given, sinks: Tensor | None) -> Tensor:
        if self.spread is not None:
            k, v = (_per_query(t, self.spread, 2) for t in (k, v))
        noise, dropped = given.noise, None
        if noise is not None:
            dropped = Dropout(self.dropout, noise, noise.site(SCORES))
        attend = self.attend.of(given.documents, dropped)._replace(sinks=sinks)
        return self.cp.attention(q, k, v, attend)

    def of_texts(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        documents: Documents | None,
        sinks: Sinks | None = None,
    ) -> Attended:
        """Of a cache: the last tokens of texts of equal length, each with all of its own keys. No
        axis splits these, and nothing falls out.
        """
        if self.spread is not None:
            k, v = (_per_query(t, self.spread, 2) for t in (k, v))
        return self.backend.attention(q, k, v, self.attend.of(documents)._replace(sinks=sinks))

    def of_pages(
        self,
        q: Float[Tensor, "texts heads size"],
        k: Float[Tensor, "pages kv_heads page size"],
        v: Float[Tensor, "pages kv_heads page value_size"],
        pages: Pages | Alone,
        sinks: Sinks | None = None,
    ) -> Float[Tensor, "texts heads value_size"]:
        """Of a cache: the last token of each text, whose keys lie in pages."""
        if self.spread is not None:
            k, v = (_per_query(t, self.spread, 1) for t in (k, v))
        return decode.one_query(q, k, v, self.attend._replace(sinks=sinks), pages)


def _per_query(x: Tensor, heads: Sequence[int], dim: int) -> Tensor:
    """x with its kv_heads at `dim` -> with queries' heads there: the key-value head of each query.
    By views, as an index would be copied to a GPU, which the host waits for.
    """
    return torch.cat([x.narrow(dim, head, 1) for head in heads], dim)


class Attention(Branch):
    """x [batch * length / cp, hidden] I@tp (or S(0)@tp) -> the same. `cache`, where given, is this
    layer's keys and values so far.
    """

    def __init__(self, attention: tree.Attention, leaves: Leaves, setting: Setting):
        super().__init__()
        split, kernels = setting.split, setting.split.kernels
        self.tp = split.tp
        self.head_size = attention.head_size
        self.carried = attention.head_sizes[0] - self.head_size
        size = self.tp.axis.size
        self.whole_kv = attention.kv_heads % size != 0
        self.heads = attention.heads // size
        group = attention.heads // attention.kv_heads
        self.first_head = self.tp.axis.rank * self.heads
        # the key-value head of each of our queries
        used = [(self.first_head + i) // group for i in range(self.heads)]
        self.kv_first, self.kv_heads = used[0], used[-1] - used[0] + 1
        equal = used == _grouped(used[0], self.kv_heads, self.heads)
        attend = self.attend(attention)._replace(first_head=self.first_head)
        self.scores = Scores(attend, setting, None if equal else [u - used[0] for u in used])
        self.clip = attention.clip
        self.pairs = positions.pairs(attention.positions)
        first, rows = (n * self.head_size for n in (self.kv_first, self.kv_heads))
        mine = partial(_rows, first=first, count=rows) if self.whole_kv else local
        self.q = Column(under(leaves, "q"))
        self.k, self.v = (Column(under(leaves, name), mine) for name in ("k", "v"))
        self.o = Row(under(leaves, "o"), self.tp)
        self.sinks = Parameters(under(leaves, "sinks")) if attention.sinks else None
        norm, self.norm_of = attention.qk_norm, attention.qk_norm_of
        self.q_norm = None if norm is None else Norm(norm, under(leaves, "q_norm"), kernels)
        self.k_norm = None if norm is None else Norm(norm, under(leaves, "k_norm"), kernels)

    @staticmethod
    def attend(mixer: tree.Attention) -> Attend:
        slopes = positions.slopes(mixer.positions, mixer.heads)
        # to see both ways is a prefix of all: Decoder makes it one
        mask = "causal" if mixer.mask == "causal" else "prefix"
        attend = Attend(mixer.window, mixer.scale, mixer.soft_cap, slopes, mask=mask)
        return attend.scaled(mixer.head_size)

    def _of_heads(self, p: Tensor) -> Tensor:
        """Of a parameter with a row for each key-value head that this rank stores."""
        return _rows(p, self.kv_first, self.kv_heads) if self.whole_kv else local(p)

    @property
    def columns(self) -> list[Linear]:
        return [self.q.linear(), self.k.linear(), self.v.linear()]

    @property
    def row(self) -> Row:
        return self.o

    def inner(
        self,
        products: Sequence[Float[Tensor, "tokens _"]],
        given: Given,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "tokens _"]:
        q, k, v = (
            y.view(given.batch, -1, y.shape[-1] // self.head_size, self.head_size) for y in products
        )
        q, k = self._normed(q, k)
        if self.clip is not None:
            q, k, v = (t.clamp(-self.clip, self.clip) for t in (q, k, v))
        if given.cos is not None and given.sin is not None:
            q, k = (rope.rotate(t, given.cos, given.sin, *self.pairs) for t in (q, k))
        if given.growth is not None:
            q = q * given.growth.to(q.dtype)
        if given.steps is not None:
            steps = given.steps.narrow(2, self.first_head, self.heads)
            q, k = score_bias.append_key_bias(q, k, steps, self.carried)
        sinks = None if self.sinks is None else local(self.sinks.weight)
        if cache is None:
            y = self.scores(q, k, v, given, sinks)
        else:
            of_pages, of_texts = (
                partial(road, sinks=sinks) for road in (self.scores.of_pages, self.scores.of_texts)
            )
            y = cache.attended(q, (k, v), of_pages, of_texts)
        return y.reshape(-1, self.heads * self.head_size)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        if self.norm_of == "heads":
            return self.q_norm(q), self.k_norm(k)
        if self.norm_of == "each head":
            return self.q_norm(q), self.k_norm(k, self._of_heads)
        weights = local(self.q_norm.weight), local(self.k_norm.weight)
        return over_width(q, k, *weights, self.q_norm.eps, self.tp.axis)


def _rows(p: Tensor, first: int, count: int) -> Tensor:
    """So many rows of what this rank has of a parameter."""
    return local(p).narrow(0, first, count)


def _grouped(first: int, kv_heads: int, heads: int) -> list[int]:
    """The key-value head of each query where each serves the same number of queries, as grouped
    attention assumes.
    """
    return (
        [first + i // -(-heads // kv_heads) for i in range(heads)] if heads % kv_heads == 0 else []
    )
