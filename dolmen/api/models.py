"""A model in this process: `load`, `generate`, and the `Model` that generates repeatedly. Prompts
are texts or token ids.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float

from dolmen.api.options import build_config, value_errors
from dolmen.conversion.source import ModelSource, open_source
from dolmen.conversion.weights import FLOATS, check_whole
from dolmen.core.config import field_types
from dolmen.core.mesh import SINGLE
from dolmen.core.messages import brief, choices, message, plural
from dolmen.data.tokenizer import PreTrainedTokenizer, load_tokenizer
from dolmen.families import set_fields, unknown
from dolmen.families import special_tokens as special
from dolmen.model import head
from dolmen.model.decoder import Decoder
from dolmen.optim.optimizer import DTYPES
from dolmen.parallel.inference_linear import Weights
from dolmen.recipes.overrides import plain
from dolmen.serving import adapters as multi_lora
from dolmen.serving import engine
from dolmen.serving.adapters import Adapters
from dolmen.serving.config import GenerateConfig, Sampling
from dolmen.serving.generation import (
    EncodedPrompt,
    apply_generation_config,
    check_text,
    encode,
    generate_samples,
)
from dolmen.training.spellings import suggestion

ARRAYS = (torch.Tensor, np.ndarray)


IDS_TYPES = (list, tuple, *ARRAYS)
"""Types of token ids."""
Ids = Sequence[int] | torch.Tensor | np.ndarray
PromptLike = str | Ids | Sequence[str] | Sequence[Ids]
PARAMETERS = ("prompt", "max_new_tokens", "temperature", "seed", "batch", "adapter")
"""Parameters of `generate` that are not among these options."""
OPTIONS = (
    *(name for name in field_types(Sampling) if name not in PARAMETERS),
    *("stop", "num_samples", "logprobs", "weights", "compile", "speculative"),
)
"""Further keywords of `generate`: options of `dolmen generate`, with the values that it takes.
`logit_bias` may be a mapping of token ids to what is added to their logits, `speculative` one of
its options.
"""


def build_generate_config(
    folder: str | Path,
    max_new_tokens: int | None,
    temperature: float | None,
    seed: int,
    options: Mapping[str, Any],
    dtype: str | None = None,
) -> GenerateConfig:
    """Return the configuration of `dolmen generate` for keywords of the Python API: checked as far
    as possible without the model in `folder`; log-probabilities ("raw") are returned by default.
    Raises ValueError for unknown keywords, with suggestions, and for values out of range.
    """
    # Python callers get log-probabilities by default
    values: dict[str, Any] = {"logprobs": "raw", **options}
    for name in values:
        if name not in OPTIONS:
            option_names = [name.replace("_", "-") for name in (*PARAMETERS, *OPTIONS)]
            near = suggestion(name.replace("_", "-"), option_names) or choices(name, OPTIONS)
            raise ValueError(f"unknown option {brief(name)}: {near}")
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    bias = values.get("logit_bias")
    if isinstance(bias, Mapping):
        # as the command line has it
        values["logit_bias"] = ",".join(f"{token}:{value}" for token, value in bias.items())
    config = build_config(
        GenerateConfig,
        folder=folder,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        dtype=dtype,
        **values,
    )
    config.sampling_params.check()
    return config


def list_prompts(prompt: Any) -> list[Any]:
    """Return a list of prompts: `prompt` itself if it is a list or tuple of prompts, else [prompt].
    A list with an integer in it, and any tensor or array, is the token ids of one prompt.
    """
    # a tensor or array is the ids of one prompt
    if isinstance(prompt, (list, tuple)) and not any(isinstance(token, int) for token in prompt):
        return list(prompt)
    return [prompt]


@dataclass(frozen=True)
class Model:
    """A decoder in this process, with its tokenizer if it has one that can be read."""

    decoder: Decoder
    tokenizer: PreTrainedTokenizer | None
    source: ModelSource
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """Ids of special tokens, as given to `load`."""
    tokenizer_error: str = ""
    """The reason why there is no tokenizer."""
    adapters: Adapters = field(default_factory=Adapters)
    """LoRA adapters by the names given to `load`."""
    drafts: dict[tuple[str, Weights], Decoder] = field(default_factory=dict, repr=False)
    """The draft model that `generate` has used last, by folder and format of its weights."""

    @property
    def folder(self) -> Path:
        """Local folder of the model's files."""
        return self.source.where

    def generate(
        self,
        prompt: PromptLike,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        seed: int = 0,
        *,
        batch: int = engine.AT_ONCE,
        adapter: str | None | Sequence[str | None] = None,
        **options: Any,
    ) -> Any:
        """Generate a completion of a prompt: return a `Generated`; with num_samples over 1 a list
        of them; for a list of prompts a list with such a value for each. A `Generated` has `text`,
        `tokens`, `logprobs` and `finish_reason`; as a string it is the prompt and the text. A
        prompt is a text, or its token ids; an empty text is the BOS token. At most `batch`
        sequences, of any lengths, are generated at once. `adapter` is the name of a LoRA adapter
        that `load` was given, or a list with one for each prompt; None: the base model. `options`
        are those of `dolmen generate` in OPTIONS, such as top_p, stop, num_samples or logprobs.

        Options that are not set come from the model's generation_config.json (and are printed);
        otherwise decoding is greedy, for 64 tokens. Raises ValueError for an invalid prompt, for a
        text without a tokenizer, and for options out of range.

            print(model.generate("Once upon a time", temperature=0.8, top_p=0.95, seed=1))
            model.generate(["One day", "Two men"], temperature=1.0, num_samples=4)[1][3].text
            model.generate([1, 9038, 2501], stop="\\n").tokens
        """
        with value_errors():
            config = build_generate_config(self.folder, max_new_tokens, temperature, seed, options)
            return _generate(self, prompt, config, batch, adapter)

    def logits(self, text: str | Ids) -> Float[torch.Tensor, "tokens vocab"]:
        """Return the logits of the next token after each token of a text, or of token ids: [tokens,
        vocabulary]. A text gets the special tokens that the model's family adds (BOS and the like).
        Raises ValueError for a text without tokens, for a text where the model has no tokenizer,
        and for ids out of range.

            model.logits("Once upon a").argmax(-1)
            model.logits([1, 9038, 2501])
        """
        with value_errors({"prompt": "text"}):
            if isinstance(text, str):
                check_text(text)
                words = self.required_tokenizer(text)["input_ids"]
                tokens = special.frame_prompt(self.source.model, words) if words else []
            else:
                tokens = self.check_ids(text)
        # an empty text is refused: there is no token whose logits could be returned
        if not tokens:
            raise ValueError("the text has no tokens: give at least one")
        with torch.no_grad():
            return engine.run_whole(self.decoder, torch.tensor([tokens]), head.compute_logits)[0]

    @property
    def required_tokenizer(self) -> PreTrainedTokenizer:
        """The model's tokenizer. Raises ValueError where there is none, with the reason and that
        token ids can be given instead.
        """
        if self.tokenizer is None:
            raise ValueError(f"{self.tokenizer_error}: give token ids")
        return self.tokenizer

    def check_ids(self, ids: Any) -> list[int]:
        """Return token ids (a list, array or tensor) as a list of int. Raises ValueError unless
        each is an integer of 0 to the model's vocabulary size less 1.
        """
        # numpy integers become int
        tokens = plain(ids.tolist() if isinstance(ids, ARRAYS) else ids)
        size = self.decoder.spec.vocab_size
        if not isinstance(tokens, list) or not all(
            # a bool is an int for isinstance
            type(token) is int and 0 <= token < size
            for token in tokens
        ):
            raise ValueError(
                f"the prompt is {brief(ids)}: it must be a text, or token ids of 0 to {size - 1:,}"
            )
        return tokens


