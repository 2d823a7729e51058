"""Whether a run survives: `kill -9` of a random rank at random moments, many times in one run, and
the final weights and optimizer state compared, bit by bit, with those of a run that nobody
disturbed.

    python benchmarks/chaos.py --kills 20 --layout.tp 2
        other options go to `dolmen train`, for both runs
    python benchmarks/chaos.py --torchrun 2
        the restarts are those of torchrun's elastic agent
    python benchmarks/chaos.py --elastic --kills 20 --steps 4000
        agents of torchrun, 1 to 4 of them, die, join, and lose workers (agents.py); exact numerics
=======
        agents of torchrun, 2 to 4 of them, die, join, and lose workers (agents.py); exact numerics
    python benchmarks/chaos.py --layouts --kills 20 --steps 200
        each start after a kill has another layout, and the undisturbed run one process
    python benchmarks/chaos.py --ppo --kills 8 --steps 60
        a policy and its critic, which learn from what the policy draws

Moments are drawn by kind, so that none is missed: start-up (before the first step after a restart),
a step, a save (its `.partial` folder is there), and of --ppo while answers are drawn. What is told
is what was seen at the moment of the kill. Exit code 1 if a bit differs.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import yaml
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a file: Python then looks for `benchmarks` beside it
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.agents import KINDS as KINDS_OF_EVENTS
from benchmarks.agents import OURS, PARTS, RENDEZVOUS, Cluster, Event, disturb
from benchmarks.killing import Kills, kill_one, logged, workers
from dolmen.checkpoint.reader import Checkpoint, locate
from dolmen.data.tokenizer import train_bpe

KINDS = ("start-up", "step", "save")
PPO = {
    "objective": {"name": "ppo"},
    "reward": ["stub"],
    "rollout": {"num_generations": 2, "prompts": 8, "epochs": 2, "max_new_tokens": 24},
    "ppo": {"kl_target": 0.5, "kl_coef": 0.1},
}
"""Phases of PHASE updates of 8 answers."""
MODEL = dict(
    model_type="llama",
    vocab_size=300,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
)


ELASTIC = [
    *("--train.numerics", "exact", "--train.exact.tp", "1", "--layout.reduction", "fixed"),
    *("--model.hidden-size", "32", "--model.intermediate-size", "48", "--model.head-dim", "8"),
    *("--model.num-hidden-layers", "2", "--train.sequence-length", "16"),
]
"""A model so small that a restart takes longer than a hundred steps. Of its batch of 8, exact
numerics allow dp 1, 2 and 4: of three agents one is a spare.
"""
LAYOUTS = (
    ("--layout.tp", "2"),
    ("--layout.dp", "2", "--layout.zero", "3"),
    ("--layout.pp", "2", "--train.microbatch-size", "2"),
    ("--layout.tp", "2", "--layout.sequence-parallel", "--train.microbatch-size", "4"),
    ("--layout.dp", "2", "--layout.zero", "2", "--train.microbatch-size", "1"),
    ("--layout.pp", "2", "--layout.schedule", "zero-bubble", "--train.microbatch-size", "1"),
)
"""The layouts of a run with exact numerics that starts again with another one."""
SNAPSHOTS = ["--checkpoint.snapshot-every", "5"]


def corpus(folder: Path, ppo: bool = False) -> Path:
    """A made-up language in 30 documents, its tokenizer, and a run file of 4 layers; of `ppo`, one
    that answers prompts.
    """
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
    if ppo:
        (folder / "prompts.jsonl").write_text(
            "\n".join(json.dumps({"prompt": f"{word} "}) for word in words)
        )
        data |= {"path": [str(folder / "prompts.jsonl")], "rows": "prompts"}
        run |= PPO
        del run["log"]
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


def tensors(out: Path) -> dict[str, torch.Tensor]:
    saved = Checkpoint(locate(out))
    return {name: saved.read(name) for name in saved.specs}


def table(
    kills: Kills, restarts: str, seconds: tuple[float, float], steps: int, equal: bool, rows: bool
) -> Table:
    shown = Table(
        "", "undisturbed", "killed", title="kill -9 at random moments", title_justify="left"
    )
    for kind in (*KINDS, "draw"):
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


@dataclass(frozen=True)
class Runs:
    """The two runs, in a folder of their own, and how both are started."""

    folder: Path
    file: Path
    words: list[str]
    torchrun: int | None
    kinds: tuple[str, ...] = KINDS

    @property
    def calm(self) -> Path:
        return self.folder / "calm"

    @property
    def wild(self) -> Path:
        return self.folder / "wild"

    def start(self, out: Path, restarts: int = 0, more: tuple[str, ...] = ()) -> subprocess.Popen:
        log, words = out.with_suffix(".log"), [*self.words, *more]
        return start(self.file, out, words, log, self.torchrun, restarts)

    def said(self, out: Path) -> str:
        return out.with_suffix(".log").read_text()


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """Those of this file, and those of `dolmen train`."""
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
    parser.add_argument("--elastic", action="store_true", help="agents of torchrun die and join")
    parser.add_argument("--layouts", action="store_true", help="another layout after each kill")
    parser.add_argument("--ppo", action="store_true", help="a run that draws what it learns from")
    given, words = parser.parse_known_args()
    if given.layouts:
        words = [*(words or ELASTIC), "--train.exact.tp", "2"]
    words = words or (ELASTIC if given.elastic else ["--layout.tp", "2"])
    return given, [
        *words,
        "--train.steps",
        str(given.steps),
        "--checkpoint.every",
        str(given.every),
    ]


def undisturbed(runs: Runs) -> float:
    """Its seconds."""
    began = time.monotonic()
    if runs.start(runs.calm).wait():
        raise SystemExit(runs.said(runs.calm))
    return time.monotonic() - began


def disturbed(runs: Runs, wanted: int, seed: int, screen: Console) -> tuple[Kills, float, bool]:
    """What was killed, in how many seconds, and whether workers were left."""
    chance, kills, known = random.Random(seed), Kills(), set()
    began = time.monotonic()
    launcher = runs.start(runs.wild, 10 * wanted)
    try:
        while kills.total < wanted and launcher.poll() is None:
            kind = runs.kinds[kills.total % len(runs.kinds)]
            known = kill_one(launcher, runs.wild, kind, chance, kills, known)
            seen = "  ".join(f"{kind} {kills.seen[kind]}" for kind in runs.kinds)
            step, passed = logged(runs.wild)[0], time.monotonic() - began
            screen.print(
                f"kill {kills.total:3} of {wanted}  {passed:4.0f} s  step {step:4}  {seen}"
            )
        code = launcher.wait()
    finally:
        if launcher.poll() is None:
            launcher.kill()
    if code:
        raise SystemExit(
            f"{runs.said(runs.wild)}\nthe killed run ended with exit code {code} after "
            f"{kills.total} kills"
        )
    return kills, time.monotonic() - began, bool(workers(launcher.pid))


def relayout(runs: Runs, wanted: int, seed: int, screen: Console) -> Kills:
    """Start the run `wild` with one layout after the other, and kill a rank of each but the last;
    what was killed.
    """
    chance, kills = random.Random(seed), Kills()
    for number in range(wanted + 1):
        layout = LAYOUTS[number % len(LAYOUTS)]
        launcher = runs.start(runs.wild, more=("--resume", *layout))
        try:
            if number < wanted:
                kill_one(launcher, runs.wild, ("step", "save")[number % 2], chance, kills, set())
            code = launcher.wait()
        finally:
            if launcher.poll() is None:
                launcher.kill()
        if number == wanted and code:
            raise SystemExit(runs.said(runs.wild))
        screen.print(f"{number:3}  step {logged(runs.wild)[0]:4}  {' '.join(layout)}")
    return kills


def digest(out: Path) -> str:
    """SHA-256 of all weights and moments of the last checkpoint, in the order of names."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors(out).items()):
        found.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def elastic(runs: Runs, given: argparse.Namespace, screen: Console) -> list[Event]:
    """Disturb the run `wild`, with snapshots in memory; print and return what was done."""
    logs = runs.folder / "logs"
    logs.mkdir()
    argv = [
        str(runs.file),
        "--out",
        str(runs.wild),
        "--resume",
        "--spares",
        *runs.words,
        *SNAPSHOTS,
    ]
    with Cluster(argv, runs.wild, logs) as cluster:
        events = disturb(cluster, given.kills, given.seed, screen.print)
        shown = Table(
            "", "events", "median s", "worst s", title="from a disturbance to the next step"
        )
        for kind in (*KINDS_OF_EVENTS, "all"):
            seconds = [event.seconds for event in events if kind in (event.kind, "all")]
            if seconds:
                row = f"{median(seconds):.1f}", f"{max(seconds):.1f}"
                shown.add_row(kind, str(len(seconds)), *row)
        screen.print(shown)
        screen.print(parts_table(events))
        settings = ", ".join(f"{name} {value}" for name, value in RENDEZVOUS.items())
        changes = sum(a.dp != b.dp for a, b in zip(events, events[1:], strict=False))
        restored = cluster.said().count("in memory is newer")
        screen.print(
            f"changes of dp: {changes}; resumed from memory: {restored}; rendezvous: {settings}"
        )
    return events


