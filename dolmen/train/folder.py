"""What a run writes into its folder, how that is deleted, and that nothing else ever is.

    runs/NAME/.dolmen     the names, one per line, under which runs have written here:
                          `checkpoints`, `config.yaml`, `tokenizer`, ... and the
                          files of the last two kinds below

A file is deleted where its whole path has a form that dolmen writes and its first name is in this
list. A list can only take away from those forms, so a forged one names nothing outside them; what
is found by walking is compared with it, so it names nothing outside the folder either; and dolmen
writes no links, so a link is somebody else's. A run of before has no list: there the forms alone
decide, if its config.yaml is that of a run.
"""

import os
import re
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import fields
from pathlib import Path

from dolmen.checkpoint import folders
from dolmen.files import gate, kinds
from dolmen.train.config import RunConfig

LIST = ".dolmen"
OWNER = ".overwritten-by"  # the jobs that have emptied the folder
WRITTEN = (
    "config.yaml",
    "metrics.jsonl",
    "loss.png",
    "summary.json",
    "tensorboard",
    "checkpoints",
    "tokenizer",
)
"""What every run writes; `hf` is written by some."""
TOKENIZER = (
    r"(tokenizer(_config)?|special_tokens_map|added_tokens|vocab|chat_template)\.json|merges\.txt"
    r"|vocab\.txt|tokenizer\.model|chat_template\.jinja"
)
MODEL = r"(generation_)?config\.json|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
FORMS = {
    "config.yaml": r"config\.yaml(\.part)?",
    "metrics.jsonl": r"metrics\.(jsonl|part)",
    "loss.png": r"loss\.png",
    "summary.json": r"summary\.(json|part)",
    "tensorboard": r"tensorboard/events\.out\.tfevents\.[^/]+",
    "checkpoints": rf"checkpoints/({folders.FOLDER.pattern})/({folders.FILE.pattern})",
    "tokenizer": rf"tokenizer/({TOKENIZER})",
    "hf": rf"(hf|\.hf\.[a-z0-9_]{{8}}/model)/({TOKENIZER}|{MODEL})",
    "hang": r"hang/rank-\d+\.(json|txt|part)",
    LIST: r"\.dolmen",
    OWNER: r"\.overwritten-by",
}
"""First name -> the files that dolmen writes under it."""
FOLDERS = re.compile(
    rf"tensorboard|checkpoints(/({folders.FOLDER.pattern}))?|tokenizer|hf|\.hf\.[a-z0-9_]{{8}}"
    r"(/model)?|hang"
)
ALWAYS = ("hang", LIST, OWNER)  # not in the list: written before it, or it itself
LISTED = ("tokenizer", "hf")  # whose files are in the list too: a tokenizer may have any


class Unusable(ValueError):
    """The run's folder cannot be used as asked; the message says why."""


def claim(out: Path, *names: str) -> None:
    """Say in the folder's list that dolmen writes these names, before it does."""
    known = _listed(out) or set()
    if new := [name for name in names if name not in known]:
        with open(out / LIST, "a", encoding="utf-8") as file:
            file.write("".join(f"{name}\n" for name in new))


def claim_files(out: Path, name: str) -> None:
    """Say in the list which files are in the folder `name`, which dolmen has just written."""
    claim(out, *(f"{name}/{path.name}" for path in sorted((out / name).iterdir())))


def strange(out: Path) -> list[tuple[str, str]]:
    """What in the folder dolmen did not write: (path relative to it, what it is), sorted."""
    listed = _listed(out)
    by_form = listed is None and is_run(out / "config.yaml")

    def ours(path: str, what: str) -> bool:
        kind = _kind(path, what)
        if listed is None:
            return kind in ALWAYS or (kind is not None and by_form)
        first, _, name = path.partition("/")
        if what == "file" and first in LISTED and "/" not in name and path in listed:
            kind = first
        return kind in ALWAYS or kind in listed

    return sorted(entry for entry in _walk(out) if not ours(*entry))


