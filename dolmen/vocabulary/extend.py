"""Adds rows for new tokens to a model, and records which tokens are new.

Which tokens of a model are new: a file beside its weights, which `dolmen vocab extend` writes,
and a run that begins with it reads.

`dolmen vocab extend`: a model with rows for the tokens that its tokenizer has been given.

    rows of the embedding   0 ............ old-1 | old .. padding .. | more
                            as they were         | new tokens        |

Old tokens are the ids below the old tokenizer's; what is behind them in the model is padding, which
new ones fill first. A new row is the mean of the rows of the pieces that the old tokenizer cuts the
token into: of the token as its vocabulary writes it, by the merges alone. What it stands for as a
text, decoded and encoded again, would get a space before it, and loses parts of characters.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn.functional import embedding_bag

from dolmen.conversion import hf_export, writing
from dolmen.conversion.hf import stated_dtype
from dolmen.conversion.source import ModelSource, cast_source, open_source, pin_source
from dolmen.conversion.weights import WeightsAlone
from dolmen.conversion.writing import LayerPool
from dolmen.core import state
from dolmen.core.messages import brief, plural
from dolmen.data.config import TextConfig
from dolmen.data.tokenizer import PreTrainedTokenizer, vocabulary_size
from dolmen.evaluation import perplexity
from dolmen.evaluation.model import load
from dolmen.families import ModelConfig, edit, unknown
from dolmen.files import gate, kinds
from dolmen.files.safetensors import Spec
from dolmen.model.spec import ModelSpec
from dolmen.model.spec.param import ParamSpec
from dolmen.vocabulary.check import Counts, Text, check_round_trip, count, open_text, probe_lines
from dolmen.vocabulary.config import VocabExtendConfig
from dolmen.vocabulary.tokenizer_folder import Vocabulary, open_vocabulary, transformers_tokenizer

FILE = "extended.json"


def write_record(folder: Path, old: int, tokens: int, init: str) -> None:
    """Write the file extended.json into a model's folder, which records that its vocabulary was
    extended: `old`, the number of tokens before (the first new id); `tokens`, the number now;
    `init`, how the new rows were initialised.
    """
    record = {"old_tokens": old, "tokens": tokens, "init": init}
    (folder / FILE).write_text(json.dumps(record, indent=1) + "\n")


def first_new_id(folder: Path) -> int | None:
    """Return the first id of the tokens that were added to the model in `folder`, by its
    extended.json; None without such a file. Raises Refused for a malformed one.
    """
    file = folder / FILE
    return gate.read_json(file, kinds.EXTENDED)["old_tokens"] if file.is_file() else None


AT_ONCE = 4096  # new rows that are made together: their pieces are in memory in fp32


@dataclass(frozen=True)
class Measurement:
    """Result of measuring a model and its tokenizer on held-out text."""

    counts: Counts
    loss_per_byte: float | None
    """Nats per byte; None for a model that is not causal."""

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits per byte of text; None for a model that is not causal."""
        return None if self.loss_per_byte is None else self.loss_per_byte / math.log(2)

    def __str__(self) -> str:
        """Return a line for a report: characters and bytes per token, and the loss if known."""
        loss = ""
        if self.loss_per_byte is not None:
            loss = f", loss {self.loss_per_byte:.6f} per byte ({self.bits_per_byte:.6f} bits)"
        return f"{self.counts}{loss}"


@dataclass(frozen=True)
class Extended:
    """Result of `extend`."""

    old: int
    """Number of tokens before: the first new id."""
    tokens: int
    rows_before: int
    rows: int
    init: str
    before: Measurement | None
    after: Measurement | None

    def lines(self) -> list[str]:
        """Return the lines of a report: new tokens and rows of the model, and, if there was
        held-out text, compression and loss on it before and after.
        """
        # new tokens that fit into rows the model already had
        padding = min(self.tokens, self.rows_before) - self.old
        report = [
            f"{self.tokens - self.old:,} new tokens, ids {self.old} to {self.tokens - 1}, "
            f"{max(0, padding):,} of them in former padding rows; initial rows: {self.init}",
            f"{self.rows_before:,} rows before, {self.rows:,} now",
        ]
        if self.before and self.after:
            report += [f"before: {self.before}", f"after:  {self.after}"]
        return report


