"""What `chaos.py --elastic` does to a run: torchrun's agents on loopback, each as if it were a
host, with a rendezvous store in a process of its own; agents are killed, join, and lose workers, at
random moments.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.killing import workers
from dolmen.checkpoint.memory import ROOT
from dolmen.training.goodput import FILE

RENDEZVOUS = {
    "is_host": 0,
    "last_call_timeout": 1,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
}
"""Settings of the c10d rendezvous (--rdzv-conf)."""
KINDS = ("worker", "agent", "join")
PARTS = {
    "torchrun": "noticing it, ending the workers, its rendezvous",
    "imports": "starting Python, importing PyTorch",
    "rendezvous": "joining the process group",
    "save": "the save before a join",
    "start": "options, data, building the model",
    "restore": "reading the snapshot or checkpoint",
    "first step": "",
}
"""The parts of the time from a disturbance to the next step."""
OURS = ("save", "start", "restore", "first step")
"""Those beyond rendezvous and process start."""
PATIENCE = 180.0


class Reached(NamedTuple):
    """The first step after a start: its time and number, when the start had restored what there
    was, the processes that train, and the seconds of the run so far by phase (goodput.py).
    """

    time: float
    step: int
    restored: float
    dp: int
    phases: dict[str, float]


@dataclass
class Event:
    """One disturbance: its kind, the seconds to the next step, and dp and step after it. `parts`:
    of these seconds, those of each of PARTS.
    """

    kind: str
    seconds: float
    dp: int
    step: int
    parts: dict[str, float]

    @property
    def remainder(self) -> float:
        """Seconds beyond rendezvous and process start."""
        return sum(self.parts[name] for name in OURS)


@dataclass
class Cluster:
    """Agents of one run, `least` to `most` of them, with a worker each."""

    argv: list[str]
    """The words after `python -m dolmen train`."""
    out: Path
    logs: Path
    least: int = 1
    most: int = 4
    agents: list[subprocess.Popen] = field(default_factory=list)
    store: subprocess.Popen | None = None
    port: int = 0
    started: int = 0
    grows: bool = True
    """Agents join until there are `most`, then die until there are `least`: dp changes more often
    than if each death were followed by a join.
    """

    def __enter__(self) -> "Cluster":
        words = [sys.executable, "-m", "dolmen.launch.rendezvous", "0"]
        self.store = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.store.stdout is not None
        self.port = int(self.store.stdout.readline().split()[-1])
        return self

    def __exit__(self, *error: object) -> None:
        for process in [*self.agents, self.store]:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    @property
    def living(self) -> list[subprocess.Popen]:
        """The agents that run."""
        return [agent for agent in self.agents if agent.poll() is None]

    def join(self) -> None:
        """Start one more agent."""
        conf = ",".join(f"{name}={value}" for name, value in RENDEZVOUS.items())
        words = [
            *("--nnodes", f"{self.least}:{self.most}", "--nproc-per-node", "1"),
            *("--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-id", "chaos"),
            *("--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-conf", conf),
            *("--local-addr", "127.0.0.1", "-m", "dolmen", "train", *self.argv),
        ]
        # the agents' own store is one of rank 0's agent, with which it would be lost
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        self.started += 1
        with (self.logs / f"agent-{self.started}.log").open("w") as log:
            program = [sys.executable, "-m", "torch.distributed.run", *words]
            self.agents.append(subprocess.Popen(program, stdout=log, stderr=log, env=env))

    def kill_agent(self, agent: subprocess.Popen) -> None:
        """Kill an agent, whose workers the kernel kills, and delete its memory, as of a lost
        host.
        """
        start = Path(f"/proc/{agent.pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
        name = f"{socket.gethostname()} {agent.pid} {start}"
        agent.kill()
        agent.wait()
        folder = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
        for memory in ROOT.glob(f"dolmen-{os.getuid()}-*/{folder}"):
            shutil.rmtree(memory)

    def disturb(self, kind: str, chance: random.Random, processes: int) -> None:
        """Do what `kind` says to a random agent: for its death one that has one of the `processes`
        that train, since nobody waits for a spare.
        """
        ranks = {agent.pid: workers(agent.pid) for agent in self.living}
        if kind == "join":
            self.join()
        elif kind == "agent":
            train = [a for a in self.living if min(ranks[a.pid], default=0) < processes]
            self.kill_agent(chance.choice(train))
        else:
            agent = chance.choice(self.living)
            os.kill(chance.choice([*ranks[agent.pid].values()]), signal.SIGKILL)

    def possible(self, kind: str) -> bool:
        """Return whether the number of agents stays within its bounds, on its way from one to the
        other, and there is somebody to kill.
        """
        living = len(self.living)
        if living in (self.least, self.most):
            self.grows = living < self.most
        if kind != "worker":
            return self.grows == (kind == "join")
        return all(workers(agent.pid) for agent in self.living)

    def said(self) -> str:
        """All logs, one after the other."""
        return "\n".join(file.read_text() for file in sorted(self.logs.glob("agent-*.log")))


def rows(file: Path) -> list[dict]:
    """The complete rows of a file that somebody writes."""
    if not file.exists():
        return []
    lines = file.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines if line]


def next_step(cluster: Cluster, since: float) -> Reached | None:
    """Wait for the first step of a start after `since`; None if the run ended before."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        starts = [
            r for r in rows(cluster.out / "history.jsonl") if "begun" in r and r["time"] > since
        ]
        if starts:
            begun = starts[-1]
            steps = [
                r
                for r in rows(cluster.out / "metrics.jsonl")
                if "loss" in r and r["time"] > begun["time"]
            ]
            if steps:
                phases = json.loads((cluster.out / FILE).read_text())["seconds"]
                return Reached(
                    steps[0]["time"], steps[0]["step"], begun["time"], begun["processes"], phases
                )
        if not cluster.living:
            return None
        time.sleep(0.05)
    raise SystemExit(f"no step {PATIENCE:g} s after a disturbance\n{cluster.said()[-8000:]}")


