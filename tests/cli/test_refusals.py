"""Bad input: exit code 2 before the first step and before any process, nothing written, nothing
lost, and a message with the numbers and the knob.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import tinyrun
import torch
from safetensors.torch import load_file, save_file
from tinyrun import CONFIG, Material, dolmen

import dolmen as package
from dolmen.cli.runs import parse_run
from dolmen.core import mesh as meshes
from dolmen.data import inputs, loader
from dolmen.launch import launcher, process
from dolmen.recipes import overrides
from dolmen.training import worker

material, one_thread = tinyrun.material, tinyrun.one_thread


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    """Whoever starts processes, or trains, has not refused."""

    def started(*args):
        raise AssertionError("processes were started")

    monkeypatch.setattr(launcher, "launch", started)
    monkeypatch.setattr(process, "run_worker", started)


def refused(material: Material, out: Path, *words, file: str | Path | None = None) -> str:
    """What `dolmen train` says when it refuses; it has written nothing."""
    before = sorted(material.folder.rglob("*"))
    result = dolmen("train", file or material.file, *words, "--out", out)
    assert result.code == 2, (result.code, result.out, result.err)
    assert not out.exists() and not result.out
    # one line, in one style, whoever found it
    assert result.err.startswith("dolmen train: ") and result.err.count("\n") == 1
    assert [p for p in sorted(material.folder.rglob("*")) if p not in before] == []
    return result.words


OPTIONS = {
    # layouts
    "tp-heads": (
        "--layout.tp 8",
        "num_attention_heads (4) is not divisible by tp (8): set --layout.tp to a divisor, "
        "such as 4",
    ),
    "tp-ffn": (
        "--layout.tp 4 --model.intermediate-size 50",
        "intermediate_size (50) is not divisible by tp (4): set --layout.tp",
    ),
    "dp-batch": (
        "--layout.dp 4 --train.global-batch-size 6",
        "train.global-batch-size (6) is not divisible by dp (4): set --train.global-batch-size to "
        "4 or 8, or use 3 or 6 processes (dp 3 or 6)",
    ),
    "microbatch": (
        "--train.microbatch-size 3",
        "4 sequences per rank is not divisible by train.microbatch-size (3): set "
        "--train.microbatch-size 2",
    ),
    "microbatch-dp": (
        "--layout.dp 2 --train.microbatch-size 4",
        "(4) / dp (2) = 2 sequences per rank is not divisible by train.microbatch-size (4)",
    ),
    "sequence-parallel": (
        "--layout.tp 2 --layout.sequence-parallel --train.sequence-length 15 "
        "--train.microbatch-size 1",
        "the 1 x 15 tokens of a microbatch over tp (2), by which they are not divisible: set "
        "--train.sequence-length to a multiple",
    ),
    "nproc": (
        "--layout.tp 2 --nproc 3",
        "layout.tp (2) is not a divisor of the 3 processes: set --layout.tp 1, or use a multiple",
    ),
    "nproc-1": (
        "--nproc 3 --layout.dp 1",
        "layout.tp (1) x layout.dp (1) = 1 process, but there are 3",
    ),
    "nproc-dp": (
        "--layout.dp 4 --nproc 2",
        "layout.tp (1) x layout.dp (4) = 4 processes, but there are 2",
    ),
    "spares": ("--spares", "--spares is for processes that torchrun has started"),
    "nproc-0": ("--nproc 0", "--nproc is 0: it must be at least 1"),
    "theta-0": (
        "--model.rope-theta 0",
        "--model.rope-parameters.rope-theta is 0.0: it must be over 0",
    ),
    "tp-0": ("--layout.tp 0", "layout.tp is 0: it must be at least 1"),
    "zero-7": ("--layout.zero 7", "--layout.zero is '7': use one of 0, 1, 2, 3"),
    # the model: as many layers would fill the memory before anything could be refused
    "layers": (
        "--model.num-hidden-layers 1000000000",
        "--model.num-hidden-layers is 1000000000: it must be at most 4,096",
    ),
    "hidden-0": (
        "--model.hidden-size 0",
        "--model.hidden-size is 0: it must be at least 1",
    ),
    "experts": (
        "--model.model-type mixtral --model.num-experts -1",
        "--model.num-local-experts is -1: it must be at least 1",
    ),
    "matrices": (
        "--model.model-type mixtral --model.num-hidden-layers 4096 --model.num-local-experts 16384",
        "num_hidden_layers (4,096) x experts (16,384) are 67,108,864, more than 262,144",
    ),
    # data
    "no-data": ("--data.path", "--data.path needs a value"),
    "missing": ("--data.path {folder}/none.txt", "none.txt: no such file or folder"),
    "missing-folder": ("--data.path {folder}/docs/none/", "no such file or folder"),
    "empty": ("--data.path {scratch}/empty.txt", "empty.txt: 1 file with 0 bytes"),
    "empty-folder": ("--data.path {scratch}/empty", "none readable"),
    "short": (
        "--data.path {scratch}/short.txt",
        "fewer than one window of sequence_length + 1 (17): use a smaller --train.sequence-length",
    ),
    "validation": (
        "--data.validation {folder}/none.txt",
        "--data.validation {folder}/none.txt: no such file or folder",
    ),
    "fraction": (
        "--data.validation-fraction 0.9",
        "data.validation-fraction is 0.9: it must be at most 0.5",
    ),
    # tokenizers
    "vocabulary": (
        "--model.vocab-size 200",
        "the tokenizer has 300 tokens, but the model's vocab_size is 200: use --model.vocab-size "
        "300 or more",
    ),
    "no-tokenizer": ("--data.tokenizer {folder}/docs", "no tokenizer"),
    "no-end": (
        "--data.tokenizer {scratch}/no-end",
        "defines no EOS token to end documents with: use --data.end-of-text",
    ),
    "end": (
        "--data.end-of-text <none>",
        "--data.end-of-text '<none>' is not one of the tokenizer's 300 tokens",
    ),
    # the run
    "long": (
        "--train.sequence-length 65",
        "train.sequence-length (65) exceeds the model's max_position_embeddings (64): set "
        "--train.sequence-length 64",
    ),
    "steps": ("--train.steps 0", "train.steps is 0: it must be at least 1"),
    "validate-every": (
        "--log.validate-every -1",
        "log.validate-every is -1: it must be at least 0",
    ),
    "log-every": ("--log.every 0", "log.every is 0: it must be at least 1"),
    "keep": ("--checkpoint.keep -1", "checkpoint.keep is -1: it must be at least 0"),
    "lr": ("--optimizer.lr -1", "optimizer.lr is -1.0: it must be at least 0"),
    "lr-nan": ("--optimizer.lr nan", "optimizer.lr is nan: it must be finite"),
    "warmup": (
        "--optimizer.warmup-steps -4",
        "optimizer.warmup-steps is -4: it must be at least 0",
    ),
    "beta": (
        "--optimizer.beta1 2",
        "optimizer.beta1 is 2.0: it must be less than 1",
    ),
    "nobody": ("--init ~no-such-user/model", "~no-such-user/model: no such folder"),
    "nobody-text": ("--data.path ~no-such-user/text/", "no such file or folder"),
    "nobody-words": ("--data.tokenizer ~no-such-user/words", "~no-such-user/words: no such folder"),
    "finish": (
        "--finish.verify",
        "finish.verify reads the exported model: set --finish.export too, or --finish.no-verify",
    ),
    "sample": (
        "--finish.sample x",
        "finish.sample reads the exported model: set --finish.export too, or --finish.sample None",
    ),
    "family": ("--model.model-type lama", "'lama': did you mean llama"),
    "inexpressible": (
        "--model.norm layernorm",
        "unknown option --model.norm: this depends on the model family: choose one",
    ),
    "head-dim": ("--model.head-dim 7", "head_dim (7) is odd"),
    "both": ("--resume --overwrite", "--resume and --overwrite exclude each other"),
    # words
    "unknown": ("--train.step 5", "unknown option --train.step: did you mean --train.steps?"),
    "type": (
        "--train.steps five",
        "--train.steps is 'five': it must be a whole number, or None",
    ),
    "float": (
        "--data.validation-fraction x",
        "--data.validation-fraction is 'x': it must be a number",
    ),
    "fraction-for-int": ("--train.seed 1.5", "--train.seed is '1.5': it must be a whole number"),
    "list": (
        "--model.model-type qwen3_moe --model.mlp-only-layers a",
        "--model.mlp-only-layers is 'a': it must be whole numbers, or None",
    ),
    "no-value": ("--train.steps", "--train.steps needs a value"),
    "flag": (
        "--train.compile yes",
        "yes is not an option: --train.compile does not take this value",
    ),
    "attention": (
        "--train.attention flash",
        "train.attention flash: FlashAttention-2 needs a GPU of compute capability 8.x or later "
        "(CPU): use --train.attention auto",
    ),
    "literal": (
        "--train.dtype float8",
        "--train.dtype is 'float8': use one of float32, bfloat16, float16, float64",
    ),
    "long-choice": (
        f"--train.dtype {'a' * 500}",
        f"--train.dtype is '{'a' * 77}... (500 characters)': use one of float32,",
    ),
    "long-number": (
        f"--train.steps={'a' * 500}",
        f"--train.steps is '{'a' * 77}... (500 characters)': it must be a whole number, or None",
    ),
    "long-digits": ("--train.steps " + "9" * 5000, f"is '{'9' * 77}... (5,000 characters)'"),
    "long-name": (
        f"--{'a' * 500} 1",
        f"unknown option --{'a' * 77}... (500 characters): dolmen train --help --all lists",
    ),
    "long-stray": (
        f"--train.compile {'a' * 500}",
        f"{'a' * 77}... (500 characters) is not an option: --train.compile does not take this "
        "value",
    ),
    "stray": ("stray", "stray is not an option: did you mean dolmen train"),
    # a terminal would turn the line around
    "override": ("--train.steps \u202e5", "--train.steps is '\\u202e5': it must be a whole number"),
    "override-name": ("--\u202ea 5", "unknown option --\\u202ea: dolmen train --help --all lists"),
    "other-shape": (
        "--init {folder}/model --model.hidden-size 64",
        "/model has weights of another shape than the run's --model.hidden-size 64 (32): leave "
        "out the options that change the shape, or train without --init",
    ),
}


@pytest.fixture(scope="module")
def scratch(material, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    (folder / "empty").mkdir()
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("too short")
    shutil.copytree(material.tokenizer, folder / "no-end")
    (folder / "no-end" / "special_tokens_map.json").unlink(missing_ok=True)
    file = folder / "no-end" / "tokenizer_config.json"
    file.write_text(
        json.dumps(
            {k: v for k, v in json.loads(file.read_text()).items() if not k.endswith("_token")}
        )
    )
    return folder


@pytest.mark.parametrize("case", OPTIONS)
def test_options(material, scratch, tmp_path, case):
    words, want = (text.format(folder=material.folder, scratch=scratch) for text in OPTIONS[case])
    assert want in refused(material, tmp_path / "out", *words.split())


FILES = {
    "key": ("train: {step: 5}", "unknown option train.step: did you mean steps?"),
    "section": ("optimiser: {lr: 1}", "unknown option optimiser: did you mean optimizer?"),
    "no-model-field": (
        "model: {model_type: llama, dolmen: {a: 1}}",
        "dolmen has a field 'a': it can have none",
    ),
    "no-name-near": ("zzz: 1", "unknown option zzz: known are name, init, model"),
    "number": ("1: 2", "it has a field named 1: a name must be text"),
    "inner": (
        "train: {router: {balanse: loss}}",
        "unknown option train.router.balanse: did you mean balance?",
    ),
    "no-model-type": (
        "model: {rms_norm_eps: 1e-6}",
        "model: model_type is missing: set it to the model's family, one of baichuan, bert, bloom,",
    ),
    "matrices": (
        "model: {model_type: mixtral, num_hidden_layers: 4096, num_local_experts: 16384}",
        "model: num_hidden_layers (4,096) x experts (16,384) are 67,108,864, more than 262,144",
    ),
    "another-family": ("model: {model_type: t5}", "model: model_type is 't5': dolmen knows"),
    "field": (
        "model: {model_type: llama, hidden_size: wide}",
        "model: hidden_size is 'wide': it must be a whole number",
    ),
    "text-for-int": ("train: {steps: five}", "train.steps is 'five': it must be a whole number"),
    "float-for-int": ("train: {steps: 2.5}", "train.steps is 2.5: it must be a whole number"),
    "bool-for-int": ("train: {steps: true}", "train.steps is True: it must be a whole number"),
    "text-for-bool": (
        "layout: {sequence_parallel: 'yes'}",
        "layout.sequence-parallel is 'yes': it must be true or false",
    ),
    "text-for-float": ("optimizer: {lr: fast}", "optimizer.lr is 'fast': it must be a number"),
    "null-for-float": ("optimizer: {lr: null}", "optimizer.lr is None: it must be a number"),
    "null-section": ("optimizer:", "optimizer must be a mapping of options, not None"),
    "number-for-text": ("data: {path: [1]}", "data.path is 1: it must be text"),
    "choice": (
        "train: {dtype: float8}",
        "train.dtype is 'float8': use one of float32, bfloat16, float16, float64",
    ),
    "bool-for-choice": ("layout: {zero: true}", "layout.zero is True: use one of 0, 1, 2, 3"),
    "range": ("optimizer: {lr: -1}", "optimizer.lr is -1: it must be at least 0"),
    "list": ("[1, 2]", "it is a list of 2: it must be a mapping"),
    "text": ("hello", "it is 'hello': it must be a mapping"),
    "broken": ("a: [b", "is not valid YAML"),
    "binary": ("\0\1", "is not valid YAML"),
}


@pytest.mark.parametrize("case", FILES)
def test_files(material, tmp_path, case):
    content, want = FILES[case]
    (tmp_path / "run.yaml").write_text(content)
    said = refused(material, tmp_path / "out", file=tmp_path / "run.yaml")
    assert f"{tmp_path}/run.yaml" in said and want in said


def test_a_file_that_is_not_text(material, tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00\x80")
    assert "is not UTF-8" in refused(material, tmp_path / "out", file=tmp_path / "run.yaml")


def missing(model: Path):
    change(model, lambda t: t.pop("model.layers.0.mlp.up_proj.weight"))


def extra(model: Path):
    change(model, lambda t: t.update({"model.layers.0.mlp.gate.bias": torch.zeros(3)}))


def misshaped(model: Path):
    change(model, lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(50, 32)}))


def truncated(model: Path):
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 100)


def no_config(model: Path):
    (model / "config.json").unlink()


def no_weights(model: Path):
    (model / "model.safetensors").unlink()


def pickled(model: Path):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def other_class(model: Path):
    (model / "config.json").write_text(json.dumps({"model_type": "t5"}))


def change(model: Path, how) -> None:
    tensors = load_file(model / "model.safetensors")
    how(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


MODELS = {
    missing: "1 tensor is missing, e.g. ['model.layers.0.mlp.up_proj.weight']",
    extra: "1 tensor has no counterpart in the model, e.g. ['model.layers.0.mlp.gate.bias']",
    misshaped: "model.layers.1.mlp.up_proj.weight is (50, 32) in",
    truncated: "model.safetensors: is truncated",
    no_config: "has no config.json",
    no_weights: "has neither model.safetensors nor",
    pickled: "pytorch_model.bin: cannot be read: byte 0 is",
    other_class: "model_type is 't5': dolmen knows baichuan, bert, bloom",
}


@pytest.mark.parametrize("damage", MODELS, ids=lambda f: f.__name__)
def test_init(material, tmp_path, damage):
    model = tmp_path / "model"
    shutil.copytree(material.model, model)
    damage(model)
    said = refused(
        material, tmp_path / "out", "--init", model, "--data.path", material.docs, file="pretrain"
    )
    assert MODELS[damage] in said and str(model) in said
    if damage is misshaped:
        assert "config.json implies (48, 32): check intermediate_size" in said
    for verb in ("verify", "generate"):  # the same from every verb that loads a model
        result = dolmen(verb, model, *(["--prompt", "a"] if verb == "generate" else []))
        assert result.code == 2 and MODELS[damage] in result.words and not result.out


def test_init_that_is_not_there(material, tmp_path):
    said = refused(
        material,
        tmp_path / "out",
        "--init",
        "no/such/model/here",
        "--data.path",
        material.docs,
        file="pretrain",
    )
    assert "no/such/model/here: no such folder" in said


def test_no_model(material, tmp_path):
    said = refused(material, tmp_path / "out", "--data.path", material.docs, file="pretrain")
    assert "no model: give --init (a transformers directory or hub id)" in said
    assert "define one with --model.model-type and its fields" in said


def test_the_recipe_comes_first():
    for words in ([], ["--out", "x", "quickstart"]):
        result = dolmen("train", *words)
        assert result.code == 2 and "name a recipe or a YAML file first" in result.err


def test_a_folder_that_holds_something(material, tmp_path):
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    for words, want in (
        ([], f"{out} is not empty and does not contain a dolmen run: give another --out"),
        (["--overwrite"], f"--overwrite would delete {out}, which has no config.yaml"),
    ):
        result = dolmen("train", material.file, "--out", out, *words)
        assert result.code == 2 and want in result.words
        assert (out / "notes.txt").read_text() == "mine" and len(list(out.iterdir())) == 2


def test_a_folder_is_refused_before_a_model_is_opened(material, tmp_path, monkeypatch):
    monkeypatch.setattr(overrides, "resolve_init", lambda *_: pytest.fail("a model was opened"))
    (tmp_path / "notes.txt").write_text("mine")
    for words in (("--out", tmp_path), (f"--out={tmp_path}", "--train.steps", 3)):
        result = dolmen("train", "pretrain", "--init", material.model, *words)
        assert result.code == 2 and "is not empty and does not contain" in result.words


def test_a_folder_that_holds_a_run(material, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".dolmen").write_text("config.yaml\n")
    result = dolmen("train", material.file, "--out", out)
    assert result.code == 2
    assert f"{out} already contains a run: use --resume to continue it, --overwrite" in result.words


def test_a_folder_that_cannot_be(material, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        result = dolmen("train", material.file, "--out", out)
        assert result.code == 2 and f"{tmp_path}/file is a file: give a folder" in result.words
    assert (tmp_path / "file").read_text() == "mine"


def test_overwrite_never_deletes_what_the_run_reads(material, tmp_path):
    """A model, data, tokenizer or run file inside the folder that would be emptied."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.yaml").write_text(material.file.read_text())
    shutil.copytree(material.model, out / "hf")
    shutil.copytree(material.docs, out / "docs")
    shutil.copy(material.file, out / "mine.yaml")
    for words in (
        ["pretrain", "--init", out / "hf", "--data.path", material.docs],
        [material.file, "--data.path", out / "docs" / "01.txt"],
        [material.file, "--data.path", f"0.5:{out}/docs", f"0.5:{material.docs}"],
        [material.file, "--data.tokenizer", out / "hf"],
        [material.file, "--data.validation", out / "docs" / "01.txt"],
        [out / "mine.yaml"],
    ):
        result = dolmen("train", *words, "--out", out, "--overwrite")
        assert result.code == 2 and f"--overwrite would delete {out}/" in result.words, result
        assert len(list(out.iterdir())) == 4


