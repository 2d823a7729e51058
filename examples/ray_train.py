"""A run under Ray Train, in a TorchTrainer of one's own: every worker calls `dolmen.worker`.

    pip install 'dolmen[ray]' && python examples/ray_train.py [FOLDER OF TEXT [FOLDER OF THE RUN]]

`dolmen train ... --launch ray` does the same from the command line, and reports checkpoints too. A
worker that fails is started again by Ray, with all others, and the run resumes.
"""

import sys
from pathlib import Path

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import dolmen

DOCS = Path(__file__).parents[1] / "docs"
MODEL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def train_worker(settings: dict) -> None:
    """What one worker does: Ray has made the process group."""
    outcome = dolmen.worker(
        "pretrain",
        model=MODEL,
        data={"path": settings["text"], "tokenizer": "bpe:512"},
        train={"steps": settings["steps"], "sequence_length": 64, "global_batch_size": 8},
        checkpoint={"every": 10},
        out=settings["out"],
        resume=True,  # starts a run, and continues it after a failure
    )
    # on_metrics gets every row; Ray takes a report per two seconds, and lets workers wait for it
    ray.train.report({"steps": outcome.steps, "val_loss": outcome.val_loss or 0.0})


def train(text=DOCS, out="runs/ray", steps: int = 40, workers: int = 2) -> Path:
    """The run's folder, which all nodes share: summary.json, checkpoints/, metrics.jsonl."""
    run = Path(out).absolute()
    TorchTrainer(
        train_worker,
        train_loop_config={"text": str(Path(text).absolute()), "out": str(run), "steps": steps},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=str(run.parent), failure_config=FailureConfig(3)),
    ).fit()
    return run


if __name__ == "__main__":
    print(train(*sys.argv[1:]))
