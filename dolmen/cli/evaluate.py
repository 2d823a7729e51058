"""dolmen evaluate SOURCE --data.path TEXT"""

from dolmen.cli.options import EvaluateOptions
from dolmen.conversion.source import open_alike, open_source
from dolmen.core.config import to_dict
from dolmen.core.errors import BadInput, message
from dolmen.core.log import console
from dolmen.core.mesh import Mesh
from dolmen.evaluation.perplexity import evaluate, open_text
from dolmen.launch import process
from dolmen.optim.precision import DTYPES
from dolmen.serving import placed


def run(options: EvaluateOptions) -> int:
    layout = placed.check("evaluate", [options.source], options.layout.tp, options.device)
    # the launcher has the tokens made and compared before it starts others; else one of each host
    started = process.started()
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

    def work(mesh: Mesh) -> int:
        dtype = DTYPES[options.dtype] if options.dtype else None
        found = evaluate(open_alike(options.source, mesh), text, mesh, dtype)
        console(mesh.first).print(found.table(options.source))
        return 0

    return placed.start("evaluate", to_dict(options), layout, options.device, work)
