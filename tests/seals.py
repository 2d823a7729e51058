"""Checkpoints as others may leave them: changed and sealed again."""

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
    """Put another .metadata in its place, sealed."""
    (saved / folders.METADATA).write_bytes(pickle.dumps(metadata))
    seal_again(saved)


def seal_again(saved: Path) -> None:
    """Seal what is there now; of files of tensors their sizes, and the parts that the seal had."""
    lines = []
    for line in (saved / folders.SEAL).read_text().splitlines()[1:]:
        parts, _, name = line.split("  ")
        lines.append(f"{parts}  {(saved / name).stat().st_size}  {name}")
    for name in (folders.METADATA, folders.STATE):
        content = (saved / name).read_bytes()
        lines = [line for line in lines if not line.endswith(f"  {name}")]
        lines.append(f"{seal.digest(content)}  {len(content)}  {name}")
    rest = "".join(f"{line}\n" for line in lines)
    (saved / folders.SEAL).write_text(f"{seal.HEAD}{seal.digest(rest.encode())}\n{rest}")