def load(
    name: str | Path,
    dtype: torch.dtype | str | None = None,
    *,
    special_tokens: Mapping[str, int] | None = None,
    model: Mapping[str, Any] | None = None,
    adapters: Mapping[str, str | Path] | None = None,
) -> Model:
    """Load the model of a transformers directory, hub id, run or checkpoint on the CPU, in `dtype`
    or that of its config.json. Without a tokenizer, prompts and completions are token ids. Raises
    ValueError for a model that dolmen does not fully understand.

        model = dolmen.load("path/to/model")

    `special_tokens` has the ids of tokens that neither config.json nor the tokenizer names (mask,
    smask, gmask, sop, eop, eot, cls, eos): a GLM derives positions from them, and sequences end at
    eop, eot and eos.

        model = dolmen.load("path/to/glm-10b", special_tokens={"gmask": 50009, "sop": 50006})

    `model` overrides fields of its config.json, as in `train`, and sets what that leaves open:

        model = dolmen.load("path/to/baichuan2-13b", model={"head": "normalised"})

    `adapters` are LoRA adapters over the model, name -> folder: folders of PEFT or `dolmen export
    --adapters`, or runs with adapters; `generate` takes the name of one.

        model = dolmen.load("path/to/model", adapters={"fr": "fr-adapter", "law": "runs/law"})
        model.generate(["One day", "Article 1"], adapter=["fr", "law"])
    """
    with value_errors():
        source = open_source(name)
        if model:
            source = source.read_as(set_fields(source.model, model))
        # before the tokenizer is loaded, which is slow
        special_ids = special.check_special_ids(special_tokens or {}, source.model)
        tokenizer, tokenizer_error = _load_tokenizer(source)
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        known = special.add_special_ids(source.model, special_ids, lambda: vocabulary)
        if known is not source.model:
            source = source.read_as(known)
        if source.spec.blanks is not None:
            # a GLM needs the ids of its special tokens before it can run
            source.spec.blanks.check()
        check_whole(source)
        low_rank = multi_lora.open_adapters(_adapter_folders(adapters), source)
        # fields of config.json that dolmen does not know
        unknown.warn(source.model)
        decoder = engine.load_decoder(source, dtype=_dtype(dtype))
        return Model(
            decoder,
            tokenizer,
            source,
            special_ids,
            tokenizer_error,
            multi_lora.place_adapters(low_rank, decoder),
        )