def test_export(material, tmp_path):
    for words, want in (
        ([tmp_path / "nowhere", "--to", tmp_path / "to"], "nowhere: no such folder"),
        (
            [material.docs, "--to", tmp_path / "to"],
            "nor a run or checkpoint of dolmen (checkpoints/, step-NNNNNNNN/), nor Meta's files of "
            "a Llama (params.json, consolidated.00.pth), nor adapters of PEFT "
            "(adapter_config.json): it holds 00.txt, 01.txt,",
        ),
        (["nowhere"], "missing --to (Folder to write"),
        (
            [material.model / "config.json", "--to", tmp_path / "to"],
            f"{material.model}/config.json is a file: give the folder, {material.model}",
        ),
        ([], "missing SOURCE (A run's folder"),
    ):
        result = dolmen("export", *words)
        assert result.code == 2 and want in result.words and not (tmp_path / "to").exists()


def test_verify_and_generate(material, monkeypatch, tmp_path):
    # these two refuse a request after loading
    monkeypatch.setattr(process, "run_worker", lambda work: work())
    bare = tmp_path / "bare"
    shutil.copytree(material.model, bare)
    for file in bare.glob("*token*"):
        file.unlink()
    for words, want in (
        (
            ["verify", material.model, "--layout.tp", 3],
            "num_attention_heads (4) is not divisible by tp (3)",
        ),
        (["verify", material.model, "--layout.tp", 0], "layout.tp is 0"),
        (["verify", material.model, "--length", 0], "--length is 0: it must be at least 1"),
        (
            ["verify", material.model, "--against", "no/such/model/here"],
            "no/such/model/here: no such folder",
        ),
        (
            ["generate", material.model],
            "dolmen generate: missing --prompt (Text to continue), or --input (File of prompts)",
        ),
        (
            ["generate", material.model, "--prompt", "a", "--temperature", -1],
            "--temperature is -1.0: it must be at least 0",
        ),
        *(
            (["generate", "nowhere", "--prompt", "a", option, value], said)
            for option, value, said in (
                ("--temperature", "1e-320", "is 1e-320: it must be 0 (greedy), or at least"),
                ("--temperature", "inf", "temperature is inf: it must be finite"),
                ("--temperature", "nan", "temperature is nan: it must be finite"),
                ("--temperature", "warm", "--temperature is 'warm': it must be a number"),
                ("--top-k", "0", "--top-k is 0: it must be at least 1"),
                ("--top-k", "-3", "--top-k is -3: it must be at least 1"),
                ("--top-p", "0", "--top-p is 0.0: it must be over 0"),
                ("--top-p", "nan", "top-p is nan: it must be finite"),
                ("--prompt", "ab\udcff", "UTF-8 cannot write it"),
                ("--layout.tp", "0", "layout.tp is 0: it must be at least 1"),
            )
        ),
        (
            ["generate", "~no-such-user/model", "--prompt", "a"],
            "~no-such-user/model: no such folder",
        ),
        (
            ["verify", material.model, "--against", "~no-such-user/x"],
            "~no-such-user/x: no such folder",
        ),
        (["generate", bare, "--prompt", "a"], f"{bare}: no tokenizer"),
        (
            ["generate", material.model, "--prompt", "a", "--max-new-tokens", 0],
            "--max-new-tokens is 0: it must be at least 1",
        ),
        (
            ["generate", material.model, "--prompt", "a", "--top-p", 3],
            "--top-p is 3.0: it must be at most 1",
        ),
    ):
        result = dolmen(*words)
        assert result.code == 2 and want in result.words and not result.out, result
        assert result.err.count("\n") == 1 and "--data." not in result.err, result


