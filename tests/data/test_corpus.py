"""The cache: what is on disk, when it is used again, when it is built again; and which documents
are held out.
"""

import errno
import fcntl
import json
import os
import threading
import time

import datasets
import numpy as np
import pytest

from dolmen.core.filesystem import hold_lock
from dolmen.data import corpus as corpora
from dolmen.data import token_cache
from dolmen.data.corpus import open_text
from dolmen.data.mixture import TokenStream
from dolmen.data.sources import resolve_sources
from dolmen.data.tokenizer import load_tokenizer, train_bpe


@pytest.fixture
def built(tmp_path, tokenizer, monkeypatch):
    """open(path, ...) -> Corpus, and how often something was tokenised."""
    builds = []
    build = corpora.build_corpus
    monkeypatch.setattr(corpora, "build_corpus", lambda *args: builds.append(1) or build(*args))

    def open_(path, end_of_text=0, field="text", cache="cache", tokens=tokenizer):
        (source,) = resolve_sources([str(path)])
        return open_text(source, tokens, end_of_text, field, tmp_path / cache, 2, progress=False)

    return open_, builds


def test_tokens_and_end_of_text(documents, built, tokenizer):
    open_, _ = built
    corpus = open_(documents)
    texts = [file.read_text() for file in sorted(documents.iterdir())]
    assert corpus.document_count == 40 and corpus.byte_count == sum(map(len, texts))
    assert (
        corpus.token_count == len(corpus.memory[0]) == corpus.offsets[-1]
        and corpus.memory[0].dtype == np.uint16
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


def test_cache_is_reused_until_something_changes(documents, built, tmp_path):
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
    train_bpe(["other text"], 260, tmp_path / "other", progress=False)
    open_(documents, tokens=load_tokenizer(str(tmp_path / "other")))
    assert len(builds) == 7


def test_a_shard_of_the_hub_that_changed_is_noticed(built, tmp_path, monkeypatch):
    """The same path and size, and the same time of modification."""
    open_, builds = built
    shard = tmp_path / "shard.arrow"
    shard.write_text("one")

    class Table(datasets.Dataset):
        cache_files = [{"filename": str(shard)}]

    table = Table(datasets.Dataset.from_dict({"text": ["a text", "another"]}).data)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    open_("org/name")
    assert open_("org/name").document_count == 2 and len(builds) == 1
    before = shard.stat()
    shard.write_text("two")
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    open_("org/name")
    assert len(builds) == 2


@pytest.mark.parametrize("damage", [*corpora.FORM.files, "index.json"])
def test_damaged_cache_is_built_again(documents, built, tmp_path, damage, capsys):
    open_, builds = built
    tokens = np.array(open_(documents).memory[0])
    (file,) = tmp_path.glob(f"cache/corpora/*/{damage}")
    whole = file.read_bytes()
    places = [0, len(whole) // 2, len(whole) - 2]
    for number, data in enumerate(
        [
            whole[:-3],
            None,
            *(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in places),
        ]
    ):
        file.unlink()
        if data is not None:
            file.write_bytes(data)
        assert np.array_equal(open_(documents).memory[0], tokens) and len(builds) == number + 2
    open_(documents)
    assert len(builds) == 6, "and then it is whole"


def test_damage_is_told(documents, built, tmp_path, tokenizer, capsys):
    open_, _ = built
    open_(documents)
    (file,) = tmp_path.glob("cache/corpora/*/tokens.bin")
    data = bytearray(file.read_bytes())
    data[10:12] = b"\xff\xff"
    file.write_bytes(data)
    (source,) = resolve_sources([str(documents)])

    def again(verify):
        return open_text(source, tokenizer, 0, "text", tmp_path / "cache", 2, True, verify=verify)

    assert again(False).memory[0].max() == 65535, "who does not start the run trusts who does"
    capsys.readouterr()
    assert again(True).memory[0].max() < 300
    output = capsys.readouterr().err
    assert (
        "the cached tokens are damaged and are built again" in output
        and "tokens.bin: its dig" in output
    )


def test_folders_of_two_corpora_that_changed_places_are_seen(documents, built, tmp_path):
    """Each is whole, and its name is that of the other's text."""
    open_, builds = built
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("another text\n")
    contents = [open_(folder).content for folder in (documents, tmp_path / "other")]
    one, two = tmp_path.glob("cache/corpora/*/")
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    assert [open_(folder).content for folder in (documents, tmp_path / "other")] == contents
    assert len(builds) == 4, "both are made anew"


def test_an_index_that_says_other_numbers_is_not_believed(documents, built, tmp_path):
    open_, builds = built
    open_(documents)
    (file,) = tmp_path.glob("cache/corpora/*/index.json")
    index = json.loads(file.read_text())
    for change in ({"tokens": 5}, {"dtype": "<u4"}, {"digests": {}}, {"sizes": {}}):
        file.write_text(json.dumps({**index, **change}))
        open_(documents)
    index = {**index, "vocabulary": 200}
    index.pop("digest")
    file.write_text(json.dumps({**index, "digest": token_cache.digest_of(index)}))
    assert open_(documents).memory[0].max() < 300 and len(builds) == 6


def test_the_digest_of_an_index_does_not_depend_on_the_order_of_its_keys():
    index = {"tokens": 5, "digests": {"b": 1, "a": 2}}
    turned = {"digests": {"a": 2, "b": 1}, "tokens": 5}
    assert token_cache.digest_of(index) == token_cache.digest_of(turned)
    assert token_cache.digest_of({**index, "tokens": 6}) != token_cache.digest_of(index)


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_cache_is_built_on_a_file_system_without_locks(tmp_path, monkeypatch, error):
    def flock(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = tmp_path / ("0" * 32)
    with hold_lock(tmp_path / f"{folder.name}.lock"), token_cache.building(folder) as part:
        (part / "text").write_text("a")
    assert [path.name for path in tmp_path.rglob("*")] == [folder.name, "text"]


def test_other_text_of_the_same_size_and_time_is_noticed(documents, built):
    open_, builds = built
    file = documents / "05.txt"
    before, content = file.stat(), open_(documents).content
    file.write_text(file.read_text().replace("line", "LINE"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    now = file.stat()
    assert (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert open_(documents).content != content and len(builds) == 2


def test_what_a_killed_tokenisation_leaves_is_swept(documents, built, tmp_path):
    open_, _ = built
    corpora_folder = tmp_path / "cache" / "corpora"
    key = "0123456789abcdef" * 2
    killed, alive, foreign, mixed = (
        corpora_folder / name
        for name in (f"{key}.abcdefg1", f"{key}.abcdefg2", "mine", f"{key}.x2345678")
    )
    for folder in (killed, alive, foreign, mixed):
        folder.mkdir(parents=True)
        (folder / "tokens.bin").write_bytes(b"12")
    for folder in (killed, alive, foreign):
        (folder / token_cache.MARK).touch()
    (corpora_folder / f"{key}.lock").touch()
    (corpora_folder / "notes.lock").touch()
    with open(alive / token_cache.MARK, "r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        open_(documents)
    left = {path.name for path in corpora_folder.iterdir()}
    assert not killed.exists() and f"{key}.lock" not in left
    assert {alive.name, "mine", "notes.lock", mixed.name} <= left and len(left) == 5


def test_a_file_of_somebody_in_a_left_folder_stays(tmp_path):
    folder = tmp_path / ("bpe-300-" + "0" * 24 + ".abcdefgh")
    (folder / "mine").mkdir(parents=True)
    (folder / token_cache.MARK).touch()
    token_cache.sweep(tmp_path)
    assert (folder / "mine").is_dir()


def test_a_build_is_under_its_lock_until_it_has_its_name(tmp_path):
    folder = tmp_path / ("0" * 32)
    with token_cache.building(folder) as part:
        (part / "a").touch()
        token_cache.sweep(tmp_path)
        assert (part / "a").exists()
    assert [path.name for path in folder.iterdir()] == ["a"]
    with pytest.raises(KeyError), token_cache.building(tmp_path / ("1" * 32)):
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["0" * 32]


def test_a_failed_build_leaves_nothing(tmp_path, built):
    open_, _ = built
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 100 + "{")
    with pytest.raises(ValueError, match="line 101"):
        open_(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="no text in 1 file and 0 data sets"):
        open_(tmp_path / "b.jsonl")
    assert list((tmp_path / "cache" / "corpora").iterdir()) == []


def test_several_at_once_build_once(documents, built, monkeypatch):
    open_, builds = built
    found, load, lock = [], np.load, threading.Lock()

    def alone(*given, **named):
        """numpy reads a header by ast.literal_eval, which in Python 3.11 may fail in two threads"""
        with lock:
            return load(*given, **named)

    monkeypatch.setattr(np, "load", alone)
    threads = [
        threading.Thread(target=lambda: found.append(open_(documents).token_count))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1 and len(builds) == 1


def taken(path):
    """Whether somebody has the lock of `path`, as a process that comes now finds it."""
    with open(path, "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_one_that_waited_for_a_lock_has_it(tmp_path):
    """The first unlinks the file that the second has open and waits for."""
    path, inside, done = tmp_path / ("0" * 32 + ".lock"), threading.Event(), threading.Event()

    def second():
        with hold_lock(path):
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=second)
    with hold_lock(path):
        thread.start()
        assert not inside.wait(0.1)
    assert inside.wait(10)
    try:
        assert taken(path), "a third would be inside as well"
    finally:
        done.set()
        thread.join()
    assert not path.exists()


def between(monkeypatch, flags, what):
    """`what` happens before the first flock with `flags`, after its file was opened."""
    flock, before = fcntl.flock, [what]

    def first(handle, given):
        if given == flags and before:
            before.pop()()
        flock(handle, given)

    monkeypatch.setattr(fcntl, "flock", first)


def test_a_sweep_takes_no_lock_file_that_is_open(tmp_path, monkeypatch):
    path = tmp_path / ("0" * 32 + ".lock")
    between(monkeypatch, fcntl.LOCK_EX, lambda: token_cache.sweep(tmp_path))
    with hold_lock(path):
        assert taken(path)


def test_a_sweep_takes_no_lock_file_that_is_new(tmp_path, monkeypatch):
    """The sweep has opened the file of a process that then was done; the next has another."""
    path = tmp_path / ("0" * 32 + ".lock")
    before, after = hold_lock(path), hold_lock(path)
    before.__enter__()
    between(
        monkeypatch,
        fcntl.LOCK_EX | fcntl.LOCK_NB,
        lambda: (before.__exit__(None, None, None), after.__enter__()),
    )
    token_cache.sweep(tmp_path)
    assert path.exists() and taken(path)
    after.__exit__(None, None, None)


def test_one_at_a_time_is_inside(tmp_path):
    path, inside, most = tmp_path / ("0" * 32 + ".lock"), [], []

    def enter():
        for _ in range(30):
            with hold_lock(path):
                inside.append(1)
                time.sleep(0.0005)
                most.append(len(inside))
                inside.pop()
            token_cache.sweep(tmp_path)

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 120


def test_stream_reads_like_one_array(documents, built):
    corpus = built[0](documents)
    odd, seven = (
        corpus.stream(corpus.offsets[:-1][mask], corpus.offsets[1:][mask])
        for mask in (np.arange(40) % 3 > 0, np.arange(40) == 7)
    )
    plain = np.concatenate([corpus.doc(i) for i in range(40) if i % 3])
    other = TokenStream.from_ranges(np.arange(1000, 2000), np.array([5, 100]), np.array([10, 900]))
    joined = TokenStream.join([odd, other, seven])
    expected = np.concatenate([plain, np.arange(1005, 1010), np.arange(1100, 1900), corpus.doc(7)])
    assert len(odd.starts) == 13 and len(joined) == len(expected)
    for start in (0, 1, len(plain) - 2, len(plain), len(expected) - 5, -1):
        assert np.array_equal(
            joined.read(start, 900), np.take(expected, np.arange(start, start + 900), mode="wrap")
        )
