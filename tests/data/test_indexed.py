"""Megatron's .bin and .idx as data: trained and validated on where they lie."""

import numpy as np
import pytest

from dolmen.data import indexed as corpora
from dolmen.data.config import DataConfig
from dolmen.data.inputs import check_inputs
from dolmen.data.sources import resolve_sources


def numbered(count: int, length: int = 30, first: int = 1) -> list[list[list[int]]]:
    """Different documents of a sequence each, whose last token is 0, the end of text."""
    rng = np.random.default_rng(first)
    return [[[*rng.integers(1, 290, length + i).tolist(), 0]] for i in range(count)]


def read(stream):
    return stream.read(0, len(stream)).tolist()


def flat(documents):
    return [token for document in documents for one in document for token in one]


def test_tokens_are_read_where_they_lie(data_set, load):
    documents = numbered(40)
    file = data_set("corpus.bin", documents)
    loader = load(file, validation_fraction=0.1)
    training, held = read(loader.mixture.parts[0].stream), read(loader.validation.stream)
    assert sorted(training + held) == sorted(flat(documents)) and 0 < len(held) < len(training)
    kept = [one for one in documents if str(flat([one]))[1:-1] in str(training)]
    assert flat(kept) == training, "whole documents, in order"
    assert np.shares_memory(
        loader.mixture.parts[0].stream.memory[0], loader.validation.stream.memory[0]
    )
    assert loader.validation_bytes is None and loader.validation_files == ()
    assert "40 documents" in loader.fingerprint()["data 1"]


@pytest.mark.parametrize("dtype", ["u1", "<i2", "<i4", "<i8"])
def test_the_type_of_the_tokens_changes_nothing(data_set, load, dtype):
    documents = [[[token % 100 for token in flat([one])]] for one in numbered(20)]
    loaders = [load(data_set(f"{kind[-2:]}.bin", documents, kind)) for kind in ("<u2", dtype)]
    first, second = (loader.batch(3).tokens.tolist() for loader in loaders)
    prints = [loader.fingerprint()["data 1"] for loader in loaders]
    assert first == second and prints[0] == prints[1]


def test_documents_are_several_sequences(data_set, load):
    one = numbered(12)
    split = [[[*document[0][:7]], [*document[0][7:]], []] for document in one]
    loaders = [load(data_set(f"{i}.bin", each)) for i, each in enumerate((one, [*split, []]))]
    assert loaders[0].batch(1).tokens.tolist() == loaders[1].batch(1).tokens.tolist()
    assert loaders[0].fingerprint() == loaders[1].fingerprint()


def test_how_it_is_named(data_set, tmp_path):
    file = data_set("my.corpus_text_document.bin", numbered(4))
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    names = (file, file.with_suffix(".idx"), file.with_suffix(""), tmp_path, f"{tmp_path}/*corpus*")
    for name in names:
        (source,) = resolve_sources([str(name)])
        assert source.indexed == (file,) and not source.files and not source.text, name
    assert source.paths == [file, file.with_suffix(".idx")]
    (source,) = resolve_sources([str(tmp_path)])
    assert source.left_out == (f"1 .bin files in {tmp_path}, 100.0% of the bytes",)
    with pytest.raises(ValueError, match=r"cannot read .bin; .* Megatron's .bin with its .idx"):
        resolve_sources([str(tmp_path / "pytorch_model.bin")])
    with pytest.raises(FileNotFoundError, match="nothing.bin: no such file"):
        resolve_sources([str(tmp_path / "nothing.bin")])


def test_several_are_one_corpus_and_mix_with_text(data_set, documents, load):
    a, b = numbered(20), numbered(20, first=2)
    files = [data_set(f"{name}.bin", each) for name, each in (("a", a), ("b", b))]
    loader = load(*files, validation_fraction=0.0)
    stream = loader.mixture.parts[0].stream
    assert read(stream) == flat(a) + flat(b) and len(stream.starts) == 2
    both = load(files[0], documents, validation_fraction=0.0)
    text = load(documents, validation_fraction=0.0)
    assert read(both.mixture.parts[0].stream) == read(text.mixture.parts[0].stream) + flat(a)
    weighed = load(f"3:{files[0]}", f"1:{documents}")
    assert weighed.validation_bytes is None and len(weighed.held_out) == 2
    assert "documents" in weighed.documents(0)[0]


