"""Attention over this rank's heads: grouped-query attention, and multi-head latent attention (MLA).

Grouped-query attention. tp shards query heads. With fewer key-value heads than tp ranks (or a
number tp does not divide) k and v are stored whole on every rank; a rank multiplies only the rows
of the heads that its queries use, and their gradient is a partial sum over tp.

Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1):

    x [tokens, hidden]     I@tp                    | S(0)@tp under sequence parallelism
      | q_a, kv_a, norms   the same on every rank  | of this rank's tokens
      v latents            I@tp                    | S(0)@tp
      | enter              copy                    | all-gather
      |                    (backward: all-reduce)  | (backward: reduce-scatter)
      | q_b, kv_b          this rank's heads
      | attention
      | o                  P@tp
      v leave

The latents cross tp on the way in, not the residual stream: in DeepSeek-V3 2,112 numbers per token
instead of 7,168. So the down projections are replicated, and their gradient is partial under
sequence parallelism only, as a norm's is.

The cache keeps the normed latent and the rotated rope key: kv_rank + rope size numbers per token
(576 in DeepSeek-V3, where 128 heads of keys and values would be 40,960). For one query per sequence
kv_b is absorbed into the query and into the output (`_attend_absorbed`), so that attention reads
the latent as one shared head; for several queries keys and values of all heads are expanded first,
as without a cache: one expansion serves all of them, and the scores are then over smaller
heads.
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
from dolmen.model.component import Branch, Component, LayerCache, LayerInputs, ModuleContext
from dolmen.model.layers import (
    ColumnParallelLinear,
    Norm,
    ParameterModule,
    RowParallelLinear,
    fuse,
)
from dolmen.model.positions import pairs
from dolmen.model.spec import ParamSpecs, select_prefix
from dolmen.ops import rope
from dolmen.ops.attention import BACKENDS, Attend, Documents, blockwise, decode, score_bias
from dolmen.ops.attention.decode import Alone, Pages
from dolmen.ops.attention.spec import Attended, Keys, Queries, Values
from dolmen.ops.elementwise import SCORES, Dropout
from dolmen.parallel import exact, tensor
from dolmen.parallel.qk_norm import rms_norm_over_width
from dolmen.parallel.tensor import Linear

Sinks = Float[Tensor, "*tokens heads"]


class CoreAttention(nn.Module):
    """Core attention: softmax(scale q k^T) v over this rank's heads, which selective recomputation
    repeats in backward (2205.05198). `kv_head_of_query`: the key-value head of each query head
    where groups are unequal; None: equal groups.
    """

    def __init__(self, attend: Attend, setting: ModuleContext, spread: Sequence[int] | None = None):
        """`attend`: mask, window, scale and other features of the scores. `spread`: the key-value
        head of each query head of this rank where groups are unequal; None: equal groups.
        """
        super().__init__()
        self.attend, self.kv_head_of_query = attend, spread
        # cached sequences are attended here; training goes through cp, which has the same backend
        self.backend = BACKENDS[setting.split.kernels.attention]
        self.cp, self.dropout = setting.split.cp, setting.training.dropout
        self.exact = setting.split.kernels.exact
        self.selective = setting.split.recompute.kind_of(setting.layer) == "selective"

    def forward(
        self, q: Queries, k: Keys, v: Values, inputs: LayerInputs, sinks: Sinks | None = None
    ) -> Attended:
        """Return softmax(scale q k^T) v for this rank's tokens, [batch, length, heads, value size];
        recomputed in backward under selective recomputation. `sinks`: one learned score per head
        that weighs no value; with exact numerics one per token and head, all the same.
        """
        if self.selective:
            return recompute(self._sums, q, k, v, inputs, sinks)
        return self._sums(q, k, v, inputs, sinks)

    @profiling.record_function_range("attention")
    def _sums(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: LayerInputs, sinks: Tensor | None
    ) -> Tensor:
        """Return the attention output, with the mask of `inputs.documents` and, if `inputs.noise`
        is set, dropout of the probabilities, by context parallelism's ring or gather. k and v are
        first expanded to one head per query head where groups are unequal.
        """
        if self.kv_head_of_query is not None:
            k, v = (_per_query(t, self.kv_head_of_query, 2) for t in (k, v))
        # None without dropout
        noise, dropped = inputs.noise, None
        if noise is not None:
            # the mask is a function of layer, sequence, head, query and key, so that recomputation
            # repeats it
            dropped = Dropout(self.dropout, noise, noise.site(SCORES))
        attend = self.attend.with_documents(inputs.documents, dropped)._replace(sinks=sinks)
        if self.exact is not None and attend.documents is not None and dropped is None:
            # the keys that a block multiplies follow from the documents of all its sequences
            each = [(q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i in range(len(q))]
            return torch.cat(
                [self.cp.attention(*one, attend.sequence(i)) for i, one in enumerate(each)]
            )
        return self.cp.attention(q, k, v, attend)

    def attend_sequences(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        documents: Documents | None,
        sinks: Sinks | None = None,
    ) -> Attended:
        """Attend q, the new tokens of cached sequences of equal length, to all their keys and
        values [sequences, length, kv_heads, size]; `documents` has their prefixes. Runs on this
        rank alone: without context parallelism and without dropout.
        """
        if self.kv_head_of_query is not None:
            k, v = (_per_query(t, self.kv_head_of_query, 2) for t in (k, v))
        attend = self.attend.with_documents(documents)._replace(sinks=sinks)
        if self.exact is not None:
            return blockwise.cached_attention(q, k, v, attend, self.exact.tokens)
        return self.backend.attention(q, k, v, attend)

    def attend_paged(
        self,
        q: Float[Tensor, "sequences heads size"],
        k: Float[Tensor, "pages kv_heads page size"],
        v: Float[Tensor, "pages kv_heads page value_size"],
        pages: Pages | Alone,
        sinks: Sinks | None = None,
    ) -> Float[Tensor, "sequences heads value_size"]:
        """Attend the last token of each sequence (decode) to its keys and values in the paged KV
        cache; `pages` is the block table, or `Alone` for one sequence.
        """
        if self.kv_head_of_query is not None:
            k, v = (_per_query(t, self.kv_head_of_query, 1) for t in (k, v))
        return decode.attend_pages(q, k, v, self.attend._replace(sinks=sinks), pages)


def _per_query(x: Tensor, heads: Sequence[int], dim: int) -> Tensor:
    """Return x with one head per query head at `dim`: head i is a copy of x's head `heads[i]`. Made
    of views, because an index tensor would be copied to the GPU, and the host would wait.
    """
    return torch.cat([x.narrow(dim, head, 1) for head in heads], dim)


class Attention(Branch):
    """Grouped-query attention over this rank's heads: x [batch * length / cp, hidden] I@tp (or
    S(0)@tp) -> the same shape and placement. With a KV `cache`, new keys and values are appended to
    it and attention reads all cached ones.
    """

    def __init__(self, attention: spec.AttentionSpec, params: ParamSpecs, setting: ModuleContext):
        """Build the projections, norms and sinks of this rank's heads; `params`: their parameters,
        by names without the layer's prefix.
        """
        super().__init__()
        split, kernels = setting.split, setting.split.kernels
        self.tp = split.tp
        self.head_size = attention.head_size
        self.extra_key_dims = attention.head_sizes[0] - self.head_size
        size = self.tp.axis.size
        # k and v are replicated, and a rank uses some of their rows, where tp does not divide the
        # kv heads
        self.whole_kv = attention.kv_heads % size != 0
        # query heads of this rank; check_sharding has made sure that tp divides them
        self.heads = attention.heads // size
        # queries per key-value head, 1 for multi-head attention
        group = attention.heads // attention.kv_heads
        self.first_head = self.tp.axis.rank * self.heads
        # the key-value head of each of our queries
        used = [(self.first_head + i) // group for i in range(self.heads)]
        # contiguous: queries of a rank are neighbours, and so are their key-value heads
        self.kv_first, self.kv_heads = used[0], used[-1] - used[0] + 1
        equal = used == _equal_groups(used[0], self.kv_heads, self.heads)
        attend = self.attend(attention)._replace(first_head=self.first_head)
        # unequal groups, such as queries 2..4 of groups of 3: kernels cannot say them, so keys are
        # repeated
        self.scores = CoreAttention(attend, setting, None if equal else [u - used[0] for u in used])
        self.clip = attention.clip
        self.pairs = positions.pairs(attention.positions)
        # first row and number of rows of k and v that this rank multiplies
        first, rows = (n * self.head_size for n in (self.kv_first, self.kv_heads))
        # how a replicated or a sharded k yields the rows this rank multiplies by
        local_rows = partial(_rows, first=first, count=rows) if self.whole_kv else local
        self.q = ColumnParallelLinear(select_prefix(params, "q"))
        self.k, self.v = (
            ColumnParallelLinear(select_prefix(params, name), local_rows) for name in ("k", "v")
        )
        fuse(self.q, self.k, self.v)
        self.o = RowParallelLinear(select_prefix(params, "o"), self.tp)
        self.sinks = ParameterModule(select_prefix(params, "sinks")) if attention.sinks else None
        norm, self.norm_of = attention.qk_norm, attention.qk_norm_of
        sum_rows = None
        if kernels.exact is not None:
            sum_rows = (
                partial(exact.sum_heads, exact=kernels.exact, axis=self.tp.axis)
                if self.norm_of == "heads"
                else partial(exact.sum_sequences, exact=kernels.exact)
            )
        self.q_norm, self.k_norm = (
            None if norm is None else Norm(norm, select_prefix(params, name), kernels, sum_rows)
            for name in ("q_norm", "k_norm")
        )

    @staticmethod
    def attend(mixer: spec.AttentionSpec) -> Attend:
        """Return the kind of attention (causal or prefix mask, window, scale, soft cap, ALiBi
        slopes) over all heads of the model. A bidirectional mask is a prefix mask here.
        """
        slopes = positions.slopes(mixer.positions, mixer.heads)
        # to see both ways is a prefix of all: Decoder makes it one
        mask = "causal" if mixer.mask == "causal" else "prefix"
        attend = Attend(mixer.window, mixer.scale, mixer.soft_cap, slopes, mask=mask)
        return attend.fix_scale(mixer.head_size)

    def _local_kv_rows(self, p: Tensor) -> Tensor:
        """Return, of a parameter with rows per key-value head (a per-head norm), the rows of the
        heads that this rank's queries use.
        """
        return _rows(p, self.kv_first, self.kv_heads) if self.whole_kv else local(p)

    @property
    def columns(self) -> list[Linear]:
        """Column-parallel weights that multiply x: q, k, v, in this order."""
        return [self.q.linear(), self.k.linear(), self.v.linear()]

    @property
    def row(self) -> RowParallelLinear:
        """Output projection, which is row-parallel: it sums over tp."""
        return self.o

    def inner(
        self,
        products: Sequence[Float[Tensor, "tokens _"]],
        inputs: LayerInputs,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "tokens _"]:
        """Return the heads' attention outputs [tokens, heads * head_size] from the q, k, v
        `products`: norm, clipping, rope, Qwen's query scaling and Falcon's key bias are applied
        first.
        """
        q, k, v = (
            # [batch, length, heads, size]; with a cache batch is 1 and sequences follow one another
            y.view(inputs.batch, -1, y.shape[-1] // self.head_size, self.head_size)
            for y in products
        )
        # order of transformers: norm, clip, rope
        q, k = self._normalize_qk(q, k)
        if self.clip is not None:
            q, k, v = (t.clamp(-self.clip, self.clip) for t in (q, k, v))
        if inputs.cos is not None and inputs.sin is not None:
            q, k = rope.rotate_heads(q, k, inputs.cos, inputs.sin, *self.pairs)
        if inputs.growth is not None:
            # Qwen's log-n: logarithm of the position to the base of the trained length
            q = q * inputs.growth.to(q.dtype)
        if inputs.steps is not None:
            # biases are computed for all heads, and this rank has some of them
            steps = inputs.steps.narrow(2, self.first_head, self.heads)
            # Falcon's ALiBi as 8 extra dims of q and k, so that any kernel computes it
            q, k = score_bias.append_key_bias(q, k, steps, self.extra_key_dims)
        sinks = None if self.sinks is None else local(self.sinks.weight)
        if sinks is not None and self.tp.exact is not None:
            sinks = exact.expand_tokens(sinks, len(q), q.shape[1], self.tp.exact)
        if cache is None:
            y = self.scores(q, k, v, inputs, sinks)
        else:
            # which of the two runs is decided by the cache: one new token per sequence, or several
            attend_paged, attend_sequences = (
                partial(road, sinks=sinks)
                for road in (self.scores.attend_paged, self.scores.attend_sequences)
            )
            y = cache.attend(q, (k, v), attend_paged, attend_sequences)
        return y.reshape(-1, self.heads * self.head_size)

    def _normalize_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k after their norms: per head with shared weights, per head with own
        weights, or over the width of all heads (with a sum over tp); unchanged without norms.
        """
        if self.q_norm is None or self.k_norm is None:
            return q, k
        if self.norm_of == "heads":
            return self.q_norm(q), self.k_norm(k)
        if self.norm_of == "each head":
            return self.q_norm(q), self.k_norm(k, self._local_kv_rows)
        # "width": mean square over all heads of all ranks of tp, one sum of 2 numbers per token
        weights = local(self.q_norm.weight), local(self.k_norm.weight)
        return rms_norm_over_width(q, k, *weights, self.q_norm.eps, self.tp)


