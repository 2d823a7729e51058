"""Megatron's .bin and .idx: bytes written here by hand, and what is refused of them."""

import struct
from contextlib import nullcontext

import numpy as np
import pytest

from dolmen.files import indexed
from dolmen.files.gate import Refused

# Sequences [1, 2, 3], [4, 5], [6, 7, 8] of uint16; the first is a document, the others another.
BIN = bytes.fromhex("0100 0200 0300 0400 0500 0600 0700 0800")
IDX = bytes.fromhex(
    "4d4d49444944580000"  # MMIDIDX
    "0100000000000000"  # version 1
    "08"  # uint16
    "0300000000000000"  # sequences
    "0300000000000000"  # documents + 1
    "03000000 02000000 03000000"  # lengths
    "0000000000000000 0600000000000000 0a00000000000000"  # where they begin
    "0000000000000000 0100000000000000 0300000000000000"  # documents
)


@pytest.fixture
def pair(tmp_path):
    """pair(bin, idx) -> the .bin, both written."""

    def pair(tokens=BIN, index=IDX):
        file = tmp_path / "a.b_text_document.bin"
        file.write_bytes(tokens)
        file.with_suffix(".idx").write_bytes(index)
        return file

    return pair


def test_the_golden_bytes_are_read(pair):
    found = indexed.read(pair())
    assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8] and found.tokens.dtype == np.uint16
    assert found.lengths.tolist() == [3, 2, 3] and found.offsets.tolist() == [0, 3, 5, 8]
    assert found.documents.tolist() == [0, 1, 3] and found.modes is None
    assert indexed.read(pair(index=IDX + b"\0\1\0")).modes.tolist() == [0, 1, 0]


@pytest.mark.parametrize("modes", [None, np.array([0, 1, 0])])
def test_the_golden_bytes_are_written(tmp_path, modes):
    file, tokens = tmp_path / "out.bin", np.arange(1, 9)
    lengths, documents = np.array([3, 2, 3]), np.array([0, 1, 3])
    blocks = [tokens[:4], tokens[4:]]
    indexed.save(file, blocks, indexed.dtype_of(65_499), lengths, documents, modes)
    assert len(IDX) == 94 and file.read_bytes() == BIN
    assert file.with_suffix(".idx").read_bytes() == IDX + (b"" if modes is None else b"\0\1\0")
    assert sorted(tmp_path.iterdir()) == [file, file.with_suffix(".idx")]
    with pytest.raises(ValueError, match="out.bin exists"):
        indexed.save(file, blocks, indexed.dtype_of(65_499), lengths, documents)


def test_nothing_is_left_of_what_fails(tmp_path):
    def blocks():
        yield np.arange(4)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        indexed.save(tmp_path / "a.bin", blocks(), np.dtype("<u2"), np.array([8]), np.array([0, 1]))
    with pytest.raises(ValueError, match="a document has 2,147,483,648 tokens"):
        indexed.save(tmp_path / "a.bin", [], np.dtype("<u2"), np.array([1 << 31]), np.array([0, 1]))
    assert not list(tmp_path.iterdir())


def test_a_document_may_be_just_as_long_as_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "MOST", 3)
    for length, name in ((3, "a.bin"), (4, "b.bin")):
        tokens, file = np.arange(length), tmp_path / name
        with nullcontext() if length == 3 else pytest.raises(ValueError, match="holds 3 at most"):
            indexed.save(file, [tokens], np.dtype("<u2"), np.array([length]), np.array([0, 1]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


TYPES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}


@pytest.mark.parametrize("code", TYPES)
def test_every_type_of_token(pair, code):
    each = struct.calcsize(TYPES[code])
    begins = struct.pack("<3q", 0, 3 * each, 5 * each)
    index = IDX[:17] + bytes([code]) + IDX[18:46] + begins + IDX[70:]
    found = indexed.read(pair(struct.pack(f"<8{TYPES[code]}", *range(1, 9)), index))
    assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8] and found.tokens.itemsize == each


def test_the_type_follows_from_the_vocabulary():
    assert indexed.dtype_of(65_499) == np.uint16 and indexed.dtype_of(65_500) == np.int32


def test_empty_sequences_documents_and_data_sets(pair):
    index = IDX[:18] + struct.pack("<QQ3i3q4q", 3, 4, 3, 0, 5, 0, 6, 6, 0, 2, 2, 3)
    found = indexed.read(pair(index=index))
    assert found.lengths.tolist() == [3, 0, 5] and found.documents.tolist() == [0, 2, 2, 3]
    empty = indexed.read(pair(b"", IDX[:18] + struct.pack("<QQq", 0, 1, 0)))
    assert empty.offsets.tolist() == [0] and empty.tokens.tolist() == []


