"""Modules that are none of dolmen's, and plans to split them by: what tests of dolmen.parallelize
and of its steps train.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding


class Toy(nn.Module):
    """PyTorch's ToyModel, and its wide sister."""

    def __init__(self, inputs: int = 10, hidden: int = 32, outputs: int = 5):
        super().__init__()
        self.net1, self.net2 = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.net1(x).relu())


class Layer(nn.Module):
    """A layer of Llama in transformers between an embedding and a head."""

    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            vocab_size=37,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=8,
            num_key_value_heads=4,
            attn_implementation="sdpa",
        )
        self.table = nn.Embedding(37, 32, padding_idx=0)
        self.rope = LlamaRotaryEmbedding(config)
        self.layer = LlamaDecoderLayer(config, 0)
        self.head = nn.Linear(32, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        places = torch.arange(tokens.shape[1])[None]
        return self.head(self.layer(x, position_embeddings=self.rope(x, places)))


TOY = {"net1": "columns", "net2": "rows"}
LLAMA = {
    "layer.self_attn.[qkv]_proj": "columns",
    "layer.self_attn.o_proj": "rows",
    "layer.mlp.gate_proj": "columns",
    "layer.mlp.up_proj": "columns",
    "layer.mlp.down_proj": "rows",
    "layer.*layernorm": "sequence",
    "table": "vocabulary",
    "head": "vocabulary",
}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict, Callable[[], Tensor]]] = {
    "toy": (Toy, TOY, lambda: torch.randn(8, 10)),
    "wide": (lambda: Toy(1_000, 320, 5), TOY, lambda: torch.randn(8, 1_000) / 32),
    "llama": (Layer, LLAMA, lambda: torch.randint(37, (8, 12))),
}
