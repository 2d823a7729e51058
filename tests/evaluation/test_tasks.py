"""Tasks of lm_eval beside its own `hf` backend: a tiny model, local tasks, and no network."""

import json
import random
import sys
from types import ModuleType, SimpleNamespace

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
from dolmen.evaluation import harness as harnesses
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


class Letters:
    """A tokenizer of letters: BOS is 1, written ^, and EOS is 2, written $."""

    bos_token_id: int | None = 1
    eos_token_id = 2
    name_or_path = "org/a/model"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [{"^": 1, "$": 2}.get(letter, ord(letter)) for letter in text]
        return [1] * add_special_tokens + ids

    def decode(self, ids) -> str:
        ids = [ids] if isinstance(ids, int) else ids
        return "".join({1: "^", 2: "$"}.get(number, chr(number)) for number in ids)

    def apply_chat_template(self, messages, **options):
        return messages, options


@pytest.fixture
def toy(monkeypatch) -> Harness:
    """A model of 8 positions whose log-probability of a token is -token, and that predicts a token
    which is one more than that before it.
    """

    def score_rows(model, rows, mesh, schedule):
        texts = [rows.read(i) for i in range(len(rows.lengths))]
        likelihoods, correct = [], []
        for text, first in zip(texts, rows.firsts, strict=True):
            assert len(text) <= 9
            likelihoods.append(-float(text[first:].sum()))
            correct.append(int((text[first:] == text[first - 1 : -1] + 1).sum()))
        return perplexity.RowScores(np.array(likelihoods), np.array(correct))

    monkeypatch.setattr(harnesses.perplexity, "score_rows", score_rows)
    spec = SimpleNamespace(max_position_embeddings=8)
    loaded = SimpleNamespace(model=SimpleNamespace(spec=spec), mesh=None, schedule=None)
    return Harness(loaded, Letters())


def test_tokens_of_a_harness_are_those_of_its_tokenizer(toy):
    assert (toy.tokenizer_name, toy.eot_token_id, toy.prefix_token_id) == ("org__a__model", 2, 1)
    assert toy.tok_encode("ab") == [1, 97, 98] and toy.tok_encode("^ab") == [1, 97, 98]
    assert toy.tok_encode("ab", add_special_tokens=False) == [97, 98]
    assert toy.tok_encode("^a", add_special_tokens=True) == [1, 1, 97]
    toy.tokenizer.bos_token_id = None
    assert toy.prefix_token_id == 2
    for prompt in (True, False):
        messages, options = toy.apply_chat_template(["m"], prompt)
        assert messages == ["m"] and options == {
            "tokenize": False,
            "add_generation_prompt": prompt,
            "continue_final_message": not prompt,
        }


def test_a_continuation_is_scored_behind_what_fits_of_its_context(toy):
    score = toy._loglikelihood_tokens
    assert score([]) == []
    assert score([(None, [5, 6], [7, 8]), (None, [5], [7, 8])]) == [(-15, True), (-15, False)]
    # nine tokens: the last is not read
    assert score([(None, [9] * 20, list(range(8)))]) == [(-28, False)]
    for continuation in ([], [1] * 9):
        with pytest.raises(ValueError, match=f"asks for {len(continuation)} tokens"):
            score([(None, [1], continuation)])


def test_the_likelihood_of_a_text_is_that_of_its_windows(toy):
    texts = ["a" * 19, "b"]
    found = toy.loglikelihood_rolling([SimpleNamespace(args=(text,)) for text in texts])
    # of all its tokens, BOS included, each once
    assert found == [-1 - 97 * 19, -1 - 98]


def test_requests_of_equal_options_are_one_batch(toy, monkeypatch):
    batches = []

    def generate_texts(loaded, tokenizer, prompts, sampling, until):
        batches.append((prompts, sampling, until))
        return [f"{len(batches)}: {tokenizer.decode(prompt)}" for prompt in prompts]

    monkeypatch.setattr(harnesses.model, "generate_texts", generate_texts)
    short, cold = {"until": ["!", ""], "max_gen_toks": 3}, {"until": "?", "max_gen_toks": 6}
    cold |= {"temperature": 0.5, "do_sample": True}
    requests = [
        SimpleNamespace(args=args)
        for args in (("abcdefgh", short), ("xyz", cold), ("q", dict(short)))
    ]
    assert toy.generate_until(requests) == ["1: defgh", "2: yz", "1: ^q"]
    (_, first, until), (_, second, other) = batches
    assert until == ["!", "$"] and other == ["?", "$"]
    assert (first.max_new_tokens, second.max_new_tokens) == (3, 6)
    assert (first.temperature, second.temperature) == (0.0, 0.5) and first.stop == (2,)
    with pytest.raises(ValueError, match="asks for 8 new tokens"):
        toy.generate_until([SimpleNamespace(args=("a", {"until": [], "max_gen_toks": 8}))])


def test_numbers_of_results_are_metrics_with_a_filter():
    results = {"arc": {"acc,none": 1, "alias": "arc", "x,none": "text", "sample_len": 3}}
    assert harnesses._numbers({"results": results}) == {"arc": {"acc,none": 1.0}}


def test_random_states_are_restored():
    def draw() -> tuple:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with harnesses.preserve_random_state():
        first = draw()
    assert draw() == first
