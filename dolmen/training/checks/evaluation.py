"""Rules on what is done with the model while it trains and when training ends: tasks, samples,
export.
"""

from collections.abc import Sequence

from dolmen.conversion import hf_export
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.evaluation import tasks
from dolmen.evaluation.config import DuringConfig
from dolmen.model.spec import Head, Scalar, Tree
from dolmen.serving.generation import encode
from dolmen.training.config import RunConfig
from dolmen.training.judged import read_prompts


def check_finish(config: RunConfig) -> None:
    """Raises ValueError for what cannot be done with the model at the end, or while it trains."""
    model, finish, tree = config.known_model, config.finish, config.tree
    if finish.export:
        check_exportable(config)
    if (finish.verify or finish.sample is not None) and not finish.export:
        raise ValueError(
            "finish.verify and finish.sample read the exported model: set --finish.export too"
        )
    if tree.both_ways and (finish.sample is not None or finish.compressors):
        option = "compressors" if finish.sample is None else "sample"
        raise ValueError(
            f"finish.{option} is for models that predict the next token, and {model.model_type} "
            "fills in masked ones: leave it out"
        )
    if config.evaluate.asked and (tree.both_ways or not isinstance(tree.head, Head)):
        raise ValueError(
            f"evaluate.tasks and samples are for models that predict the next token, and "
            f"{model.model_type} does not: leave them out"
        )
    if isinstance(tree.head, Scalar) and (finish.verify or finish.sample is not None):
        raise ValueError(
            "finish.verify and finish.sample are of models that predict tokens, and a reward "
            "model ends in one number: leave them out"
        )


def check_exportable(config: RunConfig) -> None:
    """Raises ValueError where a config.json cannot say what is trained."""
    hf_export.check_expressible(config.known_model, config.train.training.applied(config.tree))


def check_evaluation(config: RunConfig, tokenizer: PreTrainedTokenizer) -> None:
    """Raises ValueError, before the run begins, for prompts that the model cannot take, and tasks
    that are not known.
    """
    options, model = config.evaluate, config.known_model
    if options.tasks is not None:
        tasks.check(options)
    if options.samples is None:
        return
    for number, prompt in enumerate(read_prompts(options.samples), 1):
        check_prompt(model.tree, options, number, encode(tokenizer, prompt, model))


def check_prompt(tree: Tree, options: DuringConfig, number: int, tokens: Sequence[int]) -> None:
    """Raises ValueError where a prompt and its new tokens are more than the model reads."""
    most = tree.max_position_embeddings
    if len(tokens) + options.max_new_tokens > most:
        raise ValueError(
            f"--evaluate.samples {options.samples}: prompt {number} has {len(tokens):,} tokens, "
            f"with {options.max_new_tokens} new ones more than the model's "
            f"max_position_embeddings ({most}): shorten it, or set a smaller "
            "--evaluate.max-new-tokens"
        )
