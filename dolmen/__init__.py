"""Dolmen trains large transformer language models split over any number of devices; the layout
never changes the answer.

import dolmen

model = dolmen.load("path/to/model")                     # a transformers directory or hub id
print(model.generate("Once upon a time"))
dolmen.train("pretrain", init="path/to/model", data={"path": "book.txt"}, out="runs/book")
"""

from types import ModuleType
from typing import Any

from dolmen import train

__version__ = "0.1.0"
__all__ = ["__version__", "load", "train"]


class _Train(ModuleType):
    """`dolmen.train` is a folder of modules and, called, `dolmen.api.train`: one name cannot
    otherwise be both.
    """

    def __call__(self, recipe: Any, **options: Any) -> Any:
        from dolmen import api

        return api.train(recipe, **options)


train.__class__ = _Train


def __getattr__(name: str) -> Any:
    """`load` imports torch, so it is found when first asked for."""
    if name == "load":
        from dolmen import api

        return api.load
    raise AttributeError(f"module 'dolmen' has no attribute {name!r}")
