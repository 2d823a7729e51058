"""What a run begins with: its model and where the weights come from, an optimizer at step 0, and
the objective that it is asked for.
"""

from dolmen.conversion.source import Source, cast_source, load_weights, open_source
from dolmen.core.mesh import Mesh
from dolmen.model import build
from dolmen.model.decoder import Decoder
from dolmen.model.tree import Tree
from dolmen.objectives.config import SIMPO_MARGIN
from dolmen.objectives.grpo import Group, Undecided
from dolmen.objectives.masked_lm import Filling
from dolmen.objectives.objective import CrossEntropy, Objective
from dolmen.objectives.ppo import Clipped, ClippedUndecided
from dolmen.objectives.preference import DPO, KTO, ReferenceFree
from dolmen.objectives.reward import Preferred
from dolmen.optim import optimizer as optim
from dolmen.optim.config import OptimizerConfig
from dolmen.optim.optimizer import DTYPES, LossScale, at_rest
from dolmen.parallel import channels
from dolmen.parallel.actions import Schedule
from dolmen.training.check_init import initial
from dolmen.training.config import RunConfig
from dolmen.training.state import SpikePolicy, TrainState


def make_state(run: RunConfig, mesh: Mesh, steps: int) -> TrainState:
    """The model with its initial values and an optimizer at step 0; ranks of pp are connected."""
    schedule = run.layout.make_schedule(run.train.global_batch_size, run.microbatch_size)
    channels.connect(schedule, mesh)
    model = built(run, run.tree, schedule, mesh)
    source = None if run.init is None else initial(run, run.init)
    fill(model, source, run)
    if source is not None:
        _begin_scales(model, source)
    state = begin_state(run, model, schedule, mesh, steps)
    if run.optimizer.from_init:
        state.inherited = _inherit(run, model, state.optimizer)
    return state


def built(run: RunConfig, tree: Tree, schedule: Schedule, mesh: Mesh) -> Decoder:
    """A model that learns as `run` says, without values."""
    return build.build(
        tree,
        mesh,
        run.layout,
        schedule,
        training=run.training,
        dtype=at_rest(run.train.dtype),
        compute=DTYPES[run.train.dtype],
        compile=run.train.compile,
    )


def fill(model: Decoder, source: Source | None, run: RunConfig) -> None:
    """Gives a model the weights that `source` has, and draws all others from the run's seed:
    adapters, biases that training adds to routers, a scalar head. None: all are drawn.
    """
    if source is None:
        build.initialize(model, run.train.seed)
        return
    stored = [name for name, _ in model.named_parameters() if name in source.tree.leaves]
    build.initialize(model, run.train.seed, stored)
    masters = cast_source(source, at_rest(run.train.dtype))
    build.load(model, lambda write: load_weights(masters, write, only=stored))


def begin_state(
    run: RunConfig,
    model: Decoder,
    schedule: Schedule,
    mesh: Mesh,
    steps: int,
    *,
    config: OptimizerConfig | None = None,
    objective: Objective | None = None,
) -> TrainState:
    """`model`, whatever its values are, with an optimizer at step 0; where `config` or `objective`
    is None, those that the run says.
    """
    config = run.optimizer if config is None else config
    optimizer = optim.make(model, config, mesh)
    optim.prime(optimizer)
    return TrainState(
        model,
        optimizer,
        config,
        steps,
        run.layout.zero,
        schedule,
        run.train.seed,
        LossScale.of(run.train.dtype),
        SpikePolicy(run.train.spike_factor if run.train.spike == "skip" else None),
        objective=objective_of(run) if objective is None else objective,
    )


def _inherit(run: RunConfig, model: Decoder, optimizer: optim.Optimizer) -> int:
    """Give the optimizer the moments of `init`; the updates that have made them."""
    assert run.init is not None
    moments = open_source(run.init, run.known_model).moments
    assert moments is not None, "check_moments has seen them"
    for kind, tensors in moments.kinds.items():
        optim.load(model, optimizer, kind, tensors.stream)
    optim.set_step(optimizer, moments.step)
    return moments.step


def _begin_scales(model: Decoder, source: Source) -> None:
    """Give delayed scaling what the source knows."""
    delayed = model.delayed()
    known = source.scaling if delayed else {}
    for name in delayed.keys() & known.keys():
        delayed[name].begin(*known[name])


def objective_of(run: RunConfig) -> Objective:
    """That which is asked for: the preferred answer, or the next token; of a model that sees both
    ways masked ones, and whether a text follows, where its head says so, which counts as the masked
    tokens of a sequence.
    """
    asked = run.objective
    same = asked.reference in (None, run.init)
    if asked.name == "reward":
        return Preferred(asked.center_rewards_coefficient, asked.margin or 0.0)
    if asked.loss_type == "simpo" or asked.loss_type == "orpo":
        margin = SIMPO_MARGIN if asked.margin is None else asked.margin
        return ReferenceFree(asked.loss_type, asked.beta, margin, asked.label_smoothing)
    if asked.loss_type == "kto":
        weights = asked.desirable_weight, asked.undesirable_weight
        return KTO(asked.beta, *weights, from_reference=same)
    if asked.name == "dpo":
        return DPO(asked.beta, asked.loss_type, asked.label_smoothing, asked.rpo_alpha, same)
    if asked.name == "grpo":
        how = run.rollout
        return (Undecided if how.entropy_coef else Group)(
            how.loss_type,
            how.importance_sampling_level,
            how.clip_low,
            how.clip_high,
            how.beta,
            how.temperature,
            how.max_new_tokens,
            how.entropy_coef,
        )
    if asked.name == "ppo":
        how = run.rollout
        return (ClippedUndecided if how.entropy_coef else Clipped)(
            how.clip_low, how.clip_high, run.ppo.dual_clip, how.temperature, how.entropy_coef
        )
    if not run.tree.both_ways:
        return CrossEntropy()
    masked = max(1.0, run.data.masked_fraction * run.sequence_length)
    return Filling(masked if run.tree.head.follows else 0.0)
