"""Options of `--data`: the text to train on or to evaluate, and how it is tokenised."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dolmen.core.config import LocalName, Name, Positive, config
from dolmen.core.filesystem import expand

ChatRows = Literal["chats", "pairs", "completions"]


@config("data")
class TokenConfig:
    """Text and its tokenisation."""

    path: tuple[Name, ...] = ()
    """The text: files, folders and globs of .txt, .md, .py and other UTF-8 text (a file is a
    document), .jsonl, .json and .parquet (a row is a document), all but .parquet also compressed as
    .gz or .zst; a Megatron .bin file with its .idx in the same folder, which is already tokenised;
    ids of the Hugging Face hub (`org/name` or `org/name:config`), or `python-standard-library`;
    URLs of files, folders and globs in object storage (`s3://bucket/text`), which are downloaded.
    Weights make a mixture to train on: `0.7:PATH 0.3:PATH`. Without weights, all entries are one
    corpus. In a folder, hidden files and files written by dolmen are skipped.
    """
    tokenizer: Name | None = None
    """Folder or hub id of a `transformers` tokenizer."""
    end_of_text: str | None = None
    """End-of-document token, for a tokenizer that defines none."""
    text_field: str = "text"
    """Field (.jsonl, .json) or column (.parquet, hub) that holds the text."""
    cache: LocalName | None = None
    """Folder of the token cache, which is built once and reused until the data or the tokenizer
    changes. Default: ~/.cache/dolmen. Folders in it may be deleted at any time and are rebuilt when
    needed.
    """
    workers: Positive | None = None
    """Threads that tokenise. Default: one per core."""

    @property
    def cache_folder(self) -> Path:
        """Folder of the token cache, "~" expanded."""
        return expand(self.cache or "~/.cache/dolmen")


@config("data")
class TextConfig(TokenConfig):
    """Text that a model reads."""

    tokenizer: Name | None = None
    """Folder or hub id of a `transformers` tokenizer. Default: the model's own."""


@config()
class TokenizeConfig:
    """Write text as a data set of Megatron-LM: PREFIX.bin, the tokens of each document with an
    end-of-document token, and PREFIX.idx, the document boundaries. Megatron-LM and `dolmen train
    --data.path` read it.
    """

    to: LocalName
    """PREFIX of the two files; neither may exist."""
    data: TokenConfig = TokenConfig()


@config("data")
class DataConfig(TextConfig):
    """Text to train on, and text to validate on."""

    tokenizer: Name | None = None
    """Folder or hub id of a tokenizer, or bpe:N for a BPE of N tokens trained on the data. A
    folder is one that `transformers` reads; the BPE is byte-level. Default: that of --init.
    """
    document_mask: bool = False
    """Attention does not cross document boundaries within a window."""
    validation: Name | None = None
    """Text to validate on, given like --data.path; documents of it are not trained on. Default: a
    fraction of the documents is held out.
    """
    validation_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.03
    """Share of the documents in the validation split. It has no effect with --data.validation. They
    are chosen by a hash of their text: neither the seed, the tokenizer nor the order of the files
    matters, and copies in all sources are held out together. Of a single document, the end is held
    out.
    """
    order: Literal["dolmen", "megatron"] = "dolmen"
    """Order in which samples are read: dolmen's, by windows, or that of Megatron-LM, which depends
    on --train.steps and splits off validation data by --data.split.
    """
    masked_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Masked language models (BERT, RoBERTa): fraction of the tokens of a sequence that are masked,
    in whole words.
    """
    rows: Literal["text", "chats", "pairs", "completions", "prompts"] = "text"
    """Content of the rows of files and of the hub. chats: `messages`, ShareGPT's `conversations` or
    Alpaca's `instruction` and `output`, detected by these fields; an optional `weight` multiplies
    the loss of a row. Whole chats are packed into sequences, without attention between them. pairs:
    `prompt` with two completions, `chosen` and `rejected`, as text or messages, and an optional
    `margin`. completions: `prompt`, `completion` and `label` (true if desirable), or pairs.
    prompts: `prompt` or `messages`, which the model completes, and the fields that its reward
    needs.
    """
    template: Name | None = None
    """Chat template: a Jinja file, chatml or alpaca. Default: the tokenizer's own chat template."""
    masking_strategy: Literal["assistant", "last", "all"] = "assistant"
    """Turns of a chat that are trained on. assistant: all of the assistant's. last: its
    last. all: everybody's.
    """
    packing: bool = True
    """Pack several chats into a sequence where they fit, in place of one per sequence."""
    max_row_bytes: Positive = 4 * 2**20
    """Maximum bytes of a row of chats, pairs, completions or prompts; tokenising a row of 4 MiB
    takes 12 s and 700 MB of memory. Rows of text are read in pieces and have no limit.
    """
    split: str | None = None
    """Ratio of training, validation and test part of each data set, where --data.order is megatron
    and --data.validation is unset. Default: 969,30,1.
    """

    def __post_init__(self):
        """Raise ValueError for options that contradict each other: those of chats, of Megatron's
        order, and of the validation split.
        """
        if self.rows != "text" and self.order != "dolmen":
            raise ValueError(
                f"data.order {self.order} orders windows of text, but data.rows is {self.rows}: "
                "leave one of the two out"
            )
        fields_ = (self.template, self.masking_strategy, self.packing, self.max_row_bytes)
        if self.rows == "text" and fields_ != (None, "assistant", True, DataConfig.max_row_bytes):
            raise ValueError(
                "data.template, masking-strategy, packing and max-row-bytes are for chats: use "
                "--data.rows "
                "chats, or leave them out"
            )
        if self.order == "dolmen" and self.split is not None:
            raise ValueError(
                f"data.split {self.split} is for --data.order megatron: add that, or use "
                "--data.validation-fraction"
            )
        if self.order == "megatron" and self.validation_fraction != DataConfig.validation_fraction:
            raise ValueError(
                f"data.validation-fraction ({self.validation_fraction}) does not apply to "
                "--data.order megatron, which uses --data.split: leave one of the two out"
            )
        if self.split is not None and self.validation is not None:
            raise ValueError(
                f"data.split {self.split} splits off validation data, but --data.validation is "
                "given too: leave one of the two out"
            )

    @property
    def shares(self) -> str:
        """Training, validation and test shares of Megatron's order; with --data.validation all is
        trained on.
        """
        if self.validation is not None:
            return "1,0,0"
        return "969,30,1" if self.split is None else self.split
