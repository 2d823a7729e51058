"""The state of a run at step 0: model and weights, optimizer, objective, and the critic of PPO."""

from dataclasses import replace

from dolmen.conversion.source import ModelSource, cast_source, load_weights
from dolmen.core.mesh import Mesh
from dolmen.data.base_loader import Loader
from dolmen.data.batch import Batch
from dolmen.model import build
from dolmen.model.decoder import Decoder
from dolmen.model.spec import ModelSpec, ScalarHeadSpec
from dolmen.objectives.config import SIMPO_MARGIN
from dolmen.objectives.objective import CrossEntropy, MaskedLM, Objective
from dolmen.objectives.on_policy import (
    GRPOLoss,
    PPOPolicyLoss,
    PPOValueLoss,
)
from dolmen.objectives.preference import DPO, KTO, ReferenceFreePreference
from dolmen.objectives.reward import PairwiseRewardLoss
from dolmen.ops.attention_support import AttentionChoice
from dolmen.ops.kernels import Hardware
from dolmen.optim import optimizer as optim
from dolmen.optim.config import OptimizerConfig
from dolmen.optim.optimizer import DTYPES, LossScale, master_dtype
from dolmen.parallel import pipeline
from dolmen.parallel.schedule import Schedule
from dolmen.rl.generation import GenerationModel
from dolmen.rl.prompts import PromptLoader
from dolmen.rl.targets import KLController
from dolmen.training.attention_timing import choose_run_attention
from dolmen.training.config import RunConfig, TrainConfig
from dolmen.training.resolve import ResolvedRun
from dolmen.training.self_test import check_machine
from dolmen.training.state import Critic, PretrainingLoss, SpikePolicy, TrainState


def make_state(resolved: ResolvedRun, mesh: Mesh, steps: int) -> TrainState:
    """Return the training state at step 0: the sharded model with its initial weights (of --init,
    else random), the optimizer with its moments (those of --init if requested, else 0), the
    objective. `steps` is the length of the run. Opens the channels between the ranks of pp.
    Collective. With exact numerics, raises ValueError on a machine that cannot compute them.
    """
    run = resolved.config
    schedule = run.layout.make_schedule(run.train.global_batch_size, run.microbatch_size)
    pipeline.connect(schedule, mesh)
    if run.training.exact is not None:
        check_machine(
            *(run.spec, run.training.exact, run.microbatch_size, mesh, DTYPES[run.train.dtype]),
            generates=run.objective.name == "grpo",
            dropout=run.train.dropout,
        )
    attention = choose_run_attention(run, mesh, Hardware.from_device(mesh.device))
    model = build_model(run, run.spec, schedule, mesh, attention)
    load_initial(model, resolved.weights, run.train)
    if resolved.weights is not None:
        _load_scales(model, resolved.weights)
    state = initial_state(run, model, schedule, mesh, steps)
    if resolved.inherits_moments:
        state.inherited = _load_moments(resolved, model, state.optimizer)
    return state


def make_critic(resolved: ResolvedRun, policy: TrainState, mesh: Mesh) -> Critic:
    """Return the critic of PPO for the state `policy`, at step 0: a model of the policy's shape
    with a scalar head for values, with its initial weights (of --critic.init, else the policy's
    initial model), its own optimizer, and the controller of the KL coefficient.
    """
    run = resolved.config
    spec, kernels = replace(run.spec, head=ScalarHeadSpec()), policy.model.split.kernels
    model = build_model(run, spec, policy.schedule, mesh, AttentionChoice(kernels.attention))
    load_initial(model, resolved.critic, run.train)
    lr = run.optimizer.lr if run.critic.lr is None else run.critic.lr
    state = initial_state(
        run,
        model,
        policy.schedule,
        mesh,
        policy.steps,
        config=replace(run.optimizer, lr=lr, from_init=False),
        objective=PPOValueLoss(run.critic.clip),
    )
    ppo = run.ppo
    return Critic(state, KLController(ppo.kl_coef, ppo.kl_target, ppo.kl_horizon))


def make_pretraining(run: RunConfig, loader: Loader, mesh: Mesh) -> PretrainingLoss | None:
    """Return the pretraining loss that PPO mixes into its own (PPO-ptx), with this rank's batches
    of text; None if the loader has no pretraining text.
    """
    if not isinstance(loader, PromptLoader) or loader.text is None:
        return None
    text = loader.text

    def batch(step: int) -> Batch:
        """Return this rank's rows of the pretraining text for a step."""
        return text.batch(step, mesh.dp.rank, mesh.dp.size).read_by(run.spec)

    return PretrainingLoss(run.ppo.pretraining_coef, batch)


def build_model(
    run: RunConfig, spec: ModelSpec, schedule: Schedule, mesh: Mesh, attention: AttentionChoice
) -> Decoder:
    """Return a model of `spec`, sharded over `mesh` and set up as the run trains it (adapters,
    dropout, fp8, compilation, dtypes) with the attention backend `attention`. The values of its
    parameters are not initialized.
    """
    return build.build(
        spec,
        mesh,
        run.layout,
        schedule,
        training=replace(run.training, attention=attention),
        dtype=master_dtype(run.train.dtype),
        compute=DTYPES[run.train.dtype],
        compile=run.train.compile,
    )


