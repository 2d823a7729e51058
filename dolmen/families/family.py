"""What a family file declares, and the facts of config.json that all families share.

A family reads a config.json with every absent field filled from `defaults`, those of the
transformers config class, and writes the fields that fix the structure.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dolmen.families.rules import Rule
from dolmen.model.config import ModelConfig

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}

# Fields of any config.json whose other values change the function: only these are supported.
ONLY = {
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "per_layer_config": ({}, None),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False, None),
}

# Fields of any config.json that do not change the function of a decoder; names that start with "_"
# are harmless too.
HARMLESS = frozenset(
    """
    architectures model_type transformers_version dtype torch_dtype use_cache is_decoder return_dict
    use_return_dict torchscript output_hidden_states output_attentions output_scores
    return_dict_in_generate use_bfloat16 tf_legacy_loss prefix chunk_size_feed_forward
    tie_encoder_decoder finetuning_task task_specific_params problem_type tokenizer_class id2label
    label2id num_labels name_or_path attn_implementation gradient_checkpointing
    tie_last_hidden_states bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id max_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens attention_dropout pretraining_tp auto_map
    quantization_config""".split()
)


@dataclass(frozen=True)
class Family:
    """One family: structure from config.json, config.json from structure, and weight rules."""

    model_type: str
    """`model_type` of its config.json."""
    architecture: str
    """transformers class that a model made here is written for."""
    read: Callable[[dict[str, Any]], ModelConfig]
    """Structure from a config.json whose absent fields are filled in."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Every field of config.json that fixes the structure, in the spelling of transformers 5."""
    rules: Callable[[ModelConfig], list[Rule]]
    """Weight rules; the embedding is `embed` and the head `head`."""
    defaults: dict[str, Any]
    """Structure fields of config.json and what their absence means."""
    only: dict[str, tuple] = field(default_factory=dict)
    """Further fields that change the function, and the values supported."""
    harmless: tuple[str, ...] = ()
    """Further fields that do not change the function."""
    scratch: dict[str, Any] = field(default_factory=dict)
    """Fields written for a model made here, beside its structure."""
    ignored: tuple[str, ...] = ()
    """Patterns of stored buffers that are recomputed, not parameters."""
    prefix: str = ""
    """Leading part of the names that some files leave out."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names transformers accepts for a structure field: alias -> field."""


def activation(name: Any, knob: str) -> str:
    """Our name of an activation. Raises ValueError naming `knob` for one that is not supported."""
    if name not in ACTIVATIONS:
        raise ValueError(f"{knob} is {name!r}: dolmen supports {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
