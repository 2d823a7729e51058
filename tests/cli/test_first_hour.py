"""What a new user meets in the first hour: words that say what to do, and no silence."""

import json
import re
import shutil
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import tinyrun
import torch
import yaml
from tinyrun import MODEL, dolmen
from transformers import LlamaConfig, LlamaForCausalLM

import dolmen as package
from dolmen.core.messages import choices
from dolmen.data.base_loader import Loader
from dolmen.families import ModelConfig
from dolmen.families.unknown import unknown_fields_warning
from dolmen.recipes import RECIPES
from dolmen.serving import engine
from dolmen.training.checks.warn import (
    MISMATCH,
    batch_over_epoch,
    logprob_mismatch,
    small_validation_split,
    unused_rows,
    warmup_over_run,
)
from dolmen.training.finish import _next, _summary


class Held:
    """A loader, as far as `small_validation_split` looks."""

    unit, global_batch_size = "token", 1
    validation_share = Loader.validation_share

    def __init__(self, held: int, trained: int):
        self.validation_tokens = held
        self.mixture = SimpleNamespace(parts=[SimpleNamespace(stream=range(trained))])


material, one_thread = tinyrun.material, tinyrun.one_thread
finished_run = tinyrun.finished_run


@pytest.mark.parametrize("word, value", [("top_k", 5), ("top_p", 0.9)])
def test_what_draws_is_refused_where_nothing_is_drawn(material, word, value):
    option = f"--{word.replace('_', '-')}"
    said = f"{option} has no effect without sampling: add --temperature 1"
    result = dolmen("generate", material.model, "--prompt", "a", option, value)
    assert (result.code, result.err) == (2, f"dolmen generate: {said}\n")
    said = f"^{word} has no effect without sampling: add temperature 1$"
    with pytest.raises(ValueError, match=said):
        package.generate(material.model, "a", **{word: value})


def test_several_prompts_give_several_texts(material):
    model, prompts = package.load(material.model), ["ab", "abc abc", "ab"]
    texts = [str(one) for one in model.generate(prompts, max_new_tokens=4)]
    assert texts == [str(model.generate(prompt, max_new_tokens=4)) for prompt in prompts]
    (first,) = package.generate(material.model, ("ab",), max_new_tokens=4)
    assert str(first) == texts[0]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    result = dolmen("generate", material.model, *words, "--max-new-tokens", 4)
    assert result.code == 0 and result.out == "".join(f"{text}\n" for text in texts)
    for wrong in (3, ["a", None]):
        with pytest.raises(ValueError, match="^the prompt is (3|None): it must be a text$"):
            model.generate(wrong)


@pytest.fixture(scope="module")
def run(finished_run, tmp_path_factory) -> Path:
    """Of six steps, with a warm-up of two."""
    return shutil.copytree(finished_run, tmp_path_factory.mktemp("run") / "run")


def test_a_checkpoint_past_the_asked_steps_is_refused(run):
    result = dolmen("train", run / "config.yaml", "--resume", "--train.steps", 2)
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        "dolmen train: the checkpoint is at step 6, but --train.steps is 2: use a larger "
        "--train.steps, or export the checkpoint "
        f"(dolmen export {run} --to model/)\n"
    )


