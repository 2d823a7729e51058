"""dolmen diff A B"""

import json
import sys
from functools import partial

from dolmen.comparison.config import DiffConfig, DiffWork
from dolmen.comparison.diff import diff, work
from dolmen.core.filesystem import expand
from dolmen.core.log import console
from dolmen.core.messages import BadInput, Failed
from dolmen.files import write
from dolmen.launch import process


def run(options: DiffConfig | DiffWork) -> int:
    if isinstance(options, DiffWork):  # of a process that this verb has started
        return process.run_worker(partial(_worker, options))
    try:
        if options.json is not None:
            write.check_new("--json", options.json)
        report = diff(options)
    except ValueError as error:
        raise BadInput(str(error)) from None
    except Failed as error:
        print(f"dolmen diff: {error}", file=sys.stderr)
        return 1
    screen = console(True)
    screen.print(report.table())
    screen.print(f"\n{report}", markup=False, highlight=False)
    if options.json is not None:
        try:
            write.replace(expand(options.json), json.dumps(report.as_dict(), indent=2) + "\n")
        except OSError as error:
            raise BadInput(f"--json {options.json}: {error.strerror}") from None
    return 0 if report.ok else 1


def _worker(asked: DiffWork) -> int:
    work(asked)
    return 0
