"""`import dolmen`: three lines to train, load and generate, in the caller's own process."""

import inspect
import json
import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from enum import StrEnum
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import tinyrun
import torch
import torch.distributed as dist
import yaml
from tinyrun import dolmen as command
from tinyrun import losses, rows, steps

import dolmen
from dolmen import api
from dolmen.api import RunFolder
from dolmen.cli.runs import parse_run
from dolmen.core.config import to_dict
from dolmen.core.mesh import process_group_context
from dolmen.recipes.overrides import build_request
from dolmen.serving import engine
from dolmen.training import loop
from dolmen.training.request import read_run

material, one_thread = tinyrun.material, tinyrun.one_thread


def options(material, **more):
    return {
        "data": {
            "path": [material.docs, material.docs / "*.txt"],
            "tokenizer": material.tokenizer,
            "cache": material.folder / "cache",
        },
        "train": {"steps": 2, "sequence_length": 16, "global_batch_size": 2},
        "log": {"validate_every": 0},
        **more,
    }


@pytest.mark.parametrize("handler", (signal.SIGINT, signal.SIGTERM))
def test_handlers_are_put_back(material, tmp_path, handler):
    before = signal.getsignal(handler)
    dolmen.train(material.file, out=tmp_path / "out", train={"steps": 1})
    assert signal.getsignal(handler) is before


def test_the_hook_for_exceptions_is_put_back():
    """torch wraps it in each process group; a second run would tell `[rank0]:` twice."""
    before = sys.excepthook
    with process_group_context(None, torch.device("cpu")):
        assert sys.excepthook is not before
    assert sys.excepthook is before
    with pytest.raises(ZeroDivisionError), process_group_context(None, torch.device("cpu")):
        raise ZeroDivisionError
    assert sys.excepthook is before


def test_three_lines(material, tmp_path, capsys):
    folder = dolmen.train(
        "pretrain",
        init=material.model,
        out=tmp_path / "out",
        finish={"export": True},
        **options(material),
    )
    model = dolmen.load(folder / "hf")
    text = str(model.generate("abc def", max_new_tokens=8))
    assert folder == tmp_path / "out" and text.startswith("abc def") and len(text) > len("abc def")
    assert model.logits("abc").shape == (len(model.tokenizer("abc")["input_ids"]), 300)
    result = command("generate", folder / "hf", "--prompt", "abc def", "--max-new-tokens", 8).out
    assert result.rstrip("\n") == text.rstrip("\N{REPLACEMENT CHARACTER}")
    assert not dist.is_initialized()


def test_a_run_has_its_history(run, tmp_path):
    """In numbers, those of the file, whatever was not finite."""
    assert run.history == [*map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]
    assert run.losses == [row["loss"] for row in rows(run)] and len(run.losses) == 1
    assert isinstance(run, Path) and run == Path(run) and run.name == "run"
    written = RunFolder(tmp_path)
    assert written.losses == written.history == []
    step = {"tokens": 8, "lr": 0.1}
    reported = [{"step": 1, "loss": 2.5, **step}, {"step": 1, "val_loss": 3.0}]
    reported += [{"step": 2, "loss": None, **step}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reported))
    assert written.history == reported
    assert written.losses[0] == 2.5 and len(written.losses) == 2 and math.isnan(written.losses[1])


def test_options_are_those_of_the_command(material, tmp_path):
    """Flags on and off, lists, nothing, and a value that begins with a dash."""
    made = dolmen.train(
        material.file,
        out=tmp_path / "out",
        model={"model_type": "qwen3"},
        finish={"export": False},
        layout={"sequence_parallel": False},
        data={"path": [material.docs]},
        train={"steps": 1, "microbatch_size": None},
        resume=False,
    )
    assert len(rows(made)) == 1 and "model_type: qwen3" in (made / "config.yaml").read_text()


