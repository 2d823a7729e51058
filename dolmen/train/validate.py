"""The loss on held-out tokens."""

from collections.abc import Iterable

import torch

from dolmen.core import collectives
from dolmen.core.mesh import Mesh
from dolmen.data.batch import Batch
from dolmen.model.decoder import Decoder


def evaluate(model: Decoder, batches: Iterable[Batch], mesh: Mesh) -> tuple[float, int]:
    """(mean loss in nats a token, tokens) over this data-parallel rank's batches and all the others'.

    Every rank gives equally many batches. Raises ValueError if no token carries a loss.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    training = model.training
    model.eval()
    with torch.no_grad():
        for batch in batches:
            loss = model(batch.tokens.to(mesh.device), batch.labels.to(mesh.device))
            sums += torch.stack((loss.double(), torch.tensor(float(batch.real_tokens), dtype=torch.float64, device=mesh.device)))
    model.train(training)
    total, tokens = collectives.reduce_scalar(sums, mesh.dp).tolist()
    if tokens == 0: raise ValueError("no token of the validation batches carries a loss")
    return total / tokens, int(tokens)
