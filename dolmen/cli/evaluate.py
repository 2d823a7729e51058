"""dolmen evaluate SOURCE --data.path TEXT"""

from dolmen.cli import verify
from dolmen.cli.options import EvaluateOptions
from dolmen.conversion.source import open_alike, open_source
from dolmen.core.errors import BadInput, message
from dolmen.core.log import console
from dolmen.core.mesh import Mesh
from dolmen.data.in_order import InOrder
from dolmen.evaluation.perplexity import evaluate, open_text
from dolmen.launch import process
from dolmen.optim.precision import DTYPES


def run(options: EvaluateOptions, argv: list[str]) -> int:
    started = process.started()
    layout = verify.checked(started, "evaluate", options.source, options, [])
    # the launcher has the tokens made and compared before it starts others; else one of each host
    first = not process.launched_here() and (started is None or started.local_rank == 0)
    try:
        text = open_text(
            open_source(options.source),
            options.data,
            options.sequence_length,
            progress=first,
            verify=first,
        )
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    return verify.start(
        started,
        argv,
        "evaluate",
        layout,
        options.device,
        lambda mesh: _evaluate(options, text, mesh),
    )


def _evaluate(options: EvaluateOptions, text: InOrder, mesh: Mesh) -> int:
    dtype = DTYPES[options.dtype] if options.dtype else None
    found = evaluate(open_alike(options.source, mesh), text, mesh, dtype)
    console(mesh.first).print(found.table(options.source))
    return 0
