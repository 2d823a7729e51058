"""`dolmen train reward`: learned from pairs, told how sure it is, and read by transformers with the
same scores.
"""

import json
import re
import shutil

import pytest
import tinyrun
import torch
import transformers
from tinyrun import dolmen, losses, rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from dolmen.conversion.source import open_source
from dolmen.core.mesh import SINGLE
from dolmen.families import model_from_fields, with_scalar_head
from dolmen.model.spec import ScalarHeadSpec
from dolmen.objectives.config import ObjectiveConfig
from dolmen.serving import engine
from dolmen.training import evaluate

material, one_thread = tinyrun.material, tinyrun.one_thread

PAIRS = [
    {"prompt": f"{i}?", "chosen": f"ab {i % 7}", "rejected": "fg " * (i % 3 + 1)} for i in range(40)
]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def start(material, tmp_path_factory):
    """A model with logits, whose tokenizer pads with the end of texts and has a token beside."""
    folder = tmp_path_factory.mktemp("start")
    same = {"prompt": "x", "chosen": "same", "rejected": "same"}
    long = {"prompt": "x", "chosen": "long " * 60, "rejected": "y", "margin": 0}
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, [*PAIRS, same, long])))
    (folder / "plain.jinja").write_text(TEMPLATE)
    shutil.copytree(material.model, folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.unk_token = tokenizer.convert_ids_to_tokens(299)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id != tokenizer.unk_token_id
    tokenizer.save_pretrained(folder / "model")
    return folder


def options(start, out, *more) -> list:
    return [
        *("train", "reward", "--init", start / "model", "--out", out, "--train.device", "cpu"),
        *("--data.path", start / "pairs.jsonl", "--data.template", start / "plain.jinja"),
        *("--data.cache", start / "cache", "--data.validation-fraction", 0.3),
        *("--train.sequence-length", 48, "--train.global-batch-size", 4, "--train.steps", 12),
        *("--optimizer.lr", 1e-2, "--optimizer.warmup-steps", 1, *more),
    ]


@pytest.mark.slow
def test_a_run_and_its_scores(start, tmp_path):
    """Held-out pairs are told apart; transformers, in a padded batch, has the scores that dolmen
    has of each text alone; the folder is the start of another run.
    """
    out = tmp_path / "a"
    first = dolmen(
        *options(start, out, "--finish.export", "--objective.center-rewards-coefficient", 0.01)
    )
    assert first.code == 0, first.err
    said = " ".join(first.out.split())
    assert "skipped: 1 pair with equal completions" in said
    assert "skipped: 1 pair with a completion of over 48 tokens with its prompt" in said
    assert re.search(r"step 12: validation loss .* on \d+ completions", said)
    assert "held-out completions" in said and "tokens, and a batch" not in said
    assert losses(out)[-1][1] < 0.2
    held = rows(out, "val_loss")[-1]
    assert held["val_accuracy"] == 1 and 0 <= held["val_calibration_error"] < 0.5
    assert (out / "calibration.png").read_bytes().startswith(b"\x89PNG")
    source = open_source(out / "hf")
    assert source.spec.head == ScalarHeadSpec() and open_source(out).spec.head == ScalarHeadSpec()
    ours = engine.load_decoder(source, SINGLE, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out / "hf")
    tokenizer.padding_side = "right"
    texts = [f"<user>{i}?<|endoftext|><assistant>{a}<|endoftext|>" for i, a in enumerate("xyz")]
    texts.append(texts[0] * 3)
    with torch.no_grad():
        want = torch.stack(
            [
                ours(torch.tensor([tokenizer(t).input_ids]), lambda h, end: end.values(h))[0, -1]
                for t in texts
            ]
        )
        theirs = AutoModelForSequenceClassification.from_pretrained(out / "hf", num_labels=1)
        found = theirs.float()(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    more = dolmen(*options(start, tmp_path / "b", "--init", out / "hf", "--train.steps", 1))
    assert more.code == 0, more.err
    assert losses(tmp_path / "b")[0][1] < 0.2  # it goes on from where the first one ended
    again = dolmen(*options(start, out, "--train.steps", 14, "--resume"))
    assert again.code == 0, again.err
    sft = ("train", "pretrain", "--init", out / "hf", "--data.path", material_docs(start))
    result = dolmen(*sft, "--out", tmp_path / "c2", "--data.cache", start / "cache")
    assert result.code == 2 and "has a scalar head (a reward model)" in result.words


def material_docs(start):
    docs = start / "docs.txt"
    docs.write_text("words and words\n" * 400)
    return docs


@pytest.mark.parametrize(
    "more, message",
    [
        (("--train.global-batch-size", 3), "a pair is two sequences"),
        (("--data.rows", "chats"), "do not fit together"),
        (
            ("--objective.center-rewards-coefficient", -1),
            "objective.center-rewards-coefficient is -1.0",
        ),
        (("--objective.beta", 0.3), "applies to dpo"),
        (("--finish.export", "--finish.sample", "x"), "a reward model has a scalar head"),
    ],
)
def test_what_is_refused(start, tmp_path, more, message):
    found = dolmen(*options(start, tmp_path / "a", *more))
    assert found.code == 2 and message in found.words, found.err
    assert not (tmp_path / "a").exists()


def test_a_family_without_the_class_is_refused_by_name(start, tmp_path):
    config = transformers.CohereConfig(
        **{
            name: tinyrun.MODEL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")
        },
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    shutil.copytree(start / "model", tmp_path / "cohere")
    transformers.CohereForCausalLM(config).save_pretrained(tmp_path / "cohere")
    found = dolmen(*options(start, tmp_path / "a", "--init", tmp_path / "cohere"))
    assert found.code == 2 and "transformers has no cohere with a scalar head" in found.words


def test_calibration():
    """By hand: half of the pairs in the first bin, of which half are right, half in the last, all
    right.
    """
    none = dict.fromkeys([f"{kind} {i}" for kind in ("sure", "right") for i in range(10)], 0.0)
    reported = {**none, "sure 0": 0.5, "right 0": 0.25, "sure 9": 0.5, "right 9": 0.5}
    found = evaluate.Calibration.from_metrics(reported)
    assert found.error == pytest.approx(0.5 * (0.525 - 0.5) + 0.5 * (1 - 0.975))
    assert evaluate.without_bins({**reported, "accuracy": 0.75}) == {"accuracy": 0.75}


def test_options_of_rewards():
    assert (
        ObjectiveConfig(name="reward", margin=0.5, center_rewards_coefficient=0.1).rows == "pairs"
    )
    with pytest.raises(ValueError, match="applies to reward models and simpo"):
        ObjectiveConfig(name="dpo", margin=0.5)
    with pytest.raises(ValueError, match="has no reference model"):
        ObjectiveConfig(name="dpo", loss_type="orpo", reference="x")
    assert with_scalar_head(model_from_fields("llama", {})).spec.head == ScalarHeadSpec()
