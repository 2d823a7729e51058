"""Writes a model as a folder of transformers: config.json, weights, generation_config.json and
tokenizer files, all of them or nothing. hf.py reads them.

    write(source, folder)        any source (source.py), one tensor in memory at a time
    transformers_folder(source)  a folder that transformers loads: its own, or one for a while
"""

import json
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dolmen.conversion import writing
from dolmen.conversion.hf import (
    TOKENIZER_FILES,
    copy_tokenizer,
    open_transformers,
    stated_dtype,
    tokenizer_files,
)
from dolmen.conversion.source import ModelSource
from dolmen.conversion.weights import Scales, join_stored
from dolmen.conversion.writing import Advance, LayerPool, group_by_layer
from dolmen.families import ModelConfig, edit, replace_fields, unknown, weight_map
from dolmen.families.rules import StoredTensor
from dolmen.files import safetensors
from dolmen.files.safetensors import SHARD_BYTES, Spec
from dolmen.files.write import check_new_folder
from dolmen.model.spec import ModelSpec


def write(source: ModelSource, folder: Path | str, dtype: torch.dtype | None = None) -> None:
    """Write the source to the new `folder` as a transformers directory, in `dtype` (default: that
    of its config.json). Raises as `check_expressible`, `ModelSource.specs`, `ModelSource.stream`
    and `save` do.
    """
    check_expressible(source.model, source.spec)
    save(
        folder,
        source.model,
        source.read,
        dtype,
        source.tokenizer,
        generation_config=source.generation_config,
    )


@contextmanager
def transformers_folder(source: ModelSource) -> Iterator[Path]:
    """Context manager that yields a folder from which transformers can load the source: its own if
    it is one, else a temporary float32 export, deleted at the end. Raises as `write`.
    """
    if source.transformers is not None:
        yield source.transformers
        return
    with tempfile.TemporaryDirectory(prefix="dolmen-") as temporary:
        write(source, Path(temporary) / "model", torch.float32)
        yield Path(temporary) / "model"


def check_expressible(model: ModelConfig, spec: ModelSpec) -> None:
    """Raise ValueError where the stored parameters (`spec`) have more than the config.json of
    `model` can express: a router's balancing bias.
    """
    # training adds one thing that config.json lacks a field for
    if spec != model.spec:
        raise ValueError(
            f"train.router.balance is bias: transformers' {model.model_type} cannot store a "
            "router bias and would route differently without it: train with "
            "--train.router.balance loss to export"
        )


