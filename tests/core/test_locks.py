"""Locks on files."""

import fcntl
import os

import pytest

from dolmen.core import filesystem


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(5, "I/O error")])
def test_a_wait_that_is_interrupted_leaves_no_open_file(tmp_path, monkeypatch, error):
    def interrupted(*_):
        raise error

    monkeypatch.setattr(fcntl, "flock", interrupted)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((KeyboardInterrupt, OSError)):
        filesystem.open_locked(tmp_path / "lock")
    assert len(os.listdir("/proc/self/fd")) == before
