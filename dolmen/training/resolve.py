"""Resolve a run: open the models, the tokenizer and the data that its options name, each once, and
fill in what the options leave to others.

    options -> RunConfig -> resolve -> ResolvedRun -> checks.run.validate -> open_data -> load_data
                                          |
                                          +-- workers get the options and resolve them again, for
                                              the same number of processes

Every rule about these values is in `checks/`: what is here opens and fills in.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dolmen.checkpoint import folders
from dolmen.conversion.sidecars import pad_vocabulary
from dolmen.conversion.source import ModelSource, open_source, tokenizer_folder
from dolmen.core.filesystem import is_absent
from dolmen.data import inputs
from dolmen.data import loader as data_loader
from dolmen.data.base_loader import Loader
from dolmen.data.config import DataConfig
from dolmen.data.inputs import Inputs
from dolmen.data.sources import DataSource
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.families import ModelConfig, with_lm_head, with_scalar_head
from dolmen.model.spec import ScalarHeadSpec
from dolmen.rl import prompts
from dolmen.rl.rewards import is_reward_model, parse_rewards
from dolmen.training.config import RunConfig
from dolmen.vocabulary import extend


@dataclass(frozen=True)
class ResolvedRun:
    """A run with the models that it reads, opened. Tensors are read later, from these sources."""

    config: RunConfig
    """The options with layout, microbatch size, head, padding token and new rows filled in."""
    requested: RunConfig
    """The options as they were requested."""
    init: ModelSource | None = None
    """The initial model, as it is stored."""
    weights: ModelSource | None = None
    """The same, its weights read as those of the run's model, with the head that it has."""
    critic: ModelSource | None = None
    """The critic's initial model, as it is stored."""
    reference: ModelSource | None = None
    """The model of --objective.reference."""
    rewards: Mapping[str, ModelSource] = field(default_factory=dict)
    """The reward models, by the name that --reward has."""
    draft: ModelSource | None = None
    """The draft model of --rollout.speculative."""
    init_is_gone: bool = False
    """The initial model was deleted, and the newest checkpoint of this run is read in its place."""

    @property
    def reusable(self) -> RunConfig:
        """The options that config.yaml stores: resolved, but with dp and the microbatch size as
        they were requested, so that, if these were unset, a resume chooses them by its own number
        of processes.
        """
        layout = replace(self.config.layout, dp=self.requested.layout.dp)
        train = replace(self.config.train, microbatch_size=self.requested.train.microbatch_size)
        return replace(self.config, layout=layout, train=train)

    @property
    def tokenizer(self) -> str | None:
        """Folder or name of the tokenizer that came with the initial model; None without an initial
        model.
        """
        return None if self.init is None else tokenizer_folder(self.init)

    @property
    def inherits_moments(self) -> bool:
        """True if the optimizer starts with the AdamW moments of the initial model, which must
        still exist.
        """
        return self.config.optimizer.from_init and not self.init_is_gone

    @property
    def start(self) -> ModelSource | None:
        """The reference model of KL and DPO: --objective.reference, else the initial model; None:
        the run's model with its random initial values.
        """
        return self.reference or self.init


