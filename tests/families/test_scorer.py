"""Models that end in one number: read and written as transformers has them."""

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from dolmen.conversion import hf_export
from dolmen.conversion.source import open_source
from dolmen.core.mesh import SINGLE
from dolmen.families import (
    convert_family,
    families,
    model_from_fields,
    with_lm_head,
    with_scalar_head,
)
from dolmen.model import head
from dolmen.model.spec import LMHeadSpec, ScalarHeadSpec
from dolmen.serving import engine

PADDING = {"pad_token_id": 60, "bos_token_id": None, "eos_token_id": None}
KINDS = {
    "llama": dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4),
    # whose head would be the embedding
    "gpt2": dict(n_embd=16, n_layer=2, n_head=2, n_positions=16),
    # rows of another width than the residual stream's
    "opt": dict(
        hidden_size=16,
        ffn_dim=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        word_embed_proj_dim=8,
        max_position_embeddings=32,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind, tmp_path):
    """The scores of transformers, and its scores of what is written."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, num_labels=1, vocab_size=61, **PADDING, **KINDS[kind]
    )
    theirs = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    source = open_source(tmp_path / "theirs")
    tokens = torch.randint(60, (3, 9))
    with torch.no_grad():
        want = theirs(tokens).logits
        ours = engine.load_decoder(source, SINGLE, torch.float32)
        found = ours(tokens, lambda hidden, end: end.values(hidden))[:, -1:]
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    hf_export.write(source, tmp_path / "written")
    again, metrics = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "written", output_loading_info=True
    )
    assert again.config.num_labels == 1
    assert not any(metrics[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, want)
    with pytest.raises(ValueError, match="predicts no tokens"):
        engine.run_whole(ours, tokens, head.compute_logits)


def test_each_class_is_the_one_of_transformers():
    for family in families().values():
        if family.scorer_class is not None:
            known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[family.model_type]
            assert family.scorer_class == known


def test_one_number_and_logits_again():
    model = model_from_fields("qwen2", {"num_hidden_layers": 2})
    other = with_scalar_head(model)
    assert isinstance(other.spec.head, ScalarHeadSpec) and with_scalar_head(other) is other
    assert isinstance(with_lm_head(other).spec.head, LMHeadSpec) and with_lm_head(other) == model
    assert (
        convert_family(with_scalar_head(model_from_fields("llama", {})), "mistral").spec.head
        == ScalarHeadSpec()
    )


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_labels": None, "id2label": None}, "num_labels is 2: .* one label"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "num_labels is 3"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "scalar head is LlamaForS"),
        ({"model_type": "cohere"}, "transformers has no cohere with a scalar head"),
    ],
)
def test_other_classifiers_are_refused(fields, message):
    whole = with_scalar_head(model_from_fields("llama", {})).config | fields
    with pytest.raises(ValueError, match=message):
        _ = type(model_from_fields("llama", {}))({n: v for n, v in whole.items() if v is not None})