def generate(
    name: str | Path,
    prompt: PromptLike,
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
    dtype: str | None = None,
    batch: int = engine.AT_ONCE,
    adapters: Mapping[str, str | Path] | None = None,
    adapter: str | None | Sequence[str | None] = None,
    **options: Any,
) -> Any:
    """Load the model `name` on the CPU and generate a completion of a prompt, or of each of several
    prompts, as `dolmen generate NAME --prompt PROMPT` does, in this process; returns what
    `Model.generate` returns. To generate repeatedly, keep the model of `dolmen.load`. `adapters`:
    LoRA adapters, name -> folder; `adapter`: the name of the one to use. Raises ValueError on bad
    input.

        dolmen.generate("path/to/model", "Once upon a time", temperature=0.8).text
    """
    with value_errors():
        config = build_generate_config(name, max_new_tokens, temperature, seed, options, dtype)
        # a mistake is found before the model is loaded
        for text in list_prompts(prompt):
            if not isinstance(text, IDS_TYPES):
                check_text(text)
        _adapter_per_prompt(adapter, len(list_prompts(prompt)), _adapter_folders(adapters))
        model = load(name, config.dtype, adapters=adapters)
        return _generate(model, prompt, config, batch, adapter)


def _load_tokenizer(source: ModelSource) -> tuple[PreTrainedTokenizer | None, str]:
    """Return (tokenizer of a model, ""), or (None, the reason) if the model has none, or one that
    cannot be read and transformers has no class for the model's family: such a tokenizer may need
    the family's own code. Raises ValueError or OSError for any other one that cannot be read.
    """
    if source.tokenizer is None:
        return None, f"{source.where} has no tokenizer"
    try:
        return load_tokenizer(str(source.tokenizer), option=""), ""
    except (ValueError, OSError) as error:
        if source.model.family.in_transformers:
            raise
        return None, message(error)


