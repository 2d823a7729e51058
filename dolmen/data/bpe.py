"""`--data.tokenizer bpe:N`: a byte-level BPE of N tokens, trained on the training data itself,
once, and kept in the cache.

Documents that are held out whole are left out of it, and so are those of --data.validation; of a
document whose end is held out all text is used.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence

import numpy as np

from dolmen.data.config import DataConfig
from dolmen.data.corpus import identity_of
from dolmen.data.documents import pieces
from dolmen.data.heldout import TextHash, choose, union
from dolmen.data.scratch import building, lock
from dolmen.data.sources import Source, resolve
from dolmen.data.tokenise import DOCUMENT, Column
from dolmen.data.tokenizer import train_bpe

PREFIX = "bpe:"


def tokenizer_folder(
    config: DataConfig, sources: Sequence[Source], vocab_size: int | None, progress: bool
) -> str | None:
    """The tokenizer to load: config.tokenizer itself, or the folder of the one trained for `bpe:N`,
    now if need be.

    Raises ValueError for an N that is no number or over `vocab_size`, and for data that is not
    local.
    """
    if config.tokenizer is None or not config.tokenizer.startswith(PREFIX):
        return config.tokenizer
    size, option = config.tokenizer.removeprefix(PREFIX), f"--data.tokenizer {config.tokenizer}"
    if not size.isdigit():
        raise ValueError(f"{option}: after bpe: stands a number of tokens, as in bpe:8192")
    if vocab_size is not None and int(size) > vocab_size:
        raise ValueError(
            f"{option} is larger than the model's vocab_size ({vocab_size}): use bpe:{vocab_size}, "
            f"or --model.vocab-size {size}"
        )
    if any(source.hubs for source in sources):
        raise ValueError(
            f"{option} trains on local files alone: give a tokenizer's folder or hub id"
        )
    files = [identity_of(file) for source in sources for file in source.files]
    recipe = [
        "bpe 3",
        size,
        config.validation,
        config.validation_fraction,
        config.text_field,
        files,
    ]
    key = hashlib.blake2b(json.dumps(recipe).encode(), digest_size=12).hexdigest()
    folder = config.cache_folder / "tokenizers" / f"bpe-{size}-{key}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock(folder.with_suffix(".lock")):
            if not folder.exists():  # another process may have been first
                with building(folder) as part:
                    train_bpe(_texts(config, sources), int(size), part, progress)
    return str(folder)


def _texts(config: DataConfig, sources: Sequence[Source]) -> Iterator[str]:
    """The text that is trained on, in pieces; a first pass finds what is held out."""
    tables = [_table(source, config.text_field) for source in sources]
    if config.validation is None:
        held = choose(tables, config.validation_fraction).whole
    else:
        (judge,) = resolve([config.validation], "--data.validation", config.cache_folder)
        held = union([_table(judge, config.text_field)["words"]])
    for source, table in zip(sources, tables, strict=True):
        out, document = np.isin(table["words"], held), 0
        for piece in pieces(source, config.text_field):
            if not out[document]:
                yield piece.text
            document += piece.last


def _table(source: Source, text_field: str) -> np.ndarray:
    """DOCUMENT [documents] of the source; the files are not told."""
    documents, text = Column(DOCUMENT), TextHash()
    for piece in pieces(source, text_field):
        text.update(piece.text.encode())
        if piece.last:
            documents.append((text.size, text.exact, text.words, -1))
            text = TextHash()
    return documents.array()
