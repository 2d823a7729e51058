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
from dolmen.conversion.moments import MOMENTS, Moments
from dolmen.conversion.weights import join_stored
from dolmen.core.torch_private.checkpoints import Place
from dolmen.families.rules import Entry

DATA = "__0_0.distcp"
OPTIMIZER = "optimizer.state."
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
    state: Moments | None = None,
) -> Iterator[str]:
    """The checkpoint under `folder`, of the parameters that `read(our name)` gives; yields each
    name of ours when it is written. `iteration` None: a release. `plan` is of one rank. `state` is
    written beside them, in the dtypes that it has.
    """
    name = folders.RELEASE if iteration is None else f"iter_{iteration:07d}"
    where = folder / name
    where.mkdir(parents=True)
    wide = torch.promote_types(dtype, torch.float32)
    kinds = {} if state is None else state.kinds
    with open(where / DATA, "xb") as stream:
        files = Files(stream)
        for canonical, entry in plan.entries.items():
            leaf, lying = plan.tree.leaves[entry.ours[0]], _lying(plan, canonical)
            whole = _stored(plan, entry, read, padding=True)
            lying.write(files, "", whole.to(wide if leaf.precise else dtype))
            lying.empty_states(files, len(whole))
            del whole
            for kind, tensors in kinds.items() if leaf.trained else ():
                moment = _stored(plan, entry, tensors.read, padding=kind not in MOMENTS)
                lying.write(files, f"{OPTIMIZER}{kind}.", moment)
                del moment
            yield from entry.ours
        _state(files, "output_layer.", (), ())
    (where / METADATA).write_bytes(files.description())
    torch.save(_common(plan, dtype, iteration, state), where / COMMON)
    (where / MARKER).write_text(
        json.dumps({"sharded_backend": BACKEND, "sharded_backend_version": 1})
    )
    (folder / folders.TRACKER).write_text(name if iteration is None else str(iteration))


def _common(
    plan: Plan, dtype: torch.dtype, iteration: int | None, state: Moments | None
) -> dict[str, Any]:
    """What is no tensor. Groups of parameters have the count of updates and nothing else: rates
    and decays are of the run that goes on.
    """
    content: dict[str, Any] = {"singleton_local_shards": False}
    common = {
        "args": argparse.Namespace(**plan.args(dtype, iteration or 0) | {"ckpt_format": BACKEND}),
        "checkpoint_version": VERSION,
        "iteration": iteration or 0,
        "content_metadata": content,
    }
    if state is not None:
        content["distrib_optim_sharding_type"] = "fully_reshardable"
        common["optimizer"] = {"optimizer": {"param_groups": [{"step": state.step}]}}
    return common


def _stored(plan: Plan, entry: Entry, read: Callable[[str], Tensor], padding: bool) -> Tensor:
    """As one tensor. The rows behind a vocabulary are its last one again, or, without `padding`,
    zeros: a moment that has seen no gradient.
    """
    whole = join_stored(entry.rule, [read(ours) for ours in entry.ours])
    if not plan.share(entry).padded:
        return whole
    padded = shares.pad(whole, plan.rows)
    if not padding and plan.rows > len(whole):
        padded[len(whole) :] = 0
    return padded


@dataclass(frozen=True)
class Lying:
    """Where a tensor goes: the layers of a model with experts are not alike to Megatron, whichever
    they are, and of others it is one of a stack.
    """

    key: str
    index: tuple[int, ...] = ()
    """In the stack."""
    count: tuple[int, ...] = ()
    """Of the stack."""

    def write(self, files: Files, prefix: str, whole: Tensor) -> None:
        part = whole[(None,) * len(self.index)]
        shape, at = (*self.count, *whole.shape), (*self.index, *(0,) * whole.ndim)
        files.tensor(prefix + self.key, shape, at, part.contiguous().clone())

    def empty_states(self, files: Files, experts: int) -> None:
        """Beside the weight of a product, of each expert its own."""
        product = PRODUCT.fullmatch(self.key)
        if product is None:
            return
        if ".experts.experts." not in self.key:
            _state(files, product[1], self.index, self.count)
            return
        for expert in range(experts):
            _state(files, product[1], (*self.index, expert), (*self.count, experts))


def _lying(plan: Plan, name: str) -> Lying:
    """Of a tensor by its canonical name."""
    parsed = names.canonical(name)
    assert parsed is not None
    if parsed.layer is None:
        return Lying(name)
    rest = names.TE.spelled(parsed.rest, parsed.layer, plan.tree.blocks[parsed.layer])
    rest = rest.removeprefix(f"{names.TE.layers}{parsed.layer}.")
    rest = re.sub(r"^mlp\.experts\.", "mlp.experts.experts.", rest)
    if any(block.mlp.experts for block in plan.tree.blocks):
        return Lying(f"{names.TE.layers}{parsed.layer}.{rest}")
    return Lying(f"{names.TE.layers}{rest}", (parsed.layer,), (plan.tree.layers,))


def _state(files: Files, module: str, index: tuple[int, ...], count: tuple[int, ...]) -> None:
    """The empty `_extra_state` of one of so many modules of that name."""
    shard = f"{'.'.join(map(str, index or (0,)))}_{'.'.join(map(str, count or (1,)))}"
    files.value(f"{module}_extra_state/shard_{shard}", [None])
