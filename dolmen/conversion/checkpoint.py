"""A checkpoint of a run as a source (source.py): its parameters have our names already, and what
its config.json would say is in its state.json, with what training has added. Adapters are merged
into the weights that they stand beside.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from jaxtyping import Shaped
from torch import Tensor

from dolmen.checkpoint import folders, reader, remote
from dolmen.checkpoint.folders import STATE, Damaged
from dolmen.checkpoint.saved import model_of, read_saved
from dolmen.conversion.sidecars import pad_vocabulary, with_special_tokens
from dolmen.conversion.weights import Scales, Scaling, WeightsAlone
from dolmen.core.messages import plural
from dolmen.families import ModelConfig, add_standard_fields, compare_fields, with_scalar_head
from dolmen.files.safetensors import Spec
from dolmen.model.spec import LoraSpec, ModelSpec
from dolmen.model.spec.lora import magnitude_name, scale_name
from dolmen.model.training import Training
from dolmen.ops import int8
from dolmen.optim.optimizer import MODEL
from dolmen.parallel import quantized_product, tensor

CRITIC = "critic."  # what the names of all that is a critic's begin with, in a checkpoint


@dataclass(frozen=True)
class RunCheckpoint(WeightsAlone):
    """A checkpoint of a training run as a source. Opening has checked the seal, but read no
    tensors.
    """

    model: ModelConfig
    training: Training
    """Router biases and adapters that training added to the model."""
    step: int
    run_model: ModelConfig
    """Model that was trained; `model` may have another config, for the same weights."""
    checkpoint: reader.Checkpoint
    init: str | None
    """The --init of the run: the model that it started from."""
    part: str = ""
    """Prefix of its tensors' names in the checkpoint: "" for the policy, CRITIC for the critic."""

    @property
    def where(self) -> Path:
        """Folder of the checkpoint (step-NNNNNNNN)."""
        return self.checkpoint.folder

    @property
    def title(self) -> str:
        """Text with the checkpoint's step, and whether its critic is read."""
        of = "the critic of " if self.part else ""
        return f"{of}the checkpoint of step {self.step}"

    @property
    def iteration(self) -> int:
        """Number of steps that the run has made, skipped ones included."""
        return self.step

    @property
    def adapter(self) -> LoraSpec | None:
        """The run's adapters; None if it trained all weights."""
        return self.training.adapter

    @property
    def spec(self) -> ModelSpec:
        """Spec of the parameters: that of the model with what training added, except adapters,
        which are merged on reading.
        """
        return self._spec

    @cached_property
    def _spec(self) -> ModelSpec:
        """Spec of the parameters, computed once."""
        return replace(self.training, adapter=None).apply_to(self.model.spec)

    @property
    def tokenizer(self) -> Path | None:
        """The run's tokenizer folder; None if it is no longer there."""
        return _tokenizer(self.where)

    @property
    def scaling(self) -> Scales:
        """Scales of fp8 delayed scaling; only weights whose amax history is not all zero, as it is
        before the first update.
        """
        return self._scaling

    @cached_property
    def _scaling(self) -> dict[str, Scaling]:
        """Amax histories and fp8 scales read from the checkpoint, by parameter name; only those
        with a history that is not all zero.
        """
        # stored as amax_history/NAME and fp8_scale/NAME beside model/NAME
        kind, read = f"{self.part}{quantized_product.HISTORY}/", self.checkpoint.read
        names = [name.removeprefix(kind) for name in self.checkpoint.specs if name.startswith(kind)]
        scalings = {
            n: Scaling(read(kind + n), read(f"{self.part}{quantized_product.SCALE}/{n}"))
            for n in names
        }
        return {name: scaling for name, scaling in scalings.items() if scaling.history.any()}

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Shape and dtype of each parameter, adapters merged. Raises KeyError where the
        checkpoint's names, ValueError where its shapes are not those of the model.
        """
        return self._specs

    @property
    def _kind(self) -> str:
        """Prefix of the names of weights in the checkpoint, with "critic." if the critic is
        read.
        """
        return f"{self.part}{MODEL}"

    @cached_property
    def _specs(self) -> dict[str, Spec]:
        """Shape and dtype of each parameter as it is read, adapters merged. Raises KeyError where
        the stored names are not those of the model, ValueError where the shapes are not.
        """
        stored = {
            name.removeprefix(self._kind): spec
            for name, spec in self.checkpoint.specs.items()
            if name.startswith(self._kind)
        }
        # with A and B: they are stored beside the weights
        shapes = replace(self.spec, adapter=self.adapter).shapes
        # compared in both directions, without merging adapters: they must be all there
        if absent := [
            name for name in (*shapes, *stored) if name not in shapes or name not in stored
        ]:
            raise KeyError(
                f"{self.where} does not fit its model{self._differences()}: "
                f"{plural(len(absent), 'parameter is', 'parameters are')} in only one of "
                f"checkpoint and model, e.g. {absent[:3]}"
            )
        if other := [name for name, shape in shapes.items() if stored[name].shape != shape]:
            name = other[0]
            raise ValueError(
                f"{name} is {stored[name].shape} in {self.where}, but the model expects "
                f"{shapes[name]}{self._differences()}"
            )
        return {name: self._restored_spec(name, stored[name]) for name in self.spec.params}

    def _restored_spec(self, name: str, spec: Spec) -> Spec:
        """Return shape and dtype of a weight as it is read, from its stored `spec`: an int8 weight
        is dequantised to the dtype of its scale.
        """
        if not self._in_eight_bits(name):
            return spec
        return replace(spec, dtype=self.checkpoint.specs[self._kind + scale_name(name)].dtype)

    def _in_eight_bits(self, name: str) -> bool:
        """Return whether a frozen weight is stored in int8 with a scale."""
        return f"{self._kind}{scale_name(name)}" in self.checkpoint.specs

    def stream(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) of every parameter, or of those in `only`, read one at a time
        with adapters merged.
        """
        names = [name for name in self.specs if only is None or name in only]
        return ((name, self.read(name)) for name in names)

    def read(self, name: str) -> Shaped[Tensor, "*whole"]:
        """Read one parameter with its LoRA or DoRA adapter merged. Raises KeyError where there is
        none.
        """
        if name not in self.specs:
            raise KeyError(f"{self.where} has no parameter {name}")
        # the base weight, as it was during training
        weight = self.frozen(name)
        if self.adapter is None or name not in self.adapter.targets:
            return weight
        down, up = (
            self.checkpoint.read(f"{self._kind}{adapter_name}")
            for adapter_name in self.adapter.pair(name)
        )
        # W + scale B A; DoRA scales each row of that to its learned length
        lengths = None
        if self.adapter.kind == "dora":
            lengths = self.read_adapter(magnitude_name(name))
        return tensor.Adapter(down, up, self.adapter.scale, lengths).merge(weight)

    def frozen(self, name: str) -> Shaped[Tensor, "*whole"]:
        """Read a base weight without its adapter; dequantised where it is stored in int8."""
        weight = self.checkpoint.read(f"{self._kind}{name}")
        if not self._in_eight_bits(name):
            return weight
        # one scale per output, [out]
        scale = self.checkpoint.read(f"{self._kind}{scale_name(name)}")
        return int8.dequantise(weight, scale, scale.dtype)

    def read_adapter(self, name: str) -> Shaped[Tensor, "*whole"]:
        """Read an adapter's tensor (A, B or DoRA's magnitude) by its parameter name."""
        return self.checkpoint.read(f"{self._kind}{name}")

    def _differences(self) -> str:
        """Return text that lists the fields in which `model` differs from the run's own, in
        parentheses, for an error; empty where none does.
        """
        differences = [
            f"{n} is {a} in the checkpoint, {b} here"
            for n, a, b in compare_fields(self.run_model, self.model)
        ]
        return f" ({'; '.join(differences)})" if differences else ""


