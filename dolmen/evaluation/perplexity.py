"""How well a model predicts a text, over all of it. The documents of a corpus become rows of
tokens: each whole, or in windows where it is longer.

    document    a b c d e f g      windows of 4, by themselves      windows of 4, by steps of 2
                                   a[b c d] e[f g]                  a[b c d]  c d[e f]  e f[g]

In brackets: what is counted. By themselves the first token of each window is foretold by nothing,
and is not counted; by steps of `stride` every token is but the first of the document, and each sees
window - stride tokens or more. No special tokens are added, and none sees another document.

rows.py sums the loss of each row, under any layout.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from rich.progress import MofNCompleteColumn
from rich.table import Table

from dolmen.conversion.source import Source, open_alike, open_source, tokenizer_folder
from dolmen.core.log import bar
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.core.messages import plural
from dolmen.data import inputs
from dolmen.data.bpe import PREFIX
from dolmen.data.config import DataConfig, TextConfig
from dolmen.data.corpora import open_corpus
from dolmen.data.corpus import Corpus
from dolmen.data.tokenizer import PreTrainedTokenizer, check_vocabulary, load_tokenizer
from dolmen.evaluation import rows
from dolmen.evaluation.config import EvaluateConfig
from dolmen.evaluation.rows import Rows
from dolmen.model.decoder import Decoder
from dolmen.model.spec import ModelSpec
from dolmen.optim.optimizer import DTYPES
from dolmen.parallel import pipeline
from dolmen.parallel.schedule import Schedule
from dolmen.parallel.simulation import make_schedule
from dolmen.serving import engine


@dataclass(frozen=True, eq=False)
class Windows:
    """Those of a corpus."""

    rows: Rows
    documents: int
    bytes: int | None
    """Of all text, exactly; None where tokens alone are known."""
    window: int
    stride: int

    @property
    def tokens(self) -> int:
        """Tokens that are counted."""
        return self.rows.counted

    @property
    def words(self) -> str:
        """How documents are read."""
        if self.stride == self.window:
            return f"documents whole up to {self.window:,} tokens, the first of each is not counted"
        return (
            f"documents in windows of {self.window:,} tokens by steps of {self.stride:,}, the "
            "first token of a document is not counted"
        )


def windows(corpus: Corpus, end_of_text: int, window: int, stride: int) -> Windows:
    """Of at most `window` tokens, the next `stride` behind the one before; the ends of text that
    close documents are left out. Raises ValueError where no token is counted.
    """
    starts = corpus.offsets[:-1]
    lengths = np.diff(corpus.offsets) - (corpus.last_tokens == end_of_text)
    over = np.maximum(lengths - window, 0)
    counts = 1 + -(-over // stride)
    of = np.repeat(np.arange(len(lengths)), counts)  # document of each window
    index = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)  # and its own
    begin = index * stride
    stop = np.minimum(begin + window, lengths[of])
    first = np.where(index == 0, 1, np.maximum(begin - stride + window, begin + 1))
    kept = stop > first
    if not kept.any():
        raise ValueError(
            f"--data.path {corpus.name}: no document has two tokens, and the first of each is not "
            "counted: give longer documents"
        )
    begin, stop, first, base = begin[kept], stop[kept], first[kept], starts[of[kept]]
    stream = corpus.stream(starts, corpus.offsets[1:])

    def read(row: int) -> np.ndarray:
        return stream.read(int(base[row] + begin[row]), int(stop[row] - begin[row]))

    rows = Rows(stop - begin, first - begin, read)
    size = None if corpus.byte_count is None else int(corpus.documents["bytes"].sum())
    return Windows(rows, corpus.document_count, size, window, stride)


@dataclass(frozen=True)
class Evaluation:
    """Over all of a text."""

    loss: float
    """Nats per counted token."""
    perplexity: float
    """exp(loss); infinite where a float cannot hold it."""
    bits_per_byte: float | None
    """Sum of the losses in bits over the bytes of the text, those of tokens that are not counted
    among them: it compares models of different tokenizers. None where tokens alone are known.
    """
    accuracy: float
    """Share of the counted tokens that are the likeliest of all where they stand."""
    tokens: int
    """Tokens counted."""
    bytes: int | None
    """Of the text, exactly; None where tokens alone are known."""
    documents: int
    window: int
    """Tokens that are read at once, at most."""
    stride: int
    """Tokens from the beginning of a window to that of the next; `window`: they do not overlap."""
    read: str
    """How documents are read, in words."""

    @classmethod
    def of(cls, found: rows.Foretold, text: Windows) -> "Evaluation":
        """From the sums over all of `text`."""
        nats = -math.fsum(found.log_likelihoods.tolist())
        loss = nats / text.tokens
        return cls(
            loss,
            math.exp(loss) if loss < 709 else math.inf,
            None if text.bytes is None else nats / math.log(2) / text.bytes,
            int(found.likeliest.sum()) / text.tokens,
            text.tokens,
            text.bytes,
            text.documents,
            text.window,
            text.stride,
            text.words,
        )

    def as_dict(self) -> dict[str, Any]:
        """What --json writes; a perplexity that no float holds is null."""
        finite = self.perplexity if math.isfinite(self.perplexity) else None
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        return told | {"perplexity": finite}

    def table(self, title: str) -> Table:
        """For a rich console; within 80 columns."""
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold", max_width=60)
        table.add_row("model", title)
        table.add_row("loss", f"{self.loss:.6f} nats per token")
        table.add_row("perplexity", f"{self.perplexity:.6g}")
        if self.bits_per_byte is not None:
            table.add_row("bits per byte", f"{self.bits_per_byte:.6f}")
        table.add_row("accuracy", f"{self.accuracy:.4%} of the tokens are the likeliest")
        table.add_row("tokens", f"{self.tokens:,}")
        if self.bytes is not None:
            table.add_row("bytes", f"{self.bytes:,}")
        table.add_row("documents", f"{self.documents:,}")
        table.add_row("read", self.read)
        return table


@dataclass(frozen=True)
class Loaded:
    """A model on the processes that compute with it, and what it does there."""

    model: Decoder
    mesh: Mesh
    schedule: Schedule | None


def load(asked: EvaluateConfig, mesh: Mesh = SINGLE) -> Loaded:
    """The model that is asked for, on the axes of `mesh`. Raises ValueError for what cannot be
    loaded, and for a model that foretells no next token.
    """
    source = open_alike(asked.source, mesh)
    rows.check_foretells(source.tree)
    schedule = None
    if mesh.pp.size > 1:
        schedule = make_schedule("1f1b", mesh.pp.size, mesh.pp.size)
        pipeline.connect(schedule, mesh)
    dtype = DTYPES[asked.dtype] if asked.dtype else None
    return Loaded(engine.load_decoder(source, mesh, dtype, schedule), mesh, schedule)


def tokenizer_of(asked: EvaluateConfig, mesh: Mesh = SINGLE) -> PreTrainedTokenizer:
    """The tokenizer that is asked for, or the model's own. Raises ValueError where there is none,
    or it is larger than the model's vocabulary.
    """
    source = open_alike(asked.source, mesh)
    named = asked.data.tokenizer
    option = "" if named is None else "--data.tokenizer"
    tokenizer = load_tokenizer(named or tokenizer_folder(source), option=option)
    check_vocabulary(tokenizer, source.tree.vocab_size, trained=True)
    return tokenizer


def prepared(asked: EvaluateConfig, progress: bool = True, verify: bool = True) -> Windows:
    """The text that is asked for, as `open_text`."""
    source = open_source(asked.source)
    return open_text(source, asked.data, asked.window, asked.stride, progress, verify)


def open_text(
    source: Source,
    config: TextConfig,
    window: int | None = None,
    stride: int | None = None,
    progress: bool = True,
    verify: bool = True,
) -> Windows:
    """The text of `config` as tokens of the model of `source`; from the cache, compared with its
    digests (`verify`), or else made now. Raises ValueError, KeyError or OSError, before all text is
    read, for what does not fit: no text, no tokenizer, one that is larger than the model's
    vocabulary, windows over its positions.
    """
    model = source.tree
    rows.check_foretells(model)
    window, stride = window_of(model, window, stride)
    if (config.tokenizer or "").startswith(PREFIX):
        raise ValueError(
            f"--data.tokenizer {config.tokenizer}: a model is evaluated with the tokenizer that it "
            "was trained with: give its folder or hub id"
        )
    own = {field.name: getattr(config, field.name) for field in fields(TextConfig)}
    data = DataConfig(**own, validation_fraction=0)
    # a text shorter than a window is a text
    found = inputs.check_inputs(
        data, tokenizer_folder(source), None, sequence_length=0, progress=progress
    )
    check_vocabulary(found.tokenizer, model.vocab_size, trained=True)
    if found.sources[0].weight is not None:
        raise ValueError(
            "--data.path: weights make a mixture to train on, and all of a text is evaluated: "
            "leave them out"
        )
    (text,) = found.sources
    corpus = open_corpus(text, data, found, progress, verify=verify)
    return windows(corpus, found.end_of_text, window, stride)


def window_of(model: ModelSpec, window: int | None, stride: int | None) -> tuple[int, int]:
    """Tokens that are read at once: those asked for, else all that the model takes; and those from
    a window to the next, which else do not overlap. Raises ValueError for what is out of range.
    """
    most = model.max_position_embeddings
    window = most if window is None else window
    if not 2 <= window <= most:
        raise ValueError(
            f"window is {window}, the model's max_position_embeddings {most}: use --window 2 to "
            f"{most}"
        )
    stride = window if stride is None else stride
    if not 1 <= stride <= window:
        raise ValueError(
            f"stride is {stride}, the window {window}: use --stride 1 to {window}, which is that "
            "of windows that do not overlap"
        )
    return window, stride


def measured(
    asked: EvaluateConfig, text: Windows, mesh: Mesh = SINGLE, progress: bool = True
) -> Evaluation:
    """`evaluate` of the source that is asked for, the same on every rank of `mesh`."""
    return evaluate(load(asked, mesh), text, progress)


def evaluate(loaded: Loaded, text: Windows, progress: bool = True) -> Evaluation:
    """What a model makes of `text`. Every rank calls it and gets the same. Raises ValueError for a
    loss that is not finite.
    """
    mesh = loaded.mesh
    title = f"evaluating {text.tokens:,} tokens in {plural(len(text.rows.lengths), 'window')}"
    with bar(title, text.tokens, progress and mesh.first, MofNCompleteColumn()) as reach:
        found = rows.foretold(loaded.model, text.rows, mesh, loaded.schedule, reach)
    evaluation = Evaluation.of(found, text)
    if not math.isfinite(evaluation.loss):
        raise ValueError(
            f"the loss is {evaluation.loss}: the model has diverged, or needs --dtype float32"
        )
    return evaluation
