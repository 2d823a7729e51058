"""Rules on the model that a run starts from: its weights, moments and new rows of the vocabulary;
and on adapters.
"""

from dolmen.conversion.weights import check_whole
from dolmen.core.messages import plural
from dolmen.families import compare_fields
from dolmen.families.family import flag
from dolmen.training.config import RunConfig
from dolmen.training.resolve import ResolvedRun


def check_init(resolved: ResolvedRun) -> None:
    """Raise ValueError or KeyError where the initial weights do not fit the run's model: other
    shapes, parameters that the run would drop (biases of routers), or invalid fp8 scales.
    """
    run, init = resolved.config, resolved.config.init
    source, stated = resolved.weights, resolved.init
    if source is None or stated is None:
        return
    try:
        stored = source.specs
    except (ValueError, KeyError):
        check_whole(stated)  # those of its own model, or it is refused
        # the message names the options of --model that differ, as the user can change those
        changes = ", ".join(
            f"{flag(name)} {new} ({old})"
            for name, old, new in compare_fields(stated.model, source.model)
        )
        raise ValueError(
            f"{init} holds weights of another model than the run's {changes}: leave out what "
            "changes its shape, or train without --init"
        ) from None
    # stored router biases are part of the model: without them tokens go to other experts
    lost = stored.keys() - run.train.training.apply_to(run.spec).leaves.keys()
    if source.spec.head != run.spec.head:  # one number is learned in the place of logits
        lost -= source.spec.head.leaves(source.spec.vocab_size, source.spec.width).keys()
    if lost:
        raise ValueError(
            f"--init {init} has {plural(len(lost), 'bias', 'biases')} of routers, e.g. "
            f"{min(lost)}, that without train.router.balance bias the run would lose: use "
            "--train.router.balance bias"
        )
    if run.training.fp8 is not None and run.training.fp8.delayed:
        _ = source.scaling  # raises ValueError for scales that are none


def check_new_rows(resolved: ResolvedRun) -> None:
    """Raise ValueError where the frozen phase of new vocabulary rows is requested and the first new
    row is unknown or out of range, there is no initial model, or optimizer or adapters do not
    support it.
    """
    run = resolved.config
    if not run.train.new_rows.share:
        return
    new, share = run.train.new_rows, f"train.new-rows.share ({run.train.new_rows.share:g})"
    if run.init is None:
        raise ValueError(f"{share}: without a model to start from every row is new: give --init")
    if run.optimizer.name != "adamw" or run.optimizer.from_init or run.training.adapter:
        raise ValueError(
            f"{share} is AdamW's, which begins when all learns: leave out --optimizer.name "
            f"{run.optimizer.name}, --optimizer.from-init and --adapter.rank, or the share"
        )
    first, rows = new.first, run.spec.vocab_size
    if first is None:
        raise ValueError(
            f"{share}: {run.init} does not say which tokens are new, as what dolmen vocab extend "
            "writes does: give --train.new-rows.first ID"
        )
    if first >= rows:
        raise ValueError(
            f"train.new-rows.first ({first:,}) is over the last of the model's {rows:,} rows: set "
            "the id of the first token that is new"
        )


def check_moments(resolved: ResolvedRun) -> None:
    """Raise ValueError where --optimizer.from-init is set and its moments cannot be used: no
    --init, adapters (the moments are of frozen weights), no AdamW moments in the model or
    unreadable ones, or moments of another head.
    """
    run = resolved.config
    if not resolved.inherits_moments:
        return
    if resolved.weights is None:
        raise ValueError("optimizer.from-init reads the moments beside --init: give --init")
    if run.training.adapter is not None:
        raise ValueError(
            f"adapter.rank ({run.adapter.rank}) freezes the weights that have moments: leave out "
            "--optimizer.from-init"
        )
    try:
        moments = resolved.weights.moments
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"optimizer.from-init: {error.args[0]}; leave it out to begin without moments"
        ) from None
    if moments is None:
        raise ValueError(
            f"--init {run.init} has no moments of AdamW that dolmen reads: leave out "
            "--optimizer.from-init"
        )
    if resolved.weights.spec.head != run.spec.head:
        raise ValueError(
            f"--init {run.init} has moments of another head than the run's model: leave out "
            "--optimizer.from-init"
        )


def check_adapter(run: RunConfig) -> None:
    """Raise ValueError where adapters have no initial model, or are combined with an option that
    trains or rounds the frozen weights (fp8 with int8 storage, Muon, router bias).
    """
    if run.training.adapter is None:
        return
    prefix = f"adapter.rank ({run.adapter.rank}) freezes all weights but those of adapters"
    if run.init is None:
        raise ValueError(
            f"{prefix}, and without a model to start from they are random: give --init"
        )
    if run.adapter.frozen == "int8" and run.training.fp8 is not None:
        raise ValueError(
            "adapter.frozen int8 holds the weights in eight bits that train.precision would round "
            "in every product: leave out one of the two"
        )
    if run.optimizer.name == "muon":
        raise ValueError(
            f"{prefix}, and optimizer.name muon is for the matrices that are frozen: use "
            "--optimizer.name adamw"
        )
    if run.train.router.balance == "bias":
        raise ValueError(
            f"{prefix}, and train.router.balance bias moves the biases of routers: use "
            "--train.router.balance loss, or none"
        )
