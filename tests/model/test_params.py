"""What is known of each parameter before there is a tensor: what makes, places, checks and decays
them, and what no module computes.
"""

from dataclasses import replace

import pytest
from tiny_models import Flat, Tiny, build, decoder

from dolmen.core.mesh import SINGLE, Axis
from dolmen.core.state import Replicate, Shard
from dolmen.model.block import ONLY, check_supported
from dolmen.model.decoder import Decoder
from dolmen.model.layers import is_partial, placements
from dolmen.model.spec import (
    AttentionSpec,
    LoraSpec,
    NormSpec,
    PositionTable,
    ScalarHeadSpec,
    check_sharding,
    select_prefix,
)
from dolmen.model.training import RouterTraining, Training
from dolmen.optim.config import OptimizerConfig
from dolmen.optim.optimizer import adamw
from dolmen.parallel.tensor import TensorParallel

SIZES = dict(
    vocab_size=71,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=8,
)
LLAMA = Flat(**SIZES, qk_norm=True)
GPT2 = Flat(
    **SIZES | dict(num_key_value_heads=4),
    position="learned",
    norm="layernorm",
    mlp="plain",
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    tie_word_embeddings=True,
)
EXPERTS = Flat(**SIZES, num_experts=6, moe_intermediate_size=8, dense_layers=(0,))


SCALAR = Tiny(replace(GPT2.spec, head=ScalarHeadSpec()))


@pytest.mark.parametrize(
    "flat", [LLAMA, GPT2, EXPERTS, SCALAR], ids=("llama", "gpt2", "experts", "scalar")
)
def test_the_model_has_the_leaves_in_their_order(flat):
    made = {name: tuple(p.shape) for name, p in decoder(flat).named_parameters()}
    assert list(made.items()) == list(flat.spec.shapes.items())


def test_where_parameters_lie():
    """GPT-2, experts and q and k norms on two ranks of tp: columns and rows, tables, what
    is whole; of experts also ep.
    """
    sizes, tp = {"tp": 2, "ep": 3}, TensorParallel(Axis("tp", 2, 0), sequence=True)
    rows, columns, whole_ = Shard(0), Shard(1), Replicate()
    wanted = {
        "embed.weight": (rows, False),
        "positions.weight": (whole_, True),
        "layers.0.attn_norm.weight": (whole_, True),
        "layers.0.attn_norm.bias": (whole_, True),
        "layers.0.attn.q.weight": (rows, False),
        "layers.0.attn.k.bias": (rows, False),
        "layers.0.attn.o.weight": (columns, False),
        "layers.0.attn.o.bias": (whole_, True),
        "layers.0.mlp.up.bias": (rows, False),
        "layers.0.mlp.down.weight": (columns, False),
    }
    for name, found in wanted.items():
        param = GPT2.spec.params[name]
        assert (placements(param, sizes), is_partial(param, tp)) == found, name
    params = EXPERTS.spec.params
    assert placements(params["layers.1.mlp.router.weight"], sizes) == Replicate()
    assert placements(params["layers.1.mlp.experts.up.weight"], sizes) == (Shard(0), Shard(1))
    assert placements(params["layers.1.mlp.experts.down.weight"], sizes) == (Shard(0), Shard(2))
    assert is_partial(params["layers.1.mlp.router.weight"], tp)
    plain = TensorParallel(Axis("tp", 2, 0))
    norms = select_prefix(LLAMA.spec.params, "layers.0")
    assert is_partial(norms["attn.q_norm.weight"], plain)
    assert not is_partial(norms["attn_norm.weight"], plain)


def test_keys_and_values_are_whole_where_tp_does_not_divide_their_heads():
    param = LLAMA.spec.params["layers.0.attn.k.weight"]
    four = TensorParallel(Axis("tp", 4, 0))
    assert placements(param, {"tp": 4}) == Replicate() and is_partial(param, four)
    assert param.local_shape({"tp": 4}) == param.shape and param.local_shape({"tp": 2}) == (4, 16)


