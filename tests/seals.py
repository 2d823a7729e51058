"""Checkpoints as others may leave them: changed and sealed again, or from before there were
seals.
"""

import json
import pickle
from pathlib import Path

from dolmen.checkpoint import folders, seal
from dolmen.checkpoint.metadata import read_metadata


def edit(saved: Path, change) -> None:
    """Change .metadata, as somebody would who knows of the seal."""
    metadata = read_metadata(seal.read_sealed(saved)[0])
    change(metadata)
    describe(saved, metadata)


def describe(saved: Path, metadata) -> None:
    """Put another .metadata in its place; sealed, if what was there is."""
    (saved / folders.METADATA).write_bytes(pickle.dumps(metadata))
    if (saved / folders.SEAL).exists():
        seal_again(saved)


def seal_again(saved: Path) -> None:
    """Seal what is there now; of files of tensors what the seal has said."""
    lines = (saved / folders.SEAL).read_text().splitlines()[1:]
    for name in (folders.METADATA, folders.STATE):
        content = (saved / name).read_bytes()
        lines = [line for line in lines if not line.endswith(f"  {name}")]
        lines.append(f"{seal.digest(content)}  {len(content)}  {name}")
    rest = "".join(f"{line}\n" for line in lines)
    (saved / folders.SEAL).write_text(f"{seal.HEAD}{seal.digest(rest.encode())}\n{rest}")


def unseal(saved: Path) -> None:
    """As it was saved before there were seals."""
    (saved / folders.SEAL).unlink()
    state = json.loads((saved / folders.STATE).read_text())
    del state["format"]
    (saved / folders.STATE).write_text(json.dumps(state, indent=1))
