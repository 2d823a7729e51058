"""How a model is split: the only thing that differs between one CPU and a cluster. Data, checked against the model."""

from dataclasses import dataclass, replace
from typing import Literal

from dolmen.model.config import ModelConfig


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes and what is sharded over them."""

    tp: int = 1
    """Tensor parallelism: processes that share every layer. Innermost, so that it stays inside a machine."""
    dp: int | None = None
    """Data parallelism: processes that see different sequences. Default: what the processes (or visible GPUs) leave."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage: 1 shards optimizer state over dp, 2 gradients too, 3 parameters too; 0 shards nothing."""
    sequence_parallel: bool = False
    """Split the residual stream over tp by tokens: norms and dropout are not repeated, activations shrink."""

    def __post_init__(self):
        if self.tp < 1: raise ValueError(f"layout.tp is {self.tp}: it must be at least 1")
        if self.dp is not None and self.dp < 1: raise ValueError(f"layout.dp is {self.dp}: it must be at least 1")
        if self.zero not in (0, 1, 2, 3): raise ValueError(f"layout.zero is {self.zero}: use 0, 1, 2 or 3")

    @property
    def world(self) -> int:
        """Processes this layout needs; dp must be resolved."""
        return self.tp * (self.dp or 1)

    def resolve(self, processes: int | None) -> "Layout":
        """With dp filled in for `processes` (None: as few as tp needs). Raises ValueError where they do not divide."""
        dp = self.dp or max(1, (processes or self.tp) // self.tp)
        if processes is not None and self.tp * dp != processes:
            raise ValueError(f"layout.tp ({self.tp}) x layout.dp ({dp}) = {self.tp * dp} processes, but there are {processes}: "
                             f"set --layout.tp and --layout.dp so that their product is {processes}")
        return replace(self, dp=dp)

    def check(self, model: ModelConfig, sequence_length: int, global_batch_size: int, microbatch_size: int) -> None:
        """Raises ValueError, with the numbers and the knob, where this layout does not divide the model or the batch."""
        for name, value in (("num_attention_heads", model.num_attention_heads), ("intermediate_size", model.intermediate_size)):
            if value % self.tp:
                raise ValueError(f"{name} ({value}) is not divisible by tp ({self.tp}): set --layout.tp to a divisor, "
                                 f"such as {_divisor(value, self.tp)}")
        if (self.tp - 1) * -(-model.vocab_size // self.tp) >= model.vocab_size:
            raise ValueError(f"vocab_size ({model.vocab_size}) leaves a rank of tp ({self.tp}) without a row: set a smaller --layout.tp")
        dp = self.dp or 1
        if global_batch_size % dp:
            raise ValueError(f"train.global-batch-size ({global_batch_size}) is not divisible by dp ({dp}): "
                             f"set --train.global-batch-size to a multiple, such as {-(-global_batch_size // dp) * dp}")
        rank_batch = global_batch_size // dp
        if rank_batch % microbatch_size:
            raise ValueError(f"train.global-batch-size ({global_batch_size}) / dp ({dp}) = {rank_batch} sequences a rank is not divisible by "
                             f"train.microbatch-size ({microbatch_size}): set --train.microbatch-size {_divisor(rank_batch, microbatch_size)}")
        if self.sequence_parallel and (microbatch_size * sequence_length) % self.tp:
            raise ValueError(f"sequence parallelism splits the {microbatch_size} x {sequence_length} tokens of a microbatch over tp "
                             f"({self.tp}), which does not divide them: set --train.sequence-length to a multiple of {self.tp}, or "
                             "leave --layout.sequence-parallel off")


def _divisor(value: int, most: int) -> int:
    """The largest divisor of value that is at most `most`."""
    return max(d for d in range(1, min(most, value) + 1) if value % d == 0)
