"""Rules on the output folder: what it holds before a run starts there, and whether its newest
checkpoint can be resumed. The process that starts the run checks them before anything is written.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dolmen.checkpoint import saved as saved_state
from dolmen.checkpoint.folders import Damaged
from dolmen.checkpoint.store import Checkpoints
from dolmen.conversion import peft
from dolmen.core.config import changed_options
from dolmen.core.filesystem import expand
from dolmen.core.mesh import SINGLE
from dolmen.data.sources import DataSource
from dolmen.families import ModelConfig, common, training_fields
from dolmen.model.spec import LoraSpec, ScalarHeadSpec
from dolmen.model.training import Training
from dolmen.optim.config import OptimizerConfig
from dolmen.rl.rewards import is_reward_model, parse_rewards
from dolmen.training import folder, metrics, mirror
from dolmen.training.config import RunConfig
from dolmen.training.receipt import RECEIPTS, read_receipts


def check_overwrite(
    run: RunConfig, out: Path, source: str | None, data: Sequence[DataSource]
) -> None:
    """Raise ValueError if --overwrite, which empties the run's folder `out`, would delete a file
    that the run reads, or one that dolmen did not write. `source`: the recipe or YAML file of the
    run; it may be the config.yaml in `out`, which is written again. `data`: all data sources of the
    run.
    """
    base = out.resolve()
    for path in _read_by(run, source, data):
        if path.exists() and path.is_relative_to(base) and path != base / "config.yaml":
            raise ValueError(
                f"--overwrite would delete {path}, which this run reads: give another --out"
            )
    if out.is_dir():
        folder.require_own_files(out)


def _read_by(run: RunConfig, source: str | None, data: Sequence[DataSource]) -> set[Path]:
    """Return the local files and folders that the run reads (models, reward models, tokenizer,
    data, prompts, schedule, its YAML file), with links resolved, those that links in these folders
    lead to, and base models of adapters.
    """
    models = (run.init, run.critic.init, run.objective.reference)
    rewards = [name for _, name in parse_rewards(run.reward) if is_reward_model(name)]
    tokenizer = (run.data.tokenizer, run.data.template, str(run.data.cache_folder))
    evaluation = (run.evaluate.samples, run.evaluate.tasks_path)
    named_paths = (*models, *rewards, *tokenizer, *evaluation, run.layout.schedule, source)
    files = [file for source in data for file in source.paths]
    named = [expand(name) for name in (*named_paths, *files) if name is not None]
    # a model's folder may consist of links, as in the hub's cache, or need a base model elsewhere
    folders = [path for path in named if path.is_dir()]
    linked = [file for path in folders for file in path.iterdir() if file.is_symlink()]
    bases = [expand(peft.base(path)) for path in folders if peft.is_peft(path)]
    return {path.resolve() for path in (*named, *linked, *bases)}


def check_resume(run: RunConfig, out: Path) -> None:
    """Raise ValueError if the run cannot resume in the folder `out`: its newest checkpoint is
    damaged, of another model or optimizer, or past the run's end, or files that dolmen did not
    write have names that the run writes. Reads no tensors. Without a checkpoint only the files are
    checked.
    """
    if out.is_dir():
        folder.check_names_free(
            out,
            *["hf"] * run.finish.export,
            *["profile"] * (run.log.profile is not None),
            *["calibration.png"] * (run.objective.name == "reward"),
            *["samples.jsonl"] * (run.evaluate.samples is not None),
            *["reference"] * run.objective.needs_reference,
            *[RECEIPTS] * (run.train.numerics == "exact"),
        )
    # these raise Refused where the path is a folder, say
    metrics.read_metrics(out / "metrics.jsonl")
    if run.train.numerics == "exact":
        read_receipts(out / RECEIPTS)
    to = run.checkpoint.to
    remote = None if to is None else mirror.open_checkpoints(to, out)
    saved = Checkpoints(out / "checkpoints", SINGLE, keep=0, remote=remote)
    step = saved.newest()
    if step is None:
        return
    try:
        reader = saved.open_reader(step)
        reader.check_files()
        checkpoint_state = saved_state.read_saved(reader.state, saved.path(step))
    except Damaged as error:
        raise saved.damage_error(step, error) from None
    check_same_run(checkpoint_state.run, run, step)
    if run.train.steps is not None and step > run.train.steps:
        raise folder.Unusable(
            f"the checkpoint is at step {step}, but --train.steps is {run.train.steps}: use a "
            f"larger --train.steps, or export the checkpoint (dolmen export {out} --to model/)"
        )
    read = checkpoint_state.samples * run.sequence_length
    if run.train.tokens is not None and read > run.train.tokens:
        raise folder.Unusable(
            f"the checkpoint of step {step} has read {read:,} tokens, but --train.tokens is "
            f"{run.train.tokens:,g}: use a larger --train.tokens, or export the checkpoint "
            f"(dolmen export {out} --to model/)"
        )


def check_same_run(saved: dict, run: RunConfig, step: int) -> None:
    """Raise Unusable, naming what differs, if `run` cannot continue the run whose options were
    `saved` in the checkpoint of `step`, as model, kind of optimizer or the limit of exact numerics
    is another.
    """
    check_same_model(saved, run, step)
    check_same_optimizer(saved, run, step)
    check_same_limit(saved, run, step)


def check_same_model(saved: dict, run: RunConfig, step: int) -> None:
    """Raise Unusable, naming the fields, if the run whose options were `saved` in the checkpoint of
    `step` has another model or other adapters than `run`.
    """
    assert run.model is not None
    try:
        before = _structure(*saved_state.model_of(saved))
        changed = changed_options(before, _structure(run.model, run.training))
    except ValueError as error:
        changed = [str(error)]
    if changed:
        raise folder.Unusable(
            f"the checkpoint of step {step} belongs to another model ({'; '.join(changed[:3])}): "
            "resume with the model it was trained with, or give another --out"
        )


def check_same_optimizer(saved: dict, run: RunConfig, step: int) -> None:
    """Raise Unusable if the run whose options were `saved` in the checkpoint of `step` has another
    kind of optimizer (optimizer.name) than `run`, whose state cannot be used.
    """
    before = saved.get("optimizer", {}).get("name", OptimizerConfig.name)  # there was one
    if before != run.optimizer.name:
        raise folder.Unusable(
            f"the checkpoint of step {step} has the optimizer state of {before}, from which "
            f"optimizer.name {run.optimizer.name} cannot resume: use --optimizer.name {before}, "
            "or give another --out"
        )


def check_same_limit(saved: dict, run: RunConfig, step: int) -> None:
    """Raise Unusable if both this run and the one that was `saved` at `step` have exact numerics,
    but another --train.exact.tp or --train.exact.cp: a run that resumes so would have other bits
    than any run that never stopped.
    """
    train = saved.get("train", {})
    if not "exact" == train.get("numerics") == run.train.numerics:
        return
    for name, limit in (("tp", run.train.exact.tp), ("cp", run.train.exact.cp)):
        before = train.get("exact", {}).get(name)
        if before != limit:
            raise folder.Unusable(
                f"the checkpoint of step {step} was trained with train.exact.{name} {before}, and "
                f"{limit} gives other bits: use --train.exact.{name} {before}, or give another "
                "--out"
            )


def _structure(model: ModelConfig, training: Training) -> dict:
    """Return the options that must not change on resume, as plain values: the fields that determine
    parameters and forward pass, whether routers have a bias, and the adapters.
    """
    # fields such as dropout do not change the parameters
    free = training_fields(model)
    fields = {n: v for n, v in common.write(model.family, model.spec).items() if n not in free}
    biased = replace(training, adapter=None, fp8=None).apply_to(model.spec) != model.spec
    return {
        "model": {"model_type": model.model_type, "ends in": str(model.spec.head), **fields}
        if isinstance(model.spec.head, ScalarHeadSpec)
        else {"model_type": model.model_type, **fields},
        "adapter": adapter_fields(training.adapter),
        "train": {"router": {"balance": "bias" if biased else "loss or none"}},
    }


def adapter_fields(adapter: LoraSpec | None) -> dict:
    """Return the options of LoRA adapters that must not change on resume, as plain values: rank,
    alpha, targets (last parts of their names), and so on; a rank of None without adapters.
    """
    if adapter is None:
        return {"rank": None}
    targets = {name.removesuffix(".weight").rpartition(".")[2] for name in adapter.targets}
    return {
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "targets": sorted(targets),
        "frozen": adapter.frozen,
        "scaling": adapter.scaling,
        "kind": adapter.kind,
    }
