"""dolmen dryrun RECIPE|FILE.yaml --layout.tp 8 --ranks first,last"""

import json
from pathlib import Path

from dolmen.core.log import console
from dolmen.core.messages import BadInput, message
from dolmen.files import write
from dolmen.planning import dryrun, outputs
from dolmen.planning.config import DryrunRequest


def run(request: DryrunRequest) -> int:
    try:
        if request.asked.json is not None:
            words = f"--json {request.asked.json}"
            outputs.refuse_anothers(words, Path(request.asked.json), ('{\n "ranks": [',))
        report = dryrun.report(request, progress=True)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    screen = console()
    screen.print(report.title)
    screen.print(report.table())
    if request.asked.json is not None:
        try:
            write.replace(Path(request.asked.json), json.dumps(report.as_dict(), indent=1) + "\n")
        except OSError as error:
            raise BadInput(f"--json {request.asked.json}: {error.strerror}") from None
    return 0
