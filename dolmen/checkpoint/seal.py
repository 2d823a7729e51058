"""The seal of a checkpoint: the digest and size of each of its files, written last, compared first.

Problem. A checkpoint is read years later, by other layouts, after power cuts, full disks, copies
that stopped, and edits by people. DCP's own loader reads a flipped bit as a number, takes a file of
another step for this one's, and unpickles its description freely. A checksum over all bytes before
the first number is used would read everything twice.

Idea. A small file, `seal`, records what each other file must be:

    dolmen checkpoint 2, 5d41402abc4b2a76b9719d911017c592...      blake2b of all that follows
    7d793037a0760186574b0282f2f435e7...  4213  .metadata          blake2b, bytes, name
    9b74c9897bac770ffc029102a200c5de...  1203  state.json
    e4da3b7fbbce2345d7772b0674a318d5...  98304  __0_0.distcp      blake2b of the list of its parts

The small files (DCP's description, the run's state) are sealed byte for byte. For a file of tensors
the seal holds its size and a digest of the list (position, length, CRC-32 of the numbers) of its
parts: the archive that torch.save writes of each part has the CRC-32 in its directory, so the rank
that writes a file knows the list without reading anything back. The chain of evidence is

    seal's own digest -> .metadata -> positions of parts -> heads of these parts -> list of CRC-32
        -> digest in the seal;  numbers -> their CRC-32, compared when the numbers are read

Invariants.
- The seal is written and synced after all other files, and the folder is renamed after that
  (folders.py): a folder with the name of a checkpoint and without a valid seal is damaged, never
  half-written.
- Nothing that the seal does not vouch for is used. Bytes of a file of tensors besides numbers,
  positions and checksums (names, padding, descriptions) are never looked at.
- A file is never read for the seal alone, except the head of each part in files that are opened
  anyway. A resume at the same layout reads every number once and verifies every checksum; a resume
  at another layout reads some rows of a part, and leaves those parts to `verify` (reader.py).
- The number of a newer format stands in the seal and in state.json, whatever else that format
  changes: the two together distinguish "written by a newer version" from damage of one of them.

The seal is no signature: whoever can write the folder can seal it anew. What is read must be safe
to read even then, which metadata.py and files/pickles.py see to.
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
NUMBER = rb"dolmen checkpoint ([0-9]{1,9}), "
DIGEST = 64  # hexadecimal digits
LARGEST = {SEAL: 2**28, STATE: kinds.STATE_JSON.size, METADATA: 2**32}
"""Bytes: over ten times what a run of 10,000 ranks writes."""


def digest(content: bytes) -> str:
    """Return the BLAKE2b digest of `content`, 64 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=DIGEST // 2).hexdigest()


def digest_of_parts(parts: Iterable[tuple[int, int, int]]) -> str:
    """Return the digest of a file's list of stored parts, each (byte position, length in bytes,
    CRC-32 of its numbers); their order does not matter.
    """
    # sorted: ranks report parts in any order
    lines = [f"{position} {length} {crc}\n" for position, length, crc in sorted(parts)]
    return digest("".join(lines).encode())


