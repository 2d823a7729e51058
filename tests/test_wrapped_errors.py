"""Errors of libraries and of layers below become errors of the layer that reports them: each as
the one that is stated, with its text, and whatever else is raised stays as it is.
"""

import os
from pathlib import Path

import pytest

from dolmen.api.options import value_errors
from dolmen.checkpoint.folders import Damaged
from dolmen.checkpoint.reader import damage_named
from dolmen.checkpoint.remote import raise_damaged
from dolmen.core.messages import BadInput, Failed, as_bad_input, os_error_as_value
from dolmen.files.gate import Refused, open_file
from dolmen.files.storage import StorageError
from dolmen.files.tokenizer_files import refused_by_name
from dolmen.rl.rewards import RewardError
from dolmen.training import batches, profile, worker

FILE = Path(__file__)
PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
FULL = OSError(28, os.strerror(28), "/a/b")


@pytest.mark.parametrize(
    "context, error, becomes, text",
    [
        (raise_damaged(), Refused("a: b"), Damaged, "a: b"),
        (raise_damaged(), StorageError("a"), StorageError, "a"),
        (damage_named(FILE), Damaged("a"), Damaged, "a"),
        (damage_named(FILE), EOFError("a"), Damaged, f"{FILE} is missing, damaged or truncated: a"),
        (damage_named(FILE), TypeError("a"), TypeError, "a"),
        (refused_by_name("a"), PANIC("b"), Refused, "a: the tokenizer fails: b"),
        (refused_by_name("a"), KeyboardInterrupt("b"), KeyboardInterrupt, "b"),
        (as_bad_input(), KeyError("a b"), BadInput, "a b"),
        (as_bad_input(), TypeError("a"), TypeError, "a"),
        (as_bad_input(TypeError), TypeError("a"), BadInput, "a"),
        (as_bad_input(TypeError), ValueError("a"), ValueError, "a"),
        (as_bad_input(), BrokenPipeError(32, "a"), BrokenPipeError, "[Errno 32] a"),
        (os_error_as_value("--out x"), FULL, ValueError, f"--out x: {FULL.strerror}"),
        (os_error_as_value("--out x"), OSError("a"), ValueError, "--out x: a"),
        (os_error_as_value("--out x"), TypeError("a"), TypeError, "a"),
        (value_errors(), BadInput("set --train.steps 3"), ValueError, "set train.steps 3"),
        (value_errors({"train.lr": "rate"}), KeyError("--train.lr"), ValueError, "rate"),
        (value_errors(), TypeError("a"), TypeError, "a"),
        (open_file(FILE), OSError(5, "bad"), Refused, f"{FILE}: cannot be read: bad"),
        (open_file(FILE), KeyError("a"), KeyError, "'a'"),
        (worker.restartable_storage(), StorageError("a"), StorageError, "a"),
        (batches._ending(), RewardError("a"), Failed, "a"),
        (batches._ending(), ValueError("a"), ValueError, "a"),
    ],
)
def test_an_error_becomes_that_of_the_layer_above(context, error, becomes, text):
    with pytest.raises(becomes) as caught, context:
        raise error
    assert type(caught.value) is becomes and str(caught.value) == text
    assert not isinstance(caught.value, Failed) or caught.value.final


def test_storage_that_fails_after_a_restart_is_tried_again(monkeypatch):
    monkeypatch.setattr(worker.process, "restarts", lambda: 1)
    with pytest.raises(Failed, match="^a$") as caught, worker.restartable_storage():
        raise StorageError("a")
    assert not caught.value.final


def test_a_profile_that_cannot_be_written_is_noted():
    failed: list[str] = []
    for error in (FULL, OSError("a")):
        with profile._collect_failure(failed):
            raise error
    assert failed == [f"/a/b: {FULL.strerror}", "its trace: a"]
    with pytest.raises(KeyError), profile._collect_failure(failed):
        raise KeyError
