"""The folder of a run: what is written there, its lock (one run at a time), and what --overwrite
may delete.

    runs/NAME/.dolmen     the names, one per line, under which runs have written here:
                          `checkpoints`, `config.yaml`, `tokenizer`, ... and the
                          files of formats that need them

A file is deleted where its whole path has a form that dolmen writes and its first name is in this
list. A list can only take away from those forms, so a forged one names nothing outside them; what
is found by walking is compared with it, so it names nothing outside the folder either; and dolmen
writes no links, so a link is somebody else's. A run of before has no list, nor has a copy made by
`cp -r run/* copy`: there the forms alone decide, if its config.yaml is that of a run, but not of a
model or a tokenizer, which have these names whoever wrote them.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from dolmen.checkpoint import folders
from dolmen.core import filesystem
from dolmen.files import gate, kinds, write
from dolmen.training.config import RunConfig


def lock_folder(out: Path, patience: float = 0) -> int | None:
    """Lock the run's folder until `unlock_folder` or the end of the process; return the descriptor
    of the lock file, or None where the file system has no locks. Raises Unusable if another run
    still holds the lock after `patience` seconds (the process that a restart replaces may be
    dying), or if the lock file cannot be opened.

    The lock is on a file, not on the folder: over NFS a lock on a folder is local to the host.
    """
    end = time.monotonic() + patience
    try:
        out.mkdir(parents=True, exist_ok=True)
        # polled and not waited for, so that `patience` bounds it
        while (descriptor := filesystem.open_locked(out / LOCK, wait=False)) is None:
            if time.monotonic() > end:
                raise Unusable(
                    f"{out} is in use by another run: wait for it, or give another --out"
                )
            time.sleep(0.1)
    except OSError as error:
        if error.errno in filesystem.NO_LOCKS:
            return None
        raise Unusable(
            f"{out / LOCK} cannot be locked ({error.strerror}): fix this, or give another --out"
        ) from None
    return descriptor


def unlock_folder(out: Path, descriptor: int | None) -> None:
    """Release the lock of a run's folder, whose descriptor `lock_folder` returned, and delete the
    lock file; nothing for None.
    """
    if descriptor is not None:
        if os.fstat(descriptor).st_size == 0:  # one of ours
            (out / LOCK).unlink(missing_ok=True)
        os.close(descriptor)


LIST = ".dolmen"
LOCK = ".dolmen-lock"  # held while a run is: `lock_folder`
OWNER = ".overwritten-by"  # the jobs that have emptied the folder, or whose restarts it must know
TOKENIZER = (
    r"(tokenizer(_config)?|special_tokens_map|added_tokens|vocab|chat_template)\.json|merges\.txt"
    r"|vocab\.txt|tokenizer\.model|chat_template\.jinja"
)
MODEL = r"(generation_)?config\.json|model(-[0-9]+-of-[0-9]+)?\.safetensors(\.index\.json)?"
CHECKPOINT = folders.FOLDER.pattern
EXPORTING = r"\.hf\.[a-z0-9_]{8}"


@dataclass(frozen=True)
class FileForm:
    """The paths that dolmen writes under one name, as regular expressions."""

    files: str
    """Paths of files."""
    folders: str = r"(?!)"  # none
    """Paths of folders."""
    list_kind: str = "name"
    """Its entries in the folder's list: its `name`; also its `files`, as a tokenizer may have any;
    or `not`, for what is written before the list, and the list.
    """


FORMS = {
    "config.yaml": FileForm(r"config\.yaml(\.part)?"),
    "metrics.jsonl": FileForm(r"metrics\.(jsonl(\.part)?|part|damaged(-[0-9]+)?\.jsonl)"),
    "receipts.jsonl": FileForm(r"receipts\.jsonl(\.part)?"),
    "history.jsonl": FileForm(r"history\.jsonl(\.part)?"),
    "samples.jsonl": FileForm(r"samples\.jsonl(\.part)?"),
    "loss.png": FileForm(r"loss\.png(\.part)?"),
    "goodput.json": FileForm(r"goodput\.(json(\.part)?|part)"),
    "summary.json": FileForm(r"summary\.(json(\.part)?|part)"),
    "tensorboard": FileForm(r"tensorboard/events\.out\.tfevents\.[^/]+", "tensorboard"),
    "checkpoints": FileForm(
        rf"checkpoints/({CHECKPOINT})/({folders.FILE.pattern})", rf"checkpoints(/({CHECKPOINT}))?"
    ),
    "reference": FileForm(r"reference/[0-9a-f]{32}\.bin(\.part)?", "reference"),
    "calibration.png": FileForm(r"calibration\.png(\.part)?"),
    "tokenizer": FileForm(rf"tokenizer/({TOKENIZER})(\.part)?", "tokenizer", "files"),
    "hf": FileForm(
        rf"(hf|{EXPORTING}/model)/({TOKENIZER}|{MODEL})", rf"hf|{EXPORTING}(/model)?", "files"
    ),
    "profile": FileForm(
        r"profile/step-[0-9]+/(trace-rank-[0-9]+\.json\.gz|table\.(txt|json)|picture-rank-[0-9]+\.png)"
        r"(\.part)?",
        r"profile(/step-[0-9]+)?",
    ),
    "rollouts": FileForm(
        r"rollouts/([0-9]{8}\.(safetensors|jsonl)(\.part)?|completions\.jsonl)", "rollouts"
    ),
    "hang": FileForm(r"hang/rank-[0-9]+\.((json|txt)(\.part)?|part)", "hang", "not"),
    LIST: FileForm(r"\.dolmen(\.part)?", list_kind="not"),
    LOCK: FileForm(r"\.dolmen-lock", list_kind="not"),
    OWNER: FileForm(r"\.overwritten-by(\.part)?", list_kind="not"),
}
"""The forms of paths, by their first part."""
OPTIONAL = ("hf", "profile", "reference", "calibration.png", "samples.jsonl", "receipts.jsonl")
"""Names that a run writes only with some options."""
WRITTEN = tuple(n for n, form in FORMS.items() if form.list_kind != "not" and n not in OPTIONAL)
"""Names that every run writes."""


class Unusable(ValueError):
    """The run's folder, or its device, cannot be used as requested; the message gives the
    reason.
    """


def claim(out: Path, *names: str) -> None:
    """Add names of files or folders to the list in the run's folder (.dolmen) of what dolmen writes
    there, which --overwrite may delete; call it before writing them. Names that are listed already
    are not added again.
    """
    known = _read_list(out) or set()
    if new := [name for name in names if name not in known]:
        write.replace(out / LIST, "".join(f"{name}\n" for name in [*sorted(known), *new]))


def claim_files(out: Path, name: str) -> None:
    """Add the path of each file in the folder `out/name`, which dolmen has just written, to the
    list in the run's folder of what dolmen wrote.
    """
    claim(out, *(f"{name}/{path.name}" for path in sorted((out / name).iterdir())))


def split_by_owner(out: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the entries of a run's folder that dolmen wrote, and those that it did not: two sorted
    lists of (relative path, "folder", "file" or "link"). dolmen wrote what has a form of path that
    it writes and is in the folder's list. The folder is walked once, so that what is deleted is
    what was checked.
    """
    listed = _read_list(out)
    by_form = listed is None and is_run(out / "config.yaml")

    def is_ours(path: str, what: str) -> bool:
        """Return whether dolmen wrote an entry: it has a known form and its name is in the list;
        without a list, in a run's folder, the form alone decides.
        """
        kind = _kind(path, what)
        # a tokenizer may have files of any name: those are in the list one by one
        first, _, name = path.partition("/")
        known = FORMS.get(first)
        if listed and what == "file" and known and known.list_kind == "files" and "/" not in name:
            kind = first if path in listed else kind
        if kind is None:
            return False
        # no list: a copy without hidden files
        if listed is None:
            return FORMS[kind].list_kind == "not" or (by_form and FORMS[kind].list_kind != "files")
        return FORMS[kind].list_kind == "not" or kind in listed

    ours: list[tuple[str, str]] = []
    foreign: list[tuple[str, str]] = []
    for entry in sorted(_walk(out)):
        (ours if is_ours(*entry) else foreign).append(entry)
    return ours, foreign


