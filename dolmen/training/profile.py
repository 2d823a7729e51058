"""The profile of one step (--log.profile STEP): a trace for chrome://tracing and Perfetto, and a
table of where the time went by kind of work.

    profile/step-N/trace-rank-R.json.gz    of the first rank of each stage
    profile/step-N/table.txt, table.json   of the same ranks: seconds by kind, and by operator

One rank per stage of the pipeline writes: the others of its stage compute the same sizes in the
same order, and the stages differ. All ranks record, as a rank that records is slower and the others
would be seen waiting for it; and each measures how long its collectives took, so that waiting for
other ranks is separated from communication.

    with record(device) as recording: step()
    print("\n".join(recording.tabulate()[0].lines()))
"""

import gzip
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dolmen.core import collectives, consensus, profiling
from dolmen.core.mesh import Axis, Mesh
from dolmen.core.messages import plural
from dolmen.files import write
from dolmen.training import folder, profile_table
from dolmen.training.profile_table import ProfileTable

OPERATORS = 30  # the longest of them, in table.txt


class StepRecording:
    """torch.profiler over one step, of the CPU, and of the GPU if there is one. `start` may be
    called a step early, so that the profiler's own start-up (seconds) is not part of what is
    recorded.
    """

    def __init__(self, device: torch.device):
        """Prepare, not start, a profiler of the CPU, and of `device` if that is a GPU."""
        self.device = device
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        # the warm-up step takes the profiler's own start, which costs up to seconds
        once = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
        self.profiler = torch.profiler.profile(activities=kinds, schedule=once, acc_events=True)
        self.started = False

    def start(self) -> None:
        """Start the profiler in its warm-up, which records nothing; a second call does nothing."""
        if not self.started:
            self.profiler.start()
            self.started = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager that records its body as the step, and stops the profiler after it. The
        device is synchronized before and after, so that only this step's kernels are recorded.
        """
        self.start()
        self._settle()
        self.profiler.step()
        try:
            with profiling.record_range("step"):
                yield
                self._settle()
        finally:
            self.stop()

    def _settle(self) -> None:
        """Wait until the GPU has finished all queued work; nothing on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def stop(self) -> None:
        """Stop the profiler, if it was started."""
        if self.started:
            self.profiler.stop()
            self.started = False

    def trace(self) -> bytes:
        """Return the Chrome trace of the step as JSON. Raises OSError where the temporary file
        could not be written in full.
        """
        with tempfile.TemporaryDirectory() as temporary:
            file = Path(temporary) / "trace.json"
            self.profiler.export_chrome_trace(str(file))
            trace = file.read_bytes()
        if not trace.rstrip().endswith(b"}"):  # torch writes to a full disk in silence
            raise OSError(0, "it is truncated", f"the trace in {tempfile.gettempdir()}")
        return trace

    def tabulate(self) -> tuple[ProfileTable, Mapping[str, list[float]]]:
        """Return a table of the recorded step's time by kind of work, and, by kind of collective,
        the seconds of each call.
        """
        return profile_table.tabulate(self.profiler.events() or ())

    def operators(self) -> str:
        """Return a table, as text, of the 30 operators of the recorded step with most self time, on
        the GPU if there is one.
        """
        by = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        return self.profiler.key_averages().table(sort_by=by, row_limit=OPERATORS)


@contextmanager
def record(device: torch.device) -> Iterator[StepRecording]:
    """Context manager that records its body as one step, and yields the recording; `tabulate` and
    `trace` read it afterwards.
    """
    recording = StepRecording(device)
    with recording.step():
        yield recording


