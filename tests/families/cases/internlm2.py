"""InternLM 2: no class of transformers reads it."""

import torch.nn.functional as F
from equations import RMSNorm, attended, linear, turned
from plain import Plain
from torch import nn

from cases import Case
from cases.olmo2 import SIZES

PLAIN = True


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, self.kv = config.hidden_size, config.num_key_value_heads
        self.size = hidden // config.num_attention_heads
        self.group = config.num_attention_heads // self.kv
        self.wqkv = linear(hidden, hidden + 2 * self.kv * self.size)
        self.wo = linear(hidden, hidden)

    def parts(self, x):
        """q, k, v: [..., tokens, kv heads, (queries of each,) size]."""
        whole = self.wqkv(x).unflatten(-1, (self.kv, self.group + 2, self.size))
        return whole[..., : self.group, :], whole[..., -2, :], whole[..., -1, :]

    def forward(self, x):
        q, k, v = self.parts(x)
        q = q.flatten(-3, -2).transpose(-3, -2)
        k, v = (t.transpose(-3, -2).repeat_interleave(self.group, -3) for t in (k, v))
        return self.wo(attended(turned(q), turned(k), v))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.w1, self.w3, self.w2 = linear(size, inner), linear(size, inner), linear(inner, size)
        self.act_fn = F.silu

    def forward(self, x):
        return self.w2(self.act_fn(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention, self.feed_forward = Attention(config), Mlp(config)
        self.attention_norm, self.ffn_norm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class InternLM2(Plain):
    def __init__(self, config):
        super().__init__(config)
        size, blocks = self.config.hidden_size, range(self.config.num_hidden_layers)
        self.model = nn.Module()
        self.model.tok_embeddings = nn.Embedding(self.config.vocab_size, size)
        self.model.layers = nn.ModuleList([Block(self.config) for _ in blocks])
        self.model.norm = RMSNorm(size, self.config.rms_norm_eps)
        self.output = linear(size, self.config.vocab_size)

    def logits(self, tokens):
        x = self.model.tok_embeddings(tokens)
        for block in self.model.layers:
            x = block(x)
        return self.output(self.model.norm(x))


def layer(model, x):
    """What layer 1 makes of x on the way into attention, and its feed-forward layer."""
    block = model.model.layers[1]
    q, k, v = block.attention.parts(x)
    return {"q": q.flatten(1), "k": k.flatten(1), "v": v.flatten(1)}, block.feed_forward


CASES = {
    "internlm2": Case(
        "internlm2",
        SIZES | dict(num_key_value_heads=2, rms_norm_eps=1e-3, bias=False),
        plain=InternLM2,
        layer=layer,
        long=dict(max_position_embeddings=256),
    ),
}
PUBLISHED = [
    # 7B, as its makers have it, but for a dynamic base of rope (tests/families/test_longer.py)
    {
        "architectures": ["InternLM2ForCausalLM"],
        "attn_implementation": "eager",
        "auto_map": {
            "AutoConfig": "configuration_internlm2.InternLM2Config",
            "AutoModel": "modeling_internlm2.InternLM2ForCausalLM",
            "AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM",
        },
        "bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "internlm2",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.37.1",
        "use_cache": True,
        "vocab_size": 92544,
    },
]
