"""What is listed has an order of its own, whatever the order in which a file system or a storage
lists: hashes, names in messages and uploads are the same on every machine.
"""

import glob
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dolmen.checkpoint import folders
from dolmen.checkpoint.reader import locate
from dolmen.checkpoint.remote import RemoteCheckpoints
from dolmen.conversion import hf, sat
from dolmen.conversion.megatron import folders as megatron
from dolmen.core import consensus
from dolmen.data.sources import resolve_sources, standard_library_files
from dolmen.files import safetensors, storage
from dolmen.planning import hardware, winner
from dolmen.training import folder as run_folder
from dolmen.training import mirror

NAMES = [f"{letter}{number}" for letter in "ba" for number in (10, 9, 2)]


def written(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


class Storage:
    """A folder at a URL that notes what is written, and lists in the order of `listed`."""

    def __init__(self, listed: Sequence[str] = ()):
        self.written: list[str] = []
        self.listed = listed

    def write(self, name: str, content: Any) -> None:
        self.written.append(name)

    def upload(self, file: Path, name: str) -> None:
        self.written.append(name)

    def files(self) -> dict[str, str]:
        return dict.fromkeys(self.listed, "")


def message(work: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        work()
    return str(caught.value)


def checkpoints(folder: Path, monkeypatch) -> Any:
    monkeypatch.setattr(folders, "is_whole", lambda path: True)
    for name in ("step-00000010", "step-00000009", "step-00000009.replaced"):
        (folder / name).mkdir(exist_ok=True)
    return [*folders.list_checkpoints(folder).items()]


def uploads(folder: Path, monkeypatch) -> Any:
    target = Storage()
    monkeypatch.setattr(mirror, "RemoteFolder", lambda url: target)
    mirror.RunUploader(written(folder, [f"rollouts/{name}" for name in NAMES]), "s3://a")()
    return target.written


def pushed(folder: Path, monkeypatch) -> Any:
    target = Storage()
    monkeypatch.setattr(storage, "RemoteFolder", lambda url: target)
    storage.push_folder(written(folder, NAMES), "s3://a")
    return target.written


def claimed(folder: Path, _) -> Any:
    run_folder.claim_files(written(folder, [f"part/{name}" for name in NAMES]), "part")
    return (folder / run_folder.LIST).read_text()


def program(_, __) -> Any:
    winner.program_hash.cache_clear()
    return winner.program_hash()


def library(folder: Path, monkeypatch) -> Any:
    written(folder, [f"{name}.py" for name in NAMES])
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(folder))
    return standard_library_files()


LISTINGS: dict[str, Callable[[Path, Any], Any]] = {
    "checkpoints": checkpoints,
    "files of a run that are uploaded": uploads,
    "files of a folder that are uploaded": pushed,
    "files that dolmen wrote": claimed,
    "the program": program,
    "clusters": lambda *_: hardware.known_names(hardware.CLUSTERS),
    "the standard library": library,
    "source files": lambda folder, _: [
        *consensus.hash_sources(written(folder, ["b.py", "a.py", "c/d.py"])).items()
    ],
    "files of a tokenizer": lambda folder, _: hf.tokenizer_files(
        written(folder, ["vocab.txt", "tokenizer.json", "merges.txt"])
    ),
    "files of text": lambda folder, _: [
        resolve_sources((f"{written(folder, [f'{name}.txt' for name in NAMES])}{pattern}",))[
            0
        ].files
        for pattern in ("", "/*.txt")
    ],
    "ranks of SAT": lambda folder, _: [
        *sat.ranks(written(folder, [f"mp_rank_0{i}_model_states.pt" for i in (2, 0, 1)])).items()
    ],
    "ranks of Megatron": lambda folder, _: megatron.ranks(
        written(folder, [f"mp_rank_0{i}/weights" for i in (2, 0, 1)])
    ),
    "what a folder without weights has": lambda folder, _: message(
        lambda: megatron.weights_file(written(folder, NAMES))
    ),
    "pickles without a model": lambda folder, _: safetensors._explain_no_model(
        written(folder, [f"{name}.pt" for name in NAMES])
    ),
    "a folder without checkpoints": lambda folder, _: message(
        lambda: locate(written(folder, [f"checkpoints/{name}" for name in NAMES]))
    ),
}


@pytest.mark.parametrize("name", LISTINGS)
def test_an_order_does_not_follow_the_file_system(name, tmp_path, monkeypatch):
    found = []
    for descending in (False, True):
        with monkeypatch.context() as patch:
            for method in ("glob", "rglob", "iterdir"):
                real = getattr(Path, method)
                patch.setattr(
                    Path,
                    method,
                    lambda *a, real=real, **b: iter(sorted(real(*a, **b), reverse=descending)),
                )
            found_names = glob.glob
            patch.setattr(
                glob, "glob", lambda *a, **b: sorted(found_names(*a, **b), reverse=descending)
            )
            found.append(LISTINGS[name](tmp_path, patch))
            (tmp_path / run_folder.LIST).unlink(missing_ok=True)
    assert found[0] == found[1] and found[0]


def test_checkpoints_at_a_url_are_listed_by_step():
    listed = [f"step-000000{step:02}/{name}" for step in (10, 9, 2) for name in ("b", "seal")]
    remote = RemoteCheckpoints("memory://a", Path("/nowhere"))
    remote._remote = Storage(listed)  # pyright: ignore[reportAttributeAccessIssue]
    assert [*remote.list_complete()] == [2, 9, 10]
