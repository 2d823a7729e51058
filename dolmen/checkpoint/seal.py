"""The seal of a checkpoint: what each of its files must be. It is written last and compared first.

    dolmen checkpoint 2, 5d41402abc4b2a76b9719d911017c592...      blake2b of all that follows
    7d793037a0760186574b0282f2f435e7...  4213  .metadata          blake2b, bytes, name
    9b74c9897bac770ffc029102a200c5de...  1203  state.json
    e4da3b7fbbce2345d7772b0674a318d5...  98304  __0_0.distcp      blake2b of the list of its parts

The small files are sealed byte for byte. Of a file of tensors the seal holds the size and a digest
of the list (position, length, CRC-32 of the numbers) of its parts, which the rank that wrote it has
read off it; the numbers themselves are compared with their CRC-32 when they are read. So nothing is
read for the seal's sake but the head of each part that lies in a file one reads anyway, and a file
of another step is not taken for this one's. What is in a file of tensors beside numbers, positions
and checksums (names, padding, descriptions) is used for nothing.

A newer format, whatever else it changes, has its number in the seal and in state.json, which tells
it from damage of one of them.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dolmen.checkpoint.folders import FILE, METADATA, SEAL, STATE, Damaged
from dolmen.files import gate, kinds

FORMAT = 2
HEAD = f"dolmen checkpoint {FORMAT}, "
NUMBER = rb"dolmen checkpoint (\d{1,9}), "
DIGEST = 64  # hexadecimal digits
LARGEST = {SEAL: 2**28, STATE: kinds.STATE_JSON.size, METADATA: 2**32}
"""Bytes: over ten times what a run of 10,000 ranks writes."""


def digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=DIGEST // 2).hexdigest()


def digest_of_parts(parts: Iterable[tuple[int, int, int]]) -> str:
    """Of a file's (position, length, CRC-32 of the numbers), in any order."""
    lines = [f"{position} {length} {crc}\n" for position, length, crc in sorted(parts)]
    return digest("".join(lines).encode())


def write_seal(folder: Path, parts: Mapping[str, list[tuple[int, int, int]]]) -> None:
    """Seal what is in `folder`, whose files of tensors have these `parts`, and sync the seal."""
    lines = []
    for name in (METADATA, STATE):
        content = (folder / name).read_bytes()
        lines.append(f"{digest(content)}  {len(content)}  {name}\n")
    for name, found in sorted(parts.items()):
        size = max(position + length for position, length, _ in found)
        lines.append(f"{digest_of_parts(found)}  {size}  {name}\n")
    rest = "".join(lines).encode()
    with open(folder / SEAL, "wb") as file:
        file.write(f"{HEAD}{digest(rest)}\n".encode() + rest)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Seal:
    """What the files of the checkpoint in `folder` must be: name -> (digest, bytes)."""

    folder: Path
    files: dict[str, tuple[str, int]]

    def read(self, name: str) -> bytes:
        """A small file, as it was saved. Raises Damaged."""
        path = self.folder / name
        want, size = self._of(name)
        content = _read(path, min(size, LARGEST[name]))  # what a file has grown by is not read
        if len(content) != size or digest(content) != want:
            raise Damaged(f"{path} is damaged: it is not what was saved")
        return content

    def check_parts(self, name: str, parts: Iterable[tuple[int, int, int]]) -> None:
        """Raises Damaged unless these are the parts that the file of tensors had."""
        if digest_of_parts(parts) != self._of(name)[0]:
            raise Damaged(f"{self.folder / name} is damaged: it is not the file that was saved")

    def check_size(self, name: str, least: int) -> None:
        """Raises Damaged unless the file is there, as long as it was and as its parts need; reads
        nothing.
        """
        path = self.folder / name
        size = path.stat().st_size if path.is_file() else -1
        if size < least or size != self._of(name)[1]:
            raise Damaged(f"{path} is missing, damaged or truncated")

    def _of(self, name: str) -> tuple[str, int]:
        if name not in self.files:
            raise Damaged(f"{self.folder / SEAL} is damaged: it says nothing of {name}")
        return self.files[name]


def read_sealed(folder: Path) -> tuple[Seal, dict]:
    """The seal of a checkpoint, and its state.json, compared with it. Raises Damaged, or ValueError
    where it is of a newer format.
    """
    path = folder / SEAL
    content = _read(path, LARGEST[SEAL])
    _refuse_newer(folder, content)
    seal = Seal(folder, _parse(path, content))
    state = _state(folder / STATE, seal.read(STATE))
    del state["format"]
    return seal, state


def _read(path: Path, most: int) -> bytes:
    try:
        return gate.read_bytes(path, most)
    except gate.Refused as error:
        raise Damaged(f"{error} (missing or damaged)") from error


def _refuse_newer(folder: Path, content: bytes) -> None:
    match = re.match(NUMBER, content)
    number = int(match[1]) if match else 0
    if number <= FORMAT:
        return
    path = folder / STATE
    if _state(path, _read(path, LARGEST[STATE])).get("format") == number:
        raise ValueError(
            f"{folder} was written by a newer dolmen: it has format {number}, and this version "
            f"reads formats up to {FORMAT}; use the version that wrote it"
        )


def _parse(path: Path, content: bytes) -> dict[str, tuple[str, int]]:
    head, _, rest = content.partition(b"\n")
    if head != f"{HEAD}{digest(rest)}".encode():
        raise Damaged(f"{path} is damaged: its own digest is wrong")
    files = {}
    for line in rest.decode("ascii", "replace").splitlines():
        want, size, name = (line.split("  ") + ["", ""])[:3]
        if not (FILE.fullmatch(name) and size.isdecimal() and len(size) < 20):
            raise Damaged(f"{path} is damaged: {line[:80]!r} is no line of a seal")
        files[name] = want, int(size)
    return files


def _state(path: Path, content: bytes) -> dict:
    try:
        return gate.parse_json(content, path, kinds.STATE_JSON)
    except gate.Refused as error:
        raise Damaged(f"{error} (missing or damaged)") from error