def parts_table(events: list[Event]) -> Table:
    """Return a table of how the times divide."""
    shown = Table("", "median s", "worst s", "", title="of these", title_justify="left")
    rows = [(name, what, [event.parts[name] for event in events]) for name, what in PARTS.items()]
    beyond = [event.remainder for event in events]
    rows.append(("beyond rendezvous and process start", ", ".join(OURS), beyond))
    for name, what, seconds in rows:
        if seconds:
            shown.add_row(name, f"{median(seconds):.1f}", f"{max(seconds):.1f}", what)
    return shown


def compare(runs: Runs) -> tuple[bool, bool]:
    """Whether final weights and optimizer state, and all losses, of both runs are equal."""
    a, b = tensors(runs.calm), tensors(runs.wild)
    equal = a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    return equal, losses(runs.calm) == losses(runs.wild)


def main() -> int:
    (given, words), screen = arguments(), Console()
    with tempfile.TemporaryDirectory(prefix="chaos_") as name:
        folder = Path(name)
        kinds = (*KINDS, "draw") if given.ppo else KINDS
        runs = Runs(folder, corpus(folder, given.ppo), words, given.torchrun, kinds)
        calm = undisturbed(runs)
        screen.print(f"undisturbed: {given.steps} steps in {calm:.0f} s")
        if given.elastic:
            events = elastic(runs, given, screen)
            equal, same = compare(runs)
            screen.print(f"weights and optimizer state equal: {equal}; losses of all steps: {same}")
            return 0 if equal and same and len(events) >= given.kills else 1
        if given.layouts:
            kills = relayout(runs, given.kills, given.seed, screen)
            (equal, same), hashes = compare(runs), [digest(out) for out in (runs.calm, runs.wild)]
            for out, sha in zip(("one process", "killed"), hashes, strict=True):
                screen.print(f"SHA-256 of weights and moments, {out}: {sha}")
            screen.print(f"kills: {kills.total}; losses of all steps equal: {same}")
            return 0 if equal and same and hashes[0] == hashes[1] else 1
        kills, wild, left = disturbed(runs, given.kills, given.seed, screen)
        equal, same = compare(runs)
        again = str(runs.said(runs.wild).count("dolmen: restart "))
        restarts = "by torchrun" if given.torchrun else again
        screen.print(table(kills, restarts, (calm, wild), given.steps, equal, same))
        if kills.total < given.kills:
            screen.print(
                f"the run was over after {kills.total} of {given.kills} kills: give more --steps"
            )
        return 0 if equal and same and kills.total >= given.kills and not left else 1


if __name__ == "__main__":
    sys.exit(main())
