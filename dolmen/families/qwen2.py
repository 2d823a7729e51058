"""Qwen2 and Qwen2.5 (2407.10671): Llama with biases on q, k, v and a sliding window on some layers.

Which layers slide is `layer_types`, or, in older files, those from `max_window_layers` on, if
`use_sliding_window`.
"""

from typing import Any

from dolmen.families import llama_like
from dolmen.families.family import Family
from dolmen.model.config import ModelConfig

DEFAULTS = {
    **llama_like.DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}


def read_windows(hf: dict[str, Any]) -> dict[str, Any]:
    """`sliding_window` and `sliding_layers` of ModelConfig. Raises ValueError naming the field that
    does not fit.
    """
    layers = hf["num_hidden_layers"]
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    names = {False: "full_attention", True: "sliding_attention"}
    types = hf["layer_types"]
    if types is None:
        types = [names[window is not None and i >= hf["max_window_layers"]] for i in range(layers)]
    if unknown := sorted(set(types) - set(names.values())):
        raise ValueError(
            f"layer_types has {unknown}: dolmen supports {' and '.join(names.values())}"
        )
    if len(types) != layers:
        raise ValueError(f"layer_types has {len(types)} entries, num_hidden_layers is {layers}")
    sliding = tuple(i for i, kind in enumerate(types) if kind == names[True])
    if sliding and window is None:
        raise ValueError(
            f"layer_types has {len(sliding)} layers of sliding_attention, but use_sliding_window "
            f"is {hf['use_sliding_window']} and sliding_window is {hf['sliding_window']}"
        )
    return {
        "sliding_window": window if sliding else None,
        "sliding_layers": sliding if 0 < len(sliding) < layers else None,
    }


def write_windows(c: ModelConfig) -> dict[str, Any]:
    sliding = [c.window(i) is not None for i in range(c.num_hidden_layers)]
    return {
        "use_sliding_window": any(sliding),
        "sliding_window": c.sliding_window if any(sliding) else None,
        "max_window_layers": sliding.index(True) if any(sliding) else c.num_hidden_layers,
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
    }


def read_config(hf: dict[str, Any]) -> ModelConfig:
    return llama_like.read_config(hf, attention_bias=True, output_bias=False, **read_windows(hf))


def write_config(c: ModelConfig) -> dict[str, Any]:
    return {**llama_like.write_config(c), **write_windows(c)}


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=read_config,
    write=write_config,
    rules=llama_like.rules,
    defaults=DEFAULTS,
    scratch=llama_like.SCRATCH,
    only={"attention_bias": (True, None), "mlp_bias": (False, None), "use_mrope": (False, None)},
    ignored=llama_like.IGNORED,
)
