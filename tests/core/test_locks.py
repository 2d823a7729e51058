"""Locks on files."""

import errno
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


def test_a_lock_is_of_the_file_that_the_path_names(tmp_path):
    """Held by one descriptor at a time; a file that is deleted or replaced is another."""
    path = tmp_path / "lock"
    held = filesystem.open_locked(path)
    assert held is not None and filesystem.names_file(held, path)
    assert filesystem.open_locked(path, wait=False) is None
    with open(path) as file:
        assert filesystem.names_file(file, path) and not filesystem.lock(file, wait=False)
    path.unlink()
    assert not filesystem.names_file(held, path)
    new = filesystem.open_locked(path, wait=False)
    assert new is not None and not filesystem.names_file(held, path)
    for descriptor in (held, new):
        os.close(descriptor)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        filesystem.open_locked(tmp_path / "link")
    with filesystem.hold_lock(path):
        assert filesystem.open_locked(path, wait=False) is None
    assert not path.exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_is_told_unless_a_lock_is_optional(
    tmp_path, monkeypatch, number
):
    def without(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", without)
    with pytest.raises(OSError, match=os.strerror(number)):
        filesystem.open_locked(tmp_path / "lock")
    if number == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(number)):
            filesystem.open_locked(tmp_path / "lock", optional=True)
    else:
        held = filesystem.open_locked(tmp_path / "lock", optional=True)
        assert held is not None
        os.close(held)
