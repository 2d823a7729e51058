"""Text and tokens: `tokenize`, and a vocabulary that is learned, merged and given to a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dolmen.api.asked import DATA, asked_of, value_errors
from dolmen.data import indexed_export
from dolmen.data.config import TokenizeConfig
from dolmen.vocabulary import extend as vocabulary_extend
from dolmen.vocabulary import merge as vocabulary_merge
from dolmen.vocabulary import train as vocabulary_train
from dolmen.vocabulary.config import VocabExtendConfig, VocabMergeConfig, VocabTrainConfig


def tokenize(
    path: str | Path | Sequence[str | Path],
    to: str | Path,
    *,
    progress: bool = True,
    **options: Any,
) -> Path:
    """`dolmen tokenize --data.path PATH --to TO` in this process: text as a data set of Megatron,
    TO.bin and TO.idx. `path` is what --data.path takes, or several. Returns the .bin. Raises
    ValueError on bad input.

        dolmen.tokenize("notes/", to="corpus", tokenizer="path/to/model")
    """
    with value_errors(DATA):
        asked = asked_of(TokenizeConfig, to=to, path=path, **options)
        return indexed_export.tokenize(asked, progress).file


def train_vocabulary(
    path: str | Path | Sequence[str | Path],
    size: int,
    to: str | Path,
    *,
    kind: str = "bpe",
    progress: bool = True,
    **options: Any,
) -> vocabulary_train.Trained:
    """`dolmen vocab train --data.path PATH --size SIZE --kind KIND --to TO`: a vocabulary of kind
    unigram or bpe (of sentencepiece) or byte-bpe, learned from text, as a folder that transformers
    opens. `path` is what --data.path takes, or several. Raises ValueError on bad input.

        dolmen.train_vocabulary("zh/", 20000, "zh-tokens", kind="bpe")
    """
    with value_errors(DATA):
        asked = asked_of(VocabTrainConfig, size=size, kind=kind, to=to, path=path, **options)
        return vocabulary_train.train(asked, progress)


def merge_vocabularies(
    base: str | Path,
    new: str | Path,
    to: str | Path,
    *,
    path: str | Path | Sequence[str | Path] = (),
    progress: bool = True,
    **options: Any,
) -> vocabulary_merge.Merged:
    """`dolmen vocab merge BASE NEW --to TO`: the tokenizer `base` with the tokens of `new` behind
    its own. Of held-out text at `path` characters and bytes per token are told. Raises ValueError
    on bad input.

        dolmen.merge_vocabularies("path/to/model", "zh-tokens", "merged").added
    """
    with value_errors(DATA):
        asked = asked_of(VocabMergeConfig, base=base, new=new, to=to, path=path, **options)
        return vocabulary_merge.merge(asked, progress)


def extend_vocabulary(
    model: str | Path,
    tokenizer: str | Path,
    to: str | Path,
    *,
    path: str | Path | Sequence[str | Path] = (),
    progress: bool = True,
    **options: Any,
) -> vocabulary_extend.Extended:
    """`dolmen vocab extend MODEL --tokenizer TOKENIZER --to TO`: the model with rows for the new
    tokens of a merged tokenizer, as a transformers directory. Of held-out text at `path` the loss
    per byte is told, before and after. Raises ValueError on bad input.

        dolmen.extend_vocabulary("path/to/model", "merged", "extended", init="mean")
    """
    with value_errors(DATA):
        own = {"model": model, "tokenizer": tokenizer, "to": to}
        asked = asked_of(VocabExtendConfig, **own, path=path, **options)
        return vocabulary_extend.extend(asked, progress)