def extend(config: VocabExtendConfig, progress: bool = True) -> Extended:
    """Add rows for the new tokens of the tokenizer config.tokenizer to the embedding and head of
    the model config.model, and write it as a new transformers directory, config.to, with that
    tokenizer. Return a report, with the loss on held-out text before and after if config.data names
    some. `progress`: bars on stderr. Raises ValueError, KeyError or OSError, with nothing written,
    for a tokenizer that is not the model's own with tokens appended, or a model that cannot be
    exported.
    """
    to = Path(config.to).expanduser()
    hf_export.check_target(to)
    text = open_text(config.data)
    # a run that still trains must not change between the two measurements
    base = open_source(pin_source(config.model))
    unknown.warn(base.model)
    if base.tokenizer is None:
        raise ValueError(
            f"MODEL {base.where} has no tokenizer, so the new tokens cannot be determined"
        )
    before = open_vocabulary(str(base.tokenizer), "MODEL")
    old = transformers_tokenizer(before, "MODEL")
    after = open_vocabulary(config.tokenizer, "--tokenizer")
    new = transformers_tokenizer(after, "--tokenizer")
    check_grown(old, new, config)
    check_round_trip(new, probe_lines(new), f"--tokenizer {config.tokenizer}")
    dtype = stated_dtype(base.model)
    source = cast_source(base, dtype)
    first, size = vocabulary_size(old), vocabulary_size(new)
    # padding rows are used first: the model grows by what is missing only
    rows = max(base.spec.vocab_size, size)
    # lazily: the enlarged embedding is made when the writer reads it
    extended = ExtendedSource(
        source,
        edit(base.model, vocab_size=rows),
        after.where,
        TokenRows(min(first, base.spec.vocab_size), _old_pieces(before, old, new), config),
    )
    # before anything is written: a bad text costs no export
    held_out_before = None if text is None else measure(base, old, text, config, progress)
    hf_export.check_expressible(base.model, source.spec)
    writer = hf_export.TransformersWriter(extended, dtype)
    with writing.replace_when_complete(to) as (part, sidecars):
        writer.write(part, LayerPool())
        writer.write_sidecars(sidecars)
        write_record(sidecars, first, size, config.init)
    held_out_after = None if text is None else measure(open_source(to), new, text, config, progress)
    return Extended(
        first, size, base.spec.vocab_size, rows, config.init, held_out_before, held_out_after
    )


def check_grown(
    old: PreTrainedTokenizer, new: PreTrainedTokenizer, config: VocabExtendConfig
) -> None:
    """Raise ValueError unless the tokenizer `new` has all tokens of `old` under the same ids, and
    more. `config`: names both in the error.
    """
    had, has = vocabulary_size(old), vocabulary_size(new)
    if has <= had:
        raise ValueError(
            f"--tokenizer {config.tokenizer} has {plural(has, 'token')}, not more than that of "
            f"MODEL {config.model} ({had:,}): give one that extends it (dolmen vocab merge)"
        )
    ids = new.get_vocab()
    other = [
        (number, token) for token, number in old.get_vocab().items() if ids.get(token) != number
    ]
    if other:
        number, token = min(other)
        raise ValueError(
            f"--tokenizer {config.tokenizer} does not extend that of MODEL {config.model}: "
            f"{plural(len(other), 'token')} have other ids, first {number} ({brief(token)}, now "
            f"{ids.get(token)})"
        )


def _old_pieces(
    before: Vocabulary, old: PreTrainedTokenizer, new: PreTrainedTokenizer
) -> dict[int, list[int]]:
    """Return, for each id that only the tokenizer `new` has, the ids of the pieces into which the
    `old` tokenizer's model splits the token. A token that it cannot split maps to all old ids, so
    that its initial row is the mean of the whole vocabulary. `before`: the old tokenizer's files.
    """
    # `ids`: for tokens that the old tokenizer cannot write
    first, ids = vocabulary_size(old), sorted(old.get_vocab().values())
    model = old.backend_tokenizer.model
    special = {*new.backend_tokenizer.get_added_tokens_decoder()}
    pieces: dict[int, list[int]] = {}
    for token, number in new.get_vocab().items():
        if number >= first:
            # special tokens are stored as plain text, learned ones as the vocabulary writes them
            text = before.token_from_bytes(token.encode()) if number in special else token
            pieces[number] = [piece.id for piece in model.tokenize(text or token)] or ids
    return pieces


