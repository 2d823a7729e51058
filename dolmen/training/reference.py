"""What the reference of DPO says of each answer: its log-probabilities are computed once, before
the first step, and come with the batches, so that no second model is held while training. They are
kept in the run's folder, under a hash of the model's weights and of the examples.

The reference is the model that the run begins with, or another one (--objective.reference).
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash

from dolmen.conversion.source import Source
from dolmen.core import collectives
from dolmen.core.mesh import Mesh
from dolmen.data.base_loader import Loader
from dolmen.data.packing import Rows
from dolmen.files import gate, write
from dolmen.model import build
from dolmen.model.decoder import Decoder
from dolmen.model.spec import ModelSpec
from dolmen.objectives import forward
from dolmen.objectives.preference import REFERENCE
from dolmen.optim.optimizer import DTYPES, master_dtype
from dolmen.training import folder
from dolmen.training.config import RunConfig
from dolmen.training.folder import Unusable
from dolmen.training.initialize import load_initial
from dolmen.training.resolve import ResolvedRun
from dolmen.training.start import on_first_rank
from dolmen.training.state import TrainState

FOLDER = "reference"
KINDS = (b"<f4", b"<f8")
KIND, HEAD = 3, 19  # bytes of the kind of number, and of that and a digest


def compare(
    resolved: ResolvedRun, state: TrainState, loader: Loader, mesh: Mesh, out: Path
) -> dict[str, np.ndarray]:
    """Give the rows of `loader` the log-probabilities of the reference: those that the run's folder
    `out` has of the same model and data, or else computed; all by name, for `keep`. `state` is that
    of step 0, before anything is resumed. Every rank calls it. Raises Unusable where the model that
    the run started from is gone.
    """
    run, model, source = resolved.config, state.model, resolved.start
    assert source is not None, "check_objective has seen it"
    if resolved.reference is not None:
        model = load_model(run, resolved.reference, state, mesh)
    else:
        _refuse_gone(resolved, "objective.name dpo compares with it")
    weights = on_first_rank(mesh, lambda: _digest(source))
    known: dict[str, np.ndarray] = {}
    for rows in (loader.mixture, loader.validation):
        assert isinstance(rows, Rows), "check_objective has seen that they are pairs"
        if len(rows.chosen):
            key = _key(weights, run, rows)
            found = on_first_rank(mesh, lambda key=key, rows=rows: _kept(out, key, rows))
            known[key] = _of_rows(model, rows, state, loader, mesh) if found is None else found
            rows.numbers[REFERENCE] = known[key]
    return known


def keep(out: Path, known: Mapping[str, np.ndarray]) -> None:
    """Write what `compare` has given into the run's folder, by the first rank: another start of
    this run reads it.
    """
    folder.claim(out, FOLDER)
    for key, numbers in known.items():
        file = write.folder(out, FOLDER) / f"{key}.bin"
        if not file.exists():
            data = numbers.tobytes()
            kind = numbers.dtype.str.encode()
            write.replace(file, kind + xxhash.xxh3_128_digest(kind + data) + data)


def _kept(out: Path, key: str, rows: Rows) -> np.ndarray | None:
    """What is kept of that name, whole; None otherwise."""
    count, file = len(rows.examples.tokens), out / FOLDER / f"{key}.bin"
    if not file.is_file():
        return None
    content = gate.read_bytes(file, HEAD + 8 * count)
    kind, digest, data = content[:KIND], content[KIND:HEAD], content[HEAD:]
    if xxhash.xxh3_128_digest(kind + data) != digest or kind not in KINDS:
        return None
    found = np.frombuffer(data, kind.decode())
    return found if len(found) == count else None


def _refuse_gone(resolved: ResolvedRun, why: str) -> None:
    """Raises Unusable where the model that the run started from was deleted."""
    if resolved.init_is_gone:
        raise Unusable(
            f"--init {resolved.config.init} is gone, and {why}: put it back, or name a copy by "
            "--objective.reference"
        )


def _digest(source: Source) -> str:
    """Return a digest of the model's weights: what lies at a path may become another one."""
    seen = xxhash.xxh3_128()
    for parameter, tensor in source.stream():
        seen.update(parameter.encode())
        seen.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return seen.hexdigest() + repr(source.tree)


def _key(weights: str, run: RunConfig, rows: Rows) -> str:
    """Of the reference, of the examples, and of how it computes."""
    examples = rows.examples
    arrays = (examples.tokens, examples.trained, examples.offsets, rows.chosen)
    said = [weights, run.train.dtype, examples.longest, rows.sequence_length, rows.say]
    seen = xxhash.xxh3_128(repr(said).encode())
    for array in arrays:
        seen.update(np.ascontiguousarray(array).data)
    return seen.hexdigest()


def initial_model(resolved: ResolvedRun, state: TrainState, mesh: Mesh) -> Decoder:
    """Return the reference model of rollouts: --objective.reference, or else the model that the run
    started from, be it random. Raises Unusable where that is gone.
    """
    run = resolved.config
    if resolved.reference is None:
        _refuse_gone(resolved, "the run compares what it draws with it")
    if resolved.start is not None:
        return load_model(run, resolved.start, state, mesh)
    model = _built(run, run.trained, state, mesh)
    load_initial(model, None, run)
    return model


def load_model(run: RunConfig, source: Source, state: TrainState, mesh: Mesh) -> Decoder:
    """Return the model of a source in the layout of the one that is trained."""
    model = _built(run, source.tree, state, mesh)
    load_initial(model, source, run)
    return model


def _built(run: RunConfig, tree: ModelSpec, state: TrainState, mesh: Mesh) -> Decoder:
    dtype = run.train.dtype
    return build.build(
        tree, mesh, run.layout, state.schedule, dtype=master_dtype(dtype), compute=DTYPES[dtype]
    )


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
        here = forward.log_probabilities(model, rows.batch(asked[own]), mesh, state.schedule)
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
