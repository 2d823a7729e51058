"""Measures how well a model predicts tokens, under any layout: perplexity and bits per byte of a
corpus, and the log-likelihoods that lm_eval's tasks need.

The documents of a corpus become rows of tokens: each document whole, or in windows where it is
longer.

    document    a b c d e f g      windows of 4                     windows of 4, stride 2
                                   a[b c d] e[f g]                  a[b c d]  c d[e f]  e f[g]

In brackets: the tokens that are counted. Without overlap the first token of each window is
predicted from nothing and is not counted; with a stride every token but the first of the document
is counted, and each behind the first window sees window - stride tokens or more. No special tokens
are added, and no token sees another document.

    row       a b c d e f          tokens of one text
    input     a b c d e            without the last, which predicts nothing that is counted
    counted           d e f        those from `first` on (3 here), each predicted from all before it

Rows are read longest first, rows of about equal length together, padded at their ends, which no
token before them sees; each rank of dp takes its share of every batch. A row's sums are over its
own tokens, so neither the batch nor the layout decides them, except for the order of summation.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int64
from rich.progress import MofNCompleteColumn
from rich.table import Table
from torch import Tensor

from dolmen.conversion.source import ModelSource, tokenizer_folder
from dolmen.core import collectives, device
from dolmen.core.log import bar
from dolmen.core.mesh import Mesh
from dolmen.core.messages import plural
from dolmen.data import inputs
from dolmen.data.batch import Batch
from dolmen.data.bpe import PREFIX
from dolmen.data.config import DataConfig, TextConfig
from dolmen.data.corpus import Corpus
from dolmen.data.inputs import open_corpus
from dolmen.data.sources import single_source
from dolmen.data.tokenizer import check_vocabulary
from dolmen.evaluation.model import Loaded, check_predicts_next_token
from dolmen.model.decoder import Decoder
from dolmen.model.spec import ModelSpec
from dolmen.objectives import forward
from dolmen.ops.loss import IGNORED
from dolmen.ops.rope import PositionIds
from dolmen.parallel import pipeline
from dolmen.parallel.data import inference
from dolmen.parallel.schedule import Schedule
from dolmen.parallel.simulation import make_schedule


@dataclass(frozen=True, eq=False)
class ScoringRows:
    """Token sequences to evaluate. `read(i)` returns row i, int64 [lengths[i]], of two tokens or
    more.
    """

    lengths: Int64[np.ndarray, " rows"]
    firsts: Int64[np.ndarray, " rows"]
    """Index of the first counted token of each row, at least 1."""
    read: Callable[[int], np.ndarray]

    @property
    def counted(self) -> int:
        """Number of counted (predicted) tokens, over all rows."""
        return int((self.lengths - self.firsts).sum())


@dataclass(frozen=True, eq=False)
class Windows:
    """A corpus as rows, cut into windows of `window` tokens, `stride` apart."""

    rows: ScoringRows
    documents: int
    bytes: int | None
    """Bytes of all text, exactly; None where only tokens are known."""
    window: int
    stride: int

    @property
    def tokens(self) -> int:
        """Number of counted (predicted) tokens, over all windows."""
        return self.rows.counted

    @property
    def words(self) -> str:
        """Phrase that says how documents are cut into windows, and which tokens are not counted,
        for the report.
        """
        if self.stride == self.window:
            return (
                f"documents in windows of up to {self.window:,} tokens; the first token of each "
                "window is not counted"
            )
        return (
            f"documents in windows of {self.window:,} tokens with stride {self.stride:,}; the "
            "first token of each document is not counted"
        )


def windows(corpus: Corpus, end_of_text: int, window: int, stride: int) -> Windows:
    """Cut each document of a tokenised corpus into windows of at most `window` tokens, `stride`
    apart. Each token but the first of a document (where windows do not overlap: of a window) is
    counted once. EOS tokens (`end_of_text`) at the ends of documents are left out. Raises
    ValueError where no token would be counted.
    """
    starts = corpus.offsets[:-1]
    lengths = np.diff(corpus.offsets) - (corpus.last_tokens == end_of_text)
    # tokens behind the first window
    over = np.maximum(lengths - window, 0)
    # windows of each document: ceil((length - window) / stride) more than one
    counts = 1 + -(-over // stride)
    document = np.repeat(np.arange(len(lengths)), counts)  # document of each window
    # number of each window within its document
    index = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = index * stride
    stop = np.minimum(begin + window, lengths[document])
    # the first token that the window before has not counted
    first = np.where(index == 0, 1, np.maximum(begin - stride + window, begin + 1))
    # documents of one token have nothing to predict
    nonempty = stop > first
    if not nonempty.any():
        raise ValueError(
            f"--data.path {corpus.name}: all documents are shorter than two tokens, so there is "
            "nothing to predict: give longer documents"
        )
    begin, stop, first, base = (
        begin[nonempty],
        stop[nonempty],
        first[nonempty],
        starts[document[nonempty]],
    )
    stream = corpus.stream(starts, corpus.offsets[1:])

    def read(row: int) -> np.ndarray:
        """Return the token ids of window `row`, read from the corpus."""
        return stream.read(int(base[row] + begin[row]), int(stop[row] - begin[row]))

    rows = ScoringRows(stop - begin, first - begin, read)
    size = None if corpus.byte_count is None else int(corpus.documents["bytes"].sum())
    return Windows(rows, corpus.document_count, size, window, stride)


TOKENS_AT_ONCE = 1 << 12  # that a rank reads in one forward: bounds activations


class RowScores(NamedTuple):
    """Scores of each row, over its counted tokens."""

    log_likelihoods: Float64[np.ndarray, " rows"]
    """Sum of their log-probabilities, in nats."""
    correct: Int64[np.ndarray, " rows"]
    """Number of counted tokens that are the model's argmax."""


