"""A model in this process: `load`, `generate`, and the `Model` that asks more than once."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from jaxtyping import Float

from dolmen.api.asked import value_errors
from dolmen.api.generation import ARRAYS, NUMBERS, Generation, Ids, Prompt, generation, several
from dolmen.conversion import hf
from dolmen.conversion.moments import check_whole
from dolmen.conversion.source import Source, open_source
from dolmen.core.messages import brief, choices, message, plural
from dolmen.data.tokenizer import PreTrainedTokenizer, load_tokenizer
from dolmen.families import set_fields, unknown
from dolmen.families import special_tokens as special
from dolmen.model import head
from dolmen.model.decoder import Decoder
from dolmen.optim.optimizer import DTYPES
from dolmen.recipes.changed import plain
from dolmen.serving import adapters as multi_lora
from dolmen.serving import engine
from dolmen.serving.adapters import Adapters
from dolmen.serving.config import GenerateConfig
from dolmen.serving.generation import Prompt as Begun
from dolmen.serving.generation import check_text, encode, generate_samples
from dolmen.serving.generation_config import apply_generation_config


@dataclass(frozen=True)
class Model:
    """A decoder with its tokenizer, if it has one that can be read, in this process alone."""

    decoder: Decoder
    tokenizer: PreTrainedTokenizer | None
    source: Source
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """What `load` was told of them."""
    textless: str = ""
    """Why there is no tokenizer, where there is none."""
    adapters: Adapters = field(default_factory=Adapters)
    """Over the decoder, by the names that `load` was told."""

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.source.where

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        seed: int = 0,
        *,
        batch: int = engine.AT_ONCE,
        adapter: str | None | Sequence[str | None] = None,
        **options: Unpack[Generation],
    ) -> Any:
        """What follows the prompt, a `Generated` (of several samples a list of them), and of
        several prompts a list. It has `text`, `tokens`, `logprobs` and `finish_reason`; as a string
        it is the prompt and the text. A prompt is a text, or its token ids. An empty text begins
        where the tokenizer begins one. At most `batch` texts, of any lengths, run at once.
        `adapter` is one of those that `load` was told, or one for each prompt; None: the model
        alone.

        What is unset is as the model's generation_config.json says, and is told; else greedy, of 64
        tokens. Raises ValueError for what is no prompt, for a text where there is no tokenizer, and
        for settings that have no meaning.

            print(model.generate("Once upon a time", temperature=0.8, top_p=0.95, seed=1))
            model.generate(["One day", "Two men"], temperature=1.0, num_samples=4)[1][3].text
            model.generate([1, 9038, 2501], stop="\\n").tokens
        """
        with value_errors():
            asked = generation(self.folder, max_new_tokens, temperature, seed, options)
            return _continued(self, prompt, asked, batch, adapter)

    def logits(self, text: str | Ids) -> Float[torch.Tensor, "tokens vocab"]:
        """What the model expects after each token of `text`, or of the text of these token ids.
        Raises ValueError for a text without tokens, for one where there is no tokenizer, and for
        ids that the vocabulary has not.

            model.logits("Once upon a").argmax(-1)
            model.logits([1, 9038, 2501])
        """
        with value_errors({"prompt": "text"}):
            if isinstance(text, str):
                check_text(text)
                words = self.reader(text)["input_ids"]
                tokens = special.frame_prompt(self.source.model, words) if words else []
            else:
                tokens = self.checked_ids(text)
        if not tokens:
            raise ValueError("the text has no tokens: give at least one")
        with torch.no_grad():
            return engine.run_whole(self.decoder, torch.tensor([tokens]), head.compute_logits)[0]

    @property
    def reader(self) -> PreTrainedTokenizer:
        """The tokenizer. Raises ValueError where there is none."""
        if self.tokenizer is None:
            raise ValueError(f"{self.textless}: give token ids")
        return self.tokenizer

    def checked_ids(self, given: Any) -> list[int]:
        """Token ids as a list. Raises ValueError for what are none of the vocabulary."""
        tokens = plain(given.tolist() if isinstance(given, ARRAYS) else given)
        most = self.decoder.tree.vocab_size
        if not isinstance(tokens, list) or not all(
            type(token) is int and 0 <= token < most for token in tokens
        ):
            raise ValueError(
                f"the prompt is {brief(given)}: it must be a text, or token ids of 0 to "
                f"{most - 1:,}"
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
    """The model of a transformers directory, hub id, run or checkpoint, on the CPU, in `dtype` or
    else in the one that its config.json states. Without a tokenizer it takes token ids and gives
    them. Raises ValueError for what dolmen does not fully understand.

        model = dolmen.load("path/to/model")

    `special_tokens` names tokens that neither config.json nor tokenizer does, of mask, smask,
    gmask, sop, eop, eot, cls and eos: a GLM knows positions by them, texts end at the last ones.

        model = dolmen.load("path/to/glm-10b", special_tokens={"gmask": 50009, "sop": 50006})

    `model` states fields of its config.json, as in `train`, and what that leaves open:

        model = dolmen.load("path/to/baichuan2-13b", model={"head": "normalised"})

    `adapters` lie over it, each a folder that PEFT or `dolmen export --adapters` has written, or a
    run with adapters; `generate` is told which of them reads and writes a text.

        model = dolmen.load("path/to/model", adapters={"fr": "fr-adapter", "law": "runs/law"})
        model.generate(["One day", "Article 1"], adapter=["fr", "law"])
    """
    with value_errors():
        source = open_source(name)
        if model:
            source = open_source(name, set_fields(source.model, model))
        told = special.check_special_ids(special_tokens or {}, source.model)
        tokenizer, textless = _tokenizer(source)
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        known = special.add_special_ids(source.model, told, lambda: vocabulary)
        if known is not source.model:
            source = open_source(name, known)
        if source.tree.blanks is not None:
            source.tree.blanks.check()
        check_whole(source)
        low = multi_lora.open_adapters(_folders(adapters), source)
        unknown.warn(source.model)
        decoder = engine.load_decoder(source, dtype=_dtype(dtype))
        return Model(
            decoder, tokenizer, source, told, textless, multi_lora.place_adapters(low, decoder)
        )


def generate(
    name: str | Path,
    prompt: Prompt,
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
    dtype: str | None = None,
    batch: int = engine.AT_ONCE,
    adapters: Mapping[str, str | Path] | None = None,
    adapter: str | None | Sequence[str | None] = None,
    **options: Unpack[Generation],
) -> Any:
    """`dolmen generate NAME --prompt PROMPT` in this process: what follows the prompt, of several
    prompts a list; as Model.generate. `dolmen.load` keeps a model for more. Raises ValueError on
    bad input.

        dolmen.generate("path/to/model", "Once upon a time", temperature=0.8).text
    """
    with value_errors():
        asked = generation(name, max_new_tokens, temperature, seed, options, dtype)
        for text in several(prompt):
            if not isinstance(text, NUMBERS):
                check_text(text)
        _adapter_of(adapter, len(several(prompt)), _folders(adapters))
        model = load(name, asked.dtype, adapters=adapters)
        return _continued(model, prompt, asked, batch, adapter)


def _tokenizer(source: Source) -> tuple[PreTrainedTokenizer | None, str]:
    """Of a source, or why it has none: its folder has none, or one that only code of its own reads,
    as a family may have that transformers has no class for. Raises ValueError for any other that
    cannot be read.
    """
    if source.tokenizer is None:
        return None, f"{source.where} has no tokenizer"
    try:
        return load_tokenizer(str(source.tokenizer), option=""), ""
    except (ValueError, OSError) as error:
        if source.model.family.in_transformers:
            raise
        return None, message(error)


def _folders(adapters: Mapping[str, str | Path] | None) -> dict[str, str]:
    """Raises ValueError for what are no names and folders."""
    if not isinstance(adapters, Mapping | None):
        raise ValueError(f"adapters is {brief(adapters)}: it must be a dict of names and folders")
    return multi_lora.check_adapters(
        (str(name), str(folder)) for name, folder in (adapters or {}).items()
    )


def _adapter_of(adapter: Any, prompts: int, known: Collection[str]) -> list[str | None]:
    """Of each prompt. Raises ValueError for one that is not known, and for another number."""
    each = list(adapter) if isinstance(adapter, (list, tuple)) else [adapter] * prompts
    if len(each) != prompts:
        raise ValueError(
            f"adapter has {plural(len(each), 'name')} for {plural(prompts, 'prompt')}: give one "
            "for each, or one for all"
        )
    for one in each:
        if not (one is None or isinstance(one, str)):
            raise ValueError(f"adapter is {brief(one)}: it must be a name, or None")
        multi_lora.check_name(one, known)
    return each


def _continued(
    model: Model,
    prompt: Prompt,
    asked: GenerateConfig,
    batch: int,
    adapter: str | None | Sequence[str | None],
) -> Any:
    if not isinstance(plain(batch), int):
        raise ValueError(f"batch is {brief(batch)}: it must be a whole number")
    prompts = several(prompt)
    asked, told = apply_generation_config(asked, model.source.generation_config)
    asked.of_tokens.check()
    for line in told:
        print(line, file=sys.stderr)
    named = _adapter_of(adapter, len(prompts), model.adapters.names)
    begin = [_begun(model, *both) for both in zip(prompts, named, strict=True)]
    ends = special.end_token_ids(model.special_tokens)
    decoder, tokenizer = model.decoder, model.tokenizer
    own = model.source, begin, asked, batch, ends, model.adapters
    found = generate_samples(decoder, tokenizer, *own)
    each = [samples[0] if asked.num_samples == 1 else samples for samples in found]
    return each[0] if len(prompts) == 1 and prompts[0] is prompt else each


def _begun(model: Model, prompt: Any, adapter: str | None) -> Begun:
    """A prompt, and the tokens that it begins with."""
    if isinstance(prompt, NUMBERS):
        tokens = model.checked_ids(prompt)
        return Begun(tokens, tokens, adapter)
    return Begun(prompt, encode(model.reader, prompt, model.source.model), adapter)


def _dtype(asked: torch.dtype | str | None) -> torch.dtype | None:
    """Of torch, or by its name. Raises ValueError for one that weights cannot have."""
    if asked is None or asked in hf.FLOATS:
        return cast("torch.dtype | None", asked)
    if isinstance(asked, str) and asked in DTYPES:
        return DTYPES[asked]
    raise ValueError(f"dtype is {brief(asked)}: {choices(str(asked), DTYPES)}")
