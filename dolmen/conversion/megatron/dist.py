"""Megatron-Core's checkpoints of format torch_dist: those of torch's DCP, whose tensors are whole,
whatever ranks have written parts of them.

    metadata.json   {"sharded_backend": "torch_dist", ...}: written last
    .metadata       every tensor and its chunks (checkpoint/metadata.py)
    __0_1.distcp    chunks, each as torch.save writes a tensor
    common.pt       what is no tensor, the options of the run among it; since July 2026 an entry
                    `common_state/shard_0_1` of the files above

Layers that are alike are one tensor, [layers, ...], whose names have no number; of others each has
its own. So it is with experts, [layers, experts, ...]. Norms have the names of Transformer Engine,
whichever classes were used; [gate; up] is that of the whole; a tied head has no tensor.

The moments of AdamW and its fp32 masters have the name and the shape of their parameter, behind
`optimizer.state.exp_avg.`, `.exp_avg_sq.` and `.param.`: Megatron calls that fully_reshardable. Its
other forms cut the numbers of many parameters, laid end to end, over ranks, and are not read.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from dolmen.checkpoint.folders import METADATA
from dolmen.checkpoint.metadata import Foreign, overlap, read_foreign
from dolmen.conversion.megatron import folders, names
from dolmen.conversion.megatron.folders import Sizes
from dolmen.conversion.megatron.scaling import Kept, States
from dolmen.conversion.megatron.source import (
    Megatron,
    MegatronCheckpoint,
    Shards,
    State,
    check_common,
    source_of,
)
from dolmen.files import gate, kinds, torch_files
from dolmen.files.safetensors import Spec, Stored
from dolmen.files.torch_files import StoredView

MARKER, BACKEND = "metadata.json", "torch_dist"
COMMON, COMMON_ENTRY = "common.pt", "common_state/shard_0_1"
# Of tensors, what is no parameter.
BESIDE = re.compile(
    r"(?:chained_[0-9]+\.)?optimizer\..*|rng_state.*|rerun_state_machine.*|.*_extra_state.*"
)
STATE = re.compile(
    r"(?:chained_[0-9]{1,6}\.)?optimizer\.state\.(?P<kind>exp_avg_sq|exp_avg|param|fp32_param)\."
    r"(?P<key>.+)"
)
KIND = {"fp32_param": "param"}
"""Other name of fp32 masters: in older checkpoints, and in those without a distributed
optimizer.
"""
SHARD = re.compile(
    r"(?P<module>.+\.)_extra_state/shard_(?P<at>[0-9]{1,6}(?:\.[0-9]{1,6}){0,3})_[0-9.]+"
)
"""Name of an `_extra_state`: its module, its index in a stack, and the stack's size."""
FLAT = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.distributed\..*")
LAYERED = re.compile(r"(?P<start>decoder\.layers\.)(?:(?P<layer>[0-9]{1,6})\.)?(?P<rest>\D.*)")
EXPERTS = re.compile(
    r"mlp\.experts\.experts\.(?:(?P<expert>[0-9]{1,6})\.)?(?P<rest>linear_fc[12]\.\w+)"
)


