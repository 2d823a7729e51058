"""Text at a URL: the tokens are those of the same files on disk, and only what is read is
downloaded.
"""

import faulty
import pytest
from faulty import Faulty

from dolmen.data.sources import resolve_sources
from dolmen.data.tokenise import pieces
from dolmen.files import storage

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
    copies = {p.name for p in storage.local_copy("faulty://bucket/text").rglob("*") if p.is_file()}
    assert copies.isdisjoint({".hidden.txt", "model.safetensors", "state.json"})


def test_what_was_left_out_is_counted(system):
    (source,) = resolve_sources(["faulty://bucket/text"])
    assert "4 hidden files and files of other kinds" in source.left_out[0]


def test_errors_name_the_url(system):
    for entry, reason in (
        ("faulty://bucket/none", "no such folder"),
        ("faulty://bucket/*/a.txt", "only the last part of a URL may be a pattern"),
        ("faulty://bucket/text/*.parquet", "no readable files"),
    ):
        with pytest.raises(ValueError, match=reason) as error:
            resolve_sources([entry])
        assert entry in str(error.value)


def test_changed_text_is_downloaded_again(system):
    assert texts("faulty://bucket/text/a.txt") == ["one"]
    system.pipe_file("/bucket/text/a.txt", b"new")  # of the same size
    assert texts("faulty://bucket/text/a.txt") == ["new"]
