"""Resolve a run: open the models, the tokenizer and the data that its options name, each once, and
fill in what the options leave to others.

    options -> RunConfig -> resolve -> ResolvedRun -> checks.run.validate -> open_data -> load_data
                                          |
                                          +-- ResolvedRun.config, as JSON, is what workers get: they
                                              resolve it again, which opens and changes nothing more

Every rule about these values is in `checks/`: what is here opens and fills in.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dolmen.checkpoint import folders
from dolmen.conversion.sidecars import pad_vocabulary
from dolmen.conversion.source import Source, open_source, tokenizer_folder
from dolmen.core.filesystem import is_absent
from dolmen.data import inputs
from dolmen.data import loader as data_loader
from dolmen.data.base_loader import Loader
from dolmen.data.config import DataConfig
from dolmen.data.inputs import Inputs
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.families import Model, with_lm_head, with_scalar_head
from dolmen.model.spec import ScalarHeadSpec
from dolmen.rl import prompts
from dolmen.rl.rewards import is_reward_model, parse_rewards
from dolmen.training.config import RunConfig
from dolmen.vocabulary import extend


@dataclass(frozen=True)
class ResolvedRun:
    """A run with the models that it reads, opened. Tensors are read later, from these sources."""

    config: RunConfig
    """The options with layout, head, padding token and new rows filled in: config.yaml."""
    init: Source | None = None
    """The initial model, as it is stored."""
    weights: Source | None = None
    """The same, its weights read as those of the run's model, with the head that it has."""
    critic: Source | None = None
    """The critic's initial model, as it is stored."""
    reference: Source | None = None
    """The model of --objective.reference."""
    rewards: Mapping[str, Source] = field(default_factory=dict)
    """The reward models, by the name that --reward has."""
    init_is_gone: bool = False
    """The initial model was deleted, and the newest checkpoint of this run is read in its place."""

    @property
    def tokenizer(self) -> str | None:
        """The folder of the tokenizer that came with the initial model."""
        return None if self.init is None else tokenizer_folder(self.init)

    @property
    def inherits_moments(self) -> bool:
        """True if the optimizer starts with the moments of the initial model."""
        return self.config.optimizer.from_init and not self.init_is_gone

    @property
    def start(self) -> Source | None:
        """The model that a KL compares with; None: the run's model with its initial values."""
        return self.reference or self.init


def open_model(name: str | Path, model: Model | None = None) -> Source:
    """Open a model of any format; its weights are read as those of `model`, where one is given.
    Raises as `open_source`.
    """
    return open_source(name, model)


def resolve(
    config: RunConfig,
    processes: int | None,
    checkpoint: Path | None = None,
    reads_init: bool = True,
) -> ResolvedRun:
    """Open what the run reads, for `processes` (None: as many as the layout says). `own`: the
    newest checkpoint of a run that resumes, read in place of initial models that were deleted.
    Without `reads_init`, as in a dry run, the model of --init is not opened. Raises ValueError,
    KeyError or OSError.
    """
    config = resolve_model(config, processes)

    def or_checkpoint(name: str | None) -> str | Path | None:
        return (
            checkpoint if checkpoint is not None and name is not None and is_absent(name) else name
        )

    init, critic = or_checkpoint(config.init), or_checkpoint(config.critic.init)
    rewards: dict[str, Source] = {}
    if config.objective.uses_rollouts:
        names = [name for _, name in parse_rewards(config.reward) if is_reward_model(name)]
        rewards = {name: open_model(name) for name in names}
    stored = open_model(init) if init is not None and (reads_init or rewards) else None
    reference = config.objective.reference
    ppo = config.objective.name == "ppo"
    resolved = ResolvedRun(
        config,
        stored,
        None if stored is None or init is None else reopen_as(stored, init, config.known_model),
        open_model(critic) if critic is not None and ppo else stored,
        None if reference is None else open_model(reference),
        rewards,
        init != config.init,
    )
    return fill_in(resolved) if reads_init else resolved


def resolve_model(config: RunConfig, processes: int | None) -> RunConfig:
    """Return the run with its layout and the sizes of a sequence and a microbatch, and with a
    scalar head where it trains a reward model. Raises ValueError without a model.
    """
    if config.model is None:
        raise ValueError(
            "there is no model: give --init a transformers directory or hub id, make one of "
            "--model.model-type and its fields, or choose a recipe that has one (dolmen recipes)"
        )
    model = with_scalar_head(config.model) if config.objective.name == "reward" else config.model
    config = replace(config, model=model, layout=config.layout.resolve(processes))
    train = replace(
        config.train,
        sequence_length=config.sequence_length,
        microbatch_size=config.microbatch_size,
    )
    return replace(config, train=train)


def reopen_as(stored: Source, name: str | Path, model: Model) -> Source:
    """Return the source `stored`, opened from `name`, with its weights read as those of the run's
    `model`. A reward model may start from a model with logits: all but its head is read.
    """
    wanted = (
        with_scalar_head(model)
        if isinstance(stored.tree.head, ScalarHeadSpec)
        else with_lm_head(model)
    )
    return stored if wanted == stored.model else open_model(name, wanted)


