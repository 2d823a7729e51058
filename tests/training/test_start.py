"""What all ranks agree on before they train."""

import errno
import pickle
import shutil
from types import SimpleNamespace

import pytest
import tinyrun
import torch
import torch.distributed as dist
from rich.console import Console
from spawning import run_spawned

from dolmen.checkpoint.remote import Superseded
from dolmen.core.mesh import build_mesh
from dolmen.files.storage import StorageError
from dolmen.training.folder import Unusable
from dolmen.training.run import run_training
from dolmen.training.start import on_first_rank

material, one_thread = tinyrun.material, tinyrun.one_thread


def _other_text(material, folder) -> list[str]:
    """What a run says whose second rank finds other text under its --data.path, for each rank."""
    path = [material.docs, folder / "docs"][dist.get_rank()]
    run = material.config(
        layout={"dp": 2}, data={**material.options()["data"], "path": [str(path)]}
    )
    mesh = build_mesh(2, 1, torch.device("cpu"))
    try:
        run_training(run, folder / "run", mesh, Console(quiet=True))
        said = "trained"
    except Unusable as error:
        said = str(error)
    reported: list = [None, None]
    dist.all_gather_object(reported, said)
    return reported


def test_ranks_that_find_other_text_are_told(material, tmp_path):
    """The same options, and one document less where the second rank is."""
    shutil.copytree(material.docs, tmp_path / "docs")
    (tmp_path / "docs" / "07.txt").unlink()
    first, second = run_spawned(2, _other_text, material, tmp_path)
    assert first == second and "the ranks do not have the same training data; compared" in first
    assert "rank 1 on " in first and "data 1 29 documents, " in first
    assert ", here 30 documents, " in first and "same files under --data.path" in first
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "error, kind",
    [
        (Superseded("x"), Superseded),
        (StorageError("x"), StorageError),
        (OSError(errno.ENOSPC, "full"), OSError),
        (Unusable("x"), Unusable),
        (ValueError("x"), Unusable),
    ],
    ids=repr,
)
def test_an_error_of_the_first_rank_is_raised_alike_on_all(error, kind, monkeypatch):
    """What rank 0 broadcasts is what rank 1 gets, in place of a second process."""
    sent = []

    def broadcast(outcome):
        sent.append(pickle.loads(pickle.dumps(outcome)))
        outcome[:] = sent[0]

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)

    def fail():
        raise error

    for rank in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        with pytest.raises(kind) as caught:
            on_first_rank(SimpleNamespace(size=2), fail)
        assert type(caught.value) is kind and str(caught.value) == str(error)
        assert getattr(caught.value, "errno", None) == getattr(error, "errno", None)