def resolve(
    config: RunConfig,
    processes: int | None,
    checkpoint: Path | None = None,
    reads_init: bool = True,
    opened: ModelSource | None = None,
) -> ResolvedRun:
    """Open every model that the run names and fill in the options that depend on them. Raises
    ValueError, KeyError or OSError.

    processes:  those of the run; None: as many as the layout has
    checkpoint: the newest one of a run that resumes, read in place of a deleted initial model
    reads_init: False in a dry run: the model of --init is opened only if there are reward models,
                and nothing is filled in from it
    opened:     the model of --init, where it is open already
    """
    requested, config = config, resolve_model(config, processes)

    def or_checkpoint(name: str | None) -> str | Path | None:
        """Return the run's newest checkpoint, if there is one, in place of the initial model `name`
        if its folder no longer exists; else `name`.
        """
        return (
            checkpoint if checkpoint is not None and name is not None and is_absent(name) else name
        )

    # weights come from the checkpoint on resume; an initial model only has to say what the model is
    init, critic = or_checkpoint(config.init), or_checkpoint(config.critic.init)
    rewards: list[str] = []
    draft, reference = None, config.objective.reference
    if config.objective.uses_rollouts:
        draft = config.rollout.speculative.model
        rewards = [name for _, name in parse_rewards(config.reward) if is_reward_model(name)]
    names = [
        init if reads_init or rewards else None,
        critic if config.objective.name == "ppo" else None,
        reference,
        draft,
        *rewards,
    ]
    sources: dict[str | Path | None, ModelSource] = {} if opened is None else {config.init: opened}
    # models that have several roles are opened once
    for name in names:
        if name is not None and name not in sources:
            sources[name] = open_source(name)
    stored = sources.get(init)
    resolved = ResolvedRun(
        config,
        requested,
        stored,
        None if stored is None else with_stored_head(stored, config.known_model),
        # a critic without an initial model of its own starts from the policy's body
        sources.get(critic, stored),
        sources.get(reference),
        {name: sources[name] for name in rewards},
        sources.get(draft),
        init != config.init,
    )
    return fill_in(resolved) if reads_init else resolved


