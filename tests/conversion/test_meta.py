"""Meta's files of Llama, laid by hand: rows of q and k in pairs, one file per rank; what they
compute is what transformers computes.
"""

import json

import pytest
import torch
import transformers
from test_megatron_read import LLAMA, TOKENS, VOCABULARY, Evil, built, difference

from dolmen.conversion.source import open_source

SCALED = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def in_pairs(rows, heads: int):
    """(0, half) (1, half + 1) ...: what transformers turns as halves, Meta turns as neighbours."""
    size = len(rows) // heads
    order = []
    for head in range(heads):
        for i in range(size // 2):
            order += [head * size + i, head * size + i + size // 2]
    return rows[order]


def lay(folder, model, ranks: int = 1, newest: bool = False, faults: tuple = (), **params):
    """`newest`: the embedding is cut by its rows, as since Llama 3."""
    config, state = model.config, model.state_dict()
    folder.mkdir(exist_ok=True)
    said = dict(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        norm_eps=config.rms_norm_eps,
        vocab_size=-1,
        multiple_of=256,
    )
    (folder / "params.json").write_text(json.dumps(said | params))
    for rank in range(ranks):
        rows = lambda t: t.chunk(ranks, 0)[rank].clone()  # noqa: B023, E731
        columns = lambda t: t.chunk(ranks, 1)[rank].clone()  # noqa: B023, E731
        embedding = state["model.embed_tokens.weight"]
        made = {
            "tok_embeddings.weight": rows(embedding) if newest else columns(embedding),
            "norm.weight": state["model.norm.weight"],
            "output.weight": rows(state["lm_head.weight"]),
            "rope.freqs": torch.ones(4),
        }
        for i in range(config.num_hidden_layers):
            hf, here = f"model.layers.{i}.", f"layers.{i}."
            q, k = (state[f"{hf}self_attn.{n}_proj.weight"] for n in "qk")
            if "not in pairs" not in faults:
                q = in_pairs(q, config.num_attention_heads)
                k = in_pairs(k, config.num_key_value_heads)
            made[f"{here}attention.wq.weight"] = rows(q)
            made[f"{here}attention.wk.weight"] = rows(k)
            made[f"{here}attention.wv.weight"] = rows(state[f"{hf}self_attn.v_proj.weight"])
            made[f"{here}attention.wo.weight"] = columns(state[f"{hf}self_attn.o_proj.weight"])
            made[f"{here}feed_forward.w1.weight"] = rows(state[f"{hf}mlp.gate_proj.weight"])
            made[f"{here}feed_forward.w3.weight"] = rows(state[f"{hf}mlp.up_proj.weight"])
            made[f"{here}feed_forward.w2.weight"] = columns(state[f"{hf}mlp.down_proj.weight"])
            made[f"{here}attention_norm.weight"] = state[f"{hf}input_layernorm.weight"]
            made[f"{here}ffn_norm.weight"] = state[f"{hf}post_attention_layernorm.weight"]
        torch.save(made, folder / f"consolidated.{rank:02d}.pth")
    return folder


@pytest.fixture(scope="module")
def model():
    return built(transformers.LlamaConfig(**LLAMA | {"vocab_size": 60}))


def expected(model):
    with torch.no_grad():
        return model(TOKENS % 60).logits


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("newest", [False, True])
def test_logits_are_those_of_transformers(model, ranks, newest, tmp_path, monkeypatch):
    monkeypatch.setattr("test_megatron_read.TOKENS", TOKENS % 60)
    folder = lay(tmp_path / "m", model, ranks, newest)
    assert difference(folder, expected(model), None) < 2e-5
    wrong = lay(tmp_path / "wrong", model, ranks, newest, ("not in pairs",))
    assert difference(wrong, expected(model), None) > 0.1


def test_scaled_rope(tmp_path, monkeypatch):
    monkeypatch.setattr("test_megatron_read.TOKENS", TOKENS % 60)
    scaled = built(transformers.LlamaConfig(**LLAMA | {"vocab_size": 60}, rope_parameters=SCALED))
    said = dict(rope_theta=500000.0, use_scaled_rope=True)
    with pytest.warns(UserWarning, match="has use_scaled_rope without a factor: 8 is used"):
        folder = lay(tmp_path / "m", scaled, 1, True, **said)
        assert difference(folder, expected(scaled), None) < 2e-5
    source = open_source(lay(tmp_path / "n", scaled, rope_scaling_factor=32, **said))
    assert source.spec.blocks[0].mixer.positions.scaling.factor == 32


def edited(file, change):
    tensors = torch.load(file)
    change(tensors)
    torch.save(tensors, file)


INTEGERS = torch.ones(32, dtype=torch.int8)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "consolidated.00.pth").unlink(), "no consolidated.00.pth, but .*01.pth"),
        (
            lambda f: (f / "consolidated.01.pth").unlink(),
            "wq.weight is .* on each of 1 rank in .*; the config implies",
        ),
        (
            lambda f: edited(
                f / "consolidated.01.pth",
                lambda t: t.update({"norm.weight": torch.ones(32).half()}),
            ),
            r"norm.weight is \(32,\) of torch.float32 in .*00.pth, but \(32,\) of torch.float16 in",
        ),
        (
            lambda f: [
                edited(f / f"consolidated.0{i}.pth", lambda t: t.update({"norm.weight": INTEGERS}))
                for i in (0, 1)
            ],
            "norm.weight in .*00.pth is torch.int8: quantised weights are not supported",
        ),
        (lambda f: (f / "params.json").unlink(), "has no params.json"),
        (
            lambda f: (f / "params.json").write_text('{"dim": 32}'),
            "params.json: it has no n_layers",
        ),
        (
            lambda f: edited(f / "consolidated.01.pth", lambda t: t.update(x=torch.ones(1))),
            r"rank 1: 1 tensor is in only one of the file and the model of params.json.*'x'",
        ),
        (
            lambda f: torch.save({"x": Evil()}, f / "consolidated.01.pth"),
            "it names __builtin__.print",
        ),
        (
            lambda f: (f / "params.json").write_text(
                json.dumps(dict(dim=32, n_layers=4, n_heads=4, norm_eps=1e-3, moe={"n": 8}))
            ),
            'moe is {"n": 8}, which is not supported',
        ),
    ],
)
def test_what_is_not_whole_is_refused(model, damage, said, tmp_path):
    folder = lay(tmp_path / "m", model, 2, True)
    damage(folder)
    with pytest.raises((ValueError, KeyError), match=said):
        dict(open_source(folder).stream())


def test_a_vocabulary_that_is_said(model, tmp_path):
    folder = lay(tmp_path / "m", model, 1, True, vocab_size=VOCABULARY)
    with pytest.raises(ValueError, match=r"tok_embeddings.weight is \(60, 32\)"):
        _ = open_source(folder).specs
