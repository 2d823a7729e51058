"""Going on from the newest whole checkpoint of a run's folder, and saying what changed since."""

from rich.console import Console

from dolmen.checkpoint import saved as saved_state
from dolmen.checkpoint.folders import Damaged
from dolmen.checkpoint.saved import Saved
from dolmen.checkpoint.store import Checkpoints
from dolmen.core.config import changed_options, to_dict
from dolmen.data import loader as data_loader
from dolmen.data.batches import Loader
from dolmen.optim import optimizer as optim
from dolmen.training import critic
from dolmen.training.check_out import check_same_model, check_same_optimizer
from dolmen.training.config import RunConfig
from dolmen.training.folder import Unusable
from dolmen.training.state import TrainState


def resume(
    state: TrainState,
    run: RunConfig,
    loader: Loader,
    checkpoints: Checkpoints,
    console: Console,
    restarted: bool = False,
) -> Saved | None:
    """Put the newest whole checkpoint into `state` and `loader`, say what changed since, and return
    what it kept beside tensors; with none, say so and start.

    Raises Unusable if the checkpoint is of another model or of a newer dolmen, Damaged if it is;
    after a restart, which nobody watches, a damaged one is put aside and the one before it taken.
    """
    saved = load_newest(state, run, checkpoints, console, restarted)
    if saved is None:
        console.print(
            f"{'restart' if restarted else '--resume'}: nothing is saved here yet, starting from "
            f"step 0"
        )
        return None
    state.step, state.updates, state.tokens = saved.step, saved.updates, saved.tokens
    loader.go_on(saved.step, saved.samples)
    state.inherited = saved.inherited
    optim.set_step(state.optimizer, saved.inherited + saved.updates)
    if state.scale.dynamic:
        state.scale.value, state.scale.good_steps = saved.loss_scale
    state.spike.load(list(saved.norms))
    if state.beside is not None:
        assert saved.critic is not None, "_load has seen it"
        critic.go_on(state.beside, saved.step, saved.critic)
    console.print(f"resuming from step {saved.step}")
    for line in changed_since(saved, run, loader):
        console.print(f"  changed: {line}")
    return saved


def changed_since(saved: Saved, run: RunConfig, loader: Loader) -> list[str]:
    """Which options and data differ from those of the checkpoint, a line each, and each once: the
    data's fingerprint holds some options too.
    """
    # a section that checkpoints of before do not have was as it is by default
    options = changed_options({**to_dict(RunConfig()), **saved.run}, to_dict(run))
    named = {line.split(":")[0].rpartition(".")[2] for line in options}
    data = data_loader.changes(saved.data, loader.fingerprint())
    return [line for line in options if not line.startswith("model.")] + [
        line for line in data if line.split(":")[0] not in named
    ]


def load_newest(
    state: TrainState, run: RunConfig, checkpoints: Checkpoints, console: Console, fall_back: bool
) -> Saved | None:
    """Load the newest whole checkpoint: what it keeps beside tensors; None if there is none. With
    `fall_back` the newest that is not damaged; a whole one that does not fit is never put aside.
    Raises Damaged where none can be read, and Unusable, on every rank, for one that does not fit.
    """
    steps = checkpoints.steps()
    for step in reversed(steps):
        try:
            return _load(step, state, run, checkpoints, console)
        except Damaged as error:
            if not fall_back or step == steps[0]:
                raise checkpoints.damaged(step, error) from None
            aside = checkpoints.put_aside(step)
            console.print(
                f"WARNING: the newest checkpoint, of step {step}, is damaged ({error}); it is kept "
                f"as {aside}, and the run goes on from the one before"
            )
        except (KeyError, ValueError) as error:
            raise Unusable(str(error.args[0])) from None
    return None


def _load(
    step: int, state: TrainState, run: RunConfig, checkpoints: Checkpoints, console: Console
) -> Saved:
    def kept() -> Saved:
        return saved_state.read_saved(checkpoints.meta(step), checkpoints.path(step))

    saved = checkpoints.together(step, kept)[0]
    check_same_model(saved.run, run, step)
    check_same_optimizer(saved.run, run, step)
    if (saved.critic is None) != (state.beside is None):
        holds = "no critic" if saved.critic is None else "a critic"
        raise ValueError(
            f"the checkpoint of step {step} holds {holds}, and objective.name is "
            f"{run.objective.name}: go on as it began, or give another --out"
        )
    wanted, scaling, now = state.tensors(), state.scaling(), to_dict(run.train)
    if all(saved.run["train"].get(name) == now[name] for name in ("precision", "fp8")):
        for delayed in state.delayed():
            delayed.begun = delayed.begun or saved.updates > 0
    else:  # of another recipe, or none: scales begin as at a first step
        wanted = {name: tensor for name, tensor in wanted.items() if name not in scaling}
        for delayed in state.delayed():
            delayed.forget()
    checkpoints.load(step, wanted, state.names())
    return saved
