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
    """Raise ValueError or KeyError if the weights of --init do not fit the run's model: other
    shapes, biases of routers that the run would drop, or invalid fp8 scales. Nothing is checked
    without an initial model.
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
            f"{init} has weights of another shape than the run's {changes}: leave out the options "
            "that change the shape, or train without --init"
        ) from None
    # stored router biases are part of the model: without them tokens go to other experts
    lost = stored.keys() - run.train.training.apply_to(run.spec).params.keys()
    if source.spec.head != run.spec.head:  # one number is learned in the place of logits
        lost -= source.spec.head.params(source.spec.vocab_size, source.spec.width).keys()
    if lost:
        raise ValueError(
            f"--init {init} has {plural(len(lost), 'bias', 'biases')} of routers, e.g. "
            f"{min(lost)}, which the run would drop: use --train.router.balance bias"
        )
    if run.training.fp8 is not None and run.training.fp8.delayed:
        _ = source.scaling  # raises ValueError for scales that are none


def check_new_rows(resolved: ResolvedRun) -> None:
    """Raise ValueError if --train.new-rows.share asks for a phase in which only rows of new tokens
    are trained, and the first new row is unknown or out of range, there is no initial model, or
    the optimizer or adapters do not support it.
    """
    run = resolved.config
    if not run.train.new_rows.share:
        return
    new, share = run.train.new_rows, f"train.new-rows.share ({run.train.new_rows.share:g})"
    if run.init is None:
        raise ValueError(
            f"{share} needs an initial model, without which every row is new: give --init"
        )
    if run.optimizer.name != "adamw" or run.optimizer.from_init or run.training.adapter:
        raise ValueError(
            f"{share} needs AdamW without initial state, on all weights: leave out "
            f"--optimizer.name {run.optimizer.name}, --optimizer.from-init and --adapter.rank, or "
            "the share"
        )
    first, rows = new.first, run.spec.vocab_size
    if first is None:
        raise ValueError(
            f"{share}: {run.init} was not written by dolmen vocab extend, which records the new "
            "tokens: give --train.new-rows.first ID"
        )
    if first >= rows:
        raise ValueError(
            f"train.new-rows.first ({first:,}) exceeds the model's {rows:,} rows: set it to the "
            "id of the first new token"
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
        raise ValueError("optimizer.from-init reads the AdamW moments of --init: give --init")
    if run.training.adapter is not None:
        raise ValueError(
            f"adapter.rank ({run.adapter.rank}) freezes the weights that have moments: leave out "
            "--optimizer.from-init"
        )
    try:
        moments = resolved.weights.moments
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"optimizer.from-init: {error.args[0]}; leave it out to start without moments"
        ) from None
    if moments is None:
        raise ValueError(
            f"--init {run.init} has no readable AdamW moments: leave out --optimizer.from-init"
        )
    if resolved.weights.spec.head != run.spec.head:
        raise ValueError(
            f"--init {run.init} has moments of another head than the run's model: leave out "
            "--optimizer.from-init"
        )


def check_adapter(run: RunConfig) -> None:
    """Raise ValueError if the run trains adapters (--adapter.rank) without an initial model, or
    with an option that trains or rounds the frozen weights (fp8 with int8 storage, Muon, router
    bias).
    """
    if run.training.adapter is None:
        return
    prefix = f"adapter.rank ({run.adapter.rank}) freezes all weights but those of adapters"
    if run.init is None:
        raise ValueError(f"{prefix}, which without an initial model are random: give --init")
    if run.adapter.frozen == "int8" and run.training.fp8 is not None:
        raise ValueError(
            "adapter.frozen int8 and train.precision exclude each other: both quantise the frozen "
            "weights; leave out one of the two"
        )
    if run.optimizer.name == "muon":
        raise ValueError(
            f"{prefix}, but optimizer.name muon is for exactly these matrices: use "
            "--optimizer.name adamw"
        )
    if run.train.router.balance == "bias":
        raise ValueError(
            f"{prefix}, but train.router.balance bias adjusts router biases: use "
            "--train.router.balance loss, or none"
        )
