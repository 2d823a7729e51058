"""Which tokens of a model are new: a file beside its weights, which `dolmen vocab extend` writes,
and a run that begins with it reads.
"""

import json
from pathlib import Path

from dolmen.files import gate, kinds

FILE = "extended.json"


def write(folder: Path, old: int, tokens: int, init: str) -> None:
    """`old`: the first id that is new; `tokens`: those that there are now."""
    told = {"old_tokens": old, "tokens": tokens, "init": init}
    (folder / FILE).write_text(json.dumps(told, indent=1) + "\n")


def first_new(folder: Path) -> int | None:
    """The first id that is new; None where nobody has said so. Raises Refused."""
    file = folder / FILE
    return gate.read_json(file, kinds.EXTENDED)["old_tokens"] if file.is_file() else None