def foreign_entries(out: Path) -> list[tuple[str, str]]:
    """Return the entries of the folder that dolmen did not write, as (relative path, kind of
    entry).
    """
    return split_by_owner(out)[1]


def require_own_files(out: Path) -> list[tuple[str, str]]:
    """Return all entries of the folder, as (relative path, kind of entry). Raises Unusable where
    dolmen did not write every one of them.
    """
    ours, foreign = split_by_owner(out)
    if paths := [path for path, _ in foreign]:
        listed = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
        listed += (
            f" (not listed as written by dolmen: there is no {LIST})"
            if _read_list(out) is None
            else ""
        )
        raise Unusable(
            f"--overwrite deletes only files written by dolmen, but {out} also contains {listed}: "
            "move or delete it, or give another --out"
        )
    return ours


def check_names_free(out: Path, *optional: str) -> None:
    """Raise Unusable if an entry of the run's folder that dolmen did not write has a name that the
    run will write: one that every run writes, or one of `optional`. The tokenizer of a run without
    a list of files is exempt, as the same one is written again.
    """
    names = {*WRITTEN, *optional}
    forms = [form for name, form in FORMS.items() if name not in OPTIONAL or name in optional]
    again = _read_list(out) is None and is_run(out / "config.yaml")
    taken = [
        path
        for path, what in foreign_entries(out)
        if (
            path.split("/")[0] in names  # or whatever it is, a link or a folder for a file
            or any(re.fullmatch(f"({form.files})|({form.folders})", path) for form in forms)
        )
        and not (again and _kind(path, what) == "tokenizer")
    ]
    refuse_overwriting(out, taken)


