"""The only file between the oracle and the house: what a redesign of dolmen may change here is how
a run is asked for and where its numbers are read, and neither a row, a tolerance nor a frozen
number.

dolmen is driven from outside: a `transformers` directory, text and a tokenizer are written to disk,
`dolmen.train` runs in this process; metrics.jsonl, summary.json and the last checkpoint are read.
What no option says is patched, in `patched`: labels without a loss (text has none) and the loss
scale; and, for their time, the rate of products that MFU is measured against, and the plot.
"""

import contextlib
import io
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import trainer
from loading import prepare_loader
from safetensors.torch import load_file
from stored import exported_trained
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from trainer import IGNORED, Batch, Job, MuonJob, Result
from transformers import PreTrainedTokenizerFast

import dolmen
from dolmen.checkpoint.reader import Checkpoint, locate
from dolmen.conversion import hf_export
from dolmen.data.config import DataConfig
from dolmen.data.loader import TextLoader
from dolmen.families import ModelConfig
from dolmen.optim.optimizer import LossScale
from dolmen.training import metrics
from dolmen.training import run as runs

VOCABULARY, LENGTH = 71, 12  # 71 is prime
RARE = 70  # a word that few documents have


@dataclass(frozen=True)
class Data:
    """How text becomes batches. `uneven`: the first 3 r mod 11 labels of row r carry no loss."""

    steps: int = 5
    rows: int = 8
    length: int = LENGTH
    seed: int = 0
    masked: bool = False
    uneven: bool = False


@dataclass(frozen=True)
class Material:
    """Text, held-out text and tokenizer of all rows, in `folder`."""

    folder: Path

    @property
    def options(self) -> dict[str, str]:
        return {
            "path": str(self.folder / "text"),
            "validation": str(self.folder / "held-out"),
            "tokenizer": str(self.folder / "tokenizer"),
            "cache": str(self.folder / "cache"),
        }

    @property
    def held_out_bytes(self) -> int:
        return sum(file.stat().st_size for file in (self.folder / "held-out").iterdir())


def documents(seed: int, count: int, rare: int) -> list[list[int]]:
    """Documents of 3 to 26 words, by a formula: the word that follows is nearly decided by the one
    before, so that there is something to learn. RARE is one word in `rare`; 0: none.
    """
    state, out = seed, []

    def draw(n: int) -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % n

    for _ in range(count):
        words = [1 + draw(RARE - 1)]
        for _ in range(2 + draw(24)):
            follows = 1 + (words[-1] * 7 + draw(3)) % (RARE - 1)
            words.append(RARE if rare and draw(rare) == 0 else follows)
        out.append(words)
    return out


