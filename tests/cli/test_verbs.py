"""export, verify and generate: out of a run, into transformers, and back."""

import json
import shutil
import sys

import pytest
import tinyrun
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from tinyrun import dolmen, losses, rows, same, tensors

from dolmen.cli import LOADING, command, main
from dolmen.conversion.source import open_source
from dolmen.core.messages import BadInput

material, one_thread = tinyrun.material, tinyrun.one_thread


@pytest.fixture(scope="module")
def run(material, tmp_path_factory):
    """Three steps from the model of transformers, in bfloat16 on disk."""
    out = tmp_path_factory.mktemp("runs") / "run"
    result = dolmen(
        "train",
        "pretrain",
        "--init",
        material.model,
        "--data.path",
        material.docs,
        "--data.cache",
        material.folder / "cache",
        "--out",
        out,
        "--train.steps",
        3,
        "--train.global-batch-size",
        2,
        "--optimizer.lr",
        1e-2,
        "--log.validate-every",
        0,
    )
    assert result.code == 0, result.err
    return out


@pytest.fixture(scope="module")
def exported(run):
    assert dolmen("export", run, "--to", run.parent / "hf").code == 0
    return run.parent / "hf"


def their_logits(folder, tokens, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)(
        tokens
    ).logits.detach()


def test_init_starts_from_the_model(material, run):
    """The first loss, of a step of which no update has been made, is that of the directory."""
    first = rows(run)[0]
    assert abs(first["loss"] - 5.7) < 0.05 and first["step"] == 1
    model = load_file(material.model / "model.safetensors")
    saved = tensors(run, 3)
    moved = (
        saved["model/layers.0.mlp.up.weight"] - model["model.layers.0.mlp.up_proj.weight"].float()
    ).abs()
    assert 0 < moved.max() < 3 * 1e-2  # three updates of at most lr


def test_export_is_what_was_trained(run, exported):
    """The directory's tensors are the checkpoint's in the dtype of the source; transformers opens
    it with its tokenizer.
    """
    assert {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json"} <= {
        p.name for p in exported.iterdir()
    }
    written, saved = load_file(exported / "model.safetensors"), tensors(run, 3)
    assert {t.dtype for t in written.values()} == {torch.bfloat16} and {
        t.dtype for t in saved.values()
    } == {torch.float32}
    assert torch.equal(
        written["model.layers.1.self_attn.q_proj.weight"],
        saved["model/layers.1.attn.q.weight"].bfloat16(),
    )
    assert transformers.AutoTokenizer.from_pretrained(exported).decode([5, 6])
    assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_has_the_logits_of_the_run(run, tmp_path):
    from dolmen.core.mesh import SINGLE
    from dolmen.model.head import compute_logits
    from dolmen.serving import engine

    assert (
        dolmen(
            "export",
            run / "checkpoints" / "step-00000003",
            "--to",
            tmp_path / "hf",
            "--dtype",
            "float32",
        ).code
        == 0
    )
    tokens = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(0))
    assert {t.dtype for t in load_file(tmp_path / "hf" / "model.safetensors").values()} == {
        torch.float32
    }
    with torch.no_grad():
        ours = engine.load_decoder(open_source(tmp_path / "hf"), SINGLE)(tokens, compute_logits)
    assert (ours - their_logits(tmp_path / "hf", tokens)).abs().max() < 1e-5


def test_export_of_a_run_from_nothing_is_float32(material, tmp_path):
    result = dolmen(
        "train",
        material.file,
        "--out",
        tmp_path / "out",
        "--train.steps",
        1,
        "--train.dtype",
        "bfloat16",
        "--finish.export",
        "--finish.verify",
        "--finish.sample",
        "ab",
        "--finish.compressors",
    )
    assert (
        result.code == 0
        and "computes the same logits" in result.out
        and "a sample" in result.out
        and "gzip -9" in result.out
    ), result.out
    assert {t.dtype for t in load_file(tmp_path / "out" / "hf" / "model.safetensors").values()} == {
        torch.float32
    }
    # the tokenizer's
    assert (
        json.loads((tmp_path / "out" / "hf" / "generation_config.json").read_text())["eos_token_id"]
        == 0
    )
    again = dolmen(
        "train",
        material.file,
        "--out",
        tmp_path / "out",
        "--resume",
        "--finish.export",
        "--train.steps",
        2,
    )
    assert again.code == 0 and losses(tmp_path / "out")[-1][0] == 2  # and hf/ is written anew


