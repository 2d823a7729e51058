"""The verbs that measure and compare models: evaluate, diff and verify.

dolmen evaluate SOURCE --data.path TEXT, or --tasks NAMES
dolmen diff A B
dolmen verify SOURCE [--against SOURCE2]    a short form; where the models differ, it runs diff
                                            to name the first tensor that does
"""

import sys
from functools import partial

from dolmen.comparison.config import DiffConfig, DiffWork
from dolmen.comparison.diff import THEIRS, diff, work
from dolmen.conversion.source import ModelSource
from dolmen.core.config import to_dict
from dolmen.core.log import console
from dolmen.core.mesh import Mesh
from dolmen.core.messages import Failed, as_bad_input
from dolmen.evaluation import tasks
from dolmen.evaluation.config import EvaluateConfig, VerifyConfig
from dolmen.evaluation.model import load, tokenizer_of
from dolmen.evaluation.perplexity import evaluate, open_text
from dolmen.evaluation.verify import verify
from dolmen.files import write
from dolmen.launch import process
from dolmen.model.layout import Layout
from dolmen.serving import processes


def run_evaluate(options: EvaluateConfig) -> int:
    """Run `dolmen evaluate`: perplexity over a text, or tasks of lm_eval, or both. Returns the exit
    code. Raises BadInput.
    """
    with as_bad_input():
        if not process.launched_here():
            write.check_json(options.json)
        resolved = processes.resolve(
            "evaluate",
            [options.source],
            options.layout.layout,
            options.device,
            replicas=True,
            weights=options.weights,
        )
        # the launcher has the tokens made and compared before it starts others; else one of each
        # host
        started = process.read_launch()
        first = not process.launched_here() and (started is None or started.local_rank == 0)
        text = tokenizer = None
        if options.tasks is not None:
            tasks.check(options)
            tokenizer = tokenizer_of(options, resolved.source)
        if options.data.path or options.tasks is None:
            text = open_text(
                resolved.source, options.data, options.window, options.stride, first, first
            )

    def work(mesh: Mesh, source: ModelSource) -> int:
        """Load the model, evaluate the text and the tasks, print tables and write --json on the
        first rank. Returns 0.
        """
        # other ranks print nothing
        loaded = load(source, mesh, options.dtype, options.weights)
        screen, content = console(mesh.first), {}
        if text is not None:
            result = evaluate(loaded, text)
            screen.print(result.table(options.source))
            content |= result.json_values()
        if tokenizer is not None:
            scored = tasks.scores(loaded, tokenizer, options)
            screen.print(tasks.table(scored))
            content["tasks"] = scored
        if mesh.first:
            write.save_json(content, options.json)
        return 0

    return resolved.run(to_dict(options), work)


def run_diff(options: DiffConfig | DiffWork) -> int:
    """Run `dolmen diff`: print the comparison and write --json. Returns 0 if the computations
    agree, 1 if they differ or a worker fails. With DiffWork this process is a worker of such a
    comparison. Raises BadInput.
    """
    if isinstance(options, DiffWork):  # a worker process that this verb has started
        return process.run_worker(partial(_diff_worker, options))
    try:
        with as_bad_input():
            write.check_json(options.json)
            report = diff(options)
    except Failed as error:
        print(f"dolmen diff: {error}", file=sys.stderr)
        return 1
    screen = console(True)
    screen.print(report.table())
    screen.print(f"\n{report}", markup=False, highlight=False)
    with as_bad_input():
        write.save_json(report.as_dict(), options.json, indent=2)
    return 0 if report.ok else 1


def _diff_worker(options: DiffWork) -> int:
    """Compute one side of a comparison in a worker process. Returns 0."""
    work(options)
    return 0


def run_verify(options: VerifyConfig) -> int:
    """Run `dolmen verify`. Returns 0 if the models agree, else 1; then it names the first tensor
    that differs, or the command that does.
    """
    # both are checked before processes start
    folders = [options.folder, *([options.against] if options.against else [])]
    layout = Layout(tp=options.layout.tp)
    resolved = processes.resolve("verify", folders, layout, options.device)

    def work(mesh: Mesh, source: ModelSource, against: ModelSource | None = None) -> int:
        """Compare the models on this process's part of the mesh, and print the report."""
        report = verify(source, against, mesh, length=options.length)
        screen = console(mesh.first)
        screen.print(report.table())
        # diff starts processes of its own, which ranks cannot
        if not report.ok and mesh.size > 1:
            screen.print(
                f"\n`dolmen diff {_diff_command(options)}` finds the first tensor that differs"
            )
        elif not report.ok:
            # names of tensors have brackets
            screen.print(f"\n{diff(_diff_config(options))}", markup=False, highlight=False)
        return 0 if report.ok else 1

    return resolved.run(to_dict(options), work)


def _diff_config(options: VerifyConfig) -> DiffConfig:
    """Return the options of `dolmen diff` that compare the same models tensor by tensor."""
    against = f"{THEIRS}:{options.against or options.folder}"
    return DiffConfig(
        options.folder,
        against,
        # gradients too: the loss may agree where they do not
        until="backward",
        length=options.length,
        device=options.device,
    )


def _diff_command(options: VerifyConfig) -> str:
    """Return the arguments of the `dolmen diff` command for the same comparison."""
    config = _diff_config(options)
    return f"{config.first} {config.second} --a.layout.tp {options.layout.tp}"