def _rows(p: Tensor, first: int, count: int) -> Tensor:
    """Return rows `first` to `first + count` of this rank's part of a parameter."""
    return local(p).narrow(0, first, count)


def _equal_groups(first: int, kv_heads: int, heads: int) -> list[int]:
    """Return the key-value head of each of `heads` query heads if all `kv_heads` key-value heads,
    numbered from `first`, served equally many, as grouped attention assumes; an empty list if
    kv_heads does not divide heads.
    """
    return (
        [first + i // -(-heads // kv_heads) for i in range(heads)] if heads % kv_heads == 0 else []
    )


class LatentAttention(Component):
    """Multi-head latent attention: x [batch * length / cp, hidden] I@tp (or S(0)@tp) -> the same
    shape and placement. With a KV `cache`, the latents and rope keys of new tokens are appended to
    it.
    """

    def __init__(
        self, attention: spec.LatentAttentionSpec, params: ParamSpecs, setting: ModuleContext
    ):
        """Build the projections and norms of this rank's heads; `params`: their parameters, by
        names without the layer's prefix.
        """
        super().__init__()
        split, kernels = setting.split, setting.split.kernels
        self.tp, self.spec = split.tp, attention
        self.heads = attention.heads // self.tp.axis.size
        first_head = self.tp.axis.rank * self.heads
        self.scores = CoreAttention(self.attend(attention)._replace(first_head=first_head), setting)
        # V2-Lite: queries have no latent
        if attention.q_rank is None:
            self.q = ColumnParallelLinear(select_prefix(params, "q"))
        else:
            self.q_a = ParameterModule(select_prefix(params, "q_a"))
            self.q_a_norm = Norm(attention.norm, select_prefix(params, "q_a_norm"), kernels)
            self.q_b = ColumnParallelLinear(select_prefix(params, "q_b"))
        self.kv_a = ParameterModule(select_prefix(params, "kv_a"))
        self.kv_a_norm = Norm(attention.norm, select_prefix(params, "kv_a_norm"), kernels)
        self.kv_b = ColumnParallelLinear(select_prefix(params, "kv_b"))
        self.o = RowParallelLinear(select_prefix(params, "o"), self.tp)

    @staticmethod
    def attend(mixer: spec.LatentAttentionSpec) -> Attend:
        """Return the kind of attention of this mixer, over all heads: causal, with the spec's
        softmax scale.
        """
        return Attend(scale=mixer.scale)

    def forward(
        self, x: Float[Tensor, "here hidden"], inputs: LayerInputs, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        """Return the mixer's output for x. Without `cache` keys and values of all heads are
        expanded from the latents; with one, latent and rope key are cached, and `cache` chooses
        absorbed or expanded attention.
        """
        q = self._queries(x, inputs)
        # [tokens, kv_rank + rope size]: latent and rope key by one product
        down = self._down(x, self.kv_a)
        latent, key = down.split((self.spec.kv_rank, self.spec.positions.size), -1)
        # the cache keeps the normed latent: kv_rank + rope numbers per token instead of all heads
        latent = self.kv_a_norm(latent)
        # one rope key for all heads; under sequence parallelism gathered before it is rotated
        whole = self.tp.exact is not None
        key = self.tp.gather_replicated(key) if whole else self.tp.enter(key)
        key = key.view(inputs.batch, -1, 1, self.spec.positions.size)
        key = self._apply_rope(key, inputs)
        if cache is None:
            (kv,) = self._column_product(latent, self.kv_b)
            # kv_b enters tp here (columns), with the latent as its input
            y = self.scores(q, *self._expand_kv(kv, key), inputs)
        else:
            latent = self.tp.enter(latent).view(inputs.batch, -1, 1, self.spec.kv_rank)
            # cached as one head of [latent | rope key]
            cached = torch.cat((latent, key), -1)
            y = cache.attend(q, (cached,), self._attend_absorbed, self._attend_sequences)
        return self.o(y.reshape(-1, self.heads * self.spec.value_size))

    def _down(self, x: Tensor, linear: ParameterModule) -> Tensor:
        """Multiply this rank's tokens of x by a down projection (q_a or kv_a), which every tp rank
        stores whole; nothing is communicated.
        """
        return tensor.products(x, [linear.linear()], self.tp)[0]

    def _column_product(self, x: Tensor, linear: ColumnParallelLinear) -> tuple[Tensor, ...]:
        """Multiply x by one column-parallel weight, entering tensor parallelism (copy, or
        all-gather of tokens under sequence parallelism); returns a tuple of one product.
        """
        return tensor.columns(x, [linear.linear()], self.tp)

    def _queries(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Return this rank's queries [batch, length, heads, nope + rope size], the rope part
        rotated; through the low-rank latent q_a, q_b if the spec has a q_rank.
        """
        if self.spec.q_rank is None:
            (q,) = self._column_product(x, self.q)
        else:
            (q,) = self._column_product(self.q_a_norm(self._down(x, self.q_a)), self.q_b)
        q = q.view(inputs.batch, -1, self.heads, self.spec.head_size)
        nope, turned = q.split((self.spec.nope_size, self.spec.positions.size), -1)
        return torch.cat((nope, self._apply_rope(turned, inputs)), -1)

    def _apply_rope(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Rotate x [batch, length, heads, rope size] by its tokens' positions."""
        assert inputs.cos is not None and inputs.sin is not None
        return rope.rotate(x, inputs.cos, inputs.sin, *pairs(self.spec.positions))

    def _expand_kv(self, kv: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [batch, length, heads, nope + rope] and values [batch, length, heads, value]
        of this rank's heads from kv, the output of kv_b [tokens, heads * (nope + value)], and the
        shared rope key [batch, length, 1, rope].
        """
        # rows of kv_b are, head by head, nope and then value
        kv = kv.view(*key.shape[:2], self.heads, self.spec.nope_size + self.spec.value_size)
        nope, v = kv.split((self.spec.nope_size, self.spec.value_size), -1)
        if self.tp.exact is None:
            keys = key.expand(-1, -1, self.heads, -1)
        else:
            keys = exact.expand_heads(key, self.heads, self.tp.exact, self.tp.axis)
        return torch.cat((nope, keys), -1), v

    def _attend_sequences(self, q: Tensor, cached: Tensor, documents: Documents | None) -> Tensor:
        """Attend q, the new tokens of cached sequences of equal length, to `cached` [sequences,
        length, 1, latent + rope]: keys and values are expanded from the cached latents.
        """
        latent, key = cached.split((self.spec.kv_rank, self.spec.positions.size), -1)
        # latents are replicated over tp, so kv_b multiplies them without communication
        flat = latent.reshape(-1, self.spec.kv_rank)
        (kv,) = tensor.products(flat, [self.kv_b.linear()], self.tp)
        return self.scores.attend_sequences(q, *self._expand_kv(kv, key), documents)

    def _attend_absorbed(self, q: Tensor, cached: Tensor, pages: Pages | Alone) -> Tensor:
        """Attend the last token of each sequence, q [sequences, heads, nope + rope], to the cached
        latents, with kv_b absorbed into query and output: q W_k c = (q W_k) c, and sum p (W_v c) =
        W_v (sum p c). So attention has a single key head [latent | rope key] with the latent as its
        value. `cached` [pages, 1, page, latent + rope] -> [sequences, heads, value].
        """
        # [heads, nope + value, kv_rank]: rows of W_k and then of W_v of each head
        weight = self.kv_b.linear().merge(q.dtype).view(self.heads, -1, self.spec.kv_rank)
        # W_k and W_v [heads, nope or value, kv_rank]
        of_k, of_v = weight.split((self.spec.nope_size, self.spec.value_size), 1)
        nope, turned = q.split((self.spec.nope_size, self.spec.positions.size), -1)
        q = torch.cat((torch.einsum("thn,hnr->thr", nope, of_k), turned), -1)
        # values are the first kv_rank numbers of the keys: a view, so nothing is stored twice
        latent = cached[..., : self.spec.kv_rank]
        return torch.einsum(
            "thr,hvr->thv", self.scores.attend_paged(q, cached, latent, pages), of_v
        )