def test_a_changed_option_is_told_once(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    words = ("--train.steps", 7, "--train.global-batch-size", 8, "--train.seed", 1)
    result = dolmen("train", copy / "config.yaml", "--resume", *words)
    reported = [line.strip() for line in result.out.splitlines() if "changed: " in line]
    assert sorted(reported) == [
        "changed: train.global_batch_size: 4 -> 8",
        "changed: train.microbatch_size: 4 -> 8",
        "changed: train.seed: 0 -> 1",
        "changed: train.steps: 6 -> 7",
    ]


def test_the_warning_of_a_warm_up_names_what_would_do(run, material):
    """Nothing is left to train at 6 of 6: no rate is to be reached."""
    words = ("--optimizer.warmup-steps", 40)
    assert "WARNING" not in dolmen("train", run / "config.yaml", "--resume", *words).out
    config = material.config(optimizer={"warmup_steps": 40})
    assert "set --optimizer.warmup-steps 11 or less" in warmup_over_run(config, 12)


def test_a_folder_is_no_recipe(material, run):
    for folder, said in (
        (
            material.docs,
            f"to train on its files: dolmen train pretrain --data.path {material.docs}",
        ),
        (run, f"dolmen train {run}/config.yaml starts its run"),
    ):
        result = dolmen("train", folder)
        assert result.code == 2 and result.err.startswith(f"dolmen train: {folder} is a folder")
        assert said in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize("name", ["nomodel/", "./nomodel", "/nomodel", "~/nomodel", "a/b/c"])
def test_a_mistyped_folder_is_told_without_the_hub(name):
    with pytest.raises(ValueError, match=f"^{name}: no such folder$"):
        package.load(name)
    for verb, words in (("verify", ()), ("generate", ("--prompt", "a"))):
        result = dolmen(verb, name, *words)
        assert (result.code, result.err) == (2, f"dolmen {verb}: {name}: no such folder\n")


def test_what_a_run_wrote_and_what_comes_next(run, tmp_path, material):
    last = _summary(material.config(), json.loads((run / "summary.json").read_text()), run, None)
    said = {row[0]: row[1] for row in zip(*(column.cells for column in last.columns), strict=True)}
    assert said["next"] == f"dolmen export {run} --to model/"
    for name in ("summary.json", "tokenizer", "config.yaml", "metrics.jsonl", "checkpoints"):
        assert name in said["written"]
    (tmp_path / "hf").mkdir()
    for sample, prompt in (
        (None, "'Once upon a time'"),
        ("def f(it's):\n", """'def f(it'"'"'s):'"""),
    ):
        config = material.config(finish={"export": True, "sample": sample})
        assert _next(config, tmp_path) == f"dolmen generate {tmp_path}/hf --prompt {prompt}"
    chats = replace(config, data=replace(config.data, rows="chats"))
    assert _next(chats, tmp_path) == f"dolmen chat {tmp_path}/hf"


def test_an_encoder_is_verified_next_as_it_cannot_generate(tmp_path):
    (tmp_path / "hf").mkdir()
    bert = RECIPES["bert"]()
    assert _next(bert, tmp_path) == f"dolmen verify {tmp_path}/hf"


@pytest.mark.parametrize(
    "words, said",
    [
        ("--train.dtype bf16", "--train.dtype is 'bf16': did you mean bfloat16?"),
        ("--train.dtype fp16", "--train.dtype is 'fp16': did you mean float16?"),
        ("--train.dtype fp32", "--train.dtype is 'fp32': did you mean float32?"),
        ("--train.dtype fp64", "--train.dtype is 'fp64': did you mean float64?"),
        ("--train.dtype torch.float32", "is 'torch.float32': did you mean float32?"),
        (
            "--data.path Org/Name --data.tokenizer bpe:300",
            "--data.tokenizer bpe:300 trains on local files only, but Org/Name is not a local "
            "file, so it is a hub id: give the path of your files, or",
        ),
    ],
)
def test_what_was_meant(material, words, said):
    result = dolmen("train", material.file, *words.split())
    assert result.code == 2 and said in result.err and result.err.count("\n") == 1


def test_short_names_of_types_are_known_everywhere(material):
    with pytest.raises(ValueError, match=r"^dtype is 'bf16': did you mean bfloat16\?$"):
        package.generate(material.model, "a", dtype="bf16")
    with pytest.raises(ValueError, match=r"^train.dtype is 'fp16': did you mean float16\?$"):
        material.config(train={"dtype": "fp16"})
    assert choices("int8", ("float32", "float16")) == "use one of float32, float16"


def test_the_recipes_fit_a_terminal_of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = dolmen("recipes").out.splitlines()
    assert all(line.strip() and len(line) <= 80 for line in lines)
    assert "some 3 minutes on 2 cores" in " ".join(" ".join(lines).split())


def test_rows_and_fields_that_nobody_uses_are_told(material, tmp_path):
    file, values = tmp_path / "run.yaml", material.options()
    file.write_text(yaml.safe_dump({**values, "model": {**values["model"], "flux_capacitor": 1}}))
    words = ("train", file, "--train.steps", 2, "--out")
    result = dolmen(*words, tmp_path / "a", "--model.vocab-size", 430)
    assert result.code == 0 and (
        "WARNING: vocab_size is 430, but the tokenizer has only 300 tokens: 130 rows of the "
        "embedding are never used; "
        "set --model.vocab-size 300" in " ".join(result.out.split())
    )
    assert "WARNING: the model's config.json has flux_capacitor" in " ".join(result.out.split())
    assert unused_rows(428, 300) is None  # 128 rows
    assert unused_rows(50304, 45274) is None and unused_rows(50304, 45273)  # a tenth: 5,030.4


def test_fields_that_nobody_knows_are_told():
    known = {"model_type": "llama", "vocab_size": 64}
    assert unknown_fields_warning(ModelConfig(known)) is None
    strange = {"flux_capacitor": 1, "num-hiden-layers": 2, "dropout": 0.1}
    assert unknown_fields_warning(ModelConfig(known | strange)) == (
        "the model's config.json has dropout (did you mean --train.dropout?), flux_capacitor, "
        "num-hiden-layers (did you mean num_hidden_layers?), unknown to llama: kept "
        "for export, without effect on the model"
    )


def test_a_warning_of_unknown_fields_is_bounded_and_hints_inside():
    said = unknown_fields_warning(
        ModelConfig({"model_type": "llama"} | {f"x{i:05}": 1 for i in range(5000)})
    )
    assert "x00007, and 4,992 more, unknown" in said and len(said) < 300
    assert len(unknown_fields_warning(ModelConfig({"model_type": "llama", "y" * 100_000: 1}))) < 300
    rope = {"rope_type": "default", "rope_thetta": 1.0}
    said = unknown_fields_warning(ModelConfig({"model_type": "llama", "rope_parameters": rope}))
    assert "rope_parameters.rope_thetta (did you mean rope_theta?)" in said


def test_every_verb_tells_what_nobody_knows_once(material, tmp_path):
    """A run in its header; the others as a warning."""
    model, run = shutil.copytree(material.model, tmp_path / "model"), tmp_path / "run"
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | {"flux_capacitor": 1}))
    line = "the model's config.json has flux_capacitor, unknown to llama"
    text = ("--data.path", material.docs)
    for words in (
        ("verify", model, "--length", 4),
        ("generate", model, "--prompt", "a", "--max-new-tokens", 1),
        ("evaluate", model, *text),
        ("train", "pretrain", "--init", model, *text, "--train.steps", 1, "--out", run),
        ("export", run, "--to", tmp_path / "to"),
    ):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            result = dolmen(*words)
        assert result.code == 0, result
        said = [
            *(str(warning.message) for warning in warned),
            *result.out.split(),
            *result.err.split(),
        ]
        assert " ".join(said).count(line) == 1, (words, said)
    with pytest.warns(UserWarning, match=line):
        package.load(model)


