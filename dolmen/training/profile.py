"""The profile of one step (--log.profile STEP): a trace that chrome://tracing and Perfetto open, a
table of where the time went by kind, and both as a picture.

    profile/step-N/trace-rank-R.json.gz, picture-rank-R.png    of the first rank of each stage
    profile/step-N/table.txt, table.json                       of the same ranks

One rank per stage of the pipeline: the others of its stage compute the same sizes in the same
order, and the stages differ. All ranks record, as a rank that records is slower and the others
would be seen waiting for it; and each tells how long its collectives took, so that what was waiting
for other ranks is told apart.

    with record(device) as recording: step()
    print("\\n".join(timeline.lines(timeline.tabulate(recording.timeline()))))
"""

import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dolmen.core import agree, collectives, ranges
from dolmen.core.mesh import Axis, Mesh
from dolmen.core.messages import counted
from dolmen.files import write
from dolmen.training import events, folder, picture, timeline
from dolmen.training.events import Timeline
from dolmen.training.timeline import Table


class Recording:
    """torch.profiler over one step: what the CPU does, and the GPU if there is one. `start` may
    come a step early: the profiler's own start is then not in what is seen.
    """

    def __init__(self, device: torch.device):
        self.device = device
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        once = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
        self.profiler = torch.profiler.profile(activities=kinds, schedule=once, acc_events=True)
        self.started = False

    def start(self) -> None:
        if not self.started:
            self.profiler.start()
            self.started = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within is the step: from when the device has nothing to do until it has done all."""
        self.start()
        self._settle()
        self.profiler.step()
        try:
            with ranges.mark("step"):
                yield
                self._settle()
        finally:
            self.stop()

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def stop(self) -> None:
        if self.started:
            self.profiler.stop()
            self.started = False

    def trace(self) -> bytes:
        """The Chrome trace, JSON."""
        with tempfile.TemporaryDirectory() as made:
            file = Path(made) / "trace.json"
            self.profiler.export_chrome_trace(str(file))
            return file.read_bytes()

    def timeline(self) -> Timeline:
        return read_profile(self.trace())


def read_profile(trace: bytes) -> Timeline:
    """A Chrome trace that `Recording` gave. Raises ValueError where it is none."""
    # strict: kernels' names are C++, and may hold anything
    return events.read_trace(json.loads(trace, strict=False)["traceEvents"])


@contextmanager
def record(device: torch.device) -> Iterator[Recording]:
    """Within is one step that is recorded; `timeline` and `trace` afterwards."""
    recording = Recording(device)
    with recording.step():
        yield recording


class Profile:
    """The profile of step `number` (counted from 1; None: of none) of a run in the folder `out`.
    Every rank has one.
    """

    def __init__(self, number: int | None, mesh: Mesh, out: Path):
        self.number, self.mesh, self.out = number, mesh, out
        self.recording: Recording | None = None

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """Within is step `number` of the run."""
        if self.number is None or number not in (self.number - 1, self.number):
            yield
            return
        self.recording = self.recording or Recording(self.mesh.device)
        if number == self.number:
            with self.recording.step():
                yield
        else:
            self.recording.start()
            yield

    def close(self) -> None:
        """Of a run that ends between the step before and the step."""
        if self.recording is not None:
            self.recording.stop()

    def write(self, facts: Callable[[float], dict[str, Any]]) -> list[str]:
        """Write what was recorded; what to tell, on the first rank, else nothing. All ranks call
        it. `facts`: what is to stand in table.json of a step of so many seconds. What cannot be
        written is told, and raises nothing: no rank waits for one that failed.
        """
        assert self.recording is not None
        recording, self.recording = self.recording, None
        mesh, failed, table = self.mesh, [], None
        trace, found = b"", None
        with _telling(failed):
            trace = recording.trace()
            found = read_profile(trace)
        least = _least(found.took if found else {}, mesh)
        if found:
            table = timeline.with_waiting(timeline.tabulate(found), found.took, least)
        shown = mesh.dp.rank == mesh.cp.rank == mesh.tp.rank == 0
        with _telling(failed):
            if mesh.first:
                folder.claim(self.out, "profile")
            if shown and found and table:
                self._trace(trace, found, table)
        mine = ((mesh.rank, mesh.pp.rank, table) if shown and table else None, mesh.rank, failed)
        everyone = agree.gather_objects(mine) if mesh.size > 1 else [mine]
        if not mesh.first:
            return []
        tables = [one for one, *_ in everyone if one is not None]
        text = self._tables(tables, facts, failed) if tables else []
        why = [f"on rank {rank}: {one}" for _, rank, some in everyone for one in some[:1]]
        why += [f"on rank {mesh.rank}: {one}" for one in failed if not why]
        if not why:
            return [*text, f"profile: {self._folder()}"]
        more = f" (and on {counted(len(why) - 1, 'other rank')})" if len(why) > 1 else ""
        return [*text, f"the profile of step {self.number} is not written {why[0]}{more}"]

    def _folder(self) -> Path:
        return self.out / f"profile/step-{self.number}"

    def _made(self) -> Path:
        """The folder, made. Raises OSError."""
        return write.folder(self.out, self._folder().relative_to(self.out))

    def _trace(self, trace: bytes, found: Timeline, table: Table) -> None:
        rank, stage = self.mesh.rank, self.mesh.pp
        title = f"step {self.number}, rank {rank}, stage {stage.rank} of {stage.size}"
        to = self._made()
        write.replace(to / f"trace-rank-{rank}.json.gz", gzip.compress(trace, 6, mtime=0))
        write.replace(to / f"picture-rank-{rank}.png", picture.draw(table, found, title))

    def _tables(
        self,
        tables: list[tuple[int, int, Table]],
        facts: Callable[[float], dict],
        failed: list[str],
    ) -> list[str]:
        """Write table.txt and table.json; what to tell."""
        known = facts(tables[0][2].seconds)
        text = []
        for rank, stage, table in tables:
            text.append(f"step {self.number}, rank {rank}, stage {stage}: {table.seconds:.4f} s")
            text += [f"  {line}" for line in timeline.lines(table)]
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in known.items())
        text += [f"{numbers} (under the profiler)"] if known else []
        rows = [{"rank": r, "stage": s, **asdict(table)} for r, s, table in tables]
        whole = {"step": self.number, **known, "ranks": rows}
        with _telling(failed):
            to = self._made()
            write.replace(to / "table.json", json.dumps(whole, indent=1) + "\n")
            write.replace(to / "table.txt", "\n".join(text) + "\n")
        return text


@contextmanager
def _telling(failed: list[str]) -> Iterator[None]:
    """Within, what cannot be written, or was cut short, is put into `failed`."""
    try:
        yield
    except OSError as error:
        failed.append(f"{error.filename or 'its trace'}: {error.strerror or error}")
    except json.JSONDecodeError as error:  # a full disk may cut a trace in silence
        failed.append(f"its trace in {tempfile.gettempdir()} is cut short: {error}")


def _least(took: dict[str, list[float]], mesh: Mesh) -> dict[str, list[float]]:
    """By kind of collective, the least that each took on any rank of its axis. Kinds of which the
    ranks had different numbers are left out: their stages differ.
    """
    out = {}
    for axis in (mesh.tp, mesh.cp, mesh.ep, mesh.fsdp, mesh.edp, mesh.dp, mesh.world):
        kind = f"{events.COLLECTIVES} {axis.name}"
        mine = took.get(kind, [])
        if axis.size > 1 and _same(len(mine), axis, mesh) and mine:
            times = torch.tensor(mine, dtype=torch.float64, device=mesh.device)
            out[kind] = collectives.reduce_scalar(times, axis, "min").tolist()
    return out


def _same(number: int, axis: Axis, mesh: Mesh) -> bool:
    both = torch.tensor([number, -number], device=mesh.device)
    most, least = collectives.reduce_scalar(both, axis, "max").tolist()
    return most == -least