def resolve_model(config: RunConfig, processes: int | None) -> RunConfig:
    """Return the run with layout, sequence length and microbatch size filled in, and with a scalar
    head where it trains a reward model. Raises ValueError without a model.
    """
    if config.model is None:
        raise ValueError(
            "no model: give --init (a transformers directory or hub id), define one with "
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


def with_stored_head(stored: ModelSource, model: ModelConfig) -> ModelSource:
    """Return the initial model with its weights read as those of the run's `model`, but with the
    head (LM or scalar) that it is stored with, so that a reward model may start from a language
    model. That is `stored` itself if the configs are the same.
    """
    requested = (
        with_scalar_head(model)
        if isinstance(stored.spec.head, ScalarHeadSpec)
        else with_lm_head(model)
    )
    return stored if requested == stored.model else stored.read_as(requested)


def fill_in(resolved: ResolvedRun) -> ResolvedRun:
    """Return the run with the options filled in that its initial model determines: for a reward
    model the padding token, of its tokenizer, by which inference programs find the end of a
    sequence; and the first new row of the vocabulary, if such rows are to be trained first.
    """
    config, rows = resolved.config, resolved.config.train.new_rows
    if config.objective.name == "reward":
        tokenizer = config.data.tokenizer or resolved.tokenizer
        config = replace(
            config, model=pad_vocabulary(config.known_model, tokenizer, "--data.tokenizer")
        )
    if rows.share and rows.first is None and resolved.init is not None:
        rows = replace(rows, first=extend.first_new_id(resolved.init.where))
        config = replace(config, train=replace(config.train, new_rows=rows))
    return replace(resolved, config=config)


def checkpoint_to_resume(out: Path, resumes: bool) -> Path | None:
    """Return the folder of the newest complete checkpoint in the run's folder `out`; None if there
    is none, or the run does not resume.
    """
    full = folders.list_checkpoints(out / "checkpoints") if resumes else {}
    return full[max(full)] if full else None


@dataclass(frozen=True)
class Data:
    """The tokenizer and the data sources of a run, opened but not tokenized."""

    inputs: Inputs
    pretraining: Inputs | None = None
    """The text of the pretraining loss that PPO may add (PPO-ptx)."""

    @property
    def sources(self) -> list[DataSource]:
        """All data sources of the run: of training, validation and PPO's pretraining text."""
        opened = [self.inputs, *([self.pretraining] if self.pretraining else [])]
        return [source for inputs in opened for source in inputs.every_source]


def open_data(resolved: ResolvedRun, progress: bool, verify: bool) -> Data:
    """Open the run's tokenizer and data sources, and those of PPO's pretraining loss if it has one;
    no text is tokenized. `progress`: show progress, such as of training a tokenizer; `verify`: also
    try the tokenizer's regular expressions, once per host. Raises ValueError for errors that can be
    seen without reading all text.
    """
    config = resolved.config
    opened = inputs.check_inputs(
        config.data,
        resolved.tokenizer,
        config.spec.vocab_size,
        config.sequence_length,
        progress=progress,
        verify=verify,
    )
    if not config.ppo.pretraining_coef:
        return Data(opened)
    try:
        data = pretraining_config(config, opened.tokenizer)
        text = inputs.check_inputs(
            data, None, config.spec.vocab_size, config.sequence_length, verify=False
        )
    except (ValueError, OSError) as error:
        raise ValueError(_rename_path_option(str(error))) from None
    return Data(opened, text)


def load_data(resolved: ResolvedRun, data: Data, progress: bool, verify: bool) -> Loader:
    """Return the loader of the run: of text, chats or pairs, or of prompts, with the pretraining
    text if PPO mixes it in. Text is tokenized into the cache, with a progress bar if `progress`;
    `verify` compares the cache with its digests. Raises ValueError.
    """
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
        return loader.add_pretraining(
            load_text(config, options, data.pretraining, progress, verify)
        )
    except (ValueError, OSError) as error:
        raise ValueError(_rename_path_option(str(error))) from None


def load_text(
    config: RunConfig, data: DataConfig, opened: Inputs, progress: bool, verify: bool
) -> Loader:
    """Return a loader of the text, chats or pairs in the opened sources for the run's model,
    tokenized into the cache. `data`: options of these data; `progress`: show bars; `verify`:
    compare the cache with its digests. Raises ValueError.
    """
    return data_loader.load(
        data,
        opened,
        config.sequence_length,
        config.train.global_batch_size,
        config.train.seed,
        progress=progress,
        verify=verify,
        steps=config.steps,
        model=config.spec,
    )


def pretraining_config(config: RunConfig, tokenizer: PreTrainedTokenizer) -> DataConfig:
    """Return the data options of the pretraining text (PPO-ptx): --ppo.pretraining-path with the
    tokenizer of the prompts, plain text, no validation split.
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
    """Return the step after which the run ends: --train.steps, or those of --train.tokens or
    --train.epochs, else of one epoch, at least 20. Samples that were read before the loader's step,
    perhaps with another batch size, count as read.
    """
    if config.train.steps is not None:
        return config.train.steps
    if config.train.tokens is not None:
        # first(0) is the sample that step 0 would have begun at with the current batch size
        samples = math.ceil(config.train.tokens / config.sequence_length) - loader.first(0)
        return max(1, math.ceil(samples / loader.global_batch_size))
    if config.train.epochs is not None:
        return epoch_steps(loader, config.train.epochs)
    return max(20, epoch_steps(loader))


def epoch_steps(loader: Loader, epochs: float = 1.0) -> int:
    """Return the number of steps, rounded, after which the run has read every data source at least
    `epochs` times.
    """
    step = 1000
    # epochs per step, measured over 1,000 steps, as sources of a mixture are read at different
    # rates
    samples = loader.first(step) - loader.first(0)
    per_step = max(min(loader.mixture.epochs(samples).values()) / step, 1e-12)
    return max(1, round(epochs / per_step - loader.first(0) / loader.global_batch_size))


def fill_in_length(config: RunConfig, loader: Loader) -> RunConfig:
    """Return the run with its length filled in where none was requested: epochs = 1, so that a
    resume with more data or another batch size still reads one epoch; or steps = 20 where one epoch
    has fewer.
    """
    train = config.train
    if train.steps is not None or train.tokens is not None or train.epochs is not None:
        return config
    steps = run_steps(config, loader)
    # epochs and not steps: a resume with another batch size reads as much
    one_epoch = steps == epoch_steps(loader)
    length = {"epochs": 1.0} if one_epoch else {"steps": steps}
    return replace(config, train=replace(train, **length))


def _rename_path_option(reason: str) -> str:
    """Return an error message about --data.path, with the name of the option of the pretraining
    text in its place, or before a message that does not name it.
    """
    checkpoint, other = "--ppo.pretraining-path", "--data.path"
    return reason.replace(other, checkpoint) if other in reason else f"{checkpoint}: {reason}"