def test_little_held_out_text_is_told(material, tmp_path):
    """A short text of one's own, less than a batch, less than a fifth of what was asked for; and
    nothing is said where there is none.
    """
    text = tmp_path / "few.txt"
    text.write_text("abc")
    words = ("train", material.file, "--train.steps", 2, "--optimizer.warmup-steps", 1, "--out")
    for name, options, said in (
        (
            "a",
            ("--data.validation", text),
            "tokens, and a batch 64: its loss is noisy; use more",
        ),
        ("b", ("--train.global-batch-size", 128), "3.00% requested), and a batch 2,048: its loss"),
        ("c", ("--data.validation-fraction", 0), None),
        ("d", (), None),
    ):
        result = dolmen(*words, tmp_path / name, *options)
        found = " ".join(result.out.split())
        assert result.code == 0 and ("WARNING" in found) == (said is not None), found
        assert said is None or said in found, found
    run = material.config(data={"validation_fraction": 0.25})
    assert "(0.40% of the text, 25.00% requested)" in small_validation_split(run, Held(80, 19920))
    assert "use a larger --data.validation-fraction" in small_validation_split(
        run, Held(999, 19001)
    )
    assert small_validation_split(run, Held(1000, 19000)) is None  # a fifth of a quarter


def test_a_batch_over_an_epoch_is_told(material):
    def loader(*sizes):  # sequences of sources that are read alike
        def epochs(samples):
            return {str(i): samples / size for i, size in enumerate(sizes)}

        return SimpleNamespace(mixture=SimpleNamespace(epochs=epochs))

    run = material.config(train={"global_batch_size": 64})
    said = batch_over_epoch(run, loader(20))
    assert "train.global-batch-size (64) exceeds an epoch of the training data (20 seq" in said
    assert "reads every sequence 3.2 times; set --train.global-batch-size 20 or less" in said
    assert batch_over_epoch(run, loader(64)) is None
    assert batch_over_epoch(run, loader(20, 100)) is None  # the other one lasts longer
    grpo = material.config(train={"global_batch_size": 64}, objective={"name": "grpo"})
    assert batch_over_epoch(grpo, loader(20)) is None


