"""Dolmen from Python: what the commands do, as functions. `dolmen.load`, `dolmen.train`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dolmen.cli import train as train_verb
from dolmen.cli.errors import BadInput
from dolmen.cli.options import parse_train
from dolmen.convert import hf
from dolmen.data.tokenizer import load_tokenizer
from dolmen.model.decoder import Decoder
from dolmen.serve import engine


@dataclass(frozen=True)
class Model:
    """A decoder with its tokenizer, in this process alone."""

    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase
    folder: Path

    def generate(
        self, prompt: str, max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0
    ) -> str:
        """The prompt and its continuation; greedy at temperature 0."""
        tokens = self.tokenizer(prompt)["input_ids"]
        (new,) = engine.generate(
            self.decoder,
            [tokens],
            max_new_tokens,
            temperature,
            stop=engine.stop_tokens(self.folder),
            seed=seed,
        )
        return prompt + self.tokenizer.decode(new, skip_special_tokens=True)

    def logits(self, text: str) -> torch.Tensor:
        """[tokens, vocab_size]: what the model expects after each token of `text`."""
        with torch.no_grad():
            return self.decoder(torch.tensor([self.tokenizer(text)["input_ids"]]))[0]


def load(name: str | Path, dtype: torch.dtype | None = None) -> Model:
    """The model of a transformers directory or hub id, on the CPU, in `dtype` or else in the one it
    is stored in.

    Raises ValueError or KeyError for a directory that dolmen does not fully understand.
    """
    folder = hf.resolve(name)
    return Model(engine.load(folder, dtype=dtype), load_tokenizer(str(folder)), folder)


def train(recipe: str | Path, **options: Any) -> Path:
    """`dolmen train RECIPE`, with options as keywords and sections as mappings: train("quickstart",
    train={"steps": 50}, layout={"tp": 1}, overwrite=True). Returns the run's folder.

    Starts as many processes as the layout needs; a run of one process is this process. Raises
    ValueError on bad input, KeyboardInterrupt after Ctrl-C (saved first), RuntimeError if another
    process fails, and what is raised in this one.
    """
    argv = [str(recipe), *_words("", options)]
    try:
        code = train_verb.run(argv, guarded=lambda work: work())
    except BadInput as error:
        raise ValueError(str(error)) from None
    except SystemExit as refused:  # by tyro, which has printed why
        raise ValueError(
            f"the options {' '.join(argv)} are refused (exit code {refused.code}), see above"
        ) from None
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise RuntimeError(f"the run ended with exit code {code}")
    return train_verb.folder_of(*parse_train(argv))


def _words(prefix: str, options: Mapping[str, Any]) -> list[str]:
    words = []
    for key, value in options.items():
        name = f"{prefix}{key.replace('_', '-')}"
        if isinstance(value, Mapping):
            words += _words(f"{name}.", value)
        elif value is True:
            words += [f"--{name}"]
        elif value is False:
            words += [f"--{prefix}no-{key.replace('_', '-')}"] if prefix else []
        elif isinstance(value, (list, tuple)):
            words += [f"--{name}", *map(str, value)]
        else:
            words += [f"--{name}={value}"]  # in one word: a value may begin with a dash
    return words
