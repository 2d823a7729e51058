"""The loader of data options alone, without a run."""

from dolmen.data import inputs, loader
from dolmen.data.base_loader import Loader
from dolmen.data.config import DataConfig
from dolmen.model.spec import ModelSpec


def prepare_loader(
    config: DataConfig,
    tokenizer: str | None,
    vocab_size: int | None,
    sequence_length: int,
    global_batch_size: int,
    seed: int,
    progress: bool = True,
    verify: bool = True,
    steps: int | None = None,
    model: ModelSpec | None = None,
) -> Loader:
    """Check the inputs and build the loader, as a run does."""
    opened = inputs.check_inputs(config, tokenizer, vocab_size, sequence_length, progress, verify)
    return loader.load(
        config, opened, sequence_length, global_batch_size, seed, progress, verify, steps, model
    )
