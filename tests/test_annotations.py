"""Shapes that functions name are compared (shapes.py), in spawned ranks too."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

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
    """In a process of its own: the server that ranks are forked from may be another test's here."""
    program = "import spawning, test_annotations; spawning.run_spawned(2, test_annotations.wrong)"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert re.search("(?s)rank [01] failed.*TypeCheckError.*rms_norm", ended.stderr), ended.stderr


def test_what_torch_compiles_is_as_it_was(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        wrong()
    assert not isinstance(raised.value, TypeCheckError)
