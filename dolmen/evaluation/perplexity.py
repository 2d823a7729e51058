"""How well a model predicts a text, over all of it.

    text   -> data/in_order.py: windows, each token predicted once   \\   validate.py: the sum
    source -> dolmen, split over tp                                  /   of the losses -> Evaluation

What is computed is what a training run computes of held-out text, so the two numbers compare.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from rich.progress import MofNCompleteColumn
from rich.table import Table

from dolmen.conversion.source import Source, open_alike, open_source, tokenizer_folder
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.core.words import counted
from dolmen.data import inputs
from dolmen.data.batch import Batch
from dolmen.data.bpe import PREFIX
from dolmen.data.config import DataConfig, TextConfig
from dolmen.data.corpora import open_corpus
from dolmen.data.division import everything
from dolmen.data.in_order import InOrder
from dolmen.data.progress import bar
from dolmen.data.tokenizer import check_vocabulary
from dolmen.evaluation import validate
from dolmen.evaluation.config import EvaluateConfig
from dolmen.model.tree import Tree
from dolmen.optim.precision import DTYPES
from dolmen.serving import engine

LONGEST = 2048  # tokens of a window that nobody asked for: attention costs their square
TOKENS_AT_ONCE = 1 << 12  # of windows, one forward: bounds activations


@dataclass(frozen=True)
class Evaluation:
    """Over all of a text."""

    loss: float
    """Nats per predicted token."""
    perplexity: float
    """exp(loss); infinite where a float cannot hold it."""
    bits_per_byte: float | None
    """Sum of the losses in bits, the ends of documents included, over the bytes of the text: it
    compares models of different tokenizers. None where tokens alone are known.
    """
    tokens: int
    """Tokens predicted: those of the text, and one per document for its end."""
    bytes: int | None
    """Of the text, exactly; None where tokens alone are known."""
    documents: int
    sequence_length: int
    """Tokens of a window: none sees more than those before it in its window."""

    @classmethod
    def of(cls, found: validate.Losses, text: InOrder) -> "Evaluation":
        """From the sums over all of `text`."""
        return cls(
            found.loss,
            math.exp(found.loss) if found.loss < 709 else math.inf,
            None if text.bytes is None else found.bits_per_byte(text.bytes),
            found.tokens,
            text.bytes,
            text.documents,
            text.sequence_length,
        )

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
        table.add_row("tokens", f"{self.tokens:,}")
        if self.bytes is not None:
            table.add_row("bytes", f"{self.bytes:,}")
        table.add_row("documents", f"{self.documents:,}")
        table.add_row("context", f"windows of {self.sequence_length:,} tokens")
        return table


def prepared(asked: EvaluateConfig, progress: bool = True, verify: bool = True) -> InOrder:
    """The text that is asked for, as `open_text`."""
    source = open_source(asked.source)
    return open_text(source, asked.data, asked.sequence_length, progress, verify)


def measured(
    asked: EvaluateConfig, text: InOrder, mesh: Mesh = SINGLE, progress: bool = True
) -> Evaluation:
    """`evaluate` of the source that is asked for, the same on every rank of `mesh`."""
    dtype = DTYPES[asked.dtype] if asked.dtype else None
    return evaluate(open_alike(asked.source, mesh), text, mesh, dtype, progress)


def open_text(
    source: Source,
    config: TextConfig,
    sequence_length: int | None = None,
    progress: bool = True,
    verify: bool = True,
) -> InOrder:
    """The text of `config` as tokens of the model of `source`; from the cache, compared with its
    digests (`verify`), or else made now. Raises ValueError, KeyError or OSError, before all text is
    read, for what does not fit: no text, no tokenizer, one that is larger than the model's
    vocabulary, windows over its positions.
    """
    model = source.tree
    length = window_length(model, sequence_length)
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
    boundary = found.end_of_text if config.document_mask else None
    return InOrder([everything(corpus, range(corpus.document_count))], length, boundary)


def window_length(model: Tree, asked: int | None) -> int:
    """Tokens that are read at once: those asked for, else LONGEST, or all the model takes where
    that is fewer. Raises ValueError for more than it takes.
    """
    most = model.max_position_embeddings
    if asked is None:
        return min(most, LONGEST)
    if not 1 <= asked <= most:
        raise ValueError(
            f"sequence_length is {asked}, the model's max_position_embeddings {most}: use "
            f"--sequence-length 1 to {most}"
        )
    return asked


def evaluate(
    source: Source,
    text: InOrder,
    mesh: Mesh = SINGLE,
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> Evaluation:
    """What the model of `source` makes of `text`, in `dtype` or else that of its config.json. Every
    rank calls it and gets the same. Raises ValueError for what cannot be loaded, for a model that
    foretells no next token, and for a loss that is not finite.
    """
    if source.tree.both_ways:
        raise ValueError(
            f"{source.where} holds a model that sees both ways: it fills in masked tokens, and no "
            "token has a probability of its own; use dolmen verify"
        )
    model = engine.load_decoder(source, mesh, dtype)
    rows = max(1, min(text.windows, TOKENS_AT_ONCE // text.sequence_length))
    title = f"evaluating {text.tokens:,} tokens in {counted(text.windows, 'window')}"

    def reaching(batches: Iterator[Batch]) -> Iterator[Batch]:
        done = 0
        for batch in batches:
            yield batch
            done += batch.real_tokens
            reach(done)

    with bar(title, text.tokens, progress and mesh.first, MofNCompleteColumn()) as reach:
        found = validate.mean_loss(model, reaching(text.batches(rows)), mesh)
    if not math.isfinite(found.loss):
        raise ValueError(
            f"the loss is {found.loss}: the model has diverged, or needs --dtype float32"
        )
    return Evaluation.of(found, text)