def test_trainer_and_generator_that_disagree_are_told_with_what_to_look_at(material):
    def reported(off: float, dtype: str) -> str:
        numbers = {MISMATCH: off, "rollout/logprob_difference": 0.01}
        return logprob_mismatch(material.config(train={"dtype": dtype}), numbers, 6) or ""

    assert logprob_mismatch(material.config(), {}, 6) is None and not reported(1.0, "float32")
    assert "after step 6 trainer and generator disagree" in reported(1.1, "float32")
    assert "--rollout.tp 1" in reported(3, "float32") and "is 3 times as far" in reported(
        3, "float32"
    )
    assert "Rounding to bfloat16 can" in reported(300, "bfloat16")


def test_only_tokens_of_the_tokenizer_are_drawn(material, tmp_path):
    """All that a model of 2,000 rows draws has a text, though 300 of them alone have one."""
    folder = shutil.copytree(material.model, tmp_path / "model")
    torch.manual_seed(0)
    config = LlamaConfig(**{**MODEL, "vocab_size": 2000}, bos_token_id=0, eos_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)
    model = package.load(folder)
    ids = [[1, 2], [3, 4]]
    for temperature in (0.0, 2.0):
        known = model.tokenizer.get_vocab().values()
        assert max(map(max, engine.generate(model.decoder, ids, 8, temperature))) >= 300
        sampled = engine.generate(model.decoder, ids, 8, temperature, known=known)
        assert max(map(max, sampled)) < 300
    words = ("--temperature", 1, "--max-new-tokens", 8)
    result = dolmen("generate", folder, "--prompt", "ab", *words)
    assert result.code == 0 and len(result.out.strip()) > 2
    assert result.out == f"{model.generate('ab', max_new_tokens=8, temperature=1.0)}\n"


@pytest.mark.parametrize("tokenizer", ["bpe:300", None])
@pytest.mark.parametrize("kind", ["folder", "copy", "rows"])
def test_validation_that_is_all_of_the_data_is_refused(material, tmp_path, kind, tokenizer):
    """The same files, copies of them, the same documents as rows: nothing is trained, and but for
    the rows nothing is tokenised.
    """
    judge = {"folder": material.docs, "copy": tmp_path / "copy", "rows": tmp_path / "r.jsonl"}[kind]
    if kind == "copy":
        shutil.copytree(material.docs, judge)
    if kind == "rows":
        texts = [file.read_text() for file in material.docs.iterdir()]
        judge.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ("--data.validation", judge, "--data.cache", tmp_path / "cache", "--data.tokenizer")
    named = tokenizer or material.tokenizer
    result = dolmen("train", material.file, *words, named, "--out", tmp_path / "run")
    assert result.code == 2 and result.err.endswith(
        f"dolmen train: all of --data.path {material.docs} is also in --data.validation: give "
        "another --data.validation, or leave it out\n"
    )
    assert "training a byte-level" not in result.err and not (tmp_path / "run").exists()
    assert list((tmp_path / "cache").rglob("*.bin")) == [] or (kind, tokenizer) == ("rows", None)


def test_a_file_without_text_can_be_left_out(material, tmp_path):
    """It is the last of the folder: a tokenizer is trained when all have been read."""
    docs = shutil.copytree(material.docs, tmp_path / "notes")
    (docs / "package.json").write_text('{"name": "a", "version": "1"}')
    words = ("--data.path", docs, "--data.tokenizer", "bpe:300", "--data.cache", tmp_path / "cache")
    result = dolmen("train", material.file, *words)
    assert result.code == 2 and result.err == (
        f"dolmen train: {docs}/package.json, row 1: no 'text' but keys name, version: use "
        "--data.text-field; or leave the file out: move it, or name the others with a glob "
        "(notes/*.md)\n"
    )


def test_a_misspelled_option_comes_before_a_folder_that_is_taken(material, run):
    result = dolmen("train", material.file, "--learning_rate", "1e-4", "--out", run)
    assert result.code == 2 and "did you mean --optimizer.lr" in result.err


def test_help_is_broken_into_lines_once():
    """A line of an option's help ends where the next word does not fit, not where the source's
    does.
    """
    shown = dolmen("train", "--help", "--all").out.partition("\noptions:")[2]
    lines = shown.splitlines()
    assert "      --layout.dp, the visible GPUs." in lines
    for line, after in pairwise(lines):
        indent, word = re.match(r"( *)(\w*)", after).groups()
        if word and re.match(rf"{indent}\w", line):  # of one text
            assert len(line) + 1 + len(after.split()[0]) > 88, (line, after)
