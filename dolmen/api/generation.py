"""How `generate` may be asked: prompts as texts or token ids, and how answers are drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch

from dolmen.api.asked import asked_of
from dolmen.core.messages import brief, choices
from dolmen.serving.config import GenerateConfig
from dolmen.serving.detokenizer import check_stop
from dolmen.training.spellings import suggestion

ARRAYS = (torch.Tensor, np.ndarray)


NUMBERS = (list, tuple, *ARRAYS)  # that token ids come in


Ids = Sequence[int] | torch.Tensor | np.ndarray


Prompt = str | Ids | Sequence[str] | Sequence[Ids]


NAMED = ("prompt", "max_new_tokens", "temperature", "seed", "batch", "adapter")
"""Parameters of `generate` that are not among these options."""


class Generation(TypedDict, total=False):
    """What `generate` takes besides: the options of `dolmen generate`, by their names."""

    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float]
    """Token id -> what is added to its score; -inf forbids it."""
    min_new_tokens: int | None
    stop: str | Sequence[str]
    """Text that ends an answer, and is not part of it."""
    num_samples: int
    """Of each prompt, drawn each by itself: each prompt gives a list."""
    logprobs: Literal["raw", "processed"] | None
    """Of the model's own distribution, where nothing is said; or of the one that was drawn from."""
    weights: Literal["stated", "int8"]
    """int8: the rows of matrices as eight bits and a scale each."""


def generation(
    folder: str | Path,
    max_new_tokens: int | None,
    temperature: float | None,
    seed: int,
    options: Generation,
    dtype: str | None = None,
) -> GenerateConfig:
    """What is asked, checked as far as it can be without the model. Raises ValueError."""
    said: dict[str, Any] = {"logprobs": "raw", **options}
    known = Generation.__annotations__
    for name in said:
        if name not in known:
            every = [one.replace("_", "-") for one in (*NAMED, *known)]
            near = suggestion(name.replace("_", "-"), every) or choices(name, known)
            raise ValueError(f"there is no option {brief(name)}: {near}")
    if isinstance(said.get("stop"), str):
        said["stop"] = (said["stop"],)
    bias = said.get("logit_bias")
    if isinstance(bias, Mapping):
        said["logit_bias"] = ",".join(f"{token}:{value}" for token, value in bias.items())
    asked = asked_of(
        GenerateConfig,
        folder=folder,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        dtype=dtype,
        **said,
    )
    asked.of_tokens.check()
    check_stop(asked.stop)
    return asked


def several(prompt: Any) -> list[Any]:
    """A list or tuple of prompts, or the one: a list of numbers is the tokens of one. What is no
    prompt, `check_text` refuses.
    """
    if isinstance(prompt, (list, tuple)) and not any(isinstance(one, int) for one in prompt):
        return list(prompt)
    return [prompt]
