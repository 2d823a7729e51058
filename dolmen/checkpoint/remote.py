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
      writers                 the runs that have written here, the newest last

Objects cannot be renamed, so the seal is the marker of a complete checkpoint: uploaded after all
other objects of a save, and deleted before any of them is. A save is complete at the URL first and
gets its local name after that. So the local folder has no checkpoint that the URL never had, and a
kill between any two requests leaves the newest complete checkpoint at the URL readable.

Storage has no locks. A run adds a line to `writers` as it starts (`claim`), and looks before it
writes or deletes a seal whether that is the last line still: of two machines that train at one URL
the one that started first stops at its next save.

A rank writes its file of tensors to the local disk, and uploads it from there: an upload that fails
is repeated without the tensors being kept in memory, and the checksums are those of the seal. DCP's
own writer for fsspec streams tensors into the storage: there, a failed request loses the save, the
CRC-32 of each part would have to be requested back, and a folder gets its name by copying all of
it.

A host that resumes has the small files of each checkpoint only. A file of tensors is downloaded
when a rank of the host reads it, and compared with the seal before it gets its name.
"""

import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dolmen.checkpoint import folders, seal
from dolmen.checkpoint.folders import FILE, METADATA, SEAL, STATE, Damaged
from dolmen.checkpoint.reader import Checkpoint, Reader
from dolmen.core.messages import escape
from dolmen.files import gate, storage, write
from dolmen.files.storage import PARTIAL, RemoteFolder, StoredFile

STEP = re.compile(r"step-([0-9]{8,})/([^/]+)")
SET_ASIDE = f"{SEAL}.damaged"
WRITERS = "writers"
MOST_WRITERS = 100  # lines of that file that are kept
LONGEST_JOB = 200  # characters
STEP_URL = re.compile(r"(.+)/checkpoints/step-([0-9]{8,})/?")


class Superseded(ValueError):
    """Another run has started to write to the URL."""


class RemoteCheckpoints:
    """The checkpoints at a URL, and their copies in the local `folder`. Each method raises
    StorageError where the storage fails for too long.

    `push_run` uploads the other files of the run; it is called before the seal is. `writer`: the
    line of this run in `writers`, "" before its claim.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        push_run: Callable[[], None] = lambda: None,
        writer: str = "",
    ):
        """Prepare access, without any request. `url`: of the folder of checkpoints; `folder`: local
        folder with copies of them; `push_run`: uploads the other files of the run, before a seal;
        `writer`: the line with which another process of this run has claimed the URL.
        """
        self.url, self.folder, self.push_run, self.writer = url, folder, push_run, writer
        self._remote = RemoteFolder(url)
        self._files: dict[int, dict[str, StoredFile]] = {}  # of complete checkpoints, by step

    def list_complete(self) -> dict[int, dict[str, StoredFile]]:
        """Return the files of each complete checkpoint (with a seal) at the URL, step -> file name
        -> its size and time, lowest step first. Requests the list anew and remembers it.
        """
        self._files = {step: files for step, files in self._list().items() if SEAL in files}
        return self._files

    def _list(self) -> dict[int, dict[str, StoredFile]]:
        """Request the files of each checkpoint at the URL, complete or not: step -> file name ->
        size and time, lowest step first.
        """
        steps: dict[int, dict[str, StoredFile]] = defaultdict(dict)
        for name, stored in self._remote.files().items():
            if match := STEP.fullmatch(name):
                steps[int(match[1])][match[2]] = stored
        return dict(sorted(steps.items()))

    def drop_others(self, is_copy: bool) -> None:
        """Compare the local checkpoints with those at the URL, by their seals; nothing happens if
        the URL has none. With `is_copy`, the local folder is a mere copy: a local checkpoint that
        differs from that of the URL, or is not there, is deleted. Otherwise raises ValueError for a
        local one whose step is at the URL with other content.
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
        """Return whether the local checkpoint `path` has the same seal as that of `step` at the
        URL; False where a seal cannot be read.
        """
        with suppress(gate.Refused):
            return read_seal(path) == self._read(step, SEAL)
        return False

    def _read(self, step: int, name: str) -> bytes:
        """Return the content of the small file `name` of the complete checkpoint of `step` at the
        URL. Raises Damaged where it is missing or too large.
        """
        path = f"{folders.name(step)}/{name}"
        with raise_damaged():
            return self._remote.read(path, self._require(step, name), seal.LARGEST[name])

    def _require(self, step: int, name: str) -> StoredFile:
        """Return the object at the URL that is the file `name` of the checkpoint of `step`. Raises
        Damaged where it is missing.
        """
        if (stored := self.find(step, name)) is None:
            raise Damaged(f"{self.url}/{folders.name(step)} is damaged: it lacks {name}")
        return stored

    def pull_step(self, step: int) -> Path:
        """Return the local folder of the complete checkpoint of `step` at the URL. If it does not
        exist, make it and download the seal, .metadata and state.json, again if they do not match
        the seal; if they never do, the reader of the folder raises Damaged. Files of tensors are
        not downloaded. Processes of this host wait for each other.
        """
        final = self.folder / folders.name(step)
        with storage.lock_file(storage.local_copy(self.url) / final.name):
            if not folders.is_whole(final):
                self._pull_small_files(step, final)
        return final

    def _pull_small_files(self, step: int, final: Path) -> None:
        """Download the seal, .metadata and state.json of the checkpoint of `step` into a partial
        folder, repeatedly while they do not match the seal, and rename it to `final`.
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
        """Return the files of the checkpoint of `step` at the URL as an object that a Reader of its
        local folder uses to download those that the folder lacks. No request is made.
        """
        return RemoteCheckpoint(self, step)

    def find(self, step: int, name: str) -> StoredFile | None:
        """Return size and time of the file `name` of the complete checkpoint of `step` at the URL,
        by the list requested last; None where the file or the checkpoint is missing.
        """
        return (self._files or self.list_complete()).get(step, {}).get(name)

    def fetch(self, step: int, name: str, check: Callable[[Path], None]) -> None:
        """Download the file `name` of the complete checkpoint of `step` into its local folder, and
        call `check` with the downloaded file before it gets its name; where `check` raises an
        error, the download is repeated. Raises Damaged where the file is missing at the URL, and
        the error of `check`.
        """
        stored, path = self._require(step, name), f"{folders.name(step)}/{name}"
        with raise_damaged():
            self._remote.download(path, stored, self.folder / path, check)

    def claim(self, job: str, restarted: bool) -> None:
        """Become the run that writes to the URL. `job`: id that restarts of this run share. Raises
        Superseded for a run that was `restarted` and whose place another has taken since.
        """
        job = " ".join(job.split())[:LONGEST_JOB]
        lines = self._read_writers()
        jobs = [line.partition(" ")[2] for line in lines]
        if restarted and job in jobs and jobs[-1] != job:
            raise self._explain_claim(jobs[-1])
        self.writer = f"{uuid.uuid4().hex} {job}"
        lines = [*lines[1 - MOST_WRITERS :], self.writer]
        self._remote.write(WRITERS, "\n".join(lines).encode())

    def _read_writers(self) -> list[str]:
        """Read the lines of the file of writers; none without one. Raises Refused for one of over
        1 MiB.
        """

        def read() -> list[str]:
            """Read them in two requests. Raises Refused where it becomes shorter in between."""
            if (stored := self._remote.find(WRITERS)) is None:
                return []
            return self._remote.read(WRITERS, stored, 2**20).decode(errors="replace").splitlines()

        # another run that claims the URL may drop a long line as it adds its own
        with suppress(gate.Refused):
            return read()
        return read()

    def check_claim(self) -> None:
        """Raise Superseded if another run has claimed the URL since this one did."""
        if not self.writer:
            return
        last = (self._read_writers() or [""])[-1]
        if last != self.writer:
            raise self._explain_claim(last.partition(" ")[2])

    def _explain_claim(self, job: str) -> Superseded:
        """Return the error that names the other run."""
        by = f" ({escape(job[:LONGEST_JOB])})" if job else ""
        return Superseded(
            f"another run{by} has started to write to {self.url} since this one did: stop one of "
            "the two; with --resume and another --checkpoint.to, this one continues from its "
            "local checkpoints"
        )

    def begin(self, step: int) -> None:
        """Delete the seal of the checkpoint of `step` at the URL, if it has one, so that it is not
        complete while it is uploaded. Raises Superseded.
        """
        self.check_claim()
        self._delete_seal(step)

    def _delete_seal(self, step: int) -> None:
        """Delete the seal of the checkpoint of `step` at the URL, if it has one."""
        self._remote.delete(f"{folders.name(step)}/{SEAL}")

    def upload(self, step: int, files: Iterable[Path]) -> None:
        """Upload local files into the folder of the checkpoint of `step` at the URL, under their
        own names.
        """
        for file in files:
            self._remote.upload(file, f"{folders.name(step)}/{file.name}")

    def finish(self, step: int, partial: Path) -> None:
        """Complete the checkpoint of `step` at the URL, whose files of tensors are uploaded: upload
        the run's other files (`push_run`), .metadata and state.json from the local folder
        `partial`, and last its seal. Raises Superseded.
        """
        self.check_claim()
        self.push_run()
        self.upload(step, [partial / METADATA, partial / STATE])
        self.check_claim()
        self._remote.write(f"{folders.name(step)}/{SEAL}", read_seal(partial))

    def prune(self, keep: int, saved: int) -> None:
        """Delete old checkpoints at the URL: all complete ones but the `keep` of the highest steps
        (0: delete none) and that of the step just `saved`, all incomplete ones, which killed runs
        left, and those set aside as damaged that are older than all that are kept. Only files that
        a save writes are deleted.
        """
        steps = self._list()
        complete = [step for step, files in steps.items() if SEAL in files]
        remaining = {saved, *(complete[-keep:] if keep else complete)}
        oldest = min(remaining) if keep else 0
        for step, files in steps.items():
            if step not in remaining and (SET_ASIDE not in files or step < oldest):
                # the seal first: from then on it is not complete
                for name in sorted(files, key=lambda name: name != SEAL):
                    if FILE.fullmatch(name) or name == SET_ASIDE:
                        self._remote.delete(f"{folders.name(step)}/{name}")

    def put_aside(self, step: int) -> None:
        """Rename the seal of the damaged checkpoint of `step` at the URL to seal.damaged, so that
        it is never read again, and pruned only when `keep` newer ones are complete. Raises
        Superseded.
        """
        self.check_claim()
        self._remote.write(f"{folders.name(step)}/{SET_ASIDE}", self._read(step, SEAL))
        self._delete_seal(step)
        self._files.pop(step, None)


