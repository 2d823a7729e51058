"""`dolmen evaluate` and `dolmen.evaluate` beside what transformers makes of the same text in
float64.
"""

import contextlib
import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest
import tinyrun
import torch
import transformers
from references import spoiled
from rich.console import Console

import dolmen
from dolmen.data.tokenizer import train_bpe
from dolmen.evaluation import perplexity
from dolmen.evaluation.perplexity import Windows

one_thread = tinyrun.one_thread

POSITIONS = 16
VOCABULARY = 257  # each byte, and the end of a text: a token per byte
FILE = "héllo wörld, twice: héllo wörld\n"  # 32 characters, 36 bytes
ROWS = ["ab", "a longer row of text", "c"]
BYTES = 36 + 2 + 20 + 1
DOCUMENTS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """tokenizer/, model/ (float32, every parameter random, with the tokenizer), bare/ (the model
    without one) and text/.
    """
    root = tmp_path_factory.mktemp("evaluate")
    train_bpe([FILE], VOCABULARY, root / "tokenizer", progress=False)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.3 + (p.ndim == 1))
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "tokenizer")
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(root / "bare")
        model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    (root / "text").mkdir()
    (root / "text" / "file.txt").write_text(FILE)
    (root / "text" / "rows.jsonl").write_text(
        "".join(json.dumps({"text": row}) + "\n" for row in ROWS)
    )
    return root


def evaluated(folder, **options):
    return dolmen.evaluate(
        folder / "model", folder / "text", cache=folder / "cache", progress=False, **options
    )


