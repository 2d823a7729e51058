"""The critic of a run (PPO): a second model on the same mesh with an optimizer of its own, trained
by the same steps as the first. It has the shape of the model and ends in one number for each
token.
"""

from dataclasses import replace

from dolmen.checkpoint.saved import SavedCritic
from dolmen.conversion.source import Source, open_source
from dolmen.core.mesh import Mesh
from dolmen.families import compared
from dolmen.model.tree import Scalar, Tree
from dolmen.objectives.ppo import Expected
from dolmen.optim import optimizer as optim
from dolmen.optim.config import OptimizerConfig
from dolmen.rl.targets import KLController
from dolmen.training.begin import begin_state, built, fill
from dolmen.training.config import RunConfig
from dolmen.training.state import Critic, TrainState
from dolmen.training.step import Metrics


def tree_of(run: RunConfig) -> Tree:
    """What it is."""
    return replace(run.tree, head=Scalar())


def optimizer_of(run: RunConfig) -> OptimizerConfig:
    lr = run.optimizer.lr if run.critic.lr is None else run.critic.lr
    return replace(run.optimizer, lr=lr, from_init=False)


def begins_with(run: RunConfig) -> str | None:
    """Where its weights are; None: nowhere."""
    return run.critic.init or run.init


def make(run: RunConfig, policy: TrainState, mesh: Mesh) -> Critic:
    """With its initial values, and an optimizer at step 0. `policy` is what it stands beside."""
    model = built(run, tree_of(run), policy.schedule, mesh)
    name = begins_with(run)
    fill(model, None if name is None else open_source(name), run)
    state = begin_state(
        run,
        model,
        policy.schedule,
        mesh,
        policy.steps,
        config=optimizer_of(run),
        objective=Expected(run.critic.clip),
    )
    asked = run.ppo
    return Critic(state, KLController(asked.kl_coef, asked.kl_target, asked.kl_horizon))


def check(run: RunConfig) -> None:
    """Raises ValueError where what it is to begin with is of another shape or other tokens."""
    if run.critic.init is None:
        return
    source = open_source(run.critic.init)
    ours, theirs = run.tree, source.tree
    if theirs.vocab_size != ours.vocab_size:
        raise ValueError(
            f"critic.init {run.critic.init} has a vocab_size of {theirs.vocab_size:,}, the model "
            f"{ours.vocab_size:,}: give a critic of the same tokens"
        )
    if apart := _apart(run, source):
        raise ValueError(
            f"critic.init {run.critic.init} has another shape than the model ({apart}): give one "
            "of the model's own, or leave it out to begin as the model does"
        )


def _apart(run: RunConfig, source: Source) -> str:
    """In what the source is not of the run's shape, the head aside; nothing where it is."""
    body = replace(source.tree, head=run.tree.head)
    if body.leaves == run.tree.leaves:
        return ""
    told = [f"{n} {a}, here {b}" for n, a, b in compared(source.model, run.known_model)]
    return "; ".join(told[:3]) or "other parameters"


def saved(critic: Critic | None) -> SavedCritic | None:
    """What a checkpoint keeps of it beside tensors."""
    if critic is None:
        return None
    own = critic.state
    return SavedCritic(
        own.updates,
        (own.scale.value, own.scale.good_steps),
        tuple(own.spike.state()),
        critic.coefficient.value,
    )


def go_on(critic: Critic, step: int, kept: SavedCritic) -> None:
    """Make it what it was after `step`, its tensors aside."""
    state = critic.state
    state.step, state.updates = step, kept.updates
    optim.set_step(state.optimizer, kept.updates)
    if state.scale.dynamic:
        state.scale.value, state.scale.good_steps = kept.loss_scale
    state.spike.load(list(kept.norms))
    if critic.coefficient.target is not None:  # else it is what the options say
        critic.coefficient.value = kept.kl_coef


def row(m: Metrics | None) -> dict[str, float]:
    """What a row of metrics says of its step."""
    if m is None:
        return {}
    beside = {name.removeprefix("objective/"): value for name, value in m.objective.items()}
    own = {"loss": m.loss, "grad_norm": m.grad_norm, "lr": m.lr, **m.router, **beside}
    return {f"critic/{name}": value for name, value in own.items()}
