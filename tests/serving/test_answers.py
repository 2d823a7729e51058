"""Rows in, answers out: what is a row, and that a file of answers loses and repeats none, wherever
the process that writes it was killed.
"""

import json

import pytest

from dolmen.files.gate import Refused
from dolmen.serving.output_file import (
    OutputFile,
    check_finished,
    check_output,
    digest,
    journal_path,
)
from dolmen.serving.prompt_file import PromptRow, check_file, read_lines

ASKED = {"temperature": 0.5, "stop": ["a"]}


def rows(file, reported: list[str] | None = None) -> list[PromptRow]:
    """Of all lines; what is no row is told."""
    found = []
    for line in read_lines(file):
        try:
            found.append(line.row())
        except Refused as error:
            if reported is None:
                raise
            reported.append(str(error))
    return found


def written(path, *lines: object):
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def test_rows_of_a_jsonl(tmp_path):
    chat = [{"role": "user", "content": "Hi"}]
    given = [
        {"prompt": "a", "id": 7, "more": [1.5, None]},
        {"query": "b", "id": "seven"},
        "",
        {"messages": chat, "weight": "of a person"},
    ]
    file = written(tmp_path / "in.jsonl", *given)
    found = rows(file)
    assert [row.fields for row in found] == [row for row in given if row]
    assert [row.prompt for row in found] == ["a", "b", chat]
    assert [row.id for row in found] == [7, "seven", 4]
    assert found[2].where == f"{file}, line 4"


def test_rows_of_a_txt(tmp_path):
    (tmp_path / "in.txt").write_bytes("Es war einmal\r\n\n  中文 \nlast".encode())
    found = rows(tmp_path / "in.txt")
    assert [(row.id, row.prompt) for row in found] == [
        (1, "Es war einmal"),
        (3, "  中文 "),
        (4, "last"),
    ]


@pytest.mark.parametrize(
    "line, said",
    [
        ("{'prompt': 1}", "is not JSON"),
        ('{"prompt": "a"', "is not JSON"),
        ("[1]", "it is a list of 1: it must be a mapping"),
        (
            {"text": "a"},
            "it must have exactly one of `prompt`, `query`, `messages`, but has none of them",
        ),
        ({"prompt": "a", "query": "b"}, "but has `prompt` and `query`"),
        ({"prompt": 5}, "prompt is 5: it must be text"),
        ({"prompt": "a", "id": [1]}, "id is a list of 1"),
        ({"prompt": "a", "tokens": 1}, "a field `tokens`, where the completion is written"),
        ({"messages": []}, "messages has 0 entries"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "is the assistant's"),
        ('{"prompt": "\\ud800"}', "prompt is"),
        ('{"prompt": "a", "of": "\\ud800"}', "a lone surrogate"),
        ('{"prompt": "a", "prompt": "b"}', "given twice"),
        (f'{{"prompt": "a", "x": {"[" * 70}{"]" * 70}}}', "brackets open at once"),
    ],
)
def test_a_bad_row_is_told_with_its_line(tmp_path, line, said):
    file = written(tmp_path / "in.jsonl", {"prompt": "a"}, line, {"prompt": "b"})
    messages = []
    found = rows(file, messages)
    assert [row.prompt for row in found] == ["a", "b"] and found[1].id == 3
    assert len(messages) == 1 and messages[0].startswith(f"{file}, line 2: ")
    assert said in messages[0]
    with pytest.raises(ValueError, match="line 2"):
        rows(file)


def test_the_bytes_of_a_row_are_bounded(tmp_path):
    (line,) = read_lines(written(tmp_path / "in.jsonl", {"prompt": "x"}))
    assert line.row(len(line.content)).prompt == "x"
    with pytest.raises(
        Refused, match="in.jsonl, line 1: has more than 15 bytes: .* --max-row-byte"
    ):
        line.row(15)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "in.txt").write_bytes(b"a\n\xff\nb\n")
    messages = []
    assert [row.prompt for row in rows(tmp_path / "in.txt", messages)] == ["a", "b"]
    assert "line 2: is not UTF-8 text" in messages[0]


def test_files_that_are_none(tmp_path):
    written(tmp_path / "in.csv", "a,b")
    (tmp_path / "in.jsonl").mkdir()
    for name, said in (
        ("in.csv", "use a .jsonl"),
        ("in.jsonl", "is a folder"),
        ("no.txt", "cannot be read: No such file"),
    ):
        with pytest.raises(ValueError, match=said):
            check_file(tmp_path / name)


def answer(i: int) -> dict:
    return {"prompt": "é" * i, "text": f"{i}\n\u2028\x85"}


def ended(output, order) -> OutputFile:
    """As a killed process leaves it that has written these."""
    made = OutputFile(output, ASKED, "digest")
    for i in order:
        made.add(i, answer(i))
    made.close()
    return made


def objects(file) -> list[dict]:
    return [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]


def test_rows_are_written_in_order_and_those_before_their_turn_wait(tmp_path):
    out = tmp_path / "out.jsonl"
    made = OutputFile(out, ASKED, "digest")
    for i, there in ((2, 0), (0, 1), (3, 1), (1, 4)):
        made.add(i, answer(i))
        assert objects(out) == [answer(k) for k in range(there)]
    made.close()
    made.finish()
    assert not journal_path(out).exists()
    assert len(out.read_text().splitlines()) == 4  # whatever takes U+2028 for the end of a line


