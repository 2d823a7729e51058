"""Weight rules on numbered rows: what ends up where, the way back, and refusals."""

import pytest
import torch
from tiny_models import Flat, flat_model

from dolmen.conversion import hf_export
from dolmen.conversion.weights import assemble, join_stored, split_stored
from dolmen.families import ModelConfig, weight_map
from dolmen.families.rules import BareParameter, Each, Paired, Rename, Split, Transpose, entries

QKV = ("layers.{}.attn.q", "layers.{}.attn.k", "layers.{}.attn.v")


@pytest.mark.parametrize(
    ("groups", "counts", "rows"),
    [
        (1, (4, 2, 2), ([0, 1, 2, 3], [4, 5], [6, 7])),  # phi3: all q, all k, all v
        (
            2,
            (2, 1, 1),
            ([0, 1, 4, 5], [2, 6], [3, 7]),
        ),  # falcon: the queries of a group, then its k and v
        (4, (1, 1), ([0, 2, 4, 6], [1, 3, 5, 7])),
    ],
)  # interleaved gate and up
@pytest.mark.parametrize("unit", [1, 3])
def test_split(groups, counts, rows, unit):
    stored = torch.arange(8).repeat_interleave(unit)[:, None] * torch.ones(1, 5)
    for tensor in (stored, stored[:, 0]):  # a weight and a bias
        rule = Split("hf", tuple("abc"[: len(counts)]), groups, counts)
        parts = list(split_stored(rule, tensor))
        for part, expected in zip(parts, rows, strict=True):
            assert part.reshape(len(part), -1)[:, 0].tolist() == [
                float(r) for r in expected for _ in range(unit)
            ]
        assert torch.equal(join_stored(rule, parts), tensor)
        assert rule.shape([tuple(p.shape) for p in parts]) == tuple(tensor.shape)


def test_transpose_of_a_split_is_views():
    stored = torch.randn(4, 12)
    rule = Transpose(Split("hf", tuple("abc"), 1, (1, 1, 1)))
    parts = list(split_stored(rule, stored))
    assert [tuple(p.shape) for p in parts] == [(4, 4)] * 3
    assert all(p.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr() for p in parts)
    assert torch.equal(join_stored(rule, parts), stored) and rule.shape([(4, 4)] * 3) == (4, 12)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("sizes", [(24,), (24, 18)])
def test_each_rule_has_an_inverse(heads, sizes):
    """To the bit, in both orders: what is split is joined, and what is joined is split."""
    split = Split("hf", ("a", "b"), 2, (2, 1))
    inner = [Rename("hf", "a"), split, Transpose(Rename("hf", "a")), Transpose(split)]
    stacked = [rule for one in inner for rule in (Each(one), BareParameter(Each(one)))]
    single = [*inner, Paired("hf", "a", heads), BareParameter(Rename("hf", "a"))]
    for rule in [*single, *stacked]:
        stored = torch.randn(*([4] if rule in stacked else []), *sizes)
        parts = list(split_stored(rule, stored))
        back = join_stored(rule, parts)
        assert torch.equal(back, stored), rule
        assert all(map(torch.equal, split_stored(rule, back), parts)), rule


@pytest.mark.parametrize("heads", [1, 3])
def test_neighbours_of_a_head_become_its_halves(heads):
    """By complex numbers: real parts of a head, then its imaginary parts."""
    stored = torch.randn(heads * 8, 5)
    pairs = torch.view_as_complex(stored.view(heads, 4, 2, 5).movedim(2, -1).contiguous())
    (ours,) = split_stored(Paired("hf", "a", heads), stored)
    assert torch.equal(ours.view(heads, 2, 4, 5), torch.stack([pairs.real, pairs.imag], 1))


def test_parameters_without_a_rule_raise():
    spec = Flat(num_hidden_layers=1).spec
    with pytest.raises(
        KeyError, match=r"10 parameters .*'layers.0.attn_norm.weight', 'layers.0.attn.q.weight'"
    ):
        entries([Rename("e", "embed"), Rename("h", "head")], spec.shapes, 1)


