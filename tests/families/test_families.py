"""Every family, there and back: config.json field for field, weights bit for bit, and the meaning
of each tensor.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from family_cases import CASES, build, save
from safetensors.torch import load_file

from dolmen.conversion import hf, hf_export
from dolmen.conversion.source import load_weights, open_source
from dolmen.families import edit


@pytest.fixture(scope="module", params=CASES)
def source(request, tmp_path_factory):
    """(case, reference, its folder)."""
    model = build(request.param)
    return CASES[request.param], model, save(model, tmp_path_factory.mktemp("source"))


def load(folder):
    """(the model, parameters loaded into NaNs)."""
    model = hf.read_config(folder)
    targets = {name: torch.full(shape, float("nan")) for name, shape in model.spec.shapes.items()}
    load_weights(open_source(folder), lambda name, full: targets[name].copy_(full))
    return model, targets


def test_config_and_weights_come_back(source, tmp_path):
    case, _, folder = source
    loaded, ours = load(folder)
    assert not [name for name, tensor in ours.items() if tensor.isnan().any()]
    hf_export.save(tmp_path / "back", loaded, ours.__getitem__)
    for file in ("config.json", "generation_config.json")[: 1 if case.plain or case.fills else 2]:
        theirs, back = (json.loads((f / file).read_text()) for f in (folder, tmp_path / "back"))
        if file == "config.json":
            assert theirs == back
        assert all(
            theirs.get(f"{token}_token_id") == back.get(f"{token}_token_id")
            for token in ("bos", "eos", "pad")
        )
    theirs, back = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "back"))
    assert theirs.keys() == back.keys()
    assert all(torch.equal(theirs[name], back[name]) for name in theirs)


def of_gpt2(model, x):
    """What layer 1 makes of x on the way into attention, by our names; and its feed-forward
    layer.
    """
    block = model.transformer.h[1]
    return dict(zip("qkv", block.attn.c_attn(x).split(x.shape[-1], -1), strict=True)), block.mlp


def of_falcon(model, x):
    block = model.transformer.h[1]
    attention = block.self_attention
    q, k, v = (t[0] for t in attention._split_heads(attention.query_key_value(x)[None]))
    if model.config.new_decoder_architecture:  # it repeats them
        group = attention.num_heads // attention.num_kv_heads
        k, v = k[:, ::group], v[:, ::group]
    return {"q": q.flatten(1), "k": k.flatten(1), "v": v.flatten(1)}, block.mlp


def of_bloom(model, x):
    block = model.transformer.h[1]
    q, k, v = block.self_attention._reshape(block.self_attention.query_key_value(x)[None])

    def mlp(x):
        return block.mlp(x, torch.zeros_like(x))  # it adds the residual stream itself

    mlp.act = block.mlp.gelu_impl
    products = [t[0].transpose(0, 1).flatten(1) for t in (q, k, v)]
    return dict(zip("qkv", products, strict=True)), mlp


def of_llama(model, x):
    block = model.model.layers[1]
    return {p: getattr(block.self_attn, f"{p}_proj")(x) for p in "qkv"}, block.mlp


def of_deepseek(model, x):
    block = model.model.layers[1]
    attention, q = block.self_attn, "q" if model.config.q_lora_rank is None else "q_a"
    return {
        q: attention.get_submodule(f"{q}_proj")(x),
        "kv_a": attention.kv_a_proj_with_mqa(x),
    }, block.mlp


LAYERS = {  # the others are like Llama
    "gpt2": of_gpt2,
    "falcon": of_falcon,
    "bloom": of_bloom,
    "deepseek_v2": of_deepseek,
    "deepseek_v3": of_deepseek,
}


def of_first(ours, name, x):
    """The product of x with a matrix of the first expert of layer 1."""
    module = f"layers.1.mlp.experts.{name}"
    weight, bias = ours[f"{module}.weight"], ours.get(f"{module}.bias")
    return F.linear(x, weight[0], None if bias is None else bias[0])


def meaning(case, model, ours, spec):
    """Largest difference between what layer 1 of transformers computes and the same from our
    tensors: q, k, v (or latents) and MLP, or the first expert of it.
    """

    def linear(name, x):
        return F.linear(x, ours[f"layers.1.{name}.weight"], ours.get(f"layers.1.{name}.bias"))

    x = torch.randn(5, spec.hidden_size)
    layer = case.layer or LAYERS.get(case.model_type, of_llama)
    theirs, mlp = layer(model, x)
    pairs = [(linear(f"attn.{p}", x), t) for p, t in theirs.items()]
    if spec.blocks[1].mlp.experts:
        gate, up = (of_first(ours, name, x) for name in ("gate", "up"))
        hidden = case.gated(mlp.experts, gate, up) if case.gated else mlp.experts.act_fn(gate) * up
        first = mlp.experts(x, torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1))
        pairs.append((of_first(ours, "down", hidden), first))
        logits = ours.get("layers.1.mlp.router.logits.bias")
        pairs.append((F.linear(x, ours["layers.1.mlp.router.weight"], logits), mlp.gate(x)[0]))
    else:
        up = linear("mlp.up", x)
        hidden = mlp.act_fn(linear("mlp.gate", x)) * up if spec.blocks[1].mlp.gated else mlp.act(up)
        pairs.append((linear("mlp.down", hidden), mlp(x)))
    return max((a - b).abs().max().item() for a, b in pairs)


@torch.no_grad()
def test_meaning_and_a_swap_is_noticed(source):
    case, model, folder = source
    loaded, ours = load(folder)
    spec, layer = loaded.spec, loaded.spec.blocks[1].mlp
    assert meaning(case, model, ours, spec) < 1e-5  # fp32, sums of 40 products of size about 1
    mlp, gated = ("mlp.experts", True) if layer.experts else ("mlp", layer.gated)
    plain = "layers.1.attn.k.weight" in ours
    for a, b in [("attn.k", "attn.v")] * plain + [(f"{mlp}.gate", f"{mlp}.up")] * gated:
        swapped = dict(ours)
        for kind in ("weight", "bias"):
            one, other = f"layers.1.{a}.{kind}", f"layers.1.{b}.{kind}"
            if one in ours:
                swapped[one], swapped[other] = ours[other], ours[one]
        assert meaning(case, model, swapped, spec) > 0.1


def test_a_changed_structure_shows_and_nothing_else(source):
    *_, folder = source
    model = hf.read_config(folder)
    before, after = model.export_config(), edit(model, vocab_size=77).export_config()
    rows = model.family.names["vocab_size"]
    assert {name for name in {**before, **after} if before.get(name) != after.get(name)} == {rows}
    assert after[rows] == 77
