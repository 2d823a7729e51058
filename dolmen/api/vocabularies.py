"""Text and tokens: `tokenize`, and a vocabulary that is learned, merged and given to a model."""

from collections.abc import Sequence
from pathlib import Path

from dolmen.api.asked import asked_of, value_errors
from dolmen.data import indexed_export
from dolmen.data.config import TokenizeConfig
from dolmen.recipes.changed import plain
from dolmen.vocabulary import extend as vocabulary_extend
from dolmen.vocabulary import merge as vocabulary_merge
from dolmen.vocabulary import train as vocabulary_train
from dolmen.vocabulary.config import VocabExtendConfig, VocabMergeConfig, VocabTrainConfig


def tokenize(
    path: str | Path | Sequence[str | Path],
    to: str | Path,
    *,
    tokenizer: str | Path | None = None,
    end_of_text: str | None = None,
    text_field: str = "text",
    cache: str | Path | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> Path:
    """`dolmen tokenize --data.path PATH --to TO` in this process: text as a data set of Megatron,
    TO.bin and TO.idx. `path` is what --data.path takes, or several. Returns the .bin. Raises
    ValueError on bad input.

        dolmen.tokenize("notes/", to="corpus", tokenizer="path/to/model")
    """
    data = {
        "path": path,
        "tokenizer": tokenizer,
        "end_of_text": end_of_text,
        "text_field": text_field,
        "cache": cache,
        "workers": workers,
    }
    with value_errors({f"data.{name}": name for name in data}):
        plainly = {name: plain(value) for name, value in data.items()}
        return indexed_export.tokenize(asked_of(TokenizeConfig, to=to, data=plainly), progress).file


def train_vocabulary(
    path: str | Path | Sequence[str | Path],
    size: int,
    to: str | Path,
    *,
    kind: str = "bpe",
    text_field: str = "text",
    max_bytes: int = VocabTrainConfig.max_bytes,
    seed: int = 0,
    progress: bool = True,
) -> vocabulary_train.Trained:
    """`dolmen vocab train --data.path PATH --size SIZE --kind KIND --to TO`: a vocabulary of kind
    unigram or bpe (of sentencepiece) or byte-bpe, learned from text, as a folder that transformers
    opens. `path` is what --data.path takes, or several. Raises ValueError on bad input.

        dolmen.train_vocabulary("zh/", 20000, "zh-tokens", kind="bpe")
    """
    data = {"path": path, "text_field": text_field}
    with value_errors({f"data.{name}": name for name in data}):
        asked = asked_of(
            VocabTrainConfig,
            size=size,
            kind=kind,
            to=to,
            data={name: plain(value) for name, value in data.items()},
            max_bytes=max_bytes,
            seed=seed,
        )
        return vocabulary_train.train(asked, progress)


def merge_vocabularies(
    base: str | Path,
    new: str | Path,
    to: str | Path,
    *,
    path: str | Path | Sequence[str | Path] = (),
    text_field: str = "text",
    progress: bool = True,
) -> vocabulary_merge.Merged:
    """`dolmen vocab merge BASE NEW --to TO`: the tokenizer `base` with the tokens of `new` behind
    its own. Of held-out text at `path` characters and bytes per token are told. Raises ValueError
    on bad input.

        dolmen.merge_vocabularies("path/to/model", "zh-tokens", "merged").added
    """
    data = {"path": path, "text_field": text_field}
    with value_errors({f"data.{name}": name for name in data}):
        plainly = {name: plain(value) for name, value in data.items()}
        asked = asked_of(VocabMergeConfig, base=base, new=new, to=to, data=plainly)
        return vocabulary_merge.merge(asked, progress)


def extend_vocabulary(
    model: str | Path,
    tokenizer: str | Path,
    to: str | Path,
    *,
    init: str = "mean",
    path: str | Path | Sequence[str | Path] = (),
    text_field: str = "text",
    window: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> vocabulary_extend.Extended:
    """`dolmen vocab extend MODEL --tokenizer TOKENIZER --to TO`: the model with rows for the new
    tokens of a merged tokenizer, as a transformers directory. Of held-out text at `path` the loss
    per byte is told, before and after. Raises ValueError on bad input.

        dolmen.extend_vocabulary("path/to/model", "merged", "extended", init="mean")
    """
    data = {"path": path, "text_field": text_field}
    with value_errors({f"data.{name}": name for name in data}):
        asked = asked_of(
            VocabExtendConfig,
            model=model,
            tokenizer=tokenizer,
            to=to,
            init=init,
            seed=seed,
            data={name: plain(value) for name, value in data.items()},
            window=window,
        )
        return vocabulary_extend.extend(asked, progress)
