"""Keywords of Python to what a command would be told in words, for every function of this room:
with the same checks, and refusals that name the keyword.
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
from dolmen.recipes.changed import plain
from dolmen.serving.config import GenerateConfig
from dolmen.training.config import RunConfig
from dolmen.training.request import Handling
from dolmen.vocabulary.config import VocabExtendConfig, VocabMergeConfig, VocabTrainConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


@contextmanager
def value_errors(own: Mapping[str, str] | None = None) -> Iterator[None]:
    """What the command line tells in a line and with exit code 2 is a ValueError of that line,
    which names the keywords of Python: those of `own`, and of all functions.
    """
    try:
        yield
    except (BadInput, ValueError, KeyError, OSError) as error:
        raise ValueError(in_keywords(message(error), own or {})) from error


def in_keywords(text: str, own: Mapping[str, str]) -> str:
    options = _options()
    keywords = {**{name: name for name in options}, **own}
    return python_spelling(
        printable(text), keywords, [n for n, kind in options.items() if kind is bool]
    )


@cache
def _options() -> dict[str, Any]:
    """Every option of a command, as Python spells it -> its type; of a model's none."""
    known: dict[str, Any] = {"model.model_type": str}
    for one in families().values():
        known |= {f"model.{name}": None for name in option_fields(one)}
    exchanged = (ExportConfig, ConvertConfig, TokenizeConfig, VerifyConfig, DiffConfig)
    vocabulary = (VocabTrainConfig, VocabMergeConfig, VocabExtendConfig)
    asked = (GenerateConfig, EvaluateConfig, DryrunConfig)
    for cls in (Handling, RunConfig, *exchanged, *vocabulary, *asked):
        known |= option_types(cls)
    return known


DATA = {f"data.{name}": name for name in field_types(TokenConfig)}
"""Options of the section `data`, which are keywords of their own."""


def asked_of(cls: type[T], without: Collection[str] = (), **keywords: Any) -> T:
    """A configuration of these keywords, where those of its section `data` may stand by themselves.
    Raises ValueError for one that is unknown or in `without`, and a value that it cannot have.
    """
    own = field_types(cls)
    data = field_types(own["data"]) if "data" in own else {}
    values: dict[str, Any] = {}
    of_data: dict[str, Any] = {}
    for name, value in keywords.items():
        if name in without:
            raise ValueError(f"{name} is an option of the command alone: leave it out")
        if name in data and name not in own:
            of_data[name] = plain(value)
        elif name == "data" and name in own and isinstance(value, Mapping):
            of_data |= value
        else:
            values[name] = plain(value)
    return from_dict(cls, values | ({"data": of_data} if of_data else {}))
