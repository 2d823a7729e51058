"""Shapes that functions name are compared (shapes.py), in spawned ranks too."""

import pytest
import torch
from jaxtyping import TypeCheckError
from spawning import run_spawned

from dolmen.ops import moe, norm, rope


def wrong() -> None:
    """Weights of 4 for rows of 6."""
    norm.rms_norm(torch.ones(2, 6), torch.ones(4), 1e-6)


def test_a_wrong_shape_is_refused_by_its_name():
    with pytest.raises(TypeCheckError, match="(?s)rms_norm.*parameter 'weight'"):
        wrong()


def test_a_wrong_dtype_is_refused():
    with pytest.raises(TypeCheckError, match="(?s)tables.*parameter 'positions'"):
        rope.tables(torch.ones(3), rope.inverse_frequencies(4, 10000.0))


def test_a_wrong_result_is_refused(monkeypatch):
    monkeypatch.setattr(moe._Permute, "apply", lambda x, permutation, inverted: x[:1])
    with pytest.raises(TypeCheckError, match="(?s)return value of dolmen.ops.moe.permute"):
        moe.permute(torch.ones(3, 2), torch.arange(3), torch.arange(3))


def test_a_wrong_shape_in_a_spawned_rank_is_refused():
    with pytest.raises(AssertionError, match="(?s)rank [01] failed.*TypeCheckError.*rms_norm"):
        run_spawned(2, wrong)


def test_what_torch_compiles_is_as_it_was(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        wrong()
    assert not isinstance(raised.value, TypeCheckError)
