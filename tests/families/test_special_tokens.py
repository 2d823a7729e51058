"""Positions, prefixes and frames of texts that follow from special tokens, and a model that is
loaded with them, with and without a tokenizer.
"""

from dataclasses import replace

import pytest
import torch
import transformers
from cases.chatglm import CHATGLM3, CHATGLM_V01, CHATGLM_V11
from cases.glm import GLM_4_9B
from cases.glm_10b import GLM_10B, GLM_130B
from family_cases import build, save
from glm_reference import IDS
from safetensors.torch import load_file, save_file

import dolmen
from dolmen.conversion.source import open_source
from dolmen.data.batch import Batch
from dolmen.families import ModelConfig, families, replace_fields, special_tokens
from dolmen.model import head
from dolmen.model.spec import PositionSpan
from dolmen.ops.attention import Documents
from dolmen.ops.loss import IGNORED
from dolmen.ops.rope import span_positions
from dolmen.serving import request
from dolmen.serving.kv_cache import KVCache

TOLD = {name: 150000 + i for i, name in enumerate(("mask", "gmask", "smask", "sop", "cls", "eos"))}


def blanks(content, **ids):
    reported = {"dolmen": {"special_tokens": ids}} if ids else {}
    return ModelConfig({**content, **reported}).spec.blanks


def placed(known, tokens):
    """How many tokens see one another, and both streams of positions."""
    span, index = known.span(tokens), torch.arange(len(tokens))
    reported = (torch.full_like(index, value) for value in span[1:])
    return span.prefix, *span_positions(index, *reported).tolist()


def test_version_1_1_of_chatglm_stays_at_the_mask():
    known, g, m, s = blanks(CHATGLM_V11), 130001, 130000, 130004
    assert placed(known, [5, 6, g, s, 7, 8]) == (3, [0, 1, 2, 2, 2, 2], [0, 0, 0, 1, 2, 3])
    # [gMASK] wins, wherever it is; what comes behind <sop> marks nothing
    assert placed(known, [5, m, g, s, 7]) == (3, [0, 1, 2, 2, 2], [0, 0, 0, 1, 2])
    assert placed(known, [m, 5, 6, s, g]) == (3, [0, 1, 2, 0, 0], [0, 0, 0, 1, 2])
    assert placed(known, [5, 6, 7]) == (0, [0, 1, 2], [0, 0, 0])
    assert known.span([5, s, 6]) == PositionSpan()


def test_version_0_1_of_chatglm_lets_sop_keep_its_index():
    known, g, m, s = blanks(CHATGLM_V01), 150001, 150000, 150004
    assert placed(known, [5, 6, g, 9, s, 7, 8]) == (4, [0, 1, 2, 3, 4, 2, 2], [0] * 4 + [1, 2, 3])
    # [MASK] wins, and <sop> stands there
    assert placed(known, [5, g, m, s, 7]) == (3, [0, 1, 2, 2, 2], [0, 0, 0, 1, 2])


def test_glm_130b_counts_on_behind_gmask_alone():
    known, g, m, s = blanks(GLM_130B, **TOLD), TOLD["gmask"], TOLD["mask"], TOLD["sop"]
    assert placed(known, [5, g, s, 7, 8])[:2] == (2, [0, 1, 2, 3, 4])
    assert placed(known, [g, 5, m, s, 7])[:2] == (3, [0, 1, 2, 2, 2])


def test_any_mask_is_the_blank_of_glm_10b():
    small = {name: 50000 + i for i, name in enumerate(TOLD)}
    known, s = blanks(GLM_10B, **small), small["sop"]
    for mask in ("mask", "smask", "gmask"):
        others = [small[name] for name in ("mask", "smask", "gmask")]
        tokens = [5, small[mask], *others, s, 7]
        assert placed(known, tokens) == (5, [0, 1, 2, 3, 4, 1, 1], [0, 0, 0, 0, 0, 1, 2])


