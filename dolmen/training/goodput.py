"""Goodput: the share of a run's wall time that its steps had, and where the rest went, from the
start of its first process over all restarts.

At every moment the first rank is in one phase, and `GoodputTimer` adds up the seconds of each: the
shares sum to one. The training loop names its phases as it passes them (`Watch.beat`):

    process starts   imports        starting Python, importing PyTorch
      |              start          options, data, building the model
      |              rendezvous     joining the other ranks, agreeing on how to start
      |              restore        reading the checkpoint
    loop             batches        waiting for data
      |              steps          steps that no start of the run had made before
      |              recomputed     steps that one before had made, and lost
      |              saves, validation, other
    process dies     down           until the next process starts: noticing, queueing
      |              start ...

    stragglers       part of the steps in which the fastest rank waited for the slowest

The sums are in goodput.json, which is written where a phase begins, at most once a second: what a
kill cuts off, part of a step, counts as `down`. The time between the end of a run and a resume by
hand is not the run's.

Stragglers. A thread of each rank looks at its main thread every 20 ms and counts how often, in a
step, that stands in a collective, and in which. The rank that stands there least is the one that
the others wait for. On a GPU the main thread waits for the device and not in a collective: there
only what the host delays is seen.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from dolmen.core.messages import escape
from dolmen.files import gate, kinds, write
from dolmen.launch.watchdog import collective_of

FILE = "goodput.json"
PHASES = (
    *("steps", "recomputed", "stragglers", "batches", "validation", "saves", "other"),
    *("imports", "start", "rendezvous", "restore", "down"),
)
LOOP = {
    "the first batch": "batches",
    "the next batch": "batches",
    "a step": "steps",
    "validate": "validation",
    "evaluate": "validation",
    "save": "saves",
    "poll": "saves",
    "the last save": "saves",
}
"""Phase of each point of the training loop, as the watchdog names them; "other" if none."""
PERIOD = 0.02
NAMED = 0.02
"""Share of the wall time from which on a slow rank is named."""


class JoinTimes(NamedTuple):
    """Times of this process, in seconds since 1970: started, joining the others, joined; and of the
    seconds between the first two those of imports.
    """

    started: float
    joining: float
    joined: float
    imports: float = 0.0


class Waits(NamedTuple):
    """Seconds of a rank's main thread in steps, and of these in each collective, as sampled."""

    seconds: float
    collectives: Mapping[str, float]

    def share(self, name: str | None = None) -> float:
        """Return the share of the sampled seconds that were spent in the collective `name`, or in
        any collective for None; 0 without samples.
        """
        spent = sum(self.collectives.values()) if name is None else self.collectives.get(name, 0.0)
        return spent / self.seconds if self.seconds else 0.0


