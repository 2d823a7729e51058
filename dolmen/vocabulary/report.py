"""How many characters and bytes of a text a token stands for, over all of it, streamed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dolmen.core.messages import plural
from dolmen.data.sources import Source, resolve_sources
from dolmen.data.tokenise import pieces
from dolmen.data.tokenizer import PreTrainedTokenizer, encoder
from dolmen.vocabulary.config import VocabText


@dataclass(frozen=True)
class Text:
    """Text from any source."""

    source: Source
    field: str

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def size(self) -> int | None:
        """Bytes of its files, packed ones as they lie; None where some of it is of the hub."""
        files = self.source.files
        return None if self.source.hubs else sum(file.stat().st_size for file in files)

    def pieces(self) -> Iterator[str]:
        """All of it in order, in pieces that fit into memory. Raises ValueError for what cannot be
        read.
        """
        for piece in pieces(self.source, self.field):
            yield piece.text


@dataclass(frozen=True)
class Counts:
    """Of a text that was cut by a tokenizer."""

    tokens: int
    characters: int
    bytes: int

    @property
    def characters_per_token(self) -> float:
        return self.characters / self.tokens

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens

    def __str__(self) -> str:
        return (
            f"{self.characters_per_token:.3f} characters and {self.bytes_per_token:.3f} bytes per "
            f"token ({plural(self.tokens, 'token')})"
        )


def open_text(config: VocabText) -> Text | None:
    """The text that is named, if any is; nothing of it is read. Raises ValueError, also for
    weights, which have no meaning here, and for tokens.
    """
    if not config.path:
        return None
    sources = resolve_sources(config.path)
    if sources[0].weight is not None:
        raise ValueError("--data.path: weights make a mixture to train on: leave them out")
    (source,) = sources
    if source.indexed:
        raise ValueError(
            f"--data.path {source.indexed[0]} holds tokens, and a vocabulary is of text: give the "
            "text that they were made of"
        )
    return Text(source, config.text_field)


def count(tokenizer: PreTrainedTokenizer, text: Iterable[str], name: str) -> Counts:
    """Over all pieces of a text, which `name` stands for. Raises ValueError where they have no
    tokens.
    """
    encode, tokens, characters, size = encoder(tokenizer), 0, 0, 0
    for piece in text:
        tokens += len(encode(piece))
        characters += len(piece)
        size += len(piece.encode())
    if not tokens:
        raise ValueError(f"--data.path {name}: the text has no tokens")
    return Counts(tokens, characters, size)
