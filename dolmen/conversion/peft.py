"""Adapters as PEFT writes them: a folder with adapter_config.json and adapter_model.safetensors,
which names a model and does not hold it; most trainers save the tokenizer there too.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    A [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight    B [out, rank]
    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector    of DoRA, m [out]

    read(folder, model)        -> LowRank, its tensors by our names
    write(run, folder)         those of a run, with its tokenizer
    Adapted                    the folder as a source (source.py): its model with them merged

A layer has one here where one of our matrices is all of it. Where a file has several as one
(GPT-2's c_attn, stacked experts) PEFT has one A for all of them, and each of ours its own: neither
is the other.
"""

import json
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Shaped
from torch import Tensor

from dolmen.conversion import peft_config, writing
from dolmen.conversion.checkpoint import RunCheckpoint
from dolmen.conversion.hf import ADAPTER_FILES, copy_tokenizer, tokenizer_files
from dolmen.conversion.weights import FLOATS, WeightsAlone
from dolmen.core.filesystem import expand
from dolmen.families import ModelConfig, weight_map
from dolmen.families.rules import Rename, Transpose
from dolmen.files import gate, kinds, safetensors
from dolmen.files.safetensors import Spec, Stored
from dolmen.files.write import check_new_folder
from dolmen.model.spec import LoraSpec, ModelSpec
from dolmen.model.spec.lora import ADAPTED, magnitude_name
from dolmen.parallel import tensor

CONFIG, WEIGHTS = ADAPTER_FILES
PREFIX = "base_model.model."
NOT_LINEAR = ("norm", "embedding")
"""Roles of weights that PEFT has no lora_A and lora_B for: an embedding has lora_embedding_A."""
KINDS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


class Readable(Protocol):
    """A stored tensor that can be read."""

    def read(self) -> Tensor:
        """Return the tensor, read from storage."""
        ...


@dataclass(frozen=True)
class LowRank:
    """LoRA or DoRA adapters of a model, without its weights."""

    form: LoraSpec
    stored: Mapping[str, Readable]
    """Name of A, B or (DoRA) magnitude -> its reader."""

    def tensors(self, weight: str) -> dict[str, Tensor]:
        """Read the adapter tensors of one target weight: by our names A, B, and DoRA's
        magnitude.
        """
        return {name: self.stored[name].read() for name in names(self.form, weight)}

    def merge(self, name: str, value: Tensor) -> Tensor:
        """Return weight `name` with its adapter merged, computed in the wider dtype and returned in
        that of `value`; `value` itself where the weight has no adapter.
        """
        if name not in self.form.targets:
            return value
        # in the order of KINDS
        parts = list(self.tensors(name).values())
        dtype = torch.promote_types(value.dtype, parts[0].dtype)
        down, up, *lengths = (part.to(dtype) for part in parts)
        adapter = tensor.Adapter(down, up, self.form.scale, lengths[0] if lengths else None)
        return adapter.merge(value.to(dtype)).to(value.dtype)


def names(form: LoraSpec, weight: str) -> tuple[str, ...]:
    """Return our names of the adapter's parameters for a weight: A, B and, for DoRA, the
    magnitude.
    """
    return (*form.pair(weight), *([magnitude_name(weight)] if form.kind == "dora" else ()))


