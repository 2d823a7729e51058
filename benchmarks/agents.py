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

from benchmarks.killing import workers
from dolmen.checkpoint.memory import ROOT

RENDEZVOUS = {
    "is_host": 0,
    "last_call_timeout": 1,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
}
"""Settings of the c10d rendezvous (--rdzv-conf)."""
KINDS = ("worker", "agent", "join")
PATIENCE = 180.0


@dataclass
class Event:
    """One disturbance: its kind, the seconds to the next step, and dp and step after it."""

    kind: str
    seconds: float
    dp: int
    step: int


@dataclass
class Cluster:
    """Agents of one run, `least` to `most` of them, with a worker each."""

    argv: list[str]
    """The words after `python -m dolmen train`."""
    out: Path
    logs: Path
    least: int = 2
    most: int = 4
    agents: list[subprocess.Popen] = field(default_factory=list)
    store: subprocess.Popen | None = None
    port: int = 0
    started: int = 0

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

    def disturb(self, kind: str, chance: random.Random) -> None:
        """Do what `kind` says to a random agent."""
        agent = chance.choice(self.living)
        if kind == "join":
            self.join()
        elif kind == "agent":
            self.kill_agent(agent)
        else:
            os.kill(chance.choice([*workers(agent.pid).values()]), signal.SIGKILL)

    def possible(self, kind: str) -> bool:
        """Return whether the number of agents stays within its bounds, and there is somebody to
        kill.
        """
        if kind == "join":
            return len(self.living) < self.most
        if kind == "agent":
            return len(self.living) > self.least
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


def next_step(cluster: Cluster, since: float) -> tuple[float, int, int] | None:
    """Wait for the first step of a start after `since`: its time, its number, and the processes
    that train; None if the run ended before.
    """
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
                return steps[0]["time"], steps[0]["step"], begun["processes"]
        if not cluster.living:
            return None
        time.sleep(0.05)
    raise SystemExit(f"no step {PATIENCE:g} s after a disturbance\n{cluster.said()}")


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
        since = time.time()
        cluster.disturb(kind, chance)
        reached = next_step(cluster, since)
        if reached is not None:
            seen[kind] += 1
            events.append(Event(kind, reached[0] - since, reached[2], reached[1]))
            report(
                f"{len(events):3} of {wanted}  {kind:6}  {len(cluster.living)} agents  "
                f"dp {reached[2]}  step {reached[1]:5} after {reached[0] - since:.1f} s"
            )
    for agent in cluster.living:
        agent.wait(PATIENCE)
    return events
