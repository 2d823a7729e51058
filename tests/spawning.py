"""run_spawned(n, fn, *args): fn on n gloo processes, once. A process group is expensive to start,
so give it many layouts: a test whose parameter is a Row shares its spawn with all other rows of
that world size that the session was asked for, and with no other (conftest.py: `result`).

Not in conftest.py: a second conftest would take its name, and workers find functions by module
name.

Processes are forked from a server that has imported what takes seconds and has started no thread.
"""

import builtins
import faulthandler
import gc
import io
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml

from dolmen.core.torch_private import strings
from dolmen.launch import process

# what tests import too: a rank that imports tinyrun anew takes 0.5 s for it, test_ppo.py's 1.2 s
PRELOAD = [
    "garbage",
    "shapes",
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "dolmen.cli.generation",
    "dolmen.training.worker",
    "dolmen.training.run",
    "spawning",
    "tiny_models",
    "tinyrun",
]
ALONE = timedelta(minutes=2)  # a rank whose peer has failed waits so long in a collective
TIME_LIMIT = 600  # seconds: a rank that waits for ever is a failure, with a name
PER_ROW = 20  # more seconds for each row of a spawn, of which the full tier has over a hundred


@dataclass(frozen=True)
class Row:
    """One case of a test: `call()` on `world` processes, picklable, what it returns on rank 0 too.

    `full`: of the full tier alone. `name`: the case in the test's id.
    """

    name: str
    world: int
    call: Callable[[], Any]
    full: bool = False

    @property
    def parameter(self):
        """For pytest.mark.parametrize."""
        return pytest.param(self, id=self.name, marks=[pytest.mark.full] if self.full else [])


def made_once(make: Callable[[], Any]) -> Any:
    """What `make()` gives, made by one rank of the joined world for all: what a row is compared
    with takes as long as the row itself.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    kept = io.BytesIO()
    if dist.get_rank() == 0:
        torch.save(make(), kept)
    given = [kept.getvalue()]
    dist.broadcast_object_list(given)
    return torch.load(io.BytesIO(given[0]), weights_only=False)


CLOSED = re.compile("Connection (closed by|reset by) peer")
"""What a rank says whose peer has ended."""


def run_rows(rows: list[Row]) -> list:
    """What each of `rows`, all of one world size, gives; one spawn."""
    return run_spawned(rows[0].world, _call, [(row.name, row.call) for row in rows])


def _call(calls: list[tuple[str, Callable[[], Any]]]) -> list:
    out = []
    for name, call in calls:
        try:
            out.append(call())
        except Exception as error:
            error.add_note(f"in row {name}")
            raise
    return out


def warned() -> None:
    """Warnings are here what they are to pytest, which sets them in its own process alone."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    for line in tomllib.loads(text)["tool"]["pytest"]["ini_options"]["filterwarnings"]:
        action, message, kind = line.split(":")
        warnings.filterwarnings(action, re.escape(message), getattr(builtins, kind))


