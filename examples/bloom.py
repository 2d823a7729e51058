"""A BLOOM in the three steps of DeepSpeed-Chat: chats, a reward model, and PPO, in which a critic
that begins as the reward model learns beside the policy.

    python examples/bloom.py [FOLDER]

Each is a run as any other: `layout={"tp": 2}` splits it, `dolmen show FOLDER/*` looks at all.
"""

import json
import sys
from functools import partial
from pathlib import Path

import tiny

import dolmen

MODEL = tiny.BLOOM  # or "bigscience/bloom-560m"
RATE = 1e-2 if MODEL is tiny.BLOOM else 1e-5  # of a random model, and of one that knows something
SIZE = {"sequence_length": 64, "global_batch_size": 16}


def road(folder: str | Path = "runs/bloom") -> list[float]:
    """The mean reward of each phase's answers."""
    at, train = Path(folder), partial(dolmen.train, overwrite=True)
    train(
        "sft",
        init=tiny.start(MODEL, at / "model"),
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
        "ppo",
        init=at / "sft",
        data={"path": tiny.write(at, "prompts")},
        reward=[str(at / "reward")],
        critic={"init": at / "reward", "lr": RATE / 5},
        rollout={"prompts": 32, "max_new_tokens": 12},
        optimizer={"lr": RATE / 20},
        train=SIZE | {"steps": 20},
        out=at / "ppo",
    )
    rows = map(json.loads, (at / "ppo/metrics.jsonl").read_text().splitlines())
    return [row["rollout/reward"] for row in rows if "rollout/reward" in row]


if __name__ == "__main__":
    found = road(*sys.argv[1:])
    print(f"reward: {found[0]:.2f} at the start, {found[-1]:.2f} at the end")
