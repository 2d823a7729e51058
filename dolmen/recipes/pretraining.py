"""Recipes of published models at their sizes: GPTs of the papers on Megatron (2104.04473, table 1;
2205.05198, table 3), GPT-3 (2005.14165) and Llamas (2302.13971, 2307.09288, 2407.21783).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from dolmen.data.config import DataConfig
from dolmen.families import ModelConfig, model_from_fields
from dolmen.objectives.config import ObjectiveConfig
from dolmen.optim.config import OptimizerConfig
from dolmen.rl.config import CriticConfig, RolloutConfig
from dolmen.training.config import (
    CheckpointConfig,
    LogConfig,
    NewRowsConfig,
    RunConfig,
    TrainConfig,
)


class Published(NamedTuple):
    """A published model, and how it is pretrained."""

    about: str
    """Text of the recipe in `dolmen recipes`."""
    model_type: str
    fields: dict[str, Any]
    """Fields of its config.json that differ from the family's defaults, and its sizes."""
    lr: float
    """Peak learning rate."""
    batch: int
    """Sequences per step."""
    length: int = 8192
    """Tokens of a sequence."""


def large(name: str, model: ModelConfig, lr: float, batch: int, length: int = 8192) -> RunConfig:
    """Return the configuration of a run that pretrains a large model: bfloat16, compiled, 100,000
    steps with 2,000 of warm-up and a decay to a tenth of the peak learning rate `lr`. `batch`:
    sequences per step, of `length` tokens each.
    """
    return RunConfig(
        name=name,
        model=model,
        # as Llama (2302.13971, section 2.3)
        optimizer=OptimizerConfig(lr=lr, warmup_steps=2000, min_lr=lr / 10),
        train=TrainConfig(
            steps=100_000,
            dtype="bfloat16",
            sequence_length=length,
            global_batch_size=batch,
            # the least memory
            microbatch_size=1,
            compile=True,
        ),
        checkpoint=CheckpointConfig(every=1000),
    )


def gpt(
    about: str, hidden: int, layers: int, heads: int, lr: float, batch: int, vocabulary: int = 51200
) -> Published:
    """Return the table row of a GPT: its gpt2 config.json, with n_embd (`hidden`), n_inner of 4
    times that and 2,048 positions, and how it is pretrained, on sequences of 2,048 tokens. `about`:
    text of the recipe; `lr`: peak learning rate; `batch`: sequences per step; `vocabulary`: by
    default as Megatron pads it.
    """
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": 4 * hidden}
    # GPT-3's context; GPT-2 itself has 1,024
    fields = {"vocab_size": vocabulary, "n_positions": 2048, **sizes}
    return Published(about, "gpt2", fields, lr, batch, 2048)


GPTS = {
    "gpt-1.7b": gpt("GPT of 1.7 B of 2104.04473, table 1", 2304, 24, 24, 2e-4, 512),
    "gpt-3.6b": gpt("GPT of 3.6 B of 2104.04473, table 1", 3072, 30, 32, 1.6e-4, 512),
    "gpt-7.5b": gpt("GPT of 7.5 B of 2104.04473, table 1", 4096, 36, 32, 1.2e-4, 512),
    "gpt-18b": gpt("GPT of 18.4 B of 2104.04473, table 1", 6144, 40, 48, 1e-4, 1024),
    "gpt-39b": gpt("GPT of 39.1 B of 2104.04473, table 1", 8192, 48, 64, 6e-5, 1536),
    "gpt-76b": gpt("GPT of 76.1 B of 2104.04473, table 1", 10240, 60, 80, 6e-5, 1792),
    "gpt-145b": gpt("GPT of 145.6 B of 2104.04473, table 1", 12288, 80, 96, 6e-5, 2304),
    "gpt-310b": gpt("GPT of 310.1 B of 2104.04473, table 1", 16384, 96, 128, 6e-5, 2160),
    "gpt-530b": gpt("GPT of 529.6 B of 2104.04473, table 1", 20480, 105, 128, 6e-5, 2520),
    "gpt-1t": gpt("GPT of 1,008 B of 2104.04473, table 1", 25600, 128, 160, 6e-5, 3072),
    "gpt-22b": gpt("GPT of 22 B of 2205.05198, table 3", 6144, 48, 64, 1e-4, 4),
    "gpt-175b": gpt(
        "GPT of 175 B of 2205.05198, table 3: GPT-3 with a padded vocabulary",
        12288,
        96,
        96,
        6e-5,
        64,
    ),
    # 50,257 tokens, not padded
    "gpt3-175b": gpt(
        "the shape of GPT-3 (2005.14165), as a gpt2 config.json", 12288, 96, 96, 0.6e-4, 1536, 50257
    ),
}


