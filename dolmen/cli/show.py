"""dolmen show RUN [RUN ...]"""

from pathlib import Path

from dolmen.core.filesystem import expand
from dolmen.core.messages import BadInput, escape, message
from dolmen.watching import server
from dolmen.watching.config import ShowConfig
from dolmen.watching.page import write_page


def run(options: ShowConfig) -> int:
    folders = [expand(name) for name in options.runs]
    try:
        if options.serve:
            server.serve(folders, options)
        else:
            print(f"wrote {escape(write_page(folders, Path(options.out)))}")
    except KeyboardInterrupt:  # how a server is ended, and what a reader has asked for
        return 0
    except ValueError as error:
        raise BadInput(message(error)) from None
    return 0
