"""Options of `export` and `convert`. Imports no torch."""

from typing import Annotated, Literal

from dolmen.core.config import Mark, Name, Positive, config


@config()
class ExportConfig:
    """Write a run, a checkpoint or another transformers directory as a transformers directory:
    model.safetensors, config.json, tokenizer. One tensor is in memory at a time.
    """

    source: Annotated[str, Mark.POSITIONAL]
    """A run's folder (its newest complete checkpoint is used) or one of its checkpoints; a
    transformers directory or hub id; a Megatron checkpoint.
    """
    to: Name
    """Folder to write, or a URL such as s3://bucket/model; it must be empty or not exist."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the tensors. Default: that of config.json; for a run, that of its initial model,
    or float32 if it started from random weights.
    """
    adapters: bool = False
    """Write only the LoRA adapters of a run, in PEFT's format, and the tokenizer. Otherwise
    adapters are merged into the weights.
    """
    critic: bool = False
    """Write the critic of a PPO run in place of the policy: a model with a scalar head, one value
    per token.
    """

    def __post_init__(self):
        """Raise ValueError for --critic together with --adapters."""
        if self.critic and self.adapters:
            raise ValueError(
                "--critic and --adapters exclude each other (adapters of a critic are merged into "
                "it): leave one of the two out"
            )


@config()
class ConvertConfig:
    """Convert a model from any format (a transformers directory, a run, a Megatron checkpoint;
    detected automatically) to another, with one tensor in memory at a time. The result is read back
    and compared with the source, every tensor and then the logits, before it appears at
    DESTINATION.
    """

    source: Annotated[str, Mark.POSITIONAL]
    """A transformers directory or hub id, a run or a checkpoint of one, a Megatron checkpoint."""
    destination: Annotated[Name, Mark.POSITIONAL]
    """Folder to write, or a URL such as s3://bucket/model; it must be empty or not exist."""
    to: Literal["hf", "megatron", "megatron-core", "torch-dist"]
    """Format to write. hf: a transformers directory. megatron: a checkpoint per rank with the
    parameter names from before Megatron-Core. megatron-core: a checkpoint per rank with the
    names of Megatron-Core. torch-dist: Megatron-Core's distributed checkpoint, which any number of
    ranks can load.
    """
    tp: Positive = 1
    """megatron, megatron-core: tensor-parallel size."""
    pp: Positive = 1
    """megatron, megatron-core: pipeline-parallel size."""
    virtual_stages: Positive = 1
    """megatron, megatron-core: virtual stages (chunks of layers) per pipeline rank."""
    ep: Positive = 1
    """megatron-core: expert-parallel size."""
    spec: Literal["te", "local"] | None = None
    """megatron-core: layer spec, Transformer Engine's (te) or Megatron's own (local). Default: te.
    """
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the written tensors. Default: that of the source's config.json, or of its
    tensors if config.json names none.
    """
    vocab_size: int | None = None
    """Number of tokens in the vocabulary: needed if the source's embedding is padded and the source
    does not record the number without padding.
    """
    threads: Positive | None = None
    """Threads that write and compare, each with one tensor in memory. Default: one per core, at
    most 4.
    """

    def __post_init__(self):
        """Raise ValueError for parallel sizes or a layer spec that the format `to` does not
        have.
        """
        divided = [n for n in ("tp", "pp", "virtual_stages", "ep") if vars(self)[n] != 1]
        if self.to in ("hf", "torch-dist") and divided:
            name = divided[0].replace("_", "-")
            raise ValueError(
                f"--{name} is {vars(self)[divided[0]]}, but --to {self.to} is not split over "
                "ranks: leave it out"
            )
        if self.spec is not None and self.to != "megatron-core":
            raise ValueError(
                f"--spec is {self.spec}: only --to megatron-core has a layer spec; leave it out"
            )
