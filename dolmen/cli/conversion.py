"""The verbs that write models, tokens and vocabularies: convert, export, tokenize and vocab.

dolmen convert SOURCE DESTINATION --to FORMAT
dolmen export SOURCE --to DIR
dolmen tokenize --data.path TEXT --data.tokenizer DIR --to PREFIX
dolmen vocab train|merge|extend
"""

import sys
from collections.abc import Callable
from typing import Any, Protocol

from dolmen.conversion.config import ConvertConfig, ExportConfig
from dolmen.conversion.convert import convert, export_model
from dolmen.core.messages import BadInput, Failed, as_bad_input, escape, message, plural
from dolmen.data.config import TokenizeConfig
from dolmen.data.indexed_export import tokenize
from dolmen.vocabulary.config import VocabExtendConfig, VocabMergeConfig, VocabTrainConfig
from dolmen.vocabulary.extend import extend
from dolmen.vocabulary.merge import merge
from dolmen.vocabulary.train import train


def run_convert(options: ConvertConfig) -> int:
    """Run `dolmen convert`: write a model in another format, read it back, compare the two and
    print the report. Returns 0, or 1 if they differ (then the written model is deleted). Raises
    BadInput.
    """
    try:
        print(convert(options, progress=True))
    except Failed as error:
        # exit code 1, not 2: the input was valid
        print(f"dolmen convert: {error}; nothing was written", file=sys.stderr)
        return 1
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    return 0


def run_export(options: ExportConfig) -> int:
    """Run `dolmen export`: write a run's newest checkpoint or any model as a transformers
    directory, and print what was written. Returns 0. Raises BadInput.
    """
    with as_bad_input():
        title = export_model(
            options.source, options.to, options.dtype, options.adapters, options.critic
        )
    print(f"wrote {escape(options.to)}, from {escape(title)}")
    return 0


def run_tokenize(options: TokenizeConfig) -> int:
    """Run `dolmen tokenize`: write text as an indexed data set of Megatron-LM (.bin and .idx), and
    print the numbers of tokens and documents. Returns 0. Raises BadInput.
    """
    with as_bad_input():
        written = tokenize(options)
    print(
        f"wrote {escape(written.file)} and its .idx: {plural(written.tokens, 'token')} of "
        f"{plural(written.documents, 'document')}, {written.dtype}"
    )
    return 0


class VocabularyReport(Protocol):
    """Result of a part of `dolmen vocab`."""

    def lines(self) -> list[str]:
        """Return the lines of the report, to be printed."""
        ...


VOCAB_STEPS: dict[type, Callable[[Any], VocabularyReport]] = {
    VocabTrainConfig: train,
    VocabMergeConfig: merge,
    VocabExtendConfig: extend,
}


def run_vocab(options: VocabTrainConfig | VocabMergeConfig | VocabExtendConfig) -> int:
    """Run `dolmen vocab train`, `merge` or `extend`, whichever `options` are of, and print its
    report. Returns 0. Raises BadInput.
    """
    with as_bad_input():
        # the class of the options decides the part
        report = VOCAB_STEPS[type(options)](options)
    print(f"wrote {escape(options.to)}", *report.lines(), sep="\n")
    return 0
