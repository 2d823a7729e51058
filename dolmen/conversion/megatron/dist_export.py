"""Writes a model as a torch_dist checkpoint of Megatron (dist.py says what that is), one tensor in
memory at a time. A chunk is a layer of a tensor, whole: any number of ranks reads parts of it.
"""

import argparse
import json
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dolmen.checkpoint.folders import METADATA
from dolmen.conversion.megatron import folders, names, shares
from dolmen.conversion.megatron.dist import BACKEND, COMMON, MARKER
from dolmen.conversion.megatron.export import VERSION, Plan
from dolmen.conversion.weights import join_stored
from dolmen.core.torch_private.checkpoints import Place

DATA = "__0_0.distcp"
PRODUCT = re.compile(r"(.*\.linear_\w+\.)weight")


@dataclass
class Files:
    """The one file of numbers, open, and the description of all that is in it."""

    stream: BinaryIO
    described: dict[str, Any] = field(default_factory=dict)
    places: dict[MetadataIndex, Place] = field(default_factory=dict)

    def tensor(self, key: str, shape: tuple[int, ...], at: tuple[int, ...], part: Tensor) -> None:
        """A part, which lies at `at` in the tensor `key` of this shape."""
        if key not in self.described:
            properties = TensorProperties(dtype=part.dtype)
            self.described[key] = TensorStorageMetadata(properties, torch.Size(shape), [])
        offset, chunks = torch.Size(at), self.described[key].chunks
        self.places[MetadataIndex(key, offset, len(chunks))] = self._put(part)
        chunks.append(ChunkStorageMetadata(offset, part.shape))

    def value(self, key: str, value: Any) -> None:
        """What is no tensor."""
        self.described[key] = BytesStorageMetadata()
        self.places[MetadataIndex(key)] = self._put(value)

    def _put(self, value: Any) -> Place:
        start = self.stream.tell()
        torch.save(value, self.stream)
        return Place(DATA, start, self.stream.tell() - start)

    def description(self) -> bytes:
        paths = {key: (key,) for key in self.described}
        return pickle.dumps(Metadata(self.described, paths, self.places), protocol=4)


def write(
    plan: Plan,
    read: Callable[[str], Tensor],
    folder: Path,
    dtype: torch.dtype,
    iteration: int | None,
) -> Iterator[str]:
    """The checkpoint under `folder`, of the parameters that `read(our name)` gives; yields each
    name of ours when it is written. `iteration` None: a release. `plan` is of one rank.
    """
    name = folders.RELEASE if iteration is None else f"iter_{iteration:07d}"
    where = folder / name
    where.mkdir(parents=True)
    wide = torch.promote_types(dtype, torch.float32)
    with open(where / DATA, "xb") as stream:
        files = Files(stream)
        for canonical, entry in plan.entries.items():
            whole = join_stored(entry.rule, [read(ours) for ours in entry.ours])
            if plan.share(entry).padded:
                whole = shares.pad(whole, plan.rows)
            precise = plan.tree.leaves[entry.ours[0]].precise
            _write_one(plan, files, canonical, whole.to(wide if precise else dtype))
            del whole
            yield from entry.ours
        _state(files, "output_layer.", (), ())
    (where / METADATA).write_bytes(files.description())
    args = plan.args(dtype, iteration or 0) | {"ckpt_format": BACKEND}
    common = {
        "args": argparse.Namespace(**args),
        "checkpoint_version": VERSION,
        "iteration": iteration or 0,
        "content_metadata": {"singleton_local_shards": False},
    }
    torch.save(common, where / COMMON)
    (where / MARKER).write_text(
        json.dumps({"sharded_backend": BACKEND, "sharded_backend_version": 1})
    )
    (folder / folders.TRACKER).write_text(name if iteration is None else str(iteration))


def _write_one(plan: Plan, files: Files, name: str, whole: Tensor) -> None:
    """A tensor by its canonical name, and the empty state beside it where it is a product's. The
    layers of a model with experts are not alike to Megatron, whichever they are.
    """
    parsed, layers = names.canonical(name), plan.tree.layers
    assert parsed is not None
    if parsed.layer is None:
        key, shape, at, part = name, tuple(whole.shape), (0,) * whole.ndim, whole
        index, count = (), ()
    else:
        sparse = plan.tree.blocks[parsed.layer].mlp.experts > 0
        rest = names.TE.spelled(parsed.rest, parsed.layer, sparse=sparse)
        rest = rest.removeprefix(f"{names.TE.layers}{parsed.layer}.")
        rest = re.sub(r"^mlp\.experts\.", "mlp.experts.experts.", rest)
        if any(block.mlp.experts for block in plan.tree.blocks):
            key, shape, at, part = f"{names.TE.layers}{parsed.layer}.{rest}", whole.shape, (), whole
            index, count = (), ()
        else:
            key, shape, part = f"{names.TE.layers}{rest}", (layers, *whole.shape), whole[None]
            at, index, count = (parsed.layer,), (parsed.layer,), (layers,)
        at = (*at, *(0,) * whole.ndim)
    files.tensor(key, tuple(shape), at, part.contiguous().clone())
    if product := PRODUCT.fullmatch(key):
        stacked = ".experts.experts." in key
        for expert in range(whole.shape[0] if stacked else 1):
            own, of = (*index, expert), (*count, whole.shape[0])
            _state(files, product[1], own if stacked else index, of if stacked else count)


def _state(files: Files, module: str, index: tuple[int, ...], count: tuple[int, ...]) -> None:
    """The empty `_extra_state` of one of so many modules of that name."""
    shard = f"{'.'.join(map(str, index or (0,)))}_{'.'.join(map(str, count or (1,)))}"
    files.value(f"{module}_extra_state/shard_{shard}", [None])
