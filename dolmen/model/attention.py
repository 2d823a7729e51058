"""Attention over this rank's heads: projections, norms, rope, scores and the KV cache.

What every kind of attention ends in: the scores of this rank's queries and keys, and the sums of
values that they weigh. It is what selective recomputation computes again (2205.05198).

Attention over this rank's heads: norms and rope where its component says so, grouped queries,
and an optional cache.

With fewer key-value heads than tp ranks (or a count tp does not divide) k and v are stored whole on
every rank; a rank multiplies only the rows of the heads its queries use, and their gradient is
`Partial`.


Multi-head latent attention over this rank's heads (DeepSeek-V2, 2405.04434, section 2.1).

    x [tokens, hidden]     I@tp                    | S(0)@tp under sequence parallelism
      | q_a, kv_a, norms   alike on every rank     | of this rank's tokens
      v latents            I@tp                    | S(0)@tp
      | enter              copy                    | all-gather
      |                    (backward: all-reduce)  | (backward: reduce-scatter)
      | q_b, kv_b          this rank's heads
      | attention
      | o                  P@tp
      v leave

What crosses tp on the way in are the latents and not the residual stream: in DeepSeek-V3 2,112
numbers per token where that has 7,168. So what makes the latents is whole on every rank, and its
gradient partial under sequence parallelism alone, as a norm's is.

A cache keeps the latent of keys and values, after its norm, and the rope key, turned: kv_rank +
rope's size per token, whatever the number of heads. One query of a text attends to it as it is,
with kv_b multiplied into the query and out of the sums instead (`_absorbed`); for several the keys
and values of all heads are made of it first, as without a cache.

"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dolmen.core import profiling
from dolmen.core.autograd import recompute
from dolmen.core.state import local
from dolmen.model import positions, spec
from dolmen.model.component import Branch, Component, Given, LayerCache, Setting
from dolmen.model.layers import Column, Norm, Parameters, Row
from dolmen.model.positions import pairs
from dolmen.model.spec import Leaves, under
from dolmen.ops import rope
from dolmen.ops.attention import BACKENDS, Attend, Documents, decode, score_bias
from dolmen.ops.attention.decode import Alone, Pages
from dolmen.ops.attention.spec import Attended, Keys, Queries, Values
from dolmen.ops.elementwise import SCORES, Dropout
from dolmen.parallel import tensor
from dolmen.parallel.qk_norm import over_width
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
            return recompute(self._sums, q, k, v, given, sinks)
        return self._sums(q, k, v, given, sinks)

    @profiling.record_function_range("attention")
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

    def __init__(self, attention: spec.Attention, leaves: Leaves, setting: Setting):
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
    def attend(mixer: spec.Attention) -> Attend:
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


class LatentAttention(Component):
    """x [batch * length / cp, hidden] I@tp (or S(0)@tp) -> the same. `cache`, where given, is this
    layer's latents and rope keys so far.
    """

    def __init__(self, attention: spec.LatentAttention, leaves: Leaves, setting: Setting):
        super().__init__()
        split, kernels = setting.split, setting.split.kernels
        self.tp, self.form = split.tp, attention
        self.heads = attention.heads // self.tp.axis.size
        first_head = self.tp.axis.rank * self.heads
        self.scores = Scores(self.attend(attention)._replace(first_head=first_head), setting)
        if attention.q_rank is None:
            self.q = Column(under(leaves, "q"))
        else:
            self.q_a = Parameters(under(leaves, "q_a"))
            self.q_a_norm = Norm(attention.norm, under(leaves, "q_a_norm"), kernels)
            self.q_b = Column(under(leaves, "q_b"))
        self.kv_a = Parameters(under(leaves, "kv_a"))
        self.kv_a_norm = Norm(attention.norm, under(leaves, "kv_a_norm"), kernels)
        self.kv_b = Column(under(leaves, "kv_b"))
        self.o = Row(under(leaves, "o"), self.tp)

    @staticmethod
    def attend(mixer: spec.LatentAttention) -> Attend:
        return Attend(scale=mixer.scale)

    def forward(
        self, x: Float[Tensor, "here hidden"], given: Given, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        q = self._queries(x, given)
        down = self._down(x, self.kv_a)
        latent, key = down.split((self.form.kv_rank, self.form.positions.size), -1)
        latent = self.kv_a_norm(latent)
        key = self.tp.enter(key).view(given.batch, -1, 1, self.form.positions.size)
        key = self._turned(key, given)
        if cache is None:
            (kv,) = self._columns(latent, self.kv_b)
            y = self.scores(q, *self._expanded(kv, key), given)
        else:
            latent = self.tp.enter(latent).view(given.batch, -1, 1, self.form.kv_rank)
            kept = torch.cat((latent, key), -1)
            y = cache.attended(q, (kept,), self._absorbed, self._of_texts)
        return self.o(y.reshape(-1, self.heads * self.form.value_size))

    def _down(self, x: Tensor, linear: Parameters) -> Tensor:
        """The product of this rank's part of the residual stream with what is whole."""
        return tensor.products(x, [linear.linear()], self.tp)[0]

    def _columns(self, x: Tensor, linear: Column) -> tuple[Tensor, ...]:
        return tensor.columns(x, [linear.linear()], self.tp)

    def _queries(self, x: Tensor, given: Given) -> Tensor:
        """[batch, length, heads, nope + rope], turned."""
        if self.form.q_rank is None:
            (q,) = self._columns(x, self.q)
        else:
            (q,) = self._columns(self.q_a_norm(self._down(x, self.q_a)), self.q_b)
        q = q.view(given.batch, -1, self.heads, self.form.head_size)
        nope, turned = q.split((self.form.nope_size, self.form.positions.size), -1)
        return torch.cat((nope, self._turned(turned, given)), -1)

    def _turned(self, x: Tensor, given: Given) -> Tensor:
        assert given.cos is not None and given.sin is not None
        return rope.rotate(x, given.cos, given.sin, *pairs(self.form.positions))

    def _expanded(self, kv: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads: kv what kv_b makes, [tokens, heads * (nope + value)], key
        [batch, length, 1, rope] -> [batch, length, heads, nope + rope] and [..., value].
        """
        kv = kv.view(*key.shape[:2], self.heads, self.form.nope_size + self.form.value_size)
        nope, v = kv.split((self.form.nope_size, self.form.value_size), -1)
        return torch.cat((nope, key.expand(-1, -1, self.heads, -1)), -1), v

    def _of_texts(self, q: Tensor, kept: Tensor, documents: Documents | None) -> Tensor:
        """Of a cache, the last tokens of texts of equal length: kept [texts, length, 1, latent +
        rope].
        """
        latent, key = kept.split((self.form.kv_rank, self.form.positions.size), -1)
        flat = latent.reshape(-1, self.form.kv_rank)
        (kv,) = tensor.products(flat, [self.kv_b.linear()], self.tp)
        return self.scores.of_texts(q, *self._expanded(kv, key), documents)

    def _absorbed(self, q: Tensor, kept: Tensor, pages: Pages | Alone) -> Tensor:
        """Of a cache, the last token of each text, q [texts, heads, nope + rope], to one head of
        keys [latent | key] and values latent: q W_k c = (q W_k) c, and the sum of p (W_v c) = W_v
        (sum of p c). kept [pages, 1, page, latent + rope] -> [texts, heads, value].
        """
        weight = self.kv_b.linear().merged(q.dtype).view(self.heads, -1, self.form.kv_rank)
        of_k, of_v = weight.split((self.form.nope_size, self.form.value_size), 1)
        nope, turned = q.split((self.form.nope_size, self.form.positions.size), -1)
        q = torch.cat((torch.einsum("thn,hnr->thr", nope, of_k), turned), -1)
        latent = kept[..., : self.form.kv_rank]
        return torch.einsum("thr,hvr->thv", self.scores.of_pages(q, kept, latent, pages), of_v)
