"""Runs that teach a model which is trained already: --init and --data.path decide."""

from dolmen.data.config import DataConfig
from dolmen.objectives.config import ObjectiveConfig
from dolmen.optim.config import OptimizerConfig
from dolmen.training.config import RunConfig


def sft() -> RunConfig:
    """learns what the assistant says in chats: --init and --data.path decide"""
    return RunConfig(
        name="sft",
        data=DataConfig(rows="chats"),
        optimizer=OptimizerConfig(lr=2e-5, warmup_steps=10, weight_decay=0.0),
    )


def dpo() -> RunConfig:
    """learns from pairs of answers which is preferred: --init and --data.path decide"""
    return RunConfig(
        name="dpo",
        data=DataConfig(rows="pairs"),
        objective=ObjectiveConfig(name="dpo"),
        optimizer=OptimizerConfig(lr=5e-7, warmup_steps=10, weight_decay=0.0),
    )
