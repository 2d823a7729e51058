"""The head of a decoder (LM head or scalar head), and head functions, which turn the last hidden
vectors into logits, losses, log-probabilities or values.

    hidden, I@tp or S(0)@tp, and S(0, zigzag)@cp -> head function -> result

Problem. Logits of 8,192 tokens over 128,000 words are 4.2 GB in fp32, several times all other
activations of a layer, and their rows are sharded over tp.

Idea. A loss or a log-probability never has whole logits: chunks of tokens are multiplied by this
rank's rows of the vocabulary, maxima and sums of exponentials cross tp, and backward computes each
chunk again (parallel/vocabulary.py, parallel/log_probabilities.py). `kernels.logits_at_once` is the
size of a chunk. Only `logits`, for reading a model, returns them, and then this rank's rows.

Invariants. A head function runs inside the model's forward, where ZeRO has gathered the head. Its
inputs per token (labels, weights) are of whole sequences and equal on every rank; results per token
are of this cp rank's part of each sequence, [sequences, here], and the same on all ranks of tp.
What cp ranks compute from gathered values is the same on each, so it counts 1 / cp on each
(`shared`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from dolmen.core import collectives
from dolmen.model import spec
from dolmen.model.layers import Norm, ReplicatedLinear
from dolmen.model.spec import ModelSpec, ParamSpecs, select_prefix
from dolmen.model.split import ModelSplit
from dolmen.ops import loss
from dolmen.ops.elementwise import ACTIVATIONS
from dolmen.ops.kernels import Kernels
from dolmen.parallel import tensor
from dolmen.parallel.inference_linear import PrepackedProduct
from dolmen.parallel.log_probabilities import (
    log_probabilities,
    log_probabilities_and_argmax,
    log_probabilities_and_entropy,
)
from dolmen.parallel.tensor import Linear, TensorParallel
from dolmen.parallel.vocabulary import linear_cross_entropy


class HeadTransform(ReplicatedLinear):
    """BERT's head transform norm(act(W x + b)), replicated over tp."""

    def __init__(
        self,
        transform: spec.HeadTransformSpec,
        params: ParamSpecs,
        tp: TensorParallel,
        kernels: Kernels,
    ):
        """Build weight, bias, activation and norm; `params`: their parameters, by names without a
        prefix.
        """
        super().__init__({name: param for name, param in params.items() if "." not in name}, tp)
        self.act = ACTIVATIONS[transform.activation]
        self.norm = Norm(transform.norm, select_prefix(params, "norm"), kernels)

    def forward(self, x: Float[Tensor, "here hidden"]) -> Float[Tensor, "here hidden"]:
        """Return norm(act(W x + b)) of this rank's tokens."""
        return self.norm(self.act(super().forward(x)))


