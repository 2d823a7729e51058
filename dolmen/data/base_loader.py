"""Batches as a function of (seed, step): resuming is a number, and no split over ranks changes what
is trained on. What every loader does, whatever its samples are (loader.py: text by windows;
chat_loader.py: chats in packed rows).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from dolmen.data.batch import Batch
from dolmen.data.masked_lm import Cloze
from dolmen.data.mixture import Part
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.files.remote_file import TextFile


class Mixed(Protocol):
    """Training samples, numbered without end, in a reproducible order."""

    @property
    def parts(self) -> Sequence[Part]:
        """The sources of the samples, with their weights and token streams."""
        ...

    def documents(self, first: int, count: int) -> list[str]:
        """Describe which documents samples first .. first + count - 1 were cut from, a line per
        sample.
        """
        ...

    def epochs(self, samples: int) -> dict[str, float]:
        """Return, by source name, how many epochs of each source (a fraction) are in the first
        `samples` samples.
        """
        ...


class HeldOutRows(Protocol):
    """Rows of the validation split, in order."""

    @property
    def tokens(self) -> int:
        """Number of predictions in a full validation."""
        ...

    @property
    def bytes(self) -> int | None:
        """Bytes of the validation text; None where unknown."""
        ...

    def batches(
        self,
        batch_size: int,
        max_sequences: int | None = None,
        first_row: int = 0,
        rows: int | None = None,
    ) -> Iterator[Batch]:
        """Yield batches of `batch_size` rows in order, or only the rows `first_row` to `first_row +
        rows` of each: a data-parallel rank's share. `max_sequences`: only so many rows, evenly
        spread. All batches are full; the last is padded with IGNORED labels.
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
    """Base class of loaders: training batches of `mixture`, validation batches of `validation`. A
    batch depends on seed and step only.
    """

    cloze: Cloze | None = None
    """Masking for a masked LM; None for other models."""

    def __init__(
        self,
        mixture: Mixed,
        validation: HeldOutRows,
        global_batch_size: int,
        tokenizer: PreTrainedTokenizer,
        description: Description,
        identity: dict[str, str],
    ):
        """`mixture`, `validation`: training samples and validation rows. `description`: the data in
        lines for the run's header. `identity`: what decides the batches, as name -> text, which a
        resumed run compares.
        """
        self.mixture, self.validation = mixture, validation
        self.global_batch_size = global_batch_size
        self.tokenizer = tokenizer
        self.description = description
        self.identity = identity
        # samples that the batches before have read over step x global_batch_size: see resume_at
        self.sample_offset = 0
        # of what was last read, numbers that a run logs
        self.extra_metrics: dict[str, float] = {}
        self.completions: list[dict[str, Any]] = []
        """Completions of rollouts to log with the next row of metrics, on the first rank."""

    @abstractmethod
    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Return the rows of global batch `step` (from 0) that data-parallel rank `rank` of `ranks`
        holds: consecutive samples.
        """

    def first(self, step: int) -> int:
        """Return the number of the first sample of global batch `step`: step x global batch size,
        shifted by `resume_at`.
        """
        return step * self.global_batch_size + self.sample_offset

    def resume_at(self, step: int, samples: int) -> None:
        """Make batch `step` begin with sample `samples`, so that no sample is skipped or repeated
        where earlier batches had another size.
        """
        self.sample_offset = samples - step * self.global_batch_size

    def documents(self, step: int) -> list[str]:
        """Describe which documents global batch `step` was cut from, one line per row (`source:
        documents a..b`); of more than 16 rows the first 16, and a line with the number of others.
        """
        lines = self.mixture.documents(self.first(step), self.global_batch_size)
        return lines if len(lines) <= 16 else [*lines[:16], f"and {len(lines) - 16} more rows"]

    def starting_at(self, step: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[int, Batch]]:
        """Yield (step, this rank's rows of global batch `step`) from `step` on, without end; a
        thread prepares the next batch while one is used.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
            # one batch ahead: reading and packing run while the device computes
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
        """Yield this rank's share of full validation batches, equally many on every rank.
        `max_sequences`: only so many rows, evenly spread. `of`: rows of one source
        (`validation_by_source`) in place of all. Raises ValueError where nothing is held out.
        """
        if not self.validation.tokens:
            raise ValueError(
                "there is no validation split: --data.validation-fraction (or the second part of "
                "--data.split) is 0; use a larger one, or --data.validation"
            )
        rows = self.rows(ranks)
        held_out = of or self.validation
        return held_out.batches(self.global_batch_size, max_sequences, rank * rows, rows)

    def rows(self, ranks: int) -> int:
        """Return the number of sequences of a global batch that each of `ranks` data-parallel ranks
        reads. Raises ValueError where `ranks` does not divide the batch.
        """
        # unequal ranks would wait for each other in every collective
        if self.global_batch_size % ranks:
            raise ValueError(
                f"global_batch_size ({self.global_batch_size}) is not divisible by the {ranks} "
                "data-parallel ranks: use --train.global-batch-size "
                f"{-(-self.global_batch_size // ranks) * ranks}"
            )
        return self.global_batch_size // ranks

    def epochs(self, step: int) -> dict[str, float]:
        """Return, by source name, how many epochs of each source (samples read from it / its
        samples) were read after `step` steps.
        """
        return self.mixture.epochs(self.first(step))

    @property
    def unit(self) -> str:
        """Name of one prediction, for reports: "token", or "completion" for reward models."""
        return "token"

    @property
    def validation_tokens(self) -> int:
        """Number of predictions in a full pass over the validation split."""
        return self.validation.tokens

    def validation_share(self, sequence_length: int) -> tuple[float, int]:
        """Return (fraction of all data that is held out, predictions per training batch), to choose
        how often to validate.
        """
        total = self.validation_tokens + sum(len(part.stream) for part in self.mixture.parts)
        return self.validation_tokens / max(1, total), self.global_batch_size * sequence_length

    @property
    def validation_bytes(self) -> int | None:
        """Bytes of the validation text; None where unknown, or for masked LM, which does not
        predict all of it.
        """
        return None if self.cloze else self.validation.bytes

    @property
    def validation_by_source(self) -> dict[str, HeldOutRows]:
        """Validation rows of each source, by name, for separate losses; empty where there is one
        source.
        """
        return {}

    @property
    def validation_files(self) -> tuple[TextFile, ...]:
        """Files that make up the validation split; () if some of it is not a whole file."""
        return ()

    def fingerprint(self) -> dict[str, str]:
        """Return everything that decides the batches, as name -> text, by content and not by path:
        equal on every machine. A resumed run compares it.
        """
        return self.identity
