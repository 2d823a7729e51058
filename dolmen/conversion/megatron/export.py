"""Writes a model as a checkpoint of Megatron, rank by rank, one tensor in memory at a time.
source.py reads them.

    plan = Plan(spec, Ranks(tp=2, pp=2), names.TE)
    MegatronWriter(plan, source.read, torch.bfloat16, None).write(folder, LayerPool())

The files of a stage are open at once: a tensor is read, cut, and its pieces appended to them.
Stages are written in parallel. Layers are divided evenly over stages, as Megatron does
unless an option changes that.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dolmen.conversion.megatron import arguments, folders, names, scaling, shares
from dolmen.conversion.megatron.folders import Sizes
from dolmen.conversion.megatron.names import Dialect
from dolmen.conversion.megatron.shares import Share
from dolmen.conversion.megatron.source import Megatron, open_megatron
from dolmen.conversion.weights import Scales, Scaling, join_stored
from dolmen.conversion.writing import Advance, LayerPool
from dolmen.core.messages import divisor
from dolmen.families.rules import StoredTensor
from dolmen.files.safetensors import Spec
from dolmen.files.torch_files import TorchFileWriter
from dolmen.model.spec import ModelSpec

PADDED_TO = 128
"""The padded vocabulary is a multiple of this times tp: Megatron's default of
--make-vocab-size-divisible-by.
"""
VERSION = 3.0
PRODUCT = re.compile(r"(.*\.linear_\w+\.)weight")


@dataclass(frozen=True)
class Ranks:
    """Parallel sizes of the checkpoint to write, each 1 or more."""

    tp: int = 1
    pp: int = 1
    virtual_stages: int = 1
    ep: int = 1

    def __post_init__(self):
        """Raise ValueError for virtual stages without a pipeline."""
        if self.virtual_stages > 1 and self.pp == 1:
            raise ValueError("--virtual-stages needs a pipeline: set --pp to 2 or more")

    @property
    def sizes(self) -> Sizes:
        """The sizes that rank folders are named by."""
        return Sizes(self.tp, self.pp, self.ep)

    @property
    def stages(self) -> int:
        """Number of stages of the model, in the order of its layers."""
        return self.pp * self.virtual_stages

    def check(self, model_spec: ModelSpec) -> None:
        """Raise ValueError, naming the option and a divisor, where a size does not divide what it
        shards: heads and widths by tp, experts by ep, layers by pp x virtual stages.
        """
        for param in model_spec.params.values():
            # Megatron shards what we shard: the same divisibility
            for cut in param.shards:
                if cut.axis == "tp" and not cut.uneven and cut.units % self.tp:
                    raise ValueError(
                        f"{cut.option} ({cut.units}) is not divisible by --tp {self.tp}: choose a "
                        f"divisor, such as {divisor(cut.units, near=self.tp)}"
                    )
        self._check_experts({block.mlp.experts for block in model_spec.blocks} - {0})
        if model_spec.layers % self.stages:
            raise ValueError(
                f"num_hidden_layers ({model_spec.layers}) is not divisible by --pp {self.pp} x "
                f"--virtual-stages {self.virtual_stages}: choose divisors"
            )

    def _check_experts(self, numbers: set[int]) -> None:
        """Raise ValueError where ep does not divide each of the numbers of experts, or the model
        has none.
        """
        if self.ep > 1 and not numbers:
            raise ValueError(f"--ep is {self.ep}, but the model has no experts: leave it out")
        for number in numbers:
            if number % self.ep:
                raise ValueError(
                    f"the number of experts ({number}) is not divisible by --ep {self.ep}: choose "
                    f"a divisor, such as {divisor(number, near=self.ep)}"
                )


@dataclass(frozen=True)
class TensorPlace:
    """Place of a tensor in the checkpoint: pipeline rank and its names in the files there; of
    experts also the ep rank, and one name per expert.
    """

    pp: int
    names: tuple[str, ...]
    ep: int | None = None
    """None: every rank of ep has it."""

    def lies_on(self, pp: int, ep: int) -> bool:
        """Return whether the files of pipeline rank `pp` and expert rank `ep` hold the tensor."""
        return self.pp == pp and self.ep in (None, ep)


@dataclass(frozen=True)
class ExportPlan:
    """All files, names and shapes that are written, known before a tensor is read. Raises as
    `arguments.new`, `Ranks.check` and `names.weights`.
    """

    spec: ModelSpec
    ranks: Ranks
    dialect: Dialect
    scales: Scales = field(default_factory=dict)
    """Scales of delayed scaling; a dialect other than Transformer Engine's has no place for them.
    """

    def __post_init__(self):
        """Raise ValueError where the parallel sizes or Megatron's options cannot hold the
        model.
        """
        self.ranks.check(self.spec)
        arguments.new(self.spec, self.dialect.legacy)
        self._check_latents()

    @cached_property
    def entries(self) -> dict[str, StoredTensor]:
        """Tensors to write: canonical name -> which of our parameters it holds, and how they are
        rearranged.
        """
        return names.weights(self.spec, VERSION)

    def _check_latents(self) -> None:
        """Raise ValueError where tp does not divide the rows of latent attention's
        down-projections, in dialects that shard them.
        """
        for name, entry in self.entries.items():
            if self.dialect.cuts_down and names.DOWN.fullmatch(name):
                if entry.shape[0] % self.ranks.tp:
                    raise ValueError(
                        f"{name} has {entry.shape[0]} rows, which are not divisible by --tp "
                        f"{self.ranks.tp}: choose a divisor, or --spec te, which replicates them"
                    )

    @property
    def rows(self) -> int:
        """Rows of the embedding as written: the vocabulary padded to a multiple of 128 tp, as
        Megatron does by default.
        """
        of = PADDED_TO * self.ranks.tp
        return -(-self.spec.vocab_size // of) * of

    def share(self, entry: StoredTensor) -> Share:
        """Return how Megatron's tp ranks shard a stored tensor in this dialect."""
        if self.dialect.cuts_down and names.DOWN.fullmatch(entry.hf):
            return Share(0)
        return shares.share(entry, self.spec.params[entry.ours[0]])

    def places(self, name: str) -> list[TensorPlace]:
        """Return where a tensor, by canonical name, is stored: pipeline rank and names in its file.
        A tied embedding where pp > 1: first and last stage; experts: a place per ep rank, with a
        name per expert there, counted from 0; else one place.
        """
        parsed = names.canonical(name)
        assert parsed is not None
        last, spell = self.ranks.stages - 1, self.dialect.spell
        if parsed.layer is not None:
            # layers per stage
            per = self.spec.layers // self.ranks.stages
            stage, layer = divmod(parsed.layer, per)
            block = self.spec.blocks[parsed.layer]
            if not _is_expert(name):
                return [self._place(stage, [spell(parsed.rest, layer, block)])]
            local_experts = range(block.mlp.experts // self.ranks.ep)
            # counted on the ep rank, from 0
            local_names = [spell(parsed.rest, layer, block, expert) for expert in local_experts]
            return [replace(self._place(stage, local_names), ep=ep) for ep in range(self.ranks.ep)]
        if name == names.EMBEDDING and self.spec.head.tied and self.ranks.pp > 1:
            return [self._place(0, [spell(name)]), self._place(last, [self.dialect.tied])]
        # embeddings on the first stage; final norm and head on the last
        first = name.startswith("embedding.")
        return [self._place(0 if first else last, [spell(name)])]

    def _place(self, stage: int, names: list[str]) -> TensorPlace:
        """Return the place of tensors `names` of a stage. Stage s lies on pipeline rank s mod pp,
        in its chunk s // pp (interleaved).
        """
        chunk, pp = divmod(stage, self.ranks.pp)
        return TensorPlace(pp, tuple(f"{self._key(chunk)}.{name}" for name in names))

    def _key(self, chunk: int) -> str:
        """Return the key of a chunk's tensors in a rank's file: "model", or "model0", "model1", ...
        with virtual stages.
        """
        return "model" if self.ranks.virtual_stages == 1 else f"model{chunk}"

    def specs(self, pp: int, ep: int, dtype: torch.dtype) -> dict[str, Spec]:
        """Return shape and dtype of each tensor that every tp rank holds at (pp, ep), by its full
        name in the file. `dtype`: of all tensors but those that stay in fp32.
        """
        specs, wide = {}, torch.promote_types(dtype, torch.float32)
        for name, entry in self.entries.items():
            share, precise = self.share(entry), self.spec.params[entry.ours[0]].precise
            full = (self.rows, *entry.shape[1:]) if share.padded else entry.shape
            shape = share.shape(full, self.ranks.tp)
            for place in self.places(name):
                if place.lies_on(pp, ep):
                    # Megatron has one tensor per expert, ours is stacked
                    local_shape = shape[1:] if _is_expert(name) else shape
                    specs |= {
                        local_name: Spec(local_shape, wide if precise else dtype)
                        for local_name in place.names
                    }
        return specs

    def states(self, pp: int, ep: int) -> dict[str, bytes | None]:
        """Return the content of each `_extra_state` at (pp, ep), by its full name: the fp8 scaling
        state of a module with a weight, None where it is empty. No entries in a dialect that stores
        none (`stateful`).
        """
        if not self.dialect.stateful:
            return {}
        scalings: dict[str, list[Scaling]] = {}
        for name, entry in self.entries.items():
            if not PRODUCT.fullmatch(name):
                continue
            known = scaling.products(self.scales, entry)
            for place in self.places(name):
                if not place.lies_on(pp, ep):
                    continue
                first = 0 if place.ep is None else place.ep * len(place.names)
                for i, local_name in enumerate(place.names, first):
                    # linear_fc1.weight3 -> linear_fc1._extra_state: one for all experts of the
                    # module
                    state = re.sub(r"weight[0-9]*$", "_extra_state", local_name)
                    scalings.setdefault(state, []).extend(known[i : i + 1])
        if pp == self.ranks.pp - 1:
            scalings[f"{self._key(self.ranks.virtual_stages - 1)}.output_layer._extra_state"] = []
        return {
            name: scaling.write_extra_state(known) if known else None
            for name, known in scalings.items()
        }

    def values(
        self,
        pp: int,
        ep: int,
        dtype: torch.dtype,
        iteration: int,
        states: Mapping[str, bytes | None],
    ) -> dict[str, Any]:
        """Return the content of a rank's file at (pp, ep): args, iteration and, in place of each
        tensor, its Spec. `states`: the `_extra_state` entries of (pp, ep); their sizes hold for
        these bytes alone, as a pickle of tensors has their addresses in decimal.
        """
        values: dict[str, Any] = {
            "args": argparse.Namespace(**self.args(dtype, iteration)),
            "checkpoint_version": VERSION,
            "iteration": iteration,
            **{self._key(chunk): {} for chunk in range(self.ranks.virtual_stages)},
        }
        # states are stored as uint8 tensors
        fp8_states = {
            name: None if content is None else Spec((len(content),), torch.uint8)
            for name, content in states.items()
        }
        tensors: dict[str, Any] = {**self.specs(pp, ep, dtype), **fp8_states}
        for full, spec in tensors.items():
            way = self._way(full)
            here = values
            for step in way[:-1]:
                here = here.setdefault(step, {})
            here[way[-1]] = spec
        return values

    def _way(self, full: str) -> list[str]:
        """Return the path of keys that leads to a tensor in the file. The legacy classes nest a
        mapping per module, down to one flat mapping for all layers; Megatron-Core has one flat
        mapping.
        """
        # model.decoder.layers... -> ["model", "decoder.layers..."]
        key, _, name = full.partition(".")
        if not self.dialect.legacy:
            return [key, name]
        encoder = "language_model.encoder."
        if name.startswith(encoder):
            return [key, *encoder.split(".")[:2], name.removeprefix(encoder)]
        return [key, *name.split(".")]

    def args(self, dtype: torch.dtype, iteration: int) -> dict[str, Any]:
        """Return the options under `args` in every file: those of the model (arguments.new), of the
        parallel sizes, and what Megatron requires to load a checkpoint.
        """
        ranks, te = self.ranks, self.dialect.grouped
        virtual = ranks.virtual_stages if ranks.virtual_stages > 1 else None
        per = self.spec.layers // ranks.stages
        return {
            **arguments.new(self.spec, self.dialect.legacy),
            "vocab_size": self.spec.vocab_size,
            "padded_vocab_size": self.rows,
            "make_vocab_size_divisible_by": PADDED_TO,
            "tensor_model_parallel_size": ranks.tp,
            "pipeline_model_parallel_size": ranks.pp,
            "virtual_pipeline_model_parallel_size": virtual,
            "num_layers_per_virtual_pipeline_stage": per if virtual else None,
            "expert_model_parallel_size": ranks.ep,
            "expert_tensor_parallel_size": ranks.tp,
            "context_parallel_size": 1,
            "world_size": ranks.tp * ranks.pp * ranks.ep,
            # expert parallelism runs over data-parallel ranks
            "data_parallel_size": ranks.ep,
            "use_mcore_models": not self.dialect.legacy,
            "transformer_impl": "transformer_engine" if te else "local",
            "params_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
            "iteration": iteration,
            # a new run: the data order starts at its beginning
            "consumed_train_samples": 0,
            "consumed_valid_samples": 0,
            "tokenizer_type": "HuggingFaceTokenizer",
            "data_parallel_random_init": False,
            "ckpt_format": "torch",
        }


def _is_expert(name: str) -> bool:
    """Return whether a canonical name is of a tensor of routed experts."""
    return ".mlp.experts." in name


@dataclass(frozen=True)
class MegatronWriter:
    """Writes a checkpoint as a folder per rank, pipeline stages in parallel (see
    convert.ModelWriter). `read(name)` returns one of our parameters. `iteration` None or 0: saved
    as a release.
    """

    plan: ExportPlan
    read: Callable[[str], Tensor]
    dtype: torch.dtype
    iteration: int | None

    @property
    def tensors(self) -> int:
        """Number of tensors that are written, over all ranks."""
        ranks = self.plan.ranks
        files = product(range(ranks.pp), range(ranks.ep))
        return ranks.tp * sum(len(self.plan.specs(pp, ep, self.dtype)) for pp, ep in files)

    @property
    def scales(self) -> Scales:
        """fp8 scales as they read back: weights that Megatron multiplies as one share the scale."""
        return scaling.share_scales(self.plan.scales, self.plan.entries)

    @property
    def _name(self) -> str:
        """Name of the checkpoint's folder: iter_NNNNNNN, or release without updates."""
        return folders.names(self.iteration)[0]

    def write(self, folder: Path, pool: LayerPool) -> None:
        """Write the files of all ranks into `folder`, a pipeline stage per task of `pool`."""

        def write_stage(pp: int, advance: Advance) -> None:
            """Write the files of pipeline rank `pp`."""
            self._write_stage(folder / self._name, pp, advance)

        pool.run(write_stage, range(self.plan.ranks.pp))

    def _write_stage(self, folder: Path, pp: int, advance: Advance) -> None:
        """Write the files of all tp and ep ranks of a pipeline rank. All are open at once, so that
        each tensor is read only once.
        """
        plan = self.plan
        with ExitStack() as stack:
            files: dict[tuple[int, int], TorchFileWriter] = {}
            for tp, ep in product(range(plan.ranks.tp), range(plan.ranks.ep)):
                rank = folder / plan.ranks.sizes.name(tp, pp, ep)
                rank.mkdir(parents=True)
                # the pickle with all shapes is written first, numbers are appended
                states = plan.states(pp, ep)
                values = plan.values(pp, ep, self.dtype, self.iteration or 0, states)
                file = files[tp, ep] = TorchFileWriter(rank / folders.WEIGHTS[0], values)
                stack.callback(file.archive.close)
                for name, state in states.items():
                    if state is not None:
                        file.write(name, torch.frombuffer(bytearray(state), dtype=torch.uint8))
            for name, entry in plan.entries.items():
                places = [place for place in plan.places(name) if place.pp == pp]
                if places:
                    full = join_stored(entry.rule, [self.read(ours) for ours in entry.ours])
                    advance(_write_shares(plan, files, places, plan.share(entry), full))
                    del full  # or it would still be held while the next one is read
            for file in files.values():
                file.close()

    def write_sidecars(self, folder: Path) -> None:
        """Write the tracker, latest_checkpointed_iteration.txt, which names the checkpoint."""
        (folder / folders.TRACKER).write_text(folders.names(self.iteration)[1])

    def open_written(self, folder: Path, sidecars: Path) -> Megatron:
        """Open what was written by its `args` alone; the sidecar folder is not used, as a
        config.json would take precedence over them.
        """
        return open_megatron(folder / self._name, rows=self.plan.spec.vocab_size)


def _write_shares(
    plan: ExportPlan,
    files: Mapping[tuple[int, int], TorchFileWriter],
    places: Sequence[TensorPlace],
    share: Share,
    full: Tensor,
) -> int:
    """Write each rank's share of a tensor into the files of one stage, by (tp, ep). Returns the
    number of tensors written.
    """
    if share.padded:
        full = shares.pad(full, plan.rows)
    written = 0
    for tp in range(plan.ranks.tp):
        shard = share.cut(full, tp, plan.ranks.tp)
        for place, ep in product(places, range(plan.ranks.ep)):
            if place.ep not in (None, ep):
                continue
            # experts of this ep rank
            parts = [shard] if place.ep is None else shard.chunk(plan.ranks.ep)[place.ep]
            for name, part in zip(place.names, parts, strict=True):
                files[tp, ep].write(name, part)
            # experts of an ep rank are separate tensors: each counts
            written += len(parts)
    return written