@dataclass(frozen=True, eq=False)
class ModelHead:
    """The model's head for one microbatch. Per-token inputs of a head function (labels, weights)
    are of whole sequences, the same on every rank.
    """

    spec: ModelSpec
    split: ModelSplit
    weight: Tensor
    """This tp rank's rows of the head's weight [rows, hidden], gathered over fsdp."""
    sequences: int
    """Sequences of the microbatch."""
    compiled: bool = False
    bias: Tensor | None = None
    """This tp rank's part of the bias [rows]; None: the head has no bias."""
    transform: Callable[[Tensor], Tensor] | None = None
    """Transform of hidden vectors before the product (BERT)."""
    next_sentence_head: Callable[[Tensor], Tensor] | None = None
    """Next-sentence head: hidden vectors [_, hidden] -> two logits [_, 2]."""
    prepacked: PrepackedProduct | None = None
    """Packed form of `weight` for products without gradients; None: not packed."""

    def local_tokens(
        self, per_token: Shaped[Tensor, "sequences length"]
    ) -> Shaped[Tensor, "sequences _"]:
        """Return this cp rank's tokens of a per-token value (labels, weights) [sequences,
        length].
        """
        return self.split.cp.split(per_token, 1)

    def sum_per_document(
        self,
        per_token: Float[Tensor, "sequences _"],
        document: Int64[Tensor, "sequences length"],
    ) -> Float[Tensor, "sequences length"]:
        """Return, at index d of each sequence, the sum of `per_token` over all tokens of document
        d, those on other cp ranks included. `document` [sequences, length]: document number of each
        token. All cp ranks get the same sums, so a loss computed from them must be scaled by
        `shared`.
        """
        axis = self.split.cp.axis
        # as long as the sequence: there are at most as many documents as tokens
        none = per_token.new_zeros(document.shape)
        sums = none.scatter_add(1, self.local_tokens(document), per_token)
        # all-reduce forward; `copy` sums the gradients of all cp ranks in backward
        return collectives.copy(collectives.all_reduce_(sums, axis), axis)

    def gather_tokens(
        self, per_token: Float[Tensor, "sequences here"]
    ) -> Float[Tensor, "sequences length"]:
        """Gather a value per token over cp, for all tokens of each sequence, in order. All cp ranks
        get the same values, so a loss computed from them must be scaled by `divide_over_cp`.
        """
        axis = self.split.cp.axis
        if axis.size == 1:
            return per_token
        length = per_token.shape[1] * axis.size
        places = self.split.cp.indices(length, per_token.device)
        # zigzag: a rank's tokens are two pieces of the sequence, so a plain all-gather would
        # misplace them
        spread = per_token.new_zeros(len(per_token), length).index_copy(1, places, per_token)
        return collectives.copy(collectives.all_reduce_(spread, axis), axis)

    def divide_over_cp(self, total: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Return total / cp, this rank's share of a loss that every cp rank computes identically:
        the ranks' losses are summed later.
        """
        return total / self.split.cp.axis.size


class LMHead(ModelHead):
    """LM head: one weight row per vocabulary token, sharded by rows over tp (S(0)@tp)."""

    @cached_property
    def rows(self) -> Float[Tensor, "rows hidden"]:
        """Weight rows that multiply hidden vectors; each normalised to length 1 if the spec's head
        is (Baichuan 2).
        """
        return F.normalize(self.weight) if self.spec.head.normalised else self.weight

    def scale_hidden(self, hidden: Float[Tensor, "_ hidden"]) -> Float[Tensor, "_ hidden"]:
        """Return hidden vectors after the transform, times the logit scale: cheaper than scaling
        the logits.
        """
        # BERT
        hidden = hidden if self.transform is None else self.transform(hidden)
        # (s W h) = W (s h): hidden is narrower than the vocabulary
        scale = self.spec.head.scale
        return hidden if scale == 1 else hidden * scale

    def follows(self, hidden: Float[Tensor, "_ hidden"]) -> Float[Tensor, "sequences here"]:
        """Return, per token, the next-sentence logit "follows" (label 0, as in transformers) minus
        "does not follow", in fp32 or wider. Raises ValueError if the model has no next-sentence
        head.
        """
        if self.next_sentence_head is None:
            raise ValueError(
                "the model has no next-sentence head: give one that has (BertForPreTraining)"
            )
        two = self.next_sentence_head(hidden)
        wide = two.to(torch.promote_types(two.dtype, torch.float32))
        # log-odds: sigmoid of it is the probability that the second text follows
        margins = wide[:, 0] - wide[:, 1]
        return tensor.gather_token_values(margins, self.split.tp).view(self.sequences, -1)

    def logits(self, hidden: Float[Tensor, "_ hidden"]) -> Float[Tensor, "sequences here rows"]:
        """Return the logits of this rank's rows of the vocabulary, scaled and soft-capped, for this
        cp rank's tokens.
        """
        # rows [vocabulary / tp, hidden]
        linear = Linear(self.rows, self.bias, prepacked=self.prepacked)
        logits = tensor.columns(self.scale_hidden(hidden), [linear], self.split.tp)[0]
        if self.spec.head.soft_cap is not None:
            # cap * tanh(logits / cap)
            logits = loss.soft_cap(logits, self.spec.head.soft_cap)
        return logits.view(self.sequences, -1, self.weight.shape[0])

    def cross_entropy(
        self,
        hidden: Float[Tensor, "_ hidden"],
        labels: Int64[Tensor, "sequences length"],
        weights: Float[Tensor, "sequences length"] | None = None,
    ) -> Float[Tensor, ""]:
        """Return the sum of cross-entropy over this rank's tokens whose label is not IGNORED, each
        times its weight in `weights` (None: 1). Logits are computed in chunks of tokens.
        """
        return linear_cross_entropy(
            self.scale_hidden(hidden),
            self.rows,
            self.local_tokens(labels).reshape(-1),
            self.spec.vocab_size,
            self.split.tp,
            self.compiled,
            self.split.kernels.logits_at_once,
            self.spec.head.soft_cap,
            None if weights is None else self.local_tokens(weights).reshape(-1),
            self.bias,
        )

    def log_probabilities(
        self,
        hidden: Float[Tensor, "_ hidden"],
        labels: Int64[Tensor, "sequences length"],
        temperature: float = 1.0,
    ) -> Float[Tensor, "sequences here"]:
        """Return the log-probability of each label at this cp rank's tokens, 0 where it is IGNORED;
        logits are divided by `temperature` and never materialised whole. Raises ValueError for a
        temperature other than 1 with a soft cap.
        """
        values = self._evaluate_labels(log_probabilities, hidden, labels, temperature)
        return values.view(self.sequences, -1)

    def log_probabilities_and_entropy(
        self,
        hidden: Float[Tensor, "_ hidden"],
        labels: Int64[Tensor, "sequences length"],
        temperature: float = 1.0,
    ) -> tuple[Float[Tensor, "sequences here"], Float[Tensor, "sequences here"]]:
        """Return the log-probability of each label at this cp rank's tokens, and the entropy, in
        nats, of the distribution there; both 0 where the label is IGNORED. Logits are divided by
        `temperature`. Raises ValueError for a temperature other than 1 with a soft cap.
        """
        values, entropy = self._evaluate_labels(
            log_probabilities_and_entropy, hidden, labels, temperature
        )
        return values.view(self.sequences, -1), entropy.view(self.sequences, -1)

    def log_probabilities_and_argmax(
        self, hidden: Float[Tensor, "_ hidden"], labels: Int64[Tensor, "sequences length"]
    ) -> tuple[Float[Tensor, "sequences here"], Int64[Tensor, "sequences here"]]:
        """Return the log-probability of each label at this cp rank's tokens (0 where it is
        IGNORED), and the token id of the highest logit there; without gradients.
        """
        evaluate_rows = partial(log_probabilities_and_argmax, product=self.prepacked)
        values, argmax = self._evaluate_labels(evaluate_rows, hidden, labels)
        return values.view(self.sequences, -1), argmax.view(self.sequences, -1)

    def _evaluate_labels(
        self,
        evaluate_rows: Callable[..., Any],
        hidden: Tensor,
        labels: Tensor,
        temperature: float = 1.0,
    ) -> Any:
        """Return the result of `evaluate_rows`, a function of parallel/log_probabilities.py, for
        this rank's tokens and their labels, with hidden vectors divided by `temperature`. Raises
        ValueError for a temperature other than 1 with a soft cap.
        """
        scaled, bias = self.scale_hidden(hidden), self.bias
        if temperature != 1:
            if self.spec.head.soft_cap is not None:
                raise ValueError(
                    f"temperature {temperature} is not supported for logits with a soft cap "
                    f"({self.spec.head.soft_cap}): use 1"
                )
            scaled = scaled / temperature
            # (W h + b) / T = W (h / T) + b / T, where a soft cap would not be linear
            bias = None if bias is None else bias / temperature
        return evaluate_rows(
            scaled,
            self.rows,
            self.local_tokens(labels).reshape(-1),
            self.spec.vocab_size,
            self.split.tp,
            self.split.kernels.logits_at_once,
            self.spec.head.soft_cap,
            bias,
        )


class ScalarHead(ModelHead):
    """Scalar head (reward or value): one weight row, replicated over tp."""

    def values(self, hidden: Float[Tensor, "_ hidden"]) -> Float[Tensor, "sequences here"]:
        """Return the scalar of each of this cp rank's tokens [sequences, here], in fp32 or wider,
        the same on every rank of tp.
        """
        tp = self.split.tp
        # whole on every rank: of this rank's tokens, without communication
        (scores,) = tensor.products(hidden, [Linear(self.weight)], tp)
        wide = scores[:, 0].to(torch.promote_types(scores.dtype, torch.float32))
        return tensor.gather_token_values(wide, tp).view(self.sequences, -1)

    def logits(self, hidden: Float[Tensor, "_ hidden"]) -> Tensor:
        """Raise ValueError: a scalar head has no logits."""
        raise ValueError(
            "the model has a scalar head (a reward or value per token) and predicts no tokens: "
            "give one with an LM head"
        )


HeadFunction = Callable[[Tensor, Any], Any]
"""(last hidden vectors, head of the model) -> any result."""


def compute_logits(hidden: Tensor, head: LMHead | ScalarHead) -> Tensor:
    """Head function that returns the logits of this rank's rows of the vocabulary."""
    return head.logits(hidden)


def cross_entropy_function(labels: Int64[Tensor, "sequences length"]) -> HeadFunction:
    """Return a head function that computes the summed cross-entropy of `labels` [sequences,
    length], already shifted by one.
    """

    def end(hidden: Tensor, head: LMHead) -> Tensor:
        """Return the summed cross-entropy of this rank's tokens."""
        return head.cross_entropy(hidden, labels)

    return end
