"""The processes of a run: the one that starts it, and each worker.

    started by nobody      resolves and checks the run, and tokenizes its data into the cache; then
                           trains it, or starts workers (launch/launcher.py) that get the resolved
                           options as a file
    started by us          resolves the options of that file, which were checked, and trains
    by torchrun, srun or   resolves and checks for itself, and brings its refusal to the others
    another engine         (`join`; from Python `dolmen.worker`). Ray Train's workers are started by
                           a job of ours (ray_train.py)

Each worker joins the others, agrees with them on what to do, trains, and says in a line how that
ended.
"""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from dolmen.checkpoint import folders
from dolmen.checkpoint.folders import Damaged
from dolmen.checkpoint.remote import Superseded
from dolmen.checkpoint.store import NotSaved
from dolmen.core import determinism
from dolmen.core import device as devices
from dolmen.core import mesh as meshes
from dolmen.core.config import to_dict
from dolmen.core.device import keep_freed_memory
from dolmen.core.environment import Launch
from dolmen.core.log import console
from dolmen.core.messages import BadInput, Failed, as_bad_input, escape
from dolmen.files.gate import Refused
from dolmen.files.storage import StorageError
from dolmen.launch import launcher, process, rendezvous
from dolmen.launch.watchdog import Watch, network_limit
from dolmen.ops import kernels
from dolmen.rl import environment, rewards
from dolmen.training import mirror, ray_train
from dolmen.training.attention_timing import check_attention
from dolmen.training.checks.folder import check_overwrite, check_resume
from dolmen.training.checks.run import check_evaluation, usable_processes, validate
from dolmen.training.config import RunConfig
from dolmen.training.finish import finish
from dolmen.training.folder import Unusable
from dolmen.training.goodput import JoinTimes
from dolmen.training.loop import Stop
from dolmen.training.metrics import MetricsCallback
from dolmen.training.request import TrainRequest
from dolmen.training.resolve import checkpoint_to_resume, load_data, open_data, resolve
from dolmen.training.run import Outcome, Prepared, read_summary, run_training, summary
from dolmen.training.start import StartMode, agree_on_start

IMPORTED = time.time()
"""When PyTorch and this package had been imported, in seconds since 1970."""
Guard = Callable[[Callable[[], int]], int]


def run(request: TrainRequest, guarded: Guard = lambda work: work()) -> int:
    """Train the run of the request and finish it (export, verification); return the exit code. A
    worker of torchrun, srun or dolmen's launcher trains in this process; a process that nobody
    launched resolves the run and trains here or starts workers. `guarded` calls the function given
    to it, this process's own training, and handles its exceptions. Raises BadInput for errors that
    are found before.
    """
    started = process.read_launch()
    # no launcher: this process is the run, or starts it
    if started is None:
        return _start_processes(request, guarded)
    return guarded(lambda: finish_run(request, started, join(request, started)))


def join(
    request: TrainRequest,
    started: Launch,
    on_metrics: MetricsCallback | None = None,
    handles_signals: bool = True,
) -> Outcome:
    """Train in this process, one of several that a launcher or an engine has started, with the
    ranks in `started`, and return the run's outcome; `on_metrics` and `handles_signals` as in
    `worker`. With --spares, a process beyond the usable number only waits for the run's end. An
    error in this process's options is raised on all ranks once all have joined, as they wait for
    this one.

    Raises BadInput for what is to be mended by the user, Failed for what ends a run without being a
    bug, and any other exception as it occurs.
    """
    if process.one_store() and not dist.is_initialized():
        # torchrun keeps its store over restarts: keys of the attempt before would be read again
        started = replace(started, rendezvous=rendezvous.register())
    if request.handling.spares:
        size = usable_processes(request.config, started.world_size)
        if started.rank >= size:
            return wait_as_spare(request.out, started, size)
        started = replace(started, world_size=size)
    device, refusal, prepared = devices.CPU, None, None
    try:
        device = devices.choose_device(request.config.train.device, started, DEVICE)
        if not process.launched_here():
            # the folder is looked at when all have joined, by one
            verify = started.local_rank == 0
            prepared = prepare(request, started.world_size, starts=False, verify=verify)
    except (BadInput, ValueError) as error:
        refusal = str(error)
    return worker(request, started, device, prepared, refusal, on_metrics, handles_signals)


