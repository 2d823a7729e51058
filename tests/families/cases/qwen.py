"""Qwen, the first: no class of transformers reads it."""

import math

import torch
import torch.nn.functional as F
from equations import RMSNorm, attended, heads, linear, turned
from plain import Plain
from torch import nn

from cases import Case

PLAIN = True


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.c_attn, self.c_proj = linear(size, 3 * size, bias=True), linear(size, size)

    def forward(self, x, length):
        """Of a text that is taken for one of `length` tokens."""
        config, first = self.config, self.config.seq_length
        number, size = config.num_attention_heads, config.kv_channels
        q, k, v = (heads(part, number) for part in self.c_attn(x).chunk(3, -1))
        theta, log_n = float(config.rotary_emb_base), torch.ones(x.shape[-2], dtype=x.dtype)
        if config.use_dynamic_ntk and not self.training:
            alpha = max(2 ** math.ceil(math.log2(length / first) + 1) - 1, 1)
            theta *= alpha ** (size / (size - 2))
        if config.use_logn_attn and not self.training:
            for i in range(first + 1, len(log_n) + 1):
                log_n[i - 1] = math.log(i, first)
        q = turned(q, theta) * log_n[:, None]
        return self.c_proj(attended(q, turned(k, theta), v))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size // 2
        self.w1, self.w2, self.c_proj = (
            linear(size, inner),
            linear(size, inner),
            linear(inner, size),
        )
        self.act_fn = F.silu

    def forward(self, x):
        return self.c_proj(self.w1(x) * self.act_fn(self.w2(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn, self.mlp = Attention(config), Mlp(config)
        self.ln_1, self.ln_2 = (
            RMSNorm(config.hidden_size, config.layer_norm_epsilon) for _ in range(2)
        )

    def forward(self, x, length):
        x = x + self.attn(self.ln_1(x), length)
        return x + self.mlp(self.ln_2(x))


class Qwen(Plain):
    def __init__(self, config):
        super().__init__(config)
        size = self.config.hidden_size
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(self.config.vocab_size, size)
        blocks = range(self.config.num_hidden_layers)
        self.transformer.h = nn.ModuleList([Block(self.config) for _ in blocks])
        self.transformer.ln_f = RMSNorm(size, self.config.layer_norm_epsilon)
        self.lm_head = linear(size, self.config.vocab_size)

    def logits(self, tokens, length=None):
        """`length`: of the text that it was, where tokens behind it were written with a cache."""
        x = self.transformer.wte(tokens)
        for block in self.transformer.h:
            x = block(x, length or tokens.shape[1])
        return self.lm_head(self.transformer.ln_f(x))


def layer(model, x):
    """What layer 1 makes of x on the way into attention, and its feed-forward layer."""
    block = model.transformer.h[1]
    return dict(zip("qkv", block.attn.c_attn(x).chunk(3, -1), strict=True)), block.mlp


SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    kv_channels=8,
    max_position_embeddings=64,
    seq_length=64,
    use_dynamic_ntk=True,
    use_logn_attn=True,
    rotary_emb_base=1000.0,
    layer_norm_epsilon=1e-3,
    no_bias=True,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)
CASES = {
    "qwen": Case("qwen", SIZES, plain=Qwen, layer=layer, long=dict(seq_length=256)),
}
PUBLISHED = [
    # 7B, as its makers have it, first and later
    {
        "activation": "swiglu",
        "apply_residual_connection_post_layernorm": False,
        "architectures": ["QWenLMHeadModel"],
        "auto_map": {
            "AutoConfig": "configuration_qwen.QWenConfig",
            "AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel",
        },
        "attn_pdrop": 0.0,
        "bf16": False,
        "bias_dropout_fusion": True,
        "bos_token_id": 151643,
        "embd_pdrop": 0.0,
        "eos_token_id": 151643,
        "ffn_hidden_size": 22016,
        "fp16": False,
        "fp32": False,
        "initializer_range": 0.02,
        "kv_channels": 128,
        "layer_norm_epsilon": 1e-06,
        "model_type": "qwen",
        "n_embd": 4096,
        "n_head": 32,
        "n_layer": 32,
        "n_positions": 6144,
        "no_bias": True,
        "onnx_safe": None,
        "padded_vocab_size": 151936,
        "params_dtype": "torch.bfloat16",
        "pos_emb": "rotary",
        "resid_pdrop": 0.1,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "seq_length": 2048,
        "tie_word_embeddings": False,
        "tokenizer_type": "QWenTokenizer",
        "transformers_version": "4.31.0",
        "use_cache": True,
        "use_dynamic_ntk": True,
        "use_flash_attn": "auto",
        "use_logn_attn": True,
        "vocab_size": 151936,
    },
    {
        "attn_dropout_prob": 0.0,
        "emb_dropout_prob": 0.0,
        "hidden_size": 8192,
        "intermediate_size": 49152,
        "max_position_embeddings": 32768,
        "model_type": "qwen",
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "rotary_emb_base": 1000000,
        "seq_length": 32768,
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
        "vocab_size": 152064,
    },
]