@pytest.mark.parametrize(
    ("flat", "sizes", "said"),
    [
        (
            LLAMA,
            {"tp": 3},
            "num_attention_heads (4) is not divisible by tp (3): set --layout.tp to a "
            "divisor, such as 2",
        ),
        (LLAMA, {"tp": 8}, "num_attention_heads (4) is not divisible by tp (8): set --layout.tp"),
        (
            EXPERTS,
            {"tp": 1, "ep": 4},
            "num_experts (6) is not divisible by ep (4): set --layout.ep",
        ),
        (replace(LLAMA, vocab_size=3), {"tp": 4}, "vocab_size (3) leaves a rank of tp (4) without"),
    ],
)
def test_what_an_axis_does_not_divide_is_refused(flat, sizes, said):
    with pytest.raises(ValueError, match="set (a smaller )?--layout") as refused:
        check_sharding(flat.spec.params, {"ep": 1, **sizes})
    assert said in str(refused.value)


def test_heads_are_counted_for_a_person():
    assert (
        AttentionSpec(2, 1, 8).words == "2 heads, 1 kv head"
        and AttentionSpec(1, 1, 8).words == "1 head"
    )
    assert AttentionSpec(4, 2, 8).words == "4 heads, 2 kv heads"


def test_matrices_and_tables_decay():
    for flat in (LLAMA, GPT2, EXPERTS):
        made = build(flat, SINGLE)
        optimizer = adamw(made, OptimizerConfig(weight_decay=0.1))
        decaying = {p for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
        assert {n for n, p in made.named_parameters() if p in decaying} == {
            n for n, p in made.named_parameters() if p.ndim > 1
        }


def test_a_bias_that_balances_belongs_to_the_model_that_is_trained():
    training = Training(router=RouterTraining(balance="bias"))
    applied = training.apply_to(EXPERTS.spec)
    added = applied.params.keys() - EXPERTS.spec.params.keys()
    assert added == {"layers.1.mlp.router.bias"} and training.apply_to(LLAMA.spec) == LLAMA.spec
    made = Decoder(EXPERTS.spec, training=training)
    assert made.spec == applied == training.apply_to(applied)
    assert not made.get_parameter("layers.1.mlp.router.bias").requires_grad


def test_what_no_module_computes_is_refused(monkeypatch):
    """As while a mechanism is made."""
    check_supported(GPT2.spec)
    monkeypatch.setitem(ONLY, PositionTable, {"offset": 0})
    table = replace(GPT2.spec.embedding, positions=PositionTable(8, offset=2))
    with pytest.raises(ValueError, match="Table.offset is 2: only 0 is supported"):
        Decoder(replace(GPT2.spec, embedding=table))


LAYERNORM = NormSpec("layernorm")


def attention(of, norm) -> AttentionSpec:
    return AttentionSpec(2, 1, 8, qk_norm=norm, qk_norm_of=of)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: NormSpec(affine=False), "only a layernorm without bias may have none"),
        (lambda: NormSpec("layernorm", bias=True, affine=False), "only a layernorm without bias"),
        (lambda: NormSpec("layernorm", zero_centred=True), "is zero-centred: only rmsnorm may be"),
        (lambda: attention("width", LAYERNORM), "qk_norm of width is .*: only rmsnorm without"),
        (lambda: attention("each head", NormSpec()), "qk_norm of each head .*: only layernorm"),
        (lambda: attention("each head", replace(LAYERNORM, bias=True)), "without bias"),
    ],
)
def test_combinations_that_no_kernel_computes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_combinations_that_kernels_compute_are_specs():
    assert NormSpec("layernorm", affine=False) and NormSpec(zero_centred=True)
    kinds = (("heads", LAYERNORM), ("heads", NormSpec(bias=False)), ("width", NormSpec()))
    for of, norm in (*kinds, ("each head", LAYERNORM), ("width", None)):
        assert attention(of, norm).qk_norm is norm


def test_adapters_of_no_parameter_are_refused():
    params = Flat().spec.params
    with pytest.raises(KeyError, match="1 targets of adapters are not parameters, e.g. .'nowhere'"):
        LoraSpec(2, 4.0, frozenset({*list(params)[:1], "nowhere"})).add_params(params)
