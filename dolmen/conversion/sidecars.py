"""Sidecar files of weights that do not describe themselves: config.json, tokenizer and
generation_config.json, a config.json for a tree that has none, and the base class of sources whose
tensors are joined from the files of several ranks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtyping import Shaped
from torch import Tensor

from dolmen.conversion.hf import read_config, tokenizer_files
from dolmen.conversion.weights import assemble
from dolmen.families import Model, edit, families, model_from_spec
from dolmen.families.rules import StoredTensor
from dolmen.files import gate, kinds
from dolmen.model.spec import ModelSpec

FIRST = ("llama", "gpt2", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""Families that are asked first whether they can say a tree: those that most tools know."""


def place(folder: Path) -> Path:
    """Folder of the sidecar files: a checkpoint's own, or the one that it lies in with others."""
    for one in (folder, folder.parent):
        if (one / "config.json").is_file() or tokenizer(one) is not None:
            return one
    return folder


def config(folder: Path) -> Model | None:
    """Model of the folder's config.json. Raises ValueError as `read_config`."""
    return read_config(folder) if (folder / "config.json").is_file() else None


def tokenizer(folder: Path) -> Path | None:
    """The folder itself, or the one in it of that name, which has a tokenizer."""
    places = (folder, folder / "tokenizer")
    return next((one for one in places if one.is_dir() and tokenizer_files(one)), None)


def generation_config(folder: Path) -> dict[str, Any]:
    """Empty where there is none. Raises Refused."""
    file = folder / "generation_config.json"
    return gate.read_json(file, kinds.GENERATION_CONFIG) if file.is_file() else {}


def vocabulary(folder: Path, said: Model | None, rows: int | None) -> int | None:
    """How many tokens there are: `rows`, or as the config.json says, or the tokenizer. Raises
    ValueError where the first two differ.
    """
    if said is not None:
        if rows not in (None, said.tree.vocab_size):
            raise ValueError(
                f"--vocab-size is {rows}, vocab_size {said.tree.vocab_size} in "
                f"{folder / 'config.json'}: leave out one of the two"
            )
        return said.tree.vocab_size
    where = tokenizer(folder)
    if rows is not None or where is None:
        return rows
    from dolmen.data.tokenizer import load_tokenizer

    return len(load_tokenizer(str(where), option="").get_vocab())


def express(tree: ModelSpec) -> Model:
    """A config.json that says the tree, of the first family that can. Raises ValueError where none
    can, with what the first says.
    """
    reasons = []
    for name in (*FIRST, *sorted(families().keys() - {*FIRST})):
        try:
            return model_from_spec(tree, name)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(f"no family's config.json can say this model; {reasons[0]}")


def with_special_tokens(model: Model, folder: Path | None) -> Model:
    """The model with the end of text that the folder's tokenizer names, where generation stops;
    as it is where it names one itself, or there is no tokenizer.
    """
    if folder is None or model.config.get("eos_token_id") is not None:
        return model
    from dolmen.data.tokenizer import load_tokenizer

    end = load_tokenizer(str(folder), option="").eos_token_id
    return model if end is None else edit(model, eos_token_id=end)


def pad_vocabulary(model: Model, tokenizer: str | None, option: str = "") -> Model:
    """The model whose padding is a token of that tokenizer, which the user named by `option`, that
    ends no text: a program that looks for padding so finds the end of a text; none, where there is
    no such token. As it is without a tokenizer.
    """
    if tokenizer is None:
        return model
    from dolmen.data.tokenizer import load_tokenizer, padding

    token = padding(load_tokenizer(tokenizer, option, probe=False))
    if model.config.get("pad_token_id") == token:
        return model
    return Model({**model.config, "pad_token_id": token})


@dataclass(frozen=True)
class Joined:
    """A format says what is stored (`_holding`, `_checked`) and joins it (`_tensor`)."""

    model: Model
    sidecar_folder: Path
    """Folder of its config.json and its tokenizer."""

    @property
    def where(self) -> Path:
        """The folder of the files."""
        raise NotImplementedError

    @property
    def tree(self) -> ModelSpec:
        return self.model.tree

    @property
    def tokenizer(self) -> Path | None:
        return tokenizer(self.sidecar_folder)

    @property
    def generation_config(self) -> dict[str, Any]:
        return generation_config(self.sidecar_folder)

    @property
    def transformers(self) -> None:
        return None

    def read(self, name: str) -> Shaped[Tensor, "*whole"]:
        if name not in self._holding:
            raise KeyError(f"{self.where} has no parameter {name}")
        _ = self._checked
        ((_, tensor),) = assemble([self._holding[name]], self._tensor, [name])
        return tensor

    @cached_property
    def _holding(self) -> Mapping[str, StoredTensor]:
        """Our name -> the stored tensor that holds a parameter."""
        raise NotImplementedError

    @cached_property
    def _checked(self) -> Iterable[str]:
        """Stored names, in the order in which they lie. Raises as `Source.specs`."""
        raise NotImplementedError

    def _tensor(self, name: str) -> Shaped[Tensor, "*whole"]:
        """A stored tensor, whole."""
        raise NotImplementedError
