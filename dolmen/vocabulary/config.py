"""What `dolmen vocab` may be told. Without torch."""

from dataclasses import dataclass
from typing import Literal

from dolmen.core.messages import counted
from dolmen.core.paths import refuse_empty

BYTES, FRAME = 256, 3  # pieces of bytes; unknown, beginning and end of a text


@dataclass(frozen=True)
class VocabText:
    """Text, from any source that training takes."""

    path: tuple[str, ...] = ()
    """The text: files, folders and globs of .txt, .md, .py, .jsonl, .json and .parquet, packed as
    .gz or .zst too, and ids of the Hugging Face hub; as `dolmen train` takes them.
    """
    text_field: str = "text"
    """Field (.jsonl, .json) or column (.parquet, hub) that holds the text."""

    def __post_init__(self):
        refuse_empty("data.path", *self.path)


@dataclass(frozen=True)
class VocabTrainConfig:
    """A vocabulary that is learned from text."""

    size: int
    """Tokens, special ones and single bytes among them."""
    kind: Literal["unigram", "bpe", "byte-bpe"]
    """unigram and bpe: of sentencepiece, with a piece for each byte for characters that have none.
    byte-bpe: of `tokenizers`, over bytes, as GPT-2's and Llama 3's.
    """
    to: str
    """Folder to write; it must be empty or not exist."""
    data: VocabText = VocabText()
    max_bytes: int = 500_000_000
    """Most bytes of text that are learned from: of more, so many are drawn at random, from all of
    it. It bounds the memory that is used.
    """
    seed: int = 0
    """What is drawn depends on it alone."""

    def __post_init__(self):
        refuse_empty("to", self.to)
        least = BYTES + (1 if self.kind == "byte-bpe" else FRAME + 1)
        if not least < self.size <= 2**24:
            raise ValueError(
                f"--size is {self.size:,}: a vocabulary of kind {self.kind} has {BYTES} bytes, its "
                f"special tokens, and what it learns: use --size {least + 1} to {2**24}"
            )
        if self.max_bytes < 1000:
            raise ValueError(
                f"--max-bytes is {counted(self.max_bytes, 'byte')}: it must be at least 1,000"
            )
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"--seed is {self.seed}: it must be from 0 to {2**31 - 1:,}")


@dataclass(frozen=True)
class VocabMergeConfig:
    """A tokenizer, and another one whose tokens it is given."""

    base: str
    """The tokenizer that stays as it is: its folder or tokenizer.model, or a model that has one."""
    new: str
    """The one whose tokens come behind, where the base has them not."""
    to: str
    """Folder to write; it must be empty or not exist."""
    data: VocabText = VocabText()
    """Held-out text, of which characters and bytes per token are told."""

    def __post_init__(self):
        for name in ("base", "new", "to"):
            refuse_empty(name, vars(self)[name])


@dataclass(frozen=True)
class VocabExtendConfig:
    """A model, and a tokenizer that has more tokens than its own."""

    model: str
    """A transformers directory or hub id, a run or a checkpoint of one, a Megatron checkpoint."""
    tokenizer: str
    """Folder of the tokenizer, as `dolmen vocab merge` writes it: it begins with the model's."""
    to: str
    """Folder to write; it must be empty or not exist."""
    init: Literal["mean", "random", "zero"] = "mean"
    """New rows of embedding and head. mean: of the rows of the pieces that the old tokenizer has
    for the token; random: as a new model's; zero.
    """
    seed: int = 0
    """What is random depends on it alone."""
    data: VocabText = VocabText()
    """Held-out text, of which the loss per byte and characters per token are told, before and
    after.
    """
    window: int | None = None
    """Tokens that are read at once for the loss. Default: as `dolmen evaluate`."""

    def __post_init__(self):
        for name in ("model", "tokenizer", "to"):
            refuse_empty(name, vars(self)[name])
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed is {self.seed}: it must be from 0 to {2**63 - 1:,}")