def _worker(rank, world, path, fn, args, queue):
    # where a signal such as SIGSEGV ends this rank, Python writes its stack, and C++ why it aborts
    os.dup2(os.open(f"{path}-crash-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    gc.freeze()  # what the server has imported: a collection that looks through it takes 0.5 s
    faulthandler.enable(2)
    torch.set_num_threads(1)
    warned()
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(path, world),
            rank=rank,
            world_size=world,
            timeout=ALONE,
        )
        result = fn(*args)
        if rank == 0:
            # as bytes: a tensor put as it is lies in this process, which may have ended when it is
            # asked for
            queue.put(("ok", pickle.dumps(result)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((f"rank {rank}", traceback.format_exc()))
        os._exit(1)


def serving():
    """The context whose server runs. It is given this process's path: by itself it has the
    environment's alone (until Python 3.14), and leaves out in silence what it cannot import.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


class Aborted(AssertionError):
    """A rank was ended by abort() in a thread of torch or gloo."""


def run_spawned(world, fn, *args):
    """fn(*args) on `world` gloo processes; rank 0's result (picklable). The first traceback of a
    rank is raised that has one of its own. Aborted ranks, which are seen once in several thousand
    spawns on a busy machine, are told and tried once more: nothing of Python's aborts.
    """
    try:
        return _run_spawned(world, fn, *args)
    except Aborted as error:
        print(f"tried again: {error}", file=sys.stderr)
        return _run_spawned(world, fn, *args)


def _run_spawned(world, fn, *args):
    """`run_spawned` without another try."""
    context = serving()
    queue = context.SimpleQueue()  # writes at once: a worker that exits has told what it had to
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_worker, args=(r, world, f"{folder}/store", fn, args, queue))
            for r in range(world)
        ]
        for p in processes:
            p.start()
        limit = TIME_LIMIT + (PER_ROW * len(args[0]) if fn is _call else 0)
        end = time.monotonic() + limit
        while queue.empty() and any(p.is_alive() for p in processes):
            time.sleep(0.02)
            if time.monotonic() > end:
                for p in processes:
                    p.kill()
                raise AssertionError(
                    f"{fn.__name__} on {world} processes gave no result in {limit} s"
                )
        who, result = ("all ranks", "ended without a result") if queue.empty() else queue.get()
        if who != "ok":
            who, result = _cause((who, result), queue)
            codes = [p.exitcode for p in processes]  # below 0: the signal that ended it
            for p in processes:
                p.kill()
            crashes = "".join(path.read_text() for path in Path(folder).glob("store-crash-*"))
            failure = Aborted if -signal.SIGABRT in codes else AssertionError
            raise failure(f"{who} failed (exit codes {codes}):\n{result}{crashes}")
        for p in processes:
            p.join()
    return pickle.loads(result)


def launch_forked(
    processes: int,
    words: list[str],
    max_restarts: int = 0,
    handed: Mapping[str, Any] | None = None,
    imports: str = "",
    attempt: int = 0,
) -> int:
    """Run `dolmen *words` on ranks forked from the server, with the arguments and the exit code of
    dolmen's own `launch`, in whose place tests put it (conftest.py: `forked_ranks`). None is
    started again; `attempt` says of which start they are.
    """
    environment: dict[str, object] = {strings.RESTARTS: attempt}
    with tempfile.TemporaryDirectory() as folder:
        if handed is not None:
            (Path(folder) / "handed.yaml").write_text(yaml.safe_dump(dict(handed)))
            environment["DOLMEN_HANDED"] = f"{folder}/handed.yaml"
        codes = fork_ranks(processes, _command, words, environment)
    return 2 if 2 in codes else int(codes != {0})


def fork_ranks(
    processes: int,
    function: Callable[..., object],
    argument: object,
    environment: Mapping[str, object] | None = None,
) -> set[int | None]:
    """Call `function(argument)` on ranks forked from the server, with the variables of torchrun and
    `environment`; return their exit codes. Such a rank takes a second of CPU time, one that imports
    torch anew takes seven. What ranks print is printed here when all have ended.
    """
    context = serving()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        shared = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, strings.ONE_STORE: True}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, **(environment or {})}
        ranks = [
            context.Process(target=_rank, args=(rank, folder, shared, function, argument))
            for rank in range(processes)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(TIME_LIMIT)
            rank.kill()
        for stream, kind in ((sys.stdout, "out"), (sys.stderr, "err")):
            stream.flush()
            for rank in range(processes):
                os.write({"out": 1, "err": 2}[kind], Path(folder, f"{kind}-{rank}").read_bytes())
    return {rank.exitcode for rank in ranks}


def _rank(
    rank: int,
    folder: str,
    environment: dict[str, object],
    function: Callable[..., object],
    argument: object,
) -> None:
    """`function(argument)` as one rank of `fork_ranks`."""
    gc.freeze()
    torch.set_num_threads(1)
    warned()
    for descriptor, kind in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{kind}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
    own = {"RANK": rank, "LOCAL_RANK": rank, process.ERROR_FILE: f"{folder}/error-{rank}"}
    own["DOLMEN_LAUNCHER"] = os.getppid()
    os.environ.update({name: str(value) for name, value in (environment | own).items()})
    function(argument)


def _command(words: list[str]) -> None:
    """Run `dolmen *words` and end with its exit code."""
    from dolmen import cli
    from dolmen.training import mfu

    mfu.matmul_peak = lambda *_: 1e12  # it would be measured for a quarter of a second
    sys.exit(cli.main(words))


def _cause(first: tuple[str, str], queue) -> tuple[str, str]:
    """Of what ranks tell, the first that is no peer's end: a rank that raises ends, and those that
    wait for it say that its connection is closed, perhaps before it says why.
    """
    reported = [first]
    end = time.monotonic() + 1
    while time.monotonic() < end:
        while not queue.empty():
            reported.append(queue.get())
        time.sleep(0.02)
    own = [one for one in reported if not CLOSED.search(one[1])]
    return (own or reported)[0]
