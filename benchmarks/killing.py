"""What `chaos.py` does to a run: it finds the workers of a launcher, sees in its folder what they
do, and kills one at a moment of a given kind.
"""

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

PHASE = 4  # updates of each phase of a run that draws


@dataclass
class Kills:
    """What the killer has done."""

    seen: Counter = field(default_factory=Counter)
    ranks: Counter = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.seen.values())


def workers(launcher: int) -> dict[int, int]:
    """Rank -> pid of the living workers of torchrun, whose children they are, with RANK in their
    environment, or of dolmen's launcher, whose fork server names them.
    """
    parents, named, told = {}, {}, {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            name, fields = Path(f"/proc/{pid}/stat").read_text().split("(", 1)[1].rsplit(")", 1)
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        state, parent = fields.split()[:2]
        if state in "ZX":
            continue
        parents[pid] = int(parent)
        if name.startswith("dolmen rank "):
            named[pid] = int(name.removeprefix("dolmen rank "))
        elif parents[pid] == launcher:
            told |= {int(w[5:]): pid for w in words if w.startswith(b"RANK=")}
    forked = {r: pid for pid, r in named.items() if parents.get(parents[pid]) == launcher}
    return told | forked


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


def drawing(out: Path) -> bool:
    """Whether the run draws what it is to learn from next: a phase of PHASE updates is over, and
    the file of the next one is not there yet.
    """
    try:
        step = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    except (FileNotFoundError, IndexError, ValueError):
        return False
    rollouts = out / "rollouts"
    begins = step % PHASE == 0 and rollouts.is_dir()
    return begins and not (rollouts / f"{step:08d}.safetensors").exists()


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
        if not rows or changed <= self.logged[1]:
            return "start-up"
        return "draw" if drawing(out) else "step"


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
        time.sleep(0.0005 if wanted in ("save", "draw") else 0.01)
    time.sleep(chance.uniform(0, {"start-up": 6, "step": 1, "save": 0.01, "draw": 0.3}[wanted]))
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
