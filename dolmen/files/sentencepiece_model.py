"""A model of sentencepiece (tokenizer.model), a protobuf of five fields, as far as a vocabulary
needs it: what it holds is read here, within bounds, before sentencepiece itself is given it, and
pieces are added at its end.

    message   record*                        of ModelProto, and of what lies in it
    record    tag, value                     tag = number * 8 + wire type
    value     varint | 8 bytes | length, bytes | 4 bytes

A message that follows another in one file is merged with it: repeated fields go on, single ones
have the later value (protobuf.dev, "Last One Wins"). So pieces are added by what is written behind
the file, and not a byte of it changes.

sentencepiece's own generated module is not used: that of 0.2.3 raises on import unless protobuf is
7.36.1 or later, which OR-tools 9.15 excludes, and protobuf would become a dependency.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from dolmen.files.gate import Refused, read_bytes, refuse
from dolmen.files.kinds import LARGEST_VOCABULARY, VOCAB

Kind = Literal["unigram", "bpe"]
KINDS: dict[int, Kind] = {1: "unigram", 2: "bpe"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"  # what stands for a space in pieces

# numbers of the fields that are read, in sentencepiece_model.proto
PIECES, TRAINER, NORMALIZER, SELF_TEST = 1, 2, 3, 4
MODEL_TYPE, VOCAB_SIZE, SUFFIX, UNKNOWN_ID = 3, 4, 24, 40
CHARSMAP, DUMMY_PREFIX, REMOVE_SPACES, ESCAPE = 2, 3, 4, 5
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
LONGEST = 1 << 16  # bytes of a piece

Value = int | bytes


class VocabularyPiece(NamedTuple):
    """A row of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: int = NORMAL