class Profile:
    """Profiles step `number` (counted from 1; None: no step) of a run and writes the result into
    its folder `out`. Every rank has one.
    """

    def __init__(self, number: int | None, mesh: Mesh, out: Path):
        """Prepare the profile of the step `number`, counted from 1 (None: of none), of the run in
        the folder `out`.
        """
        self.number, self.mesh, self.out = number, mesh, out
        self.recording: StepRecording | None = None

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """Context manager around step `number` of the run: starts the profiler in the step before
        the one to be profiled, and records that one. Around other steps it does nothing.
        """
        if self.number is None or number not in (self.number - 1, self.number):
            yield
            return
        self.recording = self.recording or StepRecording(self.mesh.device)
        if number == self.number:
            with self.recording.step():
                yield
        else:
            self.recording.start()
            yield

    def close(self) -> None:
        """Stop the profiler if it is running, as when the run ends before the step that was to be
        profiled.
        """
        if self.recording is not None:
            self.recording.stop()

    def write(self, facts: Callable[[float], dict[str, Any]]) -> list[str]:
        """Write the trace (first rank of each pipeline stage) and the tables (first rank) of the
        recorded step into the run's folder, and return the lines to print; [] on all ranks but the
        first. Collective.

        `facts` maps the seconds of the step to further numbers for table.json. A file that cannot
        be written is reported in the lines and raises nothing, as other ranks would wait for this
        one.
        """
        assert self.recording is not None
        recording, self.recording = self.recording, None
        mesh, failed = self.mesh, []
        table, durations = recording.tabulate()
        measured = {kind: sum(seconds) for kind, seconds in durations.items()}
        # waiting: what this rank spent in collectives, less what the last rank to arrive spent
        table = table.split_waiting(measured, _least(durations, mesh))
        # the first rank of each stage
        reports = mesh.dp.rank == mesh.cp.rank == mesh.tp.rank == 0
        with _collect_failure(failed):
            if mesh.first:
                folder.claim(self.out, "profile")
            if reports:
                packed = gzip.compress(recording.trace(), 6, mtime=0)
                write.replace(self._make_folder() / f"trace-rank-{mesh.rank}.json.gz", packed)
        # failures travel with the tables, so that the first rank reports them for all
        mine = ((mesh.rank, mesh.pp.rank, table) if reports else None, mesh.rank, failed)
        gathered = consensus.gather_objects(mine) if mesh.size > 1 else [mine]
        if not mesh.first:
            return []
        tables = [table for table, *_ in gathered if table is not None]
        text = self._write_tables(tables, facts, recording.operators(), failed)
        reasons = [f"on rank {rank}: {reason}" for _, rank, some in gathered for reason in some[:1]]
        reasons += [f"on rank {mesh.rank}: {reason}" for reason in failed if not reasons]
        if not reasons:
            return [*text, f"profile: {self._folder()}"]
        more = f" (and on {plural(len(reasons) - 1, 'other rank')})" if len(reasons) > 1 else ""
        return [*text, f"the profile of step {self.number} is not written {reasons[0]}{more}"]

    def _folder(self) -> Path:
        """Return the path of the folder for the profiled step N, profile/step-N in the run's
        folder.
        """
        return self.out / f"profile/step-{self.number}"

    def _make_folder(self) -> Path:
        """Create the folder for the profiled step, if it is missing, and return its path. Raises
        OSError.
        """
        return write.folder(self.out, self._folder().relative_to(self.out))

    def _write_tables(
        self,
        tables: list[tuple[int, int, ProfileTable]],
        facts: Callable[[float], dict],
        operators: str,
        failed: list[str],
    ) -> list[str]:
        """Write table.txt and table.json of the profiled step, and return the lines to print.
        `tables`: (rank, stage, table) of each rank shown; `facts`: maps seconds to further numbers;
        `operators`: a table as text, for table.txt; the text of an OSError is appended to `failed`.
        """
        known = facts(tables[0][2].seconds)
        text = []
        for rank, stage, table in tables:
            text.append(f"step {self.number}, rank {rank}, stage {stage}: {table.seconds:.4f} s")
            text += [f"  {line}" for line in table.lines()]
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in known.items())
        text += [f"{numbers} (under the profiler)"] if known else []
        rows = [{"rank": r, "stage": s, **asdict(table)} for r, s, table in tables]
        full = {"step": self.number, **known, "ranks": rows}
        with _collect_failure(failed):
            to = self._make_folder()
            write.replace(to / "table.json", json.dumps(full, indent=1) + "\n")
            write.replace(to / "table.txt", "\n".join([*text, "", operators]) + "\n")
        return text


@contextmanager
def _collect_failure(failed: list[str]) -> Iterator[None]:
    """Context manager that appends an OSError of its body to `failed`, as text, and suppresses
    it.
    """
    try:
        yield
    except OSError as error:
        failed.append(f"{error.filename or 'its trace'}: {error.strerror or error}")


def _least(durations: Mapping[str, list[float]], mesh: Mesh) -> dict[str, float]:
    """Return the seconds that each kind of collective needs without waiting: over its calls, the
    sum of the minimum over the axis's ranks, as the last rank to arrive waits for nobody. Kinds
    that the ranks called a different number of times are left out: calls cannot be matched. Every
    rank calls it.
    """
    out = {}
    for axis in (mesh.tp, mesh.cp, mesh.ep, mesh.fsdp, mesh.edp, mesh.dp, mesh.world):
        kind = f"{profile_table.COLLECTIVES} {axis.name}"
        mine = durations.get(kind, [])
        # ranks agree on the number first: a reduction of different lengths would hang
        if axis.size > 1 and _same(len(mine), axis, mesh) and mine:
            times = torch.tensor(mine, dtype=torch.float64, device=mesh.device)
            out[kind] = float(collectives.reduce_scalar(times, axis, "min").sum())
    return out


def _same(number: int, axis: Axis, mesh: Mesh) -> bool:
    """Return whether all ranks of the axis call it with the same `number`. Collective."""
    # two reductions in one, as -min(x) = max(-x)
    both = torch.tensor([number, -number], device=mesh.device)
    most, least = collectives.reduce_scalar(both, axis, "max").tolist()
    return most == -least