def test_the_model_of_the_file_is_checked_like_that_of_a_recipe(material, tmp_path):
    (tmp_path / "run.yaml").write_text(
        f"model: {json.dumps(CONFIG | {'num_key_value_heads': 3})}\n"
    )
    assert "num_attention_heads (4) is not divisible by num_key_value_heads (3)" in refused(
        material, tmp_path / "out", file=tmp_path / "run.yaml"
    )


def launch_of(local_rank: int) -> meshes.Launch:
    return meshes.Launch(
        rank=2 + local_rank, world_size=4, local_rank=local_rank, local_world_size=2
    )


@pytest.mark.parametrize(
    "started, by_us, expected",
    [
        (None, False, [("inputs", True), ("cache", True)]),
        (launch_of(0), False, [("inputs", True), ("cache", True)]),
        (launch_of(1), False, [("inputs", False), ("cache", False)]),
        (launch_of(0), True, []),
    ],
    ids=["launcher", "local rank 0 of torchrun", "local rank 1 of torchrun", "a process of ours"],
)
def test_one_process_per_host_verifies(material, tmp_path, monkeypatch, started, by_us, expected):
    """The launcher, or local rank 0 under torchrun, compares the cache with its digests and tries
    the tokenizer.
    """
    calls = []

    def checked(*args, verify=True, **_):
        calls.append(("inputs", verify))

    def prepared(*args, verify=True, **_):
        calls.append(("cache", verify))

    monkeypatch.setattr(inputs, "check_inputs", checked)
    monkeypatch.setattr(loader, "load", prepared)
    monkeypatch.setattr(meshes.Launch, "read", staticmethod(lambda: started))
    monkeypatch.setattr(process, "launched_here", lambda: by_us)
    monkeypatch.setattr(process, "one_store", lambda: False)
    words = [str(material.file), "--out", str(tmp_path / "out")]
    words += ["--layout.dp", "4" if started else "1"]
    monkeypatch.setattr(worker, "worker", lambda *_, **__: None)
    monkeypatch.setattr(worker, "finish_run", lambda *_: 0)
    assert worker.run(parse_run("train", words)) == 0
    assert calls == expected


