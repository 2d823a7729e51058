"""dolmen vocab train|merge|extend"""

from collections.abc import Callable
from typing import Any, Protocol

from dolmen.core.messages import BadInput, escape, message
from dolmen.vocabulary.config import VocabExtendConfig, VocabMergeConfig, VocabTrainConfig
from dolmen.vocabulary.extend import extend
from dolmen.vocabulary.merge import merge
from dolmen.vocabulary.train import train


class Done(Protocol):
    def lines(self) -> list[str]:
        """For a person."""
        ...


PARTS: dict[type, Callable[[Any], Done]] = {
    VocabTrainConfig: train,
    VocabMergeConfig: merge,
    VocabExtendConfig: extend,
}


def run(options: VocabTrainConfig | VocabMergeConfig | VocabExtendConfig) -> int:
    try:
        done = PARTS[type(options)](options)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    print(f"wrote {escape(options.to)}", *done.lines(), sep="\n")
    return 0
