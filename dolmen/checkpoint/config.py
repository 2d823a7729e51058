"""How often a run is saved and how much of it is kept."""

from dolmen.core.config import Count, config


@config("checkpoint")
class CheckpointConfig:
    """Checkpoints of a run: asynchronous, readable at any other layout. The last step is always
    saved.
    """

    every: Count = 0
    """Steps between checkpoints; 0 saves the last one only."""
    keep: Count = 2
    """Newest checkpoints kept; 0 keeps all."""
