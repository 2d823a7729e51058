"""`dolmen tokenize`: text as a data set of Megatron, whose bytes are made here from the text."""

import struct

import numpy as np
import pytest

import dolmen
from dolmen.cli import main
from dolmen.data import indexed_export
from dolmen.data.config import TokenConfig, TokenizeConfig


@pytest.fixture
def tokenize(tmp_path, tokenizer_folder):
    def tokenize(to, *path, **options):
        data = {"tokenizer": tokenizer_folder, "cache": str(tmp_path / "cache"), **options}
        config = TokenizeConfig(str(to), TokenConfig(tuple(map(str, path)), **data))
        return indexed_export.tokenize(config, progress=False)

    return tokenize


def by_hand(documents):
    """The bytes of .bin and .idx of documents of one sequence each."""
    tokens = b"".join(struct.pack(f"<{len(ids)}H", *ids) for ids in documents)
    n, lengths = len(documents), [len(ids) for ids in documents]
    begins = [2 * sum(lengths[:i]) for i in range(n)]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, n, n + 1)
    return tokens, head + struct.pack(f"<{n}i{n}q{n + 1}q", *lengths, *begins, *range(n + 1))


def test_text_becomes_the_bytes_that_megatron_writes(
    documents, tokenize, tokenizer, tmp_path, load, monkeypatch
):
    monkeypatch.setattr(indexed_export, "BLOCK", 100)
    made = tokenize(tmp_path / "out" / "my.corpus", documents)
    assert made.file == tmp_path / "out" / "my.corpus.bin"
    texts = [file.read_text() for file in sorted(documents.iterdir())]
    ids = [[*tokenizer.encode(text), 0] for text in texts]
    tokens, index = by_hand(ids)
    assert made.file.read_bytes() == tokens and made.file.with_suffix(".idx").read_bytes() == index
    assert made[1:] == (sum(map(len, ids)), 40, "uint16")
    stream = load(made.file, validation_fraction=0.0).mixture.parts[0].stream
    assert stream.read(0, len(stream)).tolist() == sum(ids, [])
    orders = [
        load(path, order="megatron", steps=20).mixture.windows(0, 80)
        for path in (documents, made.file)
    ]
    assert np.array_equal(*orders), "the order is that of the text"


def test_a_data_set_is_copied(data_set, tokenize, tmp_path):
    parts = [[[5, 6], [7, 0]], [[8, 9, 0]]], [[[1, 0]], [[2], [3, 0]]]
    whole = data_set("whole.bin", [*parts[0], *parts[1]])
    files = [
        data_set(f"{i}.bin", each, dtype)
        for i, (each, dtype) in enumerate(zip(parts, ("<i4", "u1"), strict=True))
    ]
    for name, of in (("copy", [whole]), ("merged.bin", files)):
        made = tokenize(tmp_path / name, *of)
        assert made.file.read_bytes() == whole.read_bytes(), name
        assert made.file.with_suffix(".idx").read_bytes() == whole.with_suffix(".idx").read_bytes()


def test_nothing_is_written_over(documents, tokenize, tmp_path):
    (tmp_path / "a.idx").write_text("mine")
    with pytest.raises(ValueError, match="a.idx exists: give another name"):
        tokenize(tmp_path / "a", documents)
    with pytest.raises(ValueError, match="--data.path: weights are for training mixtures"):
        tokenize(tmp_path / "b", f"1:{documents}")
    with pytest.raises(ValueError, match="no tokenizer: use --data.tokenizer"):
        tokenize(tmp_path / "b", documents, tokenizer=None)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] in "ab") == ["a.idx"]


def test_the_verb_and_the_function(documents, tokenizer_folder, tmp_path, capsys):
    options = ["--data.tokenizer", tokenizer_folder, "--data.cache", str(tmp_path / "cache")]
    words = ["tokenize", "--data.path", str(documents), *options, "--to", str(tmp_path / "a")]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path / 'a.bin'} and its .idx: ")
    assert main(words) == 2
    assert "a.bin exists: give another name" in capsys.readouterr().err
    kept = {"tokenizer": tokenizer_folder, "cache": tmp_path / "cache", "progress": False}
    file = dolmen.tokenize(documents, tmp_path / "b", **kept)
    assert file.read_bytes() == (tmp_path / "a.bin").read_bytes()
    with pytest.raises(ValueError, match="b.bin exists"):
        dolmen.tokenize(documents, to=tmp_path / "b", **kept)
