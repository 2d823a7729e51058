"""Importing this has every function of dolmen that names shapes (`Float[Tensor, "tokens hidden"]`)
compare them, and what else it annotates, with what it is given and gives: jaxtyping and beartype.
Whatever imports dolmen after it is checked, so conftest.py imports it first, and so does the server
that ranks are forked from (spawning.py). Processes that dolmen starts itself are a user's.
"""

import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any, get_args

import numpy as np
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, jaxtyped
from torch import Tensor

TYPES = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as for pyright


class Finder:
    """Of sys.meta_path: modules of dolmen, whose functions are wrapped once they are there. Not
    jaxtyping's own hook, which wraps every function by something that torch.compile would trace.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith("dolmen.") else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


class Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        wrap(module, module.__name__)
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module.__name__:
                wrap(value, module.__name__)


def wrap(owner: ModuleType | type, module: str) -> None:
    """Replaces the functions of `owner`, a module or a class, that were made there."""
    for name, value in list(vars(owner).items()):
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if not isinstance(function, FunctionType) or function.__module__ != module:
            continue
        if any(map(shapes, function.__annotations__.values())):
            checks = checked(function)
            setattr(owner, name, checks if function is value else type(value)(checks))


def shapes(hint: Any) -> list[str]:
    """The shapes that a hint names, wherever in it: `["tokens hidden"]`."""
    own = isinstance(hint, type) and issubclass(hint, AbstractArray)
    return [hint.dim_str] if own else [shape for one in get_args(hint) for shape in shapes(one)]


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compared; as it is where torch.compile traces it, whose tensors are others.

    A comparison takes 0.2 ms, and a step calls with the same shapes again and again: what has been
    compared is known by its `form`, which takes 5 us.
    """
    strict = jaxtyped(function, typechecker=TYPES)
    given_back: list[Any] = []

    @wraps(function)
    def give_back(*args: Any, **kwargs: Any) -> Any:
        return given_back.pop()

    compare = jaxtyped(give_back, typechecker=TYPES)
    known: set[Any] = set()
    hints = function.__annotations__.values()
    # a shape may name an argument: "{batch} {number}"
    numbers = any("{" in shape for hint in hints for shape in shapes(hint))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        taken = form(args, numbers), form(tuple(kwargs.items()), numbers) if kwargs else ()
        if taken not in known:
            result = strict(*args, **kwargs)
            known.update((taken, (taken, form(result, numbers))))
            return result
        result = function(*args, **kwargs)
        if (both := (taken, form(result, numbers))) not in known:
            given_back.append(result)
            compare(*args, **kwargs)
            known.add(both)
        return result

    return call


def form(value: Any, numbers: bool) -> Any:
    """What shapes and types are decided by: equal where a comparison would say the same. `numbers`:
    shapes name whole numbers that are given; else a number is as good as any other of its type.
    """
    kind = type(value)
    by = decided_by(kind)
    if by == "shape":
        return kind, value.dtype, value.shape
    if by == "type" or kind is int and not numbers:
        return kind
    if by == "items":
        return kind, *[form(one, numbers) for one in value]
    try:
        return kind, hash(value)
    except TypeError:
        return kind


@cache
def decided_by(kind: type) -> str:
    """What the form of a value of this type depends on: "shape", "type", "items" or "value"."""
    if issubclass(kind, (Tensor, np.ndarray)):
        return "shape"
    if issubclass(kind, (tuple, list)):
        return "items"
    return "type" if kind is float or kind.__hash__ is object.__hash__ else "value"


sys.meta_path.insert(0, Finder)
