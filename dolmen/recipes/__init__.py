"""Built-in runs: functions that return a RunConfig. A recipe decides sizes and habits; options and
files change it.
"""

from dolmen.data.config import DataConfig
from dolmen.model.config import ModelConfig, RopeConfig
from dolmen.model.layout import Layout
from dolmen.optim.config import OptimizerConfig
from dolmen.train.config import CheckpointConfig, FinishConfig, LogConfig, RunConfig, TrainConfig


def pretrain() -> RunConfig:
    """neutral: --init and --data decide; from a model and one text file it trains gently"""
    return RunConfig(
        name="pretrain", optimizer=OptimizerConfig(lr=5e-5, warmup_steps=10, weight_decay=0.01)
    )


def quickstart() -> RunConfig:
    """a small Llama on the Python standard library's source, split over two processes; some 5
    minutes on 2 cores
    """
    model = ModelConfig(
        family="llama",
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    gpus, fast_bfloat16 = _this_machine()
    return RunConfig(
        name="quickstart",
        model=model,
        layout=Layout(tp=1 if gpus == 1 else 2),
        data=DataConfig(path=("python-standard-library",), tokenizer="bpe:4096"),
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=40, weight_decay=0.1),
        train=TrainConfig(
            steps=400,
            dtype="bfloat16" if fast_bfloat16 else "float32",
            sequence_length=256,
            global_batch_size=16,
        ),
        checkpoint=CheckpointConfig(every=200),
        log=LogConfig(validate_every=100, validation_tokens=32768),
        finish=FinishConfig(
            export=True, verify=True, sample="def read(self, size=-1):\n", compressors=True
        ),
    )


def llama_1b() -> RunConfig:
    """the shape of Llama 3.2 1B"""
    model = _llama3(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        head_dim=64,
        tie_word_embeddings=True,
    )
    return _large("llama-1b", model, lr=4e-4, batch=256)


def llama_8b() -> RunConfig:
    """the shape of Llama 3.1 8B"""
    model = _llama3(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32
    )
    return _large("llama-8b", model, lr=3e-4, batch=512)


def llama_70b() -> RunConfig:
    """the shape of Llama 3.1 70B"""
    model = _llama3(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
    )
    return _large("llama-70b", model, lr=1.5e-4, batch=1024)


def gpt3_175b() -> RunConfig:
    """the shape of GPT-3 (2005.14165), as GPT-2 spells it"""
    model = ModelConfig(
        family="gpt2",
        vocab_size=50257,
        hidden_size=12288,
        intermediate_size=49152,
        num_hidden_layers=96,
        num_attention_heads=96,
        num_key_value_heads=96,
        head_dim=128,
        max_position_embeddings=2048,
        position="learned",
        norm="layernorm",
        mlp="plain",
        activation="gelu_tanh",
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )
    return _large("gpt3-175b", model, lr=0.6e-4, batch=1536, length=2048)


def mixtral_8x7b() -> RunConfig:
    """the shape of Mixtral 8x7B (2401.04088): 46.7 B parameters, 12.9 B of them active per token"""
    model = ModelConfig(
        family="mixtral",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
        rope=RopeConfig(1e6),
        num_experts=8,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.02,
    )
    return _large("mixtral-8x7b", model, lr=3e-4, batch=512)


def qwen3_30b_a3b() -> RunConfig:
    """the shape of Qwen3 30B-A3B (2505.09388): 128 experts, 8 of them active per token"""
    model = ModelConfig(
        family="qwen3_moe",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=40960,
        rope=RopeConfig(1e6),
        norm_eps=1e-6,
        qk_norm=True,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        router_aux_loss_coef=0.001,
    )
    return _large("qwen3-30b-a3b", model, lr=3e-4, batch=512)


def _llama3(**sizes) -> ModelConfig:
    return ModelConfig(
        **{
            "vocab_size": 128256,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope": RopeConfig(
                500000.0,
                "llama3",
                8.0 if not sizes.get("tie_word_embeddings") else 32.0,
                1.0,
                4.0,
                8192,
            ),
            **sizes,
        }
    )


def _large(name: str, model: ModelConfig, lr: float, batch: int, length: int = 8192) -> RunConfig:
    return RunConfig(
        name=name,
        model=model,
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


def _this_machine() -> tuple[int, bool]:
    """GPUs, and whether bf16 products are faster than fp32 on what this machine would train on."""
    import torch  # a second to import: the help of other recipes does not owe it

    fast = (
        torch.cuda.is_available()
        or torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
    )
    return torch.cuda.device_count(), fast


RECIPES = {
    "quickstart": quickstart,
    "pretrain": pretrain,
    "llama-1b": llama_1b,
    "llama-8b": llama_8b,
    "llama-70b": llama_70b,
    "gpt3-175b": gpt3_175b,
    "mixtral-8x7b": mixtral_8x7b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
}
