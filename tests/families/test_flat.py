"""Models as dolmen spelled them before: the trees, the config.json and the training knobs that they
are now.
"""

import json
from pathlib import Path

import pytest
from models import Flat, flat_model
from tiny import CASES, config_of

from dolmen.core.config import from_dict
from dolmen.families import Model, flat
from dolmen.model.training import RouterTraining, Training
from dolmen.model.tree import Rope, Table
from dolmen.recipes import RECIPES

# Of the recipes as they were when a model was a flat set of choices: what a run's config.yaml said,
# and the config.json that an export wrote.
OLD = json.loads((Path(__file__).parent / "old_recipes.json").read_text())


@pytest.mark.parametrize("name", OLD)
def test_recipes_are_what_they_were(name):
    made = RECIPES[name]().model
    assert flat_model(**OLD[name]["flat"]) == made
    assert made.exported() == OLD[name]["config"]
    assert from_dict(Flat, OLD[name]["flat"]).tree == made.tree


FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt2"}  # of then
LATER = "llama-yarn"
OF_THEN = [n for n, case in CASES.items() if case.model_type in FAMILIES and n != LATER]


@pytest.mark.parametrize("case", OF_THEN)
def test_a_model_that_was_read_comes_back_whole(case):
    """Old fields of a model of a transformers folder hold its config.json: what a checkpoint of a
    run with --init kept.
    """
    content = config_of(case)
    source = Model(content)
    old = old_fields(source)
    assert from_dict(Flat, old).tree == source.tree
    assert flat_model(**old, family=source.model_type, hf=content) == source
    wider = flat_model(**{**old, "vocab_size": 99}, family=source.model_type, hf=content)
    assert wider.config == content | {"vocab_size": 99}


def old_fields(model: Model) -> dict:
    """A tree of a family of then as the fields of then, by hand."""
    tree = model.tree
    block, layers = tree.blocks[0], range(tree.layers)
    mixer = block.mixer
    windows = {i: b.mixer.window for i, b in enumerate(tree.blocks)}
    dense = [i for i in layers if not tree.blocks[i].mlp.experts]
    sparse = [b.mlp for b in tree.blocks if b.mlp.experts]
    mlp = tree.blocks[dense[0]].mlp if dense else None
    fields = dict(
        vocab_size=tree.vocab_size,
        hidden_size=tree.hidden_size,
        num_hidden_layers=tree.layers,
        num_attention_heads=mixer.heads,
        num_key_value_heads=mixer.kv_heads,
        head_dim=mixer.head_size,
        max_position_embeddings=tree.max_position_embeddings,
        norm=block.norm.kind,
        norm_eps=block.norm.eps,
        qk_norm=mixer.qk_norm is not None,
        attention_bias=mixer.q_bias,
        output_bias=mixer.o_bias,
        tie_word_embeddings=tree.head.tied,
        initializer_range=tree.initializer_range,
        sliding_window=next((w for w in windows.values() if w), None),
        sliding_layers=[i for i in layers if windows[i]],
        activation=block.mlp.activation,
    )
    if isinstance(mixer.positions, Rope):
        scaling = mixer.positions.scaling
        fields["rope"] = {"theta": mixer.positions.theta}
        if scaling is not None:
            fields["rope"] |= {"scaling": type(scaling).__name__.lower(), **vars(scaling)}
    else:
        assert isinstance(tree.embedding.positions, Table)
        fields["position"] = "learned"
    if mlp is not None:
        fields |= dict(
            intermediate_size=mlp.size, mlp="gated" if mlp.gated else "plain", mlp_bias=mlp.bias
        )
    if sparse:
        fields |= dict(
            num_experts=sparse[0].number,
            num_experts_per_tok=sparse[0].per_token,
            moe_intermediate_size=sparse[0].size,
            norm_topk_prob=sparse[0].router.normalise,
            router_aux_loss_coef=sparse[0].router.aux_loss_coef,
            dense_layers=dense,
        )
    return fields


def test_training_knobs_left_the_model():
    old = dict(dropout=0.1, router_balance="bias", router_z_loss_coef=0.01, router_bias_rate=0.02)
    assert from_dict(Flat, old).training == Training(0.1, RouterTraining("bias", None, 0.01, 0.02))
    assert Flat().training == Training()


def test_a_run_of_then():
    """Its model becomes a config.json, its knobs go to train; a run of now stays as it is."""
    values = {
        "name": "old",
        "model": {"hidden_size": 64, "head_dim": 2, "dropout": 0.2},
        "train": {"steps": 5},
    }
    now = flat.run(values)
    assert now["model"]["model_type"] == "llama" and now["model"]["hidden_size"] == 64
    assert now["train"]["dropout"] == 0.2 and now["train"]["steps"] == 5
    assert now["train"]["router"]["balance"] == "loss"
    assert flat.run(now) == now and flat.run({"name": "x"}) == {"name": "x"}
    for size, said in ((10**9, "from 1 to 4,096"), (0, "from 1 to 4,096")):
        with pytest.raises(ValueError, match=f"model.num_hidden_layers is {size}: .* {said}"):
            flat.run({"model": {"num_hidden_layers": size}})
    with pytest.raises(ValueError, match="model has hiden_size and no model_type"):
        flat.run({"model": {"hiden_size": 5}})