@dataclass(frozen=True)
class SentencePieceModel:
    """The parsed and checked content of a tokenizer.model."""

    content: bytes
    """Bytes of the file without its self-test."""
    kind: Kind
    pieces: tuple[VocabularyPiece, ...]
    charsmap: bytes
    """How text is normalised before it is split, in sentencepiece's binary form; empty: it
    is not.
    """
    dummy_prefix: bool
    """True if a space is added before a text."""
    remove_spaces: bool
    """True if spaces at the ends of a text, and repeated ones, are removed."""
    unknown: int
    """Id of the unknown piece."""

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of each piece of the vocabulary, by its text."""
        return {piece.text: number for number, piece in enumerate(self.pieces)}

    @property
    def byte_fallback(self) -> bool:
        """True if there is a piece for each of the 256 bytes, for characters without a piece."""
        # sentencepiece uses them only if all are there
        return sum(piece.kind == BYTE for piece in self.pieces) == 256


def read(file: Path) -> SentencePieceModel:
    """Read a tokenizer.model. Raises Refused for a file that is no such model, and for models of
    words or characters.
    """
    return parse(read_bytes(file, VOCAB.size), file)


def parse(content: bytes, name: Path | str) -> SentencePieceModel:
    """Parse the bytes of a tokenizer.model; `name` stands for it in messages. Raises Refused for
    bytes that are no such model, and for models of words or characters.
    """
    try:
        return _parse(content, name)
    except Refused:
        raise
    except (ValueError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise refuse(name, f"is not a sentencepiece model: {error}") from error


def _parse(content: bytes, name: Path | str) -> SentencePieceModel:
    """Parse the bytes of a model. Raises Refused for kinds that are not supported, and ValueError,
    IndexError or struct.error for a malformed one.
    """
    pieces: list[VocabularyPiece] = []
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] = {}
    kept = bytearray()
    for number, value, record in records(content):
        if number == SELF_TEST:  # results of the vocabulary that it was, which loading it compares
            continue
        kept += record
        match number:
            case 1:
                pieces.append(_parse_piece(_inside(value)))
            case 2:
                trainer |= fields(_inside(value))
            case 3:
                normalizer |= fields(_inside(value))
    if not 1 <= len(pieces) <= LARGEST_VOCABULARY:
        raise ValueError(f"it has {len(pieces):,} pieces")
    # ids would not follow from texts
    if len({piece.text for piece in pieces}) < len(pieces):
        raise ValueError("it has a duplicate piece")
    kind = _number(trainer, MODEL_TYPE, 1)
    if kind not in KINDS:
        raise refuse(name, f"is a model of type {kind}, neither unigram (1) nor bpe (2)")
    if _number(trainer, SUFFIX, 0) or not _number(normalizer, ESCAPE, 1):
        raise refuse(
            name, "has treat_whitespace_as_suffix or escape_whitespaces off, which is not supported"
        )
    unknown = [i for i, piece in enumerate(pieces) if piece.kind == UNKNOWN]
    if len(unknown) != 1:
        raise ValueError(f"it has {len(unknown)} unknown pieces")
    # absent: text is not normalized
    charsmap = normalizer.get(CHARSMAP, b"")
    return SentencePieceModel(
        bytes(kept),
        KINDS[kind],
        tuple(pieces),
        _inside(charsmap),
        bool(_number(normalizer, DUMMY_PREFIX, 1)),
        bool(_number(normalizer, REMOVE_SPACES, 1)),
        unknown[0],
    )


def charsmap(content: bytes) -> bytes:
    """Return the normalization of a sentencepiece model (its charsmap), empty if `content` is no
    such model. Pieces, and limits of `read`, are not checked.
    """
    try:
        normalizer = [value for number, value, _ in records(content) if number == NORMALIZER]
        return _inside(fields(b"".join(map(_inside, normalizer))).get(CHARSMAP, b""))
    except (ValueError, IndexError):
        return b""


def add_pieces(model: SentencePieceModel, pieces: Sequence[VocabularyPiece]) -> bytes:
    """Return the bytes of `model` with `pieces` appended to its vocabulary. Raises ValueError for
    one that it has.
    """
    if twice := [piece.text for piece in pieces if piece.text in model.ids]:
        raise ValueError(f"{twice[0]!r} is a piece already")
    total = len(model.pieces) + len(pieces)
    # merged with the trainer fields of the file: the later value wins
    trainer = record(TRAINER, record(VOCAB_SIZE, total))
    return model.content + b"".join(map(_write_piece, pieces)) + trainer


def _write_piece(piece: VocabularyPiece) -> bytes:
    """Encode a vocabulary piece (text, score, kind) as a record of the model."""
    text = record(1, piece.text.encode())
    # field 2 is a float
    score = varint(2 * 8 + FIXED32) + struct.pack("<f", piece.score)
    kind = b"" if piece.kind == NORMAL else record(3, piece.kind)
    return record(PIECES, text + score + kind)


def _parse_piece(message: bytes) -> VocabularyPiece:
    """Parse a piece. Raises ValueError for an empty or too long text, and for a score that is no
    number.
    """
    values = fields(message)
    text = _inside(values.get(1, b""))
    (score,) = struct.unpack("<f", _inside(values.get(2, b"\0\0\0\0")))
    if not 1 <= len(text) <= LONGEST:
        raise ValueError(f"a piece has {len(text):,} bytes")
    if not abs(score) < 1e9:  # nor is it a number
        raise ValueError(f"a piece has the score {score}")
    return VocabularyPiece(text.decode(), score, _number(values, 3, NORMAL))


def fields(message: bytes) -> dict[int, Value]:
    """Return field number -> value of a protobuf message; the last value of a repeated field.
    Raises ValueError for a malformed one.
    """
    return {number: value for number, value, _ in records(message)}


def _inside(value: Value) -> bytes:
    """Return a value that must be bytes. Raises ValueError for a number."""
    if isinstance(value, int):
        raise ValueError("it has a number in place of bytes")
    return value


def _number(fields: dict[int, Value], number: int, default: int) -> int:
    """Return the value of a field that must be a number, or the default. Raises ValueError for
    bytes.
    """
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise ValueError("it has bytes in place of a number")
    return value


def records(message: bytes) -> Iterator[tuple[int, Value, bytes]]:
    """Yield (field number, value, bytes of the whole record) of a protobuf message. Raises
    ValueError where it is cut short, or has a wire type that is not in use.
    """
    place, end = 0, len(message)
    while place < end:
        start = place
        tag, place = _varint_at(message, place)
        value: Value
        # the wire type; groups (3, 4) are obsolete
        match tag & 7:
            case 0:
                value, place = _varint_at(message, place)
            case 2:
                size, place = _varint_at(message, place)
                value, place = message[place : place + size], place + size
            case 1 | 5 as wire:
                size = 8 if wire == FIXED64 else 4
                value, place = message[place : place + size], place + size
            case wire:
                raise ValueError(f"byte {start:,} begins a record of wire type {wire}")
        if place > end:
            raise ValueError(f"it is truncated: the record at byte {start:,} ends at {place:,}")
        yield tag >> 3, value, message[start:place]


def _varint_at(message: bytes, place: int) -> tuple[int, int]:
    """Return the number at `place`, and the position behind it. Raises ValueError for one of more
    than 10 bytes, IndexError at the end.
    """
    value = 0
    for shift in range(0, 70, 7):
        byte = message[place]
        place += 1
        # lowest group first
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError(f"byte {place:,} is in a number of more than 10 bytes")


def varint(value: int) -> bytes:
    """Encode a number as a protobuf varint: 7 bits per byte, lowest first; the highest bit is set
    in all but the last byte.
    """
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def record(number: int, value: Value) -> bytes:
    """Encode a protobuf field with a number or bytes."""
    if isinstance(value, int):
        return varint(number * 8 + VARINT) + varint(value)
    return varint(number * 8 + BYTES) + varint(len(value)) + value


def texts(pieces: Iterable[VocabularyPiece]) -> list[str]:
    """Return the texts of the normal pieces (no control, byte or unknown pieces)."""
    return [piece.text for piece in pieces if piece.kind == NORMAL]
