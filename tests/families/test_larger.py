"""The text model of a larger one: Gemma 3 as it sees pictures."""

import contextlib
import io

import pytest
import torch
import transformers
from sizes import SIZES

from dolmen.conversion import hf_export
from dolmen.conversion.source import open_source
from dolmen.evaluation.verify import verify
from dolmen.files.gate import Refused
from dolmen.model import head
from dolmen.serving import engine


@pytest.fixture
def whole(tmp_path):
    """The larger model, its texts as transformers has them, and its folder."""
    text = SIZES | dict(head_dim=8, sliding_window=5, query_pre_attn_scalar=8, pad_token_id=None)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision | dict(image_size=8, patch_size=4),
        image_token_index=60,
        boi_token_index=58,
        eoi_token_index=59,
        mm_tokens_per_image=4,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.2)
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(tmp_path / "whole")
    return model, tmp_path / "whole"


@torch.no_grad()
def test_the_text_of_a_model_that_sees_pictures(whole, tmp_path):
    """Its logits, and a folder of its own; the other parts are left out, aloud."""
    theirs, folder = whole
    source = open_source(folder)
    assert source.model.model_type == "gemma3_text" and source.transformers is None
    with pytest.warns(UserWarning, match="of other parts of the model are skipped.*gemma3_text"):
        ours = engine.load_decoder(source)
    tokens = torch.arange(3, 43)[None]
    torch.testing.assert_close(
        ours(tokens, head.compute_logits), theirs(tokens).logits, rtol=0, atol=1e-4
    )
    hf_export.write(source, tmp_path / "text")
    with torch.enable_grad():
        assert verify(open_source(tmp_path / "text"), length=20).ok


def test_a_larger_model_without_the_part(whole):
    _, folder = whole
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"text_config"', '"speech_config"'))
    with pytest.raises(Refused, match="text_config is None: it must be the config.json of a model"):
        open_source(folder)
