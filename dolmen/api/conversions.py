"""Models and vocabularies in other formats: `export`, `convert`, `tokenize`, and training, merging
and extending a vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dolmen.api.options import DATA_KEYWORDS, build_config, value_errors
from dolmen.conversion import convert as conversion
from dolmen.conversion.config import ConvertConfig, ExportConfig
from dolmen.data import indexed_export
from dolmen.data.config import TokenizeConfig
from dolmen.vocabulary import extend as vocabulary_extend
from dolmen.vocabulary import merge as vocabulary_merge
from dolmen.vocabulary import train as vocabulary_train
from dolmen.vocabulary.config import VocabExtendConfig, VocabMergeConfig, VocabTrainConfig


def export(source: str | Path, to: str | Path, dtype: str | None = None, **options: Any) -> Path:
    """Write a run's newest complete checkpoint, a checkpoint or any model that dolmen reads as a
    transformers directory, as `dolmen export SOURCE --to TO` does, and return its path. `dtype`: of
    the written weights; `options` are those of the command. Raises ValueError on bad input.

        dolmen.export("runs/book", to="model/", dtype="bfloat16")
    """
    with value_errors():
        config = build_config(ExportConfig, source=source, to=to, dtype=dtype, **options)
        conversion.export_model(
            config.source, config.to, config.dtype, config.adapters, config.critic
        )
    return Path(to)


def convert(
    source: str | Path,
    to: str | Path,
    *,
    format: str = "hf",
    progress: bool = True,
    **options: Any,
) -> Path:
    """Write a model of any format that dolmen reads in a format that it writes (hf, megatron,
    megatron-core, torch-dist), then read it back and compare tensors and logits, as `dolmen convert
    SOURCE TO --to FORMAT` does. Returns the path of the folder `to`. `options` are those of the
    command. `progress` shows a bar on stderr. Raises ValueError on bad input, and RuntimeError if
    the written model differs, after deleting it.

        dolmen.convert("runs/book", to="ranks/", format="megatron-core", tp=2, pp=2)
    """
    # Python's names differ here: --to is the format, DESTINATION the folder
    with value_errors({"to": "format", "destination": "to"}):
        config = build_config(
            ConvertConfig,
            source=source,
            destination=to,
            # the library's name is a synonym
            to="hf" if format == "transformers" else format,
            **options,
        )
        conversion.convert(config, progress)
    return Path(to)


def tokenize(
    path: str | Path | Sequence[str | Path],
    to: str | Path,
    *,
    progress: bool = True,
    **options: Any,
) -> Path:
    """Tokenize text and write it as an indexed data set of Megatron-LM, TO.bin and TO.idx, as
    `dolmen tokenize --data.path PATH --to TO` does, in this process. `path` is what --data.path
    takes, or several; `options` are those of the command. `progress` shows a bar on stderr. Returns
    the path of the .bin file. Raises ValueError on bad input.

        dolmen.tokenize("notes/", to="corpus", tokenizer="path/to/model")
    """
    with value_errors(DATA_KEYWORDS):
        config = build_config(TokenizeConfig, to=to, path=path, **options)
        # the .bin
        return indexed_export.tokenize(config, progress).file


def train_vocabulary(
    path: str | Path | Sequence[str | Path],
    size: int,
    to: str | Path,
    *,
    kind: str = "bpe",
    progress: bool = True,
    **options: Any,
) -> vocabulary_train.Trained:
    """Train a tokenizer of `size` tokens on text and write it to the folder `to`, which
    transformers opens, as `dolmen vocab train` does. `kind`: unigram or bpe (sentencepiece's), or
    byte-bpe. `path` is what --data.path takes, or several; `options` are those of the command.
    Returns a report. Raises ValueError on bad input.

        dolmen.train_vocabulary("zh/", 20000, "zh-tokens", kind="bpe")
    """
    with value_errors(DATA_KEYWORDS):
        config = build_config(VocabTrainConfig, size=size, kind=kind, to=to, path=path, **options)
        return vocabulary_train.train(config, progress)


def merge_vocabularies(
    base: str | Path,
    new: str | Path,
    to: str | Path,
    *,
    path: str | Path | Sequence[str | Path] = (),
    progress: bool = True,
    **options: Any,
) -> vocabulary_merge.Merged:
    """Append the tokens of the tokenizer `new` to those of the tokenizer `base`, and write the
    merged one to the folder `to`, as `dolmen vocab merge BASE NEW --to TO` does. Returns a report:
    how many tokens were added, and characters and bytes per token of the held-out text at `path`,
    if given. Raises ValueError on bad input.

        dolmen.merge_vocabularies("path/to/model", "zh-tokens", "merged").added
    """
    with value_errors(DATA_KEYWORDS):
        config = build_config(VocabMergeConfig, base=base, new=new, to=to, path=path, **options)
        return vocabulary_merge.merge(config, progress)


def extend_vocabulary(
    model: str | Path,
    tokenizer: str | Path,
    to: str | Path,
    *,
    path: str | Path | Sequence[str | Path] = (),
    progress: bool = True,
    **options: Any,
) -> vocabulary_extend.Extended:
    """Add rows for the new tokens of a merged tokenizer to the embedding and head of a model, and
    write it to the folder `to` as a transformers directory, as `dolmen vocab extend MODEL
    --tokenizer TOKENIZER --to TO` does. Returns a report, with the loss per byte of the held-out
    text at `path`, if given, before and after. Raises ValueError on bad input.

        dolmen.extend_vocabulary("path/to/model", "merged", "extended", init="mean")
    """
    with value_errors(DATA_KEYWORDS):
        config = build_config(
            VocabExtendConfig, model=model, tokenizer=tokenizer, to=to, path=path, **options
        )
        return vocabulary_extend.extend(config, progress)
