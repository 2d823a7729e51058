"""Importing this has every function of dolmen that names shapes (`Float[Tensor, "tokens hidden"]`)
compare them, and what else it annotates, with what it is given and gives: jaxtyping and beartype.
Whatever imports dolmen after it is checked, so conftest.py imports it first, and so does the server
that ranks are forked from (spawning.py). Processes that dolmen starts itself are a user's.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import chain, repeat
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

    A comparison takes 0.2 ms, and a step calls with the same shapes again and again: calls whose
    arguments and result have been compared are known by what decides the comparison, which takes
    2 us.
    """
    computed: list[Any] = []  # a result that is to be compared and not computed again

    @wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        return computed.pop() if computed else function(*args, **kwargs)

    compare = jaxtyped(compute, typechecker=TYPES)
    known: set[Any] = set()
    parameters = inspect.signature(function).parameters.values()
    hints = function.__annotations__
    # a shape may name an argument: "{batch} {number}"
    numbers = any("{" in shape for hint in hints.values() for shape in shapes(hint))
    by_name = {
        name: number if numbers else form if shapes(hint) else type for name, hint in hints.items()
    }
    by_place = [by_name.get(p.name, type) for p in parameters if p.kind is not p.VAR_POSITIONAL]
    rest = [by_name.get(p.name, type) for p in parameters if p.kind is p.VAR_POSITIONAL]
    of_result = by_name.get("return", type)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        ways = chain(by_place, repeat(*rest)) if rest else by_place
        taken: Any = tuple([way(value) for way, value in zip(ways, args, strict=False)])
        if kwargs:
            taken = taken, tuple([(n, by_name.get(n, type)(value)) for n, value in kwargs.items()])
        if taken not in known:
            result = compare(*args, **kwargs)
            known.update((taken, (taken, of_result(result))))
            return result
        result = function(*args, **kwargs)
        if (both := (taken, of_result(result))) not in known:
            computed.append(result)
            try:
                compare(*args, **kwargs)
            finally:
                computed.clear()
            known.add(both)
        return result

    return call


def form(value: Any) -> Any:
    """Return what decides the comparison of a value whose hint names shapes: equal where it says
    the same.
    """
    kind = type(value)
    if is_tensor(kind):
        return value.dtype, value.shape
    return (kind, *map(form, value)) if issubclass(kind, (tuple, list)) else kind


def number(value: Any) -> Any:
    """`form`, and the value itself where a shape can name it: a number, or what has numbers."""
    if is_tensor(type(value)):
        return value.dtype, value.shape
    try:
        return type(value), hash(value)
    except TypeError:
        return type(value)


@cache
def is_tensor(kind: type) -> bool:
    return issubclass(kind, (Tensor, np.ndarray))


sys.meta_path.insert(0, Finder)