SPARE_PATIENCE = 120.0  # seconds without a store after which a spare gives up


def wait_as_spare(out: Path, started: Launch, size: int) -> Outcome:
    """Wait, in a process that does not train, until the run of the first `size` processes has
    written its new summary.json in `out`, and return the outcome in it. A restart by the launcher
    ends this process. If rank 0's rendezvous store has never answered in two minutes, the run had
    ended before this process started: return the outcome in the older summary.json. Raises Failed
    without one, and if the store has answered and is gone.
    """
    print(
        f"rank {started.rank} of {started.world_size} waits as a spare: {size} processes train",
        flush=True,
    )
    file = out / "summary.json"
    before = file.stat().st_mtime_ns if file.exists() else None
    seen, answered = time.monotonic(), False
    while not file.exists() or file.stat().st_mtime_ns == before:
        time.sleep(0.5)
        if process.store_answers():
            seen, answered = time.monotonic(), True
        elif time.monotonic() - seen > SPARE_PATIENCE:
            if file.exists() and not answered:
                break
            raise Failed(f"rank {started.rank} waited as a spare, and the store of rank 0 is gone")
    return read_summary(out)


def finish_run(request: TrainRequest, started: Launch | None, outcome: Outcome) -> int:
    """Finish a run that has ended with `outcome` (export, verification, sample, printed summary),
    on the first rank only, and not in workers of dolmen's launcher, which does it itself. Return
    the exit code of this process: 128 + signal if a signal ended the run, 1 if the exported model
    differs from that in transformers, else 0.
    """
    if outcome.signal:
        return 128 + outcome.signal
    first = started is None or started.rank == 0
    # workers of our launcher leave it to the process that waits for them; a replay has no model
    if not first or process.launched_here() or request.stop_after is not None:
        return 0
    return finish(request.config, request.out)


def _join_and_finish(request: TrainRequest, on_metrics: MetricsCallback) -> None:
    """Train in this process, a worker of Ray Train, and finish the run; `on_metrics` gets each row
    of metrics. Raises BadInput, or Failed, also if the run was stopped or the exported model
    differs.
    """
    started = process.read_launch()
    outcome = join(request, started, on_metrics, handles_signals=False) if started else None
    if outcome is None or finish_run(request, started, outcome):
        raise Failed("the run did not finish: its output says why", final=True)


def _start_processes(request: TrainRequest, guarded: Guard) -> int:
    """Resolve and check the run, then train it: in this process if the layout has one process and
    no restarts are requested, else in workers that it starts and waits for, or as a job of Ray;
    then finish the run. Return the exit code. Raises BadInput.
    """
    if request.handling.spares:
        raise BadInput(
            "--spares is for processes that torchrun has started, which may be more than the "
            "layout takes: leave it out, or start the run by torchrun"
        )
    processes = count_processes(request.config, request.handling.nproc)
    if request.handling.launch == "ray":
        return ray_train.run(replace(request, opened=None), processes, _join_and_finish)
    with as_bad_input(ValueError):
        device = devices.choose_device(request.config.train.device, None, DEVICE)
    prepared = prepare(request, processes)
    resolved = prepared.resolved.config
    world, restarts = resolved.layout.world, request.handling.max_restarts
    if world == 1 and not restarts:
        return guarded(lambda: finish_run(request, None, worker(request, None, device, prepared)))
    file = to_dict(replace(request, opened=None))
    code = launcher.launch(world, ["train"], restarts, file, __name__)
    if code or request.stop_after is not None:
        return code
    return guarded(lambda: finish(resolved, request.out))


