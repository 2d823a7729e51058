"""A Llama with LoRA, from chats to GRPO: adapters of rank 8 learn, anew in each run over the model
with those before merged into it. `layout={"tp": 2}` splits a run, `dolmen show FOLDER/*` shows all.

    python examples/llama_lora.py [FOLDER]
"""

import json
import sys
from functools import partial
from pathlib import Path

import tiny

import dolmen

MODEL = tiny.LLAMA  # or "meta-llama/Llama-3.2-1B"
SIZE = {"sequence_length": 64, "global_batch_size": 16}
LORA = {"rank": 8, "alpha": 16}
RATE = 1e-2 if MODEL is tiny.LLAMA else 1e-4  # of a random model, and of one that knows something


def road(folder: str | Path = "runs/llama_lora") -> list[float]:
    """The mean reward of each phase's answers."""
    at, train = Path(folder), partial(dolmen.train, adapter=LORA, overwrite=True)
    train(
        "sft",
        init=tiny.start(MODEL, at / "model"),
        adapter={} if MODEL is tiny.LLAMA else LORA,  # a random one has to learn everything first
        data={"path": tiny.write(at, "chats"), "template": "alpaca"},  # it has none of its own
        optimizer={"lr": RATE},
        train=SIZE | {"steps": 60},
        out=at / "sft",
    )
    train(
        "reward",
        init=at / "sft",
        data={"path": tiny.write(at, "pairs")},
        optimizer={"lr": RATE / 5},
        train=SIZE | {"steps": 30},
        out=at / "reward",
    )
    train(
        "grpo",
        init=at / "sft",
        data={"path": tiny.write(at, "prompts")},
        reward=[str(at / "reward")],
        rollout={"num_generations": 8, "max_new_tokens": 12, "beta": 0.02},
        optimizer={"lr": RATE / 2},
        train=SIZE | {"global_batch_size": 64, "steps": 10},
        out=at / "grpo",
    )
    dolmen.export(at / "grpo", to=at / "adapters", adapters=True)
    rows = map(json.loads, (at / "grpo/metrics.jsonl").read_text().splitlines())
    return [row["rollout/reward"] for row in rows if "rollout/reward" in row]


if __name__ == "__main__":
    found = road(*sys.argv[1:])
    print(f"reward: {found[0]:.2f} at the start, {found[-1]:.2f} at the end")