@dataclass(frozen=True)
class Chunk:
    """A part of a stored tensor: its offsets and sizes in the tensor, and its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    position: int
    length: int

    def locate(self, name: str, dtype: torch.dtype) -> StoredView:
        """Return where the chunk's numbers lie in its file, a torch.save archive. `name`: of the
        tensor, for errors. Raises Refused where the archive holds no tensor of this shape and
        dtype.
        """
        # restricted unpickling: finds where numbers lie, executes nothing
        stored = torch_files.load_part(self.file, self.position, self.length)
        if not isinstance(stored, StoredView) or (stored.shape, stored.dtype) != (
            self.sizes,
            dtype,
        ):
            raise gate.refuse(
                self.file,
                f"holds no {dtype} of {self.sizes} at byte {self.position:,}, where {name} has one",
            )
        return stored


@dataclass(frozen=True)
class Pieces(Stored):
    """A tensor stored in chunks; or, with `at`, its slice at these indices of the first dims: one
    layer or expert of a stack.
    """

    at: tuple[int, ...] = ()
    parts: tuple[Chunk, ...] = ()

    def read(self) -> Shaped[Tensor, "*whole"]:
        """Read all chunks and return the whole tensor (or slice of a stack). Raises Refused where a
        chunk is not as described, or chunks overlap or leave elements out.
        """
        full, filled = torch.empty(self.spec.shape, dtype=self.spec.dtype), 0
        for part in self.parts:
            piece = self._piece(part)
            place = tuple(
                slice(start, start + size)
                for start, size in zip(part.offsets[len(self.at) :], piece.shape, strict=True)
            )
            full[place].copy_(piece)
            filled += piece.numel()
        if filled != full.numel():
            raise gate.refuse(
                self.file, f"has {filled:,} of {full.numel():,} numbers of {self.name}"
            )
        # Counting alone would miss a chunk stored twice in the place of another.
        if overlap(self.parts):  # as many numbers as there are, and some of them nowhere
            raise gate.refuse(self.file, f"chunks of {self.name} overlap")
        return full

    def _piece(self, part: Chunk) -> Tensor:
        """Read the elements of one chunk that belong to this tensor, or to this slice of
        the stack.
        """
        view, first = part.locate(self.name, self.spec.dtype), len(self.at)
        # a layer of a stack is a slice of the chunk: skip to it by its strides
        steps = zip(self.at, part.offsets, view.strides, strict=False)
        skipped = sum((at - offset) * stride for at, offset, stride in steps)
        part_view = replace(
            view,
            offset=view.offset + skipped,
            shape=view.shape[first:],
            strides=view.strides[first:],
        )
        return part_view.locate(self.name, part.file).read()

    def chunks(self, size: int = 2**20) -> Iterator[bytes]:
        """Yield the tensor's bytes, row-major, in blocks of at most `size` bytes; the tensor is
        read into memory whole.
        """
        data = self.read().reshape(-1).view(torch.uint8)
        return (bytes(part.numpy()) for part in data.split(size))


def is_torch_dist(folder: Path) -> bool:
    """Return whether a folder, or the checkpoint that its tracker names, has a metadata.json.
    Raises Refused as `newest`.
    """
    return (folders.newest(folder) / MARKER).is_file()


def open_torch_dist(folder: Path, rows: int | None = None) -> Megatron:
    """Open the torch_dist checkpoint in the folder of an iteration as a source; arguments as of
    `open_megatron` (megatron/source.py). Raises ValueError.
    """
    return source_of(read_checkpoint(folder), rows)


def read_checkpoint(folder: Path) -> MegatronCheckpoint:
    """Read names, shapes and places of everything in a torch_dist checkpoint, no tensors yet.
    Raises Refused for files that are missing, damaged or of another format, ValueError for layers
    that are not all there.
    """
    backend = gate.read_json(folder / MARKER, kinds.DIST_MARKER)["sharded_backend"]
    if backend != BACKEND:
        raise gate.refuse(
            folder / MARKER, f"has the backend {backend}: only {BACKEND} is supported"
        )
    description = read_foreign(folder / METADATA)
    common, file = read_common(folder, description)
    stored = {
        key: Stored(key, Spec(tuple(tensor.size), tensor.properties.dtype), folder, 0)
        for key, tensor in description.tensors.items()
    }
    chunks = chunks_of(folder, description)
    parameters = {key: tensor for key, tensor in stored.items() if not BESIDE.fullmatch(key)}
    shards, layers = _shards(parameters, chunks)
    return MegatronCheckpoint(
        folder,
        common["args"].values,
        # tensors are whole: no sharding to undo
        Sizes(1, 1, 1),
        float(common.get("checkpoint_version", 3)),
        common.get("iteration"),
        shards,
        legacy=False,
        layers=layers,
        kind=BACKEND,
        state=_state(stored, chunks, common, file),
        states=_states(folder, description),
    )


def read_common(folder: Path, description: Foreign) -> tuple[Mapping[str, Any], Path]:
    """Return the checkpoint's values that are not tensors (args, iteration, ...), and the file that
    holds them. Raises Refused where there is none.
    """
    file = folder / COMMON
    # since July 2026 it is an entry of a .distcp file
    place = description.others.get(COMMON_ENTRY)
    if file.is_file():
        values = torch_files.load(file)
    elif place is not None:
        file = folder / place.relative_path
        values = torch_files.load_part(file, place.offset, place.length)
        values = values[0] if isinstance(values, list) and len(values) == 1 else values
    else:
        raise gate.refuse(file, f"is not there, and {METADATA} has no {COMMON_ENTRY}")
    if not isinstance(values, Mapping):
        raise gate.refuse(file, "does not contain a mapping")
    check_common(values, file)
    return values, file


def _shards(
    stored: Mapping[str, Stored], chunks: Mapping[str, list[Chunk]]
) -> tuple[dict[str, Shards], int]:
    """Return canonical name -> stored tensor for every parameter (one layer or expert of a stack),
    and the number of layers. `stored` is keyed by the parameter's name, also for optimizer state,
    while `chunks` is keyed by the tensor's own name.
    """
    shards: dict[str, Shards] = {}
    layers = 0
    for key, stored_tensor in stored.items():
        # the names that a checkpoint of rank folders would have
        named = list(_name_pieces(key, stored_tensor))
        # leading dims that count layers and experts
        dims = len(named[0][1]) if named else 0
        lying = group_by_index(chunks[stored_tensor.name], dims)
        for name, at in named:
            canonical = names.canonical(name)
            if canonical is None:
                continue
            if canonical.layer is not None:
                layers = max(layers, canonical.layer + 1)
            full = canonical.with_layers_before(0)
            members = tuple(lying.get(at, ()))
            spec = Spec(stored_tensor.spec.shape[dims:], stored_tensor.spec.dtype)
            file = members[0].file if members else stored_tensor.file / METADATA
            pieces = Pieces(stored_tensor.name, spec, file, 0, at, members)
            shards.setdefault(full, Shards(stored_tensor.name)).add(
                0, canonical.expert or 0, pieces
            )
    return shards, layers


def _state(
    stored: Mapping[str, Stored],
    chunks: Mapping[str, list[Chunk]],
    common: Mapping[str, Any],
    file: Path,
) -> State:
    """Return the optimizer state: AdamW's moments and fp32 masters by parameter, and the update
    count. A state that cannot be read is returned as State(unread=reason), so that the weights can
    still be.
    """
    by_kind: dict[str, dict[str, Stored]] = {}
    for tensor_name, tensor in stored.items():
        if FLAT.fullmatch(tensor_name):
            return State(
                unread=f"{tensor_name} is sharded over ranks across parameter boundaries: save it "
                "with --dist-ckpt-optim-fully-reshardable"
            )
        match = STATE.fullmatch(tensor_name)
        if match is None:
            continue
        kind, key = KIND.get(match["kind"], match["kind"]), match["key"]
        of = stored.get(key)
        # moments of a flattened buffer have other shapes
        if of is None or of.spec.shape != tensor.spec.shape:
            shape = "not there" if of is None else of.spec.shape
            return State(unread=f"{tensor_name} is {tensor.spec.shape}, and {key} is {shape}")
        if key in by_kind.setdefault(kind, {}):
            return State(unread=f"{tensor_name} is not the only {kind} of {key}")
        by_kind[kind][key] = tensor
    if not by_kind:
        return State()
    try:
        step = updates(common, file)
    except ValueError as error:
        return State(unread=str(error))
    # the same names and stacks as the weights
    return State(step, {kind: _shards(tensors, chunks)[0] for kind, tensors in by_kind.items()})


def _states(folder: Path, description: Foreign) -> States:
    """Return canonical name of a weight -> expert -> places of the fp8 `_extra_state` that belongs
    to it, for all of them.
    """
    states: dict[str, dict[int, list[Kept]]] = {}
    for key, where in description.others.items():
        shard = SHARD.fullmatch(key)
        if shard is None:
            continue
        at = [int(index) for index in shard["at"].split(".")]
        # the state is known by the weight that it belongs to
        module_name, expert = f"{shard['module']}weight", 0
        if match := LAYERED.fullmatch(module_name):
            layer, rest = match["layer"] or at.pop(0), match["rest"]
            if of := EXPERTS.fullmatch(rest):
                expert = int(of["expert"] or (at.pop(0) if at else 0))
                rest = f"mlp.experts.{of['rest']}"
            module_name = f"{match['start']}{layer}.{rest}"
        name = names.canonical(module_name)
        if name is not None:
            state = Kept(folder / where.relative_path, part=(where.offset, where.length))
            states.setdefault(name.with_layers_before(0), {}).setdefault(expert, []).append(state)
    return states


def updates(common: Mapping[str, Any], file: Path) -> int | None:
    """Return how many updates the optimizer has made, from its parameter groups or its common_step,
    else the number of iterations (None if not stated). Raises ValueError where parts of the model
    have different counts, or a count is not one.
    """
    optimizer = common.get("optimizer", {})
    optimizer = optimizer if isinstance(optimizer, Mapping) else {}
    # one optimizer, or several by number (of experts and of the rest)
    parts = (
        [optimizer]
        if optimizer.keys() & {"optimizer", "param_groups"}
        else list(optimizer.values())
    )
    counts = {
        _number(step, file)
        for part in parts
        if isinstance(part, Mapping)
        for step in _steps(part.get("optimizer", part))
    }
    if len(counts) > 1:
        raise ValueError(f"parameters have different update counts: {sorted(counts)}")
    return counts.pop() if counts else common.get("iteration")


def _steps(inner: Any) -> Iterator[Any]:
    """Yield the step counts in a torch optimizer's state: one per parameter group, and
    `common_step`.
    """
    if not isinstance(inner, Mapping):
        return
    groups, state = inner.get("param_groups", ()), inner.get("state", {})
    if isinstance(groups, list):
        yield from (
            group["step"] for group in groups if isinstance(group, Mapping) and "step" in group
        )
    if isinstance(state, Mapping) and "common_step" in state:
        yield state["common_step"]


def _number(step: Any, file: Path) -> int:
    """Return a step count as int; it may be stored as a tensor of one element. Raises ValueError
    for anything that is not a count.
    """
    if isinstance(step, StoredView) and step.shape in ((), (1,)):
        step = step.locate("step", file).read().item()
    if isinstance(step, int | float) and not isinstance(step, bool):
        # torch.optim stores steps as float32 tensors
        if 0 <= step < 2**40 and step == int(step):
            return int(step)
    raise ValueError(f"{file}: the optimizer's step is {step!r:.40}, which is not a whole number")


def _name_pieces(key: str, full: Stored) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name as in a rank's file, indices in the first dims) of each tensor that the stack
    `full` for parameter `key` contains: one per layer and expert; the key itself outside of layers.
    """
    match = LAYERED.fullmatch(key)
    if match is None:
        yield key, ()
        return
    sizes, layer_, rest = list(full.spec.shape), match["layer"], match["rest"]
    layers = _count_index(full, sizes, layer_)
    expert = EXPERTS.fullmatch(rest)
    if expert is None:
        for layer in layers:
            yield f"{match['start']}{layer}.{rest}", (layer,) * (layer_ is None)
        return
    experts = _count_index(full, sizes, expert["expert"])
    for layer in layers:
        for number in experts:
            at = (layer,) * (layer_ is None) + (number,) * (expert["expert"] is None)
            suffix = f"mlp.experts.local_experts.{number}.{expert['rest']}"
            yield f"{match['start']}{layer}.{suffix}", at


