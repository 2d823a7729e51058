"""Dolmen trains large transformer language models split over any number of devices; the layout never changes the answer.

    import dolmen

    model = dolmen.load("path/to/model")                     # a transformers directory or hub id
    print(model.generate("Once upon a time"))
    dolmen.train("pretrain", init="path/to/model", data={"path": "book.txt"}, layout={"tp": 2}, out="runs/book")
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "load", "train"]


def __getattr__(name: str) -> Any:
    """`load` and `train` import torch, so they are found when first asked for."""
    if name in ("load", "train"):
        from dolmen import api
        return vars(api)[name]
    raise AttributeError(f"module 'dolmen' has no attribute {name!r}")