class _RowGroup(NamedTuple):
    """Rows that one forward reads."""

    rows: Int64[np.ndarray, " group"]
    length: int
    """Input tokens of the longest row."""
    padded: int
    """`length`, padded to a multiple that cp and sequence parallelism divide."""
    rows_per_rank: int
    """Rows per dp rank, a multiple of the pipeline's microbatches."""


def score_rows(
    model: Decoder,
    rows: ScoringRows,
    mesh: Mesh,
    schedule: Schedule | None = None,
    reach: Callable[[int], None] = lambda done: None,
) -> RowScores:
    """Return for each row the log-probability of its counted tokens, and how many are the model's
    argmax. Collective over `mesh`, with the same rows and result on every rank. `schedule`: for a
    pipeline; `reach(counted tokens so far)` is called to report progress. Raises ValueError for a
    model that does not predict a next token.
    """
    check_predicts_next_token(model.spec)
    order = pipeline.forward_only(schedule or make_schedule("1f1b", 1, 1))
    sums = torch.zeros(2, len(rows.lengths), dtype=torch.float64, device=mesh.device)
    done = 0
    # a compiled block would be compiled again for every length
    with inference(model), torch.compiler.set_stance("force_eager"):
        for group in _groups(model, rows, mesh, order.micros):
            local_rows = group.rows[
                mesh.dp.rank * group.rows_per_rank : (mesh.dp.rank + 1) * group.rows_per_rank
            ]
            batch = _batch(model, rows, local_rows, group)
            scores = forward.forward(model, batch, mesh, order, _score_sequences)
            if scores and len(local_rows):
                sums[:, torch.from_numpy(local_rows)] = torch.cat(scores, 1)[:, : len(local_rows)]
            done += int((rows.lengths - rows.firsts)[group.rows].sum())
            reach(done)
    # each row is on one rank of dp, each of its tokens on one of cp, and its end on one of pp
    # tp ranks hold equal sums: each is added tp times
    totals = collectives.reduce_scalar(sums, mesh.world) / mesh.tp.size
    likelihoods, correct = np.array(device.read_back(totals), np.float64).reshape(2, -1)
    return RowScores(likelihoods, correct.astype(np.int64))


