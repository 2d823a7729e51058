"""What the reference of DPO says of each answer: its log-probabilities are computed once, before
the first step, and come with the batches, so that no second model is held while training.

The reference is the model that the run begins with, or another one (--objective.reference).
"""

import numpy as np
import torch

from dolmen.conversion.source import in_dtype, load_weights, open_source
from dolmen.core import collectives
from dolmen.core.mesh import Mesh
from dolmen.data.batches import Loader
from dolmen.data.packed import Rows
from dolmen.model import build
from dolmen.model.decoder import Decoder
from dolmen.objectives import score
from dolmen.objectives.preference import REFERENCE
from dolmen.optim.precision import DTYPES, at_rest
from dolmen.training.config import RunConfig
from dolmen.training.folder import Unusable
from dolmen.training.step import TrainState


def compare(
    begun: RunConfig, run: RunConfig, state: TrainState, loader: Loader, mesh: Mesh
) -> None:
    """Give the rows of `loader` the log-probabilities of the reference. `state` is as the run
    begins, before anything is resumed, and `begun` says from where. Every rank calls it. Raises
    Unusable where the model that the run began with is gone.
    """
    model = state.model
    if run.objective.reference is not None:
        model = _other(run, run.objective.reference, state, mesh)
    elif begun.init != run.init:
        raise Unusable(
            f"--init {run.init} is gone, and objective.name dpo compares with it: put it back, or "
            "name a copy by --objective.reference"
        )
    for rows in (loader.mixture, loader.validation):
        assert isinstance(rows, Rows), "check_objective has seen that they are pairs"
        if len(rows.chosen):
            rows.numbers[REFERENCE] = _of_rows(model, rows, state, loader, mesh)


def _other(run: RunConfig, name: str, state: TrainState, mesh: Mesh) -> Decoder:
    source = open_source(name)
    dtype = run.train.dtype
    model = build.build(
        source.tree, mesh, run.layout, state.schedule, dtype=at_rest(dtype), compute=DTYPES[dtype]
    )
    stored = [name for name, _ in model.named_parameters()]
    masters = in_dtype(source, at_rest(dtype))
    build.initialize(model, run.train.seed, stored)
    build.load(model, lambda write: load_weights(masters, write, only=stored))
    return model


def _of_rows(
    model: Decoder, rows: Rows, state: TrainState, loader: Loader, mesh: Mesh
) -> np.ndarray:
    """Of each token of the examples, 0 where it is not predicted; the same on every rank."""
    size, mine = loader.global_batch_size, loader.rows(mesh.dp.size)
    found: np.ndarray | None = None
    for first in range(0, len(rows.rows), size):
        asked = rows.rows[first : first + size]
        asked = asked + [[]] * (size - len(asked))
        own = slice(mesh.dp.rank * mine, (mesh.dp.rank + 1) * mine)
        here = score.log_probabilities(model, rows.batch(asked[own]), mesh, state.schedule)
        whole = torch.zeros((size, *here.shape[1:]), dtype=here.dtype, device=here.device)
        whole[own] = here
        # of each row one rank of dp has the numbers, and the others 0
        numbers = collectives.reduce_scalar(whole, mesh.dp).cpu().numpy()
        if found is None:
            found = np.zeros(len(rows.examples.tokens), numbers.dtype)
        for row, indices in enumerate(asked):
            for _, here, own in rows.places(indices):
                found[own] = numbers[row, here]
    assert found is not None
    return found