@pytest.mark.slow
def test_keywords_make_the_run_that_words_make(material):
    """Of one recipe, by either road."""
    for words, changes in (
        ("--train.steps 5 --optimizer.lr 1e-3", {"train.steps": 5, "optimizer": {"lr": 1e-3}}),
        ("--finish.sample=--x --resume", {"finish": {"sample": "--x"}, "resume": True}),
        ("--data.path a b --nproc 3", {"data": {"path": ("a", Path("b"))}, "nproc": 3}),
        ("--train.compile --out x", {"train": {"compile": True}, "out": Path("x")}),
        ("--layout.no-sequence-parallel", {"layout": {"sequence-parallel": False}}),
        ("--model.rope-theta 5", {"model": {"rope_parameters": {"rope_theta": 5.0}}}),
        ("--model.num-key-value-heads 4", {"model": {"num_key_value_heads": 4}}),
        ("--model.initializer-range 0.02", {"model": {"initializer_range": 0.02}}),
        ("--model.dropout 0.1", {"model": {"dropout": 0.1}}),
        (
            "--model.model-type gpt2 --model.hidden-size 96",
            {"model.model-type": "gpt2", "model.hidden_size": 96},
        ),
        (
            "--model.model-type gpt2 --model.n-layer 3",
            {"model": {"model_type": "gpt2", "n_layer": 3}},
        ),
        (f"--init {material.model}", {"init": material.model}),
        ("--train.steps 7", {"train": {"steps": np.int64(7)}}),
    ):
        for recipe in ("llama-1b", "pretrain", str(material.file)):
            said = parse_run("train", [recipe, *words.split()])
            assert build_request(recipe, changes) == said, (recipe, words)
    run = material.config()
    assert build_request(run, {"train.steps": 5, "train": {"steps": 5}}).config.train.steps == 5
    same = parse_run("train", [str(material.file), "--train.steps", "5"]).config
    assert build_request(run, {"train": {"steps": 5}}).config == same
    assert build_request(run, {}).out == Path("runs/tiny")
    assert build_request(run, {"name": "a"}).config.name == "a"


def test_a_value_that_no_option_takes_is_not_dropped(material, tmp_path):
    """False says nothing only to the flags that are off by themselves."""
    for name, said in (
        ("nproc", "nproc is False: it must be a whole number"),
        ("nonsense", "unknown option nonsense"),
        ("max_restarts", "max_restarts is False: it must be a whole number"),
        ("train", "train is False: it must be a mapping of options"),
        ("model", "model is False: it must be a mapping of options"),
    ):
        with pytest.raises(ValueError, match=f"^{said}"):
            dolmen.train(material.file, out=tmp_path / "out", **{name: False})
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def run(material, tmp_path_factory):
    return dolmen.train(
        material.file, out=tmp_path_factory.mktemp("runs") / "run", train={"steps": 1}
    )


