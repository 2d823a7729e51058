"""A small Llama from random weights, on text of one's own: what `dolmen train` does, from Python.

    python examples/train.py [FOLDER OF TEXT [FOLDER OF THE RUN]]

Without a folder it learns the pages of docs/, in seconds on two cores.
"""

import sys
from pathlib import Path

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
    "tie_word_embeddings": True,
}


def train(text: str | Path = DOCS, out: str | Path = "runs/example", steps: int = 40) -> Path:
    """The run's folder: metrics.jsonl, loss.png, checkpoints/, tokenizer/, config.yaml."""
    return dolmen.train(
        "pretrain",
        model=MODEL,
        data={"path": text, "tokenizer": "bpe:512"},  # a tokenizer trained on the text itself
        optimizer={"lr": 1e-2, "warmup_steps": 5},
        train={"steps": steps, "sequence_length": 64, "global_batch_size": 8},
        log={"validate_every": 20},
        out=out,
        overwrite=True,
    )


if __name__ == "__main__":
    print("trained:", train(*sys.argv[1:]))