def test_copies_are_held_out_of_all(data_set, load):
    documents = numbered(30)
    file = data_set("a.bin", documents)
    judge = data_set("b.bin", documents[:5], "<i4")
    loader = load(file, validation=str(judge))
    assert read(loader.mixture.parts[0].stream) == flat(documents[5:])
    assert read(loader.validation.stream) == flat(documents[:5])
    with pytest.raises(ValueError, match="all of --data.path .* is also in --data.validation"):
        load(judge, validation=str(file))


def test_the_end_of_one_document_is_held_out(data_set, load):
    loader = load(data_set("a.bin", numbered(1, 400)), validation_fraction=0.1)
    assert loader.validation_tokens == 40 and loader.validation_bytes is None
    assert "the last 40 of 401 tokens" in loader.description.validation


def test_a_document_of_several_blocks_has_the_hash_of_one(data_set, load, monkeypatch):
    file, prints = data_set("a.bin", numbered(9, 100)), []
    for number, block in enumerate((1 << 20, 64, 7)):
        monkeypatch.setattr(corpora, "BLOCK", block)
        prints.append(load(file, cache=str(file.parent / f"cache{number}")).fingerprint())
    assert prints[0] == prints[1] == prints[2]


def test_the_end_of_text_is_looked_for(data_set, load):
    cut = [[document[0][:-1]] for document in numbered(8)]
    reported = load(data_set("a.bin", [*cut, *numbered(2, first=3)])).description.changes
    (line,) = [line for line in reported if "end-of-text" in line]
    assert line.startswith("8 of 10 documents of ") and line.endswith("end-of-text token (0)")


def test_hashes_are_kept_until_a_file_changes(data_set, load, monkeypatch):
    file, made = data_set("a.bin", numbered(9)), []
    hashed = corpora.hash_documents
    monkeypatch.setattr(corpora, "hash_documents", lambda *a: made.append(1) or hashed(*a))
    first = load(file).fingerprint()
    assert load(file).fingerprint() == first and made == [1]
    tokens = np.memmap(file, "<u2", "r+")
    tokens[3] = 7
    tokens.flush()
    assert load(file).fingerprint() != first and made == [1, 1]


def refused(file, tokenizer_folder, reported, **options):
    config = DataConfig((str(file),), cache=str(file.parent / "cache"), **options)
    with pytest.raises(ValueError, match=reported) as error:
        check_inputs(config, tokenizer_folder, 300, 16)
    assert "\n" not in str(error.value)


def test_what_is_no_text_is_refused(data_set, tokenizer_folder, load):
    documents = numbered(4)
    floats = data_set("f.bin", documents, "<f4")
    refused(floats, tokenizer_folder, "f.bin has dtype float32, but token ids are integers")
    modes = data_set("m.bin", documents, modes=np.array([0, 0, 2, 0]))
    refused(modes, tokenizer_folder, "m.bin: sequence 2 has mode 2: only")
    load(data_set("z.bin", documents, modes=np.zeros(4)))
    refused(data_set("e.bin", [[[]]]), tokenizer_folder, "e.bin: no tokens in 1 sequences")
    good = data_set("g.bin", documents)
    refused(
        good, tokenizer_folder, "bpe:300 trains on text, but .*g.bin is tok", tokenizer="bpe:300"
    )
    good.write_bytes(good.read_bytes()[:-1])
    refused(good, tokenizer_folder, r"g.bin: has 259 bytes, and its index 130 tokens of 2: 260")
    with pytest.raises(
        ValueError, match="o.bin: token 31 is 300, but the tokenizer has 300 tokens: use"
    ):
        load(data_set("o.bin", [documents[0], [[300]]]))
    with pytest.raises(ValueError, match="n.bin: token 31 is -1, but the tokenizer has 300"):
        load(data_set("n.bin", [documents[0], [[-1]]], "<i4"))
    with pytest.raises(ValueError, match="has 2 tokens to train on, fewer than one window"):
        load(data_set("s.bin", [[[5, 0]]]), validation_fraction=0.0)
