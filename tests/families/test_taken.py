"""A model whose config.json does not say which of several it is: what it is taken for is said, may
be stated, and stays whatever else is changed.
"""

import json
import warnings

import pytest
import torch
from cases.baichuan import BAICHUAN2_7B, BAICHUAN2_13B, BAICHUAN_7B, BAICHUAN_13B, SIZES
from cases.chatglm import CHATGLM2
from family_cases import build, save

import dolmen
from dolmen.conversion.config import ConvertConfig
from dolmen.conversion.convert import convert
from dolmen.conversion.source import open_source
from dolmen.families import ModelConfig, edit, replace_fields, unknown_fields
from dolmen.families.unknown import warn
from dolmen.model.spec import AlibiSpec, RopeSpec
from dolmen.model.spec.positions import LinearScaling

FOUR = [
    (BAICHUAN_7B, "linear", RopeSpec(128)),
    (BAICHUAN_13B, "linear", AlibiSpec()),
    (BAICHUAN2_7B, "normalised", RopeSpec(128)),
    (BAICHUAN2_13B, "normalised", AlibiSpec()),
]


@torch.no_grad()
def test_what_is_stated_in_python_counts(tmp_path):
    """Of a folder that would be taken for one with another head."""
    theirs = build("baichuan2-7b")
    save(theirs, tmp_path)
    tokens = torch.randint(0, SIZES["vocab_size"], (9,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = dolmen.load(tmp_path, model={"head": "linear", "positions": "rope"})
    theirs.normalised = False
    want = theirs.logits(tokens[None])[0]
    torch.testing.assert_close(ours.logits(tokens.tolist()), want, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="baichuan has no field 'heads'"):
        dolmen.load(tmp_path, model={"heads": "linear"})


def what(model):
    """Its head and its positions."""
    spec = model.spec
    head = "normalised" if spec.head.normalised else "linear"
    return head, spec.blocks[0].mixer.positions


@pytest.mark.parametrize("content, head, positions", FOUR)
def test_it_is_taken_for_what_its_makers_say_and_that_is_told(content, head, positions):
    model = ModelConfig(content)
    assert what(model) == (head, positions)
    with pytest.warns(UserWarning, match=f"assuming one with head {head}.*--model.head"):
        warn(model)
    for other in (edit(model, vocab_size=77), edit(model, context=8192)):
        assert what(other) == (head, positions)  # for which it would not be taken


def test_what_is_stated_counts_and_nothing_is_told():
    stated = ModelConfig({"model_type": "baichuan", **SIZES, "dolmen": {"head": "normalised"}})
    assert what(stated) == ("normalised", RopeSpec(4))
    second = replace_fields(stated, {"positions": "alibi"})
    assert what(second) == ("normalised", AlibiSpec())
    assert second.config["dolmen"] == {"head": "normalised", "positions": "alibi"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn(second)
    extra = ModelConfig({"model_type": "baichuan", "head": "normalised"})  # it stands under our key
    assert what(extra) == ("linear", RopeSpec(128)) and unknown_fields(extra) == ["head"]
    with pytest.raises(ValueError, match="z_loss_weight is 0.1: max-z loss"):
        ModelConfig({"model_type": "baichuan", "z_loss_weight": 0.1})
    with pytest.raises(ValueError, match="dolmen.head is 'normal': it must be"):
        ModelConfig({"model_type": "baichuan", "dolmen": {"head": "normal"}})


def test_what_rope_ratio_does_is_told_where_nothing_says_it():
    """Published code divides positions by it, or multiplies the base: the checkpoint's name tells
    which, else it is taken.
    """
    unnamed = {name: value for name, value in CHATGLM2.items() if name != "_name_or_path"}
    content = {"model_type": "chatglm", **unnamed, "rope_ratio": 8}
    divided = RopeSpec(6, 10000.0, LinearScaling(8), interleaved=True)
    multiplied = RopeSpec(6, 80000.0, interleaved=True)
    with pytest.warns(UserWarning, match="with rope_ratio_of base; .*--model.rope-ratio-of"):
        warn(ModelConfig(content))
    assert ModelConfig(content).spec.blocks[0].mixer.positions == multiplied
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for said, positions in (
            ({"_name_or_path": "THUDM/chatglm2-6b-32k"}, divided),
            ({"_name_or_path": "/models/ChatGLM3-6B-32K"}, multiplied),
            ({"dolmen": {"rope_ratio_of": "positions"}}, divided),
            ({"rope_ratio": 1}, RopeSpec(6, 10000.0, interleaved=True)),
        ):
            model = ModelConfig(content | said)
            warn(model)
            assert model.spec.blocks[0].mixer.positions == positions


def test_what_an_export_cannot_say_is_told(tmp_path):
    """It is compared as what it is, by who made it, and taken for another by who does not know."""
    save(build("baichuan2-7b"), tmp_path / "a")
    file = tmp_path / "a/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dolmen": {"head": "linear"}}))
    with pytest.warns(UserWarning, match="has head linear, which a .* --model.head linear$"):
        convert(ConvertConfig(str(tmp_path / "a"), str(tmp_path / "b"), "hf"))
    assert what(open_source(tmp_path / "a").model)[0] == "linear"
    assert what(open_source(tmp_path / "b").model)[0] == "normalised"