def test_a_fused_tensor_of_unequal_parts_raises():
    spec = Flat(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2).spec
    with pytest.raises(ValueError, match="family"):
        entries([Split("c_attn.{}", QKV, 1, (1, 1, 1))], spec.shapes, 1)


@pytest.mark.parametrize(
    ("model", "stored", "shape", "fields"),
    [
        ("gpt2", "h.0.attn.c_attn.weight", (24, 2304), ["n_embd"]),
        ("gpt2", "h.0.mlp.c_fc.weight", (768, 3000), ["n_inner"]),
        ("gpt2", "wte.weight", (9, 768), ["vocab_size"]),
        ("gpt2", "wpe.weight", (9, 768), ["n_positions"]),
        ("gpt2", "wpe.weight", (9, 768, 1), []),
        (
            "llama",
            "layers.0.self_attn.k_proj.weight",
            (8, 4096),
            ["num_key_value_heads", "head_dim"],
        ),
        ("llama", "layers.0.self_attn.q_proj.weight", (4096, 9), ["hidden_size"]),
        ("mixtral", "layers.0.block_sparse_moe.gate.weight", (9, 4096), ["num_local_experts"]),
        (
            "qwen3_moe",
            "layers.0.mlp.experts.0.up_proj.weight",
            (9, 2048),
            ["moe_intermediate_size"],
        ),
    ],
)
def test_disagreeing_fields(model, stored, shape, fields):
    """The fields that make the expected shape, and no others."""
    layers = "n_layer" if model == "gpt2" else "num_hidden_layers"
    weights = weight_map(ModelConfig({"model_type": model, layers: 1}))
    prefix = "transformer." if model == "gpt2" else "model."
    assert weights.disagreeing_fields(prefix + stored, shape) == fields


EXPERTS = flat_model(
    family="mixtral",
    num_hidden_layers=2,
    num_experts=12,
    hidden_size=4,
    intermediate_size=5,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=4,
    vocab_size=6,
)
STACK = "layers.{}.mlp.experts.gate.weight"


def test_a_stack_is_read_whole_and_written_apart():
    """Pieces come in any order, each read once; a stack is asked for once, whichever of its pieces
    is written.
    """
    found = weight_map(EXPERTS).entries
    stored = {name: torch.randn(entry.shape) for name, entry in found.items()}
    names, read, requested = list(found)[::-1], [], []
    ours = dict(
        assemble([found[n] for n in names], lambda name: (read.append(name), stored[name])[1])
    )
    assert sorted(read) == sorted(names) and ours.keys() == EXPERTS.spec.params.keys()
    for i in range(12):
        assert torch.equal(
            ours[STACK.format(1)][i],
            stored[f"model.layers.1.block_sparse_moe.experts.{i}.w1.weight"],
        )
    back = dict(
        hf_export.export_weights(EXPERTS, lambda name: (requested.append(name), ours[name])[1])
    )
    assert (
        sorted(requested) == sorted(ours)
        and back.keys() == stored.keys()
        and all(torch.equal(back[n], stored[n]) for n in stored)
    )


def test_of_a_stack_only_what_is_wanted_is_read():
    found, read = weight_map(EXPERTS).entries, []
    got = dict(
        assemble(
            found.values(),
            lambda name: (read.append(name), torch.zeros(found[name].shape))[1],
            {STACK.format(0)},
        )
    )
    assert list(got) == [STACK.format(0)] and read == [
        f"model.layers.0.block_sparse_moe.experts.{i}.w1.weight" for i in range(12)
    ]


def test_experts_of_unequal_dtypes_are_refused():
    found = weight_map(EXPERTS).entries
    pieces = {
        name: torch.zeros(e.shape, dtype=torch.bfloat16 if ".2.w1" in name else torch.float32)
        for name, e in found.items()
    }
    with pytest.raises(ValueError, match=r"experts.2.w1.weight is torch.bfloat16"):
        list(assemble(found.values(), pieces.__getitem__))
