"""The loss scale of fp16."""

import pytest
import torch

from dolmen.optim.optimizer import DTYPES, LossScale


def test_only_fp16_is_scaled():
    assert LossScale.from_dtype("float16") == LossScale(True, 65536.0) and LossScale.from_dtype(
        "bfloat16"
    ) == LossScale.from_dtype("float32") == LossScale(False, 1.0)
    constant = LossScale.from_dtype("bfloat16")
    for finite in (True, False) * 3:
        constant.update(finite)
    assert constant == LossScale(False, 1.0)


def test_halved_by_an_overflow_doubled_after_patience():
    scale, values = LossScale(True, 1024.0, patience=3), []
    for finite in (
        True,
        True,
        True,
        True,
        False,
        True,
        True,
        False,
        True,
        True,
        True,
        True,
        True,
        True,
    ):
        scale.update(finite)
        values.append(scale.value)
    assert values == [
        1024,
        1024,
        2048,
        2048,
        1024,
        1024,
        1024,
        512,
        512,
        512,
        1024,
        1024,
        1024,
        2048,
    ]


def test_never_below_one():
    scale = LossScale(True, 4.0)
    for _ in range(5):
        scale.update(False)
    assert scale.value == 1.0


@pytest.mark.parametrize("name", DTYPES)
def test_names(name):
    assert (
        str(DTYPES[name]) == f"torch.{name}"
        and DTYPES[name].is_floating_point
        and isinstance(DTYPES[name], torch.dtype)
    )
