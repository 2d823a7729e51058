"""Dolmen trains large transformer language models split over any number of devices; the layout
never changes the answer.

import dolmen

model = dolmen.load("path/to/model")                     # a transformers directory or hub id
print(model.generate("Once upon a time"))
dolmen.train("pretrain", init="path/to/model", data={"path": "book.txt"}, out="runs/book")
dolmen.worker("pretrain", init="path/to/model", ...)     # the same in one process of torchrun's
dolmen.export("runs/book", to="book/")
assert dolmen.verify("book/").ok                         # ours beside transformers
print(dolmen.diff("book/", a={"layout": {"tp": 2}}))      # and where they part, if they do
print(dolmen.plan("gpt-1t", "dgx-a100:384").ranked[0])    # the fastest layout, and what it holds
print(dolmen.evaluate("book/", "other.txt").perplexity)  # and how well it predicts a text
dolmen.extend_vocabulary("book/", "merged/", to="more/")  # rows for the tokens of another language
dolmen.show("runs/book")                                 # a page to look at: show.html
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dolmen.api import (
        Failed,
        convert,
        diff,
        dryrun,
        evaluate,
        evaluate_tasks,
        export,
        extend_vocabulary,
        generate,
        load,
        merge_vocabularies,
        parallelize,
        plan,
        plan_inference,
        restore,
        save,
        show,
        step,
        tokenize,
        train,
        train_vocabulary,
        verify,
        worker,
    )

__version__ = "0.1.0"
__all__ = [
    "Failed",
    "__version__",
    "convert",
    "diff",
    "dryrun",
    "evaluate",
    "evaluate_tasks",
    "export",
    "extend_vocabulary",
    "generate",
    "load",
    "merge_vocabularies",
    "parallelize",
    "plan",
    "plan_inference",
    "restore",
    "save",
    "show",
    "step",
    "tokenize",
    "train",
    "train_vocabulary",
    "verify",
    "worker",
]


def __getattr__(name: str) -> Any:
    """The functions of `dolmen.api` import torch and transformers, 3 s, which `import dolmen` does
    not owe: they are found on first use.
    """
    if name in __all__:
        from dolmen import api

        return getattr(api, name)
    raise AttributeError(f"module 'dolmen' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names of the module, those that `__getattr__` imports included."""
    return sorted({*globals(), *__all__})