def check_replaceable(out: Path, names: Iterable[str]) -> None:
    """Raise Unusable if one of these files (relative paths) exists in the run's folder and dolmen
    did not write it.
    """
    foreign = {path for path, _ in foreign_entries(out)} if out.is_dir() else set()
    refuse_overwriting(out, [name for name in names if name in foreign])


def refuse_overwriting(out: Path | str, taken: list[str]) -> None:
    """Raise Unusable if `taken` is not empty: relative paths of files in the run's folder, or at
    its URL, that the run would overwrite and dolmen did not write, of which the message names
    three.
    """
    if taken:
        raise Unusable(
            f"a run in {out} would overwrite {', '.join(taken[:3])}, which dolmen did not write: "
            "move it, or give another --out or --checkpoint.to"
        )


def clear_run(out: Path, owner: str = "") -> None:
    """Delete what dolmen wrote in a run's folder, then record the jobs in `owner` there, so that
    their restarts do not delete again. Raises Unusable, with nothing deleted, where the folder
    holds anything else. The config and the list go last: a deletion that was killed can be
    repeated.
    """
    ours = require_own_files(out)
    # config.yaml and the list show that the folder is a run's
    last = [(name, "file") for name in ("config.yaml", LIST)]
    _delete(out, [entry for entry in ours if entry not in last])
    _delete(out, [entry for entry in last if entry in ours])
    if owner:
        write.replace(out / OWNER, owner)


def record_jobs(out: Path, owner: str) -> None:
    """Write the ids of launchers' jobs in `owner` (a line each) into a file of the run's folder,
    which is made if missing, for engines that do not count restarts: a later start by one of these
    jobs is a restart.
    """
    out.mkdir(parents=True, exist_ok=True)
    write.replace(out / OWNER, owner)


def remove_export(out: Path) -> None:
    """Delete the folder `hf` of an earlier export, if there is one. Raises Unusable, with nothing
    deleted, where it holds files that dolmen did not write.
    """
    ours, foreign = (
        [entry for entry in entries if entry[0].split("/")[0] == "hf"]
        for entries in split_by_owner(out)
    )
    if foreign:
        raise Unusable(
            f"the model is not exported: {out}/{foreign[0][0]} was not written by dolmen; move it, "
            f"and dolmen export {out} --to {out}/hf"
        )
    _delete(out, ours)