def test_export_refuses_a_full_folder(run, exported):
    before = (exported / "model.safetensors").stat().st_mtime_ns
    result = dolmen("export", run, "--to", exported)
    assert (
        result.code == 2
        and "exists and is not empty" in result.err
        and (exported / "model.safetensors").stat().st_mtime_ns == before
    )


def test_verify(exported, material, tmp_path):
    result = dolmen("verify", exported, "--length", 16)
    assert result.code == 0 and "DIFFERS" not in result.out
    assert all(
        f"\n{row} " in result.out for row in ("logits", "loss", "gradient norm", "greedy tokens")
    )
    other = dolmen("verify", exported, "--against", material.model, "--length", 16)
    assert other.code == 1 and "DIFFERS" in other.out
    shutil.copytree(exported, tmp_path / "changed")  # one weight of one element more
    weights = load_file(exported / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] += 1.0
    save_file(weights, tmp_path / "changed" / "model.safetensors", metadata={"format": "pt"})
    assert dolmen("verify", exported, "--against", tmp_path / "changed", "--length", 16).code == 1


def test_generate(exported):
    """Greedy text is that of transformers, the prompt before it; --temperature draws, the same for
    the same seed.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    prompt = tokenizer("abc def", return_tensors="pt").input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    theirs = tokenizer.decode(
        model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)[0],
        skip_special_tokens=True,
    )
    first = dolmen("generate", exported, "--prompt", "abc def", "--max-new-tokens", 12)
    assert (
        first.code == 0
        and first.out == theirs.rstrip("\N{REPLACEMENT CHARACTER}") + "\n"
        and len(first.out) > len("abc def\n")
    )
    words = (
        "generate",
        exported,
        "--prompt",
        "abc def",
        "--max-new-tokens",
        12,
        "--temperature",
        1,
        "--seed",
    )
    sampled = [dolmen(*words, seed).out for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2] and sampled[0] != first.out


def test_a_run_is_what_its_export_is(material, run, exported):
    """To every verb that reads a model: text and losses are equal to the letter."""
    step = run / "checkpoints" / "step-00000003"
    cache = ("--data.cache", material.folder / "cache")
    texts, losses_ = set(), set()
    for name in (run, step, exported):
        result = dolmen("generate", name, "--prompt", "abc def", "--max-new-tokens", 12)
        read = dolmen("evaluate", name, "--data.path", material.docs, *cache)
        assert result.code == read.code == 0, (result.err, read.err)
        texts.add(result.out)
        losses_.add(" ".join(read.out.partition("loss")[2].split()))
    assert len(texts) == len(losses_) == 1
    verified = dolmen("verify", run, "--length", 16)
    assert verified.code == 0 and "exported" in verified.out, verified.out
    # the export is in bfloat16, the run is not
    assert dolmen("verify", exported, "--against", run, "--length", 16).code == 1


def test_init_of_a_run_is_that_of_its_export(material, run, tmp_path):
    """The first step is equal to the bit, and config.yaml says which checkpoint it was."""
    assert dolmen("export", run, "--to", tmp_path / "hf", "--dtype", "float32").code == 0
    began = {}
    for name in (run, tmp_path / "hf"):
        out = tmp_path / f"from-{name.name}"
        words = ["train", "pretrain", "--init", name, "--out", out, "--train.steps", 1]
        words += ["--data.path", material.docs, "--data.cache", material.folder / "cache"]
        result = dolmen(*words, "--train.global-batch-size", 2, "--log.validate-every", 0)
        assert result.code == 0, result.err
        began[name] = (losses(out), tensors(out, 1))
    (ours, first), (theirs, second) = began.values()
    assert ours == theirs and ours[0][0] == 1 and same(first, second)
    said = yaml.safe_load((tmp_path / f"from-{run.name}" / "config.yaml").read_text())
    assert said["init"] == str(run / "checkpoints" / "step-00000003")
    again = dolmen("export", tmp_path / "hf", "--to", tmp_path / "half", "--dtype", "float16")
    reported = f"wrote {tmp_path}/half, from {tmp_path}/hf, a transformers directory\n"
    assert again.code == 0 and reported == again.out


def test_a_run_goes_on_without_what_it_began_with(material, run, tmp_path):
    """Another run deletes its old checkpoints, whoever has begun with one of them."""
    source, out, other = (tmp_path / name for name in ("source", "out", "other"))
    shutil.copytree(run, source)
    words = ["train", "pretrain", "--init", source, "--out", out, "--train.global-batch-size", 2]
    words += ["--data.path", material.docs, "--data.cache", material.folder / "cache"]
    assert dolmen(*words, "--train.steps", 1, "--log.validate-every", 0).code == 0
    shutil.copytree(out, other)
    ended = {}
    for folder in (out, other):
        result = dolmen("train", folder / "config.yaml", "--resume", "--train.steps", 2)
        assert result.code == 0 and "changed: tokenizer" not in result.out, result
        ended[folder] = losses(folder), tensors(folder, 2)
        shutil.rmtree(source, ignore_errors=True)
    assert ended[out][0] == ended[other][0] and same(ended[out][1], ended[other][1])
    said = yaml.safe_load((other / "config.yaml").read_text())["init"]
    assert said == str(source / "checkpoints" / "step-00000003")
    again = dolmen("train", other / "config.yaml", "--out", tmp_path / "again")
    assert again.code == 2 and f"{said}: no such folder" in again.words


def test_what_is_no_model_is_refused_by_every_verb(material, run, tmp_path):
    damaged, started = tmp_path / "damaged", tmp_path / "begun"
    shutil.copytree(run / "checkpoints", damaged / "checkpoints")
    with open(damaged / "checkpoints" / "step-00000003" / "state.json", "r+b") as file:
        file.write(b"x")
    (started / "checkpoints" / "step-00000002.partial").mkdir(parents=True)
    for folder, said in (
        (damaged, "state.json is damaged: its content has changed since it was saved"),
        (started, "begun has no complete checkpoint: checkpoints/ has only step-00000002.partial"),
        (material.docs, "docs is neither a Megatron checkpoint (latest_chec"),
    ):
        for words in (
            ("generate", folder, "--prompt", "a"),
            ("verify", folder),
            ("verify", material.model, "--against", folder),
            ("evaluate", folder, "--data.path", material.docs),
            ("export", folder, "--to", tmp_path / "to"),
            ("train", "pretrain", "--init", folder, "--data.path", material.docs),
        ):
            result = dolmen(*words)
            assert result.code == 2 and said in result.words, (words, result)
            assert not result.out and result.err.count("\n") == 1
    assert not (tmp_path / "to").exists()


def test_no_verb_writes_over_what_exists(tmp_path):
    """One rule for the outputs of all verbs, applied before models or data are opened."""
    mine, rows = tmp_path / "mine.yaml", tmp_path / "in.jsonl"
    mine.write_text("mine")
    rows.write_text('{"prompt": "a"}\n')
    answered = ("generate", "no-model", "--input", rows, "--output")
    verbs = [
        ("evaluate", "no-model", "--data.path", "no-text", "--json"),
        ("diff", "no-model", "transformers", "--json"),
        ("dryrun", "gpt-1.7b", "--json"),
        ("plan", "gpt-1.7b", "--cluster", "dgx-a100:1", "--json"),
        ("plan", "gpt-1.7b", "--cluster", "dgx-a100:1", "--as-recipe"),
        ("schedule", "1f1b", "--out"),
        ("show", tmp_path, "--out"),
        answered,
        (*answered, tmp_path / "new", "--num-samples", 2, "--reward", "exact", "--best"),
    ]
    for words in verbs:
        for output in (mine, "/dev/null") if "--as-recipe" not in words else (mine,):
            result = dolmen(*words, output)
            assert result.code == 2 and f"{words[-1]} {output} exists" in result.err, (
                words,
                result,
            )
    assert mine.read_text() == "mine" and {*tmp_path.iterdir()} == {mine, rows}


def test_a_person_who_waits_is_told_at_once(monkeypatch, capsys):
    """On a terminal before the verb is imported; of a server always."""

    def refuse(*_):
        raise BadInput("read")

    monkeypatch.setattr(command, "read", lambda *_: None)
    monkeypatch.setattr(command, "run", refuse)
    for terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        for verb in LOADING:
            assert main([verb, "a\nb"]) == 2
            said = "loading model a\\nb ...\n" if terminal or verb == "serve" else ""
            assert capsys.readouterr().err == f"{said}dolmen {verb}: read\n"
    assert main(["serve", "--help"]) == 2 and "loading" not in capsys.readouterr().err


def test_names_are_printed_on_one_line(tmp_path):
    """A line break in a file name is escaped wherever a verb names the file."""
    run = tmp_path / "a\nrun"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    for words in (
        ("schedule", "1f1b", "--out", tmp_path / "a\nb.txt"),
        ("show", run, "--out", tmp_path / "a\nb.html"),
        ("plan", "gpt-1.7b", "--cluster", "dgx-a100:1", "--no-dryrun", "--layout.tp", 8)
        + ("--as-recipe", tmp_path / "a\nb.yaml"),
    ):
        result = dolmen(*words)
        (line,) = [line for line in result.out.splitlines() if line.startswith("wrote ")]
        assert result.code == 0 and "a\\nb." in line, result
