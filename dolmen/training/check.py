"""Rules across sections, on one screen: a run is refused here, with the numbers and the knob,
before any process starts and before anything is written.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from dolmen.checkpoint import folders
from dolmen.checkpoint import saved as saved_state
from dolmen.checkpoint.folders import Damaged
from dolmen.checkpoint.safe import Reader
from dolmen.checkpoint.store import Checkpoints
from dolmen.conversion import hf_export
from dolmen.conversion.source import open_source, tokenizer_folder
from dolmen.core.config import changed_options
from dolmen.core.mesh import SINGLE
from dolmen.core.paths import expand, is_absent
from dolmen.core.words import counted
from dolmen.data import inputs, sources
from dolmen.families import Model, compared
from dolmen.families.family import knob
from dolmen.model.training import Training
from dolmen.model.tree import Adapter, check_rounding, check_tokens
from dolmen.optim.config import OptimizerConfig
from dolmen.training import folder, lock, metrics
from dolmen.training.config import RunConfig


def check_run(run: RunConfig, processes: int | None, verify: bool = True) -> RunConfig:
    """The run with its layout resolved for `processes` (None: as many as the layout says). Raises
    ValueError or KeyError. Without `verify`, which is once per host, a tokenizer's expressions are
    not tried.
    """
    run = check_computed(run, processes)
    check_adapter(run)
    if run.init is not None:
        check_init(run, run.init)
    if run.optimizer.from_init:
        check_moments(run)
    own = own_tokenizer(run.init)
    inputs.check_inputs(run.data, own, run.tree.vocab_size, run.sequence_length, verify=verify)
    return run


def check_computed(run: RunConfig, processes: int | None) -> RunConfig:
    """The same of what a run computes, without what it reads."""
    model = run.model
    if model is None:
        raise ValueError(
            "there is no model: give --init a transformers directory or hub id, make one of "
            "--model.model-type and its fields, or choose a recipe that has one (dolmen recipes)"
        )
    if run.finish.export:
        check_exportable(run)
    if (run.finish.verify or run.finish.sample is not None) and not run.finish.export:
        raise ValueError(
            "finish.verify and finish.sample read the exported model: set --finish.export too"
        )
    run = replace(run, layout=run.layout.resolve(processes))
    tree = model.tree
    if tree.both_ways and (run.finish.sample is not None or run.finish.compressors):
        asked = "compressors" if run.finish.sample is None else "sample"
        raise ValueError(
            f"finish.{asked} is for models that foretell the next token, and {model.model_type} "
            "fills in masked ones: leave it out"
        )
    if tree.blanks is not None:
        tree.blanks.check()
    run.check_length()
    if run.train.steps is not None:
        check_profile(run, run.train.steps)
    check_objective(run)
    run.layout.check(tree, run.sequence_length, run.train.global_batch_size, run.microbatch_size)
    schedule = run.layout.make_schedule(run.train.global_batch_size, run.microbatch_size)
    if schedule.splits_backward:
        run.refuse_compiled()
    check_precision(run)
    if run.optimizer.muon.dtype == "bfloat16" and run.train.dtype == "float64":
        raise ValueError(
            "optimizer.muon.dtype bfloat16 keeps 8 bits of the 53 of train.dtype float64: use "
            "--optimizer.muon.dtype float32, which of float64 rounds nothing"
        )
    return run


def check_precision(run: RunConfig) -> None:
    """Raises ValueError, with the numbers, where products in eight bits cannot be as asked: nothing
    is left to round, the layout cuts what shares a scale, or a graph would hold their state.
    """
    recipe, layout = run.training.fp8, run.layout
    if recipe is None:
        return
    leaves = run.trained.leaves
    if all(leaf.fp8 is None for leaf in leaves.values()):
        raise ValueError(
            f"train.fp8.first-layers ({run.train.fp8.first_layers}) and train.fp8.last-layers "
            f"({run.train.fp8.last_layers}) leave none of the {run.tree.layers} layers: set fewer, "
            "or leave out --train.precision"
        )
    if run.train.compile:
        raise ValueError(
            f"train.compile and train.precision {recipe.precision} exclude each other: use "
            "--train.no-compile, or leave out --train.precision"
        )
    check_rounding(leaves, {"tp": layout.tp})
    length, here = run.sequence_length, run.microbatch_size * run.sequence_length // layout.cp
    tokens = {}
    if layout.cp > 1:
        tokens[f"layout.cp ({layout.cp})"] = length // (2 * layout.cp)
    if (layout.dp or 1) > 1:
        tokens[f"layout.dp ({layout.dp})"] = here
    if layout.sequence_parallel and layout.tp > 1:
        tokens[f"layout.tp ({layout.tp}) with sequence parallelism"] = here // layout.tp
    check_tokens(recipe, tokens)


def check_objective(run: RunConfig) -> None:
    """Raises ValueError where what is trained to, the data and the model do not belong together."""
    dpo, rows = run.objective.name == "dpo", run.data.rows
    if dpo != (rows == "pairs"):
        raise ValueError(
            f"objective.name {run.objective.name} and data.rows {rows} do not belong together: dpo "
            "is of pairs, and pairs are for it"
        )
    if not dpo:
        return
    batch, micro = run.train.global_batch_size // (run.layout.dp or 1), run.microbatch_size
    if batch % 2 or micro % 2:
        raise ValueError(
            f"a pair is two sequences, and a process has {batch} of them ({micro} at once): use an "
            "even --train.global-batch-size per process, and an even --train.microbatch-size"
        )
    if run.init is None:
        raise ValueError(
            "objective.name dpo compares with the model that the run begins with, and a random one "
            "knows no answers: give --init"
        )
    if run.objective.reference is not None:
        source = open_source(run.objective.reference)
        if source.tree.vocab_size != run.tree.vocab_size:
            raise ValueError(
                f"objective.reference {run.objective.reference} has a vocab_size of "
                f"{source.tree.vocab_size:,}, the model {run.tree.vocab_size:,}: give a reference "
                "of the same tokens"
            )


def check_init(run: RunConfig, init: str) -> None:
    """Raises ValueError or KeyError where the weights of `init` are not those of the run's model,
    or are more than it trains.
    """
    source = open_source(init, run.model)
    try:
        stored = source.specs
    except (ValueError, KeyError):
        stated = open_source(init)
        _ = stated.specs  # those of its own model, or it is refused
        changes = ", ".join(
            f"{knob(name)} {new} ({old})" for name, old, new in compared(stated.model, source.model)
        )
        raise ValueError(
            f"{init} holds weights of another model than the run's {changes}: leave out what "
            "changes its shape, or train without --init"
        ) from None
    lost = stored.keys() - run.train.training.applied(run.tree).leaves.keys()
    if lost:
        raise ValueError(
            f"--init {init} has {counted(len(lost), 'bias', 'biases')} of routers, e.g. "
            f"{min(lost)}, that without train.router.balance bias the run would lose: use "
            "--train.router.balance bias"
        )


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


def beginning(run: RunConfig, out: Path, resumed: bool) -> RunConfig:
    """The run, whose `init` is its own newest checkpoint where it goes on and the `init` it began
    with is no longer there: another run deletes all but its newest checkpoints, whoever has begun
    with one of them. Moments are its own then.
    """
    if run.init is None or not is_absent(run.init) or not resumed:
        return run
    kept = folders.whole_checkpoints(out / "checkpoints")
    own = replace(run.optimizer, from_init=False)
    return replace(run, init=str(kept[max(kept)]), optimizer=own) if kept else run


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


def check_exportable(run: RunConfig) -> None:
    """Raises ValueError where a config.json cannot say what is trained."""
    hf_export.check_expressible(run.known_model, run.train.training.applied(run.tree))


def check_profile(run: RunConfig, steps: int) -> None:
    """Raises Unusable where a run of so many steps never comes to the one to be profiled."""
    if run.log.profile is not None and run.log.profile > steps:
        raise folder.Unusable(
            f"log.profile ({run.log.profile}) is over the run's {steps} steps: use --log.profile "
            f"{steps} or less, or --train.steps {run.log.profile} or more"
        )


def check_folder(out: Path, resume: bool, overwrite: bool) -> None:
    """Raises ValueError for a folder that holds something, unless told what to do with it, and for
    one that cannot be written to.
    """
    if resume and overwrite:
        raise ValueError(
            "--resume and --overwrite exclude each other: go on with the run, or throw it away"
        )
    ground = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not ground.is_dir():
        raise ValueError(f"--out {out}: {ground} is a file: give a folder")
    try:
        tempfile.TemporaryFile(dir=ground).close()
    except OSError as error:
        raise ValueError(
            f"--out {out}: {ground} cannot be written to ({error.strerror}): give another folder"
        ) from None
    if (out / folder.LOCK).exists():
        lock.free(out, lock.take(out))
    held = out.is_dir() and any(path.name != folder.LOCK for path in out.iterdir())
    owned = (out / folder.LIST).exists() or folder.is_run(out / "config.yaml")
    if held and not (owned or resume or overwrite):
        raise ValueError(f"{out} is not empty and holds no run of dolmen: give another --out")
    if held and not (resume or overwrite):
        raise ValueError(
            f"{out} already holds a run: use --resume to go on, --overwrite to start again, or "
            f"another --out"
        )
    if overwrite and held and not owned:
        raise ValueError(
            f"--overwrite would delete {out}, which holds no config.yaml of a run and so was not "
            "written by dolmen: remove it yourself"
        )


def check_overwrite(run: RunConfig, out: Path, source: str | None) -> None:
    """Raises ValueError where it would delete what the run reads, and what dolmen did not write;
    `source`, a recipe or YAML file if any, may be the config.yaml that it writes again.
    """
    base = out.resolve()
    for path in _read_by(run, source):
        if path.exists() and path.is_relative_to(base) and path != base / "config.yaml":
            raise ValueError(
                f"--overwrite would delete {path}, which this run reads: give another --out"
            )
    if out.is_dir():
        folder.refuse_strange(out)


def _read_by(run: RunConfig, source: str | None) -> set[Path]:
    """Files and folders that the run reads, links followed, except those of the hub."""
    given = (run.init, run.data.tokenizer, run.layout.schedule, source, str(run.data.cache_folder))
    entries = sources.resolve_sources(run.data.path)
    if run.data.validation is not None:
        entries += sources.resolve_sources([run.data.validation], "--data.validation")
    files = [file for entry in entries for file in entry.paths]
    return {expand(name).resolve() for name in (*given, *files) if name is not None}


def check_resume(run: RunConfig, out: Path) -> None:
    """Raises ValueError where the run would go on from a damaged checkpoint, with another model
    than the newest whole one's or to fewer steps than it has, over files that dolmen did not write,
    and where the place of metrics.jsonl is taken.
    """
    if out.is_dir():
        folder.refuse_taken(
            out, *["hf"] * run.finish.export, *["profile"] * (run.log.profile is not None)
        )
    metrics.read_metrics(out / "metrics.jsonl")
    saved = Checkpoints(out / "checkpoints", SINGLE, keep=0)
    step = saved.newest()
    if step is None:
        return
    try:
        reader = Reader(saved.path(step))
        reader.check_files()
        found = saved_state.read_saved(reader.state, saved.path(step))
    except Damaged as error:
        raise saved.damaged(step, error) from None
    check_same_model(found.run, run, step)
    check_same_optimizer(found.run, run, step)
    if run.train.steps is not None and step > run.train.steps:
        raise folder.Unusable(
            f"the checkpoint is of step {step}, --train.steps is {run.train.steps}: give more, or "
            f"export it (dolmen export {out} --to model/)"
        )


def check_same_model(saved: dict, run: RunConfig, step: int) -> None:
    """Raises Unusable with the fields that differ, if the run saved at `step` is of another
    model.
    """
    assert run.model is not None
    try:
        before = _structure(*saved_state.model_of(saved))
        changed = changed_options(before, _structure(run.model, run.training))
    except ValueError as error:
        changed = [str(error)]
    if changed:
        raise folder.Unusable(
            f"the checkpoint of step {step} is of another model ({'; '.join(changed[:3])}): resume "
            "with the model it was trained with, or give another --out"
        )


def check_same_optimizer(saved: dict, run: RunConfig, step: int) -> None:
    """Raises Unusable if the run saved at `step` keeps another optimizer's state."""
    before = saved.get("optimizer", {}).get("name", OptimizerConfig.name)  # there was one
    if before != run.optimizer.name:
        raise folder.Unusable(
            f"the checkpoint of step {step} keeps the state of optimizer.name {before}, which "
            f"{run.optimizer.name} cannot go on from: use --optimizer.name {before}, or give "
            "another --out"
        )


TUNED = ("initializer_range", "router_aux_loss_coef")


def _structure(model: Model, training: Training) -> dict:
    """What must not change on resume: the fields that fix the tree, less what only training or its
    start uses, whether routers have a bias, and the adapters.
    """
    fields = {n: v for n, v in model.family.new(model.tree).items() if n not in TUNED}
    biased = replace(training, adapter=None, fp8=None).applied(model.tree) != model.tree
    return {
        "model": {"model_type": model.model_type, **fields},
        "adapter": _of_adapter(training.adapter),
        "train": {"router": {"balance": "bias" if biased else "loss or none"}},
    }


def _of_adapter(adapter: Adapter | None) -> dict:
    """Its targets by the last part of our names."""
    if adapter is None:
        return {"rank": None}
    targets = {name.removesuffix(".weight").rpartition(".")[2] for name in adapter.targets}
    return {"rank": adapter.rank, "alpha": adapter.alpha, "targets": sorted(targets)}
