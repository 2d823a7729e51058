"""A checkpoint of Megatron as a source (../source.py): its ranks' files, joined tensor by tensor.

    pickles of all ranks -> names (names.py) -> one tensor of several ranks (shares.py) -> rules

Layers are counted as they are found: over stages, and of virtual stages over all stages of the
first chunk, then of the second. So stages may be uneven.
"""

import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor

from dolmen.conversion import sidecars
from dolmen.conversion.megatron import arguments, folders, names, options, scaling, shares
from dolmen.conversion.megatron.folders import Sizes
from dolmen.conversion.megatron.scaling import Kept, States
from dolmen.conversion.megatron.shares import Share
from dolmen.conversion.sidecars import Joined
from dolmen.conversion.weights import (
    MOMENTS,
    Moments,
    Scales,
    assemble,
    check_whole,
    describe_mismatch,
    require_float,
)
from dolmen.core.messages import plural
from dolmen.families import ModelConfig, edit
from dolmen.families.differences import differences
from dolmen.families.rules import StoredTensor
from dolmen.files import gate, torch_files
from dolmen.files.safetensors import Spec, Stored

CHUNK = re.compile(r"model([0-9]{0,4})")


@dataclass
class Shards:
    """The files of one tensor: one per tensor-parallel rank, or per rank and expert."""

    name: str
    """Name in the first rank's file."""
    by_rank: dict[int, dict[int, Stored]] = field(default_factory=dict)
    """tp rank -> expert (0 for tensors without experts) -> place in a file."""

    def add(self, rank: int, expert: int, stored: Stored) -> None:
        """Add the stored tensor of an expert (0 without experts) on tensor-parallel `rank`. Raises
        ValueError where that one is there already.
        """
        values = self.by_rank.setdefault(rank, {})
        if expert in values:
            raise ValueError(f"{stored.file} has {stored.name} twice, under two names")
        values[expert] = stored

    @property
    def stored(self) -> list[Stored]:
        """Places of the tensor's parts in files, of all ranks and experts."""
        return [value for rank in self.by_rank.values() for value in rank.values()]


@dataclass(frozen=True)
class State:
    """Optimizer state stored with the weights; the defaults mean that there is none."""

    step: int | None = None
    """Number of updates, None where it is not stored."""
    shards: Mapping[str, Mapping[str, Shards]] = field(default_factory=dict)
    """Kind (exp_avg, exp_avg_sq, param: an fp32 master) -> canonical name -> its files."""
    unread: str = ""
    """Reason why stored optimizer state cannot be read, else ""."""


@dataclass(frozen=True)
class MegatronCheckpoint:
    """Content of the pickles of all ranks, before any tensor is read."""

    folder: Path
    args: Mapping[str, Any]
    sizes: Sizes
    version: float
    iteration: int | None
    shards: dict[str, Shards]
    """Canonical name, with layers counted over the whole model -> its files."""
    legacy: bool
    layers: int
    """Number of layers that are there."""
    kind: str = ""
    """Name of the format (torch_dist), "" for a folder per rank."""
    state: State = State()
    states: States = field(default_factory=dict)
    """Transformer Engine's `_extra_state` entries, by the weight that each belongs to."""


def read_checkpoint(folder: Path) -> MegatronCheckpoint:
    """Read the pickles of all ranks of a Megatron checkpoint, no tensors yet. Raises ValueError for
    ranks that are missing, damaged, of another iteration, or whose experts are sharded over another
    tp size than the rest.
    """
    # any rank's file has the args
    first, *_ = folders.ranks(folder)
    values = _values(folders.weights_file(first))
    args = values["args"].values
    sizes = folders.sizes(folder, args)
    # expert tensor parallelism may have a size of its own in newer Megatron-Core
    if (args.get("expert_tensor_parallel_size") or sizes.tp) != sizes.tp and sizes.ep > 1:
        raise ValueError(
            f"{folder}: expert_tensor_parallel_size is {args['expert_tensor_parallel_size']}, tp "
            f"{sizes.tp}: only experts with the tensor-parallel size of the other layers are "
            "supported"
        )
    files = {
        (tp, pp, ep): folders.weights_file(folder / sizes.name(tp, pp, ep))
        for pp in range(sizes.pp)
        for tp in range(sizes.tp)
        for ep in range(sizes.ep)
    }
    # every pickle is opened now: damage of any rank is found first
    ranks = {at: _values(file) for at, file in files.items()}
    # a save that was interrupted leaves files of two iterations
    iterations = {rank.get("iteration") for rank in ranks.values()}
    if len(iterations) > 1:
        raise ValueError(
            f"{folder}: ranks are from different iterations, {sorted(map(str, iterations))}"
        )
    states: dict[str, dict[int, list[Kept]]] = {}
    shards, layers = _shards(ranks, files, sizes, states)
    return MegatronCheckpoint(
        folder,
        args,
        sizes,
        float(values.get("checkpoint_version", 0)),
        values.get("iteration"),
        shards,
        _is_legacy(values),
        layers,
        states=states,
    )


