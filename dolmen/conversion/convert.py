"""From any source to a folder of a format that dolmen writes: one tensor in memory at a time."""

from pathlib import Path

from dolmen.conversion import hf_export
from dolmen.conversion.source import open_source
from dolmen.core.words import choices, shown
from dolmen.families import unknown
from dolmen.optim.precision import DTYPES

HF = "transformers"
WRITERS = {HF: hf_export.write}
"""By the format's name: (source, folder, dtype or that which is stored) -> None."""


def convert(source: str | Path, to: Path, dtype: str | None = None, format: str = HF) -> str:
    """Stream `source`, whatever it is, to `to`; what it was. Raises ValueError, KeyError or
    OSError.
    """
    if format not in WRITERS:
        raise ValueError(f"format is {shown(format)}: {choices(str(format), WRITERS)}")
    opened = open_source(source)
    unknown.warn(opened.model)
    WRITERS[format](opened, to, DTYPES[dtype] if dtype else None)
    return opened.title
