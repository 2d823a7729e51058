"""Options of `dolmen vocab`. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from dolmen.core.config import Mark, Name, Seed, config

BYTES, FRAME = 256, 3  # pieces of bytes; unknown, beginning and end of a text


@config("data")
class VocabText:
    """Text, from any source that training takes."""

    path: tuple[Name, ...] = ()
    """The text: files, folders and globs of .txt, .md, .py, .jsonl, .json and .parquet, packed as
    .gz or .zst too, and ids of the Hugging Face hub; as `dolmen train` takes them.
    """
    text_field: str = "text"
    """Field (.jsonl, .json) or column (.parquet, hub) that holds the text."""


@config()
class VocabTrainConfig:
    """Learn a vocabulary from text, as a folder that transformers opens: with a tokenizer.json,
    and of unigram and bpe tokenizer.model. Any amount of text is read once.

        dolmen vocab train --data.path zh/ --size 20000 --kind bpe --to zh-tokens
    """

    size: int
    """Tokens, special ones and single bytes among them."""
    kind: Literal["unigram", "bpe", "byte-bpe"]
    """unigram and bpe: of sentencepiece, with a piece for each byte for characters that have none.
    byte-bpe: of `tokenizers`, over bytes, as GPT-2's and Llama 3's.
    """
    to: Name
    """Folder to write; it must be empty or not exist."""
    data: VocabText = VocabText()
    max_bytes: Annotated[int, Field(ge=1000)] = 500_000_000
    """Most bytes of text that are learned from: of more, so many are drawn at random, from all of
    it. It bounds the memory that is used.
    """
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the sample of text."""

    def __post_init__(self):
        least = BYTES + (1 if self.kind == "byte-bpe" else FRAME + 1)
        if not least < self.size <= 2**24:
            raise ValueError(
                f"--size is {self.size:,}: a vocabulary of kind {self.kind} has {BYTES} bytes, its "
                f"special tokens, and what it learns: use --size {least + 1} to {2**24}"
            )


@config()
class VocabMergeConfig:
    """Give a tokenizer the tokens of another one, behind its own, whose ids, scores and merges stay
    as they are. What is written is opened by transformers, and beside sentencepiece, before it
    stands there.

        dolmen vocab merge path/to/model zh-tokens --to merged
    """

    base: Annotated[Name, Mark.POSITIONAL]
    """The tokenizer that stays as it is: its folder or tokenizer.model, or a model that has one."""
    new: Annotated[Name, Mark.POSITIONAL]
    """The one whose tokens come behind, where the base has them not."""
    to: Name
    """Folder to write; it must be empty or not exist."""
    data: VocabText = VocabText()
    """Held-out text, of which characters and bytes per token are told."""


@config()
class VocabExtendConfig:
    """Give a model rows for the new tokens of a merged tokenizer, and write it as a transformers
    directory. Its logits of old tokens stay as they are.

        dolmen vocab extend path/to/model --tokenizer merged --to extended
    """

    model: Annotated[Name, Mark.POSITIONAL]
    """A transformers directory or hub id, a run or a checkpoint of one, a Megatron checkpoint."""
    tokenizer: Name
    """Folder of the tokenizer, as `dolmen vocab merge` writes it: it begins with the model's."""
    to: Name
    """Folder to write; it must be empty or not exist."""
    init: Literal["mean", "random", "zero"] = "mean"
    """New rows of embedding and head. mean: of the rows of the pieces that the old tokenizer has
    for the token; random: as a new model's; zero.
    """
    seed: Seed = 0
    """Seed of random rows."""
    data: VocabText = VocabText()
    """Held-out text, of which the loss per byte and characters per token are told, before and
    after.
    """
    window: int | None = None
    """Tokens that are read at once for the loss. Default: as `dolmen evaluate`."""
