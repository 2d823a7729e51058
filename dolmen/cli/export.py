"""dolmen export RUN_OR_CHECKPOINT --to DIR"""

from pathlib import Path

from dolmen.checkpoint import saved as saved_state
from dolmen.checkpoint import stream
from dolmen.cli.options import ExportOptions
from dolmen.conversion import hf_export
from dolmen.core.config import from_dict
from dolmen.core.errors import BadInput, message
from dolmen.families import Model, completed, edit, unknown
from dolmen.optim.precision import DTYPES
from dolmen.training.check import check_exportable
from dolmen.training.config import RunConfig


def run(options: ExportOptions, _: list[str]) -> int:
    try:
        step = export(Path(options.source), Path(options.to), options.dtype)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    print(f"wrote {options.to}, from the checkpoint of step {step}")
    return 0


def export(source: Path, to: Path, dtype: str | None = None) -> int:
    """Stream the newest whole checkpoint of `source` to `to`; its step. Raises ValueError, KeyError
    or OSError.
    """
    folder = stream.locate(source)
    saved = stream.open_checkpoint(folder)
    kept = saved_state.read_saved(saved.meta, folder)
    run_ = from_dict(RunConfig, kept.run)
    tokenizer = folder.parent.parent / "tokenizer"
    check_exportable(run_)
    model = run_.model
    assert model is not None
    unknown.warn(model)
    if run_.init is None:
        model = completed(model)
        model = stopping(model, tokenizer) if tokenizer.is_dir() else model
    hf_export.save(
        to,
        model,
        lambda name: saved.read(f"model/{name}"),
        DTYPES[dtype] if dtype else None,
        tokenizer if tokenizer.is_dir() else None,
    )
    return kept.step


def stopping(model: Model, tokenizer: Path) -> Model:
    """A model that came from no config.json, with the end of text that its tokenizer names: where
    generation stops.
    """
    if model.config.get("eos_token_id") is not None:
        return model
    from dolmen.data.tokenizer import load_tokenizer

    end = load_tokenizer(str(tokenizer)).eos_token_id
    return model if end is None else edit(model, eos_token_id=end)
