"""Every kind of entry of --data.path is read, byte for byte; what cannot be read is refused by name
and line.
"""

import gzip
import io
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from dolmen.data import readers
from dolmen.data.readers import PIECE
from dolmen.data.sources import (
    STANDARD_LIBRARY,
    gzip_xz_bits,
    is_hub_id,
    resolve_sources,
    standard_library_files,
)
from dolmen.data.tokenise import cut, pieces
from dolmen.training.config import RunConfig
from dolmen.training.request import write_config


def texts(*entries, field="text"):
    """Documents of the entries, their pieces joined again."""
    (source,) = resolve_sources([str(entry) for entry in entries])
    found, parts = [], []
    for piece in pieces(source, field):
        parts.append(piece.text)
        if piece.last:
            found.append("".join(parts))
            parts = []
    return found


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


@pytest.fixture
def mixed(tmp_path):
    (tmp_path / "a.txt").write_bytes("first\r\nsecond é\n".encode())
    (tmp_path / "b.py").write_bytes(b"x = 1\n")
    rows = (
        '{"text": "one"}',
        "",
        '{"id": 5, "text": "two \\u00e9"}',
        '{"text": null}',
        '{"text": ""}',
    )
    (tmp_path / "c.jsonl").write_text("\n".join(rows))
    (tmp_path / "deep").mkdir()
    write_parquet(tmp_path / "deep" / "d[1].parquet", text=["row\r\n", None, "row 2"], id=[1, 2, 3])
    (tmp_path / "deep" / "ignored.html").write_text("no")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "e.txt").write_text("no")
    return tmp_path


def test_each_kind_of_file(mixed):
    assert texts(mixed / "a.txt") == ["first\r\nsecond é\n"]
    assert texts(mixed / "b.py") == ["x = 1\n"]
    assert texts(mixed / "c.jsonl") == ["one", "two é"]
    assert texts(mixed / "deep" / "d[1].parquet") == ["row\r\n", "row 2"]


def test_folder_glob_and_several_entries(mixed):
    everything = ["first\r\nsecond é\n", "x = 1\n", "one", "two é", "row\r\n", "row 2"]
    assert texts(mixed) == everything
    assert texts(f"{mixed}/**/*") == everything
    assert texts(f"{mixed}/?.py", mixed / "a.txt") == ["x = 1\n", "first\r\nsecond é\n"]
    assert texts(mixed / "a.txt", f"{mixed}/*.txt") == ["first\r\nsecond é\n"], (
        "a file named twice is read once"
    )


def test_other_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n')
    write_parquet(tmp_path / "b.parquet", content=["y"])
    assert texts(tmp_path, field="content") == ["x", "y"]


def test_hub_id(monkeypatch):
    calls = []
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "id": [1, 2]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: calls.append((a, k)) or table)
    assert texts("org/name:config") == ["a", "b"]
    assert calls == [(("org/name", "config"), {"split": "train"})]
    with pytest.raises(ValueError, match="--data.path org/name.*'body'.*id.*--data.text-field"):
        texts("org/name", field="body")


def test_hub_id_that_is_not_there(monkeypatch):
    def fail(*args, **kwargs):
        raise FileNotFoundError("Dataset 'org/nothing' doesn't exist")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        ValueError,
        match="--data.path org/nothing: no such file or folder, and not available from the hub",
    ):
        texts("org/nothing")


def test_what_can_be_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert all(map(is_hub_id, ["wikitext", "org/name", "org/na.me-2:20231101.en"]))
    assert not any(
        map(is_hub_id, ["corpus.txt", "org/x.jsonl", "/tmp/x", "./x", "a/b/c", "data/misspelled"])
    )


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"text": "a"}\n{"text": "b"\n', "bad.jsonl, line 2: is not JSON"),
        (
            '{"text": "a"}\n\n{"body": "b"}\n',
            "bad.jsonl, line 3: no 'text' but keys body: use --data.text-field",
        ),
        ('["a"]\n', "bad.jsonl, line 1: it is a list of 1: it must be a mapping"),
        ('{"text": 3}\n', "bad.jsonl, line 1: 'text' is a int, not text"),
        ('{"text": "\\ud800"}\n', "bad.jsonl, line 1: 'text' is not UTF-8"),
    ],
)
def test_malformed_jsonl_names_the_line(tmp_path, content, message):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        texts(tmp_path)


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"good\n" * 10 + b"\xe9\n")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text: .* byte 0xe9"):
        texts(tmp_path / "latin.txt")
    (tmp_path / "x.parquet").write_bytes(b"PAR2")
    with pytest.raises(ValueError, match=r"x\.parquet: is not parquet"):
        texts(tmp_path / "x.parquet")
    write_parquet(tmp_path / "y.parquet", body=["a"], id=[1])
    with pytest.raises(
        ValueError, match=r"y\.parquet: no 'text' but columns body, id: use --data.text-field"
    ):
        texts(tmp_path / "y.parquet")


