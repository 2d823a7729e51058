"""Built-in runs: functions that return a RunConfig. A recipe decides sizes and habits; options and
files change it. Its model is a config.json.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dolmen.checkpoint.config import CheckpointConfig
from dolmen.data.config import DataConfig
from dolmen.families import Model
from dolmen.model.layout import Layout
from dolmen.optim.config import OptimizerConfig
from dolmen.training.config import FinishConfig, LogConfig, RunConfig, TrainConfig

# A model made here has no tokenizer yet, and its weights are stored as they are trained.
FRESH = {
    "dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "use_cache": True,
}
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


def pretrain() -> RunConfig:
    """neutral: --init and --data decide; a low learning rate, as for a trained model"""
    return RunConfig(
        name="pretrain", optimizer=OptimizerConfig(lr=5e-5, warmup_steps=10, weight_decay=0.01)
    )


def quickstart() -> RunConfig:
    """a small Llama on the Python standard library's source, split over two processes; some 5
    minutes on 2 cores
    """
    model = {
        **FRESH,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
    }
    return RunConfig(
        name="quickstart",
        model=Model(model),
        layout=Layout(tp=2),
        data=DataConfig(path=("python-standard-library",), tokenizer="bpe:4096"),
        # at 3e-3 AdamW ended at 1.76 bits per byte, Muon at 1.47
        optimizer=OptimizerConfig(name="muon", lr=3e-3, warmup_steps=10, schedule="linear"),
        train=TrainConfig(
            steps=400,
            sequence_length=256,
            global_batch_size=16,
        ),
        checkpoint=CheckpointConfig(every=200),
        log=LogConfig(validate_every=100, validation_tokens=32768),
        finish=FinishConfig(
            export=True, verify=True, sample="def read(self, size=-1):\n", compressors=True
        ),
    )


def _quickstart_here(run: RunConfig) -> RunConfig:
    """On one GPU whole, and in bfloat16 where its products are faster than those of float32."""
    import torch  # a second to import: no help and no list owes it

    from dolmen.core.torch_private import compute

    gpus = torch.cuda.device_count()
    fast = torch.cuda.is_available() or compute.half_is_fast()
    return replace(
        run,
        layout=replace(run.layout, tp=1 if gpus == 1 else run.layout.tp),
        train=replace(run.train, dtype="bfloat16" if fast else run.train.dtype),
    )


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
    return _large("llama-1b", model, lr=4e-4, batch=256)


def llama_8b() -> RunConfig:
    """the shape of Llama 3.1 8B"""
    model = LLAMA_3 | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "head_dim": 128,
    }
    return _large("llama-8b", model, lr=3e-4, batch=512)


def llama_70b() -> RunConfig:
    """the shape of Llama 3.1 70B"""
    model = LLAMA_3 | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "head_dim": 128,
    }
    return _large("llama-70b", model, lr=1.5e-4, batch=1024)


def gpt3_175b() -> RunConfig:
    """the shape of GPT-3 (2005.14165), as GPT-2 spells it"""
    model = {
        **FRESH,
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 2048,
        "n_embd": 12288,
        "n_layer": 96,
        "n_head": 96,
        "n_inner": 49152,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-05,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
    return _large("gpt3-175b", model, lr=0.6e-4, batch=1536, length=2048)


def mixtral_8x7b() -> RunConfig:
    """the shape of Mixtral 8x7B (2401.04088): 46.7 B parameters, 12.9 B of them active per token"""
    model = {
        **FRESH,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
    }
    return _large("mixtral-8x7b", model, lr=3e-4, batch=512)


def qwen3_30b_a3b() -> RunConfig:
    """the shape of Qwen3 30B-A3B (2505.09388): 128 experts, 8 of them active per token"""
    model = {
        **FRESH,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
    }
    return _large("qwen3-30b-a3b", model, lr=3e-4, batch=512)


def bert() -> RunConfig:
    """BERT base (1810.04805): whole words are masked, and of two texts it says whether the second
    follows
    """
    model = {
        **FRESH,
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    run = _large("bert", model, lr=1e-4, batch=256, length=512)
    train = replace(run.train, steps=1_000_000, microbatch_size=16, dropout=0.1)
    return replace(
        run,
        train=train,
        data=DataConfig(end_of_text="[SEP]"),
        optimizer=OptimizerConfig(lr=1e-4, warmup_steps=10_000, weight_decay=0.01),
    )


def _large(
    name: str, model: dict[str, Any], lr: float, batch: int, length: int = 8192
) -> RunConfig:
    return RunConfig(
        name=name,
        model=Model(model),
        optimizer=OptimizerConfig(lr=lr, warmup_steps=2000, min_lr=lr / 10),
        train=TrainConfig(
            steps=100_000,
            dtype="bfloat16",
            sequence_length=length,
            global_batch_size=batch,
            microbatch_size=1,
            compile=True,
        ),
        checkpoint=CheckpointConfig(every=1000),
    )


RECIPES: dict[str, Callable[[], RunConfig]] = {
    "quickstart": quickstart,
    "pretrain": pretrain,
    "llama-1b": llama_1b,
    "llama-8b": llama_8b,
    "llama-70b": llama_70b,
    "gpt3-175b": gpt3_175b,
    "mixtral-8x7b": mixtral_8x7b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "bert": bert,
}
# What a recipe becomes on the machine that it is trained on.
HERE: dict[str, Callable[[RunConfig], RunConfig]] = {"quickstart": _quickstart_here}
