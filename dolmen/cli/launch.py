"""Starting processes on this machine, through torch's launcher API, and what they do when one of
them, or the launcher, ends.

    dolmen train --layout.tp 2    launcher: checks the input, holds the rendezvous store, starts
      |-- rank 0                  2 x `dolmen train ...`, forwards Ctrl-C and SIGTERM (as SIGUSR1
      `-- rank 1                  and SIGUSR2: save, then end), kills all at once when one dies, and
                                  tells the first cause once. If the launcher dies, the kernel
                                  kills them.

With --max-restarts the launcher starts the group again after a failure, and the run goes on from
its newest checkpoint. torch's LocalElasticAgent would not do here: it restarts after every failure,
the refused and the hopeless too, and answers SIGTERM by killing. Under torchrun or srun, which set
RANK or SLURM_PROCID, `dolmen` is a worker from the start; a restart by either is known by its
count.
"""

import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from dolmen.cli.errors import BadInput, Failed
from dolmen.core.launched import Launch
from dolmen.files import gate, kinds

LAUNCHER = "DOLMEN_LAUNCHER"  # pid of the launcher that started this worker
PR_SET_PDEATHSIG = 1
PREFIX, OURS = "dolmen_", "dolmen-launcher"  # a folder of reports, and the file that says it is one


def die_with_launcher() -> None:
    """In a worker: have the kernel kill this process when what started it, our launcher or
    torchrun's agent, ends, however it ends. Before heavy imports.
    """
    if LAUNCHER not in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # it has ended before the kernel was asked
    if os.getppid() != parent or parent != int(os.environ.get(LAUNCHER, parent)):
        os._exit(1)


def started() -> Launch | None:
    """What a launcher told this process; None where none started it. Raises BadInput."""
    try:
        return Launch.read()
    except ValueError as error:
        raise BadInput(str(error)) from None


