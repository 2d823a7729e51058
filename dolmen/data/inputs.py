"""Checks and opens what the data options name, before anything is written: everything that can be
refused without reading all text is refused here.
"""

from collections import defaultdict
from functools import cache
from typing import NamedTuple

from dolmen.core.messages import plural
from dolmen.data import tokenizer as tokenizers
from dolmen.data.bpe import tokenizer_folder
from dolmen.data.config import DataConfig, TokenConfig
from dolmen.data.corpus import Corpus, join, open_text
from dolmen.data.indexed import check_indexed, open_indexed
from dolmen.data.readers import is_whole_file
from dolmen.data.sources import DataSource, resolve_sources
from dolmen.data.token_cache import file_digest
from dolmen.data.tokenise import pieces
from dolmen.data.validation_split import overlap_error
from dolmen.files.remote_file import file_size


class Inputs(NamedTuple):
    """Inputs that `check_inputs` has accepted."""

    sources: tuple[DataSource, ...]
    validation: DataSource | None
    tokenizer: tokenizers.PreTrainedTokenizer
    end_of_text: int

    @property
    def every_source(self) -> tuple[DataSource, ...]:
        """The sources of training, followed by that of validation, if there is one."""
        return (*self.sources, *([self.validation] if self.validation else []))


def check_inputs(
    config: DataConfig,
    tokenizer: str | None,
    vocab_size: int | None,
    sequence_length: int,
    progress: bool = True,
    verify: bool = True,
) -> Inputs:
    """Open the sources and the tokenizer, and raise ValueError for all that can be refused without
    reading all data: missing, empty or unreadable data, a missing field in the first rows, too
    little text for one window, a missing tokenizer or end-of-text token, a tokenizer larger than
    `vocab_size` (None: no model yet). `tokenizer`: used if the config has none. `verify`: try the
    tokenizer's regular expressions. Writes only the tokenizer of `bpe:N`, into the cache.
    """
    sources = resolve_sources(config.path, cache=config.cache_folder)
    validation = None
    if config.validation is not None:
        (validation,) = resolve_sources(
            [config.validation], "--data.validation", config.cache_folder
        )
        for source in sources:
            if same_files(source, validation):
                raise overlap_error(source.name)
    # source -> its first text, to try the tokenizer on
    first: dict[str, str] = {}
    for source in (*sources, *([validation] if validation else [])):
        for file in source.indexed:
            check_indexed(file, source.option)
        if config.rows == "text" and source.files and not source.hubs:
            least = 1 if source is validation or source.indexed else sequence_length + 1
            first[source.name] = look_at(source, config.text_field, least)
    if config.rows != "text":
        check_chats(config, sources)
    # `bpe:N` is trained here, if it is not cached
    named = tokenizer_folder(config, sources, validation, vocab_size, progress)
    # how messages name a tokenizer that came with the model
    by = "--data.tokenizer" if named else "without --data.tokenizer,"
    loaded = tokenizers.load_tokenizer(named or tokenizer, by, probe=verify)
    if vocab_size is not None:
        tokenizers.check_vocabulary(loaded, vocab_size)
    for name, text in first.items():
        tokenizers.check_encodes(loaded, text, name)
    return Inputs(
        sources, validation, loaded, tokenizers.end_of_text_id(loaded, config.end_of_text)
    )


def open_corpus(
    source: DataSource,
    config: TokenConfig,
    inputs: Inputs,
    progress: bool = True,
    verify: bool = True,
) -> Corpus:
    """Return the tokens of a source: its text, tokenised into the cache if need be, then its .bin
    files; it may have only one of them. `verify`: compare each cached byte with its digest, else
    only sizes. Raises ValueError where text files hold no text, and for invalid tokens in .bin
    files.
    """
    parts, tokenizer, cache = [], inputs.tokenizer, config.cache_folder
    if source.text:
        parts.append(
            open_text(
                source,
                tokenizer,
                inputs.end_of_text,
                config.text_field,
                cache,
                config.workers,
                progress,
                verify,
            )
        )
    size = tokenizers.vocabulary_size(tokenizer)
    for file in source.indexed:
        parts.append(
            open_indexed(file, size, inputs.end_of_text, cache, progress, verify, source.option)
        )
    return join(source.name, parts)


def check_chats(config: DataConfig, sources: tuple[DataSource, ...]) -> None:
    """Raise ValueError for sources that cannot hold chats: several with weights, tokens (.bin), or
    a tokenizer to be trained on them.
    """
    if len(sources) != 1:
        raise ValueError(
            f"--data.path has {len(sources)} weighted sources, but rows of chats form one data "
            "set: give paths without weights, and rows a `weight` to change their loss weight"
        )
    (source,) = sources
    if source.indexed:
        raise ValueError(
            f"--data.path {source.indexed[0]} is tokenised already, but chats need text: use "
            "--data.rows text"
        )
    if config.rows != "prompts" and (config.tokenizer or "").startswith("bpe:"):
        raise ValueError(
            f"--data.tokenizer {config.tokenizer} trains a tokenizer on text, but chats need the "
            "tokenizer of the model: leave it out, or name one"
        )


def look_at(source: DataSource, text_field: str, least: int) -> str:
    """Return the beginning of the source's first document. Raises ValueError where there is no
    text, or where its bytes cannot give `least` tokens (a token has a byte or is an end of text).
    """
    first = next(pieces(source, text_field), None)
    if first is None:
        raise ValueError(f"{source.label}: no text in {plural(len(source.files), 'file')}")
    sizes = [file_size(file) for file in source.files if is_whole_file(file)]
    # a token per byte, and an end of text per file
    most = sum(sizes) + sum(size > 0 for size in sizes)
    if len(sizes) == len(source.files) and most < least:
        raise ValueError(
            f"{source.label}: {sum(sizes):,} bytes of text give at most {most:,} tokens, "
            f"fewer than one window of sequence_length + 1 ({least:,}): use a smaller "
            "--train.sequence-length, or more data"
        )
    return first.text


def same_files(source: DataSource, validation: DataSource) -> bool:
    """Return True if each file of `source` is also one of `validation`, by path or by its bytes
    (only files with a counterpart of the same size are read); False where `source` has hubs.
    """
    if source.hubs:
        return False
    ours, theirs = ([*data.files, *data.indexed] for data in (source, validation))
    paths, sizes = set(theirs), defaultdict(list)
    for file in theirs:
        sizes[file_size(file)].append(file)
    # files that are not the same path: compared by content
    left = [file for file in ours if file not in paths]
    if not all(file_size(file) in sizes for file in left):
        return False
    # each file is hashed once, however many it is compared with
    digest = cache(file_digest)
    return all(
        any(digest(other) == digest(file) for other in sizes[file_size(file)]) for file in left
    )
