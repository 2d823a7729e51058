"""A config.json changed, moved to another family and exported: what was not asked for stays, in the
spelling that the file has.
"""

import math

import pytest
from cases.gpt_neo import NEO_125M
from cases.gpt_neox import PYTHIA_160M, PYTHIA_RESAVED
from cases.mpt import MPT_7B
from published import (
    DEEPSEEK_V3,
    GPT2,
    GPT2_ALIASES,
    LLAMA_31,
    LLAMA_LINEAR,
    PUBLISHED,
    QWEN_YARN,
    by_transformers,
    each,
)

from dolmen.families import (
    ModelConfig,
    convert_family,
    edit,
    families,
    replace_fields,
    training_fields,
    unknown_fields,
)
from dolmen.families import rope as rope_fields
from dolmen.model.spec import RopeSpec, YarnScaling


def test_a_change_keeps_the_spelling():
    longer = replace_fields(ModelConfig(LLAMA_31), {"rope_parameters.factor": 16.0})
    assert longer.config == LLAMA_31 | {"rope_scaling": LLAMA_31["rope_scaling"] | {"factor": 16.0}}
    unscaled = replace_fields(
        ModelConfig(LLAMA_31),
        {"rope_parameters.rope_type": "default", "rope_parameters.rope_theta": 1000.0},
    )
    assert unscaled.config == LLAMA_31 | {"rope_theta": 1000.0, "rope_scaling": None}
    five = LLAMA_LINEAR | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "own": 1}}
    del five["rope_scaling"]
    doubled = replace_fields(ModelConfig(five), {"rope_parameters.factor": 8.0}).config[
        "rope_parameters"
    ]
    assert doubled == {"rope_type": "linear", "factor": 8.0, "own": 1, "rope_theta": 10000.0}
    assert replace_fields(ModelConfig(GPT2_ALIASES), {"n_layer": 3}).config == GPT2_ALIASES | {
        "num_hidden_layers": 3
    }
    # n_inner is absent and follows n_embd
    assert replace_fields(ModelConfig(GPT2), {"n_embd": 1536}).spec.blocks[0].mlp.size == 4 * 1536
    assert "factor" not in rope_of(
        replace_fields(ModelConfig({"model_type": "llama"}), {"vocab_size": 7})
    )


def test_what_training_alone_uses_is_known_by_each_familys_name():
    assert training_fields(ModelConfig({"model_type": "llama"})) == {"initializer_range"}
    assert training_fields(ModelConfig({"model_type": "opt"})) == {"init_std"}
    assert training_fields(ModelConfig(DEEPSEEK_V3)) == {"initializer_range", "aux_loss_alpha"}


def test_a_field_that_is_stated_by_two_names_is_changed_under_both():
    twice = GPT2 | {"hidden_size": 768}
    made = replace_fields(ModelConfig(twice), {"n_embd": 1536})
    assert made.config == twice | {"n_embd": 1536, "hidden_size": 1536}


def rope_of(model):
    return model.config.get("rope_parameters", {})


@each()
def test_edit(content):
    """Of every family: vocabulary, tie, dtype, context, special tokens, and nothing else."""
    model = ModelConfig(content)
    tied = model.spec.both_ways or not model.spec.head.tied  # of an encoder no other is computed
    edited = edit(model, vocab_size=77, tie=tied, dtype="float16", context=48, eos_token_id=[3, 4])
    spec, before = edited.spec, model.spec
    assert spec.vocab_size == 77 and spec.head.tied == tied and spec.max_position_embeddings == 48
    assert edited.dtype == "float16" and edited.config["eos_token_id"] == [3, 4]
    assert spec.runs == before.runs and spec.hidden_size == before.hidden_size
    assert (spec.longest is None) == (before.longest is None) and spec.longest in (None, 48)
    names = {n for n in {**content, **edited.config} if content.get(n) != edited.config.get(n)}
    length = model.family.names["max_position_embeddings"]
    assert names <= {
        "vocab_size",
        model.family.names["vocab_size"],
        "tie_word_embeddings",
        "dtype",
        "torch_dtype",
        *{length, "model_max_length", "n_positions"} & names,
        "eos_token_id",
        "dolmen",  # what it was taken for, from now on
    }
    assert edit(model) == model


def rope(content: dict, **changes):
    """Of the first layer, with `rope_parameters` changed."""
    changes = {f"rope_parameters.{name}": value for name, value in changes.items()}
    return (
        replace_fields(ModelConfig({"model_type": "llama", **content}), changes)
        .spec.blocks[0]
        .mixer.positions
    )


def test_a_change_of_rope_holds_whatever_else_the_file_says_of_it():
    """What is read first in a file that says it in two places is changed too."""
    linear = {"rope_type": "linear", "factor": 2.0}
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": linear}
    assert rope(both).scaling.factor == 2
    assert rope(both, factor=8.0).scaling.factor == 8
    assert rope(both, rope_theta=500.0).theta == 500
    assert rope(both, rope_type="default").scaling is None
    assert rope({"rope_theta": 500.0, **both}, rope_theta=7.0).theta == 7
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    length = "original_max_position_embeddings"
    for name in ("rope_parameters", "rope_scaling"):
        stated = {length: 32, "rope_theta": 1e4, name: yarn}
        assert rope(stated).scaling.original_max_position_embeddings == 32
        assert rope(stated, **{length: 8}).scaling.original_max_position_embeddings == 8


