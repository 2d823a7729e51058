"""Start or resume of a run, agreed on by all ranks.

Ranks may see different files, options, code or restart counts, and a rank that resumed while
another started would hang in its first collective, or train on other weights. So before a
checkpoint is loaded they compare options, versions and a hash of the code (`rank_facts`), and
decide together:

    first start    as --resume and --overwrite request; a folder that holds a run is an error
    restart        if any rank's launcher counts one, or the folder lists the job: from the newest
                   complete checkpoint, or an older one if that is damaged. --overwrite was obeyed
                   by the first start; the folder records by which job, as a kill may have come
                   before

What is restored, and from where:

    model, moments, fp8 scales, critic    tensors of the checkpoint, resharded to the layout of now
    step, updates, tokens, samples        its state.json; the data loader continues at the sample
    loss scale, norms of the spike policy its state.json, so that the next step decides as before
    random numbers                        functions of seed and step: nothing is stored
    learning rate                         function of step and total steps: follows the options
    rollouts of the current iteration     rollouts/STEP.safetensors of the folder

So a resumed run repeats the bits of one that never stopped. What changed since the checkpoint
(options, data) is printed line by line and kept in history.jsonl.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console

from dolmen import __version__
from dolmen.checkpoint import saved as saved_state
from dolmen.checkpoint.folders import Damaged
from dolmen.checkpoint.remote import Superseded
from dolmen.checkpoint.saved import Saved
from dolmen.checkpoint.store import Checkpoints
from dolmen.core import consensus
from dolmen.core.config import changed_options, flatten, to_dict
from dolmen.core.mesh import Mesh
from dolmen.data import loader as data_loader
from dolmen.data.base_loader import Loader
from dolmen.data.sources import resolve_sources
from dolmen.files import gate
from dolmen.optim import optimizer as optim
from dolmen.training import mirror
from dolmen.training.checks.folder import check_overwrite, check_resume, check_same_run
from dolmen.training.config import RunConfig
from dolmen.training.folder import OWNER, Unusable
from dolmen.training.request import TrainRequest
from dolmen.training.resolve import fill_in_length
from dolmen.training.state import TrainState


def resume(
    state: TrainState,
    run: RunConfig,
    loader: Loader,
    checkpoints: Checkpoints,
    console: Console,
    restarted: bool = False,
) -> Saved | None:
    """Resume from the newest complete checkpoint: load tensors, counters, loss scale, spike norms
    and critic into `state` and the position in the data into `loader`, print the step and which
    options or data changed since, and return what the checkpoint stores besides tensors. Without a
    checkpoint, print so and return None. Collective.

    Raises Unusable if the checkpoint is of another model or of a newer dolmen, Damaged if it is
    damaged. After an automatic restart (`restarted`) a damaged one is moved aside and the one
    before it loaded.
    """
    saved = load_newest(state, run, checkpoints, console, restarted)
    if saved is None:
        console.print(
            f"{'restart' if restarted else '--resume'}: no checkpoint yet, starting from step 0"
        )
        return None
    state.step, state.updates, state.tokens = saved.step, saved.updates, saved.tokens
    loader.resume_at(saved.step, saved.samples)
    state.inherited = saved.inherited
    optim.set_step(state.optimizer, saved.inherited + saved.updates)
    if state.scale.dynamic:
        state.scale.value, state.scale.good_steps = saved.loss_scale
    state.spike.load(list(saved.norms))
    if state.critic is not None:
        assert saved.critic is not None, "_load has seen it"
        state.critic.resume(saved.step, saved.critic)
    console.print(f"resuming from step {saved.step}")
    for line in changes_since(saved, run, loader):
        console.print(f"  changed: {line}")
    return saved


def changes_since(saved: Saved, run: RunConfig, loader: Loader) -> list[str]:
    """Return a line of text for each option, and each part of the data's fingerprint, in which the
    run differs from the checkpoint that it resumes from. Fields of the model are left out, and what
    is both an option and part of the fingerprint is listed once.
    """
    # a section that checkpoints of before do not have was as it is by default
    # length filled in: a run that was not given one has it in its checkpoint
    options = changed_options(
        {**to_dict(RunConfig()), **saved.run}, to_dict(fill_in_length(run, loader))
    )
    named = {line.split(":")[0].rpartition(".")[2] for line in options}
    data = data_loader.changes(saved.data, loader.fingerprint())
    return [line for line in options if not line.startswith("model.")] + [
        line for line in data if line.split(":")[0] not in named
    ]


def load_newest(
    state: TrainState, run: RunConfig, checkpoints: Checkpoints, console: Console, fall_back: bool
) -> Saved | None:
    """Load the tensors of the newest complete checkpoint into `state`, and return what else it
    stores; None if there is no checkpoint. With `fall_back` a damaged one is moved aside, with a
    printed warning, and the one before it tried. Collective. Raises Damaged if none can be read,
    and Unusable, on every rank, for a checkpoint of another model, which is never moved aside.
    """
    steps = checkpoints.steps()
    for step in reversed(steps):
        try:
            return _load(step, state, run, checkpoints, console)
        except Damaged as error:
            if not fall_back or step == steps[0]:
                raise checkpoints.damage_error(step, error) from None
            aside = checkpoints.put_aside(step)
            console.print(
                f"WARNING: the newest checkpoint, of step {step}, is damaged ({error}); it is "
                f"renamed to {aside}, and the run resumes from the previous one"
            )
        except (KeyError, ValueError) as error:
            raise Unusable(str(error.args[0])) from None
    return None


def _load(
    step: int, state: TrainState, run: RunConfig, checkpoints: Checkpoints, console: Console
) -> Saved:
    """Load the tensors of the checkpoint of `step` into `state`, resharded, and return what else it
    stores. Scales of delayed fp8 scaling are loaded only if the fp8 options are unchanged, else
    reset. Raises Damaged, and KeyError or ValueError where model, optimizer or critic are others.
    """

    def read() -> Saved:
        """Return what the checkpoint's state.json stores, checked."""
        return saved_state.read_saved(checkpoints.meta(step), checkpoints.path(step))

    saved = checkpoints.together(step, read)[0]
    check_same_run(saved.run, run, step)
    if (saved.critic is None) != (state.critic is None):
        holds = "no critic" if saved.critic is None else "a critic"
        raise ValueError(
            f"the checkpoint of step {step} has {holds}, but objective.name is "
            f"{run.objective.name}: resume with the original objective, or give another --out"
        )
    tensors, scaling, now = state.tensors(), state.scaling(), to_dict(run.train)
    # amax histories are of the roundings of one recipe: another starts without
    if all(saved.run["train"].get(name) == now[name] for name in ("precision", "fp8")):
        for delayed in state.delayed_scalings():
            delayed.initialized = delayed.initialized or saved.updates > 0
    else:  # of another recipe, or none: scales begin as at a first step
        tensors = {name: tensor for name, tensor in tensors.items() if name not in scaling}
        for delayed in state.delayed_scalings():
            delayed.forget()
    checkpoints.load(step, tensors, state.names())
    return saved


