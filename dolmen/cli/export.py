"""dolmen export SOURCE --to DIR"""

from pathlib import Path

from dolmen.conversion.config import ExportConfig
from dolmen.conversion.convert import export_model
from dolmen.core.messages import BadInput, escape, message


def run(options: ExportConfig) -> int:
    try:
        title = export_model(
            options.source, Path(options.to), options.dtype, options.adapters, options.critic
        )
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    print(f"wrote {escape(options.to)}, from {escape(title)}")
    return 0
