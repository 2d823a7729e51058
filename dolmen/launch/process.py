"""How a process of a run was started, and how it ends: our own launcher
(launcher.py), torchrun, srun, or nobody.

Under torchrun or srun, which set RANK or SLURM_PROCID, `dolmen` is a worker from the start; a
restart is known by what the engine tells (RESTART_COUNTS, RECOVERED_JOBS).
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from dolmen.core.environment import Launch
from dolmen.core.messages import BadInput, Failed, as_bad_input
from dolmen.core.torch_private import strings

LAUNCHER = "DOLMEN_LAUNCHER"  # pid of the launcher that started this worker
HANDED = "DOLMEN_HANDED"  # the file with the configuration that this launcher has checked
ERROR_FILE = "DOLMEN_ERROR_FILE"  # where a worker of this launcher writes why it failed
PR_SET_PDEATHSIG = 1
END = signal.SIGRTMIN
"""Signal by which the launcher and the watchdog end a worker at once: nothing else sends it, and
SIGTERM asks to save first.
"""
RESTART_COUNTS = {
    "torchrun, our launcher": strings.RESTARTS,
    # sbatch(1): "the number of times the job has been restarted", after a failure or a requeue
    "SLURM": "SLURM_RESTART_COUNT",
    # JobSet's annotation jobset.sigs.k8s.io/restart-attempt of a pod, which the job file of
    # `dolmen launch kubeflow` makes a variable of this name, as torchx and Flyte do
    "JobSet": "JOBSET_RESTART_ATTEMPT",
}
"""Engine -> the variable with the number of restarts."""
RECOVERED_JOBS = {
    # "will stay the same across multiple recoveries of the same managed task", and nothing counts
    "SkyPilot": "SKYPILOT_TASK_ID",
    # Ray Train sets no variable; `--launch ray` sets the name of the job, which restarts share
    "Ray Train": "DOLMEN_RAY_JOB",
}
"""Engine -> the variable with the id of a job, for engines that do not count restarts: a start in a
folder that knows this id (training/start.py) is a restart."""


def die_with_agent() -> None:
    """Have the kernel kill this process (SIGKILL) when torchrun's agent, which started it, ends in
    any way. No-op in other processes; workers of dolmen's launcher die with its fork server
    (fork_server.py). Call it before slow imports.
    """
    if strings.RUN in os.environ and not launched_here():
        die_with(os.getppid())


def die_with(parent: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent, whose pid is `parent`, ends in
    any way. Ends this process at once, with exit code 1, if the parent has already ended.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before the kernel was asked
        os._exit(1)


def isolated_python_options() -> list[str]:
    """Return options of Python for child processes that run `python -m MODULE`: ["-P"], so that
    they import nothing from the working directory, which may hold somebody else's files; [] if the
    working directory is on this process's own import path.
    """
    here = os.path.realpath(os.getcwd())
    # a checkout on the path: children must import the same one
    return [] if here in map(os.path.realpath, sys.path) else ["-P"]


def cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


def threads(processes: int) -> str:
    """Return the value of OMP_NUM_THREADS for each of `processes` processes on this machine: the
    user's setting of this variable, else an equal share of the cores, at least 1.
    """
    return os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // processes)))


def read_launch() -> Launch | None:
    """Return this process's rank, local rank and world size as its launcher set them in environment
    variables; None if no launcher started it. Raises BadInput for unusable values.
    """
    with as_bad_input(ValueError):
        return Launch.read()


def started_at(with_launcher: bool) -> float:
    """Return when this process was started, in seconds since 1970; now, if its program is not the
    command `dolmen` but a Python script that calls dolmen. `with_launcher`: return when its
    launcher (dolmen's or torchrun's agent) was started, if it has one.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    command = Path(sys.argv[0]).name == "dolmen" or (spec and spec.name == "dolmen.__main__")
    age = _age("self") if command else 0.0
    if command and with_launcher and (LAUNCHER in os.environ or strings.RUN in os.environ):
        age = max(age, _age(os.environ.get(LAUNCHER, str(os.getppid()))))
    return time.time() - age


def _age(pid: str) -> float:
    """Return how many seconds ago the process `pid` ("self": this one) was started; 0 if it has
    ended.
    """
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return 0.0
    # field 22 of stat: ticks since the machine has started
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


def launched_here() -> bool:
    """Return whether this process is a worker that dolmen's own launcher started, as opposed to
    torchrun, srun or a user.
    """
    return LAUNCHER in os.environ


