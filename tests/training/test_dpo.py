"""`dolmen train dpo`: what pairs are read as, what the reference says of them, and that a run that
stopped goes on as it would have.
"""

import json
import math
import shutil
from copy import copy
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import tinyrun
import torch
import transformers
from loading import prepare_loader
from tinyrun import dolmen, losses, rows
from transformers import AutoModelForCausalLM

from dolmen.conversion.source import open_source
from dolmen.core.mesh import SINGLE
from dolmen.data.batch import Batch
from dolmen.data.config import DataConfig
from dolmen.data.examples import pair_of
from dolmen.files.gate import Refused
from dolmen.objectives.config import ObjectiveConfig
from dolmen.objectives.preference import DPO
from dolmen.ops.loss import IGNORED
from dolmen.recipes import RECIPES
from dolmen.training import initialize, reference
from dolmen.training.checks.warn import no_eos_learned
from dolmen.training.folder import Unusable
from dolmen.training.resolve import resolve

material, one_thread = tinyrun.material, tinyrun.one_thread

PAIRS = [
    {"prompt": f"{i}?", "chosen": f"ab {i}", "rejected": "fg " * (i % 3 + 1)} for i in range(12)
]


@pytest.fixture(scope="module")
def pairs(material, tmp_path_factory):
    """Twelve pairs, one of equal answers, and a template; a model of our own in fp32."""
    folder = tmp_path_factory.mktemp("pairs")
    equal = {"prompt": "x", "chosen": "same", "rejected": "same"}
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, [*PAIRS, equal])))
    (folder / "plain.jinja").write_text(
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    shutil.copytree(material.model, folder / "model")
    return folder


def options(pairs, out, *more) -> list:
    return [
        *("train", "dpo", "--init", pairs / "model", "--out", out, "--train.device", "cpu"),
        *("--data.path", pairs / "pairs.jsonl", "--data.template", pairs / "plain.jinja"),
        *("--data.cache", pairs / "cache", "--data.validation-fraction", 0.3),
        *("--train.sequence-length", 48, "--train.global-batch-size", 4, "--train.steps", 4),
        *("--optimizer.lr", 1e-2, "--optimizer.warmup-steps", 1, *more),
    ]


def whole(row: dict) -> list[list[tuple[str, str]]]:
    return [[(m["role"], m["content"]) for m in c.messages] for c in pair_of(row, "here")]


def test_what_a_pair_is_read_as():
    """A prompt and two answers, as text or as messages, or two whole chats."""
    want = [[("user", "q"), ("assistant", a)] for a in ("good", "bad")]
    user, good, bad = (
        {"role": role, "content": said}
        for role, said in (("user", "q"), ("assistant", "good"), ("assistant", "bad"))
    )
    for row in (
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": [user], "chosen": [good], "rejected": [bad], "score": None},
        {"chosen": [user, good], "rejected": [user, bad]},
        {"prompt": "q", "chosen": [user, good], "rejected": [user, bad]},
    ):
        assert whole(row) == want, row
    assert whole({"prompt": "q", "chosen": "a", "rejected": "b", "system": "s"})[0][0] == (
        "system",
        "s",
    )


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "q", "chosen": "a"}, "has no rejected"),
        ({"chosen": "a", "rejected": "b"}, "`chosen` is not a completion .* give `prompt`"),
        ({"prompt": "q", "chosen": 7, "rejected": "b"}, "chosen is 7"),
        ({"prompt": "q", "chosen": "a", "rejected": [{"role": "user", "content": "b"}]}, "`rejec"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": -1e300}, r"margin is -1e[+]300"),
    ],
)
def test_what_is_no_pair_is_refused_by_its_row(row, message):
    with pytest.raises(Refused, match=f"line 2: .*{message}"):
        pair_of(row, "line 2")


def made(pairs, **objective):
    """The run of the options, checked, and its loader."""
    data = DataConfig(
        (str(pairs / "pairs.jsonl"),),
        rows="pairs",
        template=str(pairs / "plain.jinja"),
        cache=str(pairs / "cache"),
        validation_fraction=0.3,
    )
    request = ObjectiveConfig(name="dpo", **objective)
    config = replace(
        RECIPES["dpo"](),
        init=str(pairs / "model"),
        model=open_source(pairs / "model").model,
        data=data,
        objective=request,
        train=replace(RECIPES["dpo"]().train, sequence_length=48, global_batch_size=4, steps=4),
    )
    config = tinyrun.check_run(config, 1)
    loader = prepare_loader(
        data, str(pairs / "model"), 300, 48, 4, 0, model=config.spec, progress=False
    )
    return config, loader


@pytest.mark.parametrize("template, warned", [("plain.jinja", False), ("chatml", True)])
def test_answers_that_end_no_text_are_warned_of(pairs, template, warned):
    """The tokenizer has no <|im_end|>: it is many tokens, and the last of them ends nothing."""
    config, _ = made(pairs)
    own = template if template == "chatml" else str(pairs / template)
    data = replace(config.data, template=own, cache=str(pairs / f"cache-{template}"))
    loader = prepare_loader(
        data, str(pairs / "model"), 300, 96, 4, 0, model=config.spec, progress=False
    )
    reported = no_eos_learned(resolve(config, 1), loader)
    assert (reported is not None) == warned
    assert not warned or "completions end with '>' (token " in reported and "--stop" in reported


