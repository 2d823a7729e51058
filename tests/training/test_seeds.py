"""What a seed decides: initial weights, the order of data and dropout, each followed from the
command's `train.seed`; and the initial weights' distribution in closed form.
"""

import itertools
import math

import pytest
import tinyrun
import torch
from rich.console import Console
from tiny_models import Flat, build, initialize

from dolmen.core import state
from dolmen.core.mesh import SINGLE
from dolmen.training.run import run_training

material, one_thread = tinyrun.material, tinyrun.one_thread

LAYERS, RANGE = 8, 0.05
SIZES = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    initializer_range=RANGE,
)
MODELS = {
    "llama": Flat(**SIZES, qk_norm=True),
    "gpt2": Flat(
        **SIZES | dict(num_key_value_heads=4),
        max_position_embeddings=64,
        position="learned",
        norm="layernorm",
        mlp="plain",
        activation="gelu_tanh",
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "experts": Flat(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
}
# the last product before each sum with the residual stream: GPT-2's 1 / sqrt(2 layers), by which
# 2 * layers of them add up to the variance of one
SCALED = ("attn.o.weight", "mlp.down.weight", "mlp.experts.down.weight")


def values(model: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """{name: whole parameter}, fp64."""
    made = build(MODELS[model], SINGLE)
    initialize(made, seed)
    return {name: state.gather_full(p).double() for name, p in made.named_parameters()}


@pytest.mark.parametrize("model", MODELS)
def test_initial_values_are_normal_with_the_std_of_their_site(model):
    """Means, standard deviations and the share within one of them, each within five standard
    errors; norms are 1 and biases 0. Of stacked experts each matrix by itself.
    """
    for name, whole in values(model).items():
        if name.endswith("bias"):
            assert not whole.any(), name
            continue
        if "norm" in name:
            assert bool((whole == 1).all()), name
            continue
        std = RANGE / math.sqrt(2 * LAYERS) if name.endswith(SCALED) else RANGE
        for x in whole.flatten(0, -3) if whole.dim() == 3 else [whole]:
            n = x.numel()
            assert abs(float(x.mean())) < 5 * std / math.sqrt(n), name
            assert abs(float(x.std()) / std - 1) < 5 / math.sqrt(2 * n), name
            inside = float((x.abs() < std).double().mean())
            share = math.erf(math.sqrt(0.5))  # 68.3 %
            assert abs(inside - share) < 5 * math.sqrt(share * (1 - share) / n), name


def test_no_two_matrices_are_alike():
    """Of a model, of its experts and of two seeds: correlation within five standard errors."""
    sampled = {}
    for seed in (0, 1):
        for name, x in values("experts", seed).items():
            if x.dim() > 1:
                for i, matrix in enumerate(x if x.dim() == 3 else [x]):
                    sampled[seed, name, i] = matrix.flatten()
    for (one, a), (other, b) in itertools.combinations(sampled.items(), 2):
        n = min(len(a), len(b))
        correlation = float(a[:n] @ b[:n] / (a[:n].norm() * b[:n].norm()))
        assert abs(correlation) < 5 / math.sqrt(n), f"{one} and {other}: {correlation:.3f}"


def first_loss(material, out, seed: int, **sections) -> float:
    """Of a run's first step."""
    sections["train"] = {"seed": seed, "steps": 1} | sections.get("train", {})
    sections["log"] = {"validate_every": 0}
    run_training(material.config(**sections), out, SINGLE, Console(quiet=True))
    return tinyrun.losses(out)[0][1]


@pytest.fixture
def one_word(tmp_path):
    """Text in which every window is the same."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a" * 3000)
    return {"path": [str(tmp_path / "text")], "validation_fraction": 0.0}


def by_seed(material, tmp_path, *seeds: int, **sections) -> list[float]:
    """First losses with these seeds."""
    return [
        first_loss(material, tmp_path / str(i), seed, **sections) for i, seed in enumerate(seeds)
    ]


@pytest.mark.slow
def test_each_use_of_the_seed_by_itself(material, tmp_path, one_word):
    """Weights from a folder and the same row everywhere leave dropout; without it, nothing; with
    other text, its order; with random weights, those.
    """
    loaded = {"init": str(material.model)}
    same = by_seed(material, tmp_path / "same", 0, 1, data=one_word, **loaded)
    assert len(set(same)) == 1
    for name, sections in {
        "dropout": {"data": one_word, "train": {"dropout": 0.3}, **loaded},
        "order": loaded,
        "weights": {"data": one_word},
    }.items():
        first, again, other = by_seed(material, tmp_path / name, 0, 0, 1, **sections)
        assert first == again != other, name
