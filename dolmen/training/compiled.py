"""torch.compile gives up on a function that it has compiled `torch._dynamo.config.recompile_limit`
times (8), and runs what fits none of those programs uncompiled: right, slower, and told to nobody
but torch's log. A run says so.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dolmen.core.torch_private import spelled


class _GaveUp(logging.Handler):
    def __init__(self, say: Callable[[str], None]):
        super().__init__(logging.WARNING)
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        if not record.msg.startswith(spelled.GAVE_UP):
            return
        assert record.args is not None, record.msg
        limit, number, function, reason, *_ = record.args
        reason = str(reason).split("#")[0].strip()  # then follow the place and a stack
        self.say(
            f"WARNING: torch.compile gave up on {function} after {number} programs ({limit}): what "
            f"fits none of them runs uncompiled, and slower; the last differed in {reason}"
        )


@contextmanager
def limit_told(say: Callable[[str], None]) -> Iterator[None]:
    """Within, torch.compile's limit on programs per function is told to `say`, one line each time
    that it is hit.
    """
    handler, logger = _GaveUp(say), logging.getLogger(spelled.DYNAMO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
