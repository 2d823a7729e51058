"""A model in another format: `export`, `convert`."""

from pathlib import Path
from typing import Any

from dolmen.api.asked import asked_of, value_errors
from dolmen.conversion import convert as conversion
from dolmen.conversion.config import ConvertConfig, ExportConfig


def export(source: str | Path, to: str | Path, dtype: str | None = None, **options: Any) -> Path:
    """`dolmen export SOURCE --to TO`: write a run's newest whole checkpoint, or the checkpoint or
    model that SOURCE is, as a transformers directory. `options` are those of the command. Returns
    the folder. Raises ValueError on bad input.

        dolmen.export("runs/book", to="model/", dtype="bfloat16")
    """
    with value_errors():
        asked = asked_of(ExportConfig, source=source, to=to, dtype=dtype, **options)
        conversion.export_model(
            asked.source, Path(asked.to), asked.dtype, asked.adapters, asked.critic
        )
    return Path(to)


def convert(
    source: str | Path,
    to: str | Path,
    *,
    format: str = "hf",
    progress: bool = True,
    **options: Any,
) -> Path:
    """`dolmen convert SOURCE TO --to FORMAT`: a model of any format that dolmen reads, in one that
    it writes (hf, megatron, megatron-core, torch-dist), read back and compared, tensors and logits.
    `options` are those of the command. `progress` shows a bar on stderr. Returns the folder. Raises
    ValueError on bad input, RuntimeError where what was written is another model: nothing is left
    of it.

        dolmen.convert("runs/book", to="ranks/", format="megatron-core", tp=2, pp=2)
    """
    with value_errors({"to": "format", "destination": "to"}):
        asked = asked_of(
            ConvertConfig,
            source=source,
            destination=to,
            to="hf" if format == "transformers" else format,
            **options,
        )
        conversion.convert(asked, progress)
    return Path(to)
