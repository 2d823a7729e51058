"""A corpus that is on every machine: the source of Python's standard library, without its tests.

A file is a document and is held out whole, so a model's bits per byte on the held-out files can be
set beside what `gzip -9` and `xz -9` need for the same files.
"""

import gzip
import lzma
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from dolmen.core.messages import plural

STANDARD_LIBRARY = "python-standard-library"  # as an entry of --data.path

NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def standard_library_files() -> list[Path]:
    """Files of the running Python's standard library, sorted, without its tests and without
    installed packages.
    """
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(
        file
        for file in root.rglob("*.py")
        if file.stat().st_size
        and not any(
            part in NOT_SOURCE or part.startswith("config-")
            for part in file.relative_to(root).parts
        )
    )


def gzip_xz_bits(files: Sequence[Path]) -> tuple[float, float]:
    """Bits per byte of `gzip -9` and of `xz -9`, each file compressed by itself, over all bytes.
    Raises ValueError where all files are empty.
    """
    texts = [file.read_bytes() for file in files]
    plain = sum(map(len, texts))
    if not plain:
        raise ValueError(f"nothing to compress: {plural(len(files), 'held-out file')} with 0 bytes")
    return (
        8 * sum(len(gzip.compress(text, 9)) for text in texts) / plain,
        8 * sum(len(lzma.compress(text, preset=9)) for text in texts) / plain,
    )
