"""Checks of tokenizers: none may turn text into nothing or into tokens of another text, and a new
one is compared with sentencepiece, as `transformers` opens it. Also counts characters and bytes per
token of a text, streamed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import sentencepiece

from dolmen.core.messages import brief, plural
from dolmen.data.sources import DataSource, resolve_sources, single_source
from dolmen.data.tokenise import pieces
from dolmen.data.tokenizer import PreTrainedTokenizer, encoder, load_tokenizer
from dolmen.files.remote_file import file_size
from dolmen.vocabulary.config import VocabText
from dolmen.vocabulary.tokenizer_folder import Vocabulary


@dataclass(frozen=True)
class Text:
    """Text to measure or train a vocabulary on, from files or the hub."""

    source: DataSource
    field: str

    @property
    def name(self) -> str:
        """Name of the data source, for messages and progress bars."""
        return self.source.name

    @property
    def size(self) -> int | None:
        """Bytes of the text's files, compressed ones as stored, for a progress bar; None if any of
        the text is on the hub.
        """
        files = self.source.files
        return None if self.source.hubs else sum(map(file_size, files))

    def pieces(self) -> Iterator[str]:
        """Yield the whole text of the data source in order, in pieces that fit into memory. Raises
        ValueError for unreadable text.
        """
        for piece in pieces(self.source, self.field):
            yield piece.text


@dataclass(frozen=True)
class Counts:
    """Number of tokens, characters and UTF-8 bytes of a text."""

    tokens: int
    characters: int
    bytes: int

    @property
    def characters_per_token(self) -> float:
        """Mean number of characters that a token stands for."""
        return self.characters / self.tokens

    @property
    def bytes_per_token(self) -> float:
        """Mean number of UTF-8 bytes that a token stands for."""
        return self.bytes / self.tokens

    def __str__(self) -> str:
        """Return a line for a report: characters and bytes per token, and the number of tokens."""
        return (
            f"{self.characters_per_token:.3f} characters and {self.bytes_per_token:.3f} bytes per "
            f"token ({plural(self.tokens, 'token')})"
        )


def open_text(config: VocabText) -> Text | None:
    """Return the text that --data.path names, whose files are found but not read; None if the
    option is not set. Raises ValueError for mixture weights, and for data that are tokens already.
    """
    if not config.path:
        return None
    source = single_source(resolve_sources(config.path))
    if source.indexed:
        raise ValueError(
            f"--data.path {source.indexed[0]} is tokenised already, but a vocabulary is learned "
            "from text: give the original text"
        )
    return Text(source, config.text_field)


def count(tokenizer: PreTrainedTokenizer, text: Iterable[str], name: str) -> Counts:
    """Tokenize all pieces of a text, one at a time, and return how many tokens, characters and
    UTF-8 bytes they have. `name`: of the text, for the error. Raises ValueError if there are no
    tokens.
    """
    encode, tokens, characters, size = encoder(tokenizer), 0, 0, 0
    # streamed: the text may be larger than memory
    for piece in text:
        tokens += len(encode(piece))
        characters += len(piece)
        size += len(piece.encode())
    if not tokens:
        raise ValueError(f"--data.path {name}: the text has no tokens")
    return Counts(tokens, characters, size)


SAMPLE = 16  # pieces of held-out text, of up to 2^18 characters each, that must come back
UNLIKE = 0.01
"""Largest share of lines that `tokenizers` may tokenise otherwise than sentencepiece: where two
ways to cut a text are equally likely, one adds in fp64 and the other in fp32. Of 3,536 lines of
English and Chinese none did, in bpe and unigram.
"""
ENGLISH = (
    "All happy families are alike; each unhappy family is unhappy in its own way.",
    "It was the best of times, it was the worst of times, it was the age of wisdom.",
    "In 1859 he paid $3.50, or 27% more, for item no. 42 (see p. 7)!",
    "def read(self, size=-1): return self.raw.read(size) # ok?",
)
CHINESE = (
    "道可道，非常道。名可名，非常名。无名天地之始；有名万物之母。",
    "学而时习之，不亦说乎？有朋自远方来，不亦乐乎？",
    "今天天气很好，我们去公园散步吧！",
    "床前明月光，疑是地上霜。举头望明月，低头思故乡。",
)


def check_base(base: Vocabulary, new: Vocabulary) -> None:
    """Raise ValueError if tokens of the vocabulary `new` cannot be added to the vocabulary `base`:
    `base` is a unigram model and `new` is not, or tokenizer.json and tokenizer.model of `base` give
    a token different ids.
    """
    model, content = base.model, base.content
    # scores of a BPE are ranks, not log-probabilities
    if base.kind == "unigram" and new.kind != "unigram":
        raise ValueError(
            f"BASE {base.where} is unigram, whose tokens have probabilities, but NEW {new.where} "
            f"is {new.kind}, whose tokens have none: train it with --kind unigram"
        )
    if model is None or content is None:
        return
    vocab = content["model"]["vocab"]
    # unigram: a list of [token, score], whose places are ids
    ids = vocab if isinstance(vocab, dict) else {piece[0]: i for i, piece in enumerate(vocab)}
    other = [p.text for i, p in enumerate(model.pieces) if ids.get(p.text) != i]
    if other:
        raise ValueError(
            f"BASE {base.where}: tokenizer.json and tokenizer.model differ in "
            f"{plural(len(other), 'token')}, e.g. {brief(other[0])}: remove one of the two files"
        )


def check_merged(
    base: Vocabulary,
    folder: Path,
    first: int,
    tokens: Sequence[str],
    text: Text | None,
) -> None:
    """Raise ValueError unless the merged tokenizer in `folder`, opened with transformers, is right:
    the new `tokens` have the ids from `first` on; the merges of a BPE build each of them; English
    and Chinese sample lines, and lines of `text` if given, decode to themselves; and sentencepiece
    itself, for a sentencepiece model, gives the same ids. `base`: the vocabulary that was extended.
    """
    loaded = load_tokenizer(str(folder), "--to")
    ids = loaded.get_vocab()
    numbered = enumerate(tokens, first)
    if wrong := [token for number, token in numbered if ids.get(token) != number]:
        raise ValueError(
            f"transformers gives {plural(len(wrong), 'new token')} a different id, e.g. "
            f"{brief(wrong[0])} {ids.get(wrong[0])}"
        )
    model = loaded.backend_tokenizer.model if loaded.is_fast else None
    if base.kind == "bpe" and model is not None:
        for token in tokens:
            # below the pre-tokenizer: the merges alone must build the token
            if len(model.tokenize(token)) != 1:
                raise ValueError(f"no merges lead to {brief(token)}")
    lines = probe_lines(loaded)
    if text is not None:
        lines += [line for piece in islice(text.pieces(), SAMPLE) for line in lines_of(piece)]
    check_round_trip(loaded, lines, "--to")
    merged = next(
        (
            folder / name
            for name in ("tokenizer.model", "spiece.model")
            if (folder / name).is_file()
        ),
        None,
    )
    if merged is not None:
        check_sentencepiece(loaded, str(merged), lines)


def probe_lines(tokenizer: PreTrainedTokenizer) -> list[str]:
    """Return those of some English and Chinese sample lines that the tokenizer encodes without the
    unknown token.
    """
    encode = encoder(tokenizer)
    # lines with unknown characters cannot come back
    unknown = tokenizer.get_vocab().get(str(tokenizer.init_kwargs.get("unk_token")))
    return [line for line in (*ENGLISH, *CHINESE) if unknown not in encode(line).tolist()]


def lines_of(text: str) -> list[str]:
    """Return the lines of a text that are not blank, without white space at both ends: tokenizers
    that put a space before each text lose leading spaces.
    """
    return [line for line in map(str.strip, text.splitlines()) if line]


def check_round_trip(tokenizer: PreTrainedTokenizer, lines: Iterable[str], where: str) -> None:
    """Encode and decode each line with the tokenizer. Raises ValueError for the first line that has
    no tokens or is not decoded to itself. `where`: names the tokenizer in the error.
    """
    encode = encoder(tokenizer)
    for line in lines:
        ids = encode(line).tolist()
        # a vocabulary without bytes and unknown token drops characters silently
        if not ids:
            raise ValueError(f"{where}: the tokenizer gives no tokens for {brief(line)}")
        # clean-up would remove spaces before punctuation
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if back != line:
            raise ValueError(
                f"{where}: the tokenizer is not reversible: {brief(line)} is decoded as "
                f"{brief(back)}"
            )


def check_sentencepiece(tokenizer: PreTrainedTokenizer, model: str, lines: Sequence[str]) -> None:
    """Encode each line with the tokenizer and with sentencepiece itself, which reads the file
    `model`. Raises ValueError if the ids differ for more than 1 % of the lines.
    """
    # an independent implementation reads the same file
    theirs = sentencepiece.SentencePieceProcessor(model_file=model)
    encode = encoder(tokenizer)
    unlike = [line for line in lines if theirs.encode(line) != encode(line).tolist()]
    if len(unlike) > UNLIKE * len(lines):
        raise ValueError(
            f"transformers tokenises {len(unlike):,} of {plural(len(lines), 'line')} differently "
            f"from sentencepiece, e.g. {brief(unlike[0])}"
        )
