"""Small random models saved by transformers, and ways to spoil a copy."""

import contextlib
import io
import json
import shutil

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCABULARY = 61
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=48,
    bos_token_id=1,
    eos_token_id=2,
)
MODELS = {
    "llama": ("llama", SIZES | dict(num_key_value_heads=2)),
    "qwen3": ("qwen3", SIZES | dict(num_key_value_heads=1, head_dim=16, tie_word_embeddings=True)),
    "mixtral": ("mixtral", SIZES | dict(num_key_value_heads=2, num_local_experts=4)),
    "qwen3-moe": (
        "qwen3_moe",
        SIZES
        | dict(
            num_key_value_heads=2,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            mlp_only_layers=[0],
        ),
    ),
    "deepseek-v3": (
        "deepseek_v3",
        SIZES
        | dict(
            num_key_value_heads=4,
            q_lora_rank=12,
            kv_lora_rank=16,
            qk_nope_head_dim=10,
            qk_rope_head_dim=6,
            v_head_dim=12,
            moe_intermediate_size=24,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
        ),
    ),
    # as RW is, with ALiBi
    "falcon-rw": (
        "falcon",
        dict(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=48,
            alibi=True,
            multi_query=False,
            parallel_attn=False,
            bias=True,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "gpt2": (
        "gpt2",
        dict(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=48,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
}


def reference(name: str):
    """Every parameter random: norm weights away from 1, biases away from 0."""
    torch.manual_seed(0)
    model_type, fields = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.3 + (p.ndim == 1))
    return model


def save(name: str, folder):
    """The folder. Its generation_config.json would spoil a comparison of texts, if it were
    obeyed.
    """
    model = reference(name)
    model.generation_config = transformers.GenerationConfig(
        repetition_penalty=5.0, eos_token_id=list(range(VOCABULARY)), max_length=3
    )
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    return folder


def spoiled(source, folder, change_weights=None, **config):
    """A copy of `source` with other fields in config.json, or with weights that
    `change_weights(dict)` has changed.
    """
    shutil.copytree(source, folder)
    if change_weights:
        weights = load_file(folder / "model.safetensors")
        change_weights(weights)
        save_file(
            {n: w.contiguous() for n, w in weights.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )
    content = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(content))
    return folder
