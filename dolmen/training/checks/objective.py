"""Rules on the loss: it, the rows of the data, the model's head and the reference model belong
together.
"""

from dolmen.model.spec import Scalar
from dolmen.training.config import RunConfig
from dolmen.training.resolve import ResolvedRun


def check_objective(resolved: ResolvedRun) -> None:
    """Raises ValueError where the objective, the data and the model do not belong together."""
    config = resolved.config
    objective, rows = config.objective, config.data.rows
    wanted = objective.rows or (rows if rows in ("text", "chats") else "chats")
    if rows != wanted:
        kind = f" of type {objective.loss_type}" if objective.name == "dpo" else ""
        raise ValueError(
            f"objective.name {objective.name}{kind} and data.rows {rows} do not belong together: "
            f"use --data.rows {wanted}, or another objective"
        )
    if objective.name != "reward" and isinstance(config.tree.head, Scalar):
        raise ValueError(
            f"objective.name {objective.name} is of tokens, and the model ends in one number, as a "
            "reward model does: use --objective.name reward, or start from another --init"
        )
    check_reference(resolved)
    if rows in ("pairs", "completions"):
        check_pairs(config)


def check_pairs(config: RunConfig) -> None:
    """Raises ValueError for batches that would cut a pair of completions, and for a preference loss
    on a random model.
    """
    batch = config.train.global_batch_size // (config.layout.dp or 1)
    if batch % 2 or config.microbatch_size % 2:
        raise ValueError(
            f"a pair takes two sequences, and a process has {batch} of them "
            f"({config.microbatch_size} at once): use an even --train.global-batch-size per "
            "process, and an even --train.microbatch-size"
        )
    if config.objective.name == "dpo" and config.init is None:
        raise ValueError(
            "objective.name dpo is learned from completions, and a random model writes none: give "
            "--init"
        )


def check_reference(resolved: ResolvedRun) -> None:
    """Raises ValueError for a reference model with another vocabulary."""
    if resolved.reference is None:
        return
    own, other = resolved.config.tree.vocab_size, resolved.reference.tree.vocab_size
    if other != own:
        raise ValueError(
            f"objective.reference {resolved.config.objective.reference} has a vocab_size of "
            f"{other:,}, the model {own:,}: give a reference of the same tokens"
        )
