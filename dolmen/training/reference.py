"""The reference model: log-probabilities for DPO and KTO, and the model itself for rollouts.

DPO's data are fixed, so the reference model's log-probabilities are computed once, before the first
step, and come with the batches: no second model is held while training. They are stored in the
run's folder under a hash of weights, dtype and examples, and read by the next start.

The reference is the initial model, or --objective.reference.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash

from dolmen.conversion.source import ModelSource
from dolmen.core import collectives
from dolmen.core.mesh import Mesh
from dolmen.data.base_loader import Loader
from dolmen.data.packing import PackedRows
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
DTYPES_STORED = (b"<f4", b"<f8")
KIND_BYTES, HEADER_BYTES = 3, 19  # bytes of the kind of number, and of that and a digest


def add_reference_logprobs(
    resolved: ResolvedRun, state: TrainState, loader: Loader, mesh: Mesh, out: Path
) -> dict[str, np.ndarray]:
    """Give the reference model's log-probability of each token to the training and validation rows
    of `loader`, in place, so that they come with the batches (DPO, KTO). They are read from the
    run's folder `out` if it has those of the same model and data, else computed. Return them by
    key (a hash of model and data), for `store`. `state` is at step 0: without
    --objective.reference its model is the reference. Collective. Raises Unusable if the initial
    model no longer exists.
    """
    run, model, source = resolved.config, state.model, resolved.start
    assert source is not None, "check_objective has seen it"
    if resolved.reference is not None:
        # a second model, freed when this function returns
        model = load_model(run, resolved.reference, state, mesh)
    else:
        _require_init(resolved, "objective.name dpo needs it as reference model")
    weights = on_first_rank(mesh, lambda: _digest(source))
    known: dict[str, np.ndarray] = {}
    for rows in (loader.mixture, loader.validation):
        assert isinstance(rows, PackedRows), "check_objective has seen that they are pairs"
        # validation may be empty
        if len(rows.chosen):
            key = _key(weights, run, rows)
            logprobs = on_first_rank(mesh, lambda key=key, rows=rows: _read_stored(out, key, rows))
            known[key] = (
                _compute_rows(model, rows, state, loader, mesh) if logprobs is None else logprobs
            )
            rows.numbers[REFERENCE] = known[key]
    return known


def store(out: Path, known: Mapping[str, np.ndarray]) -> None:
    """Write reference log-probabilities into the run's folder, a file with a digest per key, for
    the next start; files that exist stay. Only the first rank calls it.
    """
    folder.claim(out, FOLDER)
    for key, numbers in known.items():
        file = write.folder(out, FOLDER) / f"{key}.bin"
        if not file.exists():
            data = numbers.tobytes()
            kind = numbers.dtype.str.encode()
            write.replace(file, kind + xxhash.xxh3_128_digest(kind + data) + data)


def _read_stored(out: Path, key: str, rows: PackedRows) -> np.ndarray | None:
    """Return the reference log-probabilities that are stored under the key in the run's folder, one
    per token of `rows`; None where the file is missing, damaged or of another number of tokens.
    """
    count, file = len(rows.examples.tokens), out / FOLDER / f"{key}.bin"
    if not file.is_file():
        return None
    content = gate.read_bytes(file, HEADER_BYTES + 8 * count)
    kind, digest, data = (
        content[:KIND_BYTES],
        content[KIND_BYTES:HEADER_BYTES],
        content[HEADER_BYTES:],
    )
    if xxhash.xxh3_128_digest(kind + data) != digest or kind not in DTYPES_STORED:
        return None
    logprobs = np.frombuffer(data, kind.decode())
    return logprobs if len(logprobs) == count else None


def _require_init(resolved: ResolvedRun, why: str) -> None:
    """Raise Unusable if the initial model of --init no longer exists; `why`: what it is needed for,
    for the message.
    """
    if resolved.init_is_gone:
        raise Unusable(
            f"--init {resolved.config.init} no longer exists, but {why}: restore it, or give a "
            "copy as --objective.reference"
        )


def _digest(source: ModelSource) -> str:
    """Return a text that identifies a model by its content: a hash of all its weights, which are
    read, and its spec. (Another model may come to lie at the same path.)
    """
    # several GB/s: reading the weights takes longer
    digest = xxhash.xxh3_128()
    for parameter, tensor in source.stream():
        digest.update(parameter.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest() + repr(source.spec)


def _key(weights: str, run: RunConfig, rows: PackedRows) -> str:
    """Return a hash of all that reference log-probabilities depend on: digest of the model's
    `weights`, dtype, lengths, examples and how they are paired.
    """
    examples = rows.examples
    arrays = (examples.tokens, examples.trained, examples.offsets, rows.chosen)
    # the dtype changes the numbers by rounding, so it is part of the key
    facts = [weights, run.train.dtype, examples.longest, rows.sequence_length, rows.label_mode]
    digest = xxhash.xxh3_128(repr(facts).encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def initial_model(resolved: ResolvedRun, state: TrainState, mesh: Mesh) -> Decoder:
    """Return the reference model of rollouts (KL penalty, distillation), with its weights: that of
    --objective.reference, else the initial model, whose random weights are sampled again if there
    is no --init. Raises Unusable if the initial model no longer exists.
    """
    run = resolved.config
    if resolved.reference is None:
        _require_init(resolved, "rollouts need it as reference model")
    if resolved.start is not None:
        return load_model(run, resolved.start, state, mesh)
    model = _build(run, run.trained, state, mesh)
    load_initial(model, None, run.train)
    return model


def load_model(run: RunConfig, source: ModelSource, state: TrainState, mesh: Mesh) -> Decoder:
    """Return the model of `source`, for inference, with its weights, in the layout and schedule of
    the trained model.
    """
    model = _build(run, source.spec, state, mesh)
    load_initial(model, source, run.train)
    return model


def _build(run: RunConfig, spec: ModelSpec, state: TrainState, mesh: Mesh) -> Decoder:
    """Return a model of `spec` for inference, in the layout and schedule of the trained model
    (`state`), whose parameters have no values yet.
    """
    dtype = run.train.dtype
    return build.build(
        spec, mesh, run.layout, state.schedule, dtype=master_dtype(dtype), compute=DTYPES[dtype]
    )


def _compute_rows(
    model: Decoder, rows: PackedRows, state: TrainState, loader: Loader, mesh: Mesh
) -> np.ndarray:
    """Return the log-probability that `model` gives each token of the examples in `rows` [tokens],
    0 where it has no label, on every rank. Runs forwards of all rows in global batches, divided
    over dp. Collective.
    """
    size, rows_per_rank = loader.global_batch_size, loader.rows(mesh.dp.size)
    logprobs: np.ndarray | None = None
    for first in range(0, len(rows.rows), size):
        batch_rows = rows.rows[first : first + size]
        # the last batch is filled up with empty rows: every forward has one shape
        batch_rows = batch_rows + [[]] * (size - len(batch_rows))
        local_rows = slice(mesh.dp.rank * rows_per_rank, (mesh.dp.rank + 1) * rows_per_rank)
        local = forward.log_probabilities(
            model, rows.batch(batch_rows[local_rows]), mesh, state.schedule
        )
        full = torch.zeros((size, *local.shape[1:]), dtype=local.dtype, device=local.device)
        full[local_rows] = local
        # of each row one rank of dp has the numbers, and the others 0
        numbers = collectives.reduce_scalar(full, mesh.dp).cpu().numpy()
        if logprobs is None:
            logprobs = np.zeros(len(rows.examples.tokens), numbers.dtype)
        for row, indices in enumerate(batch_rows):
            for _, local, local_rows in rows.places(indices):
                logprobs[local_rows] = numbers[row, local]
    assert logprobs is not None
    return logprobs