def fill_in(resolved: ResolvedRun) -> ResolvedRun:
    """Return the run with what its initial model says: the padding token of a reward model's
    tokenizer, behind which programs look for the end of a text, and which rows of the vocabulary
    are new.
    """
    config, rows = resolved.config, resolved.config.train.new_rows
    if config.objective.name == "reward":
        tokenizer = config.data.tokenizer or resolved.tokenizer
        config = replace(
            config, model=pad_vocabulary(config.known_model, tokenizer, "--data.tokenizer")
        )
    if rows.share and rows.first is None and resolved.init is not None:
        rows = replace(rows, first=extend.first_new(resolved.init.where))
        config = replace(config, train=replace(config.train, new_rows=rows))
    return replace(resolved, config=config)


def checkpoint_to_resume(out: Path, resumes: bool) -> Path | None:
    """Return the newest whole checkpoint in the folder of a run that `resumes`: it has the weights
    of model and critic, whatever other runs have deleted since.
    """
    whole = folders.list_checkpoints(out / "checkpoints") if resumes else {}
    return whole[max(whole)] if whole else None


@dataclass(frozen=True)
class Data:
    """The opened data of a run."""

    inputs: Inputs
    pretraining: Inputs | None = None
    """The text of the pretraining loss that PPO may add (PPO-ptx)."""


def open_data(resolved: ResolvedRun, progress: bool, verify: bool) -> Data:
    """Open tokenizer and data sources. Raises ValueError for what can be refused without reading
    all text. `verify`, once per host: try the tokenizer's expressions.
    """
    config = resolved.config
    opened = inputs.check_inputs(
        config.data,
        resolved.tokenizer,
        config.tree.vocab_size,
        config.sequence_length,
        progress=progress,
        verify=verify,
    )
    if not config.ppo.pretraining_coef:
        return Data(opened)
    try:
        data = pretraining_config(config, opened.tokenizer)
        text = inputs.check_inputs(
            data, None, config.tree.vocab_size, config.sequence_length, verify=False
        )
    except (ValueError, OSError) as error:
        raise ValueError(_rename_path_option(str(error))) from None
    return Data(opened, text)


def load_data(resolved: ResolvedRun, data: Data, progress: bool, verify: bool) -> Loader:
    """Return what the run reads, its text tokenized into the cache. Raises ValueError."""
    config = resolved.config
    if not config.objective.uses_rollouts:
        return load_text(config, config.data, data.inputs, progress, verify)
    loader = prompts.prepare(
        config.data,
        data.inputs,
        config.rollout,
        config.known_model,
        config.sequence_length,
        config.train.global_batch_size,
        config.train.seed,
        [name for _, name in parse_rewards(config.reward)],
    )
    if data.pretraining is None:
        return loader
    try:
        options = pretraining_config(config, data.inputs.tokenizer)
        return loader.beside(load_text(config, options, data.pretraining, progress, verify))
    except (ValueError, OSError) as error:
        raise ValueError(_rename_path_option(str(error))) from None


def load_text(
    config: RunConfig, data: DataConfig, opened: Inputs, progress: bool, verify: bool
) -> Loader:
    """Return batches of text, chats or pairs for the run's model."""
    return data_loader.load(
        data,
        opened,
        config.sequence_length,
        config.train.global_batch_size,
        config.train.seed,
        progress=progress,
        verify=verify,
        steps=config.steps,
        model=config.tree,
    )


def pretraining_config(config: RunConfig, tokenizer: PreTrainedTokenizer) -> DataConfig:
    """Return the options of the pretraining text: those of the prompts that any text has, with
    their tokenizer; nothing is held out.
    """
    default = DataConfig()
    return replace(
        config.data,
        path=config.ppo.pretraining_path,
        tokenizer=tokenizer.name_or_path,
        validation=None,
        validation_fraction=0.0,
        rows="text",
        template=default.template,
        masking_strategy=default.masking_strategy,
        packing=default.packing,
    )


def run_steps(config: RunConfig, loader: Loader) -> int:
    """Return the steps after which the run ends: as requested in steps, tokens or epochs, else one
    epoch, and 20 at least. Batches before the loader's step may have been of another size: what
    they have read counts as what it was.
    """
    if config.train.steps is not None:
        return config.train.steps
    if config.train.tokens is not None:
        samples = math.ceil(config.train.tokens / config.sequence_length) - loader.first(0)
        return max(1, math.ceil(samples / loader.global_batch_size))
    if config.train.epochs is not None:
        return epoch_steps(loader, config.train.epochs)
    return max(20, epoch_steps(loader))


def epoch_steps(loader: Loader, epochs: float = 1.0) -> int:
    """Return the step after which the training data have been read so often, by the source that
    lasts longest.
    """
    step = 1000
    samples = loader.first(step) - loader.first(0)
    per_step = max(min(loader.mixture.epochs(samples).values()) / step, 1e-12)
    return max(1, round(epochs / per_step - loader.first(0) / loader.global_batch_size))


def fill_in_length(config: RunConfig, loader: Loader) -> RunConfig:
    """Return the run with a length where none was requested: one epoch, so that other data or
    another batch size is read once too, or the 20 steps of less data.
    """
    train = config.train
    if train.steps is not None or train.tokens is not None or train.epochs is not None:
        return config
    steps = run_steps(config, loader)
    one_epoch = steps == epoch_steps(loader)
    length = {"epochs": 1.0} if one_epoch else {"steps": steps}
    return replace(config, train=replace(train, **length))


def _rename_path_option(reason: str) -> str:
    """Return an error about --data.path as one about the option that has the pretraining text."""
    checkpoint, other = "--ppo.pretraining-path", "--data.path"
    return reason.replace(other, checkpoint) if other in reason else f"{checkpoint}: {reason}"
