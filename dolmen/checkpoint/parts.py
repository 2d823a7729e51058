"""A stored part of a tensor: a zip archive as `torch.save` writes it, somewhere in a file. Its
numbers are one uncompressed entry, of which the archive's directory holds the CRC-32.

    __3_0.distcp   | archive | archive | archive: data.pkl | data/0: 64-byte aligned numbers | ... ,
                   with their CRC-32 |
"""

import io
import zipfile
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dolmen.core.torch_private.checkpoints import NUMBERS
from dolmen.files.window import Window

BLOCK = 64 * 2**20  # bytes


class Numbers(NamedTuple):
    """Where the numbers of a part are in its file, how many bytes, and their CRC-32."""

    start: int
    size: int
    crc: int


def find_numbers(file: io.BufferedIOBase, position: int, length: int) -> Numbers:
    """Those of the archive of `length` bytes at `position`. Raises BadZipFile, ValueError, OSError,
    NotImplementedError or EOFError where there is none.
    """
    window = Window(file, position, length)
    with zipfile.ZipFile(window) as archive:
        found = [e for e in archive.infolist() if NUMBERS in e.filename]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"at {position} are no numbers as torch.save writes them")
    # The archive's directory, at its end, says where an entry's header begins, not how long it is:
    # that has the length of the name and of the padding which puts the numbers at 64 bytes.
    window.seek(found[0].header_offset + 26)  # of the local header: 2 + 2 bytes, two lengths
    lengths = window.read(4)
    head = 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return Numbers(position + found[0].header_offset + head, found[0].file_size, found[0].CRC)


def blocks(file: io.BufferedIOBase, start: int, size: int, row: int, name: str) -> Iterator[Tensor]:
    """The `size` bytes from `start` on, each block uint8 [bytes], of as many whole rows of `row`
    bytes as BLOCK holds. Raises EOFError where the file ends before.
    """
    step = max(1, BLOCK // row) * row
    for at in range(0, size, step):
        data = torch.empty(min(step, size - at), dtype=torch.uint8)
        file.seek(start + at)
        if file.readinto(data.numpy().data) != len(data):
            raise EOFError(f"{name} ends early")
        yield data


def compare(checksum: int, expected: int, name: str) -> None:
    """Raises BadZipFile unless they are equal."""
    if checksum != expected:
        raise zipfile.BadZipFile(f"the checksum of {name} is wrong")
