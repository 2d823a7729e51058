"""What the tests of runs and commands share: a corpus of made-up words, a tokenizer of it, a model
of transformers, a run file, and `dolmen` called in this process. One thread: on a busy machine two
threads make a tiny run ten times slower.

A test module says `material, one_thread = tinyrun.material, tinyrun.one_thread` to have the
fixtures, and `finished_run = tinyrun.finished_run` for a run that all share: a second conftest.py
would take the name `conftest`, by which spawned processes know tests/conftest.py.
"""

import contextlib
import fcntl
import io
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
import yaml
from matplotlib.figure import Figure

import dolmen as package
from dolmen.checkpoint.reader import Checkpoint
from dolmen.cli import main
from dolmen.core.config import from_dict
from dolmen.data.tokenizer import train_bpe
from dolmen.training import mfu
from dolmen.training.checks.run import validate
from dolmen.training.config import RunConfig
from dolmen.training.resolve import open_data, resolve

MODEL = dict(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
# the same as a model of a run: its config.json
CONFIG = {"model_type": "llama", **MODEL, "rms_norm_eps": 1e-5}


def check_run(config: RunConfig, processes: int | None) -> RunConfig:
    """The resolved and checked run, as the process has it that starts one."""
    resolved = resolve(config, processes)
    validate(resolved)
    open_data(resolved, progress=False, verify=True)
    return resolved.config


@dataclass(frozen=True)
class Material:
    """Paths of everything a run needs."""

    folder: Path

    @property
    def docs(self) -> Path:
        return self.folder / "docs"  # 30 documents of 150 words

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"  # 300 tokens

    @property
    def model(self) -> Path:
        return self.folder / "model"  # a Llama of MODEL in bfloat16, with the tokenizer

    @property
    def file(self) -> Path:
        return self.folder / "tiny.yaml"  # six steps of a random model of MODEL

    def options(self) -> dict:
        """The content of `file`."""
        data = {
            "path": [str(self.docs)],
            "tokenizer": str(self.tokenizer),
            "cache": str(self.folder / "cache"),
        }
        return {
            "name": "tiny",
            "model": CONFIG,
            "data": data,
            "optimizer": {"lr": 1e-2, "warmup_steps": 2},
            "train": {"steps": 6, "sequence_length": 16, "global_batch_size": 4},
            "log": {"validate_every": 3},
        }

    def config(self, **sections) -> RunConfig:
        """The run of `file`, its sections changed by mappings."""
        values = self.options()
        for name, change in sections.items():
            values[name] = (
                {**values.get(name, {}), **change} if isinstance(change, dict) else change
            )
        return from_dict(RunConfig, values)


def make(folder: Path) -> Material:
    made, chance = Material(folder), random.Random(0)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 6))) for _ in range(60)]
    made.docs.mkdir()
    for number in range(30):
        (made.docs / f"{number:02}.txt").write_text(" ".join(chance.choices(words, k=150)) + "\n")
    train_bpe(
        [p.read_text() for p in sorted(made.docs.iterdir())], 300, made.tokenizer, progress=False
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**MODEL, bos_token_id=0, eos_token_id=0)
    ).to(torch.bfloat16)
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(made.model)
    transformers.AutoTokenizer.from_pretrained(made.tokenizer).save_pretrained(made.model)
    made.file.write_text(yaml.safe_dump(made.options()))
    return made


def make_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]
) -> Path:
    """Return the folder `name` of this run of the suite, which `fill(folder)` fills in the first
    worker that asks for it; the others wait. Tests only read it.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all workers
    folder, filled = base / name, base / f"{name}.filled"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not filled.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            fill(folder)
            filled.touch()
    return folder


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Material:
    return Material(make_once(tmp_path_factory, "material", make))


@pytest.fixture(scope="session")
def finished_run(material, tmp_path_factory) -> Path:
    """The run of `material.file`: six steps, saved and validated after each third. What it printed
    is in `stdout.txt`, beside it.
    """

    def train(folder: Path) -> None:
        words = ("--checkpoint.every", 3, "--checkpoint.keep", 0)
        result = dolmen("train", material.file, "--out", folder / "run", *words)
        assert result.code == 0, result.err
        (folder / "stdout.txt").write_text(result.out)

    return make_once(tmp_path_factory, "finished", train) / "run"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """What was said on stderr, without the frames and line breaks of a terminal."""
        return " ".join(self.err.translate(dict.fromkeys(map(ord, "│╭╮╰╯─┌┐└┘"), " ")).split())


class Ended(BaseException):
    """Of a process that would have ended at once, without a word from pytest."""


def dolmen(*words) -> Result:
    """`dolmen WORDS` in this process, which outlives it."""
    out, err = io.StringIO(), io.StringIO()

    def end(code: int):
        raise Ended(code)

    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(os, "_exit", end),
        # it would be measured for a quarter of a second in every run
        mock.patch.object(mfu, "matmul_peak", lambda *_: 1e12),
        # the picture of the losses is drawn by tests/training/test_metrics.py
        mock.patch.object(
            Figure, "draw", Figure.draw if words[:1] != ("train",) else lambda *_: None
        ),
    ):
        try:
            code = main([str(w) for w in words])
        except SystemExit as ended:
            code = ended.code
        except Ended as ended:
            (code,) = ended.args
    return Result(code, out.getvalue(), err.getvalue())


def path_of(*folders: Path) -> str:
    """PYTHONPATH of a process that is to import these folders and the dolmen that is tested, not
    the one that is installed.
    """
    return os.pathsep.join(map(str, (*folders, Path(package.__file__).parents[1])))


@cache
def documented_metrics() -> set[str]:
    """Names in the tables of docs/reference/metrics.md, * for words in capitals."""
    page = (Path(__file__).parents[1] / "docs/reference/metrics.md").read_text()
    cells = re.findall(r"^\| (`[^|]*`) \|", page, re.M)
    names = {name for cell in cells for name in re.findall(r"`([^`]*)`", cell)}
    return {re.sub(r"[A-Z]+", "*", name) for name in names}


def rows(out: Path, kind: str = "loss") -> list[dict]:
    """Rows of a run's metrics.jsonl that have `kind`; each number has a name that is documented."""
    found = list(map(json.loads, (out / "metrics.jsonl").read_text().splitlines()))
    known = re.compile("|".join(re.escape(n).replace(r"\*", ".+") for n in documented_metrics()))
    assert not [name for row in found for name in row if not known.fullmatch(name)]
    return [row for row in found if kind in row]


def losses(out: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every step: equal floats mean an equal run."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(out)]


def steps(out: Path) -> list[int]:
    """Steps of the checkpoints on disk."""
    return sorted(int(p.name.removeprefix("step-")) for p in (out / "checkpoints").iterdir())


def tensors(out: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of one checkpoint, whole."""
    saved = Checkpoint(out / "checkpoints" / f"step-{step:08d}")
    return {name: saved.read(name) for name in saved.specs}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are bitwise equal."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )
