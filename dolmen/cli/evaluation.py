"""The verbs that measure and compare models: evaluate, diff and verify.

dolmen evaluate SOURCE --data.path TEXT, or --tasks NAMES
dolmen diff A B
dolmen verify SOURCE [--against SOURCE2]    a short form; where the models differ, it runs diff
                                            to name the first tensor that does
"""

import sys

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
    """Run `dolmen evaluate`: check the options, open the model, and on the processes of the layout
    measure the perplexity of a text, or run tasks of lm_eval, or both; print tables and write
    --json. Returns the exit code. Raises BadInput.
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
            tasks.check_tasks(options)
            tokenizer = tokenizer_of(options, resolved.source)
        if options.data.path or options.tasks is None:
            text = open_text(
                resolved.source, options.data, options.window, options.stride, first, first
            )

    def work(mesh: Mesh, source: ModelSource) -> int:
        """Load this process's part of the model, evaluate the text and the tasks with all ranks,
        and print tables and write --json on the first rank. Returns 0.
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
    """Run `dolmen diff`: compare two computations of a model tensor by tensor, print the comparison
    and write --json. Returns 0 if they agree, 1 if they differ or a worker process fails. Given a
    DiffWork, this process is such a worker: it computes one of the two sides. Raises BadInput.
    """
    if isinstance(options, DiffWork):  # a worker process that this verb has started
        return process.run_worker(lambda: work(options) or 0)
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


def run_verify(options: VerifyConfig) -> int:
    """Run `dolmen verify`: compare a model's computation in dolmen with that of transformers on the
    processes of the layout, and print a table. Returns 0 if they agree, else 1, after running a
    tensor-by-tensor comparison (`dolmen diff`) in one process, or printing its command with
    several. Raises BadInput.
    """
    # both are checked before processes start
    folders = [options.folder, *([options.against] if options.against else [])]
    layout = Layout(tp=options.layout.tp)
    resolved = processes.resolve("verify", folders, layout, options.device)

    def work(mesh: Mesh, source: ModelSource, against: ModelSource | None = None) -> int:
        """Compare the model `source` with transformers (on `against`, if given) with all ranks of
        the mesh, and print the report on the first. Returns 0 if they agree, else 1.
        """
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
    """Return the configuration of the `dolmen diff` that makes the comparison of a `dolmen verify`
    tensor by tensor, gradients included.
    """
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
    """Return the words after `dolmen diff` on a command line that makes the comparison of a `dolmen
    verify` tensor by tensor.
    """
    config = _diff_config(options)
    return f"{config.first} {config.second} --a.layout.tp {options.layout.tp}"
