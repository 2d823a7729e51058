"""The end of a decoder: the LM head, and the `End` that turns hidden vectors into a result.

What the head of a model that fills in masked tokens makes of the last hidden vectors before
they are multiplied (dolmen/model/spec/embedding_head.py: Transform). Every rank computes it of
its own tokens.

What stands at the end of a decoder: the head, which the model owns, and an `End` is given with
the last hidden vectors of a microbatch.

    hidden, I@tp or S(0)@tp, and S(0, zigzag)@cp -> an end -> what it makes of them

An end runs inside the model's forward, where ZeRO has gathered the head. Results per token are of
this rank of cp's part of each sequence, [sequences, here], and the same on all ranks of tp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from dolmen.core import collectives
from dolmen.model import spec
from dolmen.model.layers import Norm, Whole
from dolmen.model.spec import Leaves, Tree, under
from dolmen.model.split import Split
from dolmen.ops import loss
from dolmen.ops.elementwise import ACTIVATIONS
from dolmen.ops.kernels import Kernels
from dolmen.parallel import tensor
from dolmen.parallel.inference_linear import LaidOut
from dolmen.parallel.log_probabilities import (
    log_probabilities,
    log_probabilities_and_argmax,
    log_probabilities_and_entropy,
)
from dolmen.parallel.tensor import Linear, TensorParallel
from dolmen.parallel.vocabulary import linear_cross_entropy


class Transform(Whole):
    """norm(act(W x + b))."""

    def __init__(
        self, transform: spec.Transform, leaves: Leaves, tp: TensorParallel, kernels: Kernels
    ):
        super().__init__({name: leaf for name, leaf in leaves.items() if "." not in name}, tp)
        self.act = ACTIVATIONS[transform.activation]
        self.norm = Norm(transform.norm, under(leaves, "norm"), kernels)

    def forward(self, x: Float[Tensor, "here hidden"]) -> Float[Tensor, "here hidden"]:
        return self.norm(self.act(super().forward(x)))


@dataclass(frozen=True, eq=False)
class Head:
    """Of one microbatch. Numbers per token that an end gives it (labels, weights) are of whole
    sequences, the same on every rank.
    """

    tree: Tree
    split: Split
    weight: Tensor
    """[rows, hidden]: what this rank of tp holds of it, gathered over fsdp."""
    sequences: int
    """Of the microbatch."""
    compiled: bool = False
    bias: Tensor | None = None
    """[rows], as `weight` has them."""
    transform: Callable[[Tensor], Tensor] | None = None
    """Of hidden vectors, before they are multiplied."""
    pair: Callable[[Tensor], Tensor] | None = None
    """Of hidden vectors [_, hidden], the two logits [_, 2] of whether one text follows another."""
    laid_out: LaidOut | None = None
    """What multiplies by `weight` where no gradient is kept; None: torch as it is."""

    def here(self, per_token: Shaped[Tensor, "sequences length"]) -> Shaped[Tensor, "sequences _"]:
        """Of something known for all tokens (labels, weights), this rank of cp's part."""
        return self.split.cp.split(per_token, 1)

    def over_documents(
        self,
        per_token: Float[Tensor, "sequences _"],
        document: Int64[Tensor, "sequences length"],
    ) -> Float[Tensor, "sequences length"]:
        """The sum over all tokens of each document of a sequence, those of other ranks of cp among
        them: R@cp, as each goes on to compute the same; what comes of it is to be `shared`.
        `document`: which of its sequence's each token is of.
        """
        axis = self.split.cp.axis
        none = per_token.new_zeros(document.shape)
        found = none.scatter_add(1, self.here(document), per_token)
        return collectives.copy(collectives.all_reduce_(found, axis), axis)

    def whole(
        self, per_token: Float[Tensor, "sequences here"]
    ) -> Float[Tensor, "sequences length"]:
        """Of all tokens of each sequence, those of other ranks of cp among them; R@cp, as
        `over_sequence`.
        """
        axis = self.split.cp.axis
        if axis.size == 1:
            return per_token
        length = per_token.shape[1] * axis.size
        places = self.split.cp.indices(length, per_token.device)
        spread = per_token.new_zeros(len(per_token), length).index_copy(1, places, per_token)
        return collectives.copy(collectives.all_reduce_(spread, axis), axis)

    def shared(self, total: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """This rank's share of what all ranks of cp have computed alike: they are added up."""
        return total / self.split.cp.axis.size


class Logits(Head):
    """A row of the weight for each token of the vocabulary, S(0)@tp."""

    @cached_property
    def rows(self) -> Float[Tensor, "rows hidden"]:
        """What hidden vectors are multiplied by."""
        return F.normalize(self.weight) if self.tree.head.normalised else self.weight

    def made(self, hidden: Float[Tensor, "_ hidden"]) -> Float[Tensor, "_ hidden"]:
        """What is multiplied: hidden vectors, transformed, times what logits are to be multiplied
        by: they are fewer numbers.
        """
        hidden = hidden if self.transform is None else self.transform(hidden)
        scale = self.tree.head.scale
        return hidden if scale == 1 else hidden * scale

    def follows(self, hidden: Float[Tensor, "_ hidden"]) -> Float[Tensor, "sequences here"]:
        """Of each of this rank's tokens by how much the logit that the second text of its sequence
        follows the first (label 0, as in transformers) is over that of a text of elsewhere, in
        fp32 or wider.
        """
        if self.pair is None:
            raise ValueError(
                "the head does not say whether a text follows: give a model that does "
                "(BertForPreTraining)"
            )
        two = self.pair(hidden)
        wide = two.to(torch.promote_types(two.dtype, torch.float32))
        own = wide[:, 0] - wide[:, 1]
        return tensor.all_tokens(own, self.split.tp).view(self.sequences, -1)

    def logits(self, hidden: Float[Tensor, "_ hidden"]) -> Float[Tensor, "sequences here rows"]:
        """Of this rank's rows."""
        linear = Linear(self.rows, self.bias, laid_out=self.laid_out)
        logits = tensor.columns(self.made(hidden), [linear], self.split.tp)[0]
        if self.tree.head.soft_cap is not None:
            logits = loss.capped(logits, self.tree.head.soft_cap)
        return logits.view(self.sequences, -1, self.weight.shape[0])

    def cross_entropy(
        self,
        hidden: Float[Tensor, "_ hidden"],
        labels: Int64[Tensor, "sequences length"],
        weights: Float[Tensor, "sequences length"] | None = None,
    ) -> Float[Tensor, ""]:
        """The sum over this rank's tokens whose label is not IGNORED, each times its weight; logits
        are never whole.
        """
        return linear_cross_entropy(
            self.made(hidden),
            self.rows,
            self.here(labels).reshape(-1),
            self.tree.vocab_size,
            self.split.tp,
            self.compiled,
            self.split.kernels.logits_at_once,
            self.tree.head.soft_cap,
            None if weights is None else self.here(weights).reshape(-1),
            self.bias,
        )

    def log_probabilities(
        self,
        hidden: Float[Tensor, "_ hidden"],
        labels: Int64[Tensor, "sequences length"],
        temperature: float = 1.0,
    ) -> Float[Tensor, "sequences here"]:
        """Of the label of each of this rank's tokens, 0 where it is IGNORED, in the distribution
        whose logits are divided by `temperature`; logits are never whole. Raises ValueError for a
        temperature of logits that have a soft cap.
        """
        found = self._of_labels(log_probabilities, hidden, labels, temperature)
        return found.view(self.sequences, -1)

    def with_entropy(
        self,
        hidden: Float[Tensor, "_ hidden"],
        labels: Int64[Tensor, "sequences length"],
        temperature: float = 1.0,
    ) -> tuple[Float[Tensor, "sequences here"], Float[Tensor, "sequences here"]]:
        """`log_probabilities`, and the entropy of each token's distribution, 0 where its label is
        IGNORED.
        """
        found, entropy = self._of_labels(log_probabilities_and_entropy, hidden, labels, temperature)
        return found.view(self.sequences, -1), entropy.view(self.sequences, -1)

    def foretold(
        self, hidden: Float[Tensor, "_ hidden"], labels: Int64[Tensor, "sequences length"]
    ) -> tuple[Float[Tensor, "sequences here"], Int64[Tensor, "sequences here"]]:
        """`log_probabilities`, and the likeliest token of all in the place of each label; without
        gradients.
        """
        found, likeliest = self._of_labels(log_probabilities_and_argmax, hidden, labels)
        return found.view(self.sequences, -1), likeliest.view(self.sequences, -1)

    def _of_labels(
        self, judge: Callable[..., Any], hidden: Tensor, labels: Tensor, temperature: float = 1.0
    ) -> Any:
        """What `judge`, of parallel/log_probabilities.py, says of this rank's tokens."""
        made, bias = self.made(hidden), self.bias
        if temperature != 1:
            if self.tree.head.soft_cap is not None:
                raise ValueError(
                    f"a temperature of {temperature} of logits with a soft cap "
                    f"({self.tree.head.soft_cap}): use 1"
                )
            made = made / temperature
            bias = None if bias is None else bias / temperature
        return judge(
            made,
            self.rows,
            self.here(labels).reshape(-1),
            self.tree.vocab_size,
            self.split.tp,
            self.split.kernels.logits_at_once,
            self.tree.head.soft_cap,
            bias,
        )


class Values(Head):
    """One row, whole on every rank."""

    def values(self, hidden: Float[Tensor, "_ hidden"]) -> Float[Tensor, "sequences here"]:
        """The number of each of this rank's tokens, in fp32 or wider."""
        tp = self.split.tp
        (own,) = tensor.products(hidden, [Linear(self.weight)], tp)
        wide = own[:, 0].to(torch.promote_types(own.dtype, torch.float32))
        return tensor.all_tokens(wide, tp).view(self.sequences, -1)

    def logits(self, hidden: Float[Tensor, "_ hidden"]) -> Tensor:
        """Raises ValueError: there are none."""
        raise ValueError(
            "the model ends in one number for each token, a reward or a value, and foretells no "
            "token: give one with logits"
        )


End = Callable[[Tensor, Any], Any]
"""(hidden, the head of the model) -> anything."""


def logits(hidden: Tensor, head: Logits | Values) -> Tensor:
    """The end of a model that is read: logits of this rank's vocabulary."""
    return head.logits(hidden)


def loss_of(labels: Int64[Tensor, "sequences length"]) -> End:
    """The end of a model that is measured: the sum of the losses of `labels`, already shifted."""

    def end(hidden: Tensor, head: Logits) -> Tensor:
        return head.cross_entropy(hidden, labels)

    return end
