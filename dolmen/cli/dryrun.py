"""dolmen dryrun RECIPE|FILE.yaml --layout.tp 8 --ranks first,last"""

import json
from pathlib import Path

from dolmen.core.log import console, say
from dolmen.core.messages import BadInput, message
from dolmen.files import write
from dolmen.planning.config import DryrunRequest
from dolmen.planning.steady_state import check_layout, uneven_stages


def run(request: DryrunRequest) -> int:
    try:
        if request.options.json is not None:
            write.check_new("--json", request.options.json)
        check_layout(request)
        # torch takes seconds to import: what cannot be run is refused before
        say("loading torch ...")
        from dolmen.planning import dryrun

        report = dryrun.report(request, progress=True)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    screen = console()
    screen.print(report.title)
    if note := uneven_stages(report.run):
        screen.print(note)
    screen.print(report.table())
    if request.options.json is not None:
        try:
            write.replace(Path(request.options.json), json.dumps(report.as_dict(), indent=1) + "\n")
        except OSError as error:
            raise BadInput(f"--json {request.options.json}: {error.strerror}") from None
    return 0
