"""Runs that teach a model which is trained already: --init and --data.path decide."""

from dataclasses import replace

from dolmen.data.config import DataConfig
from dolmen.families import Model
from dolmen.objectives.config import ObjectiveConfig
from dolmen.optim.config import OptimizerConfig
from dolmen.recipes.common import FRESH
from dolmen.rl.config import CriticConfig, RolloutConfig
from dolmen.training.config import LogConfig, NewRowsConfig, RunConfig, TrainConfig


def sft() -> RunConfig:
    """learns what the assistant says in chats: --init and --data.path decide"""
    return RunConfig(
        name="sft",
        data=DataConfig(rows="chats"),
        optimizer=OptimizerConfig(lr=2e-5, warmup_steps=10, weight_decay=0.0),
    )


def continue_language() -> RunConfig:
    """goes on in another language: rows of new tokens first, then all, replaying old text in the
    share that --data.path says; --init is what dolmen vocab extend has written
    """
    return RunConfig(
        name="continue-language",
        optimizer=OptimizerConfig(lr=1e-4, warmup_steps=10, weight_decay=0.01),
        train=TrainConfig(new_rows=NewRowsConfig(share=0.1)),
        log=LogConfig(validate_sources=True),
    )


def reward() -> RunConfig:
    """learns one number for a text from pairs of answers: --init and --data.path decide"""
    return RunConfig(
        name="reward",
        data=DataConfig(rows="pairs"),
        objective=ObjectiveConfig(name="reward"),
        optimizer=OptimizerConfig(lr=1e-5, warmup_steps=10, weight_decay=0.0),
    )


def grpo() -> RunConfig:
    """learns from its own answers, by --reward: --init and --data.path decide"""
    return RunConfig(
        name="grpo",
        data=DataConfig(rows="prompts"),
        objective=ObjectiveConfig(name="grpo"),
        optimizer=OptimizerConfig(lr=1e-6, schedule="constant", weight_decay=0.0),
        train=TrainConfig(global_batch_size=64),
    )


def ppo() -> RunConfig:
    """learns from its own answers, by --reward and a critic beside it: a small model and prompts
    that are on every machine, or those of --init and --data.path
    """
    model = {
        **FRESH,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
    }
    return RunConfig(
        name="ppo",
        model=Model(model),
        data=DataConfig(rows="prompts", path=("python-standard-library",), tokenizer="bpe:512"),
        objective=ObjectiveConfig(name="ppo"),
        rollout=RolloutConfig(num_generations=1, prompts=64, max_new_tokens=16),
        optimizer=OptimizerConfig(lr=3e-3, schedule="constant", weight_decay=0.0),
        train=TrainConfig(steps=100, sequence_length=64, global_batch_size=32),
    )


def ppo_begun(run: RunConfig) -> RunConfig:
    """The same of a model that is trained already."""
    return replace(
        run,
        model=None,
        data=DataConfig(rows="prompts"),
        rollout=RolloutConfig(num_generations=1, prompts=256, epochs=2),
        optimizer=replace(run.optimizer, lr=1e-6),
        critic=CriticConfig(lr=5e-6),
        train=TrainConfig(global_batch_size=64),
    )


def dpo() -> RunConfig:
    """learns from pairs of answers which is preferred: --init and --data.path decide"""
    return RunConfig(
        name="dpo",
        data=DataConfig(rows="pairs"),
        objective=ObjectiveConfig(name="dpo"),
        optimizer=OptimizerConfig(lr=5e-7, warmup_steps=10, weight_decay=0.0),
    )