T = TypeVar("T")


@dataclass(frozen=True)
class StartMode:
    """The way a run starts. `owner` lists the ids of the launchers' agents and jobs, a line each,
    those of the first start first; it is written into the folder when that is emptied, so that
    their restarts do not empty it again.
    """

    resumed: bool = False
    overwrite: bool = False
    restarted: bool = False
    owner: str = ""

    @property
    def how(self) -> str:
        """The kind of start as history.jsonl has it: "new", "resumed" or "restarted"."""
        if self.restarted:
            return "restarted"
        return "resumed" if self.resumed else "new"


def rank_facts(run: RunConfig, out: Path, refusal: str | None, **more: object) -> dict[str, object]:
    """Return name -> value of this rank for all that must be equal on every rank: options (except
    cache folder and number of data workers), the run's folder, versions of dolmen and torch, hash
    of the source code, this rank's error (`refusal`, None: none) and `more`.
    """
    options = flatten({k: v for k, v in to_dict(run).items() if v is not None})
    # hosts may have different disks and cores
    for name in ("data.cache", "data.workers"):
        options.pop(name, None)
    code = consensus.hash_sources(Path(__file__).parents[1])
    return {
        "refuses": refusal,
        **options,
        **more,
        "out": str(out.absolute()),
        "dolmen": __version__,
        "torch": torch.__version__,
        **code,
    }