def divide(kind: str, since: float, before: Reached, after: Reached) -> dict[str, float]:
    """Divide the seconds from a disturbance to the next step into PARTS."""
    spent = {name: after.phases[name] - before.phases[name] for name in before.phases}
    ours = {
        **{name: spent[name] for name in ("imports", "rendezvous", "start", "restore")},
        # before a kill nobody saves; saves between two joins are counted too
        "save": spent["saves"] if kind == "join" else 0.0,
        "first step": after.time - after.restored,
    }
    return {"torchrun": after.time - since - sum(ours.values()), **ours}


def disturb(
    cluster: Cluster, wanted: int, seed: int, report: Callable[[str], None] = print
) -> list[Event]:
    """Start the least agents, disturb them `wanted` times, and wait for the end of the run."""
    chance, events, seen = random.Random(seed), [], Counter()
    since = time.time()
    for _ in range(cluster.least):
        cluster.join()
    reached = next_step(cluster, since)
    while reached is not None and len(events) < wanted:
        time.sleep(chance.uniform(0.2, 1.5))
        possible = [kind for kind in KINDS if cluster.possible(kind)]
        if not cluster.living or not possible:
            break
        # the one that was least often, so that none is missed
        kind = min(possible, key=lambda kind: (seen[kind], chance.random()))
        since, before = time.time(), reached
        cluster.disturb(kind, chance, reached.dp)
        reached = next_step(cluster, since)
        if reached is not None:
            seen[kind] += 1
            parts, seconds = divide(kind, since, before, reached), reached.time - since
            events.append(Event(kind, seconds, reached.dp, reached.step, parts))
            report(
                f"{len(events):3} of {wanted}  {kind:6}  {len(cluster.living)} agents  "
                f"dp {reached.dp}  step {reached.step:5} after {seconds:.1f} s"
            )
    for agent in cluster.living:
        agent.wait(PATIENCE)
    return events
