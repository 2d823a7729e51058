"""Llamas at the sizes that were published (2302.13971, 2307.09288, 2407.21783)."""

from dolmen.recipes.common import FRESH, large
from dolmen.training.config import RunConfig

# 1 and 2: positions without scaling, a small vocabulary
LLAMA = {
    **FRESH,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}
LLAMA_1 = LLAMA | {"max_position_embeddings": 2048, "rms_norm_eps": 1e-06}
LLAMA_2 = LLAMA | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-05}
LLAMA_3 = {
    **FRESH,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}
# before its context was lengthened
LLAMA_3_0 = LLAMA_3 | {
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}


def llama_7b() -> RunConfig:
    """the first Llama of 7 B"""
    model = LLAMA_1 | {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    }
    return large("llama-7b", model, lr=3e-4, batch=2048, length=2048)


def llama_13b() -> RunConfig:
    """the first Llama of 13 B"""
    model = LLAMA_1 | {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    }
    return large("llama-13b", model, lr=3e-4, batch=2048, length=2048)


def llama_33b() -> RunConfig:
    """the first Llama of 33 B"""
    model = LLAMA_1 | {
        "hidden_size": 6656,
        "intermediate_size": 17920,
        "num_hidden_layers": 60,
        "num_attention_heads": 52,
        "num_key_value_heads": 52,
    }
    return large("llama-33b", model, lr=1.5e-4, batch=2048, length=2048)


def llama_65b() -> RunConfig:
    """the first Llama of 65 B"""
    model = LLAMA_1 | {
        "hidden_size": 8192,
        "intermediate_size": 22016,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
    }
    return large("llama-65b", model, lr=1.5e-4, batch=2048, length=2048)


def llama_2_7b() -> RunConfig:
    """Llama 2 of 7 B"""
    model = LLAMA_2 | {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    }
    return large("llama-2-7b", model, lr=3e-4, batch=1024, length=4096)


def llama_2_13b() -> RunConfig:
    """Llama 2 of 13 B"""
    model = LLAMA_2 | {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    }
    return large("llama-2-13b", model, lr=3e-4, batch=1024, length=4096)


def llama_2_70b() -> RunConfig:
    """Llama 2 of 70 B: the first whose queries share keys"""
    model = LLAMA_2 | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    return large("llama-2-70b", model, lr=1.5e-4, batch=1024, length=4096)


def llama_1b() -> RunConfig:
    """the shape of Llama 3.2 1B"""
    model = LLAMA_3 | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "rope_parameters": LLAMA_3["rope_parameters"] | {"factor": 32.0},
        "tie_word_embeddings": True,
    }
    return large("llama-1b", model, lr=4e-4, batch=256)


def llama_8b() -> RunConfig:
    """the shape of Llama 3.1 8B"""
    model = LLAMA_3 | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "head_dim": 128,
    }
    return large("llama-8b", model, lr=3e-4, batch=512)


def llama_70b() -> RunConfig:
    """the shape of Llama 3.1 70B"""
    model = LLAMA_3 | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "head_dim": 128,
    }
    return large("llama-70b", model, lr=1.5e-4, batch=1024)


def llama_3_8b() -> RunConfig:
    """the shape of Llama 3 8B"""
    model = LLAMA_3_0 | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "head_dim": 128,
    }
    return large("llama-3-8b", model, lr=3e-4, batch=512, length=8192)


def llama_3_70b() -> RunConfig:
    """the shape of Llama 3 70B"""
    model = LLAMA_3_0 | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "head_dim": 128,
    }
    return large("llama-3-70b", model, lr=1.5e-4, batch=1024, length=8192)


def llama_405b() -> RunConfig:
    """the shape of Llama 3.1 405B"""
    model = LLAMA_3 | {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "head_dim": 128,
    }
    return large("llama-405b", model, lr=8e-5, batch=2048, length=8192)