def is_peft(folder: Path) -> bool:
    """Return whether a folder has an adapter_config.json and no config.json."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def base(folder: Path) -> str:
    """Return the base model, a path or hub id, that adapter_config.json names; a relative path is
    also looked up from the adapters' folder. Raises Refused where it names none.
    """
    name = gate.read_json(folder / CONFIG, kinds.ADAPTER_CONFIG).get("base_model_name_or_path")
    if not name:
        raise gate.refuse(
            folder / CONFIG, "has no base_model_name_or_path: add the base model there"
        )
    local = folder / name
    return str(local) if not expand(name).is_dir() and local.is_dir() else name


def read(folder: Path, model: ModelConfig) -> LowRank:
    """Read the adapters of `model` in a PEFT folder; tensors are read later, on demand. Raises
    Refused, naming the file, for kinds of adapters that are not supported and for tensors that do
    not fit the model.
    """
    file = folder / CONFIG
    config = gate.read_json(file, kinds.ADAPTER_CONFIG)
    peft_config.check(file, config)
    known, stored = _modules(model), safetensors.read_header(folder / WEIGHTS)
    params = model.spec.params
    # an example for error messages
    such = next(module for module, weight in known.items() if params[weight].role in ADAPTED)
    by_name: dict[str, Stored] = {}
    modules: dict[str, str] = {}
    for name, value in stored.items():
        kind = next((kind for kind in KINDS if name.endswith(f".{kind}")), "")
        # base_model.model.X.lora_A.weight -> X
        module = name.removeprefix(PREFIX).removesuffix(f".{kind}")
        if not kind or module not in known:
            raise gate.refuse(
                folder / WEIGHTS,
                f"has {name}, which belongs to no layer of {model.model_type} that can have an "
                f"adapter, such as {PREFIX}{such}.lora_A.weight",
            )
        weight = known[module]
        if params[weight].role in NOT_LINEAR or len(params[weight].shape) != 2:
            raise gate.refuse(
                folder / WEIGHTS,
                f"has {name}, for {module} of shape {list(params[weight].shape)}, which is not a "
                f"linear layer: adapters belong to one, such as {PREFIX}{such}.lora_A.weight",
            )
        modules[module] = weight
        # (A, B, magnitude) by kind
        by_name[(*LoraSpec.pair(weight), magnitude_name(weight))[KINDS.index(kind)]] = value
    # "all-linear" is all but the output embedding
    heads = [module for module, weight in modules.items() if params[weight].role == "head"]
    peft_config.Reach(file, config).check(list(modules), heads)
    # the weights that have an A
    weights = frozenset(w for w in known.values() if LoraSpec.pair(w)[0] in by_name)
    # "whole": the base is not stored in eight bits
    form = LoraSpec(
        config["r"], config["lora_alpha"], weights, "whole", _scaling(config), _kind(config)
    )
    _check_shapes(folder / WEIGHTS, form, by_name, model)
    return LowRank(form, by_name)


def _scaling(config: Mapping[str, Any]) -> Any:
    """Return "root" for rank-stabilised LoRA (alpha / sqrt(rank)), else "rank" (alpha / rank), from
    an adapter_config.json.
    """
    return "root" if config.get("use_rslora") else "rank"


def _kind(config: Mapping[str, Any]) -> Any:
    """Return "dora" or "lora", from an adapter_config.json."""
    return "dora" if config.get("use_dora") else "lora"


def _check_shapes(
    file: Path, form: LoraSpec, stored: Mapping[str, Stored], model: ModelConfig
) -> None:
    """Raise Refused where A, B or a magnitude is missing, not floating, or of another shape than
    the config gives it, and for tensors that are left over.
    """
    if not form.targets:
        raise gate.refuse(file, "has no adapter")
    params = model.spec.params
    for weight in sorted(form.targets):
        param = params[weight]
        # shapes of A, B and magnitude for this weight and rank
        shapes = (form.down(param).shape, form.up(param).shape, form.magnitude(param).shape)
        for name, shape in zip(names(form, weight), shapes, strict=False):
            if name not in stored:
                raise gate.refuse(file, f"has an incomplete adapter of {weight}: {name} is missing")
            if stored[name].spec.dtype not in FLOATS:
                raise gate.refuse(file, f"has {stored[name].name} in {stored[name].spec.dtype}")
            if stored[name].spec.shape != shape:
                raise gate.refuse(
                    file,
                    f"has {stored[name].name} of {list(stored[name].spec.shape)}: rank "
                    f"{form.rank} with a weight of {list(params[weight].shape)} implies "
                    f"{list(shape)}",
                )
    if lone := sorted(stored.keys() - {n for w in form.targets for n in names(form, w)}):
        raise gate.refuse(file, f"has {stored[lone[0]].name}, for which {CONFIG} has no option")


def _modules(model: ModelConfig) -> dict[str, str]:
    """Return module name in transformers -> our weight, for modules whose weight is exactly one of
    ours; norms and embeddings are among them.
    """
    full = {}
    for stored, entry in weight_map(model).entries.items():
        # GPT-2's Conv1D stores weights transposed: still one of ours
        rule = entry.rule.rule if isinstance(entry.rule, Transpose) else entry.rule
        if isinstance(rule, Rename) and stored.endswith(".weight") and entry.piece is None:
            full[stored.removesuffix(".weight")] = entry.ours[0]
    return full


def write(run: object, folder: Path, dtype: torch.dtype) -> str:
    """Write a run's adapters in `dtype`, with its tokenizer, as a new PEFT folder; return a title
    of what was written for the report. Warns where they were trained on weights rounded to 8 bits.
    Raises ValueError for a source without adapters, for adapters that PEFT cannot express, and for
    a folder that is not empty.
    """
    if not isinstance(run, RunCheckpoint) or run.adapter is None:
        raise ValueError("the model has no adapters: leave out --adapters")
    form = run.adapter
    modules = {ours: theirs for theirs, ours in _modules(run.model).items()}
    # part of a fused weight: PEFT has one A for q, k and v together
    if beyond := sorted(form.targets - modules.keys()):
        raise ValueError(
            f"{beyond[0]} is part of a fused layer of transformers, for which PEFT has a single "
            "A: leave out --adapters, so that they are merged, or train with --adapter.targets "
            "without it"
        )
    check_new_folder(folder)
    folder = folder.resolve()  # a link cannot be replaced by a folder
    stored = {
        ours: f"{PREFIX}{modules[weight]}.{kind}"
        for weight in sorted(form.targets)
        for kind, ours in zip(KINDS, names(form, weight), strict=False)
    }
    tensors = {theirs: run.read_adapter(ours).to(dtype) for ours, theirs in stored.items()}
    specs = {name: Spec(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    with writing.replace_when_complete(folder) as (part, words):
        safetensors.write_tensors(part, specs, tensors.items())
        # the shard writer names files as transformers does
        os.rename(part / safetensors.SAFETENSORS.single, part / WEIGHTS)
        (words / CONFIG).write_text(json.dumps(_config(run, form, modules), indent=2) + "\n")
        copy_tokenizer(run.tokenizer, words)
    base = "its initial weights" if run.init is None else run.init
    title = f"the adapters of {run.title}, which were trained on {base}"
    # QLoRA-like runs: the base that PEFT will use is not the rounded one they trained with
    if form.frozen != "whole":
        warnings.warn(
            f"{title} rounded to {form.frozen} (--adapter.frozen): with the unrounded weights the "
            "model differs by that rounding, at most half a scale; without --adapters the rounded "
            "weights are written with the adapters merged, as trained",
            stacklevel=3,
        )
    return title


def _config(run: RunCheckpoint, form: LoraSpec, modules: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of adapter_config.json. `modules`: our weight -> module name in
    transformers.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        # a path or hub id; None of a run that began without --init
        "base_model_name_or_path": run.init,
        "r": form.rank,
        "lora_alpha": form.alpha,
        "use_rslora": form.scaling == "root",
        "use_dora": form.kind == "dora",
        "target_modules": sorted({modules[weight].rpartition(".")[2] for weight in form.targets}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


@dataclass(frozen=True)
class Adapted(WeightsAlone):
    """A PEFT folder as a source: its base model with the adapters merged on the fly."""

    where: Path
    base: Any
    """Source of the base model."""
    adapters: LowRank

    @property
    def title(self) -> str:
        """Text with the base's title and the adapters' folder."""
        return f"{self.base.title} with the adapters of {self.where}"

    @property
    def model(self) -> ModelConfig:
        """Model config of the base."""
        return self.base.model

    @property
    def spec(self) -> ModelSpec:
        """Spec of the base's parameters."""
        return self.base.spec

    def read_as(self, model: ModelConfig) -> "Adapted":
        """Return the source with its base's weights read as those of `model`. Raises as `read`."""
        return Adapted(self.where, self.base.read_as(model), read(self.where, model))

    @property
    def tokenizer(self) -> Path | None:
        """The adapters' tokenizer, whose chat template they were trained with, else the base's."""
        return self.where if tokenizer_files(self.where) else self.base.tokenizer

    @property
    def generation_config(self) -> dict[str, Any]:
        """Generation config of the base."""
        return self.base.generation_config

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Specs of the base's parameters: merging keeps shapes and dtypes."""
        return self.base.specs

    def stream(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the base's parameters, or of those in `only`, with adapters
        merged.
        """
        return ((n, self.adapters.merge(n, value)) for n, value in self.base.stream(only))

    def read(self, name: str) -> Shaped[Tensor, "*whole"]:
        """Read one parameter of the base with its adapter merged."""
        return self.adapters.merge(name, self.base.read(name))
