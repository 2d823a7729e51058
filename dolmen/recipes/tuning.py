"""Recipes that fine-tune the model of --init on --data.path; ppo also has a small model and prompts
of its own.
"""

from dataclasses import replace

from dolmen.data.config import DataConfig
from dolmen.families import Model
from dolmen.objectives.config import ObjectiveConfig
from dolmen.optim.config import OptimizerConfig
from dolmen.recipes.pretraining import FRESH
from dolmen.rl.config import CriticConfig, RolloutConfig
from dolmen.training.config import LogConfig, NewRowsConfig, RunConfig, TrainConfig


def sft() -> RunConfig:
    """supervised fine-tuning of --init on the chats of --data.path"""
    return RunConfig(
        name="sft",
        data=DataConfig(rows="chats"),
        # usual for full fine-tuning; adapters take ten times as much
        optimizer=OptimizerConfig(lr=2e-5, warmup_steps=10, weight_decay=0.0),
    )


def continue_language() -> RunConfig:
    """continued pretraining in another language: first the rows of new tokens, then all weights;
    --init is the output of dolmen vocab extend, and --data.path should include some old text
    """
    return RunConfig(
        name="continue-language",
        optimizer=OptimizerConfig(lr=1e-4, warmup_steps=10, weight_decay=0.01),
        # the new rows alone for a tenth of the steps
        train=TrainConfig(new_rows=NewRowsConfig(share=0.1)),
        log=LogConfig(validate_sources=True),
    )


def reward() -> RunConfig:
    """a reward model from --init, on the preference pairs of --data.path"""
    return RunConfig(
        name="reward",
        data=DataConfig(rows="pairs"),
        objective=ObjectiveConfig(name="reward"),
        optimizer=OptimizerConfig(lr=1e-5, warmup_steps=10, weight_decay=0.0),
    )


def grpo() -> RunConfig:
    """GRPO of --init on the prompts of --data.path, with the rewards of --reward"""
    return RunConfig(
        name="grpo",
        data=DataConfig(rows="prompts"),
        objective=ObjectiveConfig(name="grpo"),
        # usual for GRPO: the policy may change little per batch
        optimizer=OptimizerConfig(lr=1e-6, schedule="constant", weight_decay=0.0),
        train=TrainConfig(global_batch_size=64),
    )


def ppo() -> RunConfig:
    """PPO with a critic and the rewards of --reward; without --init and --data.path, of a small
    model and prompts that are on every machine
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
        # short completions, as the model is a toy
        rollout=RolloutConfig(num_generations=1, prompts=64, max_new_tokens=16),
        optimizer=OptimizerConfig(lr=3e-3, schedule="constant", weight_decay=0.0),
        train=TrainConfig(steps=100, sequence_length=64, global_batch_size=32),
    )


def ppo_with_init(run: RunConfig) -> RunConfig:
    """Return the PPO run with options for a trained model, which --init names: prompts from
    --data.path, learning rate 1e-6, and 5e-6 for the critic.
    """
    return replace(
        run,
        model=None,
        data=DataConfig(rows="prompts"),
        rollout=RolloutConfig(num_generations=1, prompts=256, epochs=2),
        # a trained model: the toy model's 3e-3 would destroy it
        optimizer=replace(run.optimizer, lr=1e-6),
        # its value head starts from scratch, so it learns faster than the policy
        critic=CriticConfig(lr=5e-6),
        train=TrainConfig(global_batch_size=64),
    )


def dpo() -> RunConfig:
    """direct preference optimisation of --init on the preference pairs of --data.path"""
    return RunConfig(
        name="dpo",
        data=DataConfig(rows="pairs"),
        objective=ObjectiveConfig(name="dpo"),
        # as Zephyr (2310.16944)
        optimizer=OptimizerConfig(lr=5e-7, warmup_steps=10, weight_decay=0.0),
    )