@pytest.mark.parametrize("option", ["--out", "--init", "--data.path", "--data.cache"])
def test_an_empty_name_is_none(material, tmp_path, monkeypatch, option):
    """As of a variable of the shell that was never set: it is not the default."""
    monkeypatch.chdir(tmp_path)
    section, _, name = option.removeprefix("--").rpartition(".")
    with pytest.raises(ValueError, match=f"{name} is empty: give a name"):
        package.train(material.file, **({section: {name: ""}} if section else {name: ""}))
    for words in ((option, ""), (f"{option}=",)):
        result = dolmen("train", material.file, "--train.steps", 1, *words)
        assert result.code == 2 and f"{option.strip('-')} is empty: give a name" in result.words
        assert not os.listdir(tmp_path)


LOCAL = (
    "tokenize --data.path x --data.tokenizer y --to",
    "vocab train --data.path x --size 300 --kind bpe --to",
    "vocab merge a b --to",
    "vocab extend a --tokenizer b --to",
    "generate a --input x --output",
    "generate a --input x --output y --best",
    "train quickstart --data.cache",
    "launch slurm run.yaml --nodes 2 --file",
    "show a --out",
    "schedule 1f1b --out",
    "plan a --report",
    "plan a --as-recipe",
    *(f"{verb} --json" for verb in ("plan a", "dryrun gpt-1t", "diff a b", "evaluate a")),
)