def count_processes(config: RunConfig, nproc: int | None) -> int | None:
    """Return the number of processes to start: --nproc; else the layout's size, if dp is set; else
    as many as there are visible GPUs, rounded down to a multiple of tp x cp x pp, at least one such
    multiple. None without GPUs: then the layout decides.
    """
    if nproc is not None:
        return nproc
    if config.layout.dp is not None:
        return config.layout.world
    gpus = devices.visible_gpus(config.train.device)
    # whole copies of the model; too few GPUs are reported later, with their number
    return max(1, gpus // config.layout.inner) * config.layout.inner if gpus else None


def try_functions(config: RunConfig) -> None:
    """Start the worker processes of the user's reward functions and environment, which import these
    functions, and stop them again. Raises ValueError if a function cannot be imported.
    """
    limit = config.rollout.timeout_seconds
    for _, name in rewards.parse_rewards(config.reward):
        if not rewards.is_reward_model(name):
            with rewards.make_reward_function(name, limit) as judge:
                judge.start()
    if config.environment is not None:
        with environment.UserEnvironment(config.environment, limit) as function:
            function.worker.start()


def prepare(
    request: TrainRequest, processes: int | None, starts: bool = True, verify: bool = True
) -> Prepared:
    """Resolve and check the run for this number of processes (None: as the layout has), and
    tokenize its data into the cache. Return the resolved run with its data loader. A run that
    resumes from a URL is downloaded first. Raises BadInput for every error that can be found before
    the first process starts; and Failed in a restart where storage does not answer, as that passes.

    starts: this process starts the others, so it also checks the folder, the GPUs and the functions
    verify: also try the tokenizer's regular expressions, and compare the cache with its digests
    """
    config, out, handling = request.config, request.out, request.handling
    with as_bad_input(), restartable_storage():
        if starts:
            mirror.check_out(out, config.checkpoint.to, handling.resume, handling.overwrite)
        if handling.resume and config.checkpoint.to is not None:
            mirror.pull_run(config.checkpoint.to, out)
        checkpoint = checkpoint_to_resume(out, handling.resume)
        resolved = resolve(config, processes, checkpoint, opened=request.opened)
        validate(resolved)
        config = resolved.config
        # which GPU it is, a worker sees: in the process that starts workers CUDA stays unused
        if not devices.visible_gpus(config.train.device):
            check_attention(config, kernels.CPU)
        data = open_data(resolved, progress=True, verify=verify)
        if config.evaluate.enabled:
            check_evaluation(config.evaluate, config.known_model, data.inputs.tokenizer)
        if starts:
            devices.require_gpus(config.train.device, config.layout.world, DEVICE)
            if handling.overwrite:
                check_overwrite(config, out, request.source, data.sources)
            if handling.resume:
                check_resume(config, out)
            try_functions(config)
        return Prepared(resolved, load_data(resolved, data, progress=True, verify=verify))


@contextmanager
def restartable_storage() -> Iterator[None]:
    """Context manager: if this process was restarted by its launcher, raise a StorageError as
    Failed, so that the launcher starts it once more: the run has found its storage before, so the
    failure may pass. At the first start the error is raised unchanged.
    """
    try:
        yield
    except StorageError as error:
        if process.restarts():
            raise Failed(str(error)) from None
        raise


DEVICE = "train.device"
OUTSIDE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EFBIG,
    errno.ENOTDIR,
    errno.ELOOP,
)
"""Errors of files that are nobody's mistake here."""


