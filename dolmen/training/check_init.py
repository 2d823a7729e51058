"""What is refused of a run that begins with a model, of the weights, moments and tokenizer that are
there, before any process starts and before anything is written.
"""

from dataclasses import replace

from dolmen.conversion.moments import check_whole
from dolmen.conversion.sidecars import pad_vocabulary
from dolmen.conversion.source import Source, open_source, tokenizer_folder
from dolmen.core.messages import counted
from dolmen.families import compared, scored, unscored
from dolmen.families.family import knob
from dolmen.model.tree import Scalar
from dolmen.training.config import RunConfig
from dolmen.vocabulary import extend


def check_init(run: RunConfig, init: str) -> None:
    """Raises ValueError or KeyError where the weights of `init` are not those of the run's model,
    or are more than it trains.
    """
    source = initial(run, init)
    try:
        stored = source.specs
    except (ValueError, KeyError):
        stated = open_source(init)
        check_whole(stated)  # those of its own model, or it is refused
        changes = ", ".join(
            f"{knob(name)} {new} ({old})" for name, old, new in compared(stated.model, source.model)
        )
        raise ValueError(
            f"{init} holds weights of another model than the run's {changes}: leave out what "
            "changes its shape, or train without --init"
        ) from None
    lost = stored.keys() - run.train.training.applied(run.tree).leaves.keys()
    if source.tree.head != run.tree.head:  # one number is learned in the place of logits
        lost -= source.tree.head.leaves(source.tree.vocab_size, source.tree.width).keys()
    if lost:
        raise ValueError(
            f"--init {init} has {counted(len(lost), 'bias', 'biases')} of routers, e.g. "
            f"{min(lost)}, that without train.router.balance bias the run would lose: use "
            "--train.router.balance bias"
        )


def with_new_rows(run: RunConfig) -> RunConfig:
    """The run that says which rows are new. Raises ValueError where nobody has said so, and for
    what cannot wait for them.
    """
    asked, share = run.train.new_rows, f"train.new-rows.share ({run.train.new_rows.share:g})"
    if run.init is None:
        raise ValueError(f"{share}: without a model to start from every row is new: give --init")
    if run.optimizer.name != "adamw" or run.optimizer.from_init or run.training.adapter:
        raise ValueError(
            f"{share} is AdamW's, which begins when all learns: leave out --optimizer.name "
            f"{run.optimizer.name}, --optimizer.from-init and --adapter.rank, or the share"
        )
    first, rows = asked.first, run.tree.vocab_size
    if first is None:
        first = extend.first_new(open_source(run.init).where)
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
    return replace(run, train=replace(run.train, new_rows=replace(asked, first=first)))


def initial(run: RunConfig, init: str) -> Source:
    """The source of the weights that the run begins with: a reward model may begin with a model
    that has logits, of which it takes all else. Raises as `open_source`.
    """
    begun, model = open_source(init), run.known_model
    ends = isinstance(begun.tree.head, Scalar)
    return open_source(init, scored(model) if ends else unscored(model))


def with_padding(run: RunConfig) -> RunConfig:
    """The run of a reward model whose config.json says which token is padding, and behind which a
    program that looks for it so finds the end of a text; none, where the tokenizer has none that
    could not end one.
    """
    named = run.data.tokenizer or own_tokenizer(run.init)
    made = pad_vocabulary(run.known_model, named, "--data.tokenizer")
    return run if made is run.known_model else replace(run, model=made)


def check_moments(run: RunConfig) -> None:
    """Raises ValueError where the moments that the run is to begin with are not there, or not those
    of what it trains.
    """
    if run.init is None:
        raise ValueError("optimizer.from-init reads the moments beside --init: give --init")
    if run.training.adapter is not None:
        raise ValueError(
            f"adapter.rank ({run.adapter.rank}) freezes the weights that have moments: leave out "
            "--optimizer.from-init"
        )
    try:
        found = open_source(run.init, run.known_model).moments
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"optimizer.from-init: {error.args[0]}; leave it out to begin without moments"
        ) from None
    if found is None:
        raise ValueError(
            f"--init {run.init} has no moments of AdamW that dolmen reads: leave out "
            "--optimizer.from-init"
        )


def own_tokenizer(init: str | None) -> str | None:
    """The folder of the tokenizer that came with `init`. Raises as `open_source`."""
    return None if init is None else tokenizer_folder(open_source(init))


def check_adapter(run: RunConfig) -> None:
    """Raises ValueError for adapters that the model cannot have, and for what trains the weights
    that they leave frozen.
    """
    if run.training.adapter is None:
        return
    asked = f"adapter.rank ({run.adapter.rank}) freezes all weights but those of adapters"
    if run.init is None:
        raise ValueError(f"{asked}, and without a model to start from they are random: give --init")
    if run.adapter.frozen == "int8" and run.training.fp8 is not None:
        raise ValueError(
            "adapter.frozen int8 holds the weights in eight bits that train.precision would round "
            "in every product: leave out one of the two"
        )
    if run.optimizer.name == "muon":
        raise ValueError(
            f"{asked}, and optimizer.name muon is for the matrices that are frozen: use "
            "--optimizer.name adamw"
        )
    if run.train.router.balance == "bias":
        raise ValueError(
            f"{asked}, and train.router.balance bias moves the biases of routers: use "
            "--train.router.balance loss, or none"
        )