def export_weights(
    model: ModelConfig, full: Callable[[str], Tensor], entries: Iterable[StoredTensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (stored name, tensor in its stored shape) in the order of the model, or of `entries`,
    made from the parameters that `full(our name)` returns. Where `full` is a collective, every rank
    must exhaust this iterator, one of them inside `save`. Raises ValueError for a parameter of the
    wrong shape.
    """
    shapes = model.spec.shapes
    written = weight_map(model).exported_entries.values() if entries is None else entries
    # pieces of one stack follow one another: the parameter is read once for all of them
    for _, group in groupby(written, key=lambda entry: entry.ours):
        first, *rest = group
        # not one expert of a stack
        if first.piece is None:
            yield first.hf, _join(first, full, shapes)
        else:
            stack = _part(first.ours[0], full, shapes)  # requested once, complete
            for entry in (first, *rest):
                yield entry.hf, join_stored(entry.rule, [stack], entry.piece)
            del stack


def check_target(folder: Path | str, tokenizer_folder: Path | str | None = None) -> None:
    """Raise ValueError for a `folder` to write that has anything in it, and for a
    `tokenizer_folder` without tokenizer files.
    """
    check_new_folder(folder)
    if tokenizer_folder is not None and not tokenizer_files(tokenizer_folder):
        raise ValueError(
            f"{tokenizer_folder} has no tokenizer files ({', '.join(TOKENIZER_FILES[:3])} ...)"
        )


def save(
    folder: Path | str,
    model: ModelConfig,
    full: Callable[[str], Tensor],
    dtype: torch.dtype | None = None,
    tokenizer_folder: Path | str | None = None,
    shard_bytes: int = SHARD_BYTES,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """Write a model to the new `folder` as a transformers directory. `full(our name)` returns each
    whole parameter. `dtype`: default that of the config.json, else float32. `generation_config`:
    where empty, it is made from the config.json. Built in a temporary folder and renamed when
    complete. Raises as `check_target` and `export_weights` do.
    """
    check_target(folder, tokenizer_folder)
    folder, dtype = Path(folder), dtype or stated_dtype(model)
    # shapes are known before any tensor exists: the header of a shard comes first
    specs = _specs(model, dtype)
    with writing.replace_when_complete(folder) as (part, words):
        safetensors.write_tensors(part, specs, export_weights(model, full), shard_bytes)
        _write_sidecar_files(words, model, dtype, generation_config, tokenizer_folder)


@dataclass(frozen=True)
class TransformersWriter:
    """Writes `source` as a transformers directory, layers in parallel (see convert.ModelWriter)."""

    source: ModelSource
    dtype: torch.dtype

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """Shape and dtype of each tensor that is written, by its stored name."""
        return _specs(self.source.model, self.dtype)

    @property
    def tensors(self) -> int:
        """Number of tensors that are written, for a progress bar."""
        return len(self.specs)

    @property
    def scales(self) -> Scales:
        """Empty: a transformers directory has no place for fp8 scales."""
        return {}

    def write(self, folder: Path, pool: LayerPool) -> None:
        """Write the safetensors shards and their index into `folder`, a layer per task of
        `pool`.
        """
        model, shards = self.source.model, safetensors.ShardFiles(folder, self.specs)

        def write_layer(entries: list[StoredTensor], advance: Advance) -> None:
            """Write the tensors of one layer, advancing the progress bar after each."""
            tensors = export_weights(model, self.source.read, entries)
            for _ in shards.write(tensors, [entry.hf for entry in entries]):
                advance(1)

        # files get their final size and header now: threads then write at fixed offsets
        shards.begin()
        entries = weight_map(model).exported_entries.values()
        pool.run(write_layer, group_by_layer(entries, lambda entry: entry.ours[0]))
        shards.end()

    def write_sidecars(self, folder: Path) -> None:
        """Write config.json, generation_config.json and the tokenizer files into `folder`."""
        write_sidecar_files(self.source, folder, self.dtype)

    def open_written(self, folder: Path, sidecars: Path) -> ModelSource:
        """Open what was written, with its config.json in the folder `sidecars`, as a source. Fields
        that config.json cannot express are taken from the original source.
        """
        written = open_transformers(folder, sidecars=sidecars)
        return replace(
            written, model=replace_fields(written.model, unknown.lost_on_export(self.source.model))
        )


def write_sidecar_files(source: ModelSource, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json, generation_config.json and tokenizer files of the source into `folder`;
    `dtype` is that of the weights and is stated in config.json.
    """
    _write_sidecar_files(folder, source.model, dtype, source.generation_config, source.tokenizer)


def _write_sidecar_files(
    folder: Path,
    model: ModelConfig,
    dtype: torch.dtype,
    generation_config: Mapping[str, Any] | None,
    tokenizer_folder: Path | str | None,
) -> None:
    """Write config.json (with `dtype`), generation_config.json (if None or empty: token ids of the
    config; no file if it has none) and a copy of the tokenizer files into `folder`. Warns of fields
    that config.json cannot express.
    """
    if dtype != stated_dtype(model):
        model = edit(model, dtype=str(dtype).removeprefix("torch."))
    # stacklevel 4: the caller of write or write_sidecars
    if lost := unknown.export_warning(model):
        warnings.warn(lost, stacklevel=4)
    content = model.export_config()
    _write_json(folder / "config.json", content)
    if generation := generation_config or _generation_config(content):
        _write_json(folder / "generation_config.json", generation)
    copy_tokenizer(tokenizer_folder, folder)


def _specs(model: ModelConfig, dtype: torch.dtype) -> dict[str, Spec]:
    """Return stored name -> shape and dtype of each tensor that is written: `dtype`, or at least
    fp32 for parameters that the family keeps precise.
    """
    # a router's bias, for example, stays in fp32 in a bf16 export
    params, wide = model.spec.params, torch.promote_types(dtype, torch.float32)
    return {
        name: Spec(entry.shape, wide if params[entry.ours[0]].precise else dtype)
        for name, entry in weight_map(model).exported_entries.items()
    }


def _join(
    entry: StoredTensor, full: Callable[[str], Tensor], shapes: dict[str, tuple[int, ...]]
) -> Tensor:
    """Return the stored tensor of an entry, built from the parameters that it holds, which `full`
    returns by our name. Raises ValueError for a wrong shape.
    """
    return join_stored(entry.rule, [_part(name, full, shapes) for name in entry.ours])


def _part(name: str, full: Callable[[str], Tensor], shapes: dict[str, tuple[int, ...]]) -> Tensor:
    """Return the parameter `full(name)`. Raises ValueError if its shape is not `shapes[name]`."""
    part = full(name)
    if tuple(part.shape) != shapes[name]:
        raise ValueError(f"{name} is {tuple(part.shape)}, the model expects {shapes[name]}")
    return part


def _generation_config(content: dict[str, Any]) -> dict[str, Any]:
    """Return a generation_config.json with the bos, eos and pad token ids of a config.json; empty
    where it has none.
    """
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: content[name] for name in names if content.get(name) is not None}
    # as transformers marks a generation config that nobody has edited
    return {"_from_model_config": True, **ids} if ids else {}


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as JSON with sorted keys and an indent of 2, as transformers does."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