def _delete(out: Path, ours: list[tuple[str, str]]) -> None:
    """Delete the entries `ours`, (relative path, kind), of a run's folder: files in their order,
    except the lock file (missing ones are fine), then folders, inner first. Raises Unusable for a
    folder that cannot be deleted, mostly as something was written into it meanwhile; the folder
    `hang`, where all ranks write, may stay.
    """
    for path, what in ours:
        if what == "file" and path != LOCK:
            (out / path).unlink(missing_ok=True)  # in `hang`, all ranks write
    # in reverse order a folder comes after what it contains
    for path, what in sorted(ours, reverse=True):
        if what == "folder":
            try:
                (out / path).rmdir()
            except OSError as error:
                if path == "hang":
                    continue
                raise Unusable(
                    f"{out / path} could not be deleted ({error.strerror}), as something was "
                    "added to it meanwhile: move it, or give another --out"
                ) from None


def is_run(file: Path) -> bool:
    """Return whether a file holds the config of a run: readable YAML with a run's sections, and no
    link. The file's name does not matter.
    """
    try:
        values = None if file.is_symlink() else gate.read_yaml(file, kinds.RUN)
    except gate.Refused:
        return False
    # a model's config.yaml, or another program's, has other sections
    names = {f.name for f in fields(RunConfig)}
    return isinstance(values, dict) and {"name", "train", "data"} <= values.keys() <= names


def _kind(path: str, what: str) -> str | None:
    """Return under which name dolmen writes paths of this form into a run's folder ("checkpoints"
    for checkpoints/step-00000100/seal), or None if it writes none such. `what`: "folder", "file" or
    "link", which dolmen never writes.
    """
    if what == "link":
        return None
    for name, form in FORMS.items():
        if re.fullmatch(form.folders if what == "folder" else form.files, path):
            return name
    return None


def _read_list(out: Path) -> set[str] | None:
    """Return the names in the list (.dolmen) of what dolmen wrote in a run's folder; None if there
    is no such file, it is a link, or it has over 1 MiB.
    """
    file = out / LIST
    if file.is_symlink() or not file.is_file() or file.stat().st_size > 2**20:
        return None
    return set(gate.read_bytes(file, 2**20).decode("utf-8", errors="replace").splitlines())


def _walk(folder: Path, below: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path relative to `folder`, kind of entry) of everything below it, in order. Folders
    that dolmen would not create are yielded and not entered; whatever is neither file nor folder is
    a "link".
    """
    with os.scandir(folder / below) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    for entry in listed:
        path = f"{below}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield path, "folder"
            if _kind(path, "folder"):
                yield from _walk(folder, f"{path}/")
        else:
            yield path, "file" if entry.is_file(follow_symlinks=False) else "link"


def check_folder(out: Path, resume: bool, overwrite: bool) -> None:
    """Raise ValueError if a run cannot use the folder `out`: it has files, unless it is a run's and
    `resume` or `overwrite` is set; both are set; another run uses it; or it cannot be written to,
    which is tried with a temporary file. Nothing is left behind.
    """
    if resume and overwrite:
        raise ValueError(
            "--resume and --overwrite exclude each other: continue the run, or delete it"
        )
    # the nearest existing folder: nothing is created before all checks have passed
    ground = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not ground.is_dir():
        raise ValueError(f"--out {out}: {ground} is a file: give a folder")
    try:
        tempfile.TemporaryFile(dir=ground).close()
    except OSError as error:
        raise ValueError(
            f"--out {out}: {ground} cannot be written to ({error.strerror}): give another folder"
        ) from None
    # raises where another run holds it
    if (out / LOCK).exists():
        unlock_folder(out, lock_folder(out))
    occupied = out.is_dir() and any(path.name != LOCK for path in out.iterdir())
    owned = (out / LIST).exists() or is_run(out / "config.yaml")
    if occupied and not (owned or resume or overwrite):
        raise ValueError(
            f"{out} is not empty and does not contain a dolmen run: give another --out"
        )
    if occupied and not (resume or overwrite):
        raise ValueError(
            f"{out} already contains a run: use --resume to continue it, --overwrite to start "
            "again, or another --out"
        )
    if overwrite and occupied and not owned:
        raise ValueError(
            f"--overwrite would delete {out}, which has no config.yaml of a run, so it was not "
            "written by dolmen: remove it yourself"
        )