def test_a_changed_part_of_heads_keeps_the_names_of_the_family():
    """Of which transformers 4 had others for GPT-NeoX."""
    other = replace_fields(ModelConfig(PYTHIA_160M), {"rope_parameters.partial_rotary_factor": 0.5})
    assert other.config == PYTHIA_160M | {"rotary_pct": 0.5, "rope_scaling": None}
    assert other.spec.blocks[0].mixer.positions == RopeSpec(32)
    both = replace_fields(
        ModelConfig(PYTHIA_RESAVED), {"rope_parameters.partial_rotary_factor": 0.5}
    )
    said = {"rotary_pct": 0.5, "partial_rotary_factor": 0.5}
    scaling = {"rope_type": "linear", "factor": 2.0}
    assert both.config == PYTHIA_RESAVED | said | {"rope_scaling": scaling}
    third = replace_fields(other, {"rope_parameters.partial_rotary_factor": 6 / 64})
    assert third.spec.blocks[0].mixer.positions == RopeSpec(6)
    names = third.family.names
    assert names["rotary_pct"] == names["partial_rotary_factor"]
    assert names["rotary_emb_base"] == names["rope_theta"] == "rope_parameters.rope_theta"


def test_kinds_of_layers_are_changed_in_both_forms():
    each = ["global", *["local"] * 11]
    other = replace_fields(ModelConfig(NEO_125M), {"attention_layers": each})
    assert other.config == NEO_125M | {"attention_layers": each, "attention_types": [[each, 1]]}
    assert [b.mixer.window for b in other.spec.blocks] == [None, *[256] * 11]


def test_a_changed_mapping_keeps_what_stands_beside():
    other = replace_fields(ModelConfig(MPT_7B), {"attn_config.clip_qkv": 4.0})
    assert other.config["attn_config"] == MPT_7B["attn_config"] | {"clip_qkv": 4.0}
    assert other.spec.blocks[0].mixer.clip == 4


def test_every_part_of_a_head_comes_back():
    """As a fraction, which is rounded down: of 49 numbers 2 / 49 alone would turn 1."""
    for head in (44, 49, 64, 80, 96):
        for turned in range(2, head + 1, 2):
            assert (
                int(head * rope_fields.write(RopeSpec(turned), head)["partial_rotary_factor"])
                == turned
            )


def test_a_token_that_no_config_has_is_refused():
    with pytest.raises(ValueError, match="edit: sos_token_id is unknown; .* bos_token_id"):
        edit(ModelConfig({"model_type": "llama"}), sos_token_id=1)


def test_an_attention_factor_follows_a_changed_factor():
    """Where none was stated."""
    longer = replace_fields(ModelConfig(QWEN_YARN), {"rope_parameters.factor": 8.0})
    scaling = longer.spec.blocks[0].mixer.positions.scaling
    assert scaling == YarnScaling(8.0, 32768, attention_factor=0.1 * math.log(8) + 1)
    stated = QWEN_YARN["rope_scaling"] | {"attention_factor": 1.5}
    kept = replace_fields(
        ModelConfig(QWEN_YARN | {"rope_scaling": stated}), {"rope_parameters.factor": 8.0}
    )
    assert kept.spec.blocks[0].mixer.positions.scaling.attention_factor == 1.5
    deep = (
        replace_fields(ModelConfig(DEEPSEEK_V3), {"rope_parameters.factor": 80.0})
        .spec.blocks[0]
        .mixer
    )
    assert deep.positions.scaling.attention_factor == 1.0  # of equal mscales
    assert deep.scale == pytest.approx((0.1 * math.log(80) + 1) ** 2 / 192**0.5, rel=1e-12)


def test_unknown_fields_are_kept_and_reported():
    content = LLAMA_31 | {"flux_capacitor": 1.21, "_commit": "abc"}
    content["rope_scaling"] = content["rope_scaling"] | {"mystery": 1}
    model = ModelConfig(content)
    assert unknown_fields(model) == ["flux_capacitor", "rope_scaling.mystery"]
    assert model.export_config() == content
    assert edit(model, vocab_size=7).config == content | {"vocab_size": 7}
    assert not any(unknown_fields(ModelConfig(c)) for c in PUBLISHED)
    assert not any(
        unknown_fields(ModelConfig(by_transformers({"model_type": n}))) for n in families()
    )


def test_what_stands_under_the_reserved_key_is_not_exported():
    assert ModelConfig({"model_type": "llama", "dolmen": {}}).export_config() == {
        "model_type": "llama"
    }
    with pytest.raises(ValueError, match="dolmen has a field 'mystery'"):
        ModelConfig({"model_type": "llama", "dolmen": {"mystery": 1}})


def test_another_family_keeps_the_token_ids():
    other = convert_family(ModelConfig(LLAMA_31), "mistral")
    assert other.model_type == "mistral" and "mlp_bias" not in other.config
    assert other.config["eos_token_id"] == LLAMA_31["eos_token_id"] and other.dtype == "bfloat16"
    assert other.spec == ModelConfig(LLAMA_31).spec
    with pytest.raises(ValueError, match="family gpt2 cannot express"):
        convert_family(ModelConfig(LLAMA_31), "gpt2")


def test_an_activation_without_a_name_is_of_no_other_family():
    with pytest.raises(ValueError, match=r"qwen3_moe cannot express activation = ClampedSwiGLU\("):
        convert_family(ModelConfig({"model_type": "gpt_oss"}), "qwen3_moe")
