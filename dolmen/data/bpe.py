"""`--data.tokenizer bpe:N`: a byte-level BPE of N tokens, trained on the training data itself,
once, and kept in the cache under a hash of what decides it, with a digest of its files, which is
compared at each use.

Documents that are held out whole are left out of it, and so are those of --data.validation; of a
document whose end is held out all text is used.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from dolmen.core.filesystem import hold_lock
from dolmen.core.log import say
from dolmen.data.config import DataConfig
from dolmen.data.corpus import identities
from dolmen.data.sources import DataSource
from dolmen.data.token_cache import building, identity_of, remove_folder
from dolmen.data.tokenise import DOCUMENT, Column, TextHash, pieces
from dolmen.data.tokenizer import train_bpe
from dolmen.data.validation_split import choose_held_out, overlap_error, union
from dolmen.files.gate import Refused, read_bytes, read_text
from dolmen.files.kinds import TOKENIZER_FILES

PREFIX = "bpe:"
DIGEST = "digest"


def tokenizer_folder(
    config: DataConfig,
    sources: Sequence[DataSource],
    validation: DataSource | None,
    vocab_size: int | None,
    progress: bool,
) -> str | None:
    """Return the tokenizer to load: config.tokenizer as it is, or for `bpe:N` the folder of a BPE
    trained on the training text, now if it is not cached. Raises ValueError for an N that is not a
    number or over `vocab_size`, and for data that is not local text.
    """
    if config.tokenizer is None or not config.tokenizer.startswith(PREFIX):
        return config.tokenizer
    size, option = config.tokenizer.removeprefix(PREFIX), f"--data.tokenizer {config.tokenizer}"
    if not size.isdigit():
        raise ValueError(f"{option}: bpe: must be followed by a number of tokens, such as bpe:8192")
    if vocab_size is not None and int(size) > vocab_size:
        raise ValueError(
            f"{option} is larger than the model's vocab_size ({vocab_size}): use bpe:{vocab_size}, "
            f"or --model.vocab-size {size}"
        )
    # a misspelled path looks like a hub id
    if hubs := [name for source in sources for name in source.hubs]:
        raise ValueError(
            f"{option} trains on local files only, but {hubs[0]} is not a local file, so it is a "
            "hub id: give the path of your files, or a tokenizer's folder or hub id"
        )
    if tokenised := [file for source in sources for file in source.indexed]:
        raise ValueError(
            f"{option} trains on text, but {tokenised[0]} is tokenised already: give the folder or "
            "hub id of its tokenizer"
        )
    held_out = identities(validation) if validation else config.validation_fraction
    files = [identity_of(file) for source in sources for file in source.files]
    recipe = ["bpe 3", size, held_out, config.text_field, files]
    # what decides the tokenizer: its size, what is held out, the files
    key = hashlib.blake2b(json.dumps(recipe).encode(), digest_size=12).hexdigest()
    folder = config.cache_folder / "tokenizers" / f"bpe-{size}-{key}"
    if not _is_complete(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # ranks and hosts start at once: one trains, the others wait
        with hold_lock(folder.with_suffix(".lock")):
            if not _is_complete(folder):  # another process may have been first
                if folder.exists():
                    say(f"the tokenizer in {folder} is damaged and is trained again", progress)
                    remove_folder(folder)
                with building(folder) as part:
                    texts = _texts(config, sources, validation)
                    train_bpe(texts, int(size), part, progress)
                    (part / DIGEST).write_text(_digest(part))
    return str(folder)


def _is_complete(folder: Path) -> bool:
    """True if the folder's files match the digest written with them."""
    try:
        return read_text(folder / DIGEST, 64) == _digest(folder)
    except Refused:
        return False


def _digest(folder: Path) -> str:
    """XXH3 of the names and bytes of a tokenizer's files, in hexadecimal. Raises Refused."""
    digest = xxhash.xxh3_128()
    for name, kind in TOKENIZER_FILES.items():
        if (folder / name).exists():
            digest.update(f"{name}\0".encode())
            digest.update(read_bytes(folder / name, kind.size))
    return digest.hexdigest()


def _texts(
    config: DataConfig, sources: Sequence[DataSource], validation: DataSource | None
) -> Iterator[str]:
    """Return the training text in pieces, without held-out documents, which a first pass over all
    text finds before returning. Raises ValueError for unreadable text, and where a source has none
    left.
    """
    tables = [_table(source, config.text_field) for source in sources]
    if validation is None:
        held_out = choose_held_out(tables, config.validation_fraction).whole
    else:
        held_out = union([_table(validation, config.text_field)["words"]])
    outs = [np.isin(table["words"], held_out) for table in tables]
    for source, out in zip(sources, outs, strict=True):
        if validation is not None and out.all():
            raise overlap_error(source.name)
    return _training_texts(zip(sources, outs, strict=True), config.text_field)


def _training_texts(
    masks: Iterable[tuple[DataSource, np.ndarray]], text_field: str
) -> Iterator[str]:
    """Yield the text of each source, without the documents whose mask [documents] is set."""
    for source, out in masks:
        document = 0
        for piece in pieces(source, text_field):
            if not out[document]:
                yield piece.text
            document += piece.last


def _table(source: DataSource, text_field: str) -> np.ndarray:
    """Return a record of size and hashes of each document of the source (dtype DOCUMENT, with a
    file index of -1). Reads all text.
    """
    documents, text = Column(DOCUMENT), TextHash()
    for piece in pieces(source, text_field):
        text.update(piece.text.encode())
        if piece.last:
            documents.append((text.size, text.exact, text.words, -1))
            text = TextHash()
    return documents.array()