def _groups(model: Decoder, rows: ScoringRows, mesh: Mesh, micros: int) -> Iterator[_RowGroup]:
    """Yield groups of rows that one forward reads, longest first, about 4,096 tokens per rank, with
    the number of rows rounded up to a multiple of the microbatches; the same on every rank. If
    positions depend on the sequence's length (dynamic rope scaling), a group has rows of one length
    only.
    """
    lengths = rows.lengths - 1
    # longest first: the largest forward comes first, and fails early if it does not fit
    order = np.argsort(-lengths, kind="stable")
    multiple = model.split.cp.multiple * (mesh.tp.size if model.tp.sequence else 1)
    at = 0
    while at < len(order):
        length = int(lengths[order[at]])
        padded = -(-length // multiple) * multiple
        left = len(order) - at
        if model.spec.by_length:
            left = int(np.searchsorted(-lengths[order[at:]], -length, side="right"))
        most = min(TOKENS_AT_ONCE // padded, -(-left // mesh.dp.size))
        # a multiple of the pipeline's microbatches
        batch_size = -(-max(1, most) // micros) * micros
        group = order[at : at + min(batch_size * mesh.dp.size, left)]
        yield _RowGroup(group, length, padded, batch_size)
        at += len(group)


def _batch(model: Decoder, rows: ScoringRows, local_rows: np.ndarray, group: _RowGroup) -> Batch:
    """Return a batch of this dp rank's `local_rows`, padded to the group's length, with empty rows
    up to `group.rows_per_rank`; only counted tokens have labels.
    """
    tokens = np.zeros((group.rows_per_rank, group.padded), np.int64)
    labels = np.full(tokens.shape, IGNORED, np.int64)
    for place, row in enumerate(local_rows):
        text, first = rows.read(int(row)), int(rows.firsts[row])
        tokens[place, : len(text) - 1] = text[:-1]
        # the label of token i is token i + 1
        labels[place, first - 1 : len(text) - 1] = text[first:]
    batch = Batch(torch.from_numpy(tokens), torch.from_numpy(labels))
    if group.padded > group.length and model.spec.blanks is None:
        # padding repeats the last position, which every table has
        index = torch.arange(group.padded).clamp(max=group.length - 1)
        ids = index.expand(len(tokens), 1, -1)
        batch = replace(batch, positions=PositionIds.from_ids(ids))
    return batch.read_by(model.spec)


def _score_sequences(hidden: Tensor, head: Any, part: Batch) -> Float64[Tensor, "2 sequences"]:
    """Return, for each sequence of a microbatch, over this cp rank's tokens: the sum of the labels'
    log-probabilities, and the number of labels that are the argmax. Called as the loss of a
    forward.
    """
    log_probs, argmax = head.log_probabilities_and_argmax(hidden, part.labels)
    right = argmax == head.local_tokens(part.labels)
    return torch.stack((log_probs.double().sum(1), right.double().sum(1)))


@dataclass(frozen=True)
class Evaluation:
    """Result of evaluating a model on a text."""

    loss: float
    """Nats per counted token."""
    perplexity: float
    """exp(loss); infinite where a float cannot hold it."""
    bits_per_byte: float | None
    """Sum of the losses in bits over all bytes of the text, uncounted tokens included, so that
    models with different tokenizers compare. None where only tokens are known.
    """
    accuracy: float
    """Share of the counted tokens that are the model's argmax."""
    tokens: int
    """Tokens counted."""
    bytes: int | None
    """Bytes of the text, exactly; None where only tokens are known."""
    documents: int
    window: int
    """Most tokens of a window."""
    stride: int
    """Tokens between the beginnings of two windows; equal to `window` without overlap."""
    read: str
    """How documents are read, in words."""

    @classmethod
    def from_scores(cls, scores: RowScores, text: Windows) -> "Evaluation":
        """Return the evaluation (loss, perplexity, bits per byte, accuracy) from the scores of all
        rows of `text`.
        """
        # exact sum: independent of the order of rows
        nats = -math.fsum(scores.log_likelihoods.tolist())
        loss = nats / text.tokens
        return cls(
            loss,
            math.exp(loss) if loss < 709 else math.inf,
            None if text.bytes is None else nats / math.log(2) / text.bytes,
            int(scores.correct.sum()) / text.tokens,
            text.tokens,
            text.bytes,
            text.documents,
            text.window,
            text.stride,
            text.words,
        )

    def json_values(self) -> dict[str, Any]:
        """Return the fields as plain values for --json; an infinite perplexity is None."""
        finite = self.perplexity if math.isfinite(self.perplexity) else None
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"perplexity": finite}

    def table(self, title: str) -> Table:
        """Return the evaluation as a table for a rich console, within 80 columns; `title` names the
        model.
        """
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold", max_width=60)
        table.add_row("model", title)
        table.add_row("loss", f"{self.loss:.6f} nats per token")
        table.add_row("perplexity", f"{self.perplexity:.6g}")
        if self.bits_per_byte is not None:
            table.add_row("bits per byte", f"{self.bits_per_byte:.6f}")
        table.add_row("accuracy", f"{self.accuracy:.4%} of tokens predicted (top-1)")
        table.add_row("tokens", f"{self.tokens:,}")
        if self.bytes is not None:
            table.add_row("bytes", f"{self.bytes:,}")
        table.add_row("documents", f"{self.documents:,}")
        table.add_row("read", self.read)
        return table


def open_text(
    source: ModelSource,
    config: TextConfig,
    window: int | None = None,
    stride: int | None = None,
    progress: bool = True,
    verify: bool = True,
) -> Windows:
    """Tokenise the text of `config` with its tokenizer (default: the source's) and cut it into
    windows; read from the cache (`verify`: compare its digests) if it was tokenised before. Raises
    ValueError, KeyError or OSError for a missing text or tokenizer, a tokenizer larger than the
    model's vocabulary, or windows longer than its positions.
    """
    model = source.spec
    check_predicts_next_token(model)
    window, stride = window_of(model, window, stride)
    if (config.tokenizer or "").startswith(PREFIX):
        raise ValueError(
            f"--data.tokenizer {config.tokenizer}: evaluation needs the tokenizer that the model "
            "was trained with: give its folder or hub id"
        )
    text_options = {field.name: getattr(config, field.name) for field in fields(TextConfig)}
    data = DataConfig(**text_options, validation_fraction=0)
    # a text shorter than a window is a text
    checked = inputs.check_inputs(
        data, tokenizer_folder(source), None, sequence_length=0, progress=progress
    )
    check_vocabulary(checked.tokenizer, model.vocab_size, trained=True)
    text = single_source(checked.sources)
    corpus = open_corpus(text, data, checked, progress, verify)
    return windows(corpus, checked.end_of_text, window, stride)


def window_of(model: ModelSpec, window: int | None, stride: int | None) -> tuple[int, int]:
    """Return (window, stride) in tokens: as given, None being the model's full length for the
    window and the window (no overlap) for the stride. Raises ValueError for values out of range.
    """
    most = model.max_position_embeddings
    window = most if window is None else window
    if not 2 <= window <= most:
        raise ValueError(
            f"window is {window}, but the model's max_position_embeddings is {most}: use --window "
            f"2 to {most}"
        )
    stride = window if stride is None else stride
    if not 1 <= stride <= window:
        raise ValueError(
            f"stride is {stride}, but the window is {window}: use --stride 1 to {window} "
            f"({window} is without overlap)"
        )
    return window, stride


def evaluate(loaded: Loaded, text: Windows, progress: bool = True) -> Evaluation:
    """Return loss, perplexity, bits per byte and accuracy of a loaded model on `text`. Collective;
    every rank returns the same. `progress`: a bar on rank 0. Raises ValueError for a loss that is
    not finite.
    """
    mesh = loaded.mesh
    title = f"evaluating {text.tokens:,} tokens in {plural(len(text.rows.lengths), 'window')}"
    with bar(title, text.tokens, progress and mesh.first, MofNCompleteColumn()) as reach:
        scores = score_rows(loaded.model, text.rows, mesh, loaded.schedule, reach)
    evaluation = Evaluation.from_scores(scores, text)
    if not math.isfinite(evaluation.loss):
        raise ValueError(
            f"the loss is {evaluation.loss}: the model has diverged, or needs --dtype float32"
        )
    return evaluation