def test_each_document_of_a_batch_has_its_own():
    known, g, s = blanks(CHATGLM_V11), 130001, 130004
    spec = replace(ModelConfig(CHATGLM_V11).spec, blanks=known)
    tokens = torch.tensor([[5, g, s, 6, 7, 8, g, s, 9]])
    labels = torch.arange(9)[None] + 100
    starts = torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4, 4]])
    made = Batch(tokens, labels, Documents.from_starts(starts)).read_by(spec)
    first, second = made.positions.ids[0].tolist()
    assert first == [0, 1, 1, 1, 0, 1, 2, 2, 2] and second == [0, 0, 1, 2, 0, 0, 0, 1, 2]
    assert made.documents.reach.tolist() == [[2, 2, 2, 2, 7, 7, 7, 7, 7]]
    # a token that is seen is not predicted; the prefix's last one predicts <sop>
    ignored = (made.labels == IGNORED).tolist()
    assert ignored == [[True, False, False, False, True, True, False, False, False]]


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (CHATGLM_V01, "chatglm"),
        (CHATGLM_V11, "chatglm"),
        (CHATGLM3, "chatglm2"),
        (GLM_4_9B, "glm"),
        (GLM_10B, "glm_10b"),
        ({"model_type": "glm", "num_layers": 2}, "glm_10b"),
        ({"model_type": "glm", "num_hidden_layers": 2}, "glm"),
        (GLM_130B, "glm-130b"),
    ],
)
def test_families_of_one_model_type_are_told_apart(content, name):
    assert ModelConfig(content).model_type == name


@pytest.mark.parametrize(
    ("content", "tokens", "framed"),
    [
        (CHATGLM3, [5], ["gmask", "sop", 5]),
        (CHATGLM3, ["gmask", "sop", 5], ["gmask", "sop", 5]),
        (CHATGLM_V11, [5], [5, "gmask", "sop"]),
        (CHATGLM_V11, ["mask", 5], ["mask", 5, "sop"]),
        (GLM_10B, [5], ["cls", 5, "gmask", "eos", "sop"]),
        (GLM_10B, ["cls", 5, "mask", 6, "eos"], ["cls", 5, "mask", 6, "eos", "sop"]),
        (GLM_130B, [5], [5, "gmask", "sop"]),
        (GLM_130B, [5, "mask", 6], [5, "mask", 6, "eos", "sop"]),
        (GLM_4_9B, [5], [5]),
    ],
)
def test_a_text_is_framed_as_code_of_its_folder_does(content, tokens, framed):
    small = {name: 50000 + i for i, name in enumerate(TOLD)}
    model = special_tokens.add_special_ids(ModelConfig(content), small, dict)
    reported = [[small.get(token, token) for token in words] for words in (tokens, framed)]
    assert special_tokens.frame_prompt(model, reported[0]) == reported[1]


def test_one_that_is_changed_leaves_the_others():
    model = special_tokens.add_special_ids(ModelConfig(GLM_130B), TOLD, dict)
    said = replace_fields(model, {"special_tokens.gmask": 7}).config["dolmen"]["special_tokens"]
    assert said == TOLD | {"gmask": 7}


def test_a_text_without_what_frames_it_is_refused():
    with pytest.raises(ValueError, match=r'chatglm2 has \[gMASK\].*special_tokens=\{"gmask": id\}'):
        special_tokens.frame_prompt(ModelConfig(CHATGLM3), [5])


def test_families_without_a_class_of_transformers_say_so(tmp_path):
    known = {*dir(transformers)}
    for family in families().values():
        assert family.in_transformers == (family.architecture in known), family.name
    saved("glm-10b", tmp_path)
    with pytest.raises(ValueError, match="is a glm_10b, for which transformers has no class"):
        dolmen.verify(tmp_path)


def test_a_run_is_refused_before_it_begins(tmp_path):
    refused = (
        "defines sop and mask, .*: use model.special_tokens.sop ID model.special_tokens.mask ID"
    )
    with pytest.raises(ValueError, match=refused):
        dolmen.train("quickstart", model={"model_type": "glm_10b"}, out=tmp_path / "run")


