"""What large recipes share."""

from typing import Any

from dolmen.checkpoint.config import CheckpointConfig
from dolmen.families import Model
from dolmen.optim.config import OptimizerConfig
from dolmen.training.config import RunConfig, TrainConfig

# A model made here has no tokenizer yet, and its weights are stored as they are trained.
FRESH = {
    "dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "use_cache": True,
}


def large(name: str, model: dict[str, Any], lr: float, batch: int, length: int = 8192) -> RunConfig:
    """A run of a large model in bfloat16, compiled."""
    return RunConfig(
        name=name,
        model=Model(model),
        optimizer=OptimizerConfig(lr=lr, warmup_steps=2000, min_lr=lr / 10),
        train=TrainConfig(
            steps=100_000,
            dtype="bfloat16",
            sequence_length=length,
            global_batch_size=batch,
            microbatch_size=1,
            compile=True,
        ),
        checkpoint=CheckpointConfig(every=1000),
    )
