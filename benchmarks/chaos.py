"""Whether a run survives: `kill -9` of a random rank at random moments, many times in one run, and
the final weights and optimizer state compared, bit by bit, with those of a run that nobody
disturbed.

    python benchmarks/chaos.py --kills 20 --layout.tp 2
        other options go to `dolmen train`, for both runs
    python benchmarks/chaos.py --torchrun 2
        the restarts are those of torchrun's elastic agent

Moments are drawn by kind, so that none is missed: start-up (before the first step after a restart),
a step, a save (its `.partial` folder is there). What is told is what was seen at the moment of the
kill. Exit code 1 if a bit differs.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.table import Table

from dolmen.checkpoint.stream import locate, open_checkpoint
from dolmen.data.tokenizer import train_bpe

KINDS = ("start-up", "step", "save")
MODEL = dict(
    vocab_size=300,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
)


@dataclass
class Kills:
    """What the killer has done."""

    seen: Counter = field(default_factory=Counter)
    ranks: Counter = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.seen.values())


def corpus(folder: Path) -> Path:
    """A made-up language in 30 documents, its tokenizer, and a run file of 4 layers."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 6))) for _ in range(60)]
    texts = [" ".join(chance.choices(words, k=400)) + "\n" for _ in range(30)]
    (folder / "docs").mkdir()
    for number, text in enumerate(texts):
        (folder / "docs" / f"{number:02}.txt").write_text(text)
    train_bpe(texts, 300, folder / "tokenizer", progress=False)
    data = {
        "path": [str(folder / "docs")],
        "tokenizer": str(folder / "tokenizer"),
        "cache": str(folder / "cache"),
    }
    run = {
        "name": "chaos",
        "model": MODEL,
        "data": data,
        "optimizer": {"lr": 3e-3, "warmup_steps": 2},
        "train": {"sequence_length": 64, "global_batch_size": 8},
        "log": {"validate_every": 0},
    }
    (folder / "chaos.yaml").write_text(yaml.safe_dump(run))
    return folder / "chaos.yaml"


def start(
    file: Path,
    out: Path,
    words: list[str],
    log: Path,
    torchrun: int | None = None,
    restarts: int = 0,
) -> subprocess.Popen:
    """`dolmen train` with its own launcher, or as `torchrun` processes of one host."""
    elastic = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(torchrun),
        "--max-restarts",
        str(restarts),
    ]
    argv = [
        sys.executable,
        *(elastic if torchrun else []),
        "-m",
        "dolmen",
        "train",
        str(file),
        "--out",
        str(out),
        *words,
    ]
    if restarts and not torchrun:
        argv += ["--max-restarts", str(restarts)]
    with log.open("w") as said:
        return subprocess.Popen(argv, stdout=said, stderr=said)


