"""Checkpoints at a URL (files/storage.py): where a run saves them too, and where another machine
resumes from.

    s3://bucket/run/checkpoints/
      step-00000100/          complete: its seal is there
        __0_0.distcp ...      objects as in the local folder (folders.py), uploaded by the rank that
        .metadata             wrote them
        state.json
        seal                  uploaded last
      step-00000200/          no seal: being uploaded, being deleted, or left by a killed run
      step-00000300/          could not be read: `seal` is called `seal.damaged`

Objects cannot be renamed, so the seal is the marker of a complete checkpoint: uploaded after all
other objects of a save, and deleted before any of them is. A save is complete at the URL first and
gets its local name after that. So the local folder has no checkpoint that the URL never had, and a
kill between any two requests leaves the newest complete checkpoint at the URL readable.

A rank writes its file of tensors to the local disk, and uploads it from there: an upload that fails
is repeated without the tensors being kept in memory, and the checksums are those of the seal. DCP's
own writer for fsspec streams tensors into the storage: there, a failed request loses the save, the
CRC-32 of each part would have to be requested back, and a folder gets its name by copying all of
it.

A host that resumes has the small files of each checkpoint only. A file of tensors is downloaded
when a rank of the host reads it, and compared with the seal before it gets its name.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dolmen.checkpoint import folders, seal
from dolmen.checkpoint.folders import FILE, METADATA, SEAL, STATE, Damaged
from dolmen.checkpoint.reader import Checkpoint, Reader
from dolmen.files import gate, storage, write
from dolmen.files.storage import PARTIAL, RemoteFolder, StoredFile

STEP = re.compile(r"step-(\d{8,})/([^/]+)")
SET_ASIDE = f"{SEAL}.damaged"
STEP_URL = re.compile(r"(.+)/checkpoints/step-(\d{8,})/?")


class RemoteCheckpoints:
    """The checkpoints at a URL, and their copies in the local `folder`. Each method raises
    StorageError where the storage fails for too long.

    `push_run` uploads the other files of the run; it is called before the seal is.
    """

    def __init__(self, url: str, folder: Path, push_run: Callable[[], None] = lambda: None):
        self.url, self.folder, self.push_run = url, folder, push_run
        self._remote = RemoteFolder(url)
        self._files: dict[int, dict[str, StoredFile]] = {}  # of complete checkpoints, by step

    def list_complete(self) -> dict[int, dict[str, StoredFile]]:
        """List the files of each complete checkpoint at the URL: step -> name -> size and time,
        oldest first.
        """
        self._files = {step: files for step, files in self._list().items() if SEAL in files}
        return self._files

    def _list(self) -> dict[int, dict[str, StoredFile]]:
        """List the files of each checkpoint at the URL, complete or not, oldest first."""
        steps: dict[int, dict[str, StoredFile]] = defaultdict(dict)
        for name, stored in self._remote.files().items():
            if match := STEP.fullmatch(name):
                steps[int(match[1])][match[2]] = stored
        return dict(sorted(steps.items()))

    def drop_others(self, is_copy: bool) -> None:
        """Compare the local checkpoints with those at the URL, if it has any. `is_copy`: the local
        folder is a copy of the URL, so those that differ or are not there are deleted. Otherwise
        raises ValueError for one of the same step with other content.
        """
        complete = self._files or self.list_complete()
        for step, path in folders.list_checkpoints(self.folder).items() if complete else ():
            if step in complete and not self._is_same(step, path) and not is_copy:
                raise ValueError(
                    f"the checkpoint of step {step} in {self.folder} is not that in {self.url}: "
                    "they are of different runs; give another --out or --checkpoint.to"
                )
            if is_copy and not (step in complete and self._is_same(step, path)):
                folders.remove_checkpoint(path)

    def _is_same(self, step: int, path: Path) -> bool:
        """Return True if the local checkpoint has the seal of that at the URL."""
        with suppress(gate.Refused):
            return read_seal(path) == self._read(step, SEAL)
        return False

    def _read(self, step: int, name: str) -> bytes:
        """Read a small file of a complete checkpoint at the URL. Raises Damaged where it is
        missing.
        """
        if (stored := self.find(step, name)) is None:
            raise Damaged(f"{self.url}/{folders.name(step)} is damaged: it lacks {name}")
        with raise_damaged():
            return self._remote.read(f"{folders.name(step)}/{name}", stored, seal.LARGEST[name])

    def pull_step(self, step: int) -> Path:
        """Make the local folder of a complete checkpoint with its small files, compared with the
        seal, and return it, unless it is there. What differs is downloaded again; what differs
        still is left to readers, which raise Damaged.
        """
        final = self.folder / folders.name(step)
        with storage.lock_file(storage.local_copy(self.url) / final.name):
            if not folders.is_whole(final):
                self._pull_small_files(step, final)
        return final

    def _pull_small_files(self, step: int, final: Path) -> None:
        """Download the files of a checkpoint that are not tensors, and give its folder the name
        `final`.
        """
        partial = final.with_name(final.name + PARTIAL)
        if partial.exists():
            folders.remove_checkpoint(partial)
        partial.mkdir(parents=True)
        for _ in range(storage.DOWNLOADS):
            with suppress(Damaged):
                for name in (SEAL, METADATA, STATE):
                    write.replace(partial / name, self._read(step, name))
                seal.read_sealed(partial)[0].read(METADATA)
                break
        folders.commit(partial)

    def open_step(self, step: int) -> "RemoteCheckpoint":
        """Return the checkpoint of `step` at the URL, for a reader of its local folder."""
        return RemoteCheckpoint(self, step)

    def find(self, step: int, name: str) -> StoredFile | None:
        """Size and time of a file of a complete checkpoint at the URL, None where it is missing."""
        return (self._files or self.list_complete()).get(step, {}).get(name)

    def fetch(self, step: int, name: str, check: Callable[[Path], None]) -> None:
        """Download a file of a complete checkpoint into its local folder. Raises Damaged where it
        is missing at the URL, and as `check` does.
        """
        stored, path = self.find(step, name), f"{folders.name(step)}/{name}"
        if stored is None:
            raise Damaged(f"{self.url}/{folders.name(step)} is damaged: it lacks {name}")
        with raise_damaged():
            self._remote.download(path, stored, self.folder / path, check)

    def begin(self, step: int) -> None:
        """Declare that the checkpoint of `step` at the URL is not complete (any more)."""
        self._remote.delete(f"{folders.name(step)}/{SEAL}")

    def upload(self, step: int, files: Iterable[Path]) -> None:
        """Upload files of the checkpoint of `step`."""
        for file in files:
            self._remote.upload(file, f"{folders.name(step)}/{file.name}")

    def finish(self, step: int, partial: Path) -> None:
        """Upload the small files of a checkpoint whose other files are uploaded, and its seal after
        all others.
        """
        self.push_run()
        self.upload(step, [partial / METADATA, partial / STATE])
        self._remote.write(f"{folders.name(step)}/{SEAL}", read_seal(partial))

    def prune(self, keep: int, saved: int) -> None:
        """Delete old checkpoints at the URL: all but the `keep` newest (0: delete none) and the
        step just `saved`, and what killed runs left. Nothing but files that a save writes is
        deleted.
        """
        steps = self._list()
        complete = [step for step, files in steps.items() if SEAL in files]
        remaining = {saved, *(complete[-keep:] if keep else complete)}
        for step, files in steps.items():
            if step not in remaining and SET_ASIDE not in files:
                # the seal first: from then on it is not complete
                for name in sorted(files, key=lambda name: name != SEAL):
                    if FILE.fullmatch(name):
                        self._remote.delete(f"{folders.name(step)}/{name}")

    def put_aside(self, step: int) -> None:
        """Rename the seal of a damaged checkpoint at the URL, so that it is never read nor
        pruned.
        """
        self._remote.write(f"{folders.name(step)}/{SET_ASIDE}", self._read(step, SEAL))
        self.begin(step)
        self._files.pop(step, None)


@contextmanager
def raise_damaged() -> Iterator[None]:
    """Context manager: what is refused of an object of a checkpoint is raised as Damaged."""
    try:
        yield
    except gate.Refused as error:
        raise Damaged(str(error)) from error


def read_seal(folder: Path) -> bytes:
    """Read the seal of a local checkpoint, without checking it. Raises Refused."""
    return gate.read_bytes(folder / SEAL, seal.LARGEST[SEAL])


@dataclass(frozen=True)
class RemoteCheckpoint:
    """One of the checkpoints at a URL: the RemoteFiles of a Reader."""

    checkpoints: RemoteCheckpoints
    step: int

    def size(self, name: str) -> int:
        """Size of a file in bytes, -1 where it is missing."""
        stored = self.checkpoints.find(self.step, name)
        return -1 if stored is None else stored.size

    def fetch(self, name: str, check: Callable[[Path], None]) -> None:
        """Download a file into the checkpoint's local folder. Raises as `check`."""
        self.checkpoints.fetch(self.step, name, check)