class WaitSampler:
    """Samples the thread that makes it, while `active` is set: in a collective or not. The time
    between two samples is that of the later one, so that a process that is stopped counts; what is
    far over a period is no waiting, which lets this thread run.
    """

    def __init__(self):
        """Prepare to sample the calling thread; nothing is sampled yet."""
        self.active = False
        self.main, self.ended = threading.get_ident(), threading.Event()
        self.seconds, self.collectives = 0.0, dict[str, float]()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Context manager: a second thread samples the first one every 20 ms, while `active` is
        set, until the context is left.
        """
        thread = threading.Thread(target=self._run, name="waits", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.ended.set()
            thread.join()

    def _run(self) -> None:
        """Run the sampling thread until the context of `sampling` ends: every 20 ms, if `active`,
        add the time since the last sample to the seconds, and to those of the collective in which
        the sampled thread is, if any.
        """
        last = time.time()
        while not self.ended.wait(PERIOD):
            now = time.time()
            if self.active:
                self.seconds += now - last
                if name := collective_of(sys._current_frames().get(self.main)):
                    waited = min(now - last, 2 * PERIOD)
                    self.collectives[name] = self.collectives.get(name, 0.0) + waited
            last = now

    def take(self) -> Waits:
        """Return the seconds sampled since the last call, and those in each collective, and start
        from 0 again.
        """
        taken = Waits(self.seconds, self.collectives)
        self.seconds, self.collectives = 0.0, {}
        return taken


class GoodputTimer:
    """The phases of a run, as its first rank passes them. `joined`: times of the process before;
    without them the run starts now.
    """

    def __init__(self, joined: JoinTimes | None = None):
        """Start the timer in the phase "start", with the times that this process took to start and
        to join the others; without `joined` the run starts now.
        """
        now = time.time()
        times = joined or JoinTimes(now, now, now)
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.seconds["imports"] = times.imports
        self.seconds["start"] = times.joining - times.started - times.imports
        self.seconds["rendezvous"] = times.joined - times.joining
        self.began, self.since, self.phase = times.started, times.joined, "start"
        self.reached = 0  # the last step that any start has made
        self.slow: dict[str, float] = {}  # rank and collective -> seconds that the others waited
        self.split = 0.0  # of the seconds of steps, those that `add_waits` has seen
        self.file: Path | None = None
        self.written = 0.0
        self.sampler = WaitSampler()
        self.generates = False
        self.idle = False

    def open(self, file: Path, resumed: bool, restarted: bool, idle: bool, step: int) -> None:
        """Begin to write the seconds of each phase to `file` (goodput.json). If the run is
        `resumed`, add those of its earlier starts from that file; if an engine `restarted` it, the
        time since the last start counts as "down". `idle`: nothing is left to train, so the time of
        this start does not count and nothing is written. `step`: steps made so far.
        """
        earlier = _read(file) if resumed else None
        if earlier is not None:
            if restarted:
                self.seconds["down"] += max(0.0, self.began - earlier["until"])
            if idle:
                self.idle = True
                self.seconds = dict.fromkeys(PHASES, 0.0)
            for phase in PHASES:
                self.seconds[phase] += earlier["seconds"].get(phase, 0.0)
            # names are printed, and the file may be anybody's
            self.slow = {escape(name): seconds for name, seconds in earlier["slow"].items()}
            self.split = self.seconds["steps"]
        self.reached = max(step, earlier["reached"] if earlier else 0)
        if not idle:
            self.file = file
            self._write()

    def pass_point(self, step: int, point: str) -> None:
        """Switch to the phase that begins at a point of the training loop, as the watchdog names it
        ("a step": "steps", or "recomputed" if an earlier start had made this step; "save": "saves";
        ...). `step`: steps made so far.
        """
        phase = LOOP.get(point, "other")
        if phase == "batches" and self.generates:
            phase = "steps"  # sampling completions is the work of a run of RL
        elif point == "a step" and step < self.reached:
            phase = "recomputed"
        if self.phase == "steps" and point != "a step":
            self.reached = max(self.reached, step)
        self.switch(phase)

    def switch(self, phase: str) -> None:
        """Enter `phase`, and add the time since the last switch to the phase before; waits are
        sampled in phases of steps only. Writes goodput.json at most once a second.
        """
        now = time.time()
        if not self.idle:
            self.seconds[self.phase] += max(0.0, now - self.since)
        self.since, self.phase = now, phase
        self.sampler.active = phase in ("steps", "recomputed")
        if self.file is not None and now - self.written >= 1:
            self._write()

    def add_waits(self) -> None:
        """Take the samples of all ranks since the last call, and count the part of the steps since
        then in which the fastest rank waited for the slowest as `stragglers`. Collective.
        """
        from dolmen.core import consensus  # torch, which `dolmen show` does without

        waits = consensus.gather_objects(self.sampler.take())
        steps = self.seconds["steps"] - self.split
        lost, name = slowest(waits)
        if lost > 0:
            self.seconds["steps"] -= lost * steps
            self.seconds["stragglers"] += lost * steps
            self.slow[name] = self.slow.get(name, 0.0) + lost * steps
        self.split = self.seconds["steps"]

    def close(self) -> None:
        """Write the sums of seconds to goodput.json a last time, and stop writing."""
        self.switch("other")
        if self.file is not None:
            self._write()
            self.file = None

    def shares(self) -> dict[str, float]:
        """Return phase -> its share of the run's wall time so far; they sum to one. {} if no time
        has passed.
        """
        return shares(self.seconds)

    def slow_ranks(self) -> dict[str, float]:
        """Return "rank N delays COLLECTIVE" -> the share of the run's wall time that other ranks
        waited for this rank there, the largest first: at most four, of 2 % or more each.
        """
        return slow_ranks(self.slow, self.seconds)

    def _write(self) -> None:
        """Write the seconds of each phase, the slow ranks and the last step reached to
        goodput.json.
        """
        assert self.file is not None
        self.written = self.since
        row = {
            "until": self.since,
            "reached": self.reached,
            "seconds": self.seconds,
            "slow": self.slow,
        }
        write.replace(self.file, json.dumps(row), lasting=False)


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each phase in the sum of `seconds`; empty where that is 0."""
    total = sum(seconds.values())
    return {phase: spent / total for phase, spent in seconds.items()} if total else {}


def slow_ranks(slow: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the four worst of the slow ranks, each with the collective that it delayed, and the
    share of the wall time (the sum of `seconds`) that the others waited there; the worst first.
    """
    total = sum(seconds.values())
    worst = sorted(slow, key=lambda name: -slow[name])[:4]
    return {name: slow[name] / total for name in worst if slow[name] >= NAMED * total}


def slowest(waits: list[Waits]) -> tuple[float, str]:
    """Return by how much the share of time in collectives is larger on the rank that waits most
    than on the one that waits least (the slow one), and a text "rank N delays COLLECTIVE" about the
    latter; (0, "") if no rank waits more than another. `waits`: by rank.
    """
    by_share = sorted(range(len(waits)), key=lambda rank: waits[rank].share())
    fast, slow = waits[by_share[-1]], waits[by_share[0]]
    if (lost := fast.share() - slow.share()) <= 0:
        return 0.0, ""
    delayed = max(fast.collectives, key=lambda name: fast.share(name) - slow.share(name))
    return lost, f"rank {by_share[0]} delays {delayed}"


def _read(file: Path) -> dict | None:
    """Return the content of goodput.json; None where it is missing or damaged."""
    try:
        return gate.read_json(file, kinds.GOODPUT)
    except gate.Refused:
        return None


def describe(shares: Mapping[str, float]) -> str:
    """Return the shares of wall time as text: productive steps (goodput) first, then all other
    phases of at least half a percent, the largest first.
    """
    rest = {name: share for name, share in shares.items() if name != "steps" and share >= 0.005}
    order = sorted(rest, key=lambda name: -rest[name])
    text = f"{shares.get('steps', 0.0):.0%} of the wall time in productive steps"
    return "; ".join([text, *(f"{name} {rest[name]:.0%}" for name in order)])