def workers(launcher: int) -> dict[int, int]:
    """Rank -> pid of the launcher's living workers."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
            if int(parent) != launcher or state in "ZX":
                continue
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        found |= {int(w[5:]): int(pid) for w in words if w.startswith(b"RANK=")}
    return found


def logged(out: Path) -> tuple[int, int]:
    """(rows of metrics.jsonl, its time of modification): moves with every step, and back at a
    resume.
    """
    try:
        stat, text = (out / "metrics.jsonl").stat(), (out / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return 0, 0
    return text.count("\n"), stat.st_mtime_ns


def partials(out: Path) -> dict[str, int]:
    """Unfinished saves -> when they were made: one left by a kill keeps its time, one in progress
    has another.
    """
    found = {}
    for path in (out / "checkpoints").glob("*.partial"):
        try:
            found[path.name] = path.stat().st_mtime_ns
        except FileNotFoundError:
            pass
    return found


@dataclass(frozen=True)
class Before:
    """What there was when a group of workers started."""

    logged: tuple[int, int]
    partials: dict[str, int]

    def phase(self, out: Path) -> str:
        """What the group does now."""
        if any(self.partials.get(name) != made for name, made in partials(out).items()):
            return "save"
        rows, changed = logged(out)
        return "step" if rows and changed > self.logged[1] else "start-up"


def kill_one(
    launcher: subprocess.Popen,
    out: Path,
    wanted: str,
    chance: random.Random,
    kills: Kills,
    known: set[int],
) -> set[int]:
    """Wait for a fresh group, then for a moment of the `wanted` kind, kill one of its ranks; the
    pids of all groups so far.
    """
    group: dict[int, int] = {}
    before = Before(logged(out), partials(out))
    while launcher.poll() is None and (not group or set(group.values()) & known):
        time.sleep(0.01)
        group, before = workers(launcher.pid), Before(logged(out), partials(out))
    while launcher.poll() is None and wanted != "start-up" and before.phase(out) != wanted:
        time.sleep(0.0005 if wanted == "save" else 0.01)
    time.sleep(chance.uniform(0, {"start-up": 6, "step": 1, "save": 0.01}[wanted]))
    group, seen = workers(launcher.pid), before.phase(out)
    if launcher.poll() is not None or not group:
        return known
    rank = chance.choice(sorted(group))
    try:
        os.kill(group[rank], signal.SIGKILL)
    except ProcessLookupError:
        return known
    kills.seen[seen] += 1
    kills.ranks[rank] += 1
    return known | set(group.values())


def tensors(out: Path) -> dict[str, torch.Tensor]:
    saved = open_checkpoint(locate(out))
    return {name: saved.read(name) for name in saved.specs}


def table(
    kills: Kills, restarts: str, seconds: tuple[float, float], steps: int, equal: bool, rows: bool
) -> Table:
    shown = Table(
        "", "undisturbed", "killed", title="kill -9 at random moments", title_justify="left"
    )
    for kind in KINDS:
        shown.add_row(f"kills, {kind}", "0", str(kills.seen[kind]))
    shown.add_row("kills, all", "0", str(kills.total))
    shown.add_row(
        "of rank", "", ", ".join(f"{rank}: {n}" for rank, n in sorted(kills.ranks.items()))
    )
    shown.add_row("restarts", "0", restarts)
    shown.add_row("steps", str(steps), str(steps))
    shown.add_row("wall time", *(f"{s:.0f} s" for s in seconds))
    shown.add_row(
        "final weights and optimizer state", "", "equal, bit by bit" if equal else "DIFFERENT"
    )
    shown.add_row("losses of all steps", "", "equal" if rows else "DIFFERENT")
    return shown


def losses(out: Path) -> list[tuple]:
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--torchrun", type=int, help="processes to start by torchrun, and not by dolmen"
    )
    given, words = parser.parse_known_args()
    words = words or ["--layout.tp", "2"]
    screen, chance, kills = Console(), random.Random(given.seed), Kills()
    with tempfile.TemporaryDirectory(prefix="chaos_") as name:
        folder = Path(name)
        file = corpus(folder)
        words += ["--train.steps", str(given.steps), "--checkpoint.every", str(given.every)]
        began = time.monotonic()
        calm = start(file, folder / "calm", words, folder / "calm.log", given.torchrun).wait()
        if calm:
            raise SystemExit((folder / "calm.log").read_text())
        between, known = time.monotonic(), set()
        screen.print(f"undisturbed: {given.steps} steps in {between - began:.0f} s")
        launcher = start(
            file, folder / "wild", words, folder / "wild.log", given.torchrun, 10 * given.kills
        )
        try:
            while kills.total < given.kills and launcher.poll() is None:
                known = kill_one(
                    launcher, folder / "wild", KINDS[kills.total % len(KINDS)], chance, kills, known
                )
                seen = "  ".join(f"{kind} {kills.seen[kind]}" for kind in KINDS)
                step, passed = logged(folder / "wild")[0], time.monotonic() - between
                screen.print(
                    f"kill {kills.total:3} of {given.kills}  {passed:4.0f} s  step {step:4}  {seen}"
                )
            code = launcher.wait()
        finally:
            if launcher.poll() is None:
                launcher.kill()
        said = (folder / "wild.log").read_text()
        if code:
            raise SystemExit(
                f"{said}\nthe killed run ended with exit code {code} after {kills.total} kills"
            )
        a, b = tensors(folder / "calm"), tensors(folder / "wild")
        equal = a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
        same = losses(folder / "calm") == losses(folder / "wild")
        left = workers(launcher.pid)
        restarts = "by torchrun" if given.torchrun else str(said.count("dolmen: restart "))
        screen.print(
            table(
                kills,
                restarts,
                (between - began, time.monotonic() - between),
                given.steps,
                equal,
                same,
            )
        )
        if kills.total < given.kills:
            screen.print(
                f"the run was over after {kills.total} of {given.kills} kills: give more --steps"
            )
        return 0 if equal and same and kills.total >= given.kills and not left else 1


if __name__ == "__main__":
    sys.exit(main())
