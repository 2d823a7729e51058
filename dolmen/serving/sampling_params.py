"""Sampling parameters of a request; sampling.py applies them. Without torch."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. By default tokens are sampled from the model's own distribution."""

    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy decoding."""
    top_k: int | None = None
    """Sample from this many likeliest tokens."""
    top_p: float | None = None
    """Sample from the fewest likeliest tokens that have this probability together."""
    min_p: float | None = None
    """Sample from tokens with at least this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """The logit of a token that the sequence has, prompt included, is divided by it if positive,
    else multiplied (1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of a token that was generated before."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that it was generated before."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Token id -> number added to its logit; -inf forbids it."""
    min_new_tokens: int = 0
    """No stop token is sampled before this many new tokens."""
    max_new_tokens: int = 64
    """Most new tokens; 0 reads the prompt alone."""
    stop: tuple[int, ...] = ()
    """Token ids that end the sequence, besides the EOS tokens of the model."""

    def check(self) -> None:
        """Raise ValueError that names the option for a value without meaning or effect."""
        _check_temperature(self.temperature)
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: use --top-k 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: use --top-p above 0, at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}: use --min-p of 0 to 1")
        drawing = (("--top-k", self.top_k), ("--top-p", self.top_p), ("--min-p", self.min_p))
        for name, value in drawing:
            if value is not None and not self.temperature:
                raise ValueError(f"{name} has no effect without sampling: add --temperature 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}: use --repetition-penalty above 0"
            )
        penalties = (("presence", self.presence_penalty), ("frequency", self.frequency_penalty))
        for name, value in penalties:
            if not math.isfinite(value):
                raise ValueError(f"{name}_penalty is {value}: use --{name}-penalty with a number")
        _check_bias(self.logit_bias)
        for name, count in (("min", self.min_new_tokens), ("max", self.max_new_tokens)):
            if count < 0:
                raise ValueError(f"{name}_new_tokens is {count}: use --{name}-new-tokens 0 or more")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens} and max_new_tokens "
                f"{self.max_new_tokens}: raise --max-new-tokens"
            )


def _check_temperature(temperature: float) -> None:
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}: use --temperature 0 (greedy) or more")
    if 0 < temperature < sys.float_info.min:  # too few bits are left to divide by it
        raise ValueError(
            f"temperature is {temperature}: use --temperature 0 (greedy), or at least 1e-307"
        )


def _check_bias(bias: Mapping[int, float]) -> None:
    for token, value in bias.items():
        if token < 0 or math.isnan(value) or value == math.inf:
            raise ValueError(
                f"logit_bias of token {token} is {value}: give ids of the vocabulary, and numbers "
                "or -inf"
            )