def saved(case, folder, named=True):
    model = build(case)
    save(model, folder)
    if not named:
        (folder / "added_tokens.json").unlink()
    return model


def test_a_family_that_asks_for_none_is_told_ends_alone(tmp_path):
    """Others would have no effect."""
    saved("llama", tmp_path)
    assert dolmen.load(tmp_path, special_tokens={"eos": 5}).special_tokens == {"eos": 5}
    with pytest.raises(ValueError, match="'gmask', which llama does not use: .* eop, eot, eos"):
        dolmen.load(tmp_path, special_tokens={"gmask": 5})


@torch.no_grad()
def test_loaded_without_a_tokenizer(tmp_path):
    """Ids in, ids and logits out."""
    theirs = saved("glm-10b", tmp_path, named=False)
    with pytest.raises(
        ValueError, match=r'defines sop and mask.*special_tokens=\{"sop": id, "mask"'
    ):
        dolmen.load(tmp_path)
    for reported, refused in (
        ({"mask": 61}, "special_tokens.mask is 61: it must be the id of a token, 0 to 60"),
        ({"bos": 1}, "special_tokens has 'bos'"),
    ):
        with pytest.raises(ValueError, match=refused):
            dolmen.load(tmp_path, special_tokens=reported)
    model = dolmen.load(tmp_path, special_tokens=IDS)
    tokens = [58, 7, 56, 9, 59, 57, 3]
    expected = theirs(torch.tensor([tokens])).logits[0]
    for given in (tokens, torch.tensor(tokens)):
        torch.testing.assert_close(model.logits(given), expected, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="has no tokenizer: give token ids"):
        model.logits("a text")
    with pytest.raises(ValueError, match="has no tokenizer: give token ids"):
        model.generate("a text")
    with pytest.raises(ValueError, match=r"the prompt is \[61\]: it must be a text, or token ids"):
        model.generate([61])
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        model.generate(tokens, 6, stop="a")
    (text,) = theirs.generate(torch.tensor([tokens]), 6).tolist()
    got = model.generate(tokens, 6)
    assert got.tokens == text[len(tokens) :][: len(got.tokens)] != [] and got.text is None
    assert [one.tokens for one in model.generate([tokens, tokens], 6)] == [got.tokens] * 2


@torch.no_grad()
@pytest.mark.parametrize("mask", ["mask", "gmask"])
@pytest.mark.parametrize("case", ["chatglm", "glm-10b", "glm-130b"])
def test_a_cache_equals_the_whole_text(case, mask, tmp_path):
    """Token by token behind <sop>, at positions that the prompt has said."""
    saved(case, tmp_path)
    model = dolmen.load(tmp_path)
    tokens = [5, IDS[mask], 6, IDS["sop"], 7, 8, IDS["gmask"], IDS["sop"], 9]
    whole, spec = model.logits(tokens), model.decoder.spec
    spans, cache, got = {0: request.span_of(spec, tokens[:4])}, KVCache(spec, 4), []
    for part in (tokens[:4], *([token] for token in tokens[4:])):
        reading = cache.append({0: len(part)}, torch.device("cpu"), spans=spans)
        got.append(model.decoder(torch.tensor([part]), head.compute_logits, reading)[0])
    torch.testing.assert_close(torch.cat(got), whole, rtol=0, atol=1e-4)


def test_names_with_and_without_what_they_begin_with(tmp_path):
    """GLM-10B: files of its two classes. What is exported has the names that there were."""
    saved("glm-10b", tmp_path)
    before = {name: tensor for name, tensor in open_source(tmp_path).stream()}
    file = tmp_path / "model.safetensors"
    bare = {name.removeprefix("glm."): tensor for name, tensor in load_file(file).items()}
    save_file(bare, file, {"format": "pt"})
    after = {name: tensor for name, tensor in open_source(tmp_path).stream()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    dolmen.export(tmp_path, to=tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == bare.keys() and all(torch.equal(back[n], bare[n]) for n in bare)