def test_export_and_verify(run, tmp_path):
    """What the commands do, with what they would say as values and errors."""
    made = dolmen.export(run, to=tmp_path / "hf", dtype="bfloat16")
    assert made == tmp_path / "hf"
    assert command("export", run, "--to", tmp_path / "other", "--dtype", "bfloat16").code == 0
    for file in made.iterdir():
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes(), file
    for i, said in enumerate(("hf", "transformers")):
        converted = dolmen.convert(run, tmp_path / str(i), format=said, dtype="bfloat16")
        for file in made.iterdir():
            assert file.read_bytes() == (converted / file.name).read_bytes(), file
    report = dolmen.verify(made, length=8)
    assert report.ok and {row.name for row in report.rows} >= {"logits", "gradients"}
    for call, said in (
        (lambda: dolmen.export(run, made), "exists and is not empty"),
        (lambda: dolmen.export(run, tmp_path / "x", dtype="float8"), "use one of float32, bfl"),
        (lambda: dolmen.convert(run, tmp_path / "x", format="h"), "use one of hf"),
        (
            lambda: dolmen.export(tmp_path, tmp_path / "x"),
            "is neither a Megatron checkpoint .*, nor",
        ),
        (lambda: dolmen.verify(made, length=0), "length is 0: it must be at least 1"),
        (lambda: dolmen.verify(tmp_path / "none"), "none: no such folder"),
        (lambda: dolmen.load(tmp_path / "none"), "none: no such folder"),
        (lambda: dolmen.load(tmp_path), "nor a run or checkpoint of dolmen"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    assert not (tmp_path / "x").exists()


def test_a_draft_model_stays_loaded(material, monkeypatch):
    model = dolmen.load(material.model)
    loaded, load = [], engine.load_decoder
    monkeypatch.setattr(
        engine, "load_decoder", lambda *a, **k: loaded.append(a[0].where) or load(*a, **k)
    )
    options = dict(max_new_tokens=8, speculative=dict(method="draft", model=str(material.model)))
    texts = [model.generate("abc abc", **options).text for _ in range(2)]
    assert texts == [model.generate("abc abc", max_new_tokens=8).text] * 2
    assert loaded == [material.model]


def test_generate(material):
    """The same text as the command's, whatever is asked for."""
    model = dolmen.load(material.model)
    for options in (
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "top_k": 5, "seed": 3},
        {"temperature": 2.0, "top_p": 0.5, "seed": 3},
    ):
        for prompt in ("abc def", ""):  # an empty one begins at the tokenizer's beginning
            words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
            result = command(
                "generate", material.model, f"--prompt={prompt}", "--max-new-tokens=8", *words
            )
            made = model.generate(prompt, max_new_tokens=8, **options)
            assert result.code == 0 and result.out == f"{made}\n", (options, result, made)
            assert dolmen.generate(material.model, prompt, max_new_tokens=8, **options) == made
            assert made.text == model.tokenizer.decode(made.tokens, skip_special_tokens=True)
            assert len(made.tokens) == len(made.logprobs) and max(made.logprobs) <= 0
    exact = dolmen.load(material.model, dtype=torch.float32)  # in bfloat16 tokens tie
    texts = {
        exact.generate("abc", temperature=2.0, seed=seed, top_k=top_k).text
        for seed in range(3)
        for top_k in (None, 1)
    }
    assert len(texts) == 4  # top_k 1 is greedy at any seed
    sampled = exact.generate(["abc", "d"], temperature=2.0, num_samples=3, max_new_tokens=9)
    assert [len(samples) for samples in sampled] == [3, 3]
    first = sampled[0][0]
    part = first.text[2:4]
    (cut, *_), _ = exact.generate(
        ["abc", "d"], temperature=2.0, num_samples=3, max_new_tokens=9, stop=part
    )
    assert (cut.text, cut.finish_reason) == (first.text[: first.text.index(part)], "stop")
    biased = exact.generate("abc", max_new_tokens=2, logit_bias={7: 1e4}, logprobs=None)
    assert biased.tokens == [7, 7] and biased.logprobs is None
    for options, said in (
        ({"top_k": 0}, "^top_k is 0: it must be at least 1$"),
        ({"top_p": 0.0}, "^top_p is 0.0: it must be over 0$"),
        ({"temperature": 1e-320}, "^temperature is 1e-320: it must be 0 .greedy., or"),
        ({"prompt": "a\udcff"}, "is not UTF-8 text"),
        ({"max_new_tokens": 0}, "^max_new_tokens is 0: it must be at least 1$"),
        ({"max_new_tokens": 2.5}, "^max_new_tokens is 2.5: it must be a whole number$"),
        ({"seed": "one"}, "^seed is 'one': it must be a whole number$"),
        ({"top_k": True}, "^top_k is True: it must be a whole number$"),
        ({"min_p": 2.0, "temperature": 1.0}, "^min_p is 2.0: it must be at most 1$"),
        ({"stop": ""}, "^stop is '': it must be a text of at least one character$"),
        ({"qqqq": 3}, "^unknown option 'qqqq': use one of min_new_tokens"),
        ({"max_tokens": 3}, "^unknown option 'max_tokens': did you mean max_new_tokens\\?$"),
        ({"batch": 1.5}, "^batch is 1.5: it must be a whole number$"),
    ):
        request = {"prompt": "a", **options}
        for call in (model.generate, lambda **o: dolmen.generate(material.model, **o)):
            with pytest.raises(ValueError, match=said):
                call(**request)
    for call in (dolmen.generate, dolmen.evaluate):
        for dtype in ("float8", "float64"):
            with pytest.raises(ValueError, match=f"^dtype is '{dtype}': use one of float32, bf"):
                call(material.model, "a", dtype=dtype)
    for options, said in (
        ({"text_field": 5}, "^text_field is 5: it must be text$"),
        ({"window": 1.5}, "^window is 1.5: it must be a whole number$"),
        ({"window": 65}, "use window 2 to 64$"),
        ({"tokenizer": "bpe:300"}, "^tokenizer bpe:300: evaluation needs"),
    ):
        with pytest.raises(ValueError, match=said):
            dolmen.evaluate(material.model, material.docs, **options)
    with pytest.raises(ValueError, match="no tokens"):
        model.logits("")


def test_a_text_that_is_none_is_refused_by_pythons_name():
    model = api.Model(None, None, None)  # none of which is asked
    with pytest.raises(ValueError, match="^text is not UTF-8 text: character 2 is a lone"):
        model.logits("a\udcff")


def test_the_package_shows_what_it_has():
    """Names to find by completion; each with types and an example of its use."""
    assert set(dolmen.__all__) <= set(dir(dolmen))
    for name in ("load", "generate", "export", "convert", "verify", "diff", "evaluate"):
        function = getattr(api, name)
        signature = inspect.signature(function)
        assert all(p.annotation is not p.empty for p in signature.parameters.values())
        assert signature.return_annotation is not signature.empty
        assert f"dolmen.{name}(" in function.__doc__
    assert "dolmen.train(" in api.train.__doc__


@pytest.mark.parametrize(
    "bad, said",
    [
        ({"layout": {"tp": 3}}, "num_attention_heads \\(4\\)"),
        ({"optimiser": {"lr": 1}}, "unknown option optimiser.lr: did you mean optimizer.lr\\?$"),
        ({"optimizer": {"learning_rate": 1}}, "did you mean optimizer.lr\\?$"),
        ({"max_steps": 1}, "^unknown option max_steps: did you mean train.steps\\?$"),
        ({"model": {"num_layers": 1}}, "did you mean model.num_hidden_layers\\?$"),
        ({"model": {"hidden_size": "64"}}, "hidden_size is '64': it must be a whole number"),
        ({"model": {"rope_parameters": 5}}, "^model.rope_parameters is 5: it must be a mapping"),
        (
            {"model": {"model_type": "gpt2", "n_embd": 96, "hidden_size": 192}},
            r"^model.n_embd \(96\) and model.hidden_size \(192\) are two names of one option: ",
        ),
        (
            {"layout": {"dp": 3}},
            r"^train.global_batch_size \(4\) is not divisible by dp \(3\): set train.global_batch_",
        ),
        ({"train.steps": 1, "train": {"steps": 2}}, "^train.steps is given twice, as 1 and 2$"),
        (
            {"model.model_type": "a", "model": {"model_type": "b"}},
            "^model.model_type is given twice",
        ),
        ({"train": {"compile": 1}}, "^train.compile is 1: it must be true or false$"),
        ({"train": {"device": "tpu"}}, "^train.device is 'tpu': use one of auto, cpu, cuda$"),
        ({"resume": "yes"}, "^resume is 'yes': it must be true or false$"),
        ({"resume": True, "overwrite": True}, "^resume=True and overwrite=True exclude"),
        ({"max_restarts": -1}, "^max_restarts is -1: it must be at least 0$"),
        ({"optimizer": {"lr": -1}}, "optimizer.lr is -1: it must be at least 0"),
        ({"train": {"steps": "five"}}, "^train.steps is 'five': it must be a whole number$"),
        ({"optimizer": {"lr": math.nan}}, "^optimizer.lr is nan: it must be finite"),
        (
            {"optimizer": {"lr": 10**400}},
            "^optimizer.lr is 1000+\\.\\.\\. .401 ch.*: it must be less than 2.63",
        ),
        (
            {"optimizer": {"lr": Fraction(10**400)}},
            "^optimizer.lr is Fraction.*must be a number",
        ),
        ({"optimizer": {"lr": np.ones(2)}}, "^optimizer.lr is array.*: it must be a number$"),
        ({"optimizer": {"lr": torch.ones(2)}}, "^optimizer.lr is tensor.*: it must be a number$"),
        ({"train": {"dtype": np.ones(2)}}, "^train.dtype is array.*: use one of float32"),
        ({"adapter": {"lora_dropout": 0.1}}, "adapter.lora_dropout: adapters have no dropout"),
        ({"init": "no/such/model/here"}, "here: no such folder"),
    ],
)
def test_bad_input_is_a_value_error(material, tmp_path, bad, said):
    with pytest.raises(ValueError, match=said):
        dolmen.train(material.file, out=tmp_path / "out", **bad)
    assert not (tmp_path / "out").exists()


def test_text_of_a_subclass_is_text(material, tmp_path):
    """numpy's, as of an array of paths, and an enumeration's: what is written has to be plain."""

    class Name(StrEnum):
        OURS = "ours"

    changes = {"name": Name.OURS, "data": {"path": np.array([str(material.docs)])[0]}}
    requested = build_request(material.file, {**changes, "out": np.str_(tmp_path / "out")})
    assert yaml.safe_load(yaml.safe_dump(to_dict(requested)))["config"]["name"] == "ours"


@pytest.mark.parametrize(
    "bad, said",
    [
        ({"train": {"dtype": "bf16"}}, "^train.dtype is 'bf16': did you mean bfloat16\\?"),
        ({"train": {"steps": "five"}}, "^train.steps is 'five': it must be a whole number$"),
        ({"layout": {"pt": 2}}, "^unknown option layout.pt: known are tp, "),
        ({"layout": 2}, "^layout must be a mapping of options, not 2$"),
        ({"model": 5}, "^model: "),
    ],
)
def test_a_run_config_is_checked_as_a_file_is(material, tmp_path, bad, said):
    with pytest.raises(ValueError, match=said):
        dolmen.train(replace(read_run(material.file), **bad), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failure_is_raised_and_leaves_the_process_as_it_was(material, tmp_path, monkeypatch):
    step = loop.optimizer_step

    def broken(state, *args):
        if state.step == 1:
            raise ArithmeticError("broken on purpose")
        return step(state, *args)

    monkeypatch.setattr(loop, "optimizer_step", broken)
    with pytest.raises(ArithmeticError, match="on purpose"):
        dolmen.train(material.file, out=tmp_path / "out")
    monkeypatch.undo()
    assert not dist.is_initialized() and len(rows(tmp_path / "out")) == 1
    dolmen.train(material.file, out=tmp_path / "out", overwrite=True, train={"steps": 1})


def interrupt(monkeypatch, after: int, which: int):
    """Ask this process to stop as it makes step `after`."""
    step = loop.optimizer_step

    def slow(state, *args):
        if state.step == after:
            os.kill(os.getpid(), which)
        return step(state, *args)

    monkeypatch.setattr(loop, "optimizer_step", slow)


@pytest.mark.parametrize(
    "which, raised", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_who_is_asked_to_stop_saves_and_stops(material, tmp_path, monkeypatch, which, raised):
    """A program that goes on after an Exception ends too."""
    interrupt(monkeypatch, 2, which)
    with pytest.raises(raised):
        dolmen.train(material.file, out=tmp_path / "out")
    assert steps(tmp_path / "out") == [3] and not dist.is_initialized()


@pytest.mark.parametrize("which, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_command_has_saved_and_goes_on(material, tmp_path, monkeypatch, which, code):
    """Exit 130 or 143 after saving; resumed, the run is the one that was never stopped."""
    assert command("train", material.file, "--out", tmp_path / "whole").code == 0
    interrupt(monkeypatch, 3, which)
    stopped = command("train", material.file, "--out", tmp_path / "out")
    monkeypatch.undo()
    assert (
        stopped.code == code
        and f"stopped by signal {which.value} after step 4, checkpoint saved" in stopped.out
        and not stopped.err
    )
    assert (
        steps(tmp_path / "out") == [4]
        and losses(tmp_path / "out") == losses(tmp_path / "whole")[:4]
    )
    # the time left was for saving
    assert [row["step"] for row in rows(tmp_path / "out", "val_loss")] == [3]
    assert command("train", material.file, "--out", tmp_path / "out", "--resume").code == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_ctrl_c_before_and_after_training(material, tmp_path, monkeypatch):
    """Nothing to save: 130 at once, without a traceback, whether the run has yet to begin or is
    being finished.
    """
    from dolmen.training import resolve, worker

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    for module, name in ((resolve.inputs, "check_inputs"), (worker, "finish")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, interrupted)
            result = command("train", material.file, "--out", tmp_path / name, "--train.steps", 1)
        assert result.code == 130 and "Traceback" not in result.err


def test_not_from_the_main_thread(material, tmp_path):
    """Python hears signals in the main thread alone; a run in another goes without."""
    caught = []
    thread = threading.Thread(
        target=lambda: caught.append(
            dolmen.train(material.file, out=tmp_path / "out", train={"steps": 1})
        )
    )
    thread.start()
    thread.join()
    assert caught == [tmp_path / "out"]


def test_import_is_light():
    """`import dolmen` and `dolmen --version` import no torch."""
    code = (
        "import sys, dolmen; from dolmen.cli import main; main(['--version']); "
        "assert 'torch' not in sys.modules; dolmen.nothing"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        done.stdout == f"dolmen {dolmen.__version__}\n"
        and "module 'dolmen' has no attribute 'nothing'" in done.stderr
    )