def _values(file: Path) -> Mapping[str, Any]:
    """Return the content of a rank's file: options, iteration and the places of tensors. Raises
    Refused for a file that is not what Megatron saves.
    """
    values = torch_files.load(file)
    if not isinstance(values, Mapping) or not _chunks(values):
        raise gate.refuse(file, "has no `model` entry, which files of Megatron have")
    check_common(values, file)
    return values


def check_common(values: Mapping[str, Any], file: Path) -> None:
    """Check args, checkpoint version and iteration in a file's values against their schemas. Raises
    Refused for a file without args, or with values that Megatron does not save.
    """
    args = values.get("args")
    if not isinstance(args, torch_files.Namespace):
        raise gate.refuse(file, "has no `args` entry, from which the model's sizes are read")
    # schemas know lists only
    plain = {n: list(v) if type(v) is tuple else v for n, v in args.values.items()}
    gate.check_schema(plain, f"{file}, args", options.SCHEMA)
    gate.check_schema(values.get("checkpoint_version", 0), file, VERSION)
    gate.check_schema(values.get("iteration", 0), file, ITERATION)


VERSION = Annotated[float, Interval(ge=0, le=3)]
ITERATION = Annotated[int, Interval(ge=0, le=2**40)]


def _chunks(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of the chunks of layers in a rank's file: `model`, or `model0`, `model1`, ...
    with virtual stages.
    """
    keys = [key for key in values if isinstance(key, str) and CHUNK.fullmatch(key)]
    return sorted(keys, key=lambda key: int(key.removeprefix("model") or 0))


def _is_legacy(values: Mapping[str, Any]) -> bool:
    """Return whether a rank file's tensors are those of Megatron's own classes from before
    Megatron-Core.
    """
    model = values[_chunks(values)[0]]
    return isinstance(model, Mapping) and "language_model" in model


def _shards(
    ranks: Mapping[tuple[int, int, int], Mapping[str, Any]],
    files: Mapping[tuple[int, int, int], Path],
    sizes: Sizes,
    states: dict[str, dict[int, list[Kept]]],
) -> tuple[dict[str, Shards], int]:
    """Collect every tensor of the model from all ranks; return canonical name -> its files, and the
    number of layers. Adds the `_extra_state` of fp8 modules to `states`. Raises ValueError where
    ranks lack a part of the model that others have.
    """
    shards: dict[str, Shards] = {}
    # `before`: layers in all earlier stages and chunks
    before, args = 0, ranks[0, 0, 0]["args"].values
    hidden, experts = args["hidden_size"], (args.get("num_experts") or 0) // sizes.ep
    # layers run over all stages in the first chunk, then in the second
    for key in _chunks(ranks[0, 0, 0]):
        for pp in range(sizes.pp):
            here = 0
            for tp in range(sizes.tp):
                for ep in range(sizes.ep):
                    at = (tp, pp, ep)
                    if key not in ranks[at]:
                        raise gate.refuse(
                            files[at], f"has no {key}, which files of other ranks have"
                        )
                    # places in the file, not tensors
                    tensors = torch_files.tensors(ranks[at][key], files[at])
                    tensors = shares.split_experts(tensors, hidden, experts)
                    here = max(here, _add_chunk(tensors, at, before, shards))
                    scaling.add_states(ranks[at][key], files[at], at, before, experts, states)
            before += here
    return shards, before


def _add_chunk(
    tensors: Mapping[str, Stored], at: tuple[int, int, int], before: int, shards: dict[str, Shards]
) -> int:
    """Add a rank's tensors of one chunk of layers to `shards`, with layers numbered from `before`;
    `at` is its (tp, pp, ep). Return the number of layers in the chunk. Non-expert tensors are taken
    from ep rank 0 only: the others have copies.
    """
    tp, _, ep = at
    here = 0
    parsed = [(names.canonical(name), stored) for name, stored in tensors.items()]
    # experts on this ep rank
    experts = 1 + max((n.expert for n, _ in parsed if n and n.expert is not None), default=-1)
    for name, stored in parsed:
        if name is None:
            continue
        here = max(here, 0 if name.layer is None else name.layer + 1)
        if name.expert is None and ep > 0:
            continue  # every rank of ep has it
        expert = 0 if name.expert is None else name.expert + ep * experts
        # layers are numbered from 0 in each chunk, experts from 0 on each ep rank
        full = name.with_layers_before(before)
        shards.setdefault(full, Shards(stored.name)).add(tp, expert, stored)
    return here


@dataclass(frozen=True)
class Megatron(Joined):
    """A checkpoint of Megatron as a source; its weights are read as those of `model`."""

    checkpoint: MegatronCheckpoint
    moment: bool = False
    """True if this reads a moment of each trained parameter in place of weights."""

    @property
    def where(self) -> Path:
        """Folder of the checkpoint (of one iteration)."""
        return self.checkpoint.folder

    @property
    def title(self) -> str:
        """Text with folder, kind and parallel sizes of the checkpoint."""
        checkpoint = self.checkpoint
        if checkpoint.kind:
            return f"{self.where}, a {checkpoint.kind} checkpoint of Megatron"
        kind = "older names" if checkpoint.legacy else "Megatron-Core's names"
        return f"{self.where}, a Megatron checkpoint ({kind}, {checkpoint.sizes.words})"

    def read_as(self, model: ModelConfig) -> "Megatron":
        """Return the source with its weights read as those of `model`."""
        return replace(self, model=model)

    @property
    def iteration(self) -> int | None:
        """Number of iterations that the checkpoint states, or None."""
        return self.checkpoint.iteration

    @property
    def precise(self) -> "Megatron":
        """The source with the optimizer's fp32 masters as its weights; itself where there are
        none.
        """
        # tensors without a master (buffers) stay as the weights have them
        masters = self.checkpoint.state.shards.get("param")
        return self._replace_shards({**self.checkpoint.shards, **masters}) if masters else self

    @property
    def moments(self) -> Moments | None:
        """AdamW's moments and update count; None where none are stored. Raises ValueError where the
        state is in a form that is not read, incomplete, or without an update count.
        """
        state = self.checkpoint.state
        if state.unread:
            raise ValueError(f"{self.where}: {state.unread}")
        if not state.shards:
            return None
        if state.step is None:
            raise ValueError(f"{self.where} does not record the number of optimizer updates")
        # SGD or Adafactor have other state
        if absent := [kind for kind in MOMENTS if kind not in state.shards]:
            raise ValueError(
                f"{self.where} has no {absent[0]} of its optimizer: only AdamW is supported"
            )
        kinds = {kind: self._replace_shards(state.shards[kind], moment=True) for kind in MOMENTS}
        check_whole(*kinds.values())
        return Moments(state.step, kinds)

    @cached_property
    def scaling(self) -> Scales:
        """Scales of fp8 delayed scaling, from the `_extra_state` of Transformer Engine's
        modules.
        """
        return scaling.read_scales(self.checkpoint.states, self._entries, self.spec)

    def _replace_shards(self, shards: Mapping[str, Shards], moment: bool = False) -> "Megatron":
        """Return the source with other tensors (fp32 masters, or with `moment` one of Adam's
        moments) under the same names and shapes.
        """
        return replace(
            self, checkpoint=replace(self.checkpoint, shards=dict(shards)), moment=moment
        )

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Shape and dtype of each parameter as it is read (of moments: of each trained one). Raises
        KeyError or ValueError where stored tensors do not fit the model.
        """
        return {
            name: Spec(param.shape, self._dtype(self._holding[name].hf))
            for name, param in self.spec.params.items()
            if param.trained or not self.moment
        }

    def stream(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (our name, tensor) of every parameter, or of those in `only`, joined from all
        ranks. Raises ValueError too where the last stage's copy of a tied embedding differs.
        """
        return assemble([self._entries[name] for name in self._compared], self._tensor, only)

    @cached_property
    def _entries(self) -> dict[str, StoredTensor]:
        """Canonical name -> which of our parameters the tensor holds; for moments only those of
        trained parameters.
        """
        entries = names.weights(self.spec, self.checkpoint.version)
        if not self.moment:
            return entries
        params = self.spec.params
        return {name: entry for name, entry in entries.items() if params[entry.ours[0]].trained}

    def _share(self, name: str) -> Share:
        """Return how tp ranks shard the tensor with this canonical name. Latent down-projections
        are whole on each rank or sharded by rows, depending on who saved them: their stored shape
        decides.
        """
        entry = self._entries[name]
        share = shares.share(entry, self.spec.params[entry.ours[0]])
        if not names.DOWN.fullmatch(name):
            return share
        first = self.checkpoint.shards[name].stored[0].spec.shape
        return share if first == entry.shape else Share(0)

    @cached_property
    def _checked(self) -> dict[str, Shards]:
        """Canonical name -> files of every tensor that holds parameters, after checking that names,
        shapes and dtypes fit the model on all ranks. A tied head's copy is checked, then left out.
        Raises KeyError or ValueError as `specs`.
        """
        remaining = dict(self.checkpoint.shards)
        # the last stage's copy of a tied embedding, where pp > 1
        tied = remaining.pop(names.HEAD, None) if self.spec.head.tied else None
        extra = [shards.name for name, shards in remaining.items() if name not in self._entries]
        missing = [name for name in self._entries if name not in remaining]
        if text := describe_mismatch(extra, missing):
            raise KeyError(f"{self.where} does not fit its args: {text}")
        for name, shards in remaining.items():
            self._check(name, shards)
        if tied is not None:
            self._check(names.EMBEDDING, tied)
        return {name: remaining[name] for name in self.checkpoint.shards if name in remaining}

    def _check(self, name: str, shards: Shards) -> None:
        """Raise ValueError where a tensor is missing on a tp rank, unequal in shape over ranks,
        not of the shape that `args` give, or not of a floating dtype.
        """
        entry, share, tp = self._entries[name], self._share(name), self.checkpoint.sizes.tp
        # one element if all ranks and experts agree
        specs = {shard.spec for shard in shards.stored}
        experts = {tuple(sorted(rank)) for rank in shards.by_rank.values()}
        first = shards.stored[0]
        if sorted(shards.by_rank) != list(range(tp)) or len(specs) > 1 or len(experts) > 1:
            raise ValueError(
                f"{self.where}: {shards.name} has different shapes on the {tp} tp ranks: "
                f"{sorted(str(spec.shape) for spec in specs)} on {len(shards.by_rank)}"
            )
        # ours is one tensor of all experts
        stacked = len(entry.shape) == len(first.spec.shape) + 1
        count = (len(experts.pop()),) if stacked else ()
        full_shape = share.full_shape((*count, *first.spec.shape), tp)
        same = full_shape == entry.shape
        if share.padded:
            # the vocabulary may have rows of padding
            same = full_shape[0] >= entry.shape[0] and full_shape[1:] == entry.shape[1:]
        if not same:
            raise ValueError(
                f"{shards.name} is {first.spec.shape} on each of {tp} tp ranks in {first.file}, "
                f"{full_shape} together, but the model expects {entry.shape}"
            )
        require_float(first)

    def _tensor(self, name: str) -> Tensor:
        """Read the tensor with this canonical name, joined from all ranks; 1 is added to norm
        weights that are stored less 1.
        """
        full = self._join(name, self._checked[name])
        return full.to(self._dtype(name)) + 1 if self._is_shifted(name) else full

    def _is_shifted(self, name: str) -> bool:
        """Return whether a tensor is a norm weight that is stored less 1 (zero-centered gamma). Its
        moments are not shifted: the gradient is the same.
        """
        param = self.spec.params[self._entries[name].ours[0]]
        return (
            not self.moment
            and param.role == "norm"
            and arguments.has_shifted_norms(self.checkpoint.args)
        )

    def _dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor as it is read: as stored, but at least fp32 for shifted
        norms, since 1 + w needs more digits than w.
        """
        stored = self._checked[name].stored[0].spec.dtype
        return torch.promote_types(stored, torch.float32) if self._is_shifted(name) else stored

    def _join(self, name: str, shards: Shards) -> Tensor:
        """Read the parts of a tensor on all ranks and return them joined, without padding rows, in
        the shape of its entry.
        """
        entry, share = self._entries[name], self._share(name)
        ranks = [shards.by_rank[tp] for tp in sorted(shards.by_rank)]
        if share.dim is None:
            # replicated: rank 0's copy is that of all
            ranks = ranks[:1]
        stacked = len(entry.shape) == len(ranks[0][0].spec.shape) + 1
        parts = [
            torch.stack([rank[e].read() for e in sorted(rank)]) if stacked else rank[0].read()
            for rank in ranks
        ]
        # padding rows of the vocabulary are cut off
        return share.join(parts)[: entry.shape[0]]

    @cached_property
    def _compared(self) -> dict[str, Shards]:
        """`_checked`, after comparing the last stage's copy of a tied embedding with the embedding
        byte by byte. Raises ValueError where they differ.
        """
        tied = self.checkpoint.shards.get(names.HEAD) if self.spec.head.tied else None
        if tied is None:
            return self._checked
        embedding = self._checked[names.EMBEDDING]
        # rank by rank, without joining the shards
        for head_shard, embedding_shard in zip(tied.stored, embedding.stored, strict=True):
            if any(
                a != b for a, b in zip(head_shard.chunks(), embedding_shard.chunks(), strict=True)
            ):
                raise ValueError(
                    f"untie_embeddings_and_output_weights is false, but {head_shard.name} in "
                    f"{head_shard.file} differs from {embedding_shard.name}"
                )
        return self._checked


def open_megatron(folder: Path, rows: int | None = None) -> Megatron:
    """Open the checkpoint in the folder of an iteration as a source. The model is that of the
    config.json next to it, else what its `args` say, with a vocabulary of `rows` tokens or of the
    tokenizer next to it. Raises ValueError where no file states the vocabulary, and as
    `read_checkpoint`.
    """
    return source_of(read_checkpoint(folder), rows)


def source_of(checkpoint: MegatronCheckpoint, rows: int | None = None) -> Megatron:
    """Return a source of a checkpoint whose pickles are read, with a vocabulary of `rows` tokens
    (None: of the size it states).
    """
    place = sidecars.place(checkpoint.folder)
    return Megatron(_model(checkpoint, place, rows), place, checkpoint)


def _model(checkpoint: MegatronCheckpoint, place: Path, rows: int | None) -> ModelConfig:
    """Return the model of the config.json in folder `place`, warning where the args differ, or else
    build it from the args. Raises ValueError where the vocabulary is unknown or larger than the
    embedding, or layers are missing.
    """
    stated = sidecars.config(place)
    known = sidecars.vocabulary(place, stated, rows)
    embedding = checkpoint.shards.get(names.EMBEDDING)
    if embedding is None:
        raise KeyError(f"{checkpoint.folder} has no {names.EMBEDDING} under any known name")
    shape, dtype = embedding.stored[0].spec.shape, embedding.stored[0].spec.dtype
    # rows over all tp ranks, padding included
    stored = Share(0).full_shape(shape, checkpoint.sizes.tp)[0]
    if known is None:
        raise ValueError(
            f"{checkpoint.folder} has {stored:,} embedding rows, padding included, and the number "
            "of tokens is unknown: give --vocab-size, or put the model's config.json or tokenizer "
            "into the folder"
        )
    if known > stored:
        raise ValueError(
            f"{checkpoint.folder} has {stored:,} embedding rows, fewer than {known:,} tokens: "
            "check --vocab-size, config.json or the tokenizer"
        )
    # a stage's files may be missing without a gap in the names
    if checkpoint.layers != checkpoint.args["num_layers"]:
        raise ValueError(
            f"{checkpoint.folder} has {plural(checkpoint.layers, 'layer')}, num_layers in its "
            f"args is {checkpoint.args['num_layers']}"
        )
    # also with a config.json, to warn where the two differ
    model_spec = arguments.read(checkpoint.args, checkpoint.legacy, known)
    if stated is None:
        # no config.json: a family that can express the spec
        model = sidecars.with_special_tokens(
            sidecars.express(model_spec), sidecars.tokenizer(place)
        )
        return edit(model, dtype=str(dtype).removeprefix("torch."))
    if different := differences(stated.spec, model_spec):
        text = "; ".join(f"{n} = {a}, in args {b}" for n, a, b in different[:3])
        warnings.warn(f"{place / 'config.json'} is used: {text}", stacklevel=2)
    return stated
