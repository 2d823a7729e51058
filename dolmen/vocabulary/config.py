"""Options of `dolmen vocab`. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from dolmen.core.config import LocalName, Mark, Name, Seed, config

BYTES, FRAME = 256, 3  # pieces of bytes; unknown, beginning and end of a text


@config("data")
class VocabText:
    """Text, from any source that training takes."""

    path: tuple[Name, ...] = ()
    """The text: files, folders and globs of .txt, .md, .py, .jsonl, .json and .parquet, all but
    .parquet also compressed as .gz or .zst, and ids of the Hugging Face hub, as for `dolmen train`.
    """
    text_field: str = "text"
    """Field (.jsonl, .json) or column (.parquet, hub) that holds the text."""


@config()
class VocabTrainConfig:
    """Train a tokenizer on text and write it as a folder that transformers opens, with a
    tokenizer.json and, for unigram and bpe, a tokenizer.model. The text is read once, so that it
    may be of any size.

        dolmen vocab train --data.path zh/ --size 20000 --kind bpe --to zh-tokens
    """

    size: int
    """Number of tokens, including special tokens and single bytes."""
    kind: Literal["unigram", "bpe", "byte-bpe"]
    """Algorithm. unigram, bpe: sentencepiece's, with byte fallback. byte-bpe: byte-level BPE of
    `tokenizers`, like that of GPT-2 and Llama 3.
    """
    to: LocalName
    """Folder to write; it must be empty or not exist."""
    data: VocabText = VocabText()
    max_bytes: Annotated[int, Field(ge=1000)] = 500_000_000
    """Maximum bytes of text to learn from, which bounds the memory used. More text is sampled at
    random, over its whole length.
    """
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the sample of text."""

    def __post_init__(self):
        """Raise ValueError unless `size` has room for the fixed tokens of `kind` (bytes, special
        tokens) and is at most 2^24.
        """
        least = BYTES + (1 if self.kind == "byte-bpe" else FRAME + 1)
        if not least < self.size <= 2**24:
            raise ValueError(
                f"--size is {self.size:,}: a vocabulary of kind {self.kind} has {BYTES} byte "
                f"tokens, special tokens and learned tokens: use --size {least + 1} to {2**24}"
            )


@config()
class VocabMergeConfig:
    """Append the tokens of another tokenizer to a tokenizer, whose own ids, scores and merges do
    not change. Before the result appears at --to, it is opened with transformers and compared with
    sentencepiece.

        dolmen vocab merge path/to/model zh-tokens --to merged
    """

    base: Annotated[Name, Mark.POSITIONAL]
    """Tokenizer that is extended: its folder or tokenizer.model, or a model that has one."""
    new: Annotated[Name, Mark.POSITIONAL]
    """Tokenizer whose tokens are appended, except those that the base has."""
    to: LocalName
    """Folder to write; it must be empty or not exist."""
    data: VocabText = VocabText()
    """Held-out text; characters and bytes per token are reported for it."""


@config()
class VocabExtendConfig:
    """Add rows for the new tokens of a merged tokenizer to a model's embedding and head, and write
    the model as a transformers directory. Logits of old tokens do not change.

        dolmen vocab extend path/to/model --tokenizer merged --to extended
    """

    model: Annotated[Name, Mark.POSITIONAL]
    """A transformers directory or hub id, a run or a checkpoint of one, a Megatron checkpoint."""
    tokenizer: Name
    """Folder of the merged tokenizer (dolmen vocab merge); its first tokens are the model's."""
    to: LocalName
    """Folder to write; it must be empty or not exist."""
    init: Literal["mean", "random", "zero"] = "mean"
    """Initial values of new rows. mean: the mean of the rows of the old tokens into which the old
    tokenizer splits the new one. random: as in a new model. zero.
    """
    seed: Seed = 0
    """Seed of random rows."""
    data: VocabText = VocabText()
    """Held-out text; loss per byte and characters per token before and after are reported for it.
    """
    window: int | None = None
    """Maximum tokens of one forward for the loss. Default: that of `dolmen evaluate`."""
