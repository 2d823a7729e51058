"""Starting processes on this machine, through torch's launcher API, and what they do when one of them, or the launcher, ends.

    dolmen train --layout.tp 2        launcher: checks the input, holds the rendezvous store, starts 2 x `dolmen train ...`,
      |-- rank 0                      forwards Ctrl-C and SIGTERM (as SIGUSR1 and SIGUSR2: save, then end), kills all at once
      `-- rank 1                      when one dies, and tells the first cause once. If the launcher dies, the kernel kills them.

Under torchrun or srun, which set RANK or SLURM_PROCID, `dolmen` is a worker from the start.
"""

import ctypes
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dolmen.cli.errors import BadInput

LAUNCHER = "DOLMEN_LAUNCHER"                               # pid of the launcher that started this worker
PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """In a worker: have the kernel kill this process when its launcher ends, however it ends. Before heavy imports."""
    if LAUNCHER not in os.environ: return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[LAUNCHER]): os._exit(1)


def launched_here() -> bool:
    """Whether this process is a worker that our own launcher started."""
    return LAUNCHER in os.environ


@contextmanager
def on_stop(handler: Callable[[int], None]) -> Iterator[None]:
    """Within, handler(SIGINT or SIGTERM) is called when this worker is asked to save and end. Enter before joining the
    others: then either all ranks know what to do with the request, or none has begun."""
    asking = (signal.SIGUSR1, signal.SIGUSR2) if launched_here() else (signal.SIGINT, signal.SIGTERM)
    meaning = dict(zip(asking, (signal.SIGINT, signal.SIGTERM), strict=True))
    with _handling({s: lambda got, _: handler(meaning[got]) for s in asking}): yield


@contextmanager
def _handling(handlers: dict[int, Callable]) -> Iterator[None]:
    main = threading.current_thread() is threading.main_thread()       # Python hears signals nowhere else
    before = {s: signal.signal(s, handler) for s, handler in handlers.items()} if main else {}
    try: yield
    finally:
        for s, handler in before.items(): signal.signal(s, handler)


def launch(processes: int, argv: list[str]) -> int:
    """Run `dolmen *argv` as `processes` workers of one group; the exit code of the whole.

    0 if all end well; 130 or 143 if they ended because this process was asked to; otherwise 1 (or 2, a worker's own
    refusal), after the first failure's traceback has been printed, once.
    """
    import logging

    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)           # failures are told below, once
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    common = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
              "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": threads, LAUNCHER: os.getpid()}
    envs = {r: {k: str(v) for k, v in {**common, "RANK": r, "LOCAL_RANK": r}.items()} for r in range(processes)}
    args = {r: ("-m", "dolmen", *argv) for r in range(processes)}
    asked, default = [], {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}

    def forward(got, _):
        asked.append(got)
        for pid in workers.pids().values():
            try: os.kill(pid, signal.SIGUSR1 if got == signal.SIGINT else signal.SIGUSR2)
            except ProcessLookupError: pass

    with _handling(default), tempfile.TemporaryDirectory(prefix="dolmen_") as reports:   # torch sets handlers of its own
        try: workers = start_processes("dolmen", sys.executable, args, envs, DefaultLogsSpecs(reports))
        except SignalException as stopped: return 128 + stopped.sigval
        with _handling({**default, signal.SIGINT: forward, signal.SIGTERM: forward}): result = workers.wait(period=0.2)
        if not result.is_failed(): return 0
        codes = {f.exitcode for f in result.failures.values()}
        if asked and codes <= {130, 143, -signal.SIGUSR1, -signal.SIGUSR2, -signal.SIGTERM}: return 128 + asked[0]
        print(cause(result.failures), file=sys.stderr)
        return 2 if codes <= {2, -signal.SIGTERM} else 1


def cause(failures: dict) -> str:
    """The first failure, told once: a rank killed from outside, else the earliest traceback."""
    killed = [f for f in failures.values() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    if killed:
        first, name = killed[0], signal.Signals(-killed[0].exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"dolmen: rank {first.local_rank} (pid {first.pid}) was ended by {name}{hint}; all ranks were stopped"
    told = [f for f in failures.values() if f.exitcode not in (-signal.SIGTERM, 130, 143)]
    first = min(told or failures.values(), key=lambda f: f.timestamp)
    told = first.error_file_data.get("message")            # as `guarded` wrote it
    text = told["message"] if isinstance(told, dict) else "no traceback was left"
    if first.exitcode == 2: return text.rstrip()
    return f"{text.rstrip()}\ndolmen: rank {first.local_rank} failed (exit code {first.exitcode}); all ranks were stopped"


def guarded(work: Callable[[], int]) -> int:
    """Run a worker's work. An exception goes to the launcher, which prints the first one, or to stderr where there is none
    of ours; the exit code is then 1, or 2 for BadInput."""
    try:
        return work()
    except BaseException as error:
        refused, ours = isinstance(error, BadInput), launched_here()
        if not ours and isinstance(error, (BadInput, KeyboardInterrupt, BrokenPipeError, SystemExit)): raise
        import traceback
        text = f"dolmen: {error}" if refused else traceback.format_exc()
        if ours:
            import time
            told = {"message": text, "extraInfo": {"timestamp": str(int(time.time() * 1e6))}}
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as f: json.dump({"message": told}, f)
        else:
            print(text, end="", file=sys.stderr)
        sys.stdout.flush()
        os._exit(2 if refused else 1)                      # not through atexit: a broken process group would block there
