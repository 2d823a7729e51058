"""Writes a model as a torch_dist checkpoint of Megatron (described in dist.py), one tensor in
memory at a time. A chunk is a layer of a tensor, whole: any number of ranks reads parts of it. A
file has the chunks of one layer, so that several threads can write.
"""

import argparse
import json
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

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
from dolmen.conversion.megatron import names, scaling, shares
from dolmen.conversion.megatron.dist import BACKEND, COMMON, MARKER, open_torch_dist
from dolmen.conversion.megatron.export import PRODUCT, VERSION, ExportPlan, MegatronWriter
from dolmen.conversion.megatron.source import Megatron
from dolmen.conversion.weights import MOMENTS, Moments, Scaling, join_stored
from dolmen.conversion.writing import Advance, LayerPool, group_by_layer
from dolmen.core.torch_private.checkpoints import Place
from dolmen.families.rules import StoredTensor

OPTIMIZER = "optimizer.state."


class FileEntry(NamedTuple):
    """Entry of a file: a part of a tensor of shape `whole`, which lies at offsets `at`; or a value
    that is not a tensor (dtype None).
    """

    key: str
    place: Place
    dtype: torch.dtype | None = None
    whole: tuple[int, ...] = ()
    at: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


@dataclass
class File:
    """An open .distcp file and the entries written to it so far."""

    stream: BinaryIO
    name: str
    entries: list[FileEntry] = field(default_factory=list)

    def tensor(self, key: str, shape: tuple[int, ...], at: tuple[int, ...], part: Tensor) -> None:
        """Append `part`, which lies at offsets `at` in the tensor `key` of the full `shape`."""
        place = self._append(part)
        self.entries.append(FileEntry(key, place, part.dtype, shape, at, tuple(part.shape)))

    def value(self, key: str, value: Any) -> None:
        """Append a value that is not a tensor, as entry `key`."""
        self.entries.append(FileEntry(key, self._append(value)))

    def _append(self, value: Any) -> Place:
        """Append an object as torch.save writes it; return its place in the file."""
        start = self.stream.tell()
        torch.save(value, self.stream)
        return Place(self.name, start, self.stream.tell() - start)


def description(entries: Iterable[FileEntry]) -> bytes:
    """Return the pickled DCP metadata (content of .metadata) of all entries: shapes, dtypes and the
    place of each part.
    """
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    for block in entries:
        if block.dtype is None:
            described[block.key] = BytesStorageMetadata()
            places[MetadataIndex(block.key)] = block.place
            continue
        if block.key not in described:
            properties, full = TensorProperties(dtype=block.dtype), torch.Size(block.whole)
            described[block.key] = TensorStorageMetadata(properties, full, [])
        offset, chunks = torch.Size(block.at), described[block.key].chunks
        places[MetadataIndex(block.key, offset, len(chunks))] = block.place
        chunks.append(ChunkStorageMetadata(offset, torch.Size(block.shape)))
    paths = {key: (key,) for key in described}
    return pickle.dumps(Metadata(described, paths, places), protocol=4)


@dataclass(frozen=True)
class TorchDistWriter(MegatronWriter):
    """Writes a torch_dist checkpoint, one file per layer, files in parallel (see
    convert.ModelWriter). `plan` is for a single rank. `state`: optimizer state to write too, in its
    own dtypes.
    """

    state: Moments | None = None

    @property
    def tensors(self) -> int:
        """Number of weight tensors that are written."""
        return len(self.plan.entries)

    def write(self, folder: Path, pool: LayerPool) -> None:
        """Write the .distcp files, then .metadata, common.pt and metadata.json, into `folder`."""
        where = folder / self._name
        where.mkdir()
        # one file per group, so that threads need no lock
        layers = group_by_layer(self.plan.entries.items(), lambda item: item[1].ours[0])
        entries: list[list[FileEntry]] = [[] for _ in layers]

        def write_file(number: int, advance: Advance) -> None:
            """Write file `number`, which holds the tensors of one layer or a group outside the
            layers.
            """
            name = f"__{number}_0.distcp"
            with open(where / name, "xb") as stream:
                file = File(stream, name, entries[number])
                for canonical, entry in layers[number]:
                    self._write_one(file, canonical, entry)
                    advance(1)
                # Megatron expects a state for the head too
                if number == len(layers) - 1:
                    _state(file, "output_layer.", (), (), [])

        pool.run(write_file, range(len(layers)))
        (where / METADATA).write_bytes(description(chain(*entries)))
        torch.save(_common(self.plan, self.dtype, self.iteration, self.state), where / COMMON)
        (where / MARKER).write_text(
            json.dumps({"sharded_backend": BACKEND, "sharded_backend_version": 1})
        )

    def _write_one(self, file: File, canonical: str, entry: StoredTensor) -> None:
        """Write a stored tensor, under its canonical name, to the file, with its fp8 states and,
        for trained parameters, its optimizer state.
        """
        plan, kinds = self.plan, {} if self.state is None else self.state.kinds
        param, lying = plan.spec.params[entry.ours[0]], _stack_place(plan, canonical)
        wide = torch.promote_types(self.dtype, torch.float32)
        full = _read_entry(plan, entry, self.read, padding=True)
        lying.write(file, "", full.to(wide if param.precise else self.dtype))
        lying.states(file, len(full), scaling.products(plan.scales, entry))
        del full
        for kind, tensors in kinds.items() if param.trained else ():
            # one kind at a time: a moment is as large as its fp32 weight
            moment = _read_entry(plan, entry, tensors.read, padding=kind not in MOMENTS)
            lying.write(file, f"{OPTIMIZER}{kind}.", moment)
            del moment

    def open_written(self, folder: Path, sidecars: Path) -> Megatron:
        """Open what was written by its `args` alone; the sidecar folder is not used, as a
        config.json would take precedence over them.
        """
        return open_torch_dist(folder / self._name, rows=self.plan.spec.vocab_size)