def at(offset: int, form: str, value: int) -> bytes:
    """IDX with another value there."""
    return IDX[:offset] + struct.pack(f"<{form}", value) + IDX[offset + struct.calcsize(form) :]


@pytest.mark.parametrize(
    "index, message",
    [
        (b"MMIDIDX\0", "does not start with MMIDIDX"),
        (b"TNTIDX\0\0" + IDX[8:], "does not start with MMIDIDX"),
        (at(9, "Q", 2), "has version 2: only 1 is"),
        (at(17, "B", 0), "has tokens of type 0: it must be 1 to 8"),
        (at(17, "B", 9), "has tokens of type 9"),
        (at(18, "Q", 1 << 63), "has 94 bytes, and of 9,223,372,036,854,775,808 sequences"),
        (at(26, "Q", 4), "and of 3 sequences and 4 ends of documents 102, or 105 with modes"),
        (IDX[:-8], "has 86 bytes, and of 3 sequences and 3 ends of documents 94"),
        (IDX + b"\0", "has 95 bytes"),
        (at(38, "i", -2), "sequence 1 has -2 tokens"),
        (at(38, "i", 3), "sequence 2 begins at byte 10, and those before it, of 2 bytes per token"),
        (at(42, "i", 2**31 - 1), "has 16 bytes, and its index 2,147,483,652 tokens of 2: 4,294,96"),
        (
            at(54, "q", -6),
            "sequence 1 begins at byte -6, and those before it, of 2 bytes per token",
        ),
        (at(54, "q", 7), "sequence 1 begins at byte 7, and .* end at 6"),
        (at(62, "q", 1 << 40), "sequence 2 begins at byte 1,099,511,627,776"),
        (at(70, "q", 1), "its documents are sequences 1 to 3, but there are 0 to 3"),
        (at(86, "q", 4), "its documents are sequences 0 to 4, but there are 0 to 3"),
        (at(78, "q", 5), "document 1 goes from sequence 5 back to 3"),
        (at(17, "B", 4), "sequence 1 begins at byte 6, and .* of 4 bytes per token, end at 12"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(pair, index, message):
    with pytest.raises(Refused, match=message) as error:
        indexed.read(pair(index=index))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tokens", [BIN[:-2], BIN + b"\0", b""])
def test_tokens_that_are_not_those_of_the_index_are_refused(pair, tokens):
    with pytest.raises(Refused, match=rf"bin: has {len(tokens)} bytes, and its index 8 tokens"):
        indexed.read(pair(tokens))


def test_what_is_a_data_set(pair, tmp_path):
    file = pair()
    assert indexed.is_indexed(file) and not indexed.is_indexed(file.with_suffix(".idx"))
    file.with_suffix(".idx").write_bytes(b"of something else")
    assert not indexed.is_indexed(file)
    file.with_suffix(".idx").unlink()
    assert not indexed.is_indexed(file)
    with pytest.raises(Refused, match="idx: cannot be read"):
        indexed.read(file)


@pytest.mark.parametrize("at", range(4))
def test_the_first_sequence_that_is_wrong_is_named(tmp_path, at):
    """Of sequences, one of which is empty, and of documents, the number and its bytes."""
    lengths, firsts = np.array([3, 0, 2, 5], np.int32), np.array([0, 1, 2, 3, 4])
    starts = (np.cumsum(lengths) - lengths) * 2
    indexed.check_sequences(tmp_path, lengths, starts, 2)
    indexed.check_documents(tmp_path, firsts, 4)
    wrong = lengths.copy()
    wrong[at:] = -1
    with pytest.raises(Refused, match=f"sequence {at} has -1 tokens"):
        indexed.check_sequences(tmp_path, wrong, starts, 2)
    moved = starts.copy()
    moved[at:] += 1
    text = f"sequence {at} begins at byte {moved[at]}, and those before it, .* end at {starts[at]}:"
    with pytest.raises(Refused, match=text):
        indexed.check_sequences(tmp_path, lengths, moved, 2)
    if at in (1, 2):
        back = firsts.copy()
        back[at] = 4
        with pytest.raises(Refused, match=f"document {at} goes from sequence 4 back to {at + 1}"):
            indexed.check_documents(tmp_path, back, 4)
    with pytest.raises(Refused, match="its documents are sequences 0 to 4, but there are 0 to 5"):
        indexed.check_documents(tmp_path, firsts, 5)
    with pytest.raises(Refused, match="its documents are sequences 1 to 4"):
        indexed.check_documents(tmp_path, firsts[1:], 4)
