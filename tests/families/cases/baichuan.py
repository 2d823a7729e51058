"""Baichuan and Baichuan 2: no class of transformers reads them."""

from functools import partial

import torch
import torch.nn.functional as F
from equations import RMSNorm, attended, heads, linear, slopes, turned
from plain import Plain
from torch import nn

from cases import Case

PLAIN = True


class Attention(nn.Module):
    def __init__(self, config, alibi):
        super().__init__()
        size = config.hidden_size
        self.number, self.alibi = config.num_attention_heads, alibi
        self.W_pack, self.o_proj = linear(size, 3 * size), linear(size, size)

    def forward(self, x):
        q, k, v = (heads(part, self.number) for part in self.W_pack(x).chunk(3, -1))
        if not self.alibi:
            return self.o_proj(attended(turned(q), turned(k), v))
        # the first Baichuan-13B's: of key j slope * j
        slope = torch.tensor(slopes(self.number), dtype=x.dtype)[:, None, None]
        return self.o_proj(attended(q, k, v, slope * torch.arange(x.shape[-2])))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = linear(size, inner), linear(size, inner)
        self.down_proj, self.act_fn = linear(inner, size), F.silu

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config, alibi):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, alibi), Mlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Baichuan(Plain):
    def __init__(self, config, alibi=False, normalised=False):
        super().__init__(config)
        blocks = range(self.config.num_hidden_layers)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(self.config.vocab_size, self.config.hidden_size)
        self.model.layers = nn.ModuleList([Block(self.config, alibi) for _ in blocks])
        self.model.norm = RMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
        self.lm_head = linear(self.config.hidden_size, self.config.vocab_size)
        self.normalised = normalised

    def logits(self, tokens):
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x)
        w = self.lm_head.weight
        if self.normalised:
            w = w / w.pow(2).sum(-1, keepdim=True).sqrt()
        return self.model.norm(x) @ w.T


def layer(model, x):
    """What layer 1 makes of x on the way into attention, and its feed-forward layer."""
    block = model.model.layers[1]
    return dict(zip("qkv", block.self_attn.W_pack(x).chunk(3, -1), strict=True)), block.mlp


SIZES = dict(
    vocab_size=61,
    hidden_size=40,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=10,
    rms_norm_eps=1e-3,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


CASES = {
    # Baichuan 2, 7B
    "baichuan2-7b": Case(
        "baichuan",
        SIZES | dict(max_position_embeddings=64, z_loss_weight=0),
        plain=partial(Baichuan, normalised=True),
        layer=layer,
        long=dict(max_position_embeddings=256),
    ),
    # the first, 13B: of the slopes of 10 heads 2 are no powers of two
    "baichuan-13b": Case(
        "baichuan",
        SIZES | dict(model_max_length=64),
        plain=partial(Baichuan, alibi=True),
        layer=layer,
        long=dict(model_max_length=256),
    ),
    "baichuan-7b": Case(
        "baichuan", SIZES | dict(max_position_embeddings=64), plain=Baichuan, layer=layer
    ),
    "baichuan2-13b": Case(
        "baichuan",
        SIZES | dict(model_max_length=64, z_loss_weight=0),
        plain=partial(Baichuan, alibi=True, normalised=True),
        layer=layer,
    ),
}
BAICHUAN_7B = {
    "architectures": ["BaiChuanForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_baichuan.BaiChuanConfig",
        "AutoModelForCausalLM": "modeling_baichuan.BaiChuanForCausalLM",
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "baichuan",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.29.1",
    "use_cache": True,
    "vocab_size": 64000,
}
BAICHUAN_13B = {
    **{n: v for n, v in BAICHUAN_7B.items() if n != "max_position_embeddings"},
    "_from_model_config": True,
    "architectures": ["BaichuanForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_baichuan.BaichuanConfig",
        "AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM",
    },
    "hidden_size": 5120,
    "intermediate_size": 13696,
    "model_max_length": 4096,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
}
BAICHUAN2_7B = BAICHUAN_7B | {
    "_from_model_config": True,
    "model_max_length": 4096,
    "tokenizer_class": "BaichuanTokenizer",
    "vocab_size": 125696,
    "z_loss_weight": 0,
}
BAICHUAN2_13B = BAICHUAN_13B | {
    "gradient_checkpointing": False,
    "tokenizer_class": "BaichuanTokenizer",
    "vocab_size": 125696,
}
PUBLISHED = [BAICHUAN_7B, BAICHUAN_13B, BAICHUAN2_7B, BAICHUAN2_13B]