def test_missing_and_empty(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero.txt").touch()
    (tmp_path / "page.html").write_text("x")
    for entry, error, message in [
        ("nothing.txt", FileNotFoundError, "--data.path .*nothing.txt: no such file or folder"),
        (
            "empty",
            FileNotFoundError,
            "--data.path .*empty: 0 files, none readable; supported are .txt",
        ),
        ("*.parquet", FileNotFoundError, "none readable"),
        ("zero.txt", ValueError, "--data.path .*zero.txt: 1 file with 0 bytes"),
        ("page.html", ValueError, "cannot read .html; supported are .txt"),
    ]:
        with pytest.raises(error, match=message):
            resolve_sources([str(tmp_path / entry)])
    with pytest.raises(ValueError, match="no data: use --data.path"):
        resolve_sources([])
    with pytest.raises(FileNotFoundError, match="--data.validation /nothing"):
        resolve_sources(["/nothing"], "--data.validation")


def test_weights(mixed):
    a, b = resolve_sources([f"0.7:{mixed}/a.txt", f".3:{mixed}/b.py"])
    assert (a.weight, b.weight) == (Fraction(7, 10), Fraction(3, 10))
    assert (a.files, b.files) == ((mixed / "a.txt",), (mixed / "b.py",))
    (pooled,) = resolve_sources([f"{mixed}/a.txt", f"{mixed}/b.py"])
    assert pooled.weight is None and len(pooled.files) == 2
    with pytest.raises(ValueError, match="--data.path: 1 of 2 entries have a weight"):
        resolve_sources([f"0.7:{mixed}/a.txt", f"{mixed}/b.py"])
    with pytest.raises(ValueError, match="the weight is 0"):
        resolve_sources([f"0:{mixed}/a.txt"])


def test_long_documents_are_cut_at_lines_that_are_not_indented():
    text = "".join(f"def f{i}():\n    return {i}\n\n" for i in range(400))
    whole = list(cut([text], piece=500))
    assert "".join(piece for piece, _ in whole) == text
    assert [last for _, last in whole] == [False] * (len(whole) - 1) + [True]
    assert (
        all(len(piece) <= 500 and piece.startswith("def") for piece, _ in whole) and len(whole) > 10
    )
    blocks = [text[start : start + 77] for start in range(0, len(text), 77)]
    assert list(cut(blocks, piece=500)) == whole, (
        "the pieces do not depend on how the file was read"
    )
    assert [len(piece) for piece, _ in cut(["x" * 1200], piece=500)] == [500, 500, 200]
    assert list(cut([])) == [] and list(cut(["a" * PIECE])) == [("a" * PIECE, True)]


def test_standard_library():
    files = standard_library_files()
    names = {str(file) for file in files}
    assert len(files) > 300 and any(name.endswith("/asyncio/events.py") for name in names)
    assert not any(
        "/site-packages/" in name or "/test/" in name or "/tests/" in name for name in names
    )
    assert resolve_sources([STANDARD_LIBRARY])[0].files == tuple(files)


def test_what_compresses_the_held_out_files(tmp_path):
    (tmp_path / "a").write_bytes(b"a" * 10_000)
    (tmp_path / "b").write_bytes(bytes(range(256)) * 4)
    small, large = gzip_xz_bits([tmp_path / "a"])[0], gzip_xz_bits([tmp_path / "b"])[0]
    assert 0 < small < large < 8.5
    both = gzip_xz_bits([tmp_path / "a", tmp_path / "b"])[0]
    assert both == pytest.approx((small * 10_000 + large * 1024) / 11_024), (
        "a mean over bytes, each file by itself"
    )


def packed(path, data):
    """`data` written as the suffix says."""
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
    path.write_bytes(pack.get(path.suffix, bytes)(data))
    return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_more_kinds_and_packed_ones(tmp_path, suffix):
    text = "first\r\nsecond é\n" * 3
    rows = [{"text": "one"}, {"text": None}, {"id": 1, "text": "two é", "x": float("nan")}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("a.txt", "b.md", "c.py", "d", "E.TXT"):
        assert texts(packed(tmp_path / f"{name}{suffix}", text.encode())) == [text]
    assert texts(packed(tmp_path / f"f.jsonl{suffix}", lines.encode())) == ["one", "two é"]
    for name, content in (("g", rows), ("h", {"text": "alone"})):
        packed(tmp_path / f"{name}.json{suffix}", json.dumps(content).encode())
    assert texts(tmp_path / f"g.json{suffix}") == ["one", "two é"]
    assert texts(tmp_path / f"h.json{suffix}") == ["alone"]
    assert texts(tmp_path) == [text] * 5 + ["one", "two é"] * 2 + ["alone"], "of a folder too"


def test_several_frames_of_one_file_are_all_read(tmp_path):
    for suffix in (".gz", ".zst"):
        one = packed(tmp_path / f"a.txt{suffix}", b"one\n" * 5000).read_bytes()
        two = packed(tmp_path / f"a.txt{suffix}", b"two\n").read_bytes()
        (tmp_path / f"a.txt{suffix}").write_bytes(one + two)
        assert texts(tmp_path / f"a.txt{suffix}") == ["one\n" * 5000 + "two\n"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_files_that_are_damaged_are_named(tmp_path, suffix):
    file = tmp_path / f"a.txt{suffix}"
    whole = packed(file, "".join(f"{i} words\n" for i in range(5000)).encode()).read_bytes()
    for damaged in (whole[:-9], whole[: len(whole) // 2], b"no archive at all"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"a\.txt\{suffix} cannot be decompressed"):
            texts(file)
    packed(tmp_path / f"latin.txt{suffix}", b"good\n\xe9\n")
    with pytest.raises(ValueError, match="latin.txt.* is not UTF-8 text: .* byte 0xe9"):
        texts(tmp_path / f"latin.txt{suffix}")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, suffix):
    file = packed(tmp_path / f"a.jsonl{suffix}", b" " * 2**25)
    with pytest.raises(
        ValueError, match=r"bytes decompress to more than 16,777,216.*decompress it your"
    ):
        texts(file)
    assert len(texts(packed(tmp_path / f"a.txt{suffix}", b"a" * 2**23))[0]) == 2**23


def test_files_without_a_suffix_are_text_or_refused(tmp_path):
    (tmp_path / "LICENSE").write_text("é" * 3000, "utf-8")
    (tmp_path / "COPYING").write_text("x" + "é" * 3000, "utf-8")
    (tmp_path / "program").write_bytes(b"\x7fELF\1\2\xff")
    (tmp_path / "zeros").write_bytes(bytes(100))
    assert texts(tmp_path) == ["x" + "é" * 3000, "é" * 3000]
    (source,) = resolve_sources([str(tmp_path)])
    assert source.left_out == (
        f"2 other files that are not UTF-8 text in {tmp_path}, 0.9% of the bytes",
    )
    with pytest.raises(ValueError, match="program is not UTF-8 text"):
        resolve_sources([str(tmp_path / "program")])


def test_text_of_any_suffix_is_read_and_what_is_left_out_is_counted_in_bytes(tmp_path):
    """As the pages of manuals are; markup and tables are not, though they are UTF-8."""
    for name, text in (("ls.1", "list"), ("a.rst", "docs"), ("b.csv", "1,2\n"), ("c.html", "<p>")):
        (tmp_path / name).write_text(text)
    (tmp_path / "d.1").write_bytes(b"\xff\0\xff")
    (source,) = resolve_sources([str(tmp_path)])
    assert [file.name for file in source.files] == ["a.rst", "ls.1"]
    (note,) = source.left_out
    assert "1 .1 files that are not UTF-8 text" in note and "1 .html files" in note
    assert note.endswith(f"in {tmp_path}, 55.6% of the bytes")  # 10 of 18


def test_what_dolmen_has_written_is_no_text(tmp_path, monkeypatch):
    write_config(tmp_path / "runs" / "one", RunConfig())
    for name in ("metrics.jsonl", "tokenizer/tokenizer.json", "hf/config.json"):
        file = tmp_path / "runs" / "one" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text('{"text": "wrong"}')
    cache, tokens = tmp_path / "cache", tmp_path / "old" / "key"
    for folder in (cache / "tokenizers", tokens):
        folder.mkdir(parents=True)
        (folder / "index.json").write_text('{"text": "wrong"}')
    (tokens / "tokens.bin").touch()
    (tmp_path / "a.txt").write_text("right")
    (tmp_path / "b.yaml").write_text("name: x")
    monkeypatch.chdir(tmp_path)
    for entry in (str(tmp_path), ".", "**/*", f"{tmp_path}/**"):
        (source,) = resolve_sources([entry], cache=cache)
        assert [file.name for file in source.files] == ["a.txt"], entry
        reported = "\n".join(source.left_out)
        for name in ("one (a run of dolmen)", "cache (the token cache)", "key (tokens of dolmen)"):
            assert name in reported, entry
        assert "1 .yaml files" in reported, entry
    with pytest.raises(FileNotFoundError, match="none readable; skipped: .*one .a run of dolmen"):
        resolve_sources([str(tmp_path / "runs" / "one")])
    for entry in ("runs/one/hf", "runs/one/hf/*.json"):
        assert len(resolve_sources([entry])[0].files) == 1, "unless it is named itself"


@pytest.mark.parametrize(
    "row, message",
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "'messages' has chats"),
        ({"conversations": [{"from": "human", "value": "x"}]}, "apply_chat_template"),
        ({"instruction": "x", "input": "", "output": "y"}, "--data.text-field output trains"),
    ],
)
def test_chats_and_instructions_are_told_what_to_do(tmp_path, row, message):
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    write_parquet(tmp_path / "a.parquet", **{name: [value] for name, value in row.items()})
    for file in ("a.jsonl", "a.parquet"):
        with pytest.raises(ValueError, match=f"{file}.*{message}"):
            texts(tmp_path / file)
    if "instruction" not in row:
        (field,) = row
        for file in ("a.jsonl", "a.parquet"):
            with pytest.raises(ValueError, match=f"{file}.*{field!r} has chats"):
                texts(tmp_path / file, field=field)


def test_a_parquet_file_that_is_damaged_inside_is_named(tmp_path):
    file = tmp_path / "a.parquet"
    write_parquet(file, text=[f"row {i} of many" for i in range(20_000)])
    data = bytearray(file.read_bytes())
    data[4:2000] = b"\xff" * 1996
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.parquet: is damaged parquet"):
        texts(file)


def test_a_row_that_is_nested_too_deep_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + "[" * 100_000)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: has 100,000 brackets open"):
        texts(tmp_path / "a.jsonl")


def test_links_to_folders_are_told(tmp_path):
    """By a folder and by a glob alike: not followed, one count per link, loops or not."""
    data, other = tmp_path / "data", tmp_path / "other"
    for folder in (data / "sub", other / "deep"):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text(str(folder))
    (data / "elsewhere").symlink_to(other)
    (data / "sub" / "loop").symlink_to(data)
    (data / "file.txt").symlink_to(other / "deep" / "a.txt")
    for entry in (data, data / "**" / "*.txt"):
        (source,) = resolve_sources([str(entry)])
        assert [file.name for file in source.files] == ["file.txt", "a.txt"]
        assert source.left_out == (f"2 links to folders in {entry}",)
    (source,) = resolve_sources([str(data / "elsewhere")])
    assert len(source.files) == 1, "which is named itself"
    (source,) = resolve_sources([str(data / "elsewhere" / "*" / "*.txt")])
    assert len(source.files) == 1 and not source.left_out
    with pytest.raises(FileNotFoundError, match="none readable; skipped: 1 links to folders"):
        resolve_sources([str(data / "else*" / "*" / "*.txt")])


@pytest.mark.parametrize("limit", [10, None])
def test_a_line_is_read_no_further_than_a_row_may_be_long(monkeypatch, limit):
    """A file of one endless line takes no more memory than a row."""
    monkeypatch.setattr(readers, "TEXT_ROW", replace(readers.TEXT_ROW, size=50))
    stream = io.BytesIO(b"short\n" + b"x" * 1000)
    lines = readers.lines_of(stream, Path("a.jsonl"), limit)
    assert next(lines) == b"short\n"
    with pytest.raises(ValueError, match=rf"a.jsonl, line 2.* {limit or 50} bytes"):
        next(lines)
    assert stream.tell() == len("short\n") + (limit or 50) + 1
