"""Models made here of the fields of then: transformers builds them, or the family refuses them."""

import pytest
import torch
import transformers
from tiny_models import Flat, flat_model
from transformers.core_model_loading import revert_weight_conversion

from dolmen.core.config import from_dict
from dolmen.families import ModelConfig, weight_map

SMALL = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)
LLAMA3 = dict(
    theta=500.0,
    scaling="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
MADE = [
    dict(
        family="llama",
        **SMALL,
        tie_word_embeddings=True,
        rope=LLAMA3,
    ),
    dict(
        family="llama",
        **SMALL,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
    ),
    dict(family="mistral", **SMALL, sliding_window=7),
    dict(family="mistral", **SMALL | {"num_attention_heads": 6, "num_key_value_heads": 3}),
    dict(family="qwen2", **SMALL, attention_bias=True, sliding_window=7, sliding_layers=(0,)),
    dict(family="qwen3", **SMALL, qk_norm=True),
    dict(family="mixtral", **SMALL, num_experts=4, router_aux_loss_coef=0.02, rope={"theta": 1e6}),
    dict(family="mixtral", **SMALL, num_experts=4, num_experts_per_tok=1, sliding_window=7),
    dict(
        family="qwen3_moe",
        **SMALL,
        qk_norm=True,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        dense_layers=(1,),
        norm_topk_prob=False,
    ),
    dict(
        family="gpt2",
        **SMALL | {"num_key_value_heads": 4, "head_dim": 8},
        position="learned",
        norm="layernorm",
        mlp="plain",
        activation="gelu_tanh",
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
    ),
]


@pytest.mark.parametrize("fields", MADE, ids=lambda fields: fields["family"])
def test_made_here_is_built_by_transformers(fields):
    model = ModelConfig({**flat_model(**fields).config, "eos_token_id": 3})
    assert model.spec == from_dict(Flat, fields).spec
    theirs = transformers.AutoConfig.for_model(**model.export_config())
    assert ModelConfig(theirs.to_dict()).spec == model.spec
    assert theirs.eos_token_id == 3
    assert theirs.architectures == [model.family.architecture]
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(theirs)
    shapes = {name: entry.shape for name, entry in weight_map(model).entries.items()}
    # experts apart, as in files
    theirs = revert_weight_conversion(built, dict(built.named_parameters()))
    assert {name: tuple(p.shape) for name, p in theirs.items()} == shapes


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (dict(family="llama", norm="layernorm"), "final_norm.kind = layernorm"),
        (dict(family="llama", sliding_window=8), "sliding_window = 8"),
        (dict(family="llama", attention_bias=True), "the bias of attention.s output = False"),
        (dict(family="qwen2"), "the bias of q"),
        (dict(family="mistral", qk_norm=True), "qk_norm = there"),
        (dict(family="gpt2"), "positions"),
        (dict(family="mistral", sliding_window=8, sliding_layers=(1,)), r"window = \[None, 8, N"),
        (dict(family="qwen3", qk_norm=True, num_experts=8), "mlp = experts"),
        (dict(family="mixtral"), "mlp = dense"),
        (dict(family="mixtral", num_experts=8, dense_layers=(1,)), r"mlp = \['experts', 'dense'"),
        (dict(family="mixtral", num_experts=8, norm_topk_prob=False), "router.normalise"),
        (dict(family="bert"), "bert"),
    ],
)
def test_a_family_refuses_what_it_cannot_express(fields, name):
    with pytest.raises(ValueError, match=name):
        flat_model(**fields)
