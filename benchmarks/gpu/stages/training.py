"""The command line's own road: `dolmen train` as a user starts it, and runs that are resumed, whose
losses are compared bit for bit with those of the run that went on.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

import dolmen
from benchmarks.gpu import children, compare, tables
from benchmarks.gpu.case import Case, Context, Record

adapter = tables.load("oracle", "adapter")


STEPS, SAVED = 20, 10
DOCUMENTS = 2000  # of 15 words: an epoch is more than the steps read
# Where sums have no order: AdamW turns the rounding of a gradient near 0 into a step of lr, and 20
# steps of that are felt. Whether the two are equal bit for bit is told besides.
RESUMED = {"float32": 1e-3, "bfloat16": 2**-5}


def cases(context: Context) -> Iterator[Case]:
    yield Case("command bfloat16", 25, partial(command, context))
    for dtype in ("bfloat16", "float32"):
        last = dtype == "float32"  # cuBLAS is told of deterministic sums before its first product
        yield Case(f"resumed {dtype}", 8, partial(resumed, context, dtype), fresh=last)
    for dtype in ("bfloat16", "float32"):
        exact = partial(resumed, context, dtype, deterministic=True)
        yield Case(f"resumed {dtype}, deterministic", 12, exact)


def material(folder: Path) -> Any:
    """Text of some words, and their tokenizer."""
    made = adapter.material(folder)
    for i, words in enumerate(adapter.documents(3, DOCUMENTS, 0)):
        (folder / "text" / f"more-{i:04}.txt").write_text(" ".join(f"w{word}" for word in words))
    return made


def options(context: Context, made: Any, dtype: str) -> dict[str, Any]:
    """A run of STEPS steps of a small Llama, saved after SAVED."""
    width = 256 if context.full else 32
    model = {
        "model_type": "llama",
        "vocab_size": adapter.VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": 4 if context.full else 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "max_position_embeddings": 256,
    }
    return {
        "name": "gpu",
        "model": model,
        "data": made.options | {"path": [made.options["path"]]},
        "optimizer": {"lr": 3e-3, "warmup_steps": 2},
        "train": {
            "steps": STEPS,
            "dtype": dtype,
            "sequence_length": 256 if context.full else 16,
            "global_batch_size": 8,
            "microbatch_size": 4,
        },
        "log": {"validate_every": 0},
        "checkpoint": {"every": SAVED, "keep": 0},
    }


def losses(out: Path) -> list[dict[str, float]]:
    """Loss and gradient norm of each step, as metrics.jsonl tells them."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def command(context: Context, record: Record) -> None:
    """As a process of its own, on the device that it chooses itself."""
    with tempfile.TemporaryDirectory() as to:
        folder = Path(to)
        recipe = folder / "gpu.yaml"
        recipe.write_text(yaml.safe_dump(options(context, material(folder), "bfloat16")))
        words = [sys.executable, "-m", "dolmen", "train", str(recipe), "--out", f"{to}/run"]
        done = subprocess.run(children.dying(words), capture_output=True, text=True)
        record.tell(output=(done.stdout + done.stderr)[-3000:], command=words[1:])
        record.check("exit code", abs(done.returncode), 0, "the command ends well")
        rows = losses(folder / "run")
        record.tell(losses=[row["loss"] for row in rows])
        record.check("steps that are missing", STEPS - len(rows), 0, "each step is told")
        fall = rows[-1]["loss"] / rows[0]["loss"]
        record.check("last loss over first", fall, 0.97, "a text of rules: the loss falls")
        on = "cuda" in done.stdout or "NVIDIA" in done.stdout
        record.check("device", float(context.cuda and not on), 0, "it trains on the GPU")


def resumed(context: Context, dtype: str, record: Record, **train: Any) -> None:
    """A run that is saved, and goes on from there in another start; and the whole run again."""
    with tempfile.TemporaryDirectory() as to:
        folder = Path(to)
        words = options(context, material(folder), dtype)
        words["train"] |= train
        recipe = folder / "gpu.yaml"
        recipe.write_text(yaml.safe_dump(words))
        dolmen.train(recipe, out=folder / "whole")
        dolmen.train(recipe, out=folder / "again")
        shutil.copytree(folder / "whole", folder / "part")
        for saved in (folder / "part" / "checkpoints").iterdir():
            if int(saved.name.removeprefix("step-")) > SAVED:
                shutil.rmtree(saved)
        dolmen.train(folder / "part" / "config.yaml", out=folder / "part", resume=True)
        whole = losses(folder / "whole")
        for name in ("again", "part"):
            hold(record, name, whole, losses(folder / name), dtype, bool(train))


def hold(
    record: Record, name: str, whole: list[dict], other: list[dict], dtype: str, exact: bool
) -> None:
    """Two runs of one config are equal: bit for bit where that was asked for, else nearly; whether
    bit for bit is told.
    """
    what = {"again": "the run made again", "part": "the run resumed"}[name]
    for kind in ("loss", "grad_norm"):
        a, b = ([row[kind] for row in rows] for rows in (whole, other))
        record.tell(**{f"{name} {kind} bitwise": a == b})
        why = "asked for" if exact else "sums in another order"
        record.check(f"{kind} of {what}", compare.apart(b, a), 0 if exact else RESUMED[dtype], why)