def compared(batch: Batch, theirs, tokenizer) -> set[tuple[str, str]]:
    """The pairs of answers in a batch, whose tokens have the log-probabilities of `theirs`, that is
    given one text at a time.
    """
    found, real = batch.numbers["reference"], batch.labels != IGNORED
    assert not found[~real].any()
    answers = [[], [], [], []]
    for row, starts in enumerate(batch.starts):
        for first in starts.unique().tolist():
            here = (starts == first) & real[row]
            if not here.any():  # padding
                continue
            own = slice(first, int(here.nonzero().max()) + 1)
            with torch.no_grad():
                logits = theirs(batch.tokens[row : row + 1, own]).logits[0]
            index = torch.where(here[own], batch.labels[row, own], 0)[:, None]
            want = logits.log_softmax(-1).gather(1, index)[:, 0] * here[own]
            torch.testing.assert_close(found[row, own], want, rtol=1e-5, atol=1e-5)
            said = tokenizer.decode(batch.labels[row][here]).removesuffix("<|endoftext|>")
            answers[row].append((float(batch.numbers["side"][row, first]), said))
    return {
        tuple(said for _, said in sorted(pair, reverse=True))
        for even in (0, 2)
        for pair in zip(answers[even], answers[even + 1], strict=True)
    }


def test_the_reference_is_the_start(pairs, tmp_path):
    """Its log-probabilities of all answers, as transformers has them; 0 of prompts."""
    config, loader = made(pairs)
    state = initialize.make_state(resolve(config, 1), SINGLE, 4)
    reference.add_reference_logprobs(resolve(config, 1), state, loader, SINGLE, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(pairs / "model", dtype=torch.float32)
    seen, held = set(), set()
    for step in range(8):
        seen |= compared(loader.batch(step), theirs, loader.tokenizer)
    for batch in loader.validation_batches():
        held |= compared(batch, theirs, loader.tokenizer)
    assert not seen & held and len(held) > 1
    assert seen | held <= {(row["chosen"], row["rejected"]) for row in PAIRS}
    assert "skipped: 1 pair with equal completions" in loader.description.changes


def test_how_full_rows_are_is_what_a_batch_of_all_has(pairs):
    rows = made(pairs)[1].mixture
    rows.per_example["one"] = np.ones(len(rows.examples), np.float32)
    positions = rows.batch(rows.rows).numbers["one"]
    assert rows.full == positions.double().mean().item() and 0 < rows.full < 1


def test_stored_log_probabilities_are_of_the_same_rows(pairs):
    """Each array of which they are a function changes their key, and nothing else does."""
    config, loader = made(pairs)
    rows = loader.mixture
    key = reference._key("weights", config, rows)
    for changed in ("tokens", "trained", "offsets", "weights"):
        array = np.array(getattr(rows.examples, changed))
        array[-1] += 1
        other = copy(rows)
        other.examples = replace(rows.examples, **{changed: array})
        assert (reference._key("weights", config, other) == key) == (changed == "weights")
    swapped = copy(rows)
    swapped.chosen = rows.chosen[::-1]
    half = replace(config, train=replace(config.train, dtype="bfloat16"))
    others = [("weights", config, swapped), ("others", config, rows), ("weights", half, rows)]
    assert key not in {reference._key(*other) for other in others}


def test_another_reference(pairs, tmp_path):
    """Of the files of another model; one of other tokens is refused."""
    config, loader = made(pairs)
    other = AutoModelForCausalLM.from_pretrained(pairs / "model", dtype=torch.float32)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    other.save_pretrained(tmp_path / "other")
    requested, _ = made(pairs, reference=str(tmp_path / "other"))
    state = initialize.make_state(resolve(config, 1), SINGLE, 4)
    reference.add_reference_logprobs(resolve(config, 1), state, loader, SINGLE, tmp_path)
    own = loader.mixture.numbers["reference"]
    reference.add_reference_logprobs(resolve(requested, 1), state, loader, SINGLE, tmp_path)
    assert np.abs(loader.mixture.numbers["reference"] - own).max() > 0.1
    # kept under a hash of the model: that of another is not read, nor one that is damaged
    known = reference.add_reference_logprobs(resolve(config, 1), state, loader, SINGLE, tmp_path)
    reference.store(tmp_path, known)
    with mock.patch.object(reference, "_compute_rows", side_effect=AssertionError):
        again = reference.add_reference_logprobs(
            resolve(config, 1), state, loader, SINGLE, tmp_path
        )
        assert all(np.array_equal(again[key], known[key]) for key in known)
        with pytest.raises(AssertionError):
            reference.add_reference_logprobs(resolve(requested, 1), state, loader, SINGLE, tmp_path)
        for file in (tmp_path / "reference").iterdir():
            file.write_bytes(file.read_bytes()[:-1] + b"x")
        with pytest.raises(AssertionError):
            reference.add_reference_logprobs(resolve(config, 1), state, loader, SINGLE, tmp_path)
    with pytest.raises(Unusable, match="no longer exists, but objective.name dpo needs it as"):
        gone = made(pairs)[0]
        run = replace(resolve(gone, 1), init_is_gone=True)
        reference.add_reference_logprobs(run, state, loader, SINGLE, tmp_path)
    larger = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**tinyrun.MODEL, "vocab_size": 310})
    )
    larger.save_pretrained(tmp_path / "larger")
    with pytest.raises(ValueError, match="vocab_size of 310, but the model has 300"):
        made(pairs, reference=str(tmp_path / "larger"))