def is_run(folder: Path) -> bool:
    """Return whether a folder looks like a run, its folder of checkpoints, or one checkpoint,
    complete or not.
    """
    named = re.fullmatch(folders.FOLDER, folder.resolve().name) is not None
    return (
        named
        or (folder / "checkpoints").is_dir()
        or (folder / STATE).is_file()
        or any(re.fullmatch(folders.FOLDER, path.name) for path in folder.glob("step-*"))
    )


def newest(folder: Path) -> Path:
    """Return the folder itself if it is a checkpoint, else the newest complete checkpoint of the
    run in it. Raises ValueError where there is none.
    """
    return reader.locate(folder)


def open_run(folder: Path) -> RunCheckpoint:
    """Open the checkpoint in a step folder as a source, without reading tensors. Raises Damaged
    where the checkpoint or its saved options cannot be read.
    """
    checkpoint = remote.open_working_copy(folder)
    # state.json holds the run's resolved options, from which the model is built again
    saved = read_saved(checkpoint.meta, folder)
    try:
        model, training = model_of(saved.run)
    except ValueError as error:
        raise Damaged(f"{folder / STATE}: {error}") from None
    # a run with --init has its special tokens from that config.json
    if saved.run.get("init") is None:
        model = with_special_tokens(add_standard_fields(model), _tokenizer(folder))
    return RunCheckpoint(model, training, saved.step, model, checkpoint, saved.run.get("init"))


def critic(source: RunCheckpoint) -> RunCheckpoint:
    """Return the critic of a PPO checkpoint as a source: the policy's shape with a scalar head, as
    a reward model, and a pad token that is not EOS. Raises ValueError where the checkpoint has no
    critic.
    """
    if not any(name.startswith(CRITIC) for name in source.checkpoint.specs):
        raise ValueError(
            f"{source.where} has no critic (only runs of dolmen train ppo have one): leave "
            "out --critic"
        )
    named = None if source.tokenizer is None else str(source.tokenizer)
    model = pad_vocabulary(with_scalar_head(source.run_model), named)
    return replace(source, model=model, run_model=model, part=CRITIC)


def _tokenizer(folder: Path) -> Path | None:
    """Return the tokenizer folder of the run that a step folder lies in; None if it is no longer
    there.
    """
    tokenizer = folder.parent.parent / "tokenizer"
    return tokenizer if tokenizer.is_dir() else None
