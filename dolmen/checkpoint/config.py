"""How often a run is saved and how much of it is kept."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of a run: asynchronous, readable at any other layout. The last step is always
    saved.
    """

    every: int = 0
    """Steps between checkpoints; 0 saves the last one only."""
    keep: int = 2
    """Newest checkpoints kept; 0 keeps all."""

    def __post_init__(self):
        if self.every < 0:
            raise ValueError(f"checkpoint.every is {self.every}: it must not be negative")
        if self.keep < 0:
            raise ValueError(f"checkpoint.keep is {self.keep}: it must not be negative")