def test_what_is_written_to_no_url_is_not_written_to_a_folder_named_like_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in LOCAL:
        result = dolmen(*words.split(), "s3://a/b")
        option = words.split()[-1].removeprefix("--")
        assert result.code == 2, words
        assert f"{option} is 's3://a/b': it must be a path of this machine" in result.words, words
        assert not os.listdir(tmp_path)


def test_an_export_to_an_empty_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = dolmen("export", tmp_path, "--to", "")
    assert result.code == 2 and "--to is empty: give a name" in result.words


@pytest.mark.parametrize(
    "option, value, want",
    [
        ("--train.seed", "99999999999999999999999", "it must be at most 9,223,372,036,854,775,8"),
        ("--train.seed", "-5", "train.seed is -5: it must be at least 0"),
        ("--train.steps", "99999999999999999999", "train.steps is 99999999999999999999: it must"),
        ("--log.every", str(2**53 + 1), "log.every is 9007199254740993: it must be at most 9,007"),
        (
            "--train.hang-seconds",
            "1e300",
            "train.hang-seconds is 1e+300: it must be at most 100,0",
        ),
        ("--train.hang-seconds", "inf", "train.hang-seconds is inf: it must be finite"),
        ("--optimizer.warmup-steps", str(10**20), "it must be at most 9,007,199,254,740,992"),
    ],
)
def test_a_number_without_sense(material, tmp_path, option, value, want):
    result = dolmen("train", material.file, "--out", tmp_path / "out", option, value)
    assert result.code == 2 and want in result.words and "Traceback" not in result.words
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "want"),
    [
        # what "$UNSET" is to a shell
        (["train", "pretrain", ""], "'' is not an option: dolmen train --help lists them"),
        (
            ["train", "pretrain", "--train.compile", ""],
            "'' is not an option: --train.compile does not take this value (dolmen train --help)",
        ),
        (["generate", "model", "--prompt", "a", ""], "'' is not an option: dolmen generate --help"),
        # in one order, whatever the hash of the day
        (
            ["generate", "model", "--prompt", "a", "--dtype", "float8"],
            "--dtype is 'float8': use one of float32, bfloat16, float16",
        ),
    ],
)
def test_words_that_mean_nothing(words, want):
    done = dolmen(*words)
    assert done.code == 2 and want in done.words and "Traceback" not in done.err
    assert "None" not in done.words


def test_a_mistyped_verb_is_answered():
    result = dolmen("trian")
    assert result.code == 2 and "no verb 'trian': did you mean train?" in result.words
    assert "did you mean" not in dolmen("frobnicate").err
