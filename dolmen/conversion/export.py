"""From any source to a transformers directory: one tensor in memory at a time."""

from pathlib import Path

from dolmen.conversion import hf_export
from dolmen.conversion.source import open_source
from dolmen.families import unknown
from dolmen.optim.precision import DTYPES


def export(source: str | Path, to: Path, dtype: str | None = None) -> str:
    """Stream `source`, whatever it is, to `to`; what it was. Raises ValueError, KeyError or
    OSError.
    """
    opened = open_source(source)
    unknown.warn(opened.model)
    hf_export.write(opened, to, DTYPES[dtype] if dtype else None)
    return opened.title
