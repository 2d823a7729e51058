"""The copy of a run at a URL (--checkpoint.to, or a URL as --out): what is uploaded and when, and
how a machine that has nothing of the run resumes it.

    local folder of the run                     s3://bucket/run
    config.yaml, metrics.jsonl, tokenizer/ -->  before each checkpoint's seal, and at the end
    checkpoints/step-NNNNNNNN/             -->  by each rank as it saves (checkpoint/remote.py)
    hf/                                    -->  at the end, with checksums

    a resume  <--  what the local folder lacks, of the newest complete checkpoint's time

A run works in a local folder all the time: objects can neither be appended to, nor locked, nor
renamed. With a URL as --out that folder is `storage.working_folder`, and it is a copy of the URL
and of nothing else: a run that is resumed on another machine, and later on this one again,
continues what is at the URL.
"""

import re
from pathlib import Path

from dolmen.checkpoint import folders
from dolmen.checkpoint.remote import WRITERS, RemoteCheckpoints
from dolmen.core.log import say
from dolmen.core.messages import plural
from dolmen.files import gate, storage
from dolmen.files.storage import RemoteFolder, StorageError, StoredFile
from dolmen.training.folder import (
    FORMS,
    LIST,
    LOCK,
    OWNER,
    Unusable,
    check_folder,
    check_replaceable,
    refuse_overwriting,
)

LOCAL = ("checkpoints", "hf", "hang", "profile", "tensorboard", LOCK, OWNER)
"""Names in a run's folder that stay there, or are uploaded in a way of their own."""
MIRRORED = (LIST, *(name for name in FORMS if name not in (LIST, *LOCAL)))
"""Names that are uploaded with each checkpoint, and downloaded by a resume. The list comes first:
whatever else is at a URL without it, but for files of a first checkpoint, is not a run's.
"""


def check_out(out: Path, to: str | None, resume: bool, overwrite: bool) -> None:
    """Raise ValueError if the run's folder, or its URL `to` (None: none), already holds something
    that --resume or --overwrite does not permit to continue or delete, or cannot be used. Nothing
    of the run is written.
    """
    # first, as its message names what the user has given
    if to is not None:
        check_url(to, resume, overwrite)
    check_folder(out, resume, overwrite)


def check_url(url: str, resume: bool, overwrite: bool) -> None:
    """Raise ValueError if objects are at the URL of a run and it does not `resume` (`overwrite`
    deletes no objects), or if one of them, which no run has written, would be overwritten even
    then, or the storage cannot be used, or is a process's memory. Raises StorageError where it does
    not answer.
    """
    storage.check_lasting(url, "another --out or --checkpoint.to")
    files = RemoteFolder(url).files()
    files.pop(f"checkpoints/{WRITERS}", None)  # of a run that failed before it wrote anything else
    if files and overwrite:
        raise Unusable(
            f"--overwrite deletes no objects: delete {url} yourself, or give another --out or "
            "--checkpoint.to"
        )
    if files and not resume:
        holds = "contains a run" if LIST in files else f"contains {plural(len(files), 'object')}"
        raise Unusable(
            f"{url} already {holds}: use --resume to continue it, or another --out or "
            "--checkpoint.to"
        )
    written = ("hf", *MIRRORED)
    taken = [name for name in files if name.partition("/")[0] in written]
    if LIST not in files:
        refuse_overwriting(url, taken)


def run_name(out: Path, to: str | None) -> str:
    """Return how messages and commands name a run: by its URL `to` if `out` is only the local
    working folder of that URL, else by the path of its folder `out`. `to` None: it has no URL.
    """
    return to if to is not None and out == storage.working_folder(to) else str(out)


def open_checkpoints(url: str, out: Path, writer: str = "") -> RemoteCheckpoints:
    """Return the checkpoints at the URL of the run in the folder `out`, with a function that
    uploads the run's other files before each seal. No request is made. `writer`: the line with
    which another process of this run has claimed the URL.
    """
    uploader = RunUploader(out, url)
    return RemoteCheckpoints(f"{url}/checkpoints", out / "checkpoints", uploader, writer)


