"""A model that is a part of a larger one, as the text model of one that sees pictures: what a
folder of the larger one says and stores of it. The other parts are left out, aloud.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dolmen.core.messages import shown
from dolmen.files import kinds

CARRIED = (*kinds.SPECIAL_TOKENS, "dtype", "torch_dtype", "tie_word_embeddings")


@dataclass(frozen=True)
class Larger:
    """Where a family's model is in one of another model_type."""

    model_type: str
    field: str
    """Of the larger config.json: this model's."""
    prefixes: Mapping[str, str]
    """What its stored names begin with -> with what they do in a folder of its own."""
    others: tuple[str, ...]
    """What the names of the other parts begin with."""

    def inner(self, content: Mapping[str, Any], model_type: str) -> dict[str, Any]:
        """Of the larger config.json the one of this model, with special tokens and dtype that it
        leaves to the whole. Raises ValueError where there is none.
        """
        own = content.get(self.field)
        if not isinstance(own, dict):
            raise ValueError(f"{self.field} is {shown(own)}: it must be the config.json of a model")
        carried = {name: content[name] for name in CARRIED if name in content}
        return {**carried, **own, "model_type": model_type}

    def name(self, stored: str) -> str:
        """A stored name as it is in a folder of its own."""
        for before, now in self.prefixes.items():
            if stored.startswith(before):
                return now + stored.removeprefix(before)
        return stored
