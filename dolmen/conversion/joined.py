"""Base of sources (source.py) whose tensors are joined from the files of several ranks, with a
config.json and a tokenizer beside these, if anywhere.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtyping import Shaped
from torch import Tensor

from dolmen.conversion import sidecars
from dolmen.conversion.weights import assemble
from dolmen.families import Model
from dolmen.families.rules import StoredTensor
from dolmen.model.spec import ModelSpec


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
        return sidecars.tokenizer(self.sidecar_folder)

    @property
    def generation_config(self) -> dict[str, Any]:
        return sidecars.generation_config(self.sidecar_folder)

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