@pytest.mark.slow
def test_a_run_goes_on_as_it_would_have(pairs, tmp_path):
    """From log 2 down, held-out pairs too; a run that stops compares with the same start."""
    first = dolmen(*options(pairs, tmp_path / "a"))
    assert first.code == 0, first.err
    found = losses(tmp_path / "a")
    assert abs(found[0][1] - math.log(2)) < 1e-6 and found[-1][1] < 0.6
    held = rows(tmp_path / "a", "val_loss")
    assert held[-1]["val_loss"] < 0.6 and held[-1]["val_rewards/accuracies"] == 1
    every = rows(tmp_path / "a", "rewards/margins")
    assert ["rewards/accuracies" in row for row in every] == [False] + [True] * (len(every) - 1)
    assert ["val_rewards/accuracies" in row for row in held] == [row["step"] > 0 for row in held]
    dolmen(*options(pairs, tmp_path / "b", "--checkpoint.every", 2))
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-00000004")
    again = dolmen(*options(pairs, tmp_path / "b", "--checkpoint.every", 2, "--resume"))
    assert again.code == 0, again.err
    assert losses(tmp_path / "b") == found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simpo", "orpo", "kto"])
def test_other_kinds(pairs, tmp_path, kind):
    """Learned without a reference, and from answers that are wanted or not, one by one or in
    pairs.
    """
    more = ["--objective.loss-type", kind, "--train.steps", 8]
    if kind == "kto":
        single = [
            {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
            for row in PAIRS[:9]
            for name in ("chosen", "rejected")
        ]
        file = tmp_path / "completions.jsonl"
        file.write_text("\n".join(map(json.dumps, [*single, *PAIRS[9:]])))
        more += ["--data.rows", "completions", "--data.path", file]
    found = dolmen(*options(pairs, tmp_path / "a", *more))
    assert found.code == 0, found.err
    margin = "objective/margin" if kind == "kto" else "rewards/margins"
    first, *_, last = (row for row in rows(tmp_path / "a", margin))
    assert last["loss"] < first["loss"] and last[margin] > first[margin]
    if kind == "kto":
        assert first["loss"] == pytest.approx(0.5) and first[margin] == 0


@pytest.mark.parametrize(
    "more, message",
    [
        (("--objective.loss-type", "kto"), "use --data.rows completions"),
        (("--data.rows", "completions"), "use --data.rows pairs"),
        (("--objective.desirable-weight", 2), "apply to kto"),
        (("--train.global-batch-size", 3), "a pair is two sequences"),
        (("--train.microbatch-size", 1), "a pair is two sequences"),
        (("--data.rows", "chats"), "do not fit together"),
        (
            ("--objective.label-smoothing", 0.5),
            "objective.label-smoothing is 0.5: it must be less than 0.5",
        ),
        (("--objective.beta", 0), "objective.beta is 0.0: it must be over 0"),
        (("--objective.rpo-alpha", -1), "objective.rpo-alpha is -1.0: it must be at least 0"),
        (
            ("--objective.rpo-alpha", 1e300),
            "objective.rpo-alpha is 1e+300: it must be at most 1e+30",
        ),
        (("--objective.beta", 1e300), "objective.beta is 1e+300: it must be at most 1e+30"),
        (
            ("--objective.rpo-alpha", 1, "--objective.loss-type", "orpo"),
            "objective.loss-type is orpo",
        ),
    ],
)
def test_what_is_refused(pairs, tmp_path, more, message):
    found = dolmen(*options(pairs, tmp_path / "a", *more))
    assert found.code == 2 and message in found.words, found.err
    assert not (tmp_path / "a").exists()


def test_the_objective_that_is_asked_for(pairs):
    request = dict(beta=0.3, kind="exo", label_smoothing=0.1, rpo_alpha=0.7)
    run = made(pairs, loss_type="exo", **{k: v for k, v in request.items() if k != "kind"})[0]
    assert initialize.objective_of(run) == DPO(**request, from_reference=True)
    other = replace(run, objective=replace(run.objective, reference="another"))
    assert initialize.objective_of(other) == DPO(**request)
    itself = replace(run, objective=replace(run.objective, reference=run.init))
    assert initialize.objective_of(itself) == DPO(**request, from_reference=True)


def test_options_of_dpo_are_of_dpo():
    with pytest.raises(ValueError, match="applies to dpo, but objective.name is tokens"):
        ObjectiveConfig(beta=0.2)
