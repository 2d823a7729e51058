"""What `export` may be told. Without torch."""

from dataclasses import dataclass
from typing import Literal

from dolmen.core.paths import refuse_empty


@dataclass(frozen=True)
class ExportConfig:
    """A run or another source, and the directory that it becomes."""

    source: str
    """A run's folder (its newest whole checkpoint is taken), or one checkpoint in it; a
    transformers directory or hub id.
    """
    to: str
    """Folder to write; it must be empty or not exist."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the tensors. Default: that of config.json, of a run that of the model it started
    from, else float32.
    """

    def __post_init__(self):
        refuse_empty("to", self.to)
