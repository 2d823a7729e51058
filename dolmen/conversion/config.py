"""Options of `export` and `convert`. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from dolmen.core.paths import refuse_empty


@dataclass(frozen=True)
class ExportConfig:
    """A run or another source, and the directory that it becomes."""

    source: str
    """A run's folder (its newest whole checkpoint is taken), or one checkpoint in it; a
    transformers directory or hub id; a Megatron checkpoint.
    """
    to: str
    """Folder to write; it must be empty or not exist."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the tensors. Default: that of config.json, of a run that of the model it started
    from, else float32.
    """
    adapters: bool = False
    """Write the adapters of a run without the model, as PEFT does, and the tokenizer."""
    critic: bool = False
    """Write the critic of a PPO run in the place of the policy: a model that ends in one number for
    each token.
    """

    def __post_init__(self):
        refuse_empty("to", self.to)
        if self.critic and self.adapters:
            raise ValueError(
                "critic and adapters each say what is written, and a critic's adapters are merged "
                "into it: leave one of the two out"
            )


@dataclass(frozen=True)
class ConvertConfig:
    """A model of any format, and a folder of another one that it becomes."""

    source: str
    """A transformers directory or hub id, a run or a checkpoint of one, a Megatron checkpoint."""
    destination: str
    """Folder to write; it must be empty or not exist."""
    to: Literal["hf", "megatron", "megatron-core", "torch-dist"]
    """hf: a transformers directory. megatron: ranks with the names from before Megatron-Core.
    megatron-core: ranks with its names. torch-dist: its checkpoints that any number of ranks reads.
    """
    tp: int = 1
    """Megatron: ranks of tensor parallelism."""
    pp: int = 1
    """Megatron: ranks of the pipeline."""
    virtual_stages: int = 1
    """Megatron: chunks of layers per pipeline rank."""
    ep: int = 1
    """megatron-core: ranks of expert parallelism, each with its share of every layer's experts."""
    spec: Literal["te", "local"] | None = None
    """megatron-core: layers of Transformer Engine, or Megatron's own. Default: te."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the tensors. Default: that of the source's config.json, or of its tensors where it
    has none.
    """
    vocab_size: int | None = None
    """Tokens of the vocabulary, where the source has rows behind them and does not say how many."""
    threads: int | None = None
    """Threads that write and compare, each with one tensor in memory. Default: one per core, at
    most 4.
    """

    def __post_init__(self):
        refuse_empty("destination", self.destination)
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads is {self.threads}: it must be at least 1")
        divided = [n for n in ("tp", "pp", "virtual_stages", "ep") if vars(self)[n] != 1]
        if self.to in ("hf", "torch-dist") and divided:
            name = divided[0].replace("_", "-")
            raise ValueError(
                f"--{name} is {vars(self)[divided[0]]}, but --to {self.to} has no ranks: leave it "
                "out"
            )
        if self.spec is not None and self.to != "megatron-core":
            raise ValueError(
                f"--spec is {self.spec}: only --to megatron-core has a choice of layers"
            )
