"""A folder of transformers as a source (source.py): read by name, streamed, one stored tensor in
memory at a time, of safetensors or of the pytorch_model.bin from before them. hf_export.py writes
them.

`Transformers.stream` here and `hf_export.export_weights` are the two directions of the same weight
rules (dolmen/families).
"""

import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from dolmen.checkpoint import remote
from dolmen.conversion.weights import (
    FLOATS,
    WeightsAlone,
    assemble,
    describe_mismatch,
    require_float,
)
from dolmen.core.filesystem import expand, is_absent, is_url
from dolmen.core.messages import plural
from dolmen.families import ModelConfig, WeightMap, replace_fields, special_tokens, weight_map
from dolmen.families.family import BARE, text_config
from dolmen.families.rules import StoredTensor
from dolmen.files import gate, kinds, safetensors, torch_files
from dolmen.files.safetensors import Spec, Stored
from dolmen.model.spec import ModelSpec

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "ice_text.model",
    "cog-pretrain.model",
    "spiece.model",
    "*.tiktoken",
    "chat_template.json",
    "chat_template.jinja",
    "tekken.json",
)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # PEFT's (peft.py)
FORMS = (safetensors.SAFETENSORS, torch_files.BIN)


def resolve_model(name: str | Path, revision: str | None = None) -> Path:
    """Return the local folder of a model or of adapters, given by path, URL or hub id; a hub id is
    downloaded, or taken from the hub's cache (`revision`: branch, tag or commit), and of a URL the
    local copy is returned. Raises ValueError if it is none of them, and StorageError.
    """
    if is_url(name):
        return remote.pull_model(str(name))
    if expand(name).is_dir():
        return expand(name)
    # most often someone's model.safetensors
    if expand(name).is_file():
        raise ValueError(f"{name} is a file: give the folder, {expand(name).parent}")
    if is_absent(name):
        raise ValueError(f"{name}: no such folder")
    # half a second to import, and few runs need it
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    # Only what is read: a repository may also hold GGUF, ONNX or original weights.
    patterns = [
        "model*.safetensors",
        safetensors.INDEX,
        "config.json",
        "generation_config.json",
        *ADAPTER_FILES,
        *TOKENIZER_FILES,
    ]
    try:
        folder = Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))
        if any(form.lies_in(folder) for form in FORMS):
            return folder
        # pickles only where there is no safetensors: many repositories hold both, twice the
        # download
        older = ["pytorch_model*.bin", torch_files.BIN.index]
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=older))
    except (
        HFValidationError,
        OSError,
        RuntimeError,
    ) as error:  # the hub's and httpx's errors are among them
        raise ValueError(
            f"{name} is neither a folder nor available from the Hugging Face hub or its "
            f"cache: {error}"
        ) from error