def material(folder: Path) -> Material:
    """Write what all rows read."""
    for name, seed, count, rare in (("text", 1, 40, 60), ("held-out", 2, 6, 0)):
        (folder / name).mkdir()
        for i, words in enumerate(documents(seed, count, rare)):
            text = " ".join(f"w{word}" for word in words)
            (folder / name / f"{i:02}.txt").write_text(text)
    vocabulary = {"<end>": 0} | {f"w{i}": i for i in range(1, VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(
        str(folder / "tokenizer")
    )
    return Material(folder)


def ignored(rows: int) -> np.ndarray:
    """bool [rows, LENGTH]: labels that carry no loss where batches are uneven."""
    return np.arange(LENGTH) < (np.arange(rows) * 3 % 11)[:, None]


@contextlib.contextmanager
def patched(data: Data, scale: LossScale | None = None) -> Iterator[None]:
    """What no option says: `uneven`, and a loss scale to begin with. Quiet on the console."""
    batch = TextLoader.batch

    def uneven(self, step, rank=0, ranks=1):
        whole = batch(self, step, rank, ranks)
        mask = torch.from_numpy(ignored(len(whole.labels)))
        return replace(whole, labels=torch.where(mask, IGNORED, whole.labels))

    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        if data.uneven:
            enter(mock.patch.object(TextLoader, "batch", uneven))
        if scale is not None:
            enter(mock.patch.object(LossScale, "from_dtype", lambda dtype: replace(scale)))
        enter(mock.patch.object(runs.mfu, "matmul_peak", lambda device, dtype: 1e12))
        enter(mock.patch.object(metrics, "plot", lambda file, to, title: None))
        enter(contextlib.redirect_stdout(io.StringIO()))
        enter(contextlib.redirect_stderr(io.StringIO()))
        yield


def dump(data: Data, made: Material) -> dict[str, np.ndarray]:
    """The batches that dolmen's loader gives, int16: tokens, labels and starts, [steps, rows,
    length], and those of validation with a `held_` before.
    """
    given = made.options
    config = DataConfig(**given | {"path": (given["path"],)}, document_mask=data.masked)
    with patched(data):
        made = prepare_loader(config, None, VOCABULARY, data.length, data.rows, data.seed, False)
        parts = {
            "": [made.batch(step) for step in range(data.steps)],
            "held_": list(made.validation_batches()),
        }
    out = {}
    for part, batches in parts.items():
        wide = {"tokens": [b.tokens for b in batches], "labels": [b.labels for b in batches]}
        if data.masked:
            wide["starts"] = [b.documents.starts for b in batches if b.documents is not None]
        out |= {f"{part}{n}": np.stack(rows).astype(np.int16) for n, rows in wide.items()}
    return out


def batches(dumped: dict[str, np.ndarray], part: str = "") -> list[Batch]:
    """What `dump` has written, as the oracle takes it."""
    wide = {
        n: dumped[part + n].astype(np.int64)
        for n in ("tokens", "labels", "starts")
        if part + n in dumped
    }
    return [Batch(**{n: v[i] for n, v in wide.items()}) for i in range(len(wide["tokens"]))]


def has_place(job: Job) -> bool:
    """Whether the files of the family have a place for all that is trained: a bias that balances
    has one in DeepSeek-V3 alone.
    """
    return job.balance != "bias" or job.kind == "deepseek_v3"


def options(
    job: Job, data: Data, made: Material, dtype: str, train: dict[str, Any], resume: int | None
) -> dict[str, Any]:
    """The run in dolmen's words."""
    names = ("lr", "warmup_steps", "schedule", "min_lr", "decay_fraction", "weight_decay")
    names += ("beta1", "beta2", "eps", "clip")
    chosen = {
        "optimizer": {name: vars(job)[name] for name in names},
        "data": made.options | {"document_mask": data.masked},
        "train": {
            "steps": job.steps,
            "seed": data.seed,
            "dtype": dtype,
            "sequence_length": data.length,
            "global_batch_size": data.rows,
            **train,
        },
        "log": {"validate_every": 0},
        "checkpoint": {"every": resume or 0, "keep": 0},
        "finish": {"export": True} if has_place(job) else {},
    }
    if isinstance(job, MuonJob):
        chosen["optimizer"] |= {"name": "muon", "muon": {"momentum": job.momentum}}
    if job.spike_factor is not None:
        chosen["train"] |= {"spike": "skip", "spike_factor": job.spike_factor}
    if "num_experts_per_tok" in job.model:
        chosen["train"]["router"] = {
            "balance": job.balance,
            "aux_loss_coef": job.balance_coef,
            "z_loss_coef": job.z_coef,
            "bias_rate": job.bias_rate,
        }
    return chosen


def run(
    job: Job,
    data: Data,
    made: Material,
    weights: dict[str, Tensor],
    folder: Path,
    dtype: str,
    train: dict[str, Any],
    resume: int | None = None,
    then: dict[str, Any] | None = None,
    static_scale: float | None = None,
) -> tuple[Result, Path]:
    """dolmen's run of `job`, and its folder. `resume`: it is stopped after so many steps, and goes
    on from what is saved, with `then` for options of `train`. `static_scale`: the loss is scaled by
    it, which must change nothing.
    """
    (folder / "init").mkdir(parents=True)
    trainer.write(folder / "init", job, weights)
    recipe, out = folder / "oracle.yaml", folder / "out"
    recipe.write_text("name: oracle\n")
    words = options(job, data, made, dtype, train, resume)
    scale = None if static_scale is None else LossScale(False, static_scale)
    if job.loss_scale is not None and (dtype != "float16" or job.patience != Job.patience):
        scale = LossScale(True, job.loss_scale, 0, job.patience)
    with patched(data, scale):
        dolmen.train(recipe, init=folder / "init", out=out, **words)
        if resume is not None:
            for saved in (out / "checkpoints").iterdir():
                if int(saved.name.removeprefix("step-")) > resume:
                    shutil.rmtree(saved)
            shutil.rmtree(out / "hf", ignore_errors=True)
            dolmen.train(out / "config.yaml", resume=True, train=then or {})
    return read(job, out), out


def series(out: Path, name: str) -> list[float]:
    """What a run has told of each step."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def read(job: Job, out: Path) -> Result:
    """What a run has left."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps, held = [r for r in rows if "loss" in r], [r for r in rows if "val_loss" in r]

    def number(value: float | None) -> float:
        return math.nan if value is None else value  # JSON has no word for it

    def column(name: str) -> list[float]:
        return [number(r[name]) for r in steps if name in r]

    saved = Checkpoint(locate(out))
    model = ModelConfig.from_plain(saved.meta["run"]["model"])

    def moments(kind: str) -> dict[str, Tensor]:
        def read(name: str) -> Tensor:
            by_muon = f"momentum/{name}"
            return saved.read(by_muon if by_muon in saved.specs else f"{kind}/{name}")

        return dict(exported_trained(model, read))

    return Result(
        losses=column("loss"),
        norms=column("grad_norm"),
        rates=column("lr"),
        tokens=column("tokens"),
        skipped=column("skipped_steps"),
        scales=column("loss_scale"),
        max_load=column("router/max_load"),
        balance=column("router/aux_loss"),
        z=column("router/z_loss"),
        validation=(number(held[-1]["val_loss"]), held[-1]["val_tokens"]),
        weights=dict(hf_export.export_weights(model, lambda name: saved.read(f"model/{name}"))),
        first=moments("exp_avg"),
        second=moments("exp_avg_sq"),
        biases=[
            saved.read(n) for n in saved.specs if n.startswith("model/") and "router.bias" in n
        ],
    )


def exported(out: Path) -> dict[str, Tensor]:
    """The weights that a run has exported."""
    return load_file(out / "hf" / "model.safetensors")


def summary(out: Path) -> dict[str, Any]:
    """What a run says of its end."""
    return json.loads((out / "summary.json").read_text())


def epochs(out: Path) -> list[float]:
    """After each step, how often the text has been read."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [v for r in rows for name, v in r.items() if name.startswith("epoch/")]
