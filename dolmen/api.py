"""Dolmen from Python: what the commands do, as functions of the same names, with the same checks
and messages. `dolmen.load`, `generate`, `train`, `export`, `verify`, `evaluate`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast, get_type_hints

import torch
from jaxtyping import Float

from dolmen.cli import export as export_verb
from dolmen.cli import train as train_verb
from dolmen.cli.command import read
from dolmen.cli.options import TrainOptions
from dolmen.conversion.source import Source, open_source, tokenizer_folder
from dolmen.core.errors import BadInput, message
from dolmen.core.paths import refuse_empty
from dolmen.core.words import choices, shown
from dolmen.data.config import TextConfig
from dolmen.data.tokenizer import PreTrainedTokenizer, load_tokenizer
from dolmen.evaluation import perplexity
from dolmen.evaluation import verify as comparison
from dolmen.evaluation.compare import Report
from dolmen.families import unknown
from dolmen.model import head
from dolmen.model.decoder import Decoder
from dolmen.optim.precision import DTYPES
from dolmen.serving import engine, sample
from dolmen.serving.prompt import check_text, encode


@contextmanager
def _told() -> Iterator[None]:
    """What the command line tells in a line and with exit code 2 is a ValueError of that line."""
    try:
        yield
    except (BadInput, ValueError, KeyError, OSError) as error:
        raise ValueError(message(error)) from error


@dataclass(frozen=True)
class Model:
    """A decoder with its tokenizer, in this process alone."""

    decoder: Decoder
    tokenizer: PreTrainedTokenizer
    source: Source

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.source.where

    def generate(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        batch: int = engine.AT_ONCE,
    ) -> str | list[str]:
        """The prompt and its continuation, of several prompts a list of them; greedy at temperature
        0. An empty prompt begins where the tokenizer begins a text. At most `batch` prompts, of any
        lengths, run at once. Raises ValueError for what is no text, and for settings that have no
        meaning.

            model.generate("Once upon a time", temperature=0.8, top_p=0.95, seed=1)
        """
        prompts = _several(prompt)
        with _told():
            sample.check_knobs(temperature, top_k, top_p)
            new = engine.generate(
                self.decoder,
                [encode(self.tokenizer, text) for text in prompts],
                max_new_tokens,
                temperature,
                top_k,
                top_p,
                engine.stop_tokens(self.source),
                seed,
                known=self.tokenizer.get_vocab().values(),
                batch=batch,
            )
        texts = [
            text + self.tokenizer.decode(tokens, skip_special_tokens=True)
            for text, tokens in zip(prompts, new, strict=True)
        ]
        return texts if isinstance(prompt, (list, tuple)) else texts[0]

    def logits(self, text: str) -> Float[torch.Tensor, "tokens vocab"]:
        """What the model expects after each token of `text`. Raises ValueError for a text without
        tokens.

            model.logits("Once upon a").argmax(-1)
        """
        check_text(text)
        tokens = self.tokenizer(text)["input_ids"]
        if not tokens:
            raise ValueError("the text has no tokens: give at least one")
        with torch.no_grad():
            return self.decoder(torch.tensor([tokens]), head.logits)[0]


def load(name: str | Path, dtype: torch.dtype | None = None) -> Model:
    """The model of a transformers directory, hub id, run or checkpoint, on the CPU, in `dtype` or
    else in the one that its config.json states. Raises ValueError for what dolmen does not fully
    understand.

        model = dolmen.load("path/to/model")
    """
    with _told():
        source = open_source(name)
        _ = source.specs
        unknown.warn(source.model)
        tokenizer = load_tokenizer(tokenizer_folder(source), option="")
        return Model(engine.load_decoder(source, dtype=dtype), tokenizer, source)


def generate(
    name: str | Path,
    prompt: str | Sequence[str],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    dtype: str | None = None,
    batch: int = engine.AT_ONCE,
) -> str | list[str]:
    """`dolmen generate NAME --prompt PROMPT` in this process: the prompt and its continuation, of
    several prompts a list of them, at most `batch` at once. `dolmen.load` keeps a model for more.
    Raises ValueError on bad input.

        dolmen.generate("path/to/model", "Once upon a time", temperature=0.8)
    """
    with _told():
        sample.check_knobs(temperature, top_k, top_p)
        for text in _several(prompt):
            check_text(text)
        model = load(name, _dtype(dtype))
    return model.generate(
        prompt, max_new_tokens, temperature, seed, top_k=top_k, top_p=top_p, batch=batch
    )


def export(source: str | Path, to: str | Path, dtype: str | None = None) -> Path:
    """`dolmen export SOURCE --to TO`: write a run's newest whole checkpoint, or the checkpoint that
    SOURCE is, as a transformers directory, one tensor in memory at a time; `dtype` float32,
    bfloat16 or float16, unset that of the model the run started from. Returns the folder. Raises
    ValueError on bad input.

        dolmen.export("runs/book", to="model/", dtype="bfloat16")
    """
    with _told():
        _dtype(dtype)
        refuse_empty("to", str(to))
        export_verb.export(source, Path(to), dtype)
    return Path(to)


def verify(folder: str | Path, against: str | Path | None = None, length: int = 64) -> Report:
    """`dolmen verify FOLDER` in this process: dolmen on `folder` beside transformers on `against`
    (unset: the same), on `length` random tokens in float32. `report.ok` says whether all is within
    tolerance, `report.rows` has each difference. Raises ValueError on bad input.

        assert dolmen.verify("path/to/model").ok
    """
    with _told():
        source = open_source(folder)
        other = None if against is None else open_source(against)
        for one in (source, other or source):
            unknown.warn(one.model)
        return comparison.verify(source, other, length=length)


def evaluate(
    source: str | Path,
    path: str | Path | Sequence[str | Path],
    *,
    sequence_length: int | None = None,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    end_of_text: str | None = None,
    document_mask: bool = False,
    text_field: str = "text",
    cache: str | Path | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> perplexity.Evaluation:
    """`dolmen evaluate SOURCE --data.path PATH` in this process, on the CPU: how well the model of
    a transformers directory or hub id predicts a text, over all of it. `path` is what --data.path
    takes, or several; options are those of the command. `progress` shows a bar on stderr. Raises
    ValueError on bad input.

        print(dolmen.evaluate("path/to/model", "book.txt").bits_per_byte)
    """
    paths = [path] if isinstance(path, (str, Path)) else path
    with _told():
        config = TextConfig(
            tuple(map(str, paths)),
            None if tokenizer is None else str(tokenizer),
            end_of_text,
            document_mask,
            text_field,
            None if cache is None else str(cache),
            workers,
        )
        opened = open_source(source)
        text = perplexity.open_text(opened, config, sequence_length, progress)
        unknown.warn(opened.model)
        return perplexity.evaluate(opened, text, dtype=_dtype(dtype), progress=progress)


def train(recipe: str | Path, **options: Any) -> Path:
    """`dolmen train RECIPE`, with options as keywords and sections as mappings. Returns the run's
    folder.

        dolmen.train("quickstart", train={"steps": 50}, layout={"tp": 1}, overwrite=True)

    Starts as many processes as the layout needs; a run of one process is this process. Raises
    ValueError on bad input, KeyboardInterrupt after Ctrl-C (saved first), RuntimeError if another
    process fails, and what is raised in this one.
    """
    argv = [str(recipe), *_words("", options)]
    try:
        asked = read("train", argv)
        code = train_verb.run(asked, argv, guarded=lambda work: work())
    except BadInput as error:
        raise ValueError(str(error)) from None
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise RuntimeError(f"the run ended with exit code {code}")
    return train_verb.folder_of(*asked)


def _several(prompt: str | Sequence[str]) -> list[str]:
    """A list or tuple of prompts, or the one; what is neither, `check_text` refuses."""
    return list(prompt) if isinstance(prompt, (list, tuple)) else [cast(str, prompt)]


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise ValueError(f"dtype is {shown(name)}: {choices(str(name), DTYPES)}")
    return DTYPES[name] if name else None


def _words(prefix: str, options: Mapping[str, Any]) -> list[str]:
    """Options as a command line spells them."""
    words = []
    for key, value in options.items():
        name = f"{prefix}{key.replace('_', '-')}"
        if isinstance(value, Mapping):
            words += _words(f"{name}.", value)
        elif value is True:
            words += [f"--{name}"]
        elif value is False:
            # a flag without a section has no --no-: it is off unless it is said
            words += [] if name in FLAGS else [f"--{prefix}no-{key.replace('_', '-')}"]
        elif isinstance(value, (list, tuple)):
            words += [f"--{name}", *map(str, value)]
        else:
            words += [f"--{name}={value}"]  # in one word: a value may begin with a dash
    return words


HINTS = get_type_hints(TrainOptions)
FLAGS = {field.name for field in fields(TrainOptions) if HINTS[field.name] is bool}
