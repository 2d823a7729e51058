"""What a family declares: each field once, with a default, limits and a help."""

import pytest

from dolmen.families import ModelConfig, families, replace_fields
from dolmen.families.common import write as write_fields

# which have no option of their own: spellings of rope in older files, and quirks of a file
OLDER = {
    "_remove_final_layer_norm",
    "attention_types",
    "rope_theta",
    "rope_scaling",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}


@pytest.mark.parametrize("name", families())
def test_a_family_declares_its_fields(name):
    """Each field once, its default within its limits; what a spec states is among them; an option
    has a help, and no two options have one name.
    """
    family = families()[name]
    names = [field.name for field in family.fields]
    assert len(set(names)) == len(names) and not {*names} & {*family.only, *family.harmless.split()}
    ModelConfig({"model_type": name, **{f.name: f.default for f in family.fields}})
    assert set(write_fields(family, ModelConfig({"model_type": name}).spec)) <= set(names)
    for field in family.fields:
        assert field.help or field.nested or field.name in OLDER
    every = [n for f in family.fields for n in (f.name, *f.aliases, *f.common)]
    assert len(set(every)) == len(every)
    for common in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        assert family.names[common] in names  # of any family


def test_limits_are_told_with_the_field():
    model = ModelConfig({"model_type": "llama"})
    for size, words in ((0, "at least 1"), (2**40, "at most 4,194,304")):
        with pytest.raises(ValueError, match=f"hidden_size is {size}: it must be {words}"):
            replace_fields(model, {"hidden_size": size})


def test_families_are_listed_by_name():
    assert [*families()] == sorted(families())
    assert all(name == family.name for name, family in families().items())
