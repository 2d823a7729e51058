"""Any text, or data sets of Megatron, as one data set of Megatron: `dolmen tokenize`."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dolmen.core.filesystem import expand
from dolmen.data.config import DataConfig, TokenizeConfig
from dolmen.data.corpus import Corpus
from dolmen.data.inputs import check_inputs, open_corpus
from dolmen.data.sources import single_source
from dolmen.data.tokenizer import vocabulary_size
from dolmen.files import indexed

BLOCK = 1 << 20  # tokens that are written at once


class Tokenized(NamedTuple):
    """The written data set."""

    file: Path
    """The .bin; its .idx lies beside it."""
    tokens: int
    documents: int
    dtype: str


def tokenize(config: TokenizeConfig, progress: bool = True) -> Tokenized:
    """Write text or token data sets as one .bin and .idx of Megatron, each document with its
    end-of-text token, as --append-eod does. Uses and fills the token cache. Raises ValueError or
    OSError, before all text is read, for unreadable data and for files that exist.
    """
    if config.data.tokenizer is None:
        raise ValueError("no tokenizer: use --data.tokenizer FOLDER, or a hub id")
    name = expand(config.to)
    file = name if name.suffix == indexed.BIN else name.with_name(name.name + indexed.BIN)
    indexed.check_free(file)
    data = DataConfig(**asdict(config.data), validation_fraction=0)
    inputs = check_inputs(data, None, None, sequence_length=0, progress=progress)
    source = single_source(inputs.sources)
    # through the token cache: a later run with the same text is ready
    corpus = open_corpus(source, data, inputs, progress)
    dtype = indexed.dtype_of(vocabulary_size(inputs.tokenizer))
    bounds = boundaries(corpus)
    file.parent.mkdir(parents=True, exist_ok=True)
    # which sequences begin a document
    firsts = np.searchsorted(bounds, corpus.offsets)
    indexed.save(file, blocks(corpus), dtype, np.diff(bounds), firsts)
    return Tokenized(file, corpus.token_count, corpus.document_count, dtype.name)


def boundaries(corpus: Corpus) -> np.ndarray:
    """Return the position, in the tokens of the whole corpus, at which each sequence starts, and at
    the end the number of tokens: int64 [sequences + 1]. Empty sequences are dropped.
    """
    bases = np.cumsum([0] + [len(tokens) for tokens in corpus.memory])
    return np.unique(
        np.concatenate(
            [
                sequence_ends + base
                for sequence_ends, base in zip(corpus.sequences, bases, strict=False)
            ]
        )
    )


def blocks(corpus: Corpus) -> Iterator[np.ndarray]:
    """Yield all tokens of the corpus in order, as arrays of at most BLOCK tokens."""
    for tokens in corpus.memory:
        for first in range(0, len(tokens), BLOCK):
            yield tokens[first : first + BLOCK]
