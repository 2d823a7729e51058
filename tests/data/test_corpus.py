"""The cache: what is on disk, when it is used again, when it is built again; and which documents
are held out.
"""

import json
import os
import threading

import numpy as np
import pytest

from dolmen.data import corpus as corpora
from dolmen.data.corpus import open_corpus
from dolmen.data.sources import resolve
from dolmen.data.stream import TokenStream


@pytest.fixture
def built(tmp_path, tokenizer, monkeypatch):
    """open(path, ...) -> Corpus, and how often something was tokenised."""
    builds = []
    build = corpora.build
    monkeypatch.setattr(corpora, "build", lambda *args: builds.append(1) or build(*args))

    def open_(path, end_of_text=0, field="text", cache="cache"):
        (source,) = resolve([str(path)])
        return open_corpus(
            source, tokenizer, end_of_text, field, tmp_path / cache, 2, progress=False
        )

    return open_, builds


def test_tokens_and_end_of_text(documents, built, tokenizer):
    open_, _ = built
    corpus = open_(documents)
    texts = [file.read_text() for file in sorted(documents.iterdir())]
    assert corpus.document_count == 40 and corpus.byte_count == sum(map(len, texts))
    assert (
        corpus.token_count == len(corpus.tokens) == corpus.offsets[-1]
        and corpus.tokens.dtype == np.uint16
    )
    for index, text in enumerate(texts):
        assert corpus.doc(index)[-1] == 0 and 0 not in corpus.doc(index)[:-1]
        assert tokenizer.decode(corpus.doc(index)[:-1]) == text
        assert corpus.file(index).read_text() == text
    assert open_(documents, end_of_text=7, cache="other").doc(3)[-1] == 7


def test_long_documents_in_many_threads_keep_their_order(tmp_path, built, tokenizer, monkeypatch):
    open_, _ = built
    text = "".join(f"{i} lines\n" for i in range(200_000))  # 2.5 MB: eight pieces
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in ("before", text, "after"))
    )
    corpus = open_(tmp_path / "a.jsonl")
    assert [
        tokenizer.decode(corpus.doc(i)[:-1]) == t for i, t in enumerate(("before", text, "after"))
    ] == [True] * 3
    assert corpus.file(1) is None


def test_cache_is_reused_until_something_changes(documents, built, tokenizer):
    open_, builds = built
    first = open_(documents)
    assert open_(documents).content == first.content and len(builds) == 1
    touched = documents / "05.txt"
    os.utime(touched, ns=(1, 1))
    assert open_(documents).content == first.content and len(builds) == 2, "same text, other time"
    touched.write_text("other text\n")
    assert open_(documents).content != first.content and len(builds) == 3
    (documents / "99.py").write_text("x = 1\n")
    assert open_(documents).document_count == 41 and len(builds) == 4
    open_(documents, end_of_text=5)
    assert len(builds) == 5
    open_(documents, field="body")
    assert len(builds) == 6


@pytest.mark.parametrize("damage", ["tokens.bin", "offsets.npy", "index.json"])
def test_damaged_cache_is_built_again(documents, built, tmp_path, damage):
    open_, builds = built
    tokens = np.array(open_(documents).tokens)
    (file,) = tmp_path.glob(f"cache/corpora/*/{damage}")
    file.write_bytes(file.read_bytes()[:-3])
    assert np.array_equal(open_(documents).tokens, tokens) and len(builds) == 2
    file.unlink()
    assert np.array_equal(open_(documents).tokens, tokens) and len(builds) == 3


def test_a_failed_build_leaves_nothing(tmp_path, built):
    open_, _ = built
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 100 + "{")
    with pytest.raises(ValueError, match="line 101"):
        open_(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="no text in 1 files"):
        open_(tmp_path / "b.jsonl")
    assert list((tmp_path / "cache" / "corpora").iterdir()) == []


def test_several_at_once_build_once(documents, built):
    open_, builds = built
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(open_(documents).token_count))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1 and len(builds) == 1


def test_stream_reads_like_one_array(documents, built):
    corpus = built[0](documents)
    odd, seven = (
        TokenStream.of(corpus.tokens, corpus.offsets[:-1][mask], corpus.offsets[1:][mask])
        for mask in (np.arange(40) % 3 > 0, np.arange(40) == 7)
    )
    plain = np.concatenate([corpus.doc(i) for i in range(40) if i % 3])
    other = TokenStream.of(np.arange(1000, 2000), np.array([5, 100]), np.array([10, 900]))
    joined = TokenStream.join([odd, other, seven])
    expected = np.concatenate([plain, np.arange(1005, 1010), np.arange(1100, 1900), corpus.doc(7)])
    assert len(odd.starts) == 13 and len(joined) == len(expected)
    for start in (0, 1, len(plain) - 2, len(plain), len(expected) - 5, -1):
        assert np.array_equal(
            joined.read(start, 900), np.take(expected, np.arange(start, start + 900), mode="wrap")
        )