def _count_index(full: Stored, sizes: list[int], layer: str | None) -> Sequence[int]:
    """Return the layer or expert numbers in a stack: only `layer` where the name has a number, else
    all of the first dim, which is removed from `sizes`. Raises Refused where there are more than
    any model has.
    """
    if layer is not None:
        return [int(layer)]
    if (
        not sizes
        or prod(full.spec.shape[: len(full.spec.shape) - len(sizes) + 1]) > kinds.MOST_MATRICES
    ):
        raise gate.refuse(full.file / METADATA, f"has {full.name} of {full.spec.shape}")
    return range(sizes.pop(0))


def chunks_of(folder: Path, description: Foreign) -> dict[str, list[Chunk]]:
    """Return tensor name -> its chunks in the checkpoint's files. Raises Refused for a file that is
    missing, or shorter than its chunks say.
    """
    chunks: dict[str, list[Chunk]] = {key: [] for key in description.tensors}
    ends: dict[Path, int] = {}
    sizes = {
        (key, chunk.offsets): tuple(chunk.sizes)
        for key, tensor in description.tensors.items()
        for chunk in tensor.chunks
    }
    for index, place in description.places.items():
        offsets, file = index.offset or torch.Size(), folder / place.relative_path
        size = sizes[index.fqn, offsets]
        chunks[index.fqn].append(Chunk(tuple(offsets), size, file, place.offset, place.length))
        ends[file] = max(ends.get(file, 0), place.offset + place.length)
    for file, end in ends.items():
        with gate.open_file(file) as stream:
            size = stream.seek(0, os.SEEK_END)
        if size < end:
            raise gate.refuse(file, f"is truncated: {size:,} bytes, but {METADATA} expects {end:,}")
    return chunks


def group_by_index(chunks: Sequence[Chunk], dims: int) -> dict[tuple[int, ...], list[Chunk]]:
    """Return (indices in the first `dims` dims: layer, expert) -> chunks that hold a part of it; a
    chunk of several layers is in each of their groups.
    """
    groups: dict[tuple[int, ...], list[Chunk]] = {}
    for chunk in chunks:
        # a chunk may span several layers
        first = zip(chunk.offsets[:dims], chunk.sizes[:dims], strict=True)
        for at in product(*(range(offset, offset + size) for offset, size in first)):
            groups.setdefault(at, []).append(chunk)
    return groups
