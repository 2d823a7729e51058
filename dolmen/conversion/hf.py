"""A folder of transformers is a model; this half reads one: by name, streamed, one stored tensor in
memory at a time. hf_export.py writes them.

    read_config -> check_tensors (names and shapes, before anything is built) -> load_weights

`stream` here and `hf_export.export_weights` are the two directions of the same weight rules
(dolmen/families); whoever shards, verifies or serves takes (name, full tensor) pairs from them.
"""

import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dolmen.conversion.weights import assemble
from dolmen.core.paths import expand, may_be_hub_id
from dolmen.core.words import counted
from dolmen.families import Model, WeightMap, weight_map
from dolmen.files import gate, kinds, safetensors
from dolmen.files.safetensors import Stored

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "*.tiktoken",
    "chat_template.json",
    "chat_template.jinja",
    "tekken.json",
)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def resolve_model(name: str | Path, revision: str | None = None) -> Path:
    """A model folder by path, or by hub id, downloaded or from the hub's cache. Raises ValueError
    if it is neither.
    """
    if expand(name).is_dir():
        return expand(name)
    if not may_be_hub_id(str(name)):
        raise ValueError(f"{name}: no such folder")
    # half a second to import, and few runs need it
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = [
        "model*.safetensors",
        safetensors.INDEX,
        "config.json",
        "generation_config.json",
        *TOKENIZER_FILES,
    ]
    try:
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))
    except (
        HFValidationError,
        OSError,
        RuntimeError,
    ) as error:  # the hub's and httpx's errors are among them
        raise ValueError(
            f"{name} is neither a folder nor a model that the hub or its cache gives: {error}"
        ) from error


def read_config(folder: Path | str) -> Model:
    """The model of a folder's config.json. Raises ValueError naming the file and the field for what
    dolmen cannot compute.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        hint = (
            f": it is a run, write it with dolmen export {folder} --to DIR first"
            if (Path(folder) / "checkpoints").is_dir()
            else ""
        )
        raise ValueError(f"{folder} has no config.json{hint}")
    content = gate.read_json(file, kinds.CONFIG)
    try:
        return Model(content)
    except ValueError as error:
        raise gate.refuse(file, error) from error


def check_tensors(folder: Path | str, model: Model) -> None:
    """Compares names and shapes in the folder with `model`; reads no data. Raises KeyError for
    tensors that no rule maps or that are missing, ValueError for a mis-shaped or quantised one and
    for damaged files.
    """
    _match(Path(folder), weight_map(model))


def stream(
    folder: Path | str, model: Model, only: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(our name, full CPU tensor of its leaf's shape, in the dtype of the file), in the order of
    the files; `only` those parameters, where given. One stored tensor is in memory at a time if the
    caller lets go of each. Checks first, raising as `check_tensors` does; ValueError where a stored
    head of a tied model differs from the embedding.
    """
    weights = weight_map(model)
    stored = _match(Path(folder), weights)
    if head := stored.pop(weights.head if weights.is_tied_head(weights.head) else "", None):
        _require_equal(head, stored[weights.embedding])
    return _stream(weights, stored, only)


def load_weights(
    folder: Path | str,
    model: Model,
    write: Callable[[str, Tensor], Any],
    only: Collection[str] | None = None,
) -> None:
    """Calls `write(name, full tensor)` once, in its leaf's shape, for every parameter of `model`,
    or of `only`. Raises as `stream` does, and KeyError where a parameter was never written.
    """
    wanted, written = set(model.tree.leaves if only is None else only), set()
    for name, tensor in stream(folder, model, only):
        assert name not in written, f"{name} written twice"
        write(name, tensor)
        written.add(name)
        del tensor  # or it would still be held while the next one is read
    if left := sorted(wanted - written):
        raise KeyError(f"{len(left)} parameters are not in {folder}, e.g. {left[:3]}")


def stated_dtype(model: Model) -> torch.dtype:
    """The dtype that a config.json states, float32 where it states none. Raises ValueError for one
    that weights cannot have.
    """
    named = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
    name = model.dtype.removeprefix("torch.")
    if name not in named:
        raise ValueError(f"dtype is {name!r} in config.json: choose another, of {', '.join(named)}")
    return named[name]


def _match(folder: Path, weights: WeightMap) -> dict[str, Stored]:
    """Canonical stored name -> where, for every tensor that holds parameters, and for a tied
    model's head if stored.
    """
    found: dict[str, Stored] = {}
    beyond: list[str] = []
    for name, stored in safetensors.index(folder).items():
        canonical = weights.canonical(name)
        if canonical in found:
            raise ValueError(
                f"{folder} stores {canonical} twice, as {name} and as {found[canonical].name}"
            )
        if weights.is_beyond(canonical):
            beyond.append(stored.name)
        elif not weights.ignores(canonical):
            found[canonical] = stored
    extra = [stored.name for name, stored in found.items() if weights.expected_shape(name) is None]
    missing = [name for name in weights.entries if name not in found]
    if extra or missing:
        sides = [
            f"{counted(len(extra), 'tensor has', 'tensors have')} no rule, e.g. {extra[:3]}"
        ] * bool(extra)
        sides += [
            f"{counted(len(missing), 'tensor is', 'tensors are')} missing, e.g. {missing[:3]}"
        ] * bool(missing)
        raise KeyError(
            f"{folder} does not fit family {weights.model.model_type} and its config: "
            f"{'; '.join(sides)}"
        )
    for name, stored in found.items():
        _check_tensor(name, stored, weights)
    if beyond:
        field = weights.model.family.beyond
        warnings.warn(
            f"{folder}: {counted(len(beyond), 'tensor')} of layers behind the last ({field}) are "
            f"left out, e.g. {beyond[0]}: they are no part of the decoder",
            stacklevel=3,
        )
    return found


def _check_tensor(name: str, stored: Stored, weights: WeightMap) -> None:
    expected = weights.expected_shape(name)
    if stored.spec.shape != expected:
        fields = weights.disagreeing_fields(name, stored.spec.shape)
        raise ValueError(
            f"{stored.name} is {stored.spec.shape} in {stored.file}, config.json makes it "
            f"{expected}: check {' or '.join(fields) or 'the family'}"
        )
    if stored.spec.dtype not in FLOATS:
        raise ValueError(
            f"{stored.name} in {stored.file} is {stored.spec.dtype}: dolmen reads no quantised "
            f"weights"
        )


def _stream(
    weights: WeightMap, stored: dict[str, Stored], only: Collection[str] | None
) -> Iterator[tuple[str, Tensor]]:
    yield from assemble(
        [weights.entries[name] for name in stored], lambda name: stored[name].read(), only
    )


def _require_equal(head: Stored, embedding: Stored) -> None:
    same = head.spec == embedding.spec and all(
        a == b for a, b in zip(head.chunks(), embedding.chunks(), strict=True)
    )
    if not same:
        raise ValueError(
            f"tie_word_embeddings is true, but {head.name} in {head.file} differs from "
            f"{embedding.name}: set tie_word_embeddings to false in config.json, or remove "
            f"that head"
        )
