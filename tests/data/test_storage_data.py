"""Text at a URL: the tokens are those of the same files on disk, and it is read from there, without
a copy.
"""

import gzip
import io
import json

import faulty
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from faulty import Faulty

from dolmen.data.sources import resolve_sources
from dolmen.data.tokenise import pieces
from dolmen.files import indexed, remote_file, storage
from dolmen.files.remote_file import open_binary

FILES = {
    "a.txt": b"one",
    "b.jsonl": b'{"text": "two"}\n{"text": "three"}\n',
    "sub/c.md": b"four",
    ".hidden.txt": b"no",
    "model.safetensors": b"no",
    "run/.dolmen": b"config.yaml\n",
    "run/state.json": b'{"text": "no"}',
}


@pytest.fixture
def system(monkeypatch, tmp_path):
    system = faulty.install(monkeypatch, tmp_path)
    for name, content in FILES.items():
        system.pipe_file(f"/bucket/text/{name}", content)
    return system


def texts(*entries: str) -> list[str]:
    return [p.text for source in resolve_sources(entries) for p in pieces(source, "text")]


@pytest.mark.parametrize(
    "entry, expected",
    [
        ("faulty://bucket/text", ["one", "two", "three", "four"]),
        ("faulty://bucket/text/", ["one", "two", "three", "four"]),
        ("faulty://bucket/text/*.md", ["four"]),
        ("faulty://bucket/text/b.jsonl", ["two", "three"]),
        ("0.5:faulty://bucket/text/a.txt", ["one"]),
    ],
)
def test_what_a_url_means(system, entry, expected):
    assert texts(entry) == expected
    assert not [p for p in Faulty.requests if p == "put_file"]
    assert not storage.local_copy("faulty://bucket").exists()


def test_what_was_left_out_is_counted(system):
    (source,) = resolve_sources(["faulty://bucket/text"])
    assert "4 hidden files and files of other kinds" in source.left_out[0]


def test_errors_name_the_url(system):
    system.pipe_file("/bucket/text/table.csv", b"1,2\n")  # text, but of no form that is read
    for entry, reason in (
        ("faulty://bucket/none", "no such folder"),
        ("faulty://bucket/*/a.txt", "only the last part of a URL may be a pattern"),
        ("faulty://bucket/text/*.parquet", "no readable files"),
        ("faulty://bucket/text/table.csv", "is not UTF-8 text"),
    ):
        with pytest.raises(ValueError, match=reason) as error:
            resolve_sources([entry])
        assert entry in str(error.value)


def gz(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def parquet(**columns) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=100)
    return file.getvalue()


@pytest.mark.parametrize("fault", faulty.FAULTS)
def test_text_is_read_in_blocks_over_faults(system, monkeypatch, tmp_path, fault):
    """Files of many blocks, and tokens of the same files on disk; a request of each kind fails.
    "wrong" is the one fault that no length shows: of text the storage's word is taken.
    """
    monkeypatch.setattr(remote_file, "BLOCK", 1000)
    rows = [f"row {i} " * 3 for i in range(500)]
    contents = {
        "a.txt": "".join(rows).encode(),
        "b.jsonl.gz": gz("".join(json.dumps({"text": row}) + "\n" for row in rows).encode()),
        "c.parquet": parquet(text=rows, other=rows),
        "empty.txt": b"",
    }
    (tmp_path / "local").mkdir()
    for name, content in contents.items():
        system.pipe_file(f"/bucket/blocks/{name}", content)
        (tmp_path / "local" / name).write_bytes(content)
    faults = [] if fault == "wrong" else [None, fault, None, None, fault]
    with faulty.plan(cat_file=faults):
        found = texts("faulty://bucket/blocks")
    assert found == texts(str(tmp_path / "local"))
    assert len(found) == 1001 and not storage.local_copy("faulty://bucket").exists()


def test_blocks_are_requested_ahead_but_not_for_a_glance(system, monkeypatch):
    monkeypatch.setattr(remote_file, "BLOCK", 10)
    system.pipe_file("/bucket/blocks/a.txt", b"0123456789" * 50)
    (source,) = resolve_sources(["faulty://bucket/blocks"])
    Faulty.requests.clear()
    with open_binary(source.files[0]) as stream:
        raw = stream.raw  # pyright: ignore[reportAttributeAccessIssue]
        assert raw.read(5) == b"01234" and Faulty.requests == ["cat_file"]
        assert raw.read(5) == b"56789" and raw.read(3) == b"012"
        assert len(raw._blocks) == storage.THREADS
        assert raw.seek(-3, io.SEEK_END) == 497 and raw.read() == b"789"
        assert raw.seek(2) == raw.tell() == 2 and raw.read(2) == b"23"


def test_text_that_changes_while_it_is_read_is_refused(system):
    (source,) = resolve_sources(["faulty://bucket/text/a.txt"])
    system.pipe_file("/bucket/text/a.txt", b"new")
    with pytest.raises(ValueError, match=r"bucket/text/a\.txt changed while it was read"):
        list(pieces(source, "text"))


def test_storage_that_is_gone_is_no_damage_of_the_text(system, monkeypatch):
    monkeypatch.setattr(storage, "PATIENCE", 0.0)
    system.pipe_file("/bucket/packed/a.txt.gz", gz(b"one"))
    system.pipe_file("/bucket/packed/b.parquet", parquet(text=["one"]))
    system.pipe_file("/bucket/packed/c", b"one")
    for name in ("a.txt.gz", "b.parquet", "c"):
        with faulty.plan(cat_file=["error"]), pytest.raises(storage.StorageError):
            texts(f"faulty://bucket/packed/{name}")


def test_token_data_is_downloaded_with_its_lengths(system, tmp_path):
    """It is memory-mapped, so it needs a copy."""
    tokens, lengths, documents = np.arange(3), np.array([3]), np.array([0, 1])
    indexed.save(tmp_path / "a.bin", [tokens], np.dtype("<u2"), lengths, documents)
    for name in ("a.bin", "a.idx"):
        system.pipe_file(f"/bucket/tokens/{name}", (tmp_path / name).read_bytes())
    for entry in ("faulty://bucket/tokens", "faulty://bucket/tokens/a.bin"):
        (source,) = resolve_sources([entry])
        assert source.indexed == (storage.local_copy("faulty://bucket/tokens/a.bin"),)
        assert source.files == () and source.indexed[0].with_suffix(".idx").exists()
        # a folder may have millions of objects: one that is named is not looked for in a list
        assert Faulty.requests.count("find") == entry.endswith("tokens")
        Faulty.requests.clear()


def test_changed_text_is_read_again(system):
    assert texts("faulty://bucket/text/a.txt") == ["one"]
    system.pipe_file("/bucket/text/a.txt", b"new")  # of the same size
    assert texts("faulty://bucket/text/a.txt") == ["new"]
