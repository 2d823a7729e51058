"""Receipts of a run with exact numerics: receipts.jsonl has a row per step, whose bits no layout
changes, so that a run can be audited by repeating some of its steps (replay.py).

    {"step": 3, "loss": "0x1.d...", "grad_norm": "0x1.3...", "receipt": "9f1c...",
     "operators": {"product": "5e0d...", "exp": "b2a8...", ...},
     "weights": {"layers.0.attn.q.weight": {"0": "00c4...", "1": "7d31..."}, ...}}

`receipt` is a hash of the receipt of the step before, of loss and norm, and of the digest of each
weight after the step. That digest is a sum over elements, modulo 2^64, so it is that of the full
weight however it is sharded: `weights` has the part of each rank that owns one.

    sum over i of row(i) (sum over j of column(j) bits(i, j) mod 2^32)

row and column are odd numbers that follow from the indices. A single flipped bit changes the digest
always, other changes but for one case in 2^32. It finds faults, and is no proof against forgery.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dolmen.core.consensus import gather_objects
from dolmen.core.log import say
from dolmen.core.mesh import Mesh
from dolmen.core.messages import escape
from dolmen.core.state import local_view, region, replication_weight
from dolmen.files import gate, kinds, write
from dolmen.model.decoder import Decoder
from dolmen.training.self_test import digest_operators
from dolmen.training.state import TrainState
from dolmen.training.step import StepMetrics

RECEIPTS = "receipts.jsonl"
MIX = (-4658895280553007687, -7723592293110705685)  # splitmix64's finaliser


class Receipts:
    """receipts.jsonl of a run, a hook of every step; every rank calls it, the first writes. Opened
    at step s it drops the rows of later steps, which a resumed run repeats.
    """

    def __init__(self, file: Path, step: int, mesh: Mesh, dtype: torch.dtype):
        """Open receipts.jsonl to append, on the first rank, after dropping rows of steps after
        `step`, which a resumed run repeats; compute digests of this machine's operators in `dtype`.
        """
        self.mesh, self.operators = mesh, digest_operators(dtype)
        earlier = [row for row in read_receipts(file) if row["step"] <= step] if mesh.first else []
        if earlier and earlier[-1]["step"] < step:
            say(f"WARNING: {file} lacks the steps {earlier[-1]['step'] + 1} to {step}")
        self.receipt = earlier[-1]["receipt"] if earlier else ""
        self.handle = None
        if mesh.first:
            write.replace(file, dump_receipts(earlier))
            self.handle = write.append(file)

    def add(self, state: TrainState, m: StepMetrics) -> None:
        """Append the receipt of the step that was just made: hashes of loss, gradient norm and all
        weights, chained to the receipt before. The first rank writes. Collective.
        """
        weights = digest_weights(state.model, self.mesh)
        row = {"step": state.step, "loss": m.loss.hex(), "grad_norm": m.grad_norm.hex()}
        self.receipt = chain(self.receipt, row["loss"], row["grad_norm"], weights)
        if self.handle is not None:
            row |= {"receipt": self.receipt, "operators": self.operators, "weights": weights}
            self.handle.write(json.dumps(row) + "\n")

    def sync(self) -> None:
        """Flush the receipts so far to disk (fsync). Called before a checkpoint is saved: after a
        power cut none is newer than its receipts.
        """
        if self.handle is not None:
            os.fsync(self.handle.fileno())

    def close(self) -> None:
        """Close the file, on the rank that has opened it."""
        if self.handle is not None:
            self.handle.close()


def dump_receipts(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as JSON lines, the content of a receipts.jsonl."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def read_receipts(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a receipts.jsonl; [] where the file does not exist. A damaged last line,
    which a crash may have cut, is left out. Raises RefusedLine for any other damaged line, and
    Refused for what is no regular file.
    """
    rows: list[dict[str, Any]] = []
    if not file.exists():
        return rows
    with gate.open_file(file) as stream:
        lines = sum(1 for _ in stream)
    try:
        rows.extend(row for _, row in gate.read_json_lines(file, kinds.RECEIPT_ROW))
    except gate.RefusedLine:
        if len(rows) + 1 < lines:
            raise
    return rows


Weights = Mapping[str, Mapping[str, str]]
"""Digest of each rank's part of each weight."""


def chain(before: str, loss: str, norm: str, weights: Weights) -> str:
    """Return the receipt of a step: a hash of the receipt `before` it, its loss and gradient norm
    (hexadecimal), and the digest of each full weight. How the weights are sharded over ranks does
    not change it.
    """
    digest = hashlib.blake2b(f"{before} {loss} {norm}".encode(), digest_size=16)
    for name in sorted(weights):
        digest.update(f" {name} {total(weights[name])}".encode())
    return digest.hexdigest()


def total(parts: Mapping[str, str]) -> int:
    """Return the digest of a full weight: the sum modulo 2^64 of those of its parts, by rank,
    hexadecimal. Raises ValueError for a part that is not hexadecimal.
    """
    try:
        return sum(int(part, 16) for part in parts.values()) % 2**64
    except ValueError:
        raise ValueError(
            f"{RECEIPTS} is damaged: a weight has the digests {escape([*parts.values()])[:80]}"
        ) from None


def digest_weights(model: Decoder, mesh: Mesh) -> Weights:
    """Return weight name -> rank -> digest of that rank's shard of it, hexadecimal, on every rank.
    Of copies of the same values on several ranks only one counts. Collective.
    """
    tied = model.tied_across_ranks
    local = {
        name: f"{digest(p) % 2**64:016x}"
        for name, p in model.named_parameters()
        if (mesh.tp.rank == 0 or replication_weight(p) == 1)
        and (p is not tied or mesh.ends.rank == 0)
    }
    weights: dict[str, dict[str, str]] = {}
    for rank, parts in enumerate(gather_objects(local) if mesh.size > 1 else [local]):
        for name, part in parts.items():
            weights.setdefault(name, {})[str(rank)] = part
    return weights


def digest(p: Tensor) -> int:
    """Return the digest of this rank's shard of an fp32 tensor, an integer: a sum over its
    elements' bits, weighted by their indices in the full tensor, so that digests of shards add up,
    modulo 2^64, to that of the full tensor.
    """
    *outer, column = region(p) if p.ndim > 1 else (*region(p), slice(0, 1))
    bits = local_view(p).contiguous().view(torch.int32)
    sums = (bits.view(*bits.shape[: len(outer)], -1) * _odd(column).int()).sum(-1)
    for level, indices in enumerate(reversed(outer)):
        sums = (sums * _odd(indices, level)).sum(-1)
    return int(sums)


def _odd(indices: slice, level: int = 0) -> Tensor:
    """Return a pseudo-random odd number, int64, for each index of the range, others for another
    `level`, by the mixing function of splitmix64.
    """
    z = torch.arange(indices.start + 1, indices.stop + 1) + (level << 32)
    for factor in MIX:
        z = (z ^ (z >> 29)) * factor
    return z ^ (z >> 32) | 1
