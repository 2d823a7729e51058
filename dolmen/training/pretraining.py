"""Plain text that a policy learns beside what it has drawn, so that it does not forget how to write
(2203.02155, section 3.5: PPO-ptx; DeepSpeed-Chat's unsupervised coefficient). In each update

    gradient = that of the policy's loss + coefficient x that of the text's cross-entropy

each a mean over its own tokens of the global batch. Which text an update reads follows from its
number alone, as in pretraining.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from dolmen.core.mesh import Mesh
from dolmen.data import inputs
from dolmen.data.batch import Batch
from dolmen.data.batches import Loader
from dolmen.data.config import DataConfig
from dolmen.data.loader import prepare_loader
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.objectives.objective import CrossEntropy, Objective
from dolmen.rl.prompts import PromptLoader
from dolmen.training.config import RunConfig

LOSS = "pretraining_loss"  # the metric's name, among those of an objective


@dataclass(frozen=True)
class Text:
    """What is learned of it."""

    coefficient: float
    batch: Callable[[int], Batch]
    """Of a step, this rank's rows, as many as of what is drawn."""
    objective: Objective = CrossEntropy()


def of(run: RunConfig, loader: Loader, mesh: Mesh) -> Text | None:
    """What `run` learns beside what it draws; None where it is nothing."""
    if not isinstance(loader, PromptLoader) or loader.text is None:
        return None
    text = loader.text

    def batch(step: int) -> Batch:
        return text.batch(step, mesh.dp.rank, mesh.dp.size).read_by(run.tree)

    return Text(run.ppo.pretraining_coef, batch)


def prepare(run: RunConfig, tokenizer: PreTrainedTokenizer, progress: bool, verify: bool) -> Loader:
    """What is read, in the prompts' tokens. Raises ValueError, with the option."""
    try:
        return prepare_loader(
            _data(run, tokenizer),
            None,
            run.tree.vocab_size,
            run.sequence_length,
            run.train.global_batch_size,
            run.train.seed,
            progress=progress,
            verify=verify,
            steps=run.steps,
            model=run.tree,
        )
    except (ValueError, OSError) as error:
        raise ValueError(_named(str(error))) from None


def check(run: RunConfig, tokenizer: PreTrainedTokenizer) -> None:
    """Raises ValueError for text that `prepare` would refuse before it reads all."""
    try:
        inputs.check_inputs(
            _data(run, tokenizer), None, run.tree.vocab_size, run.sequence_length, verify=False
        )
    except (ValueError, OSError) as error:
        raise ValueError(_named(str(error))) from None


def _named(said: str) -> str:
    """What was said of --data.path, of this option."""
    own, other = "--ppo.pretraining-path", "--data.path"
    return said.replace(other, own) if other in said else f"{own}: {said}"


def _data(run: RunConfig, tokenizer: PreTrainedTokenizer) -> DataConfig:
    """The options of the prompts, where they are of any text; nothing is held out."""
    said, none = run.data, DataConfig()
    return replace(
        said,
        path=run.ppo.pretraining_path,
        tokenizer=tokenizer.name_or_path,
        validation=None,
        validation_fraction=0.0,
        rows="text",
        template=none.template,
        masking_strategy=none.masking_strategy,
        packing=none.packing,
    )
