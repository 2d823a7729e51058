"""Tasks of lm_eval beside its own `hf` backend: a tiny model, local tasks, and no network."""

import json
import sys
from types import ModuleType

import numpy as np
import pytest
import tinyrun
import torch
import transformers
import yaml
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

import dolmen
from dolmen.conversion.source import open_source
from dolmen.evaluation import model, perplexity
from dolmen.evaluation import tasks as harnessed
from dolmen.evaluation.config import EvaluateConfig
from dolmen.evaluation.harness import Harness

material, one_thread = tinyrun.material, tinyrun.one_thread
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>"
METRICS = {
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "generate_until": ("exact_match",),
}
NAMES = ",".join(METRICS)


@pytest.fixture(scope="module")
def folder(material, tmp_path_factory):
    """model/ in float32, and tasks/: a question of each kind, by METRICS."""
    root = tmp_path_factory.mktemp("tasks")
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(material.model, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.3 + (p.ndim == 1))
    model.save_pretrained(root / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(material.model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "model")
    words = sorted(material.docs.iterdir())[0].read_text().split()
    # what the model itself says, that some answer is right
    said = dolmen.generate(root / "model", words[0], max_new_tokens=8).text
    rows = [
        {
            "question": " ".join(words[i : i + n]),
            "choices": [f" {word}" for word in words[40 : 43 + i % 2]],
            "answer": i % 3,
            # over a window of the model's 64 positions, and under
            "text": " ".join(words[: 10 * n]),
            "said": said.split("\n")[0],
        }
        for i, n in enumerate((1, 5, 40, 9, 2, 3))
    ]
    (root / "rows.json").write_text(json.dumps(rows))
    (root / "tasks").mkdir()
    for kind, metrics in METRICS.items():
        task = {
            "task": kind,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(root / "rows.json")}},
            "test_split": "test",
            "output_type": kind,
            "doc_to_text": "" if "rolling" in kind else "{{question}}",
            "doc_to_target": "{{answer}}" if kind == "multiple_choice" else "{{text}}",
            "metric_list": [{"metric": metric} for metric in metrics],
            "num_fewshot": 0,
        }
        if kind == "multiple_choice":
            task["doc_to_choice"] = "{{choices}}"
        if kind == "generate_until":
            task |= {
                "doc_to_target": "{{said}}",
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
            }
        (root / "tasks" / f"{kind}.yaml").write_text(yaml.safe_dump(task))
    return root


@pytest.fixture
def hf(folder, monkeypatch):
    """lm_eval's `hf` over the model; of accelerate, which it imports and one process does not need,
    a stand-in.
    """
    made = ModuleType("accelerate"), ModuleType("accelerate.utils")
    made[0].Accelerator = type(
        "Accelerator", (), {"num_processes": 1, "__init__": lambda *a, **k: None}
    )
    made[0].InitProcessGroupKwargs = lambda **options: None
    made[0].find_executable_batch_size = lambda *a, **k: None
    made[1].get_max_memory = lambda *a: {}
    for module in made:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    from lm_eval.models.huggingface import HFLM

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu")


def theirs(lm, folder, **options):
    found = simple_evaluate(
        model=lm,
        tasks=list(METRICS),
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    return found["results"]


@pytest.mark.parametrize(
    "options",
    ({}, {"num_fewshot": 1, "limit": 4}, {"apply_chat_template": True}),
    ids=("plain", "fewshot", "chat"),
)
def test_numbers_are_those_of_the_hf_backend(folder, hf, options):
    before = torch.get_rng_state(), np.random.get_state()[1]
    found = dolmen.evaluate_tasks(folder / "model", NAMES, tasks_path=folder / "tasks", **options)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    want = theirs(hf, folder, **options)
    assert found.keys() == want.keys() == METRICS.keys()
    for kind, metrics in METRICS.items():
        assert {name.split(",")[0] for name in found[kind]} == {*metrics}
        for name, value in found[kind].items():
            assert value == pytest.approx(want[kind][name], rel=1e-4), (kind, name)
    if not options:  # negative control: numbers that say something
        assert 0 < found["multiple_choice"]["acc,none"] < 1
        assert found["generate_until"]["exact_match,none"] > 0


def test_the_command_writes_what_the_function_gives(folder, tmp_path, monkeypatch):
    out = tmp_path / "found.json"
    words = ("--tasks", "multiple_choice", "--tasks-path", folder / "tasks", "--limit", 4)
    shown = tinyrun.dolmen("evaluate", folder / "model", *words, "--json", out)
    assert shown.code == 0, shown.err
    found = dolmen.evaluate_tasks(
        folder / "model", ["multiple_choice"], tasks_path=folder / "tasks", limit=4
    )
    assert json.loads(out.read_text()) == {"tasks": found}
    assert f"{found['multiple_choice']['acc,none']:.4f}" in shown.out


REFUSED = {
    "no such task": ({"tasks": "multiple_choise"}, "no task multiple_choise: did you mean"),
    "no task": ({"tasks": ","}, "--tasks is empty"),
    "limit": ({"tasks": "a", "limit": -1}, "limit is -1"),
    "half a question": ({"tasks": "a", "limit": 2.5}, "limit is 2.5: it must be a whole number"),
    "examples": ({"tasks": "a", "num_fewshot": -1}, "num-fewshot is -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(folder, case, monkeypatch):
    options, said = REFUSED[case]
    # every task of lm_eval takes seconds to list
    monkeypatch.setattr("dolmen.evaluation.harness.TaskManager", Listed)
    words = [w for name, value in options.items() for w in (f"--{name.replace('_', '-')}", value)]
    shown = tinyrun.dolmen("evaluate", folder / "model", *words)
    assert shown.code == 2 and said in shown.err and shown.err.count("\n") == 1, shown


class Listed:
    all_tasks = ("multiple_choice",)

    def __init__(self, **_):
        pass


def test_a_missing_extra_is_one_line(folder, monkeypatch):
    monkeypatch.setattr(harnessed, "find_spec", lambda name: None)
    shown = tinyrun.dolmen("evaluate", folder / "model", "--tasks", "piqa")
    assert shown.code == 2 and shown.err.count("\n") == 1
    assert "pip install 'dolmen[tasks]'" in shown.err


def test_greedy_is_of_all_tokens(folder):
    """What the model writes is greedy, and with another last token it is not."""
    made = harness(folder)
    prompt = [5, 9]
    new = dolmen.load(folder / "model").generate(prompt, max_new_tokens=3).tokens
    other = [*new[:-1], (new[-1] + 1) % 300]
    answers = made._loglikelihood_tokens([(None, prompt, new), (None, prompt, other)])
    assert [greedy for _, greedy in answers] == [True, False]


def harness(folder):
    config = EvaluateConfig(source=str(folder / "model"))
    source = open_source(config.source)
    return Harness(model.load(source), model.tokenizer_of(config, source))


def test_a_task_that_scores_too_much_at_once_is_refused(folder, monkeypatch):
    made = harness(folder)
    monkeypatch.setattr(perplexity, "score_rows", None)  # is not asked
    with pytest.raises(ValueError, match="65 tokens to be scored at once.*embeddings is 64"):
        made._loglikelihood_tokens([(None, [1], [2] * 65)])
