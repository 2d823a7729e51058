"""The folder of wheels is a user's: what dolmen did not put there stays."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import packages

OLD, NEW, OWN = (
    f"{name}-py3-none-any.whl" for name in ("pydantic-1.0", "pydantic-1.1", "mine-1.0")
)


@pytest.fixture
def folder(tmp_path):
    for name in (OLD, OWN):
        (tmp_path / name).touch()
    return tmp_path


def downloads(monkeypatch, code: int) -> None:
    def run(words, **_):
        (Path(words[words.index("-d") + 1]) / NEW).touch()
        return SimpleNamespace(returncode=code, stderr="WARNING: slow\nERROR: no pydantic for it\n")

    monkeypatch.setattr(packages.subprocess, "run", run)


def test_wheels_replace_those_of_the_same_packages_alone(folder, monkeypatch):
    downloads(monkeypatch, 0)
    packages.fill(folder, "3.12", "x86_64")
    assert sorted(path.name for path in folder.iterdir()) == sorted((NEW, OWN))


def test_a_failed_download_leaves_the_folder_as_it_was(folder, monkeypatch):
    downloads(monkeypatch, 1)
    with pytest.raises(
        ValueError, match="Python 3.99 on arm.* as it was: ERROR: no pydantic for it"
    ):
        packages.fill(folder, "3.99", "arm")
    assert sorted(path.name for path in folder.iterdir()) == sorted((OLD, OWN))
