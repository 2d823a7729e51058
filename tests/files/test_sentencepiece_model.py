"""tokenizer.model, read by its wire format: beside sentencepiece's own protobuf, and damaged."""

import io
import random

import mutations
import pytest
import sentencepiece
from google.protobuf.internal import encoder
from sentencepiece import sentencepiece_model_pb2

from dolmen.files import sentencepiece_model, tokenizer_files
from dolmen.files.gate import Refused
from dolmen.files.sentencepiece_model import VocabularyPiece, record


def made(**options) -> bytes:
    chance, out = random.Random(0), io.BytesIO()
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 6))) for _ in range(40)]
    lines = [" ".join(chance.choices(words, k=9)) for _ in range(60)]
    known = dict(vocab_size=300, model_type="bpe", byte_fallback=True, minloglevel=2)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, **known | options
    )
    return out.getvalue()


@pytest.fixture(scope="module")
def content():
    return made(user_defined_symbols=["<sep>"])


def test_it_is_read_as_protobuf_reads_it(content):
    theirs = sentencepiece_model_pb2.ModelProto()
    theirs.ParseFromString(content)
    model = sentencepiece_model.parse(content, "x")
    assert model.pieces == tuple(VocabularyPiece(p.piece, p.score, p.type) for p in theirs.pieces)
    assert model.charsmap == theirs.normalizer_spec.precompiled_charsmap != b""
    assert sentencepiece_model.charsmap(content) == model.charsmap
    assert tokenizer_files.longest_replacement(model.charsmap) == 18, "of U+FDFA, by NFKC"
    assert (model.kind, model.dummy_prefix, model.remove_spaces) == ("bpe", True, True)
    assert model.byte_fallback and model.pieces[model.unknown].text == "<unk>"


def test_pieces_are_added_behind_and_nothing_else_changes(content):
    """But for what older models test themselves by, with the vocabulary that they were."""
    model = sentencepiece_model.parse(content + record(4, b"self test"), "x")
    assert model.content == content
    grown = sentencepiece_model.add_pieces(
        model, [VocabularyPiece("\u5929\u6c14", -999.5), VocabularyPiece("<pad>", 0, 3)]
    )
    assert grown.startswith(model.content)
    theirs = sentencepiece_model_pb2.ModelProto()
    theirs.ParseFromString(grown)
    assert theirs.trainer_spec.vocab_size == len(theirs.pieces) == 302
    assert theirs.trainer_spec.byte_fallback and theirs.trainer_spec.model_type == 2
    assert (theirs.pieces[300].piece, theirs.pieces[300].score) == ("\u5929\u6c14", -999.5)
    assert theirs.pieces[301].type == 3
    loaded = sentencepiece.SentencePieceProcessor(model_proto=grown)
    assert loaded.encode("\u5929\u6c14")[-1] == 300
    with pytest.raises(ValueError, match="'<unk>' is a piece already"):
        sentencepiece_model.add_pieces(model, [VocabularyPiece("<unk>", 0)])


def test_other_models_are_refused(content):
    for options, reported in (
        ({"model_type": "char", "vocab_size": 280, "hard_vocab_limit": False}, "of type 4"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    ):
        with pytest.raises(Refused, match=reported):
            sentencepiece_model.parse(made(**options), "x")
    first = sentencepiece_model.parse(content, "x").pieces[0]
    twice = content + record(1, record(1, first.text.encode()))
    for damaged, reported in (
        (b"", "it has 0 pieces"),
        (twice, "a duplicate piece"),
        (content + record(1, record(1, b"<?>") + record(3, 2)), "it has 2 unknown pieces"),
        (content[:-5], "truncated"),
        (content + b"\x0b", "wire type 3"),
        (content + b"\x0a" + b"\xff" * 11, "more than 10 bytes"),
        (content + record(1, 5), "it has a number in place of bytes"),
        (content + record(1, record(1, b"\xff\xfe")), "is not a sentencepiece model"),
        (content + record(1, b"\x0a\x01z\x15\x00\x00\xc0\x7f"), "the score nan"),
    ):
        with pytest.raises(Refused, match=reported):
            sentencepiece_model.parse(damaged, "x")


def test_a_damaged_one_is_refused_or_read_and_raises_nothing_else():
    refused, small = 0, made(normalization_rule_name="identity")
    for number in range(300):
        try:
            sentencepiece_model.parse(mutations.damaged(small, f"model {number}"), "x")
        except Refused:
            refused += 1
    assert 50 < refused < 300


def test_numbers_are_those_of_protobuf():
    """At each length's ends, and between."""
    ends = [value for bits in range(0, 64, 7) for value in (2**bits - 1, 2**bits, 2**bits + 1)]
    for value in (*range(300), *ends):
        assert sentencepiece_model.varint(value) == encoder._VarintBytes(value)
    message = sentencepiece_model.record(5, 300) + sentencepiece_model.record(6, b"ab" * 100)
    assert message == b"\x28\xac\x02" + b"\x32\xc8\x01" + b"ab" * 100