def write_seal(folder: Path, parts: Mapping[str, list[tuple[int, int, int]]]) -> None:
    """Write the seal of a checkpoint's `folder`, the digest and size of each other file, and fsync
    it. `parts`: name of each file of tensors -> its stored parts (byte position, length, CRC-32);
    .metadata and state.json are read here.
    """
    lines = []
    for name in (METADATA, STATE):
        content = (folder / name).read_bytes()
        lines.append(f"{digest(content)}  {len(content)}  {name}\n")
    for name, pieces in sorted(parts.items()):
        size = max(position + length for position, length, _ in pieces)
        lines.append(f"{digest_of_parts(pieces)}  {size}  {name}\n")
    rest = "".join(lines).encode()
    with open(folder / SEAL, "wb") as file:
        file.write(f"{HEAD}{digest(rest)}\n".encode() + rest)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Seal:
    """Expected digest and size of each file of the checkpoint in `folder`, by file name."""

    folder: Path
    files: dict[str, tuple[str, int]]

    def read(self, name: str) -> bytes:
        """Return the content of the checkpoint's small file `name` (.metadata or state.json).
        Raises Damaged unless it has the size and digest that the seal records.
        """
        path = self.folder / name
        want, size = self._lookup(name)
        content = _read(path, min(size, LARGEST[name]))  # what a file has grown by is not read
        if len(content) != size or digest(content) != want:
            raise Damaged(f"{path} is damaged: its content has changed since it was saved")
        return content

    def check_parts(self, name: str, parts: Iterable[tuple[int, int, int]]) -> None:
        """Raise Damaged unless the stored parts of the file `name`, each (byte position, length,
        CRC-32), have the digest that the seal records for it.
        """
        if digest_of_parts(parts) != self._lookup(name)[0]:
            raise Damaged(
                f"{self.folder / name} is damaged: the file has changed since it was saved"
            )

    def check_size(self, name: str, least: int, size: int | None = None) -> None:
        """Raise Damaged unless the file `name` has exactly the size that the seal records, which
        must be at least `least` bytes (what its parts need). `size`: bytes of a file that is at a
        URL, -1 if missing; by default the file in the checkpoint's folder is looked up. Nothing of
        it is read.
        """
        path = self.folder / name
        if size is None:
            size = path.stat().st_size if path.is_file() else -1
        if size < least or size != self._lookup(name)[1]:
            raise Damaged(f"{path} is missing, damaged or truncated")

    def _lookup(self, name: str) -> tuple[str, int]:
        """Return (digest, size in bytes) of the file `name` as the seal records them. Raises
        Damaged where the seal does not list it.
        """
        if name not in self.files:
            raise Damaged(f"{self.folder / SEAL} is damaged: it does not list {name}")
        return self.files[name]


def read_sealed(folder: Path) -> tuple[Seal, dict]:
    """Read the seal of the checkpoint in `folder` and its state.json, which is compared with the
    seal. Return (seal, content of state.json without its format number). Raises Damaged, or
    ValueError for a checkpoint of a newer format.
    """
    path = folder / SEAL
    content = _read(path, LARGEST[SEAL])
    _refuse_newer(folder, content)
    seal = Seal(folder, _parse(path, content))
    state = _parse_state(folder / STATE, seal.read(STATE))
    del state["format"]
    return seal, state


def _read(path: Path, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes. Raises Damaged where it is missing or
    larger.
    """
    try:
        return gate.read_bytes(path, most)
    except gate.Refused as error:
        raise Damaged(f"{error} (missing or damaged)") from error


def _refuse_newer(folder: Path, content: bytes) -> None:
    """Raise ValueError if the seal, whose bytes are `content`, and state.json both have the same
    format number, newer than this version reads. If only one has it, that is damage: checked later.
    """
    match = re.match(NUMBER, content)
    number = int(match[1]) if match else 0
    if number <= FORMAT:
        return
    path = folder / STATE
    # both files say so: not damage, but a newer version
    if _parse_state(path, _read(path, LARGEST[STATE])).get("format") == number:
        raise ValueError(
            f"{folder} was written by a newer dolmen: it has format {number}, and this version "
            f"reads formats up to {FORMAT}; use the version that wrote it"
        )


def _parse(path: Path, content: bytes) -> dict[str, tuple[str, int]]:
    """Parse the content of a seal: return file name -> (digest, size in bytes). Raises Damaged,
    naming `path`, where the seal's own digest or a line is wrong.
    """
    head, _, rest = content.partition(b"\n")
    if head != f"{HEAD}{digest(rest)}".encode():
        raise Damaged(f"{path} is damaged: its own digest is wrong")
    files = {}
    for line in rest.decode("ascii", "replace").splitlines():
        want, size, name = (line.split("  ") + ["", ""])[:3]
        if not (FILE.fullmatch(name) and size.isdecimal() and len(size) < 20):
            raise Damaged(f"{path} is damaged: {line[:80]!r} is not a line of a seal")
        files[name] = want, int(size)
    return files


def _parse_state(path: Path, content: bytes) -> dict:
    """Return the JSON object that a state.json contains. Raises Damaged, naming `path`, where it is
    malformed.
    """
    try:
        return gate.parse_json(content, path, kinds.STATE_JSON)
    except gate.Refused as error:
        raise Damaged(f"{error} (missing or damaged)") from error