@contextmanager
def raise_damaged() -> Iterator[None]:
    """Context manager: raise Refused, an error of reading an object of a checkpoint, as Damaged."""
    try:
        yield
    except gate.Refused as error:
        raise Damaged(str(error)) from error


def read_seal(folder: Path) -> bytes:
    """Return the bytes of the seal of a local checkpoint, unchecked. Raises Refused where it is
    missing or too large.
    """
    return gate.read_bytes(folder / SEAL, seal.LARGEST[SEAL])


@dataclass(frozen=True)
class RemoteCheckpoint:
    """One of the checkpoints at a URL: the RemoteFiles of a Reader."""

    checkpoints: RemoteCheckpoints
    step: int

    def size(self, name: str) -> int:
        """Return the size in bytes of the file `name` of this checkpoint at the URL; -1 where it is
        missing.
        """
        stored = self.checkpoints.find(self.step, name)
        return -1 if stored is None else stored.size

    def fetch(self, name: str, check: Callable[[Path], None]) -> None:
        """Download the file `name` into the checkpoint's local folder once `check` accepts it
        (`RemoteCheckpoints.fetch`). Raises Damaged where it is missing, and the error of `check`.
        """
        self.checkpoints.fetch(self.step, name, check)


def pull_model(url: str) -> Path:
    """Download the model at a URL and return its local folder. For a run's URL that is its newest
    complete checkpoint, for a checkpoint's URL this one, with all its files; the run's tokenizer is
    downloaded beside them. For any other URL the whole folder is downloaded. Raises ValueError for
    a checkpoint that is not complete, Damaged, and what `storage.pull_folder` raises.
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
    """Return the opened checkpoint in a local step folder. If the folder is in the local working
    folder of a run at a URL, files of tensors that it lacks are downloaded when they are read.
    Raises Damaged.
    """
    url, match = storage.working_url(folder.parent), folders.WHOLE.fullmatch(folder.name)
    if url is None or match is None:
        return Checkpoint(folder)
    return Checkpoint(folder, RemoteCheckpoints(url, folder.parent).open_step(int(match[1])))


def pin_url(url: str, folder: Path) -> str:
    """Return URL/checkpoints/NAME for the URL of a run, where NAME is the name of the step folder
    `folder`: the URL of one checkpoint in place of the newest. Return `url` unchanged if it already
    names a checkpoint or `folder` is no step folder.
    """
    pinned = f"{url.rstrip('/')}/checkpoints/{folder.name}"
    return pinned if STEP_URL.fullmatch(pinned) and not STEP_URL.fullmatch(url) else url
