"""What a model's generation_config.json says of how tokens are chosen: the default of all that a
user does not say.

`do_sample` decides there whether tokens are drawn at all: without it temperature, top_k, top_p and
min_p are of no effect, as in transformers, unless a user says a temperature.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from dolmen.files import gate, kinds
from dolmen.serving.config import NUMBERS, Sampling

T = TypeVar("T", bound=Sampling)
DRAWS = ("top_k", "top_p", "min_p")
# What transformers would do besides, and what says there that it does not.
NOT_DONE = {
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


def resolved(asked: T, generation_config: Mapping[str, Any]) -> tuple[T, list[str]]:
    """`asked`, with what the file says where nothing was said; and that in lines for the user.
    Raises Refused for values of the file that are none.
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
        said |= dict.fromkeys(DRAWS)
    if said["top_k"] == 0:  # as transformers says none
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
        del taken["min_new_tokens"]  # an answer that is asked to be shorter is
    told = []
    if taken:
        told.append(f"as {where} says: {', '.join(f'{n} {v:g}' for n, v in taken.items())}")
    others = [name for name, off in NOT_DONE.items() if generation_config.get(name, off) != off]
    others = [name for name in others if generation_config[name] is not None]
    if others:
        told.append(f"{where} also says {', '.join(others)}, which is not done here")
    return replace(asked, **taken), told
