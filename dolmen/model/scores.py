"""What every kind of attention ends in: the scores of this rank's queries and keys, and the sums of
values that they weigh. It is what selective recomputation computes again (2205.05198).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dolmen.core import ranges
from dolmen.model.component import Setting
from dolmen.model.given import Given
from dolmen.ops.attention import BACKENDS, Attend, Documents, decode
from dolmen.ops.attention.decode import Alone, Pages
from dolmen.ops.attention.spec import Attended, Keys, Queries, Values
from dolmen.ops.dropout import SCORES, Dropout
from dolmen.parallel.recompute import again

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
