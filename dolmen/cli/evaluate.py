"""dolmen evaluate SOURCE --data.path TEXT"""

import json
from pathlib import Path

from dolmen.cli.options import EvaluateOptions
from dolmen.core.config import to_dict
from dolmen.core.errors import BadInput, message
from dolmen.core.log import console
from dolmen.core.mesh import Mesh
from dolmen.evaluation.perplexity import measured, prepared
from dolmen.files import write
from dolmen.launch import process
from dolmen.serving import placed


def run(options: EvaluateOptions) -> int:
    if options.json is not None and not (folder := Path(options.json).parent).is_dir():
        raise BadInput(f"--json {options.json}: there is no folder {folder}")
    layout = placed.check(
        "evaluate", [options.source], options.layout.layout, options.device, replicas=True
    )
    # the launcher has the tokens made and compared before it starts others; else one of each host
    started = process.started()
    first = not process.launched_here() and (started is None or started.local_rank == 0)
    try:
        text = prepared(options, progress=first, verify=first)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None

    def work(mesh: Mesh) -> int:
        found = measured(options, text, mesh)
        console(mesh.first).print(found.table(options.source))
        if mesh.first and options.json is not None:
            save(found.as_dict(), options.json)
        return 0

    return placed.start("evaluate", to_dict(options), layout, options.device, work)


def save(content: object, to: str) -> None:
    """Raises ValueError where it cannot be written."""
    try:
        write.replace(Path(to), json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"--json {to}: {error.strerror}") from None
