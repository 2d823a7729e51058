"""Names and shapes of parameters, their number and their operations, against what they were when
the house kept them in lists of their own (shapes.json).
"""

import json
from pathlib import Path

import pytest
from family_cases import config_of

from dolmen.families import ModelConfig
from dolmen.model import count
from dolmen.model.spec import ModelSpec
from dolmen.recipes import RECIPES

FROZEN = json.loads(Path(__file__).with_name("shapes.json").read_text())


def spec(name: str) -> ModelSpec:
    """Of a recipe, or of a config.json that transformers writes."""
    if name in RECIPES:
        return RECIPES[name]().model.spec
    return ModelConfig(config_of(name.removeprefix("tiny "))).spec


def frozen(name: str) -> dict[str, tuple[int, ...]]:
    """What shapes.json says, by full names: [0, what lies outside the layers] or [so many layers,
    what each has].
    """
    shapes, layer = {}, 0
    for equal, content in FROZEN[name]["shapes"]:
        for i in range(equal or 1):
            prefix = f"layers.{layer + i}." if equal else ""
            shapes |= {prefix + parameter: tuple(shape) for parameter, shape in content}
        layer += equal
    return shapes


@pytest.mark.parametrize("name", FROZEN)
def test_names_shapes_and_counts_are_what_they_were(name):
    model, was = spec(name), FROZEN[name]
    assert list(model.shapes.items()) == list(frozen(name).items())
    assert count.parameters(model) == was["parameters"]
    kinds = ((48, "causal"), (4096, "causal"), (4096, "full"))
    found = [count.training_flops_per_token(model, *kind) for kind in kinds]
    assert found == pytest.approx(was["flops"], rel=1e-15)
