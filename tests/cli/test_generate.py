"""`dolmen generate MODEL --input FILE --output FILE`: rows in, rows out; and `dolmen chat`."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tinyrun
from tinyrun import dolmen

import dolmen as package
from dolmen.core.messages import Failed, escape
from dolmen.data.tokenizer import load_tokenizer
from dolmen.serving import offline
from dolmen.serving.output_file import journal_path

material, one_thread = tinyrun.material, tinyrun.one_thread

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'bad' %}{{ raise_exception('no such role') }}"
    "{% endif %}<{{ m['role'][0] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
WARM = ("--temperature", 1.0, "--seed", 3)


@pytest.fixture(scope="module")
def chatty(material, tmp_path_factory) -> Path:
    """The model with a chat template, whose generation_config.json says how tokens are drawn."""
    folder = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(material.model, folder)
    _change(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    said = {"do_sample": True, "temperature": 0.8, "top_k": 7, "max_new_tokens": 5}
    _change(folder / "generation_config.json", **said)
    return folder


def _change(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def written(file: Path, *rows: object) -> Path:
    file.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in rows))
    return file


def answers(model, rows: Path, out: Path, *words) -> list[dict]:
    result = dolmen("generate", model, "--input", rows, "--output", out, *words)
    assert result.code == 0, result.err
    assert not journal_path(out).exists()
    return read(out)


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rows_come_out_in_order_with_what_they_carry(material, tmp_path):
    """Each as it is answered alone."""
    given = [
        {"prompt": "abc def", "id": "one", "more": {"of": [1.5, None, "中"]}},
        {"query": "hij"},
        {"prompt": ""},
        {"prompt": "a b c " * 6},
    ]
    rows = written(tmp_path / "in.jsonl", *given)
    found = answers(material.model, rows, tmp_path / "out.jsonl", "--max-new-tokens", 8)
    model = package.load(material.model)
    for row, answer in zip(given, found, strict=True):
        assert {name: answer[name] for name in row} == row and list(answer)[: len(row)] == [*row]
        assert set(answer) - set(row) == {"text", "tokens", "finish_reason"}
        begin = row.get("prompt", row.get("query"))
        alone = dolmen("generate", material.model, "--prompt", begin, "--max-new-tokens", 8)
        assert alone.out == begin + answer["text"] + "\n"
        assert answer["text"] == model.required_tokenizer.decode(
            answer["tokens"], skip_special_tokens=True
        )
        assert answer["finish_reason"] == "length" and len(answer["tokens"]) == 8
    text = tmp_path / "in.txt"
    text.write_text("abc def\n\nhij\n")
    plain = answers(material.model, text, tmp_path / "of-text.jsonl", "--max-new-tokens", 8)
    assert [row["text"] for row in plain] == [found[0]["text"], found[1]["text"]]


def test_drafts_change_no_row(material, tmp_path):
    """Prompt lookup, and the model itself as its draft model; what was accepted is printed."""
    rows = written(tmp_path / "in.jsonl", *({"prompt": "abc abc " * i} for i in (1, 2, 3)))
    greedy = ("--max-new-tokens", 8, "--temperature", 0)
    plain = answers(material.model, rows, tmp_path / "plain", *greedy)
    for method in (("ngram",), ("draft", "--speculative.model", material.model)):
        words = ("generate", material.model, "--input", rows, *greedy, "--speculative.method")
        result = dolmen(*words, *method, "--output", tmp_path / method[0])
        assert result.code == 0, result.err
        assert read(tmp_path / method[0]) == plain
        assert "speculative decoding: accepted " in result.err
        of_prompt = dolmen(*words[:2], "--prompt", "abc abc ", *words[4:], *method)
        assert of_prompt.code == 0, of_prompt.err
        assert "speculative decoding: accepted " in of_prompt.err
    refused = dolmen("generate", material.model, "--prompt", "a", "--speculative.method", "draft")
    assert refused.code == 2 and "method draft needs a model" in refused.err


def test_draws_follow_from_the_seed_the_id_and_the_sample(material, tmp_path, monkeypatch):
    given = [{"prompt": "abc", "id": i} for i in range(5)]
    rows = written(tmp_path / "in.jsonl", *given)
    whole = answers(material.model, rows, tmp_path / "a", *WARM, "--num-samples", 3)
    assert [[*row] for row in whole] == [["prompt", "id", "samples"]] * 5
    sampled = {row["id"]: [one["tokens"] for one in row["samples"]] for row in whole}
    assert len({tuple(tokens) for own in sampled.values() for tokens in own}) > 10
    turned = written(tmp_path / "turned.jsonl", *given[::-1], {"prompt": "other"})
    words = (*WARM, "--max-batch-tokens", 6)  # one row at a time
    again = answers(material.model, turned, tmp_path / "b", *words)
    assert [row["tokens"] for row in again[:5]] == [sampled[i][0] for i in range(4, -1, -1)]
    assert (
        again[5]["tokens"]
        != answers(material.model, turned, tmp_path / "c", "--temperature", 1.0, "--seed", 4)[5][
            "tokens"
        ]
    )


def test_stop_strings_log_probabilities_and_a_cut(material, tmp_path):
    rows = written(tmp_path / "in.jsonl", {"prompt": "abc def ghi jab cde fgh"}, {"prompt": "hij"})
    plain = answers(material.model, rows, tmp_path / "a", "--max-new-tokens", 12)
    stop = plain[0]["text"][3:5]
    words = ("--max-new-tokens", 12, "--stop", stop, "--stop", "never there", "--logprobs")
    found = answers(material.model, rows, tmp_path / "b", *words)
    for before, after in zip(plain, found, strict=True):
        text, sign, _ = before["text"].partition(stop)
        assert after["text"] == text
        assert after["finish_reason"] == ("stop" if sign else "length")
        assert after["tokens"] == before["tokens"][: len(after["tokens"])]
        assert len(after["logprobs"]) == len(after["tokens"]) and max(after["logprobs"]) < 0
    assert len(found[0]["tokens"]) < 12
    cut = ("generate", material.model, "--input", rows, "--output", tmp_path / "c")
    result = dolmen(*cut, "--max-input-tokens", 4, "--max-new-tokens", 6)
    assert result.code == 0 and "1 prompt truncated to 4 tokens, from the left" in result.err
    reader = load_tokenizer(str(material.model))
    ids = reader("abc def ghi jab cde fgh")["input_ids"]
    assert len(ids) > 4
    expected = package.load(material.model).generate(ids[-4:], max_new_tokens=6).tokens
    assert read(tmp_path / "c")[0]["tokens"] == expected


def test_what_generation_config_says_is_the_default_and_is_said(chatty, tmp_path):
    rows = written(tmp_path / "in.jsonl", {"prompt": "abc"})
    result = dolmen("generate", chatty, "--input", rows, "--output", tmp_path / "a")
    said = "from generation_config.json: max_new_tokens 5, temperature 0.8, top_k 7"
    assert said in result.err and result.code == 0
    words = ("--max-new-tokens", 5, "--temperature", 0.8, "--top-k", 7)
    assert read(tmp_path / "a") == answers(chatty, rows, tmp_path / "b", *words)
    result = dolmen("generate", chatty, "--prompt", "abc", "--temperature", 0)
    assert "generation_config.json: max_new_tokens 5\n" in result.err  # nothing of drawing
    assert result.out == dolmen("generate", chatty, "--prompt=abc", "--temperature=0").out


def test_messages_are_written_by_the_chat_template(material, chatty, tmp_path):
    chat = [{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}]
    bad = {"messages": [{"role": "bad", "content": "x"}]}
    rows = written(tmp_path / "in.jsonl", {"messages": chat, "k": 1}, bad)
    words = ("--temperature", 0, "--skip-bad")
    (found,) = answers(chatty, rows, tmp_path / "a", *words)
    same = written(tmp_path / "same.jsonl", {"prompt": "<s>ab\n<u>cd\n<a>"})
    (alone,) = answers(chatty, same, tmp_path / "b", *words)
    assert found == {"messages": chat, "k": 1} | {k: v for k, v in alone.items() if k != "prompt"}
    for model, said in (
        (chatty, "line 2: the chat template cannot render it: no such role"),
        (material.model, "line 1: the tokenizer has no chat template: give rows with `prompt`"),
    ):
        result = dolmen("generate", model, "--input", rows, "--output", tmp_path / "c")
        assert result.code == 2 and said in result.err and not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "words, said",
    [
        ((), "in.jsonl, line 2: its prompt has 90 tokens, but max_position_embeddings is 64"),
        (("--stop", ""), "--stop is '': it must be a text of at least one character"),
        (("--temperature", "-1"), "--temperature is -1.0: it must be at least 0"),
        (("--top-k", "3"), "--top-k has no effect"),
        (("--num-samples", "0"), "--num-samples is 0: it must be at least 1"),
        (("--max-input-tokens", "0"), "--max-input-tokens is 0"),
        (("--max-batch-tokens", "0"), "--max-batch-tokens"),
        (("--logit-bias", "5"), "logit_bias has '5': use --logit-bias ID:NUMBER"),
        (("--logit-bias", "900:1"), "the model's vocab_size is 300"),
        (("--prompt", "a"), "--prompt and --input are both given"),
        (("--layout.dp", "0"), "layout.dp is 0"),
    ],
)
def test_what_is_refused_before_work_begins(material, tmp_path, words, said):
    rows = written(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "猫" * 30})
    out = tmp_path / "out.jsonl"
    result = dolmen("generate", material.model, "--input", rows, "--output", out, *words)
    assert result.code == 2 and said in result.words, result.err
    assert result.err.count("\n") == 1 and not out.exists() and not journal_path(out).exists()


def test_an_output_that_exists_and_bad_rows(material, tmp_path):
    rows = written(tmp_path / "in.jsonl", {"prompt": "a"}, "{", {"text": "b"}, {"prompt": "c"})
    out = written(tmp_path / "out.jsonl", "mine")
    arguments = ("generate", material.model, "--input", rows, "--max-new-tokens", 2, "--output")
    result = dolmen(*arguments, out)
    assert result.code == 2 and "out.jsonl exists" in result.err and out.read_text() == "mine\n"
    out.unlink()
    result = dolmen(*arguments, out)
    assert result.code == 2 and "in.jsonl, line 2: is not JSON" in result.err and not out.exists()
    result = dolmen(*arguments, out, "--skip-bad")
    assert result.code == 0 and "2 rows skipped" in result.err
    assert [row["prompt"] for row in read(out)] == ["a", "c"]
    assert "wrote" in result.err and "per second" in result.err
    result = dolmen(*arguments, out, "--skip-bad", "--resume")
    assert result.code == 0 and "has all 2 rows: nothing left to do" in result.err
    result = dolmen(*arguments, tmp_path / "no/out.jsonl")
    assert result.code == 2 and "does not exist: create it" in result.err
    result = dolmen("generate", material.model, "--prompt", "a", "--output", out)
    assert result.code == 2 and "--output needs --input FILE" in result.err


def test_a_run_that_is_ended_goes_on(material, tmp_path, monkeypatch):
    """After so many rows, by an error of the disk; torn lines are in tests/serving."""
    given = [{"prompt": "abc " * (i % 4 + 1), "n": i} for i in range(9)]
    rows, out = written(tmp_path / "in.jsonl", *given), tmp_path / "out.jsonl"
    words = (*WARM, "--max-new-tokens", 6, "--stop", "a")
    whole = answers(material.model, rows, tmp_path / "whole.jsonl", *words)
    assert len({len(row["tokens"]) for row in whole}) > 1
    arguments = ("generate", material.model, "--input", rows, "--output", out, *words)
    given_back, real = [], offline.OutputFile.add

    def failing(self, number, answer):
        given_back.append(number)
        if len(given_back) == 5:
            raise Failed("the disk is full", final=True)
        real(self, number, answer)

    with monkeypatch.context() as patched:
        patched.setattr(offline.OutputFile, "add", failing)
        assert dolmen(*arguments).code == 1
    assert journal_path(out).exists() and len(read(out)) < 9
    result = dolmen(*arguments)
    assert result.code == 2 and "is unfinished" in result.err
    result = dolmen(*arguments, "--resume", "--top-k", 4)
    assert result.code == 2 and "top_k was None when" in result.err
    there, waiting = out.read_bytes(), journal_path(out).read_bytes()
    written(out, whole[1])  # the first row is gone
    result = dolmen(*arguments, "--resume")
    assert result.code == 2 and "out.jsonl, line 1: it does not belong to " in result.err
    assert read(out) == whole[1:2] and journal_path(out).read_bytes() == waiting
    out.write_bytes(there)
    seen = []
    monkeypatch.setattr(
        offline.OutputFile, "add", lambda self, n, a: (seen.append(n), real(self, n, a))
    )
    result = dolmen(*arguments, "--resume")
    assert result.code == 0, result.err
    assert read(out) == whole and not journal_path(out).exists()
    assert sorted(seen + given_back[:4]) == list(range(9))  # none is answered twice


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(material, tmp_path):
    rows = written(
        tmp_path / "in.jsonl", *({"prompt": "abc " * (i % 5), "n": i} for i in range(800))
    )
    out = tmp_path / "out.jsonl"
    words = ["generate", material.model, "--input", rows, "--output", out, "--max-new-tokens", 6]
    arguments = [*map(str, words), "--temperature", "1"]
    path = os.environ | {"PYTHONPATH": tinyrun.path_of()}
    with subprocess.Popen([sys.executable, "-m", "dolmen", *arguments], env=path) as killed:
        while not (out.exists() and out.stat().st_size):
            assert killed.poll() is None
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
    assert journal_path(out).exists() and 0 < out.read_bytes().count(b"\n") < 800
    assert dolmen(*arguments, "--resume").code == 0
    found = read(out)
    assert [row["n"] for row in found] == list(range(800))
    few = written(
        tmp_path / "few.jsonl",
        *(
            {**row, "id": i + 1}
            for i, row in enumerate({"prompt": row["prompt"]} for row in found[:40])
        ),
    )
    again = answers(material.model, few, tmp_path / "few", *arguments[6:])
    assert [row["tokens"] for row in again] == [row["tokens"] for row in found[:40]]


def test_two_models_of_two_stages_share_the_rows(material, tmp_path, capfd, forked_ranks):
    """Each takes the next when it is free; the answers are those of one process."""
    given = [{"prompt": "abc " * (i % 4 + 1), "n": i} for i in range(11)]
    rows = written(tmp_path / "in.jsonl", *given)
    words = (*WARM, "--max-new-tokens", 6, "--stop", "a", "--num-samples", 2)
    alone = answers(material.model, rows, tmp_path / "alone", *words)
    layout = ("--layout.dp", 2, "--layout.pp", 2)
    assert answers(material.model, rows, tmp_path / "shared", *words, *layout) == alone
    output = capfd.readouterr().err
    assert output.count("wrote") == 1 and "11 rows" in output


def said(monkeypatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_chat(chatty, monkeypatch):
    def line(text: str) -> str:
        reader = load_tokenizer(str(chatty))
        ids = reader(text, add_special_tokens=False)["input_ids"]
        return package.load(chatty).generate(ids, max_new_tokens=5, temperature=0).text

    said(monkeypatch, "ab\n/history\ncd\\\nef\n/nothing\n/reset\nab\n/exit\nnever\n")
    result = dolmen("chat", chatty, "--system", "be", "--temperature", 0)
    assert result.code == 0, result.err
    first = line("<s>be\n<u>ab\n<a>")
    second = line(f"<s>be\n<u>ab\n<a>{first}\n<u>cd\nef\n<a>")
    assert result.out == f"{first}\n{second}\n{first}\n"
    assert f"system: be\nuser: ab\nassistant: {escape(first)}\n" in result.err
    assert "there is no command /nothing: /help lists" in result.err
    assert result.err.count("(the reply was truncated at 5 tokens: increase --max-new-tokens)") == 3


def test_an_answer_that_stops_by_itself_is_not_called_cut(chatty, monkeypatch):
    """Nor where the stop string ends with the last token that it may have."""
    said(monkeypatch, "ab\n")
    answer = dolmen("chat", chatty, "--temperature", 0).out.rstrip("\n")
    said(monkeypatch, "ab\n")
    result = dolmen("chat", chatty, "--temperature", 0, "--stop", answer[-1])
    assert result.out.rstrip("\n") == answer[: answer.index(answer[-1])]
    assert "was truncated" not in result.err


def test_ctrl_c_ends_an_answer_and_not_the_chat(chatty, monkeypatch):
    from dolmen.serving import engine

    real, steps = engine.Engine.step, []

    def step(self):
        steps.append(1)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGINT)
        return real(self)

    monkeypatch.setattr(engine.Engine, "step", step)
    said(monkeypatch, "ab\n/history\n/retry\n")
    result = dolmen("chat", chatty, "--temperature", 0)
    assert result.code == 0
    short, whole = result.out.split("\n")[:2] if result.out.count("\n") == 2 else (None, result.out)
    assert short is not None and whole.startswith(short) and len(steps) == 2 + 5
    assert f"assistant: {short}\n" in result.err


def test_a_chat_that_cannot_be(material, chatty, monkeypatch):
    result = dolmen("chat", material.model)
    assert result.code == 2 and "the tokenizer has no chat template" in result.err
    assert "dolmen generate --prompt" in result.err
    said(monkeypatch, "a b c d e f g h i j " * 5 + "\nab\n")
    result = dolmen("chat", chatty, "--temperature", 0)
    assert (
        result.code == 0 and "max_position_embeddings is 64: start again with /reset" in result.err
    )
    assert result.out.count("\n") == 1  # and the chat goes on
