"""Keyword arguments of the Python API to the configuration of the command of the same name: with
the same checks, and errors that name the keyword.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from dolmen.comparison.config import DiffConfig
from dolmen.conversion.config import ConvertConfig, ExportConfig
from dolmen.core.config import field_types, from_dict, option_types
from dolmen.core.messages import BadInput, message, printable, python_spelling
from dolmen.data.config import TokenConfig, TokenizeConfig
from dolmen.evaluation.config import EvaluateConfig, VerifyConfig
from dolmen.families import families
from dolmen.families.start import option_fields
from dolmen.planning.config import DryrunConfig
from dolmen.recipes.overrides import plain
from dolmen.serving.config import GenerateConfig
from dolmen.training.config import RunConfig
from dolmen.training.request import LaunchOptions
from dolmen.vocabulary.config import VocabExtendConfig, VocabMergeConfig, VocabTrainConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


@contextmanager
def value_errors(keywords: Mapping[str, str] | None = None) -> Iterator[None]:
    """Context manager of the Python API: raise BadInput, ValueError, KeyError and OSError as a
    ValueError, in whose message options of the command line are written as Python keywords.
    `keywords`: option -> keyword, where the two names differ.
    """
    try:
        yield
    except (BadInput, ValueError, KeyError, OSError) as error:
        raise ValueError(rewrite_options(message(error), keywords or {})) from error


def rewrite_options(text: str, keywords: Mapping[str, str]) -> str:
    """Return a message of the command line with its options written as Python keywords
    (--layout.tp 2 as layout={"tp": 2}). `keywords`: option -> keyword, where the two names differ.
    """
    options = _options()
    # most keywords are the option's own name
    names = {**{name: name for name in options}, **keywords}
    return python_spelling(
        printable(text), names, [n for n, kind in options.items() if kind is bool]
    )


@cache
def _options() -> dict[str, Any]:
    """Return the type of every option that a message may name, of all commands that the Python API
    has: dotted name -> type; None for the fields of models, whose types differ by family.
    """
    known: dict[str, Any] = {"model.model_type": str}
    for family in families().values():
        # types differ between families
        known |= {f"model.{name}": None for name in option_fields(family)}
    conversion = (ExportConfig, ConvertConfig, TokenizeConfig, VerifyConfig, DiffConfig)
    vocabulary = (VocabTrainConfig, VocabMergeConfig, VocabExtendConfig)
    configs = (GenerateConfig, EvaluateConfig, DryrunConfig)
    # all, as messages come from any of them
    for cls in (LaunchOptions, RunConfig, *conversion, *vocabulary, *configs):
        known |= option_types(cls)
    return known


DATA_KEYWORDS = {f"data.{name}": name for name in field_types(TokenConfig)}
"""Options of the section `data` -> top-level keywords."""


def build_config(cls: type[T], excluded: Collection[str] = (), **keywords: Any) -> T:
    """Return an instance of the config class `cls` with fields set by `keywords`. Nested sections
    are mappings; fields of its section `data` may also be keywords themselves. Raises ValueError
    for a keyword that is unknown or in `excluded` (options of the command only), and for a value of
    a wrong type or out of range.
    """
    types = field_types(cls)
    data = field_types(types["data"]) if "data" in types else {}
    values: dict[str, Any] = {}
    data_values: dict[str, Any] = {}
    for name, value in keywords.items():
        if name in excluded:
            raise ValueError(f"{name} is an option of the command only: leave it out")
        # evaluate(path=...) rather than data={"path": ...}
        if name in data and name not in types:
            data_values[name] = plain(value)
        # both forms may be mixed
        elif name == "data" and name in types and isinstance(value, Mapping):
            data_values |= value
        else:
            values[name] = plain(value)
    return from_dict(cls, values | ({"data": data_values} if data_values else {}))