def launched_here() -> bool:
    """Whether this process is a worker that our own launcher started."""
    return LAUNCHER in os.environ


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Within, the environment has these, where the user has not set them."""
    missing = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def restarts() -> int:
    """How often the launcher of this process has started its group again: ours and torchrun's
    --max-restarts, SLURM's requeue.
    """
    return max(
        int(os.environ.get(name) or 0)
        for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )


def one_store() -> bool:
    """Whether the ranks meet in a store that outlives a restart: torchrun's. Ours makes a new one
    each time.
    """
    return not launched_here() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def job() -> str:
    """What all starts by one launcher have in common and no other's have; empty where no launcher
    started this process.
    """
    if "RANK" not in os.environ and "SLURM_PROCID" not in os.environ:
        return ""
    if "SLURM_JOB_ID" in os.environ:
        return f"slurm {os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_STEP_ID', '')}"
    named = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if named != "none":
        return f"run {named}"
    launcher = os.getppid()
    began = Path(f"/proc/{launcher}/stat").read_text().rsplit(")", 1)[1].split()[19]
    return f"{socket.gethostname()} {launcher} {began}"


@contextmanager
def on_stop(handler: Callable[[int], None]) -> Iterator[None]:
    """Within, handler(SIGINT or SIGTERM) is called when this worker is asked to save and end. Enter
    before joining the others: then either all ranks know what to do with the request, or none has
    begun.
    """
    asking = (
        (signal.SIGUSR1, signal.SIGUSR2) if launched_here() else (signal.SIGINT, signal.SIGTERM)
    )
    meaning = dict(zip(asking, (signal.SIGINT, signal.SIGTERM), strict=True))
    with _handling({s: lambda got, _: handler(meaning[got]) for s in asking}):
        yield


@contextmanager
def _handling(handlers: dict[int, Callable]) -> Iterator[None]:
    # Python hears signals nowhere else
    main = threading.current_thread() is threading.main_thread()
    before = {s: signal.signal(s, handler) for s, handler in handlers.items()} if main else {}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def launch(processes: int, argv: list[str], max_restarts: int = 0) -> int:
    """Run `dolmen *argv` as `processes` workers of one group; the exit code of the whole.

    0 if all end well; 130 or 143 if they ended because this process was asked to; otherwise 1 (or
    2, a worker's own refusal), after the first failure's traceback has been printed, once. Of
    failures that another start may mend, the first `max_restarts` start the group again.
    """
    import logging

    # failures are told below, once
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    asked = []
    current = []
    default = {
        s: signal.getsignal(s)
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    }

    def forward(got, _):
        asked.append(got)
        for pid in [pid for workers in current for pid in workers.pids().values()]:
            try:
                os.kill(pid, signal.SIGUSR1 if got == signal.SIGINT else signal.SIGUSR2)
            except ProcessLookupError:
                pass

    handlers = {**default, signal.SIGINT: forward, signal.SIGTERM: forward}
    with _handling(handlers), _reports() as reports:
        for attempt in range(max_restarts + 1):
            if asked:
                return 128 + asked[0]
            code, final = _attempt(processes, argv, attempt, reports, asked, current, handlers)
            if code == 0 or asked or final or attempt == max_restarts:
                return code
            print(
                f"dolmen: restart {attempt + 1} of {max_restarts}, from the newest whole "
                f"checkpoint",
                file=sys.stderr,
                flush=True,
            )
    raise AssertionError("the last attempt returns")


@contextmanager
def _reports() -> Iterator[str]:
    """A temporary folder, for what workers leave to their launcher. Its file OURS is locked while
    the launcher lives: so the folders of launchers that were killed are known, and deleted here.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        _delete_if_left(left)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as reports:
        part = Path(reports) / f"{OURS}.part"
        with open(part, "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            part.rename(part.with_name(OURS))  # never seen without its lock
            yield reports


def _delete_if_left(folder: Path) -> None:
    """Delete a folder of reports if a launcher of this user has made it and none holds it."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        with open(os.open(folder / OURS, os.O_RDWR | os.O_NOFOLLOW), "r+") as mark:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    except OSError:
        return  # somebody else's, or in use


def _attempt(
    processes: int,
    argv: list[str],
    attempt: int,
    reports: str,
    asked: list[int],
    current: list,
    handlers: dict,
) -> tuple[int, bool]:
    """Start the group once and wait for it: (exit code, whether another start is of no use)."""
    import torch
    from torch.distributed.elastic.multiprocessing import (
        DefaultLogsSpecs,
        SignalException,
        start_processes,
    )

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = os.environ.get(
        "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes))
    )
    common = {
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "OMP_NUM_THREADS": threads,
        LAUNCHER: os.getpid(),
    }
    envs = {
        r: {k: str(v) for k, v in {**common, "RANK": r, "LOCAL_RANK": r}.items()}
        for r in range(processes)
    }
    args = {r: ("-m", "dolmen", *argv) for r in range(processes)}
    with _handling(handlers):  # start_processes sets handlers of its own, and leaves them
        try:
            workers = start_processes(
                "dolmen", sys.executable, args, envs, DefaultLogsSpecs(reports)
            )
        except SignalException as stopped:
            return 128 + stopped.sigval, True
        current[:] = [workers]
        with _handling(handlers):
            result = workers.wait(period=0.2)
    if not result.is_failed():
        return 0, True
    codes = {f.exitcode for f in result.failures.values()}
    if asked and codes <= {130, 143, -signal.SIGUSR1, -signal.SIGUSR2, -signal.SIGTERM}:
        return 128 + asked[0], True
    told = [read for file in workers.error_files.values() if (read := _report(file))]
    hangs = [r["message"] for r in told if r.get("hang")]
    print(hangs[0] if hangs else cause(result.failures), file=sys.stderr, flush=True)
    if codes <= {2, -signal.SIGTERM} and not hangs:
        return 2, True
    return 1, any(r.get("final") for r in told)


def _report(file: str) -> dict:
    """What a worker left in its error file, empty if nothing readable."""
    try:
        return gate.read_json(file, kinds.WORKER_ERROR)["message"]
    except gate.Refused:
        return {}


def cause(failures: dict) -> str:
    """The first failure, told once: a rank killed from outside, else the earliest traceback."""
    killed = [f for f in failures.values() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    if killed:
        first, name = killed[0], signal.Signals(-killed[0].exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return (
            f"dolmen: rank {first.local_rank} (pid {first.pid}) was ended by {name}{hint}; "
            "all ranks were stopped"
        )
    told = [f for f in failures.values() if f.exitcode not in (-signal.SIGTERM, 130, 143)]
    first = min(told or failures.values(), key=lambda f: f.timestamp)
    told = first.error_file_data.get("message")  # as `guarded` wrote it
    text = told["message"] if isinstance(told, dict) else "no traceback was left"
    if first.exitcode == 2:
        return text.rstrip()
    return (
        f"{text.rstrip()}\n"
        f"dolmen: rank {first.local_rank} failed (exit code {first.exitcode}); "
        "all ranks were stopped"
    )


def guarded(work: Callable[[], int]) -> int:
    """Run a worker's work. An exception goes to the launcher, which prints the first one, or to
    stderr where there is none of ours; the exit code is then 1, or 2 for BadInput.
    """
    try:
        return work()
    except BaseException as error:
        if not launched_here() and isinstance(
            error, (BadInput, KeyboardInterrupt, BrokenPipeError, SystemExit)
        ):
            raise
        import traceback

        text = (
            f"dolmen: {error}"
            if isinstance(error, (BadInput, Failed))
            else traceback.format_exc().rstrip()
        )
        leave(
            text,
            2 if isinstance(error, BadInput) else 1,
            final=isinstance(error, Failed) and error.final,
        )


def leave(text: str, code: int = 1, **facts: bool) -> NoReturn:
    """End this process at once: `text` goes to our launcher, with `facts` (final, hang), or to
    stderr where there is none.
    """
    if launched_here():
        told = {"message": text, "extraInfo": {"timestamp": str(int(time.time() * 1e6))}, **facts}
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as f:
            json.dump({"message": told}, f)
    else:
        print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)  # not through atexit: a broken process group would block there
