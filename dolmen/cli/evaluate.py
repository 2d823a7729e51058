"""dolmen evaluate SOURCE --data.path TEXT, or --tasks NAMES"""

import json

from dolmen.core.config import to_dict
from dolmen.core.filesystem import expand
from dolmen.core.log import console
from dolmen.core.mesh import Mesh
from dolmen.core.messages import BadInput, message
from dolmen.evaluation import tasks
from dolmen.evaluation.config import EvaluateConfig
from dolmen.evaluation.perplexity import Windows, evaluate, load, prepared, tokenizer_of
from dolmen.files import write
from dolmen.launch import process
from dolmen.serving import processes


def run(options: EvaluateConfig) -> int:
    if options.json is not None and not process.launched_here():
        try:
            write.check_new("--json", options.json)
        except ValueError as error:
            raise BadInput(str(error)) from None
    layout = processes.check_model(
        "evaluate", [options.source], options.layout.layout, options.device, replicas=True
    )
    # the launcher has the tokens made and compared before it starts others; else one of each host
    started = process.read_launch()
    first = not process.launched_here() and (started is None or started.local_rank == 0)
    try:
        if options.tasks is not None:
            tasks.check(options)
        asked = options.data.path or options.tasks is None
        text = prepared(options, progress=first, verify=first) if asked else None
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    return processes.run(
        "evaluate",
        to_dict(options),
        layout,
        options.device,
        lambda mesh: _measure(options, text, mesh),
    )


def _measure(options: EvaluateConfig, text: Windows | None, mesh: Mesh) -> int:
    loaded, screen, content = load(options, mesh), console(mesh.first), {}
    if text is not None:
        found = evaluate(loaded, text)
        screen.print(found.table(options.source))
        content |= found.as_dict()
    if options.tasks is not None:
        tokenizer = tokenizer_of(options, mesh)
        scored = tasks.scores(loaded, tokenizer, options)
        screen.print(tasks.table(scored))
        content["tasks"] = scored
    if mesh.first and options.json is not None:
        save(content, options.json)
    return 0


def save(content: object, to: str) -> None:
    """Raises ValueError where it cannot be written."""
    try:
        write.replace(expand(to), json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"--json {to}: {error.strerror}") from None