def worker(
    request: TrainRequest,
    started: Launch | None,
    device: torch.device,
    prepared: Prepared | None = None,
    refusal: str | None = None,
    on_metrics: MetricsCallback | None = None,
    handles_signals: bool = True,
) -> Outcome:
    """Join the process group, unless this process is in one, train on `device`, and write
    summary.json (first rank). Return the outcome.

    `prepared` is the run with its data, if this process has resolved it. `refusal` is an error of
    this rank's options, which all ranks then raise as BadInput; so they do where their options,
    code or data differ. `on_metrics` is called with each row of metrics, on every rank.
    `handles_signals`: SIGINT and SIGTERM make the run save and end. Raises Failed for what ends a
    run without being a bug (a full disk, a loss that is not finite).
    """
    config, out, joining = request.config, request.out, time.time()
    if device.type == "cpu":
        keep_freed_memory()
    stop, same = Stop(after=request.stop_after), config.train.deterministic
    limit = network_limit(config.train.hang_seconds)
    with (
        process.environment(determinism.ENVIRONMENT if same else {}),
        determinism.deterministic_mode(same),  # NCCL reads it when its groups are made
        process.stop_handler(lambda got: setattr(stop, "signal", max(stop.signal, got)))
        if handles_signals
        else nullcontext(),
        meshes.process_group_context(started, device, limit),
        explain_errors(out),
    ):
        start = _start(request, started, device, refusal)
        # a launcher is older than a restart
        started_at = process.started_at(with_launcher=not start.restarted)
        imports = max(0.0, IMPORTED - process.started_at(with_launcher=False))
        joined = JoinTimes(min(started_at, joining), joining, time.time(), imports)
        if start.resumed != request.handling.resume:
            prepared = None  # a restart: what the run started from may be gone since
        # and it may be on a host that has nothing of the run
        if start.resumed and config.checkpoint.to is not None:
            mirror.pull_run(config.checkpoint.to, out)
        mesh = config.layout.resolve(dist.get_world_size()).mesh(device, limit)
        watch = Watch(
            out / "hang",
            mesh.rank,
            mesh.size,
            config.train.hang_seconds,
            lambda text: process.end(text, hang=True),
        )
        with watch.watching():
            outcome = run_training(
                config,
                out,
                mesh,
                console(mesh.first),
                start=start,
                stop=stop,
                watch=watch,
                prepared=prepared,
                on_metrics=on_metrics,
                joined=joined,
            )
        if mesh.first:
            summary(outcome, out)
        if mesh.first and outcome.signal:
            config_file = f"{escape(config.checkpoint.to or out)}/config.yaml"
            print(
                f"stopped by signal {outcome.signal} after step {outcome.steps}, checkpoint "
                f"saved; resume with dolmen train {config_file} --resume",
                flush=True,
            )
        # of the first rank, which alone has measured them
        shares = [outcome.goodput, outcome.slow_ranks]
        dist.broadcast_object_list(shares)
        outcome = replace(outcome, goodput=shares[0], slow_ranks=shares[1])
        # no rank leaves before the first has written the summary
        dist.barrier()
    return outcome


def _start(
    request: TrainRequest, started: Launch | None, device: torch.device, refusal: str | None
) -> StartMode:
    """Return how the run starts (new, resumed or restarted), agreed on by all ranks, after checking
    that their options and code are the same and no two share a GPU. Collective. Raises BadInput on
    every rank, also for `refusal`, the error of this rank.
    """
    with as_bad_input(ValueError):
        start = agree_on_start(
            request,
            restarts=process.restarts(),
            job=process.job(),
            recovered=bool(process.recovered_job()),
            agent=process.agent(),
            checked=started is None or process.launched_here(),
            refusal=refusal,
        )
        devices.refuse_shared_gpus(device, DEVICE)
        return start


@contextmanager
def explain_errors(out: Path) -> Iterator[None]:
    """Context manager: raise errors that are no bug as BadInput (a damaged checkpoint or file, an
    unusable folder) or Failed (a failed save or upload, a full disk, and, as final, a loss that is
    not finite), with a message for the user. Other exceptions pass unchanged. `out`: the run's
    folder.
    """
    try:
        yield
    except (Damaged, Refused, Unusable) as error:
        raise BadInput(str(error)) from None
    except (NotSaved, StorageError) as error:
        raise Failed(str(error)) from None
    except (FloatingPointError, determinism.NotDeterministic, Superseded) as error:
        raise Failed(str(error), final=True) from None
    except OSError as error:
        if error.errno not in OUTSIDE:
            raise
        raise Failed(
            f"{error.filename or out}: {error.strerror}. "
            f"{folders.describe_newest(out / 'checkpoints')}: make room or fix the folder, and "
            f"resume with dolmen train {out}/config.yaml --resume"
        ) from None