def pull_model(url: str) -> Path:
    """Return the local copy of the model at a URL. Of a run that is the folder of its newest
    complete checkpoint, or of the one that the URL names, with all its files, and with the run's
    tokenizer where a run has it. Raises as `storage.pull_folder`, and Damaged.
    """
    match = STEP_URL.fullmatch(url)
    run = match[1] if match else url.rstrip("/")
    local = storage.local_copy(run)
    checkpoints = RemoteCheckpoints(f"{run}/checkpoints", local / "checkpoints")
    complete = checkpoints.list_complete()
    if not complete and match is None:
        return storage.pull_folder(url)
    step = int(match[2]) if match else max(complete)
    if step not in complete:
        raise ValueError(f"{url} is no complete checkpoint: complete are the steps {[*complete]}")
    storage.pull_files(run, lambda names: [n for n in names if n.startswith("tokenizer/")])
    checkpoints.drop_others(is_copy=True)
    folder = checkpoints.pull_step(step)
    Reader(folder, checkpoints.open_step(step)).fetch_all()
    return folder


def open_working_copy(folder: Path) -> Checkpoint:
    """Open the checkpoint in a step folder. If that is in a folder in which a run at a URL works,
    files of tensors that it lacks are downloaded when they are read. Raises Damaged.
    """
    url, match = storage.working_url(folder.parent), folders.WHOLE.fullmatch(folder.name)
    if url is None or match is None:
        return Checkpoint(folder)
    return Checkpoint(folder, RemoteCheckpoints(url, folder.parent).open_step(int(match[1])))


def pin_url(url: str, folder: Path) -> str:
    """Return the URL of the checkpoint whose local copy `folder` is, by its name, for the URL of a
    run; any other URL unchanged.
    """
    pinned = f"{url.rstrip('/')}/checkpoints/{folder.name}"
    return pinned if STEP_URL.fullmatch(pinned) and not STEP_URL.fullmatch(url) else url
