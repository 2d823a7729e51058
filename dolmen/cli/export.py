"""dolmen export SOURCE --to DIR"""

from pathlib import Path

from dolmen.cli.options import ExportOptions
from dolmen.conversion import hf_export
from dolmen.conversion.source import open_source
from dolmen.core.errors import BadInput, message
from dolmen.families import unknown
from dolmen.optim.precision import DTYPES


def run(options: ExportOptions, _: list[str]) -> int:
    try:
        title = export(options.source, Path(options.to), options.dtype)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    print(f"wrote {options.to}, from {title}")
    return 0


def export(source: str | Path, to: Path, dtype: str | None = None) -> str:
    """Stream `source`, whatever it is, to `to`; what it was. Raises ValueError, KeyError or
    OSError.
    """
    opened = open_source(source)
    unknown.warn(opened.model)
    hf_export.write(opened, to, DTYPES[dtype] if dtype else None)
    return opened.title
