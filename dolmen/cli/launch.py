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
from collections.abc import Callable

from dolmen.cli import BadInput

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


def on_stop(handler: Callable[[int], None]) -> None:
    """Call handler(SIGINT or SIGTERM) when this worker is asked to save and end."""
    if launched_here():
        signal.signal(signal.SIGUSR1, lambda *_: handler(signal.SIGINT))
        signal.signal(signal.SIGUSR2, lambda *_: handler(signal.SIGTERM))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, lambda got, _: handler(got))


def launch(processes: int, argv: list[str]) -> int:
    """Run `dolmen *argv` as `processes` workers of one group; the exit code of the whole.

    0 if all end well; 130 or 143 if they ended because this process was asked to; otherwise 1 (or 2, a worker's own
    refusal), after the first failure's traceback has been printed, once.
    """
    import logging

    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)           # failures are told below, once
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    common = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
              "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": threads, LAUNCHER: os.getpid()}
    envs = {r: {k: str(v) for k, v in {**common, "RANK": r, "LOCAL_RANK": r}.items()} for r in range(processes)}
    args = {r: ("-m", "dolmen", *argv) for r in range(processes)}
    workers = start_processes("dolmen", sys.executable, args, envs, DefaultLogsSpecs())
    asked = []

    def forward(got, _):
        asked.append(got)
        for pid in workers.pids().values():
            try: os.kill(pid, signal.SIGUSR1 if got == signal.SIGINT else signal.SIGUSR2)
            except ProcessLookupError: pass

    for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, forward)
    result = workers.wait(period=0.2)
    for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)           # all have ended
    if not result.is_failed(): return 0
    codes = {f.exitcode for f in result.failures.values()}
    if asked and codes <= {130, 143, -signal.SIGUSR1, -signal.SIGUSR2, -signal.SIGTERM}: return 128 + asked[0]
    if codes == {2}: return 2
    print(cause(result.failures), file=sys.stderr)
    return 1


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
    return f"{text.rstrip()}\ndolmen: rank {first.local_rank} failed (exit code {first.exitcode}); all ranks were stopped"


def guarded(work: Callable[[], int]) -> int:
    """Run a worker's work. An exception goes to the launcher, which prints the first one, or to stderr where there is none
    of ours; the exit code is then 1."""
    try:
        return work()
    except BaseException as error:
        if isinstance(error, (SystemExit, BadInput)): raise
        import traceback
        text = traceback.format_exc()
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file and launched_here():
            import time
            with open(file, "w") as f: json.dump({"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time() * 1e6))}}}, f)
        else:
            print(text, end="", file=sys.stderr)
        sys.stdout.flush()
        os._exit(1)                                        # not through atexit: a broken process group would block there
