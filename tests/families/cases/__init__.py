"""What the tests of families know of one family each, a file a family, which is found by itself.

A file has CASES, name -> Case; PUBLISHED, its config.json's as their makers published them; and
PLAIN = True where they are read by no class of transformers.
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

Layer = Callable[[nn.Module, Tensor], tuple[dict[str, Tensor], nn.Module]]


@dataclass(frozen=True)
class Case:
    """A small model of one structure that the family can take."""

    model_type: str
    fields: dict[str, Any]
    """Of its config.json; others as the class of transformers has them."""
    plain: Callable[[dict[str, Any]], nn.Module] | None = None
    """Of a family without a class in transformers: what makes the reference of its config.json, a
    plain.Plain.
    """
    layer: Layer | None = None
    """(the model there, x) -> what layer 1 makes of x on the way into attention, by our names, and
    its feed-forward layer; None where its modules have the names of Llama's.
    """
    gated: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    """(the experts there, gate, up) -> what an expert makes of the two; None: act_fn(gate) * up."""
    fills: bool = False
    """It fills in masked tokens: labels are of their own places, and it has no texts."""
    long: dict[str, Any] | None = None
    """Other fields with which 220 tokens have room: it joins the ragged batches. A tied head of
    random weights repeats a token: untied.
    """
    refused: dict[str, str] = field(default_factory=dict)
    """A layout of test_over_layouts.py that the model cannot have -> what the refusal says."""
    alter: Callable[[nn.Module], nn.Module] | None = None
    """Changes and returns the model of transformers, where its class computes less than the fields
    say.
    """

    @property
    def made(self) -> str:
        """What makes its reference of a config, of transformers."""
        return "AutoModelForMaskedLM" if self.fills else "AutoModelForCausalLM"


def modules() -> list[Any]:
    """Every file of this folder."""
    names = [file.name for file in pkgutil.iter_modules([str(Path(__file__).parent)])]
    return [import_module(f"cases.{name}") for name in sorted(names)]


def collected() -> dict[str, Case]:
    return {name: case for module in modules() for name, case in vars(module)["CASES"].items()}


def published() -> list[dict[str, Any]]:
    """Those that transformers reads too, then the others (see `read_by_dolmen_alone`)."""
    each = [(vars(module).get("PLAIN", False), module) for module in modules()]
    return [
        content
        for _, module in sorted(each, key=lambda pair: pair[0])
        for content in vars(module).get("PUBLISHED", [])
    ]


def read_by_dolmen_alone() -> list[dict[str, Any]]:
    return [
        content
        for module in modules()
        if vars(module).get("PLAIN", False)
        for content in vars(module).get("PUBLISHED", [])
    ]
