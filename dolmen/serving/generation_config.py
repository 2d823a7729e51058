"""generation_config.json: a model's defaults of the sampling parameters that a user does not set.

`do_sample` decides there whether tokens are sampled: without it temperature, top_k, top_p and min_p
have no effect, as in transformers, unless a user sets a temperature.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from dolmen.files import gate, kinds
from dolmen.serving.config import NUMBERS, Sampling

T = TypeVar("T", bound=Sampling)
SAMPLING_ONLY = ("top_k", "top_p", "min_p")
# Options of transformers that are not supported, with the values that switch them off.
UNSUPPORTED = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "bad_words_ids": None,
    "force_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "exponential_decay_length_penalty": None,
    "dola_layers": None,
    "stop_strings": None,
}


def apply_generation_config(asked: T, generation_config: Mapping[str, Any]) -> tuple[T, list[str]]:
    """Fill the options that are not set from the file; return them, and lines that say so.

    Raises Refused for invalid values of the file.
    """
    where = "generation_config.json"
    gate.checked(dict(generation_config), where, kinds.SAMPLING)
    said = {name: generation_config.get(name) for name in NUMBERS}
    draws = bool(generation_config.get("do_sample"))
    if draws and said["temperature"] is None:
        said["temperature"] = 1.0
    if asked.temperature is None and not draws:
        said["temperature"] = None
    temperature = said["temperature"] if asked.temperature is None else asked.temperature
    if not temperature:
        said |= dict.fromkeys(SAMPLING_ONLY)
    if said["top_k"] == 0:  # how transformers switches it off
        said["top_k"] = None
    taken = {
        name: value
        for name, value in said.items()
        if value is not None and asked.__dict__[name] is None
    }
    least, most = (
        taken.get(name, asked.__dict__[name]) for name in ("min_new_tokens", "max_new_tokens")
    )
    if "min_new_tokens" in taken and most is not None and least > most:
        del taken["min_new_tokens"]  # the user wants fewer
    told = []
    if taken:
        told.append(f"from {where}: {', '.join(f'{n} {v:g}' for n, v in taken.items())}")
    others = [name for name, off in UNSUPPORTED.items() if generation_config.get(name, off) != off]
    others = [name for name in others if generation_config[name] is not None]
    if others:
        told.append(f"{where} also has {', '.join(others)}, which is not supported")
    return replace(asked, **taken), told