def load_initial(model: Decoder, source: ModelSource | None, train: TrainConfig) -> None:
    """Initialize a model's parameters in place: load those that `source` has, and sample all others
    (adapters, router biases, a scalar head) from the run's seed. `source` None: sample all.
    """
    if source is None:
        build.initialize(model, train.seed)
        return
    # names decide the random numbers, so what is sampled does not depend on what is loaded
    stored = [name for name, _ in model.named_parameters() if name in source.spec.params]
    build.initialize(model, train.seed, stored)
    # rounded once, from the stored dtype to the master weights'
    masters = cast_source(source, master_dtype(train.dtype))
    build.load(model, lambda write: load_weights(masters, write, only=stored))


def initial_state(
    run: RunConfig,
    model: Decoder,
    schedule: Schedule,
    mesh: Mesh,
    steps: int,
    *,
    config: OptimizerConfig | None = None,
    objective: Objective | None = None,
) -> TrainState:
    """Return a training state at step 0 for an initialized `model`, with a new optimizer (moments
    of 0), loss scale and spike policy as the run has them; `config` (of the optimizer) and
    `objective` default to the run's.
    """
    config = run.optimizer if config is None else config
    optimizer = optim.make_optimizer(model, config, mesh)
    optim.prime(optimizer)
    return TrainState(
        model,
        optimizer,
        config,
        steps,
        run.layout.zero,
        schedule,
        run.train.seed,
        LossScale.from_dtype(run.train.dtype),
        SpikePolicy(run.train.spike_factor if run.train.spike == "skip" else None),
        objective=objective_of(run) if objective is None else objective,
    )


def _load_moments(resolved: ResolvedRun, model: Decoder, optimizer: optim.Optimizer) -> int:
    """Load the AdamW moments and the step count of the initial model into the optimizer, and return
    that step count.
    """
    assert resolved.weights is not None
    moments = resolved.weights.moments
    assert moments is not None, "check_moments has seen them"
    for kind, tensors in moments.kinds.items():
        optim.load(model, optimizer, kind, tensors.stream)
    optim.set_step(optimizer, moments.step)
    return moments.step


def _load_scales(model: Decoder, source: ModelSource) -> None:
    """Load into `model` the scales of delayed fp8 scaling that the source stores for its weights;
    nothing if the model has no delayed scaling.
    """
    delayed = model.delayed_scaling()
    known = source.scaling if delayed else {}
    for name in delayed.keys() & known.keys():
        delayed[name].begin(*known[name])


def objective_of(run: RunConfig) -> Objective:
    """Return the objective (loss function with its metrics) that the run's options ask for: reward
    model, preference losses (DPO and variants, KTO, SimPO, ORPO), GRPO, PPO's policy loss, else
    cross-entropy, or masked LM for a bidirectional model. If a model's head also predicts whether a
    sentence follows, this loss has the weight of the masked tokens of a sequence.
    """
    options = run.objective
    # then log-ratios are 0 before the first update, and accuracies mean nothing
    same = options.reference in (None, run.init)
    if options.name == "reward":
        return PairwiseRewardLoss(options.center_rewards_coefficient, options.margin or 0.0)
    if options.loss_type == "simpo" or options.loss_type == "orpo":
        margin = SIMPO_MARGIN if options.margin is None else options.margin
        return ReferenceFreePreference(
            options.loss_type, options.beta, margin, options.label_smoothing
        )
    if options.loss_type == "kto":
        weights = options.desirable_weight, options.undesirable_weight
        return KTO(options.beta, *weights, from_reference=same)
    if options.name == "dpo":
        return DPO(
            options.beta, options.loss_type, options.label_smoothing, options.rpo_alpha, same
        )
    if options.name == "grpo":
        rollout = run.rollout
        return GRPOLoss(
            rollout.loss_type,
            rollout.importance_sampling_level,
            rollout.clip_low,
            rollout.clip_high,
            rollout.beta,
            rollout.temperature,
            rollout.max_new_tokens,
            rollout.entropy_coef,
        )
    if options.name == "ppo":
        rollout = run.rollout
        return PPOPolicyLoss(
            rollout.clip_low,
            rollout.clip_high,
            run.ppo.dual_clip,
            rollout.temperature,
            rollout.entropy_coef,
        )
    if not run.spec.both_ways:
        return CrossEntropy()
    # masked tokens of a sequence: the weight that makes both of BERT's losses means of their own
    masked = max(1.0, run.data.masked_fraction * run.sequence_length)
    return MaskedLM(masked if run.spec.head.follows else 0.0)


def make_evaluation_generator(run: RunConfig, mesh: Mesh) -> GenerationModel | None:
    """Return a second model for generation during evaluation, with training's tp and pp but one
    stage per rank and no cp, whose memory is not allocated yet; None if training's own layout can
    generate.
    """
    layout = run.layout
    if layout.virtual_stages == 1 and layout.cp == 1:
        return None
    training = replace(run.training, dropout=0.0, fp8=None)
    dtype = DTYPES[run.train.dtype]
    # released: between evaluations the memory belongs to training
    return GenerationModel(run.spec, training, mesh, layout.tp, dtype, layout.pp, released=True)