def reference(folder, window: int, stride: int) -> tuple[float, int, int]:
    """A plain loop, in float64: the sum of the losses in nats, how many tokens are the likeliest,
    and how many there are.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float64, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    nats, right, counted = 0.0, 0, 0
    for document in (FILE, *ROWS):
        tokens = tokenizer(document, add_special_tokens=False)["input_ids"]
        start = done = 0
        while done < len(tokens):
            text = tokens[start : start + window]
            with torch.no_grad():
                logits = model(torch.tensor([text])).logits[0]
            first = max(done, start + 1) - start
            labels = torch.tensor(text[first:], dtype=torch.long)
            requested = logits[first - 1 : -1]
            nats += torch.nn.functional.cross_entropy(requested, labels, reduction="sum").item()
            right += int((requested.argmax(-1) == labels).sum())
            counted += len(labels)
            start, done = start + stride, start + len(text)
    return nats, right, counted


# (window, stride) -> tokens that are counted; windows by themselves do not count their first
COUNTED = {
    (POSITIONS, POSITIONS): BYTES - 3 - 2 - 1 - 1,
    (7, 7): BYTES - 6 - 3 - 1 - 1,
    (7, 3): BYTES - DOCUMENTS,
    (POSITIONS, 1): BYTES - DOCUMENTS,
}


@pytest.mark.parametrize(("window", "stride"), COUNTED)
def test_the_numbers_are_those_of_transformers(folder, window, stride):
    """float32 against float64: 1e-6 of the loss is what test_perplexity.py holds."""
    nats, right, tokens = reference(folder, window, stride)
    found = evaluated(folder, window=window, stride=stride)
    assert (found.tokens, found.bytes, found.documents) == (tokens, BYTES, DOCUMENTS)
    assert tokens == COUNTED[window, stride]
    assert (found.window, found.stride) == (window, stride)
    assert found.loss == pytest.approx(nats / tokens, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / BYTES, rel=1e-6)
    assert found.accuracy == right / tokens


def test_int8_weights_are_multiplied(folder):
    """Other numbers than exact weights have, and near; not those of tokens that are exact."""
    exact, found = evaluated(folder), evaluated(folder, weights="int8")
    assert 0 < abs(found.loss - exact.loss) < 0.02 * exact.loss
    assert found.tokens == exact.tokens


def test_what_a_token_sees_is_seen(folder):
    """Negative control of the test above: each way to read is another number, and some tokens are
    the likeliest.
    """
    found = [reference(folder, *way) for way in COUNTED]
    assert len({round(nats / tokens, 3) for nats, _, tokens in found}) == len(COUNTED)
    assert all(0 < right < tokens for _, right, tokens in found)


def test_the_window_is_that_of_the_model(folder):
    assert evaluated(folder) == evaluated(folder, window=POSITIONS, stride=POSITIONS)


def test_the_batch_does_not_matter(folder, monkeypatch):
    whole = evaluated(folder, window=7)
    monkeypatch.setattr(perplexity, "TOKENS_AT_ONCE", 14)  # two windows of ten at a time
    in_parts = evaluated(folder, window=7)
    assert in_parts.tokens == whole.tokens
    assert in_parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_progress_counts_every_token(folder, monkeypatch, capsys):
    reached = []

    @contextlib.contextmanager
    def bar(title, total, shown, count):
        assert shown and total == COUNTED[7, 7]
        yield reached.append

    monkeypatch.setattr(perplexity, "TOKENS_AT_ONCE", 14)
    monkeypatch.setattr(perplexity, "bar", bar)
    text, cache = folder / "text", folder / "cache"
    dolmen.evaluate(folder / "model", text, window=7, cache=cache)
    assert len(reached) > 2 and reached == sorted(reached) and reached[-1] == COUNTED[7, 7]
    monkeypatch.undo()
    capsys.readouterr()
    evaluated(folder)
    assert capsys.readouterr() == ("", "")


def command(folder, *words):
    return tinyrun.dolmen("evaluate", *words, "--data.cache", folder / "cache")


def test_the_command_says_what_the_function_gives(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    out = tmp_path / "found.json"
    options = ("--data.path", "text", "--window", 7, "--stride", 3)
    shown = command(folder, "model", *options, "--json", out)
    found = evaluated(folder, window=7, stride=3)
    assert shown.code == 0, shown.err
    assert " ".join(shown.out.split()) == (
        f"model model loss {found.loss:.6f} nats per token perplexity {found.perplexity:.6g} bits "
        f"per byte {found.bits_per_byte:.6f} accuracy {found.accuracy:.4%} of tokens predicted "
        "(top-1) tokens 55 bytes 59 documents 4 read documents in windows of 7 tokens with "
        "stride 3; the first token of each document is not counted"
    )
    written = json.loads(out.read_text())
    assert written == found.json_values()
    assert written.keys() > {"loss", "perplexity", "bits_per_byte", "accuracy", "tokens", "bytes"}
    half = command(folder, "model", "--data.path", "text", "--dtype", "bfloat16")
    assert half.code == 0 and f"{evaluated(folder, dtype='bfloat16').loss:.6f} nats" in half.out
    assert f"{evaluated(folder).loss:.6f} nats" not in half.out
    assert " ".join(half.out.split()).endswith(
        f"documents in windows of up to {POSITIONS} tokens; the first token of each window is not "
        "counted"
    )


def test_the_table_fits_80_columns(folder):
    screen = io.StringIO()
    many = replace(evaluated(folder), tokens=10**15, perplexity=1.23456e300)
    Console(file=screen, width=200).print(many.table("/a/long/way" * 20))
    lines = screen.getvalue().splitlines()
    assert len(lines) > 9 and max(map(len, lines)) <= 80
    assert "1,000,000,000,000,000" in screen.getvalue()


def test_a_perplexity_that_no_float_holds(folder):
    found = perplexity.RowScores(np.array([-1e6]), np.array([0]))
    one = perplexity.ScoringRows(np.array([2]), np.array([1]), lambda row: np.zeros(2, np.int64))
    evaluation = perplexity.Evaluation.from_scores(found, Windows(one, 1, 1, 2, 2))
    assert evaluation.perplexity == math.inf and evaluation.json_values()["perplexity"] is None


def test_files_folders_and_globs_are_one_text(folder):
    text = folder / "text"
    whole = evaluated(folder)
    for path in ([text / "file.txt", text / "rows.jsonl"], str(text / "*"), (str(text),)):
        found = dolmen.evaluate(folder / "model", path, cache=folder / "cache", progress=False)
        assert found == whole
    other = dolmen.evaluate(
        folder / "bare",
        text,
        tokenizer=folder / "tokenizer",
        cache=folder / "cache",
        progress=False,
    )
    assert other == whole


def test_the_function_is_no_folder(folder):
    assert isinstance(dolmen.evaluate, FunctionType)
    assert isinstance(evaluated(folder), perplexity.Evaluation)


REFUSED = {
    "no text named": ("{model}", {}, "no data: use --data.path"),
    "no such file": ("{model}", {"path": "{text}/none.txt"}, "no such file or folder"),
    "no text": ("{model}", {"path": "{empty}"}, "1 file with 0 bytes"),
    "no tokenizer": (
        "{bare}",
        {"path": "{text}"},
        "without --data.tokenizer, {bare}: no tokenizer",
    ),
    "vocabulary": (
        "{model}",
        {"path": "{text}", "tokenizer": "{larger}"},
        "the tokenizer has 258 tokens, but the model's vocab_size is 257: use another --data",
    ),
    "a tokenizer to be made": (
        "{model}",
        {"path": "{text}", "tokenizer": "bpe:257"},
        "the tokenizer that the model was trained with",
    ),
    "weights": ("{model}", {"path": "0.5:{text}"}, "leave them out"),
    "over the positions": (
        "{model}",
        {"path": "{text}", "window": 17},
        "window is 17, but the model's max_position_embeddings is 16: use --window 2 to 16",
    ),
    "no window": ("{model}", {"path": "{text}", "window": 1}, "use --window 2 to 16"),
    "over the window": (
        "{model}",
        {"path": "{text}", "window": 7, "stride": 8},
        "stride is 8, but the window is 7: use --stride 1 to 7",
    ),
    "no model": ("{text}", {"path": "{text}"}, "nor a transformers directory"),
}


@pytest.fixture(scope="module")
def places(folder):
    """Names of REFUSED."""
    (folder / "empty.txt").write_text("")
    made = {name: folder / name for name in ("model", "bare", "text")}
    train_bpe([FILE], 258, folder / "larger", progress=False)
    return made | {"larger": folder / "larger", "empty": folder / "empty.txt"}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(folder, places, tmp_path, case):
    """In one line, with exit code 2 and nothing written; from Python a ValueError of that line."""
    source, options, said = REFUSED[case]
    source, said = source.format(**places), said.format(**places)
    options = {name: str(value).format(**places) for name, value in options.items()}
    names = {"path": "--data.path", "tokenizer": "--data.tokenizer"}
    words = [f"{names.get(name, f'--{name}')}={value}" for name, value in options.items()]
    cache = tmp_path / "cache"
    shown = tinyrun.dolmen("evaluate", source, *words, "--data.cache", cache)
    assert shown.code == 2 and said in shown.err and shown.err.count("\n") == 1, shown
    assert not shown.out and not cache.exists()
    options |= {name: int(options[name]) for name in ("window", "stride") if name in options}
    with pytest.raises(ValueError) as raised:
        dolmen.evaluate(source, **{"path": (), **options}, cache=cache)
    keywords = shown.err
    for option in ("--data.", "--window", "--stride"):
        keywords = keywords.replace(option, option.removeprefix("--").removeprefix("data."))
    assert keywords == f"dolmen evaluate: {raised.value}\n"


def test_a_layout_that_does_not_fit_is_refused_before_the_text_is_read(folder, tmp_path):
    words = ("--data.path", folder / "text", "--layout.tp", 3, "--data.cache", tmp_path / "cache")
    shown = tinyrun.dolmen("evaluate", folder / "model", *words)
    assert shown.code == 2 and "num_attention_heads (4) is not divisible by tp (3)" in shown.err
    assert shown.err.count("\n") == 1 and not (tmp_path / "cache").exists()
    with pytest.raises(ValueError, match="dtype is 'float8': use one of"):
        evaluated(folder, dtype="float8")


def test_a_text_of_which_no_token_is_counted_is_refused(folder, tmp_path):
    (tmp_path / "short.txt").write_text("x")
    shown = command(folder, folder / "model", "--data.path", tmp_path / "short.txt")
    assert (
        shown.code == 2
        and "all documents are shorter than two tokens" in shown.err
        and not shown.out
    )


def test_a_file_that_cannot_be_written_is_refused_before_any_work(folder, tmp_path):
    words = ("--data.path", folder / "text", "--json", tmp_path / "none" / "found.json")
    shown = command(folder, folder / "model", *words)
    assert shown.code == 2 and f"the folder {tmp_path}/none" in shown.err
    assert shown.err.count("\n") == 1


def test_a_loss_that_is_no_number_is_refused(folder, tmp_path):
    def damage(weights):
        weights["model.norm.weight"][3] = math.nan

    broken = spoiled(folder / "model", tmp_path / "broken", damage)
    shown = command(folder, broken, "--data.path", folder / "text")
    assert shown.code == 2 and "the loss is nan: the model has diverged" in shown.err
    assert not shown.out


@pytest.mark.full
def test_two_processes_give_the_same(folder):
    """Through the launcher; the table is printed once."""
    words = ["evaluate", str(folder / "model"), "--data.path", str(folder / "text")]
    words += ["--window", "7", "--layout.tp", "2", "--data.cache", str(folder / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "dolmen", *words],
        env={**os.environ, "PYTHONPATH": tinyrun.path_of(Path(__file__).parent)},
        capture_output=True,
        text=True,
    )
    whole = evaluated(folder, window=7)
    assert done.returncode == 0 and done.stdout.count("nats per token") == 1, done.stderr
    loss = float(done.stdout.split("loss")[1].split()[0])
    assert loss == pytest.approx(whole.loss, abs=2e-6)  # six digits are printed
    # two of the eleven windows have one token, which predicts nothing
    assert done.stderr.count("evaluating 48 tokens in 9 windows") == 1
