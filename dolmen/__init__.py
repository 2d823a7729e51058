"""Dolmen trains large transformer language models split over any number of devices; the layout
never changes the answer.

import dolmen

model = dolmen.load("path/to/model")                     # a transformers directory or hub id
print(model.generate("Once upon a time"))
dolmen.train("pretrain", init="path/to/model", data={"path": "book.txt"}, out="runs/book")
dolmen.export("runs/book", to="book/")
assert dolmen.verify("book/").ok                         # ours beside transformers
print(dolmen.evaluate("book/", "other.txt").perplexity)  # and how well it predicts a text
"""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dolmen import evaluate, train

if TYPE_CHECKING:
    from dolmen.api import export, generate, load, verify
    from dolmen.evaluate.perplexity import Evaluation

__version__ = "0.1.0"
__all__ = ["__version__", "evaluate", "export", "generate", "load", "train", "verify"]


class _Train(ModuleType):
    """`dolmen.train` is a folder of modules and, called, `dolmen.api.train`: one name cannot
    otherwise be both.
    """

    def __call__(self, recipe: str | Path, **options: Any) -> Path:
        """`dolmen.api.train`, which says more."""
        from dolmen import api  # torch and transformers, 3 s, which `import dolmen` does not owe

        return api.train(recipe, **options)


class _Evaluate(ModuleType):
    """`dolmen.evaluate`, in the same way."""

    def __call__(
        self, source: str | Path, path: str | Path | Sequence[str | Path], **options: Any
    ) -> "Evaluation":
        """`dolmen.api.evaluate`, which says more."""
        from dolmen import api

        return api.evaluate(source, path, **options)


# a module's class may be set, which its type does not say
train.__class__ = _Train  # pyright: ignore[reportAttributeAccessIssue]
evaluate.__class__ = _Evaluate  # pyright: ignore[reportAttributeAccessIssue]


def __getattr__(name: str) -> Any:
    """The functions of `dolmen.api` import torch, so they are found when first asked for."""
    if name in __all__:
        from dolmen import api

        return getattr(api, name)
    raise AttributeError(f"module 'dolmen' has no attribute {name!r}")


def __dir__() -> list[str]:
    """With what `__getattr__` finds."""
    return sorted({*globals(), *__all__})
