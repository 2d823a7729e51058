"""Llama as one writes it in plain torch, after torchtitan's recipe: RMSNorm and SDPA of torch, a
compiled program per block, FSDP2 with bf16 copies of fp32 masters, fused AdamW, the loss compiled.
No line of dolmen computes here; parameters have dolmen's names, so that weights can be copied.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.sides import Work, batch_of, copy_weights, fused_adamw, mean_loss, plain_step
from dolmen.core.mesh import Mesh
from dolmen.model.positions import frequencies
from dolmen.model.spec import AttentionSpec as Heads
from dolmen.model.spec import BlockSpec as Layer
from dolmen.model.spec import ModelSpec


def linear(inp: int, out: int) -> nn.Linear:
    return nn.Linear(inp, out, bias=False)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, hidden: int, c: Heads):
        super().__init__()
        self.size, kv = c.head_size, c.kv_heads * c.head_size
        self.q = linear(hidden, c.heads * c.head_size)
        self.k, self.v = linear(hidden, kv), linear(hidden, kv)
        self.o = linear(c.heads * c.head_size, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in self.qkv)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))

    @property
    def qkv(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q, self.k, self.v


class MLP(nn.Module):
    def __init__(self, hidden: int, size: int):
        super().__init__()
        self.gate = linear(hidden, size)
        self.up = linear(hidden, size)
        self.down = linear(size, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, hidden: int, c: Layer):
        super().__init__()
        self.attn_norm = nn.RMSNorm(hidden, c.norm.eps)
        self.attn = Attention(hidden, c.mixer)
        self.mlp_norm = nn.RMSNorm(hidden, c.norm.eps)
        self.mlp = MLP(hidden, c.mlp.size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, c: ModelSpec, length: int, device: torch.device):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c.hidden_size, block) for block in c.blocks)
        self.final_norm = nn.RMSNorm(c.hidden_size, c.final_norm.eps)
        self.head = linear(c.hidden_size, c.vocab_size)
        if c.head.tied:
            self.head.weight = self.embed.weight
        inv = frequencies(c.blocks[0].mixer.positions, device)
        angle = torch.arange(length, device=device)[:, None] * inv
        self.tables = angle.cos(), angle.sin()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, *self.tables)
        return self.head(self.final_norm(x))


def plain_side(work: Work, mesh: Mesh, compile: bool):
    """One step of it; see benchmarks/sides.py."""
    with mesh.device:
        model = Llama(work.model.spec, work.sequence, mesh.device)
    copy_weights(work, model, mesh.device, lambda name: name)
    loss_of = mean_loss
    if compile:
        for layer in model.layers:
            layer.compile()
        loss_of = torch.compile(mean_loss)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh.grid["fsdp"], mp_policy=policy, reshard_after_forward=False)
    tokens, labels = batch_of(work, mesh.device)
    optimizer = fused_adamw(model.parameters())
    return plain_step(lambda x, y: loss_of(model(x), y), tokens, labels, model, optimizer)