def refuse_strange(out: Path) -> None:
    """Raises Unusable where the folder holds what dolmen did not write."""
    if found := [path for path, _ in strange(out)]:
        shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        raise Unusable(
            f"--overwrite deletes only what dolmen wrote, and {out} also holds {shown}: move it, "
            "or give another --out"
        )


def refuse_taken(out: Path, export: bool = False) -> None:
    """Raises Unusable where a file of somebody else's has a name that a run will write, or will
    `export` to.
    """
    names = {*WRITTEN, "hf"} if export else set(WRITTEN)
    taken = [
        path
        for path, what in strange(out)
        if path.split("/")[0] in names or _kind(path, what) in names
    ]
    if taken:
        raise Unusable(
            f"a run in {out} would write over {', '.join(taken[:3])}, which dolmen did not write: "
            "move it, or give another --out"
        )


def clear(out: Path, owner: str = "") -> None:
    """Delete what dolmen wrote in a run's folder, and then say in it who has: `owner`'s restarts
    will not. Raises Unusable, with nothing deleted, where there is anything else. A kill in between
    leaves a folder that can be cleared: what shows whose it is goes last.
    """
    refuse_strange(out)
    found = list(_walk(out))
    last = {"config.yaml": 1, LIST: 2}
    for path, what in sorted(found, key=lambda entry: last.get(entry[0], 0)):
        if what == "file":
            (out / path).unlink(missing_ok=True)  # in `hang`, all ranks write
    for path, what in sorted(found, reverse=True):
        if what == "folder":
            with suppress(OSError) if path == "hang" else nullcontext():
                (out / path).rmdir()
    if owner:
        (out / OWNER).write_text(owner)


def remove_export(out: Path) -> None:
    """Delete the folder `hf` of an export before, if there is one. Raises Unusable, with nothing
    deleted, where it holds anything else.
    """
    if found := [path for path, _ in strange(out) if path.split("/")[0] == "hf"]:
        raise Unusable(
            f"the model is not exported: {out}/{found[0]} was not written by dolmen; move it, and "
            f"dolmen export {out} --to {out}/hf"
        )
    if (out / "hf").is_dir():
        for child in (out / "hf").iterdir():
            child.unlink()
        (out / "hf").rmdir()


def is_run(file: Path) -> bool:
    """Whether this is the config.yaml of a run."""
    try:
        values = None if file.is_symlink() else gate.read_yaml(file, kinds.RUN)
    except gate.Refused:
        return False
    names = {f.name for f in fields(RunConfig)}
    return isinstance(values, dict) and {"name", "train", "data"} <= values.keys() <= names


def _kind(path: str, what: str) -> str | None:
    """Under which name of FORMS dolmen would write this; None: under none."""
    if what == "folder":
        first = path.split("/")[0]
        first = "hf" if first.startswith(".hf.") else first
        return first if FOLDERS.fullmatch(path) else None
    if what == "file":
        return next((name for name, form in FORMS.items() if re.fullmatch(form, path)), None)
    return None


def _listed(out: Path) -> set[str] | None:
    """The names in the folder's list; None where there is none."""
    file = out / LIST
    if file.is_symlink() or not file.is_file() or file.stat().st_size > 2**20:
        return None
    return set(gate.read_bytes(file, 2**20).decode("utf-8", errors="replace").splitlines())


def _walk(folder: Path, below: str = "") -> Iterator[tuple[str, str]]:
    """(path relative to `folder`, "folder", "file" or "link") of everything in it but what lies in
    folders that dolmen would not make. "link" is whatever is neither of the others.
    """
    with os.scandir(folder / below) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        path = f"{below}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield path, "folder"
            if FOLDERS.fullmatch(path):
                yield from _walk(folder, f"{path}/")
        else:
            yield path, "file" if entry.is_file(follow_symlinks=False) else "link"
