"""Runs that teach a model which is trained already: --init and --data.path decide."""

from dolmen.data.config import DataConfig
from dolmen.objectives.config import ObjectiveConfig
from dolmen.optim.config import OptimizerConfig
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


def dpo() -> RunConfig:
    """learns from pairs of answers which is preferred: --init and --data.path decide"""
    return RunConfig(
        name="dpo",
        data=DataConfig(rows="pairs"),
        objective=ObjectiveConfig(name="dpo"),
        optimizer=OptimizerConfig(lr=5e-7, warmup_steps=10, weight_decay=0.0),
    )
