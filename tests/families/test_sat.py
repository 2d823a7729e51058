"""GLM-130B as SAT saved it: a file for each rank, cut here by hand."""

import json

import pytest
import torch
from family_cases import build
from glm_reference import IDS

import dolmen

RANKS = 2
ROWS = ("word_embeddings.weight", "query_key_value.weight", "query_key_value.bias")
HALVES = ("dense_h_to_4h.weight", "dense_h_to_4h.bias")
COLUMNS = ("dense.weight", "dense_4h_to_h.weight")


def of_rank(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    if name.endswith(ROWS):
        return tensor.chunk(RANKS)[rank]
    if name.endswith(HALVES):  # x1, then x2
        return torch.cat([half.chunk(RANKS)[rank] for half in tensor.chunk(2)])
    if name.endswith(COLUMNS):
        return tensor.chunk(RANKS, 1)[rank]
    return tensor


@pytest.fixture
def saved(tmp_path):
    model, inner = build("glm-130b", vocab_size=62), tmp_path / "49300"
    inner.mkdir()
    (tmp_path / "latest").write_text("49300\n")
    (tmp_path / "config.json").write_text(json.dumps(model.content))
    for rank in range(RANKS):
        held = {n: of_rank(n, t, rank).clone() for n, t in model.state_dict().items()}
        held["transformer.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(4).half()
        held["mixins.rotary-embedding.rotary_emb.inv_freq"] = torch.ones(4).half()
        torch.save({"module": held}, inner / f"mp_rank_{rank:02}_model_states.pt")
    return model, tmp_path


@torch.no_grad()
def test_logits_are_those_of_the_whole(saved):
    theirs, folder = saved
    tokens = [4, 7, IDS["gmask"], IDS["sop"], 9, 3]
    expected = theirs(torch.tensor([tokens])).logits[0]
    for where in (folder, folder / "49300"):
        model = dolmen.load(where, special_tokens=IDS)
        torch.testing.assert_close(model.logits(tokens), expected, rtol=0, atol=1e-4)
    assert "a checkpoint of SAT (2 ranks)" in model.source.title


def test_what_is_no_whole_checkpoint_is_refused(saved):
    _, folder = saved
    last, first = (folder / "49300" / f"mp_rank_{rank:02}_model_states.pt" for rank in (1, 0))
    kept = last.read_bytes()
    for content, refused in (
        ({"module": {}}, "rank 1 and rank 0 differ in transformer.word_embeddings.weight"),
        ({"model": {}}, "has no `module` entry, which files of SAT have"),
        ({"module": print}, "print, which is not allowed"),
    ):
        torch.save(content, last)
        with pytest.raises(ValueError, match=refused):
            dolmen.load(folder, special_tokens=IDS)
    last.unlink()
    with pytest.raises(ValueError, match=r"\(31, 32\) on each of 1 rank in .*implies \(62, 32\)"):
        dolmen.load(folder, special_tokens=IDS)
    last.write_bytes(kept)
    first.unlink()
    with pytest.raises(ValueError, match="has rank 1, but rank 0 is missing"):
        dolmen.load(folder, special_tokens=IDS)
    (folder / "latest").write_text("../../etc")
    with pytest.raises(ValueError, match="names '../../etc', but .* has 49300"):
        dolmen.load(folder, special_tokens=IDS)


def test_config_of_another_model_is_refused(saved):
    theirs, folder = saved
    (folder / "config.json").write_text(json.dumps({**theirs.content, "model_type": "llama"}))
    with pytest.raises(
        ValueError, match="config.json is of llama: only glm-130b is supported in SAT's format"
    ):
        dolmen.load(folder)