def read_config(folder: Path | str) -> ModelConfig:
    """Read the model of a folder's config.json, with special token ids from its tokenizer files.
    Raises ValueError, naming file and field, for what dolmen cannot compute.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json")
    content = gate.read_json(file, kinds.CONFIG)
    try:
        model = ModelConfig(text_config(content) or content)
    except ValueError as error:
        raise gate.refuse(file, error) from error
    # GLM and others name special tokens in the tokenizer alone
    return special_tokens.add_special_ids(model, {}, lambda: tokens_by_name(folder))


def generation_config(folder: Path) -> dict[str, Any]:
    """Return the content of the folder's generation_config.json; empty where there is none. Raises
    Refused for a malformed one.
    """
    file = folder / "generation_config.json"
    return gate.read_json(file, kinds.GENERATION_CONFIG) if file.is_file() else {}


def tokens_by_name(folder: Path | str) -> dict[str, int]:
    """Return token -> id from the folder's tokenizer JSON files (vocabulary, added tokens), without
    building a tokenizer. Empty where there are none. Raises Refused for a malformed file.
    """
    tokens: dict[str, int] = {}
    # later files override earlier ones, as transformers lets added tokens override
    for name in ("vocab.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json"):
        file = Path(folder) / name
        if not file.is_file():
            continue
        content = gate.read_json(file, kinds.TOKENIZER_FILES[name])
        match name:
            case "tokenizer.json":
                vocab = content["model"].get("vocab", {})
                tokens |= vocab if isinstance(vocab, dict) else {}
                tokens |= {
                    token["content"]: token["id"] for token in content.get("added_tokens", ())
                }
            case "tokenizer_config.json":
                added = content.get("added_tokens_decoder", {})
                tokens |= {o["content"]: int(i) for i, o in added.items() if i.isdecimal()}
            case _:
                tokens |= content
    return tokens


@dataclass(frozen=True)
class Transformers(WeightsAlone):
    """A transformers directory as a source; its weights are read as those of `model`."""

    where: Path
    model: ModelConfig

    @property
    def title(self) -> str:
        """Text that names the folder as a transformers directory."""
        return f"{self.where}, a transformers directory"

    @property
    def spec(self) -> ModelSpec:
        """Spec of the model's parameters."""
        return self.model.spec

    @property
    def tokenizer(self) -> Path | None:
        """The folder itself, if it has tokenizer files, else None."""
        return self.where if tokenizer_files(self.where) else None

    @property
    def generation_config(self) -> dict[str, Any]:
        """Content of generation_config.json, empty where there is none."""
        return generation_config(self.where)

    @property
    def transformers(self) -> Path | None:
        """The folder, from which transformers can load the model; None where dolmen reads only a
        part of a larger (multimodal) model, as transformers would load all of it.
        """
        file = self.where / "config.json"
        content = gate.read_json(file, kinds.CONFIG) if file.is_file() else {}
        return self.where if text_config(content) is None else None

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Shape of each parameter and the dtype in which it is stored, in the order of the
        model.
        """
        stored = self._stored
        return {
            name: Spec(param.shape, stored[self._holding[name][0].hf].spec.dtype)
            for name, param in self.spec.params.items()
        }

    def stream(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (our parameter name, tensor) of every parameter, or of those in `only`, one stored
        tensor in memory at a time. Raises ValueError too where a stored head of a tied model
        differs from the embedding.
        """
        return assemble(
            [self._weights.entries[name] for name in self._compared], self._tensor, only
        )

    def read(self, name: str) -> Shaped[Tensor, "*whole"]:
        """Read one parameter by our name. Raises KeyError where there is none."""
        if name not in self._holding:
            raise KeyError(f"{self.where} has no parameter {name}")
        # several entries for a stack of experts, one otherwise
        ((_, tensor),) = assemble(self._holding[name], self._tensor, [name])
        return tensor

    def _tensor(self, name: str) -> Tensor:
        """Read a stored tensor by its canonical stored name."""
        return self._compared[name].read()

    @cached_property
    def _weights(self) -> WeightMap:
        """Map between transformers' tensor names and our parameters."""
        return weight_map(self.model)

    @cached_property
    def _holding(self) -> dict[str, list[StoredTensor]]:
        """Our name -> the stored tensors that hold the parameter: several for a stack of
        experts.
        """
        by_parameter: dict[str, list[StoredTensor]] = {}
        for entry in self._weights.entries.values():
            for name in entry.ours:
                by_parameter.setdefault(name, []).append(entry)
        return by_parameter

    @cached_property
    def _stored(self) -> dict[str, Stored]:
        """Canonical stored name -> file and position of every tensor that is read. Raises as
        `specs`.
        """
        return _match(self.where, self._weights)

    @cached_property
    def _compared(self) -> dict[str, Stored]:
        """The tensors of `_stored` without a tied model's stored head, once that is proved equal to
        the embedding. Raises as `stream`.
        """
        read, weights = dict(self._stored), self._weights
        # some exporters write both copies of a tied matrix
        if head := read.pop(weights.head if weights.is_tied_head(weights.head) else "", None):
            _require_equal(head, read[weights.embedding])
        return read


def is_transformers(folder: Path) -> bool:
    """Return whether a folder has a config.json or weight files as transformers names them: either
    is enough, so that a missing one gives a clear error.
    """
    return (folder / "config.json").is_file() or any(form.lies_in(folder) for form in FORMS)


def open_transformers(folder: Path, sidecars: Path | None = None) -> Transformers:
    """Open a transformers directory as a source. `sidecars`: folder of the config.json, where it is
    not yet next to the weights. Raises as `read_config`.
    """
    return Transformers(folder, _detect_bare(read_config(sidecars or folder), folder))


def _detect_bare(model: ModelConfig, folder: Path) -> ModelConfig:
    """Return the model with its dolmen field bare_names set where no stored tensor's name has the
    family's prefix ("model.", "transformer."), so that an export writes names of the same kind;
    otherwise unchanged.
    """
    family = model.family
    if BARE not in family.fields:
        return model
    # exports of the base class (BertModel, not BertForMaskedLM) have no prefix
    bare = not any(name.startswith(family.prefix) for name in safetensors.index(folder))
    return replace_fields(model, {BARE.name: True}) if bare else model


