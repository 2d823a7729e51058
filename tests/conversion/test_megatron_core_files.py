"""Files that Megatron-Core 0.16.1 saved itself (torch_dist_writer.py) are read to the bit."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch_dist_writer import LAYOUTS, SIZES, VOCAB, value

from dolmen.conversion.source import open_source

LAYERS, HIDDEN, FFN = SIZES["num_layers"], SIZES["hidden_size"], SIZES["ffn_hidden_size"]
HEADS, GROUPS, WIDTH = (
    SIZES[n] for n in ("num_attention_heads", "num_query_groups", "kv_channels")
)


def stored(key: str, *shape: int) -> torch.Tensor:
    """The whole tensor of a key in Megatron's sharded state dict."""
    return value(torch.arange(torch.Size(shape).numel()), key).view(shape)


def expected() -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter by its name in dolmen, cut out of Megatron's stacked layers."""
    yield "embed.weight", stored("embedding.word_embeddings.weight", VOCAB, HIDDEN)
    yield "head.weight", stored("output_layer.weight", VOCAB, HIDDEN)
    yield "final_norm.weight", stored("decoder.final_layernorm.weight", HIDDEN)
    attention, mlp = "decoder.layers.self_attention.", "decoder.layers.mlp."
    per_group = HEADS // GROUPS
    qkv = stored(f"{attention}linear_qkv.weight", LAYERS, GROUPS, per_group + 2, WIDTH, HIDDEN)
    o = stored(f"{attention}linear_proj.weight", LAYERS, HIDDEN, HEADS * WIDTH)
    gate_up = stored(f"{mlp}linear_fc1.weight", LAYERS, 2, FFN, HIDDEN)
    down = stored(f"{mlp}linear_fc2.weight", LAYERS, HIDDEN, FFN)
    norm1 = stored(f"{attention}linear_qkv.layer_norm_weight", LAYERS, HIDDEN)
    norm2 = stored(f"{mlp}linear_fc1.layer_norm_weight", LAYERS, HIDDEN)
    for i in range(LAYERS):
        layer = f"layers.{i}."
        yield f"{layer}attn.q.weight", qkv[i, :, :per_group].reshape(HEADS * WIDTH, HIDDEN)
        yield f"{layer}attn.k.weight", qkv[i, :, per_group].reshape(GROUPS * WIDTH, HIDDEN)
        yield f"{layer}attn.v.weight", qkv[i, :, per_group + 1].reshape(GROUPS * WIDTH, HIDDEN)
        yield f"{layer}attn.o.weight", o[i]
        yield f"{layer}mlp.gate.weight", gate_up[i, 0]
        yield f"{layer}mlp.up.weight", gate_up[i, 1]
        yield f"{layer}mlp.down.weight", down[i]
        yield f"{layer}attn_norm.weight", norm1[i]
        yield f"{layer}mlp_norm.weight", norm2[i]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_is_read(layout, tmp_path):
    with tarfile.open(Path(__file__).with_name("torch_dist.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    source = open_source(tmp_path / layout, vocab_size=VOCAB)
    found, wanted = dict(source.stream()), dict(expected())
    assert found.keys() == wanted.keys() and source.iteration == 5
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
