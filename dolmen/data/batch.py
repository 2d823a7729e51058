"""The batch, and the one place where labels are shifted: `labels[:, i]` is the token that follows `tokens[:, i]`."""

from dataclasses import dataclass

import numpy as np
import torch

from dolmen.ops.loss import IGNORED


@dataclass(frozen=True, eq=False)
class Batch:
    """tokens, labels: int64 [sequences, length]."""

    tokens: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def of_windows(cls, windows: np.ndarray) -> "Batch":
        """From int64 [sequences, length + 1] consecutive tokens; IGNORED marks where the text has ended."""
        windows = torch.from_numpy(windows)
        tokens = windows[:, :-1]
        return cls(torch.where(tokens == IGNORED, 0, tokens), windows[:, 1:].contiguous())

    @property
    def real_tokens(self) -> int:
        """Predictions asked for: what the sum of losses is divided by, over all ranks."""
        return int((self.labels != IGNORED).sum())

    def split(self, parts: int) -> list["Batch"]:
        """`parts` batches of equally many consecutive sequences."""
        if parts < 1 or len(self.tokens) % parts:
            raise ValueError(f"a batch of {len(self.tokens)} sequences is not divisible into {parts} equal parts")
        return [Batch(*rows) for rows in zip(self.tokens.chunk(parts), self.labels.chunk(parts), strict=True)]

    def microbatches(self, size: int) -> list["Batch"]:
        """Batches of `size` consecutive sequences."""
        if size < 1 or len(self.tokens) % size:
            raise ValueError(f"{len(self.tokens)} sequences a rank are not divisible by the microbatch size ({size}): "
                             "use --train.microbatch-size 1, or another --train.global-batch-size")
        return self.split(len(self.tokens) // size)