def pull_run(url: str, out: Path) -> None:
    """Bring the run's local folder `out` up to its URL for a resume: download the small files of
    every complete checkpoint there and, if the URL has a later checkpoint than the folder, the
    run's other files. Tensors are downloaded when they are read. Ranks of a host wait for each
    other. Raises ValueError where local checkpoints are of another run, and StorageError.
    """
    checkpoints = open_checkpoints(url, out)
    # ranks of a host wait: the first one downloads
    with storage.lock_file(storage.local_copy(url) / "run"):
        complete, is_copy = checkpoints.list_complete(), out == storage.working_folder(url)
        checkpoints.drop_others(is_copy)
        newest = max(folders.list_checkpoints(out / "checkpoints"), default=-1)
        if newest >= 0 and is_copy and not complete:
            say(f"WARNING: {url} has no checkpoint: resuming from step {newest} of its copy {out}")
        if max(complete, default=-1) > newest:
            _pull_files(url, out)
        for step in complete:
            checkpoints.pull_step(step)


def _pull_files(url: str, out: Path) -> None:
    """Download the files at a run's URL besides checkpoints and exports into the folder `out`,
    replacing local ones. Raises Unusable, with nothing written, if dolmen did not write one of the
    local files that would be replaced.
    """
    remote, files = RemoteFolder(url), dict[str, StoredFile]()
    for name, stored in remote.files().items():
        first = name.partition("/")[0]
        is_known = first in FORMS and re.fullmatch(FORMS[first].files, name) is not None
        # a tokenizer may have files of any name
        if first in MIRRORED and (is_known or re.fullmatch(r"tokenizer/[^/]+", name)):
            files[name] = stored
    check_replaceable(out, files)
    for name, stored in files.items():
        storage.create_parents(out, name)
        remote.download(name, stored, out / name)


class RunUploader:
    """Uploads the files of a run besides checkpoints and exports, those that have changed since it
    last did.
    """

    def __init__(self, out: Path, url: str):
        """Prepare to upload files of the run's folder `out` to its URL; none counts as uploaded."""
        self.out, self.url = out, url
        self._uploaded: dict[str, tuple[int, int]] = {}  # name -> size and time

    def __call__(self) -> None:
        """Upload the run's files (not checkpoints and exports) that have changed since the last
        call, by size and time; delete objects whose files are gone since then. Raises StorageError.
        """
        remote, present = RemoteFolder(self.url), {}
        for first in MIRRORED:
            path = self.out / first
            for file in [path] if path.is_file() else sorted(path.rglob("*")):
                if file.is_file() and file.suffix != ".part":
                    status = file.stat()
                    name = str(file.relative_to(self.out))
                    present[name] = status.st_size, status.st_mtime_ns
        changed = [name for name, state in present.items() if self._uploaded.get(name) != state]
        for name in changed:
            try:
                if name.endswith(".jsonl"):  # rows are appended meanwhile
                    remote.write(name, gate.read_bytes(self.out / name, 2**40))
                else:
                    remote.upload(self.out / name, name)
            except (StorageError, gate.Refused):
                # training goes on during the upload, and deletes old rollouts
                if (self.out / name).exists():
                    raise
                del present[name]
        for name in self._uploaded.keys() - present:
            remote.delete(name)
        self._uploaded = present


def push_result(url: str, out: Path, exported: Path | None, writer: str) -> None:
    """Upload what a run has written by its end to its URL: its files besides checkpoints, and the
    folder of its `exported` model if it has one. `writer`: the line with which the run has claimed
    the URL. Raises StorageError, and Superseded, before it writes, if another run has claimed it.
    """
    checkpoints = open_checkpoints(url, out, writer)
    checkpoints.check_claim()
    checkpoints.push_run()
    if exported is not None:
        checkpoints.check_claim()
        storage.push_folder(exported, f"{url}/{exported.name}")
