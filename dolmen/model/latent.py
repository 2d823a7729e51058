"""Multi-head latent attention over this rank's heads (DeepSeek-V2, 2405.04434, section 2.1).

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

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.model import tree
from dolmen.model.attention import Scores
from dolmen.model.component import Component, Given, LayerCache, Setting
from dolmen.model.layers import Column, Norm, Parameters, Row
from dolmen.model.positions import pairs
from dolmen.model.tree import Leaves, under
from dolmen.ops import rope
from dolmen.ops.attention import Attend, Documents
from dolmen.ops.attention.decode import Alone, Pages
from dolmen.parallel import tensor


class LatentAttention(Component):
    """x [batch * length / cp, hidden] I@tp (or S(0)@tp) -> the same. `cache`, where given, is this
    layer's latents and rope keys so far.
    """

    def __init__(self, attention: tree.LatentAttention, leaves: Leaves, setting: Setting):
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
    def attend(mixer: tree.LatentAttention) -> Attend:
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