@pytest.mark.parametrize("cut", range(1, 260, 13))
def test_whatever_a_kill_leaves(tmp_path, cut):
    """The output and the journal, torn at any byte: no row is lost that was whole, none is there
    twice.
    """
    for number, torn in enumerate((tmp_path / "a.jsonl", journal_path(tmp_path / "b.jsonl"))):
        out = tmp_path / f"{'ab'[number]}.jsonl"
        ended(out, (0, 3, 1, 5, 6))
        whole = torn.read_bytes()
        head = whole.index(b"\n") + 1 if number else 0  # that of the journal was there first
        torn.write_bytes(whole[: max(len(whole) - cut, head)])
        check_output(out, 8, True, ASKED, "digest")
        again = OutputFile(out, ASKED, "digest")
        assert objects(out) == [answer(k) for k in range(again.output.count)]
        if number == 0:
            assert again.has(3) and again.has(5) and again.has(6)
        else:
            assert again.output.count == 2
        for i in range(8):
            if not again.has(i):
                again.add(i, answer(i))
        again.close()
        assert objects(out) == [answer(k) for k in range(8)]


def test_zeros_after_a_power_cut_are_no_row(tmp_path):
    out = tmp_path / "out.jsonl"
    ended(out, (0, 1))
    out.write_bytes(out.read_bytes() + b"\0" * 30 + b'\n{"prompt"')
    again = OutputFile(out, ASKED, "digest")
    assert again.output.count == 2 and objects(out) == [answer(0), answer(1)]


def test_two_processes_do_not_write_one_output(tmp_path):
    out = tmp_path / "out.jsonl"
    first = OutputFile(out, ASKED, "digest")
    first.add(0, answer(0))
    first.add(2, answer(2))
    before = out.read_bytes(), journal_path(out).read_bytes()
    with pytest.raises(ValueError, match="is being written by another process"):
        OutputFile(out, ASKED, "digest")
    assert before == (out.read_bytes(), journal_path(out).read_bytes())


def test_what_is_refused_before_work_begins(tmp_path):
    out = tmp_path / "out.jsonl"

    def refused(said: str, resume: bool = False, requested=ASKED, read: str = "digest") -> None:
        with pytest.raises(ValueError, match=said):
            check_output(out, 3, resume, requested, read)

    assert check_output(out, 3, False, ASKED, "digest") and check_output(
        out, 3, True, ASKED, "digest"
    )
    ended(out, (0, 2))
    refused("is unfinished")
    refused("temperature was 0.5 when .* but is 1.0", True, ASKED | {"temperature": 1.0})
    refused("rows of --input differ", True, read="another")
    assert check_output(out, 3, True, ASKED, "digest")
    journal_path(out).write_bytes(b'{"form')  # killed as it began
    refused("is damaged", True)
    out.unlink()
    assert check_output(out, 3, True, ASKED, "digest")
    journal_path(out).unlink()
    written(out, answer(0), answer(1))
    refused("exists: give another name")
    refused("has 2 rows of 3, but out.jsonl.journal", True)
    written(out, answer(0), answer(1), answer(2))
    assert not check_output(out, 3, True, ASKED, "digest")  # all is there
    out.unlink()
    out.mkdir()
    refused("is not a file")
    with pytest.raises(ValueError, match="does not exist: create it"):
        check_output(tmp_path / "no" / "out.jsonl", 3, False, ASKED, "digest")


def test_an_output_that_was_edited_is_refused_with_its_line(tmp_path):
    """Rows are told by their place, and a line by the row that it carries: not what another reads
    as the same number either.
    """
    given = [{"prompt": f"é\u2028{i}", "n": i, "x": float("nan")} for i in range(4)]
    wanted = [PromptRow(f"in.jsonl, line {i + 1}", i, fields) for i, fields in enumerate(given)]
    out = tmp_path / "out.jsonl"
    made = OutputFile(out, ASKED, "digest")
    for i in range(3):
        made.add(i, given[i] | ({"samples": [{"text": "a"}]} if i else {"text": "b"}))
    made.close()
    lines = out.read_bytes().splitlines(keepends=True)
    for good in (
        lines,
        [],
        lines[:2],
        [*lines[:2], lines[2][:-5]],
        [lines[0], b"\0\n", lines[0]],
        [lines[0], b"\n", lines[1]],
    ):
        out.write_bytes(b"".join(good))
        check_finished(out, wanted)
    for bad, number in (
        (lines[1:], 1),
        ([lines[0], *lines], 2),
        ([*lines[:2], lines[0]], 3),
        ([lines[0], lines[1].replace(b'"n": 1', b'"n": 1.0')], 2),
        ([lines[0].replace(b', "text": "b"', b"")], 1),
        ([lines[0].replace(b'"n"', b'"m"')], 1),
        ([lines[0].replace(b'"n"', b'"more": 1, "n"')], 1),
    ):
        out.write_bytes(b"".join(bad))
        said = rf"--resume: {out}, line {number}: it does not belong to in.jsonl, line {number}: .*"
        with pytest.raises(ValueError, match=said + "give another --output"):
            check_finished(out, wanted)
        assert out.read_bytes() == b"".join(bad)
    out.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=r"line 3: it is behind the last row's"):
        check_finished(out, wanted[:2])


def test_the_digest_is_of_all_bytes(tmp_path):
    one, other = written(tmp_path / "a", "x"), written(tmp_path / "b", "x", "y")
    assert digest(one) != digest(other) and digest(one) == digest(one)