def agree_on_start(
    request: TrainRequest,
    *,
    restarts: int,
    job: str,
    checked: bool,
    recovered: bool = False,
    agent: str = "",
    refusal: str | None = None,
) -> StartMode:
    """Compare options, versions and code of all ranks, and return how the run starts, the same on
    every rank: new, resumed, or restarted by its launcher, and whether it overwrites the folder.
    Collective, called right after joining.

    `restarts` and `job` are the number of restarts and the job id that this rank's launcher
    reports; `checked`: the folder was checked before the processes started; `recovered`: the
    launcher does not count restarts but keeps the job id over them; `agent`: id of this rank's
    agent of torchrun, which does not count the restarts by which agents join. Raises ValueError
    with the same message on every rank where ranks differ, where one has an error (`refusal`), and
    for a folder that cannot be used.
    """
    out, resume, overwrite = request.out, request.handling.resume, request.handling.overwrite
    consensus.require_same(
        rank_facts(request.config, out, refusal, resume=resume, overwrite=overwrite)
    )
    if refusal:
        raise ValueError(refusal)
    # after a failure on one host only its count is sure to rise
    counts, jobs, agents = zip(*consensus.gather_objects((restarts, job, agent)), strict=True)
    starters = [name for name in sorted({*agents}) + sorted({*jobs}) if name]
    # a kill may have come before the first start has emptied the folder: then it still has to
    owners = consensus.run_on_rank_zero(lambda: _owners(out))
    known = bool({*jobs, *agents} & {*owners})
    restarted = max(counts) > 0 or (recovered and known) or bool({*agents} & {*owners})
    if not restarted:
        if not checked:
            consensus.run_on_rank_zero(lambda: _check(request))
        return StartMode(resume, overwrite, False, "\n".join(starters))
    # those of the first start stay the first
    owner = "\n".join(dict.fromkeys([*owners, *starters] if known else starters))
    goes_on = not overwrite or known
    return StartMode(resumed=goes_on, overwrite=not goes_on, restarted=True, owner=owner)


def on_first_rank(mesh: Mesh, work: Callable[[], T]) -> T:
    """Call `work` on the first rank only and return its result on every rank. What it raises is
    raised on every rank: Superseded and OSError as they are, another ValueError as Unusable.
    Collective.
    """
    if mesh.size == 1:
        return work()

    def attempt() -> T | Exception:
        """Return the result, or the error that is no Unusable."""
        try:
            return work()
        except (Superseded, OSError) as error:
            return error

    try:
        result = consensus.run_on_rank_zero(attempt)
    except ValueError as error:
        raise Unusable(str(error)) from None
    if isinstance(result, Exception):
        raise result
    return result


def require_same_data(loader: Loader, mesh: Mesh) -> None:
    """Raise Unusable on every rank, naming the differences, unless the fingerprints of all ranks'
    data are equal: one path may lead to other files on another host.
    """
    if mesh.size == 1:
        return
    try:
        consensus.require_same(
            loader.fingerprint(),
            what="have the same training data",
            mend="give every host the same files under --data.path, --data.validation and "
            "--data.tokenizer",
        )
    except ValueError as error:
        raise Unusable(str(error)) from None


def _check(request: TrainRequest) -> None:
    """Raise ValueError if the run's folder, or its URL, cannot be used as --resume and --overwrite
    request: it holds another run or foreign files, --overwrite would delete what the run reads, or
    the newest checkpoint does not fit.
    """
    handling = request.handling
    to = request.config.checkpoint.to
    mirror.check_out(request.out, to, handling.resume, handling.overwrite)
    if handling.overwrite:
        data, pretraining = request.config.data, request.config.ppo.pretraining_path
        named = (data.path, [data.validation] if data.validation else (), pretraining)
        sources = [
            source
            for entries in named
            if entries
            for source in resolve_sources(entries, cache=data.cache_folder)
        ]
        check_overwrite(request.config, request.out, request.source, sources)
    if handling.resume:
        check_resume(request.config, request.out)


def _owners(out: Path) -> list[str]:
    """Return the ids of launchers' jobs and agents that are recorded in the run's folder, by whose
    starts it was emptied or used; [] if there are none.
    """
    return gate.read_text(out / OWNER, 2**20).splitlines() if (out / OWNER).exists() else []
