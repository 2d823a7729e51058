"""Options in messages, which name them as the command line does, in Python's spelling:
`--train.global-batch-size 8` is `train.global_batch_size 8`, and as `--resume` is `resume=True`,
`--train.no-compile` is `train.compile=False`. A whole command, such as `dolmen export RUN --to
DIR`, is for a shell.
"""

import re
from collections.abc import Collection, Mapping

COMMAND = r"\bdolmen (?:export|generate|train) [^;)]*"
OPTION = r"(?<![\w./-])(--)?([a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*)(?![\w/-])"
SAID = re.compile(f"{COMMAND}|{OPTION}")


def in_python(text: str, keywords: Mapping[str, str], switches: Collection[str] = ()) -> str:
    """`text` with each of the `keywords`, by option without dashes before it and with `_` for `-`,
    in place of its option; `switches` are the options that take no value. What has neither dashes
    before it nor a section may be any word, and stays.
    """

    def spelled(found: re.Match[str]) -> str:
        dashes, name = found.groups()
        name = (name or "").replace("-", "_")  # empty: a command
        section, _, last = name.rpartition(".")
        if not dashes and not section:
            return found[0]
        if name in keywords:
            return keywords[name] + ("=True" if dashes and name in switches else "")
        positive = f"{section}.{last.removeprefix('no_')}"
        return f"{keywords[positive]}=False" if positive in keywords else found[0]

    return SAID.sub(spelled, text)