# 1 and 2: positions without scaling, a small vocabulary
LLAMA_1 = {"vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-06}
LLAMA_2 = LLAMA_1 | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-05}
# before its context was lengthened
LLAMA_3_0 = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
LLAMA_3 = LLAMA_3_0 | {
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def llama(
    about: str,
    generation: dict[str, Any],
    shape: tuple[int, int, int, int],
    lr: float,
    batch: int,
    **fields: Any,
) -> Published:
    """Return the table row of a Llama: its config.json, with the SHAPE fields and all others that
    differ from the defaults in `generation` and `fields`, and how it is pretrained, on sequences of
    8,192 tokens or of the model's maximum if that is less. `about`: text of the recipe; `lr`: peak
    learning rate; `batch`: sequences per step.
    """
    fields = generation | dict(zip(SHAPE, shape, strict=True)) | {"head_dim": 128} | fields
    return Published(
        about, "llama", fields, lr, batch, min(8192, fields["max_position_embeddings"])
    )


SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def small_llama(
    vocab_size: int, shape: tuple[int, int, int, int], head_dim: int, positions: int
) -> ModelConfig:
    """Return a Llama that a CPU trains in minutes, with the SHAPE fields, tied embeddings, two
    key-value heads and at most `positions` tokens in a sequence.
    """
    fields = {
        "vocab_size": vocab_size,
        **dict(zip(SHAPE, shape, strict=True)),
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": True,
    }
    return model_from_fields("llama", fields)


LLAMAS = {
    "llama-1b": llama(
        "the shape of Llama 3.2 1B",
        LLAMA_3,
        (2048, 8192, 16, 32),
        4e-4,
        256,
        head_dim=64,
        # 3.2 scales its positions by 32, 3.1 by 8
        rope_parameters=LLAMA_3["rope_parameters"] | {"factor": 32.0},
        tie_word_embeddings=True,
    ),
    "llama-8b": llama("the shape of Llama 3.1 8B", LLAMA_3, (4096, 14336, 32, 32), 3e-4, 512),
    "llama-70b": llama("the shape of Llama 3.1 70B", LLAMA_3, (8192, 28672, 80, 64), 1.5e-4, 1024),
    "llama-405b": llama(
        "the shape of Llama 3.1 405B", LLAMA_3, (16384, 53248, 126, 128), 8e-5, 2048
    ),
    # 4 M tokens per step, as in 2302.13971
    "llama-7b": llama(
        "Llama 1 of 7 B", LLAMA_1, (4096, 11008, 32, 32), 3e-4, 2048, num_key_value_heads=32
    ),
    "llama-13b": llama(
        "Llama 1 of 13 B", LLAMA_1, (5120, 13824, 40, 40), 3e-4, 2048, num_key_value_heads=40
    ),
    "llama-33b": llama(
        "Llama 1 of 33 B", LLAMA_1, (6656, 17920, 60, 52), 1.5e-4, 2048, num_key_value_heads=52
    ),
    "llama-65b": llama(
        "Llama 1 of 65 B", LLAMA_1, (8192, 22016, 80, 64), 1.5e-4, 2048, num_key_value_heads=64
    ),
    # 4 M tokens per step, as in 2307.09288
    "llama-2-7b": llama(
        "Llama 2 of 7 B", LLAMA_2, (4096, 11008, 32, 32), 3e-4, 1024, num_key_value_heads=32
    ),
    "llama-2-13b": llama(
        "Llama 2 of 13 B", LLAMA_2, (5120, 13824, 40, 40), 3e-4, 1024, num_key_value_heads=40
    ),
    "llama-2-70b": llama(
        "Llama 2 of 70 B, with grouped-query attention",
        LLAMA_2,
        (8192, 28672, 80, 64),
        1.5e-4,
        1024,
        num_key_value_heads=8,
    ),
    "llama-3-8b": llama("the shape of Llama 3 8B", LLAMA_3_0, (4096, 14336, 32, 32), 3e-4, 512),
    "llama-3-70b": llama(
        "the shape of Llama 3 70B", LLAMA_3_0, (8192, 28672, 80, 64), 1.5e-4, 1024
    ),
}


def make_recipe(name: str, published: Published) -> Callable[[], RunConfig]:
    """Return the recipe `name` of a published model: a function without arguments that returns the
    configuration of the run that pretrains it (`large`). Its docstring is `published.about`.
    """

    def recipe() -> RunConfig:
        """Return the configuration of the run that pretrains this model."""
        model = model_from_fields(published.model_type, published.fields)
        return large(name, model, published.lr, published.batch, published.length)

    recipe.__doc__ = published.about
    return recipe


PRETRAINING = {name: make_recipe(name, row) for name, row in {**LLAMAS, **GPTS}.items()}
"""Recipes of published models."""


# Recipes that fine-tune the model of --init on --data.path; ppo also has a small model and prompts
# of its own.


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
    model = small_llama(vocab_size=512, shape=(64, 176, 2, 4), head_dim=16, positions=128)
    return RunConfig(
        name="ppo",
        model=model,
        data=DataConfig(rows="prompts", path=("python-standard-library",), tokenizer="bpe:512"),
        objective=ObjectiveConfig(name="ppo"),
        # short completions, as the model is a toy
        rollout=RolloutConfig(num_generations=1, prompts=64, max_new_tokens=16),
        optimizer=OptimizerConfig(lr=3e-3, schedule="constant", weight_decay=0.0),
        train=TrainConfig(steps=100, sequence_length=64, global_batch_size=32),
    )


def ppo_with_init(run: RunConfig) -> RunConfig:
    """Return the run of the recipe ppo changed for a trained model, which --init names, in place of
    the small random one: model None, prompts from --data.path, 256 prompts per iteration with 2
    epochs over it, global batch 64, learning rate 1e-6, and 5e-6 for the critic.
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
