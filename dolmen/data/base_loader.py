"""Batches as a function of (seed, step): resuming is a number, and no split over ranks changes what
is trained on. What every loader does, whatever its samples are (loader.py: text by windows;
chat_loader.py: chats in packed rows).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from dolmen.data.batch import Batch
from dolmen.data.masked_lm import Cloze
from dolmen.data.mixture import Part
from dolmen.data.tokenizer import PreTrainedTokenizer


class Mixed(Protocol):
    """Samples to train on, numbered for ever."""

    @property
    def parts(self) -> Sequence[Part]: ...
    def documents(self, first: int, count: int) -> list[str]:
        """Return the documents that these samples were cut from, a line each."""
        ...

    def epochs(self, samples: int) -> dict[str, float]:
        """How often each source has been read after `samples` samples."""
        ...


class HeldOutRows(Protocol):
    """Validation rows, in order."""

    @property
    def tokens(self) -> int:
        """Predictions of a full validation."""
        ...

    @property
    def bytes(self) -> int | None:
        """Bytes of the text, exactly; None where they are not known."""
        ...

    def batches(
        self,
        batch_size: int,
        max_sequences: int | None = None,
        first_row: int = 0,
        rows: int | None = None,
    ) -> Iterator[Batch]:
        """All rows, `batch_size` at a time, or of each batch the `rows` rows from `first_row`. With
        `max_sequences`, only that many, evenly spread. All batches are full.
        """
        ...


@dataclass(frozen=True)
class Description:
    """The data of a run, in lines for its header."""

    training: str
    validation: str = "none"
    changes: tuple[str, ...] = ()
    """Notes on text that was left out, cut off or kept out of training."""
    details: tuple[str, ...] = ()
    """The sources of a mixture and one example, which `--log.verbose` shows."""


class Loader(ABC):
    """Training batches of `mixture`, validation batches of `validation`."""

    cloze: Cloze | None = None
    """How text is masked for a model that fills in; None for any other."""

    def __init__(
        self,
        mixture: Mixed,
        validation: HeldOutRows,
        global_batch_size: int,
        tokenizer: PreTrainedTokenizer,
        description: Description,
        identity: dict[str, str],
    ):
        self.mixture, self.validation = mixture, validation
        self.global_batch_size = global_batch_size
        self.tokenizer = tokenizer
        self.description = description
        self.identity = identity
        # samples that the batches before have read over step x global_batch_size: see go_on
        self.ahead = 0
        # of what was last read, numbers that a run logs
        self.told: dict[str, float] = {}
        self.completions: list[dict[str, Any]] = []
        """Completions of rollouts to log with the next row of metrics, on the first rank."""

    @abstractmethod
    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """The rows of global batch `step` (from 0) that data-parallel rank `rank` holds:
        consecutive samples.
        """

    def first(self, step: int) -> int:
        """The first sample of global batch `step`."""
        return step * self.global_batch_size + self.ahead

    def go_on(self, step: int, samples: int) -> None:
        """Let batch `step` begin where `samples` samples end. Batches before it may have been of
        another size: none is skipped or repeated.
        """
        self.ahead = samples - step * self.global_batch_size

    def documents(self, step: int) -> list[str]:
        """Return which documents the rows of global batch `step` were cut from, a line each:
        `source: documents a..b`.
        """
        lines = self.mixture.documents(self.first(step), self.global_batch_size)
        return lines if len(lines) <= 16 else [*lines[:16], f"and {len(lines) - 16} more rows"]

    def starting_at(self, step: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[int, Batch]]:
        """(step, batch) for ever; a thread prepares the next batch while this one is used."""
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
            coming = thread.submit(self.batch, step, rank, ranks)
            for now in count(step):
                batch, coming = coming.result(), thread.submit(self.batch, now + 1, rank, ranks)
                yield now, batch

    def validation_batches(
        self,
        max_sequences: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        of: HeldOutRows | None = None,
    ) -> Iterator[Batch]:
        """The held-out tokens in order, or those `of` a source (`held_apart`), as InOrder.batches
        gives them: every rank gets equally many full batches. With `max_sequences`, only that many
        windows, evenly spread. Raises ValueError where nothing is held out.
        """
        if not self.validation.tokens:
            raise ValueError(
                "nothing is held out: --data.validation-fraction is 0, or the second share of "
                "--data.split; use more, or --data.validation"
            )
        rows = self.rows(ranks)
        held = of or self.validation
        return held.batches(self.global_batch_size, max_sequences, rank * rows, rows)

    def rows(self, ranks: int) -> int:
        """Sequences of a global batch that one of `ranks` data-parallel ranks holds. Raises
        ValueError where they cannot hold equally many.
        """
        if self.global_batch_size % ranks:
            raise ValueError(
                f"global_batch_size ({self.global_batch_size}) is not divisible by the {ranks} "
                "data-parallel ranks: use --train.global-batch-size "
                f"{-(-self.global_batch_size // ranks) * ranks}"
            )
        return self.global_batch_size // ranks

    def epochs(self, step: int) -> dict[str, float]:
        """How often each source has been read after `step` steps."""
        return self.mixture.epochs(self.first(step))

    @property
    def unit(self) -> str:
        """Name of one prediction: token or answer."""
        return "token"

    @property
    def validation_tokens(self) -> int:
        """Predictions of a full validation."""
        return self.validation.tokens

    def validation_share(self, sequence_length: int) -> tuple[float, int]:
        """The share of all that is held out, and how many of its units a batch has."""
        total = self.validation_tokens + sum(len(part.stream) for part in self.mixture.parts)
        return self.validation_tokens / max(1, total), self.global_batch_size * sequence_length

    @property
    def validation_bytes(self) -> int | None:
        """Bytes of held-out text, exactly; None where they are not known, or not predicted."""
        return None if self.cloze else self.validation.bytes

    @property
    def held_apart(self) -> dict[str, HeldOutRows]:
        """Validation rows of each source, by its name; empty where there is one source."""
        return {}

    @property
    def validation_files(self) -> tuple[Path, ...]:
        """The held-out files, or () if some that is held out is no whole file."""
        return ()

    def fingerprint(self) -> dict[str, str]:
        """Return everything that decides the batches, by content and not by path: equal here and on
        another machine.
        """
        return self.identity