@dataclass(frozen=True)
class TokenRows:
    """Makes the rows of new tokens, for any parameter with a row per token (embedding, head)."""

    first: int
    """First id that the model has no trained row for."""
    pieces: Mapping[int, Sequence[int]]
    config: VocabExtendConfig

    def enlarge(self, name: str, param: ParamSpec, old: Tensor, std: float) -> Tensor:
        """Return a parameter with a row per token (embedding or head), `old`, enlarged to the shape
        of `param`. Rows of new tokens are initialised as configured: the mean of their pieces'
        rows, random (by the parameter's `name`, the seed and `std`, the model's initializer range)
        or 0. Old rows are copied; padding rows behind the last token stay, or are 0.
        """
        full = old.new_zeros(param.shape)
        # rows of old tokens, and padding behind them
        full[: len(old)] = old
        ids = torch.tensor(sorted(self.pieces))
        match self.config.init:
            case "mean":
                self._fill_means(full, old, ids)
            # a bias of the head, for example, starts at 0
            case "random" if param.initial == "normal":
                random_rows = torch.empty(param.shape, dtype=torch.float32)
                state.fill_normal(random_rows, name, self.config.seed, std * param.std_scale)
                full[ids] = random_rows[ids].to(full.dtype)
            case _:
                full[ids] = 0
        return full

    def _fill_means(self, full: Tensor, old: Tensor, ids: Tensor) -> None:
        """Fill the rows `ids` of `full`, those of new tokens, with the mean of the rows in `old` of
        the pieces of each token, computed in fp32 or wider.
        """
        wide = torch.promote_types(old.dtype, torch.float32)
        for some in ids.split(AT_ONCE):
            token_pieces = [self.pieces[number] for number in some.tolist()]
            offsets = torch.tensor([0, *map(len, token_pieces)]).cumsum(0)[:-1]
            flat = torch.tensor([piece for pieces in token_pieces for piece in pieces])
            # only rows that are needed are widened
            table, places = flat.unique(return_inverse=True)
            rows = old[table].to(wide).reshape(len(table), -1)
            # one kernel for bags of any length, without a padded [tokens, pieces, hidden] tensor
            means = embedding_bag(places, rows, offsets, mode="mean")
            full[some] = means.reshape(len(some), *old.shape[1:]).to(old.dtype)


@dataclass(frozen=True)
class ExtendedSource(WeightsAlone):
    """A source whose vocabulary parameters are enlarged as they are read; all others are
    unchanged.
    """

    source: ModelSource
    model: ModelConfig
    tokenizer: Path
    rows: TokenRows

    @property
    def where(self) -> Path:
        """Folder of the original model."""
        return self.source.where

    @property
    def title(self) -> str:
        """Title of the original model, and that it has more tokens, for messages."""
        return f"{self.source.title}, with more tokens"

    @property
    def spec(self) -> ModelSpec:
        """Spec of the extended model, whose parameters with a row per token have more rows."""
        return self.model.spec

    @property
    def generation_config(self) -> dict[str, Any]:
        """Content of the original model's generation_config.json: new tokens do not change it."""
        return self.source.generation_config

    @cached_property
    def specs(self) -> Mapping[str, Spec]:
        """Shape in the extended model and dtype in the original one, by parameter name."""
        params = self.spec.params
        return {
            name: Spec(params[name].shape, spec.dtype) for name, spec in self.source.specs.items()
        }

    def stream(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every parameter of the extended model, or of those in `only`; one
        with a row per token is enlarged as it is read.
        """
        for name in self.specs if only is None else only:
            yield name, self.read(name)

    def read(self, name: str) -> Shaped[Tensor, "*whole"]:
        """Return the whole parameter `name`, read from the original model, and enlarged with rows
        for the new tokens if it has a row per token.
        """
        param, old = self.spec.params[name], self.source.read(name)
        if not param.is_vocabulary:
            return old
        return self.rows.enlarge(name, param, old, self.spec.initializer_range)


def measure(
    source: ModelSource,
    tokenizer: PreTrainedTokenizer,
    text: Text,
    config: VocabExtendConfig,
    progress: bool,
) -> Measurement:
    """Return the numbers of tokens, characters and bytes of the held-out `text` under `tokenizer`,
    and, for a causal model, the loss of the model `source` on it per byte (in nats). `progress`:
    bars on stderr. Raises ValueError for text that cannot be evaluated.
    """
    counts = count(tokenizer, text.pieces(), text.name)
    # masked LMs have no loss per byte
    if source.spec.both_ways:
        return Measurement(counts, None)
    # held-out text is tokenised twice, by two tokenizers: not worth keeping
    with TemporaryDirectory(prefix="dolmen-") as cache:
        data = TextConfig(config.data.path, text_field=config.data.text_field, cache=cache)
        read = perplexity.open_text(source, data, config.window, progress=progress)
        result = perplexity.evaluate(load(source), read, progress)
    return Measurement(counts, result.loss * result.tokens / counts.bytes)
