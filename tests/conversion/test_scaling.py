"""Delayed scales in the bytes of Transformer Engine, and what else such bytes may hold."""

import pickle
import sys
import types
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
import torch

from dolmen.conversion.megatron import scaling
from dolmen.conversion.weights import Scaling, join_scaling
from dolmen.files.gate import Refused

WHERE = Path("model_optim_rng.pt")


def theirs(products: int, steps: int = 4) -> dict:
    """As get_extra_state of Transformer Engine 1.11 lays it."""
    generator = torch.Generator().manual_seed(0)
    return {
        "scale_fwd": torch.rand(3 * products, generator=generator),
        "amax_history_fwd": torch.rand(steps, 3 * products, generator=generator),
        "scale_bwd": torch.rand(2 * products, generator=generator),
        "amax_history_bwd": torch.rand(steps, 2 * products, generator=generator),
        "extra_fp8_variables": {"num_gemms": products, "fp8_checkpoint": True},
    }


@pytest.mark.parametrize("protocol", (3, 4, 5))
@pytest.mark.parametrize("products", (1, 2))
def test_what_transformer_engine_wrote(products, protocol):
    state = theirs(products)
    found = scaling.read_extra_state(pickle.dumps(state, protocol=protocol), WHERE)
    assert len(found) == products
    for i, (history, scale) in enumerate(found):
        assert torch.equal(history[:, 0], state["amax_history_fwd"][:, 3 * i])  # input
        assert torch.equal(history[:, 1], state["amax_history_fwd"][:, 3 * i + 1])  # weight
        assert torch.equal(history[:, 2], state["amax_history_bwd"][:, 2 * i])  # gradient
        want = state["scale_fwd"][3 * i], state["scale_fwd"][3 * i + 1], state["scale_bwd"][2 * i]
        assert torch.equal(scale, torch.stack(want))


def test_a_recipe_of_transformer_engine_is_left(monkeypatch):
    """As version 2 has one beside: an object of a class of its own, with an enum inside."""
    module = types.ModuleType("transformer_engine.common.recipe")
    for name in ("transformer_engine", "transformer_engine.common", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    source = """
class Format(Enum):
    HYBRID = 1

@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
"""
    vars(module).update(Enum=Enum, dataclass=dataclass)
    exec(source, vars(module))
    state = {**theirs(1), "recipe": module.DelayedScaling()}
    assert len(scaling.read_extra_state(pickle.dumps(state), WHERE)) == 1


def test_written_is_read_to_the_bit():
    ours = [Scaling(torch.rand(5, 3), torch.rand(3)) for _ in range(3)]
    state = scaling.write_extra_state(ours)
    for got, want in zip(scaling.read_extra_state(state, WHERE), ours, strict=True):
        assert torch.equal(got.history, want.history) and torch.equal(got.scale, want.scale)
    # and by what Transformer Engine reads it with
    value = pickle.loads(state)
    assert value["amax_history_fwd"].shape == (5, 9) and value["scale_bwd"].shape == (6,)
    assert (value["amax_history_fwd"][:, 2::3] == 0).all() and (value["scale_bwd"][1::2] == 1).all()


def test_several_of_ours_are_one_of_theirs():
    q = Scaling(torch.tensor([[0.0, 0, 0], [1, 4, 2]]), torch.tensor([448.0, 112, 28672]))
    v = Scaling(torch.tensor([[0.0, 0, 0], [1, 2, 8]]), torch.tensor([448.0, 224, 7168]))
    whole = join_scaling((q, v))
    assert whole.history.tolist() == [[0, 0, 0], [1, 4, 8]]
    assert whole.scale.tolist() == [448, 112, 7168]


def test_a_module_without_scales_has_none():
    assert scaling.read_extra_state(b"", WHERE) == []
    other = {"recipe": 1, "extra_fp8_variables": {}}
    assert scaling.read_extra_state(pickle.dumps(other), WHERE) == []


class Evil(Enum):
    """A class that no state has a use for."""

    ONE = 1


@pytest.mark.parametrize(
    "state, said",
    [
        ({"scale_fwd": torch.ones(3)}, "have the shapes None, (3,), None, None"),
        ({**theirs(1), "scale_bwd": torch.ones(3)}, "which do not match 1 matrix products"),
        ({**theirs(1), "recipe": Evil.ONE}, "which is not allowed"),
        ([theirs(1)], "not a mapping"),
    ],
)
def test_what_is_none_is_refused(state, said):
    with pytest.raises(Refused) as refused:
        scaling.read_extra_state(pickle.dumps(state), WHERE)
    assert said in str(refused.value)


def test_what_is_cut_is_refused():
    state = pickle.dumps(theirs(2))
    for length in range(1, len(state), 7):
        with pytest.raises(Refused):
            scaling.read_extra_state(state[:length], WHERE)
