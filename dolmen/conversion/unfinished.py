"""Temporary folder in which a model's folder is built, so that nothing takes what kill -9 leaves
for a model.

    .model.xk2j8f.unfinished/     beside its destination, model/
        model/                    weights, written and then proved
        words/                    the files by which programs know such a folder

The words join the weights when these are proved, and the whole is renamed. A folder of ranks could
be opened without words: nothing is read of a place with such a name.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

SUFFIX = ".unfinished"
NAME = re.compile(rf"\..+{re.escape(SUFFIX)}")


@contextmanager
def build_beside(target: Path) -> Iterator[tuple[Path, Path]]:
    """Empty folders for weights and words, which are `target` when what is within has ended, and
    gone where it raises.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}."
    with TemporaryDirectory(prefix=prefix, suffix=SUFFIX, dir=target.parent) as made:
        part, words = Path(made) / target.name, Path(made) / "words"
        part.mkdir()
        words.mkdir()
        yield part, words
        for file in words.iterdir():
            os.rename(file, part / file.name)
        os.rename(part, target)


def check(folder: Path) -> None:
    """Raises ValueError for a folder in what was broken off."""
    for place in (folder.resolve(), *folder.resolve().parents):
        if NAME.fullmatch(place.name):
            raise ValueError(
                f"{folder} lies in what a conversion that was broken off has left: convert again, "
                f"and remove {place}"
            )