def _adapter_folders(adapters: Mapping[str, str | Path] | None) -> dict[str, str]:
    """Return adapters as a dict of strings, name -> folder; {} for None. Raises ValueError for
    anything but a mapping, and for unusable names.
    """
    if not isinstance(adapters, Mapping | None):
        raise ValueError(f"adapters is {brief(adapters)}: it must be a dict of names and folders")
    return multi_lora.check_adapters(
        (str(name), str(folder)) for name, folder in (adapters or {}).items()
    )


def _adapter_per_prompt(adapter: Any, prompts: int, known: Collection[str]) -> list[str | None]:
    """Return the name of the adapter of each of `prompts` prompts (None: the base model). `adapter`
    is one for all, or a list with one for each. Raises ValueError for a name that is not in
    `known`, and for a list of another length.
    """
    # one name for all
    adapters = list(adapter) if isinstance(adapter, (list, tuple)) else [adapter] * prompts
    if len(adapters) != prompts:
        raise ValueError(
            f"adapter has {plural(len(adapters), 'name')} for {plural(prompts, 'prompt')}: give "
            "one for each, or one for all"
        )
    for name in adapters:
        if not (name is None or isinstance(name, str)):
            raise ValueError(f"adapter is {brief(name)}: it must be a name, or None")
        multi_lora.check_name(name, known)
    return adapters


def _generate(
    model: Model,
    prompt: PromptLike,
    config: GenerateConfig,
    batch: int,
    adapter: str | None | Sequence[str | None],
) -> Any:
    """Generate completions of one or several prompts with the options of `config`. Returns a
    `Generated`; a list of them if config.num_samples is over 1; and a list with such a value for
    each prompt if `prompt` is a list of prompts. Options that are not set come from the model's
    generation_config.json, and are printed to stderr. Raises ValueError.
    """
    if not isinstance(plain(batch), int):
        raise ValueError(f"batch is {brief(batch)}: it must be a whole number")
    prompts = list_prompts(prompt)
    config, notes = apply_generation_config(config, model.source.generation_config)
    config.sampling_params.check()
    for line in notes:
        print(line, file=sys.stderr)
    names = _adapter_per_prompt(adapter, len(prompts), model.adapters.names)
    encoded = [_encode_prompt(model, *pair) for pair in zip(prompts, names, strict=True)]
    samples = generate_samples(
        model.decoder,
        model.tokenizer,
        model.source,
        encoded,
        config,
        batch,
        special.end_token_ids(model.special_tokens),
        model.adapters,
        _draft_model(model, config),
    )
    # no list of one sample
    results = [
        completions[0] if config.num_samples == 1 else completions for completions in samples
    ]
    # ["one prompt"] returns a list
    return results[0] if len(prompts) == 1 and prompts[0] is prompt else results


def _draft_model(model: Model, config: GenerateConfig) -> Decoder | None:
    """Return the model of --speculative.method draft, which stays loaded for later calls until
    another one is named; None without the option. Raises ValueError where it cannot draft.
    """
    names, drafts = config.speculative.models, model.drafts
    if not names:
        return None
    key = names[0], config.weights
    if key not in drafts:
        # the draft model has to be where the model is: its logits are compared with the model's
        mesh = replace(SINGLE, device=model.decoder.device)
        draft = engine.load_draft(
            open_source(names[0]), model.source.spec, mesh, weights=config.weights
        )
        assert draft is not None
        drafts.clear()
        drafts[key] = draft
    return drafts[key]


def _encode_prompt(model: Model, prompt: Any, adapter: str | None) -> EncodedPrompt:
    """Return a prompt with its token ids and its adapter's name. Token ids are checked against the
    vocabulary, a text is tokenized. Raises ValueError for invalid ids, and for a text without a
    tokenizer.
    """
    if isinstance(prompt, IDS_TYPES):
        tokens = model.check_ids(prompt)
        return EncodedPrompt(tokens, tokens, adapter)
    return EncodedPrompt(
        prompt, encode(model.required_tokenizer, prompt, model.source.model), adapter
    )


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a torch dtype from itself or its name ("bfloat16"); None for None. Raises ValueError
    for one that weights cannot have.
    """
    if dtype is None or dtype in FLOATS:
        return cast("torch.dtype | None", dtype)
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise ValueError(f"dtype is {brief(dtype)}: {choices(str(dtype), DTYPES)}")
