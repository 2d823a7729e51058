"""Special tokens that determine a model's positions or frame its prompts. Their ids are stated by
config.json, by names in the tokenizer's vocabulary, or by the user.

The published code finds them by name in a tokenizer that is remote code too, so a config.json may
state none of them. Ids that come from elsewhere are stored under its `dolmen` key.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dolmen.core.messages import brief, choices
from dolmen.families.family import RESERVED, Field, Ids, mapping
from dolmen.families.model import ModelConfig
from dolmen.files import kinds

# Key of a special token -> its names in tokenizers of the GLM models.
NAMES = {
    "mask": ("[MASK]",),
    "smask": ("[sMASK]",),
    "gmask": ("[gMASK]",),
    "sop": ("<sop>", "sop", "<|startofpiece|>"),
    "eop": ("<eop>", "eop", "<|endofpiece|>"),
    "eot": ("<eot>", "eot"),
    "cls": ("[CLS]", "<|cls|>"),
    "eos": ("</s>", "eos", "<|endoftext|>"),
}
ENDS = ("eop", "eot", "eos")
"""Tokens that end a sequence in any model."""
DESCRIPTIONS = {
    "mask": "[MASK], a blank of some words",
    "smask": "[sMASK], a blank of a sentence",
    "gmask": "[gMASK], a blank at the end",
    "sop": "<sop>, start of the text that fills a blank",
    "eop": "<eop>, its end",
    "eot": "<eot>, the end of a turn",
    "cls": "[CLS], start of a text",
    "eos": "the end of a text",
}
SPECIAL_TOKENS = mapping(
    "special_tokens",
    *(
        Field(name, kinds.TOKEN | None, None, f"Id of {description}. None: that of the tokenizer.")
        for name, description in DESCRIPTIONS.items()
    ),
    ours=True,
)


def special_ids(config: Mapping[str, Any], **fields: str) -> dict[str, int | None]:
    """Return key -> token id (None: unknown) for every known key, such as "gmask". Ids come from
    the config's mapping special_tokens, else from the family's field that `fields` (key=field name)
    gives for the key.
    """
    stated = config[SPECIAL_TOKENS.name] or {}
    ids = {name: stated.get(name) for name in NAMES}
    for name, field in fields.items():
        if ids[name] is None:
            ids[name] = config[field]
    return ids


def special_tokens_field(ids: Mapping[str, int | None]) -> dict[str, Any]:
    """Return {"special_tokens": the known ones of these ids}, dolmen's field of a config.json; its
    value is None if none is known.
    """
    known = {name: token for name, token in ids.items() if token is not None}
    return {SPECIAL_TOKENS.name: known or None}


def uses_special_tokens(model: ModelConfig) -> bool:
    """Return whether the family has the field special_tokens: its positions depend on special
    tokens, or its prompts are framed by them.
    """
    return SPECIAL_TOKENS.name in {field.name for field in model.family.fields}


def check_special_ids(specified: Mapping[str, Any], model: ModelConfig) -> dict[str, int]:
    """Return the ids that a user specified (key -> id), validated. Any known key is allowed, but
    only those of EOS tokens if the model's family uses no special tokens. Raises ValueError for
    another key, and for an id outside the vocabulary.
    """
    vocab_size = model.spec.vocab_size
    for name, token in specified.items():
        if name not in NAMES:
            raise ValueError(f"special_tokens has {brief(name)}: {choices(str(name), NAMES)}")
        if name not in ENDS and not uses_special_tokens(model):
            raise ValueError(
                f"special_tokens has {brief(name)}, which {model.model_type} does not use: for "
                f"this model {', '.join(ENDS)} may be specified (EOS tokens)"
            )
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(
                f"special_tokens.{name} is {brief(token)}: it must be the id of a token, 0 to "
                f"{vocab_size - 1:,}"
            )
    return dict(specified)


def ids_in_vocabulary(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Return key -> id of the special tokens that a vocabulary (token -> id) contains under one of
    the names that GLM tokenizers have for them.
    """
    known = {}
    for key, names in NAMES.items():
        # the first name that the tokenizer has
        ids = [vocabulary[name] for name in names if name in vocabulary]
        if ids:
            known[key] = ids[0]
    return known


def add_special_ids(
    model: ModelConfig, specified: Ids, vocabulary: Callable[[], Ids]
) -> ModelConfig:
    """Return the model with special token ids added to its dolmen fields: `specified` ones win,
    then those that it states, then those in its tokenizer's `vocabulary` (called only if needed).
    Unchanged if its family uses none, and if nothing is new.
    """
    if not uses_special_tokens(model):
        return model
    known = ids_of(model)
    # later ones win
    ids = {**ids_in_vocabulary(vocabulary()), **known, **specified}
    if ids == known:
        return model
    reserved = model.config.get(RESERVED, {})
    return ModelConfig({**model.config, RESERVED: {**reserved, SPECIAL_TOKENS.name: ids}})


def frame_prompt(model: ModelConfig, tokens: list[int]) -> list[int]:
    """Return the prompt's token ids with the special tokens that the model's published code would
    add; unchanged if its tokenizer adds them. Raises ValueError if their ids are unknown.
    """
    if model.family.frame is None:
        return tokens
    try:
        return model.family.frame(tokens, ids_of(model))
    except KeyError as missing:
        (name,) = missing.args
        raise ValueError(
            f"a text of {model.model_type} has {DESCRIPTIONS[name]}, but neither config.json nor "
            f'tokenizer defines it: use dolmen.load(..., special_tokens={{"{name}": id}}), or in '
            f'config.json "dolmen": {{"special_tokens": {{"{name}": id}}}}'
        ) from None


def end_token_ids(ids: Ids) -> set[int]:
    """Return the ids, of those in `ids`, that end a sequence: <eop>, <eot> and </s>."""
    return {ids[name] for name in ENDS if name in ids}


def ids_of(model: ModelConfig) -> Ids:
    """Return key -> id of the special tokens that a model's spec and its dolmen fields state."""
    blanks, ids = model.spec.blanks, {}
    if blanks is not None:
        ids = {"sop": blanks.start, **{mask.name: mask.token for mask in blanks.masks}}
    ids |= model.config.get(RESERVED, {}).get(SPECIAL_TOKENS.name) or {}
    return {name: token for name, token in ids.items() if token is not None}
