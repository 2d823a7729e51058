"""Reports of `dolmen vocab` say the numbers of their fields, and sizes are bounded where they are
said to be.
"""

import pytest

from dolmen.data.tokenizer import encoder, load_tokenizer
from dolmen.vocabulary.check import Counts, count, lines_of
from dolmen.vocabulary.config import VocabText, VocabTrainConfig
from dolmen.vocabulary.merge import Merged
from dolmen.vocabulary.train import Sample, Trained, check_size

COUNTS = Counts(tokens=4, characters=10, bytes=14)
TEXT = "2.500 characters and 3.500 bytes per token (4 tokens)"


def test_a_merge_reports_what_was_added_and_left_out():
    plain = Merged(1000, 200, 0, 1, {}, None, COUNTS)
    assert plain.lines() == [
        "1,000 tokens of the base, unchanged; 200 new, from id 1000; 1,200 in total",
        "1 token of the new vocabulary are in the base already",
    ]
    full = Merged(1000, 200, 3, 2, {"are long": 1, "are odd": 1500}, COUNTS, COUNTS)
    assert full.lines() == [
        plain.lines()[0],
        "3 of the new ones are intermediate results of merges",
        "2 tokens of the new vocabulary are in the base already",
        "skipped: 1 token that are long",
        "skipped: 1,500 tokens that are odd",
        f"before: {TEXT}",
        f"after:  {TEXT}",
    ]


def test_a_sample_is_reported_beside_the_whole_text():
    assert Trained("bpe", 1200, 5000, 5000, COUNTS).lines() == [
        "1,200 tokens (bpe), learned from 5,000 bytes",
        f"on that text: {TEXT}",
    ]
    part = Trained("bpe", 1200, 9000, 5000, COUNTS).lines()[0]
    assert part == "1,200 tokens (bpe), learned from 5,000 bytes of 9,000 bytes"


@pytest.mark.parametrize("kind, fixed", [("bpe", 259), ("unigram", 259), ("byte-bpe", 257)])
def test_each_learned_token_needs_a_byte_of_text(kind, fixed):
    """A size that is refused, and the largest that is not; the least that any text allows too."""
    sample = Sample(["x" * 40], 40, 40, frozenset("x"))
    config = {"kind": kind, "to": "to", "data": VocabText(("a.txt",))}
    check_size(VocabTrainConfig(size=fixed + 40, **config), sample)
    remedy = f"for 41 tokens besides single bytes: use --size {fixed + 4} or less"
    with pytest.raises(ValueError, match=remedy):
        check_size(VocabTrainConfig(size=fixed + 41, **config), sample)
    with pytest.raises(ValueError, match="a.txt contains no text"):
        check_size(VocabTrainConfig(size=fixed + 40, **config), Sample([], 0, 0, frozenset()))
    least = fixed + (1 if kind == "byte-bpe" else 2)
    assert VocabTrainConfig(size=least, **config).size == least
    assert VocabTrainConfig(size=2**24, **config).size == 2**24
    for size in (least - 1, 2**24 + 1):
        with pytest.raises(ValueError, match=f"use --size {least} to 16777216"):
            VocabTrainConfig(size=size, **config)


def test_a_text_is_counted_piece_by_piece(vocabularies):
    tokenizer = load_tokenizer(str(vocabularies("en", "byte-bpe")))
    pieces = ["It was the best\n", "äöü 無名", "x"]
    tokens = sum(len(encoder(tokenizer)(piece)) for piece in pieces)
    assert count(tokenizer, iter(pieces), "text") == Counts(tokens, 23, 30)
    with pytest.raises(ValueError, match="--data.path name: the text has no tokens"):
        count(tokenizer, [], "name")


def test_lines_are_stripped_and_blank_ones_left_out():
    assert lines_of(" a b \n\n\t\nc\r\n  d") == ["a b", "c", "d"] and lines_of("\n") == []