def run_file() -> Path | None:
    """Return the path of the file in which dolmen's own launcher hands this worker its checked
    configuration; None in other processes, which read the command line.
    """
    return Path(os.environ[HANDED]) if HANDED in os.environ else None


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables while the context is entered, except those that are already
    set, and remove them again on leaving.
    """
    # a worker inherits this process's environment
    missing = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def restarts() -> int:
    """Return how often the workers of this job have been restarted: the largest count in the
    environment variables of torchrun, dolmen's launcher, SLURM and JobSet; 0 without any.
    """
    return max(int(os.environ.get(name) or 0) for name in RESTART_COUNTS.values())


def recovered_job() -> str:
    """Return the name of the engine and the id of this job under SkyPilot and Ray Train, which
    restart jobs under the same id without counting the restarts; otherwise "".
    """
    jobs = (f"{engine} {os.environ.get(name, '')}" for engine, name in RECOVERED_JOBS.items())
    return next((job for job in jobs if not job.endswith(" ")), "")


def one_store() -> bool:
    """Return whether the rendezvous store (TCPStore) of this process group outlives a restart of
    the workers, as torchrun's agent's does; dolmen's own launcher makes a new store for each start.
    """
    return not launched_here() and os.environ.get(strings.ONE_STORE) == "True"


def job() -> str:
    """Return an id of the job of this process, which its restarts by the same launcher share and no
    other job has: of the SkyPilot or Ray job, else the SLURM step, else torchrun's --rdzv-id, else
    the process that started this one (torchrun's agent, our fork server). Returns "" where no
    launcher started this process.
    """
    if "RANK" not in os.environ and "SLURM_PROCID" not in os.environ:
        return ""
    if recovered_job():
        return recovered_job()
    if "SLURM_JOB_ID" in os.environ:
        return f"slurm {os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_STEP_ID', '')}"
    named = os.environ.get(strings.RUN, "none")
    if named != "none":
        return f"run {named}"
    return parent()


def agent() -> str:
    """Return an id of the torchrun agent that started this process; "" without one, and for jobs of
    SkyPilot and Ray Train. A new id shows a restart that torchrun does not count: it counts
    failures only, and starts all workers again with the same count where an agent joins.
    """
    by_torchrun = strings.RUN in os.environ and not launched_here()
    return parent() if by_torchrun and not recovered_job() else ""


def store_answers() -> bool:
    """Return whether the rendezvous store at the environment variables MASTER_ADDR and MASTER_PORT
    accepts a TCP connection within 5 s.
    """
    try:
        place = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
        socket.create_connection(place, 5).close()
    except (OSError, ValueError):
        return False
    return True


def parent() -> str:
    """Return an id of the process that started this one: host name, pid and start time, so that no
    other process ever has the same.
    """
    launcher = os.getppid()
    # field 22 of stat: when the launcher started, as its pid may be used again
    start_time = Path(f"/proc/{launcher}/stat").read_text().rsplit(")", 1)[1].split()[19]
    return f"{socket.gethostname()} {launcher} {start_time}"


@contextmanager
def stop_handler(handler: Callable[[int], None]) -> Iterator[None]:
    """While the context is entered, call handler(SIGINT) or handler(SIGTERM) when this worker
    receives that signal, so that it can save and stop; under dolmen's own launcher, when it
    receives SIGUSR1 or SIGUSR2, as which the launcher forwards the two, or SIGTERM, which a cluster
    sends to every process of a job: with the launcher's SIGUSR2 it is one request. Enter it before
    joining the other ranks: then either all ranks can act on the request, or none has started.
    """
    # our launcher catches both and passes them on as user signals, to all of its workers alike
    asking = (
        {signal.SIGUSR1: signal.SIGINT, signal.SIGUSR2: signal.SIGTERM}
        if launched_here()
        else {signal.SIGINT: signal.SIGINT}
    )
    meaning: dict[int, int] = {**asking, signal.SIGTERM: signal.SIGTERM}
    received, requests = Counter[int](), Counter[int]()  # by signal; by its meaning

    def receive(got: int, _: object) -> None:
        """Call the handler, unless the request has come by another signal already."""
        received[got] += 1
        if received[got] > requests[meaning[got]]:
            requests[meaning[got]] += 1
            handler(meaning[got])

    with handling({s: receive for s in (*asking, signal.SIGTERM)}):
        yield


def obey_interrupts() -> None:
    """Let SIGINT (Ctrl-C) end this process even if it was started with SIGINT ignored, as by a
    background shell: restore Python's default handler. No-op for workers of dolmen's launcher,
    which signals them itself, and off the main thread.
    """
    here = threading.current_thread() is threading.main_thread() and not launched_here()
    if here and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def handling(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Install these signal handlers (as of signal.signal) while the context is entered, and restore
    the previous ones on leaving. No-op off the main thread, where Python handles no signals.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {s: signal.signal(s, handler) for s, handler in handlers.items()} if main else {}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def run_worker(work: Callable[[], int]) -> int:
    """Call `work`, all that a worker does, and return its exit code. An exception ends the process
    at once, with exit code 2 for BadInput and otherwise 1; its text goes to dolmen's launcher,
    which prints the first one, or else to stderr. Without dolmen's launcher, BadInput,
    KeyboardInterrupt, BrokenPipeError and SystemExit are raised instead.
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
        end(
            text,
            2 if isinstance(error, BadInput) else 1,
            final=isinstance(error, Failed) and error.final,
        )


def open_standard_streams() -> None:
    """Open /dev/null as each standard stream that this process was started without (`<&- >&-`).
    Otherwise the next files and sockets get these descriptors, and what workers print goes there.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    # Python has None for a stream that was closed
    sys.stdin = sys.stdin or open(0)
    sys.stdout = sys.stdout or open(1, "w")
    sys.stderr = sys.stderr or open(2, "w")


def end(text: str, code: int = 1, **facts: bool) -> NoReturn:
    """End this process at once with exit code `code`, without cleaning up. `text`, the reason, goes
    to dolmen's launcher through this worker's error file, with `facts` (final: a restart is
    useless; hang: a rank hung), or to stderr where another launcher or none started it.
    """
    if launched_here():
        # names of files may be no UTF-8; the launcher's JSON reader refuses such text
        text = text.encode(errors="backslashreplace").decode()
        with open(os.environ[ERROR_FILE], "w") as f:
            json.dump({"text": text, "when": time.time(), **facts}, f)
    else:
        print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)  # not through atexit: a broken process group would block there
