"""Options of `export` and `convert`. Imports no torch."""

from typing import Annotated, Literal

from dolmen.core.config import Mark, Name, Positive, config


@config()
class ExportConfig:
    """Write a run, a checkpoint or another transformers directory as a transformers directory:
    model.safetensors, config.json, tokenizer. One tensor is in memory at a time.
    """

    source: Annotated[str, Mark.POSITIONAL]
    """A run's folder (its newest whole checkpoint is taken), or one checkpoint in it; a
    transformers directory or hub id; a Megatron checkpoint.
    """
    to: Name
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
        if self.critic and self.adapters:
            raise ValueError(
                "critic and adapters each say what is written, and a critic's adapters are merged "
                "into it: leave one of the two out"
            )


@config()
class ConvertConfig:
    """Write a model of any format (a transformers directory, a run, a Megatron checkpoint: it is
    recognised by itself) in another one, one tensor in memory at a time. What is written is opened
    again and compared: every tensor, then the logits. Nothing stands at DESTINATION before that.
    """

    source: Annotated[str, Mark.POSITIONAL]
    """A transformers directory or hub id, a run or a checkpoint of one, a Megatron checkpoint."""
    destination: Annotated[Name, Mark.POSITIONAL]
    """Folder to write; it must be empty or not exist."""
    to: Literal["hf", "megatron", "megatron-core", "torch-dist"]
    """hf: a transformers directory. megatron: ranks with the names from before Megatron-Core.
    megatron-core: ranks with its names. torch-dist: its checkpoints that any number of ranks reads.
    """
    tp: Positive = 1
    """Megatron: ranks of tensor parallelism."""
    pp: Positive = 1
    """Megatron: ranks of the pipeline."""
    virtual_stages: Positive = 1
    """Megatron: chunks of layers per pipeline rank."""
    ep: Positive = 1
    """megatron-core: ranks of expert parallelism, each with its share of every layer's experts."""
    spec: Literal["te", "local"] | None = None
    """megatron-core: layers of Transformer Engine, or Megatron's own. Default: te."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the tensors. Default: that of the source's config.json, or of its tensors where it
    has none.
    """
    vocab_size: int | None = None
    """Tokens of the vocabulary, where the source has rows behind them and does not say how many."""
    threads: Positive | None = None
    """Threads that write and compare, each with one tensor in memory. Default: one per core, at
    most 4.
    """

    def __post_init__(self):
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
