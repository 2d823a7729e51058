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
from types import FunctionType, SimpleNamespace

import pytest
import tinyrun
import torch
import transformers
from references import spoiled
from rich.console import Console

import dolmen
from dolmen.conversion.source import open_source
from dolmen.data.config import TextConfig
from dolmen.data.tokenizer import train_bpe
from dolmen.evaluation import perplexity
from dolmen.evaluation.validate import Losses

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


def reference(folder, length: int, apart: bool = False) -> float:
    """The sum of the losses in nats, in float64. `apart`: attention ends with a document; positions
    are relative, so each piece may be a sequence of its own.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float64, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    end = tokenizer.eos_token_id
    text = [end]
    for document in (FILE, *ROWS):
        text += [*tokenizer(document, add_special_tokens=False)["input_ids"], end]
    nats = 0.0
    for start in range(0, len(text) - 1, length):
        window = text[start : start + length + 1]
        ends = [i + 1 for i, token in enumerate(window[:-1]) if token == end] if apart else []
        for a, b in zip([0, *ends], [*ends, len(window) - 1], strict=True):
            if a < b:
                with torch.no_grad():
                    logits = model(torch.tensor([window[a:b]])).logits[0]
                labels = torch.tensor(window[a + 1 : b + 1])
                nats += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
    return nats


@pytest.mark.parametrize("length", (POSITIONS, 7))
@pytest.mark.parametrize("apart", (False, True), ids=("through", "apart"))
def test_the_numbers_are_those_of_transformers(folder, length, apart):
    """float32 against float64: 1e-6 of the loss is what test_perplexity.py holds."""
    nats = reference(folder, length, apart)
    found = evaluated(folder, sequence_length=length, document_mask=apart)
    tokens = BYTES + DOCUMENTS
    assert (found.tokens, found.bytes, found.documents) == (tokens, BYTES, DOCUMENTS)
    assert found.sequence_length == length
    assert found.loss == pytest.approx(nats / tokens, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / BYTES, rel=1e-6)


def test_what_a_token_sees_is_seen(folder):
    """Negative control of the test above: each way to read is another number."""
    losses = {
        reference(folder, length, apart) for length in (POSITIONS, 7) for apart in (False, True)
    }
    assert len({round(loss, 3) for loss in losses}) == 4


def test_the_window_is_that_of_the_model_within_a_limit(folder, tmp_path):
    assert evaluated(folder).sequence_length == POSITIONS
    wide = spoiled(folder / "model", tmp_path / "wide", max_position_embeddings=1 << 17)
    config = TextConfig((str(folder / "text"),), cache=str(folder / "cache"))
    text = perplexity.open_text(open_source(wide), config, progress=False)
    assert text.sequence_length == 2048 and text.tokens == BYTES + DOCUMENTS


def test_the_batch_does_not_matter(folder, monkeypatch):
    whole = evaluated(folder, sequence_length=7)
    monkeypatch.setattr(perplexity, "TOKENS_AT_ONCE", 14)  # two windows of ten at a time
    in_parts = evaluated(folder, sequence_length=7)
    assert in_parts.tokens == whole.tokens
    assert in_parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_progress_counts_every_token(folder, monkeypatch, capsys):
    reached = []

    @contextlib.contextmanager
    def bar(title, total, shown, count):
        assert shown and total == BYTES + DOCUMENTS
        yield reached.append

    monkeypatch.setattr(perplexity, "TOKENS_AT_ONCE", 14)
    monkeypatch.setattr(perplexity, "bar", bar)
    text, cache = folder / "text", folder / "cache"
    dolmen.evaluate(folder / "model", text, sequence_length=7, cache=cache)
    assert reached == [14, 28, 42, 56, BYTES + DOCUMENTS]
    monkeypatch.undo()
    capsys.readouterr()
    evaluated(folder)
    assert capsys.readouterr() == ("", "")


def command(folder, *words):
    return tinyrun.dolmen("evaluate", *words, "--data.cache", folder / "cache")


def test_the_command_says_what_the_function_gives(folder, monkeypatch):
    monkeypatch.chdir(folder)
    shown = command(folder, "model", "--data.path", "text", "--sequence-length", 7)
    found = evaluated(folder, sequence_length=7)
    assert shown.code == 0, shown.err
    assert " ".join(shown.out.split()) == (
        f"model model loss {found.loss:.6f} nats per token perplexity {found.perplexity:.6g} bits "
        f"per byte {found.bits_per_byte:.6f} tokens 63 bytes 59 documents 4 context windows of 7 "
        "tokens"
    )
    half = command(folder, "model", "--data.path", "text", "--dtype", "bfloat16")
    assert half.code == 0 and f"{evaluated(folder, dtype='bfloat16').loss:.6f} nats" in half.out
    assert f"{evaluated(folder).loss:.6f} nats" not in half.out


def test_the_table_fits_80_columns(folder):
    screen = io.StringIO()
    many = replace(evaluated(folder), tokens=10**15, perplexity=1.23456e300)
    Console(file=screen, width=200).print(many.table("/a/long/way" * 20))
    lines = screen.getvalue().splitlines()
    assert len(lines) > 9 and max(map(len, lines)) <= 80
    assert "1,000,000,000,000,000" in screen.getvalue()


def test_a_perplexity_that_no_float_holds():
    text = SimpleNamespace(bytes=1, documents=1, sequence_length=1)
    assert perplexity.Evaluation.of(Losses(1e6, 1, 1e6), text).perplexity == math.inf


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
        "the tokenizer has 258 tokens, the model's vocab_size is 257: use another --data.tokenizer",
    ),
    "a tokenizer to be made": (
        "{model}",
        {"path": "{text}", "tokenizer": "bpe:257"},
        "the tokenizer that it was trained with",
    ),
    "weights": ("{model}", {"path": "0.5:{text}"}, "leave them out"),
    "over the positions": (
        "{model}",
        {"path": "{text}", "sequence_length": 17},
        "sequence_length is 17, the model's max_position_embeddings 16: use --sequence-length 1 to",
    ),
    "no window": (
        "{model}",
        {"path": "{text}", "sequence_length": 0},
        "use --sequence-length 1 to 16",
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
    words = [f"{names.get(name, '--sequence-length')}={value}" for name, value in options.items()]
    cache = tmp_path / "cache"
    shown = tinyrun.dolmen("evaluate", source, *words, "--data.cache", cache)
    assert shown.code == 2 and said in shown.err and shown.err.count("\n") == 1, shown
    assert not shown.out and not cache.exists()
    if "sequence_length" in options:
        options["sequence_length"] = int(options["sequence_length"])
    with pytest.raises(ValueError) as raised:
        dolmen.evaluate(source, **{"path": (), **options}, cache=cache)
    keywords = shown.err.replace("--data.", "").replace("--sequence-length", "sequence_length")
    assert keywords == f"dolmen evaluate: {raised.value}\n"


def test_a_layout_that_does_not_fit_is_refused_before_the_text_is_read(folder, tmp_path):
    words = ("--data.path", folder / "text", "--layout.tp", 3, "--data.cache", tmp_path / "cache")
    shown = tinyrun.dolmen("evaluate", folder / "model", *words)
    assert shown.code == 2 and "num_attention_heads (4) is not divisible by tp (3)" in shown.err
    assert shown.err.count("\n") == 1 and not (tmp_path / "cache").exists()
    with pytest.raises(ValueError, match="dtype is 'float8': use one of"):
        evaluated(folder, dtype="float8")


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
    words += ["--sequence-length", "7", "--layout.tp", "2", "--data.cache", str(folder / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "dolmen", *words],
        env={**os.environ, "PYTHONPATH": tinyrun.path_of(Path(__file__).parent)},
        capture_output=True,
        text=True,
    )
    whole = evaluated(folder, sequence_length=7)
    assert done.returncode == 0 and done.stdout.count("nats per token") == 1, done.stderr
    loss = float(done.stdout.split("loss")[1].split()[0])
    assert loss == pytest.approx(whole.loss, abs=2e-6)  # six digits are printed
    assert done.stderr.count("evaluating 63 tokens in 9 windows") == 1
