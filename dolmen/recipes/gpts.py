"""GPTs of the papers on Megatron (2104.04473, table 1; 2205.05198, table 3) and GPT-3 (2005.14165),
as GPT-2 spells them. Learning rates are GPT-3's for the nearest of its sizes.
"""

from dolmen.recipes.common import FRESH, large
from dolmen.training.config import RunConfig

GPT = {
    **FRESH,
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_positions": 2048,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
# padded, as Megatron trains it
MEGATRON = GPT | {"vocab_size": 51200}


def gpt_1_7b() -> RunConfig:
    """GPT of 1.7 B of 2104.04473, table 1"""
    model = MEGATRON | {"n_embd": 2304, "n_layer": 24, "n_head": 24, "n_inner": 9216}
    return large("gpt-1.7b", model, lr=2e-4, batch=512, length=2048)


def gpt_3_6b() -> RunConfig:
    """GPT of 3.6 B of 2104.04473, table 1"""
    model = MEGATRON | {"n_embd": 3072, "n_layer": 30, "n_head": 32, "n_inner": 12288}
    return large("gpt-3.6b", model, lr=1.6e-4, batch=512, length=2048)


def gpt_7_5b() -> RunConfig:
    """GPT of 7.5 B of 2104.04473, table 1"""
    model = MEGATRON | {"n_embd": 4096, "n_layer": 36, "n_head": 32, "n_inner": 16384}
    return large("gpt-7.5b", model, lr=1.2e-4, batch=512, length=2048)


def gpt_18b() -> RunConfig:
    """GPT of 18.4 B of 2104.04473, table 1"""
    model = MEGATRON | {"n_embd": 6144, "n_layer": 40, "n_head": 48, "n_inner": 24576}
    return large("gpt-18b", model, lr=1e-4, batch=1024, length=2048)


def gpt_39b() -> RunConfig:
    """GPT of 39.1 B of 2104.04473, table 1"""
    model = MEGATRON | {"n_embd": 8192, "n_layer": 48, "n_head": 64, "n_inner": 32768}
    return large("gpt-39b", model, lr=6e-5, batch=1536, length=2048)


def gpt_76b() -> RunConfig:
    """GPT of 76.1 B of 2104.04473, table 1"""
    model = MEGATRON | {"n_embd": 10240, "n_layer": 60, "n_head": 80, "n_inner": 40960}
    return large("gpt-76b", model, lr=6e-5, batch=1792, length=2048)


def gpt_145b() -> RunConfig:
    """GPT of 145.6 B of 2104.04473, table 1"""
    model = MEGATRON | {"n_embd": 12288, "n_layer": 80, "n_head": 96, "n_inner": 49152}
    return large("gpt-145b", model, lr=6e-5, batch=2304, length=2048)


def gpt_310b() -> RunConfig:
    """GPT of 310.1 B of 2104.04473, table 1"""
    model = MEGATRON | {"n_embd": 16384, "n_layer": 96, "n_head": 128, "n_inner": 65536}
    return large("gpt-310b", model, lr=6e-5, batch=2160, length=2048)


def gpt_530b() -> RunConfig:
    """GPT of 529.6 B of 2104.04473, table 1"""
    model = MEGATRON | {"n_embd": 20480, "n_layer": 105, "n_head": 128, "n_inner": 81920}
    return large("gpt-530b", model, lr=6e-5, batch=2520, length=2048)


def gpt_1t() -> RunConfig:
    """GPT of 1,008 B of 2104.04473, table 1"""
    model = MEGATRON | {"n_embd": 25600, "n_layer": 128, "n_head": 160, "n_inner": 102400}
    return large("gpt-1t", model, lr=6e-5, batch=3072, length=2048)


def gpt_22b() -> RunConfig:
    """GPT of 22 B of 2205.05198, table 3"""
    model = MEGATRON | {"n_embd": 6144, "n_layer": 48, "n_head": 64, "n_inner": 24576}
    return large("gpt-22b", model, lr=1e-4, batch=4, length=2048)


def gpt_175b() -> RunConfig:
    """GPT of 175 B of 2205.05198, table 3: GPT-3 with a padded vocabulary"""
    model = MEGATRON | {"n_embd": 12288, "n_layer": 96, "n_head": 96, "n_inner": 49152}
    return large("gpt-175b", model, lr=6e-5, batch=64, length=2048)


def gpt3_175b() -> RunConfig:
    """the shape of GPT-3 (2005.14165), as GPT-2 spells it"""
    model = GPT | {
        "vocab_size": 50257,
        "n_embd": 12288,
        "n_layer": 96,
        "n_head": 96,
        "n_inner": 49152,
    }
    return large("gpt3-175b", model, lr=0.6e-4, batch=1536, length=2048)