def tokenizer_files(folder: Path | str) -> list[Path]:
    """Return the existing tokenizer files of a folder (tokenizer.json, vocab.txt, chat templates
    and the like), sorted.
    """
    return sorted({file for pattern in TOKENIZER_FILES for file in Path(folder).glob(pattern)})


def copy_tokenizer(source: Path | str | None, to: Path) -> None:
    """Copy the tokenizer files (chat template included) of folder `source` to folder `to`; nothing
    where `source` is None.
    """
    for file in tokenizer_files(source) if source is not None else ():
        shutil.copyfile(file, to / file.name)


def stated_dtype(model: ModelConfig) -> torch.dtype:
    """Return the dtype that a config.json states, float32 by default. Raises ValueError for one
    that weights cannot have.
    """
    named = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
    # older transformers wrote "torch.float16"
    name = model.dtype.removeprefix("torch.")
    if name not in named:
        raise ValueError(
            f"dtype is {name!r} in config.json, which is not supported: use one of "
            f"{', '.join(named)}"
        )
    return named[name]


def _match(folder: Path, weights: WeightMap) -> dict[str, Stored]:
    """Return canonical stored name -> place in a file, for every stored tensor that holds
    parameters, and for a tied model's head if stored. Warns of skipped tensors (layers behind the
    last, other parts of a multimodal model). Raises KeyError for tensors without a weight rule or
    missing, ValueError for duplicates and wrong shapes or dtypes.
    """
    matched: dict[str, Stored] = {}
    beyond: list[str] = []
    # safetensors before pickles, if both are there
    form = next((candidate for candidate in FORMS if candidate.lies_in(folder)), None)
    other_parts: list[str] = []
    # Every stored tensor falls into one of four groups: a parameter, a layer behind the last
    # (multi-token prediction), a part of a multimodal model, or a buffer that is ignored. What is
    # left over is an error, never skipped.
    for name, stored in safetensors.index(folder, form).items():
        canonical = weights.canonical(name)
        # two spellings of one name, such as gamma and weight
        if canonical in matched:
            raise ValueError(
                f"{folder} stores {canonical} twice, as {name} and as {matched[canonical].name}"
            )
        # multi-token prediction of DeepSeek lies as layers behind the last
        if weights.is_dropped_layer(canonical):
            beyond.append(stored.name)
        elif weights.is_other_part(canonical):
            other_parts.append(stored.name)
        elif not weights.ignores(canonical):
            matched[canonical] = stored
    extra = [
        stored.name for name, stored in matched.items() if weights.expected_shape(name) is None
    ]
    missing = [name for name in weights.entries if name not in matched]
    if text := describe_mismatch(extra, missing):
        raise KeyError(
            f"{folder} does not fit family {weights.model.model_type} and its config: {text}"
        )
    for name, stored in matched.items():
        _check_tensor(name, stored, weights)
    if beyond:
        field = weights.model.family.dropped_layers_field
        warnings.warn(
            f"{folder}: {plural(len(beyond), 'tensor')} of layers after the last ({field}) are "
            f"skipped, e.g. {beyond[0]}: they do not belong to the decoder",
            stacklevel=4,
        )
    if other_parts:
        warnings.warn(
            f"{folder}: {plural(len(other_parts), 'tensor')} of other parts of the model are "
            f"skipped, e.g. {other_parts[0]}: only its {weights.model.model_type} is read",
            stacklevel=4,
        )
    return matched


def _check_tensor(name: str, stored: Stored, weights: WeightMap) -> None:
    """Raise ValueError where a stored tensor has another shape than config.json gives it (with the
    fields to check), or is not of a floating dtype.
    """
    expected = weights.expected_shape(name)
    if stored.spec.shape != expected:
        # which config fields would give the shape that is stored
        fields = weights.disagreeing_fields(name, stored.spec.shape)
        raise ValueError(
            f"{stored.name} is {stored.spec.shape} in {stored.file}, but config.json implies "
            f"{expected}: check {' or '.join(fields) or 'the family'}"
        )
    require_float(stored)


def _require_equal(head: Stored, embedding: Stored) -> None:
    """Raise ValueError where the stored head of a tied model differs from the embedding in any
    byte.
    """
    same = head.spec == embedding.spec and all(
        # bytes in chunks: an embedding may take gigabytes
        a == b
        for a, b in zip(head.chunks(), embedding.chunks(), strict=True)
    )
    if not same:
        raise ValueError(
            f"tie_word_embeddings is true, but {head.name} in {head.file} differs from "
            f"{embedding.name}: set tie_word_embeddings to false in config.json, or remove "
            f"that head"
        )
