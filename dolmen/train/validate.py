"""The mean cross-entropy of held-out text, in nats a token: validation loss, and the exponent of perplexity."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from dolmen.core import collectives
from dolmen.core.mesh import Mesh
from dolmen.data.batch import Batch
from dolmen.model.decoder import Decoder
from dolmen.parallel.data import inference


class Evaluation(NamedTuple):
    """Over all batches of all ranks."""

    loss: float
    """Nats a predicted token."""
    tokens: int
    """Tokens predicted: labels that are not IGNORED."""
    nats: float
    """Sum of the losses; divided by the text's bytes and log 2 it is bits per byte."""

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where a float cannot hold it."""
        return math.exp(self.loss) if self.loss < 709 else self.loss * math.inf


def evaluate(model: Decoder, batches: Iterable[Batch], mesh: Mesh) -> Evaluation:
    """Each rank of dp brings its own batches; the result is the same on every rank, and does not depend on the layout.

    Batches may differ in size, but under ZeRO the ranks bring equally many: each forward is a collective. Raises
    ValueError where no label carries a loss.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)         # nats, tokens: exact to 2^53 of them
    with inference(model):
        for batch in batches:
            sums[0] += model(batch.tokens.to(mesh.device), batch.labels.to(mesh.device))
            sums[1] += batch.real_tokens
    nats, tokens = collectives.reduce_scalar(sums, mesh.dp).tolist()
    if tokens == 0: raise ValueError("no token to evaluate carries a loss: give batches that hold text")
    return Evaluation(nats / tokens, int(tokens), nats)
