"""A model in another format: `export`, `convert`."""

from pathlib import Path

from dolmen.api.asked import asked_of, value_errors
from dolmen.conversion import convert as conversion
from dolmen.conversion.config import ConvertConfig, ExportConfig


def export(
    source: str | Path,
    to: str | Path,
    dtype: str | None = None,
    *,
    adapters: bool = False,
    critic: bool = False,
) -> Path:
    """`dolmen export SOURCE --to TO`: write a run's newest whole checkpoint, or the checkpoint or
    model that SOURCE is, as a transformers directory, one tensor in memory at a time; `dtype`
    float32, bfloat16 or float16, unset that of the model the run started from. `adapters`: of a run
    that has any these alone, as PEFT writes them. Returns the folder. Raises ValueError on bad
    input.

        dolmen.export("runs/book", to="model/", dtype="bfloat16")
    """
    with value_errors():
        said = {"dtype": dtype, "adapters": adapters, "critic": critic}
        asked = asked_of(ExportConfig, source=source, to=to, **said)
        conversion.export_model(
            asked.source, Path(asked.to), asked.dtype, asked.adapters, asked.critic
        )
    return Path(to)


def convert(
    source: str | Path,
    to: str | Path,
    *,
    format: str = "hf",
    tp: int = 1,
    pp: int = 1,
    virtual_stages: int = 1,
    ep: int = 1,
    spec: str | None = None,
    dtype: str | None = None,
    vocab_size: int | None = None,
    threads: int | None = None,
    progress: bool = True,
) -> Path:
    """`dolmen convert SOURCE TO --to FORMAT`: a model of any format that dolmen reads, in one that
    it writes (hf, megatron, megatron-core, torch-dist), read back and compared, tensors and logits,
    in `threads` (unset: one per core, at most 4). `progress` shows a bar on stderr. Returns the
    folder. Raises ValueError on bad input, RuntimeError where what was written is another model:
    nothing is left of it.

        dolmen.convert("runs/book", to="ranks/", format="megatron-core", tp=2, pp=2)
    """
    with value_errors({"to": "format", "destination": "to"}):
        asked = asked_of(
            ConvertConfig,
            source=source,
            destination=to,
            to="hf" if format == "transformers" else format,
            tp=tp,
            pp=pp,
            virtual_stages=virtual_stages,
            ep=ep,
            spec=spec,
            dtype=dtype,
            vocab_size=vocab_size,
            threads=threads,
        )
        conversion.convert(asked, progress)
    return Path(to)