def _common(
    plan: ExportPlan, dtype: torch.dtype, iteration: int | None, state: Moments | None
) -> dict[str, Any]:
    """Return the content of common.pt, what is not a tensor (args, iteration). The optimizer's
    parameter groups hold the update count only: learning rate and decay come from the run that
    resumes.
    """
    content: dict[str, Any] = {"singleton_local_shards": False}
    common = {
        "args": argparse.Namespace(**plan.args(dtype, iteration or 0) | {"ckpt_format": BACKEND}),
        "checkpoint_version": VERSION,
        "iteration": iteration or 0,
        "content_metadata": content,
    }
    if state is not None:
        # the form whose tensors have the shapes of parameters
        content["distrib_optim_sharding_type"] = "fully_reshardable"
        common["optimizer"] = {"optimizer": {"param_groups": [{"step": state.step}]}}
    return common


def _read_entry(
    plan: ExportPlan, entry: StoredTensor, read: Callable[[str], Tensor], padding: bool
) -> Tensor:
    """Return the stored tensor of an entry, built from our parameters as `read` returns them by
    name. Padding rows of a vocabulary are copies of the last row, or zeros without `padding`, as
    for moments, whose padding never had a gradient.
    """
    full = join_stored(entry.rule, [read(ours) for ours in entry.ours])
    if not plan.share(entry).padded:
        return full
    padded = shares.pad(full, plan.rows)
    if not padding and plan.rows > len(full):
        padded[len(full) :] = 0
    return padded


@dataclass(frozen=True)
class StackPlace:
    """Key of a tensor in the checkpoint, and its index in a stack of layers. Megatron stacks the
    layers of a dense model into one tensor; in a model with experts each layer is its own.
    """

    key: str
    index: tuple[int, ...] = ()
    """Index in the stack."""
    count: tuple[int, ...] = ()
    """Size of the stack."""

    def write(self, file: File, prefix: str, full: Tensor) -> None:
        """Write `full` to the file as one layer of its stack, under `prefix` + key (the prefix is
        that of an optimizer state, or empty).
        """
        # leading dims of size 1: the layer is a chunk of the stack
        part = full[(None,) * len(self.index)]
        shape, at = (*self.count, *full.shape), (*self.index, *(0,) * full.ndim)
        file.tensor(prefix + self.key, shape, at, part.contiguous().clone())

    def states(self, file: File, experts: int, known: Sequence[Scaling]) -> None:
        """Write the fp8 `_extra_state` that belongs to the weight, one per expert; empty ones where
        `known` is. Nothing for tensors that are not weights of a linear layer.
        """
        product = PRODUCT.fullmatch(self.key)
        if product is None:
            return
        if ".experts.experts." not in self.key:
            _state(file, product[1], self.index, self.count, known)
            return
        for expert in range(experts):
            at, count = (*self.index, expert), (*self.count, experts)
            _state(file, product[1], at, count, known[expert : expert + 1])


def _stack_place(plan: ExportPlan, name: str) -> StackPlace:
    """Return the key of a tensor in the checkpoint and its index in a stack of layers, by its
    canonical name. In a model with experts each layer has keys of its own, and no stack.
    """
    parsed = names.canonical(name)
    assert parsed is not None
    if parsed.layer is None:
        return StackPlace(name)
    rest = names.TE.spell(parsed.rest, parsed.layer, plan.spec.blocks[parsed.layer])
    rest = rest.removeprefix(f"{names.TE.layers}{parsed.layer}.")
    rest = re.sub(r"^mlp\.experts\.", "mlp.experts.experts.", rest)
    if any(block.mlp.experts for block in plan.spec.blocks):
        return StackPlace(f"{names.TE.layers}{parsed.layer}.{rest}")
    return StackPlace(f"{names.TE.layers}{rest}", (parsed.layer,), (plan.spec.layers,))


def _state(
    file: File,
    module: str,
    index: tuple[int, ...],
    count: tuple[int, ...],
    known: Sequence[Scaling],
) -> None:
    """Write a module's `_extra_state` (fp8 scaling of its products) at `index` of a stack of
    `count` modules; empty where nothing is `known`.
    """
    content = None
    if known:
        content = torch.frombuffer(bytearray(scaling.write_extra_state(known)), dtype=torch.uint8)
    shard = f"{'.'.join(map(str, index or (0,)))}_{'.'.join(map(str, count or (1,)))}"
    file.value(f"{module}_extra_state/shard_{shard}", [content])
