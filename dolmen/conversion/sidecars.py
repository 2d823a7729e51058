"""Sidecar files of weights that do not describe themselves: config.json, tokenizer and
generation_config.json, a config.json for a model spec that has none, and the base class of sources
whose tensors are joined from the files of several ranks.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtyping import Shaped
from torch import Tensor

from dolmen.conversion.hf import generation_config, read_config, tokenizer_files
from dolmen.conversion.weights import assemble
from dolmen.families import ModelConfig, edit, families, model_from_spec
from dolmen.families.rules import StoredTensor
from dolmen.model.spec import ModelSpec

FIRST = ("llama", "gpt2", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""Families that are tried first for expressing a spec: those that most tools know."""


def place(folder: Path) -> Path:
    """Return the folder with a checkpoint's config.json or tokenizer: the checkpoint's own
    `folder`, else its parent, which may serve several checkpoints; `folder` where neither has any.
    """
    for directory in (folder, folder.parent):
        if (directory / "config.json").is_file() or tokenizer(directory) is not None:
            return directory
    return folder


def config(folder: Path) -> ModelConfig | None:
    """Return the model of the folder's config.json; None where there is none. Raises ValueError as
    `read_config`.
    """
    return read_config(folder) if (folder / "config.json").is_file() else None


def tokenizer(folder: Path) -> Path | None:
    """Return the folder of the tokenizer files, `folder` or its subfolder "tokenizer"; None where
    neither has any.
    """
    places = (folder, folder / "tokenizer")
    return next((place for place in places if place.is_dir() and tokenizer_files(place)), None)


def vocabulary(folder: Path, model: ModelConfig | None, rows: int | None) -> int | None:
    """Return the number of tokens, without padding rows: that of the config.json (`model`), else
    `rows` (--vocab-size), else the tokenizer's; None where neither exists. Raises ValueError where
    `rows` and the config.json differ.
    """
    if model is not None:
        if rows not in (None, model.spec.vocab_size):
            raise ValueError(
                f"--vocab-size is {rows}, but vocab_size is {model.spec.vocab_size} in "
                f"{folder / 'config.json'}: leave out one of the two"
            )
        # the config.json's number wins over the padded rows of the checkpoint
        return model.spec.vocab_size
    where = tokenizer(folder)
    if rows is not None or where is None:
        return rows
    from dolmen.data.tokenizer import load_tokenizer

    return len(load_tokenizer(str(where), option="").get_vocab())


def express(spec: ModelSpec) -> ModelConfig:
    """Return a model config of the first family whose config.json can express `spec`, well-known
    families first. Raises ValueError, with the first family's reason, where none can.
    """
    reasons = []
    # Trying is the test: each family raises for what its config.json cannot say.
    for name in (*FIRST, *sorted(families().keys() - {*FIRST})):
        try:
            return model_from_spec(spec, name)
        except ValueError as error:
            # the first is of llama, the most common: its reason is the most useful
            reasons.append(str(error))
    raise ValueError(f"no model family can express this model; {reasons[0]}")


def with_special_tokens(model: ModelConfig, folder: Path | None) -> ModelConfig:
    """Return the model with eos_token_id set from the folder's tokenizer, so that generation stops
    there; unchanged where it is set already, or without a tokenizer.
    """
    if folder is None or model.config.get("eos_token_id") is not None:
        return model
    from dolmen.data.tokenizer import load_tokenizer

    end = load_tokenizer(str(folder), option="").eos_token_id
    return model if end is None else edit(model, eos_token_id=end)


def pad_vocabulary(model: ModelConfig, tokenizer: str | None, option: str = "") -> ModelConfig:
    """Return the model with pad_token_id set to the tokenizer's padding token if that is not the
    EOS token, else None: classifiers find the end of a sequence by looking for padding. `option`:
    the option that named the tokenizer, for error messages. Unchanged without a tokenizer.
    """
    if tokenizer is None:
        return model
    from dolmen.data.tokenizer import load_tokenizer, padding

    token = padding(load_tokenizer(tokenizer, option, probe=False))
    if model.config.get("pad_token_id") == token:
        return model
    return ModelConfig({**model.config, "pad_token_id": token})


@dataclass(frozen=True)
class Joined:
    """Base class of sources whose tensors are joined from the files of several tensor-parallel
    ranks. A format implements what is stored (`_entries`, `_checked`) and how it is joined
    (`_tensor`).
    """

    model: ModelConfig
    sidecar_folder: Path
    """Folder of its config.json and its tokenizer."""

    @property
    def where(self) -> Path:
        """Folder of the files that the tensors are read from."""
        raise NotImplementedError

    @property
    def spec(self) -> ModelSpec:
        """Spec of the model's parameters."""
        return self.model.spec

    @property
    def tokenizer(self) -> Path | None:
        """Folder of the tokenizer next to the files, or None."""
        return tokenizer(self.sidecar_folder)

    @property
    def generation_config(self) -> dict[str, Any]:
        """Content of generation_config.json next to the files, empty without one."""
        return generation_config(self.sidecar_folder)

    @property
    def transformers(self) -> Path | None:
        """None: transformers cannot load files of several ranks."""
        return None

    def stream(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (our name, tensor) of every parameter, or of those in `only`, joined from all
        ranks. Raises as `ModelSource.specs`.
        """
        return assemble([self._entries[name] for name in self._checked], self._tensor, only)

    def read(self, name: str) -> Shaped[Tensor, "*whole"]:
        """Read one parameter by our name, joined from all ranks. Raises KeyError where there is
        none, and as `_checked`.
        """
        if name not in self._holding:
            raise KeyError(f"{self.where} has no parameter {name}")
        # raises for a damaged folder before any tensor is read
        _ = self._checked
        ((_, tensor),) = assemble([self._holding[name]], self._tensor, [name])
        return tensor

    @cached_property
    def _entries(self) -> Mapping[str, StoredTensor]:
        """Stored name -> which of our parameters the tensor holds."""
        raise NotImplementedError

    @cached_property
    def _holding(self) -> Mapping[str, StoredTensor]:
        """Our parameter name -> the stored tensor that holds it."""
        return {ours: entry for entry in self._entries.values() for ours in entry.ours}

    @cached_property
    def _checked(self) -> Iterable[str]:
        """Stored names in stored order, once all shapes and dtypes are checked. Raises as
        `ModelSource.specs`.
        """
        raise NotImplementedError

    def _tensor(self, name: str) -> Shaped[Tensor, "*whole"]:
        """Read the tensor with this stored name, joined from all ranks."""
        raise NotImplementedError
