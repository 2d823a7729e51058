"""Writes a model as a folder of transformers: config.json, weights, generation_config.json and
tokenizer files, all of them or nothing. hf.py reads them.

    write(source, folder)      any source (source.py), one tensor in memory at a time
    as_transformers(source)    a folder that transformers loads: its own, or one for a while
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
from dolmen.conversion.source import Source
from dolmen.conversion.weights import Scales, join_stored
from dolmen.conversion.writing import Advance, LayerPool, group_by_layer
from dolmen.families import Model, edit, replace_fields, unknown, weight_map
from dolmen.families.rules import StoredTensor
from dolmen.files import safetensors
from dolmen.files.safetensors import SHARD_BYTES, Spec
from dolmen.files.write import check_new_folder
from dolmen.model.spec import ModelSpec


def write(source: Source, folder: Path | str, dtype: torch.dtype | None = None) -> None:
    """The source as a folder of transformers, in `dtype`, or else in that of its config.json.
    Raises as `check_expressible`, `Source.specs`, `Source.stream` and `save` do.
    """
    check_expressible(source.model, source.tree)
    save(
        folder,
        source.model,
        source.read,
        dtype,
        source.tokenizer,
        generation_config=source.generation_config,
    )


@contextmanager
def transformers_folder(source: Source) -> Iterator[Path]:
    """Folder from which transformers itself can load the source: its own, or an export in float32
    among the temporary files, which exists within. Raises as `write`.
    """
    if source.transformers is not None:
        yield source.transformers
        return
    with tempfile.TemporaryDirectory(prefix="dolmen-") as made:
        write(source, Path(made) / "model", torch.float32)
        yield Path(made) / "model"


def check_expressible(model: Model, tree: ModelSpec) -> None:
    """Raises ValueError where the config.json of `model` cannot say `tree`, which it is with what
    training adds.
    """
    if tree != model.tree:
        raise ValueError(
            f"train.router.balance is bias: transformers' {model.model_type} has no place for "
            "a router's bias, and without it would route otherwise: train with "
            "--train.router.balance loss to export"
        )


def export_weights(
    model: Model, full: Callable[[str], Tensor], entries: Iterable[StoredTensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(stored name, tensor of its entry's shape) in the order of the model, or of `entries`, each
    made of the parameters that `full(our name)` gives. Where `full` is a collective, every rank
    goes through this iterator, one of them inside `save`. Raises ValueError for a parameter of the
    wrong shape.
    """
    shapes = model.tree.shapes
    written = weight_map(model).exported_entries.values() if entries is None else entries
    for _, group in groupby(written, key=lambda entry: entry.ours):
        first, *rest = group
        if first.piece is None:
            yield first.hf, _join(first, full, shapes)
        else:
            stack = _part(first.ours[0], full, shapes)  # asked for once, whole
            for entry in (first, *rest):
                yield entry.hf, join_stored(entry.rule, [stack], entry.piece)
            del stack


def check_target(folder: Path | str, tokenizer_folder: Path | str | None = None) -> None:
    """Check the target of `save`. Raises ValueError for a `folder` that has anything in it, and a
    `tokenizer_folder` without a tokenizer.
    """
    check_new_folder(folder)
    if tokenizer_folder is not None and not tokenizer_files(tokenizer_folder):
        raise ValueError(
            f"{tokenizer_folder} has no tokenizer files ({', '.join(TOKENIZER_FILES[:3])} ...)"
        )


def save(
    folder: Path | str,
    model: Model,
    full: Callable[[str], Tensor],
    dtype: torch.dtype | None = None,
    tokenizer_folder: Path | str | None = None,
    shard_bytes: int = SHARD_BYTES,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """Writes the model, of which `full(our name)` gives each parameter, in its leaf's shape, as
    transformers reads it, in `dtype`, or else that of the source model, or else float32. A
    generation_config.json that is empty, or not given, is made of what the config.json says.
    Everything is built beside `folder` and renamed when whole. Raises as `check_target` and
    `export_weights` do.
    """
    check_target(folder, tokenizer_folder)
    folder, dtype = Path(folder), dtype or stated_dtype(model)
    specs = _specs(model, dtype)
    with writing.build_beside(folder) as (part, words):
        safetensors.write_tensors(part, specs, export_weights(model, full), shard_bytes)
        _write_sidecar_files(words, model, dtype, generation_config, tokenizer_folder)


@dataclass(frozen=True)
class TransformersWriter:
    """Writes `source` as a folder of transformers, the layers in parallel (convert.ModelWriter)."""

    source: Source
    dtype: torch.dtype

    @cached_property
    def specs(self) -> dict[str, Spec]:
        return _specs(self.source.model, self.dtype)

    @property
    def tensors(self) -> int:
        return len(self.specs)

    @property
    def scales(self) -> Scales:
        return {}

    def write(self, folder: Path, pool: LayerPool) -> None:
        model, shards = self.source.model, safetensors.ShardFiles(folder, self.specs)

        def write_layer(entries: list[StoredTensor], advance: Advance) -> None:
            tensors = export_weights(model, self.source.read, entries)
            for _ in shards.write(tensors, [entry.hf for entry in entries]):
                advance(1)

        shards.begin()
        entries = weight_map(model).exported_entries.values()
        pool.run(write_layer, group_by_layer(entries, lambda entry: entry.ours[0]))
        shards.end()

    def write_sidecars(self, folder: Path) -> None:
        write_sidecar_files(self.source, folder, self.dtype)

    def open_written(self, folder: Path, sidecars: Path) -> Source:
        """Fields that config.json cannot express, of which a warning tells, are the source's."""
        written = open_transformers(folder, said=sidecars)
        return replace(
            written, model=replace_fields(written.model, unknown.lost_on_export(self.source.model))
        )


def write_sidecar_files(source: Source, folder: Path, dtype: torch.dtype) -> None:
    """Write the sidecar files of a folder of transformers, whose weights are in `dtype`."""
    _write_sidecar_files(folder, source.model, dtype, source.generation_config, source.tokenizer)


def _write_sidecar_files(
    folder: Path,
    model: Model,
    dtype: torch.dtype,
    generation_config: Mapping[str, Any] | None,
    tokenizer_folder: Path | str | None,
) -> None:
    if dtype != stated_dtype(model):
        model = edit(model, dtype=str(dtype).removeprefix("torch."))
    if lost := unknown.export_warning(model):
        warnings.warn(lost, stacklevel=4)
    content = model.export_config()
    _write_json(folder / "config.json", content)
    if generation := generation_config or _generation_config(content):
        _write_json(folder / "generation_config.json", generation)
    copy_tokenizer(tokenizer_folder, folder)


def _specs(model: Model, dtype: torch.dtype) -> dict[str, Spec]:
    """Spec of each tensor that is written, by its stored name."""
    leaves, wide = model.tree.leaves, torch.promote_types(dtype, torch.float32)
    return {
        name: Spec(entry.shape, wide if leaves[entry.ours[0]].precise else dtype)
        for name, entry in weight_map(model).exported_entries.items()
    }


def _join(
    entry: StoredTensor, full: Callable[[str], Tensor], shapes: dict[str, tuple[int, ...]]
) -> Tensor:
    return join_stored(entry.rule, [_part(name, full, shapes) for name in entry.ours])


def _part(name: str, full: Callable[[str], Tensor], shapes: dict[str, tuple[int, ...]]) -> Tensor:
    part = full(name)
    if tuple(part.shape) != shapes[name]:
        raise ValueError(f"{name} is {tuple(part.shape)}, the model's is {shapes[name]}")
    return part


def _generation_config(content: dict[str, Any]) -> dict[str, Any]:
    """Generation config with the token ids that a config.json states, if any."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: content[name] for name in names if content.get(name) is not None}
    return {"_from_model_config": True, **ids} if ids else {}


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
