"""Dolmen from Python: what the commands do, as functions of the same names, with the same checks
and messages. `dolmen.load`, `generate`, `train`, `export`, `convert`, `verify`, `diff`, `evaluate`,
`evaluate_tasks`, `tokenize`, `train_vocabulary`, `merge_vocabularies`, `extend_vocabulary`,
`dryrun`, `plan`, `show`, `parallelize`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast

import numpy as np
import torch
from jaxtyping import Float

from dolmen.comparison import diff as difference
from dolmen.comparison import report as differing
from dolmen.comparison.config import DiffConfig
from dolmen.conversion import convert as conversion
from dolmen.conversion import hf
from dolmen.conversion.config import ConvertConfig, ExportConfig
from dolmen.conversion.source import Source, open_source
from dolmen.core.config import from_dict, option_types
from dolmen.core.errors import BadInput, message
from dolmen.core.keywords import in_python
from dolmen.core.mesh import Mesh
from dolmen.core.paths import expand
from dolmen.core.words import choices, printable, shown
from dolmen.data import indexed_export
from dolmen.data.config import TokenizeConfig
from dolmen.data.tokenizer import PreTrainedTokenizer, load_tokenizer
from dolmen.evaluation import perplexity
from dolmen.evaluation import tasks as harnessed
from dolmen.evaluation import verify as comparison
from dolmen.evaluation.compare import Report
from dolmen.evaluation.config import EvaluateConfig, VerifyConfig
from dolmen.families import families, stated, unknown
from dolmen.families import special_tokens as special
from dolmen.families.start import option_fields
from dolmen.model import head
from dolmen.model.decoder import Decoder
from dolmen.optim.precision import DTYPES
from dolmen.parallel import styles
from dolmen.planning import composed as dry
from dolmen.planning import inference as serving_plan
from dolmen.planning import outputs, search
from dolmen.planning.config import DryrunConfig, DryrunRequest, PlanConfig, PlanRequest
from dolmen.planning.dry_report import Report as Dry
from dolmen.planning.plan import Plan
from dolmen.planning.question import Question
from dolmen.recipes.changed import plain, request
from dolmen.recipes.named import planned
from dolmen.serving import engine
from dolmen.serving.config import GenerateConfig
from dolmen.serving.continued import Prompt as Begun
from dolmen.serving.continued import continued
from dolmen.serving.defaults import resolved
from dolmen.serving.prompt import check_text, encode
from dolmen.serving.text import check_stop
from dolmen.training import job
from dolmen.training.config import RunConfig
from dolmen.training.request import Handling
from dolmen.vocabulary import extend as vocabulary_extend
from dolmen.vocabulary import merge as vocabulary_merge
from dolmen.vocabulary import train as vocabulary_train
from dolmen.vocabulary.config import VocabExtendConfig, VocabMergeConfig, VocabTrainConfig
from dolmen.watching import page
from dolmen.watching.config import ShowConfig

T = TypeVar(
    "T",
    GenerateConfig,
    EvaluateConfig,
    VerifyConfig,
    DiffConfig,
    ExportConfig,
    ConvertConfig,
    TokenizeConfig,
    VocabTrainConfig,
    VocabMergeConfig,
    VocabExtendConfig,
    DryrunConfig,
    PlanConfig,
    ShowConfig,
)


@contextmanager
def _told(own: Mapping[str, str] | None = None) -> Iterator[None]:
    """What the command line tells in a line and with exit code 2 is a ValueError of that line,
    which names the keywords of Python: those of `own`, and of all functions.
    """
    try:
        yield
    except (BadInput, ValueError, KeyError, OSError) as error:
        raise ValueError(_in_python(message(error), own or {})) from error


def _in_python(text: str, own: Mapping[str, str]) -> str:
    options = _options()
    keywords = {**{name: name for name in options}, **own}
    return in_python(printable(text), keywords, [n for n, kind in options.items() if kind is bool])


@cache
def _options() -> dict[str, Any]:
    """Every option of a command, as Python spells it -> its type; of a model's none."""
    known: dict[str, Any] = {"model.model_type": str}
    for one in families().values():
        known |= {f"model.{name}": None for name in option_fields(one)}
    exchanged = (ExportConfig, ConvertConfig, TokenizeConfig, VerifyConfig, DiffConfig)
    vocabulary = (VocabTrainConfig, VocabMergeConfig, VocabExtendConfig)
    asked = (GenerateConfig, EvaluateConfig, DryrunConfig)
    for cls in (Handling, RunConfig, *exchanged, *vocabulary, *asked):
        known |= option_types(cls)
    return known


def _asked(cls: type[T], **said: Any) -> T:
    """What a command would take in words. Raises ValueError for what is of another type."""
    return from_dict(cls, {name: plain(value) for name, value in said.items()})


ARRAYS = (torch.Tensor, np.ndarray)
NUMBERS = (list, tuple, *ARRAYS)  # that token ids come in
Ids = Sequence[int] | torch.Tensor | np.ndarray
Prompt = str | Ids | Sequence[str] | Sequence[Ids]


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
        **options: Unpack[Generation],
    ) -> Any:
        """What follows the prompt, a `Generated` (of several samples a list of them), and of
        several prompts a list. It has `text`, `tokens`, `logprobs` and `why` it ended, and is, as a
        string, the prompt and the text. A prompt is a text, or its token ids. An empty text begins
        where the tokenizer begins one. At most `batch` texts, of any lengths, run at once.

        What is unset is as the model's generation_config.json says, and is told; else greedy, of 64
        tokens. Raises ValueError for what is no prompt, for a text where there is no tokenizer, and
        for settings that have no meaning.

            print(model.generate("Once upon a time", temperature=0.8, top_p=0.95, seed=1))
            model.generate(["One day", "Two men"], temperature=1.0, num_samples=4)[1][3].text
            model.generate([1, 9038, 2501], stop="\n").tokens
        """
        with _told():
            asked = _generation(self.folder, max_new_tokens, temperature, seed, options)
            return _continued(self, prompt, asked, batch)

    def logits(self, text: str | Ids) -> Float[torch.Tensor, "tokens vocab"]:
        """What the model expects after each token of `text`, or of the text of these token ids.
        Raises ValueError for a text without tokens, for one where there is no tokenizer, and for
        ids that the vocabulary has not.

            model.logits("Once upon a").argmax(-1)
            model.logits([1, 9038, 2501])
        """
        with _told({"prompt": "text"}):
            if isinstance(text, str):
                check_text(text)
                words = self.reader(text)["input_ids"]
                tokens = special.framed(self.source.model, words) if words else []
            else:
                tokens = self.checked_ids(text)
        if not tokens:
            raise ValueError("the text has no tokens: give at least one")
        with torch.no_grad():
            return engine.ask(self.decoder, torch.tensor([tokens]), head.logits)[0]

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
                f"the prompt is {shown(given)}: it must be a text, or token ids of 0 to "
                f"{most - 1:,}"
            )
        return tokens


def load(
    name: str | Path,
    dtype: torch.dtype | str | None = None,
    *,
    special_tokens: Mapping[str, int] | None = None,
    model: Mapping[str, Any] | None = None,
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
    """
    with _told():
        source = open_source(name)
        if model:
            source = open_source(name, stated(source.model, model))
        told = special.check(special_tokens or {}, source.model)
        tokenizer, textless = _tokenizer(source)
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        known = special.with_ids(source.model, told, lambda: vocabulary)
        if known is not source.model:
            source = open_source(name, known)
        if source.tree.blanks is not None:
            source.tree.blanks.check()
        _ = source.specs
        unknown.warn(source.model)
        decoder = engine.load_decoder(source, dtype=_dtype(dtype))
        return Model(decoder, tokenizer, source, told, textless)


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
        if source.model.family.native:
            raise
        return None, message(error)


def generate(
    name: str | Path,
    prompt: Prompt,
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
    dtype: str | None = None,
    batch: int = engine.AT_ONCE,
    **options: Unpack[Generation],
) -> Any:
    """`dolmen generate NAME --prompt PROMPT` in this process: what follows the prompt, of several
    prompts a list; as Model.generate. `dolmen.load` keeps a model for more. Raises ValueError on
    bad input.

        dolmen.generate("path/to/model", "Once upon a time", temperature=0.8).text
    """
    with _told():
        asked = _generation(name, max_new_tokens, temperature, seed, options, dtype)
        for text in _several(prompt):
            if not isinstance(text, NUMBERS):
                check_text(text)
        return _continued(load(name, asked.dtype), prompt, asked, batch)


def export(source: str | Path, to: str | Path, dtype: str | None = None) -> Path:
    """`dolmen export SOURCE --to TO`: write a run's newest whole checkpoint, or the checkpoint or
    model that SOURCE is, as a transformers directory, one tensor in memory at a time; `dtype`
    float32, bfloat16 or float16, unset that of the model the run started from. Returns the folder.
    Raises ValueError on bad input.

        dolmen.export("runs/book", to="model/", dtype="bfloat16")
    """
    with _told():
        asked = _asked(ExportConfig, source=source, to=to, dtype=dtype)
        conversion.export_model(asked.source, Path(asked.to), asked.dtype)
    return Path(to)


def convert(
    source: str | Path,
    to: str | Path,
    *,
    format: str = "hf",
    tp: int = 1,
    pp: int = 1,
    virtual_stages: int = 1,
    ep: int = 1,
    spec: str | None = None,
    dtype: str | None = None,
    vocab_size: int | None = None,
    processes: int | None = None,
    progress: bool = True,
) -> Path:
    """`dolmen convert SOURCE TO --to FORMAT`: a model of any format that dolmen reads, in one that
    it writes (hf, megatron, megatron-core, torch-dist), read back and compared, tensors and logits,
    by one process or by several that are started for it (unset: by its size). `progress` shows a
    bar on stderr. Returns the folder. Raises ValueError on bad input, RuntimeError where what was
    written is another model, or one of several processes died: nothing is left of it.

        dolmen.convert("runs/book", to="ranks/", format="megatron-core", tp=2, pp=2)
    """
    with _told({"to": "format", "destination": "to"}):
        asked = _asked(
            ConvertConfig,
            source=source,
            destination=to,
            to="hf" if format == "transformers" else format,
            tp=tp,
            pp=pp,
            virtual_stages=virtual_stages,
            ep=ep,
            spec=spec,
            dtype=dtype,
            vocab_size=vocab_size,
            processes=processes,
        )
        conversion.convert(asked, progress)
    return Path(to)


def verify(folder: str | Path, against: str | Path | None = None, length: int = 64) -> Report:
    """`dolmen verify FOLDER` in this process: dolmen on `folder` beside transformers on `against`
    (unset: the same), on `length` random tokens in float32. `report.ok` says whether all is within
    tolerance, `report.rows` has each difference. Raises ValueError on bad input.

        assert dolmen.verify("path/to/model").ok
    """
    with _told():
        asked = _asked(VerifyConfig, folder=folder, against=against, length=length)
        source = open_source(asked.folder)
        other = None if asked.against is None else open_source(asked.against)
        for one in (source, other or source):
            unknown.warn(one.model)
        return comparison.verify(source, other, length=asked.length)


def diff(
    first: str | Path,
    second: str | Path = difference.THEIRS,
    *,
    a: Mapping[str, Any] | None = None,
    b: Mapping[str, Any] | None = None,
    until: str = "update",
    length: int = 64,
    optimizer: Mapping[str, Any] | None = None,
    device: str = "auto",
) -> differing.Report:
    """`dolmen diff FIRST SECOND`: the first tensor in which two programs of one model part, by
    default dolmen and transformers. `a` and `b` say how each side is computed, `optimizer` what the
    update is, in mappings of the command's options. `report.ok` says whether they are the same,
    `report.parting` where they part, `print(report)` both in words. Raises ValueError on bad input,
    RuntimeError if a process that it starts for a layout fails.

        print(dolmen.diff("path/to/model", a={"layout": {"tp": 2}, "dtype": "bfloat16"}))
    """
    with _told():
        asked = _asked(
            DiffConfig,
            first=first,
            second=second,
            a=a or {},
            b=b or {},
            until=until,
            length=length,
            optimizer=optimizer or {},
            device=device,
        )
        return difference.diff(asked)


def evaluate(
    source: str | Path,
    path: str | Path | Sequence[str | Path],
    *,
    window: int | None = None,
    stride: int | None = None,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    end_of_text: str | None = None,
    text_field: str = "text",
    cache: str | Path | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> perplexity.Evaluation:
    """`dolmen evaluate SOURCE --data.path PATH` in this process, on the CPU: how well a model (a
    transformers directory, hub id, run or checkpoint) foretells a text, over all of it. `path` is
    what --data.path takes, or several; options are those of the command. `progress` shows a bar on
    stderr. Raises ValueError on bad input.

        print(dolmen.evaluate("path/to/model", "book.txt").bits_per_byte)
    """
    data = {
        "path": path,
        "tokenizer": tokenizer,
        "end_of_text": end_of_text,
        "text_field": text_field,
        "cache": cache,
        "workers": workers,
    }
    with _told({f"data.{name}": name for name in data}):
        asked = _asked(
            EvaluateConfig,
            source=source,
            window=window,
            stride=stride,
            dtype=dtype,
            data={name: plain(value) for name, value in data.items()},
        )
        text = perplexity.prepared(asked, progress)
        unknown.warn(open_source(asked.source).model)
        return perplexity.measured(asked, text, progress=progress)


def evaluate_tasks(
    source: str | Path,
    tasks: str | Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: float | None = None,
    apply_chat_template: bool = False,
    tasks_path: str | Path | None = None,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
) -> Mapping[str, Mapping[str, float]]:
    """`dolmen evaluate SOURCE --tasks TASKS` in this process, on the CPU: task -> metric, as
    lm_eval names both -> number. Options are those of the command. Raises ValueError on bad input,
    and where lm_eval is not installed.

        dolmen.evaluate_tasks("path/to/model", "arc_easy,piqa")["piqa"]["acc,none"]
    """
    with _told({"data.tokenizer": "tokenizer"}):
        names = tasks if isinstance(tasks, str) else ",".join(tasks)
        asked = _asked(
            EvaluateConfig,
            source=source,
            tasks=names,
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=apply_chat_template,
            tasks_path=tasks_path,
            dtype=dtype,
            data={"tokenizer": plain(tokenizer)},
        )
        harnessed.check(asked)
        unknown.warn(open_source(asked.source).model)
        found = perplexity.load(asked)
        return harnessed.scores(found, perplexity.tokenizer_of(asked), asked)


def tokenize(
    path: str | Path | Sequence[str | Path],
    to: str | Path,
    *,
    tokenizer: str | Path | None = None,
    end_of_text: str | None = None,
    text_field: str = "text",
    cache: str | Path | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> Path:
    """`dolmen tokenize --data.path PATH --to TO` in this process: text as a data set of Megatron,
    TO.bin and TO.idx. `path` is what --data.path takes, or several. Returns the .bin. Raises
    ValueError on bad input.

        dolmen.tokenize("notes/", to="corpus", tokenizer="path/to/model")
    """
    data = {
        "path": path,
        "tokenizer": tokenizer,
        "end_of_text": end_of_text,
        "text_field": text_field,
        "cache": cache,
        "workers": workers,
    }
    with _told({f"data.{name}": name for name in data}):
        plainly = {name: plain(value) for name, value in data.items()}
        return indexed_export.tokenize(_asked(TokenizeConfig, to=to, data=plainly), progress).file


def train_vocabulary(
    path: str | Path | Sequence[str | Path],
    size: int,
    to: str | Path,
    *,
    kind: str = "bpe",
    text_field: str = "text",
    max_bytes: int = VocabTrainConfig.max_bytes,
    seed: int = 0,
    progress: bool = True,
) -> vocabulary_train.Trained:
    """`dolmen vocab train --data.path PATH --size SIZE --kind KIND --to TO`: a vocabulary of kind
    unigram or bpe (of sentencepiece) or byte-bpe, learned from text, as a folder that transformers
    opens. `path` is what --data.path takes, or several. Raises ValueError on bad input.

        dolmen.train_vocabulary("zh/", 20000, "zh-tokens", kind="bpe")
    """
    data = {"path": path, "text_field": text_field}
    with _told({f"data.{name}": name for name in data}):
        asked = _asked(
            VocabTrainConfig,
            size=size,
            kind=kind,
            to=to,
            data={name: plain(value) for name, value in data.items()},
            max_bytes=max_bytes,
            seed=seed,
        )
        return vocabulary_train.train(asked, progress)


def merge_vocabularies(
    base: str | Path,
    new: str | Path,
    to: str | Path,
    *,
    path: str | Path | Sequence[str | Path] = (),
    text_field: str = "text",
    progress: bool = True,
) -> vocabulary_merge.Merged:
    """`dolmen vocab merge BASE NEW --to TO`: the tokenizer `base` with the tokens of `new` behind
    its own. Of held-out text at `path` characters and bytes per token are told. Raises ValueError
    on bad input.

        dolmen.merge_vocabularies("path/to/model", "zh-tokens", "merged").added
    """
    data = {"path": path, "text_field": text_field}
    with _told({f"data.{name}": name for name in data}):
        plainly = {name: plain(value) for name, value in data.items()}
        asked = _asked(VocabMergeConfig, base=base, new=new, to=to, data=plainly)
        return vocabulary_merge.merge(asked, progress)


def extend_vocabulary(
    model: str | Path,
    tokenizer: str | Path,
    to: str | Path,
    *,
    init: str = "mean",
    path: str | Path | Sequence[str | Path] = (),
    text_field: str = "text",
    window: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> vocabulary_extend.Extended:
    """`dolmen vocab extend MODEL --tokenizer TOKENIZER --to TO`: the model with rows for the new
    tokens of a merged tokenizer, as a transformers directory. Of held-out text at `path` the loss
    per byte is told, before and after. Raises ValueError on bad input.

        dolmen.extend_vocabulary("path/to/model", "merged", "extended", init="mean")
    """
    data = {"path": path, "text_field": text_field}
    with _told({f"data.{name}": name for name in data}):
        asked = _asked(
            VocabExtendConfig,
            model=model,
            tokenizer=tokenizer,
            to=to,
            init=init,
            seed=seed,
            data={name: plain(value) for name, value in data.items()},
            window=window,
        )
        return vocabulary_extend.extend(asked, progress)


def train(recipe: str | PathLike | RunConfig, **changes: Any) -> Path:
    """Train a recipe, the run of a YAML file or a RunConfig, with `changes`: options of `dolmen
    train` as keywords, those of a section in a mapping. Returns the run's folder.

        dolmen.train("quickstart", train={"steps": 50}, layout={"tp": 1}, overwrite=True)

    Starts as many processes as the layout needs; a run of one process is this process. Raises
    ValueError on bad input, KeyboardInterrupt after Ctrl-C and SystemExit after SIGTERM (saved
    first), RuntimeError if another process fails, and what is raised in this one.
    """
    with _told():
        asked = request(recipe, changes)
    try:
        code = job.run(asked)
    except BadInput as error:
        raise ValueError(_in_python(str(error), {})) from None
    if code == 130:
        raise KeyboardInterrupt
    if code == 143:
        raise SystemExit(code)
    if code:
        raise RuntimeError(f"the run ended with exit code {code}")
    return asked.out


def show(*runs: str | PathLike, out: str | PathLike = "show.html") -> Path:
    """`dolmen show RUN ...`: the page of these runs, in the file `out`, which is returned. Raises
    ValueError for a folder that holds no run, and a file that is no such page.

        dolmen.show("runs/one", "runs/two", out="both.html")
    """
    with _told({"out": "out"}):
        asked = _asked(ShowConfig, runs=[str(one) for one in runs], out=out)
        return page.write_page([expand(name) for name in asked.runs], Path(asked.out))


def dryrun(
    recipe: str | PathLike | RunConfig,
    *,
    ranks: str | Sequence[int] = "first,middle,last",
    device: str = "h100",
    exact: bool = False,
    composed: bool = False,
    max_load: float = 1.0,
    progress: bool = True,
    **changes: Any,
) -> Dry:
    """`dolmen dryrun RECIPE`: a step of a recipe, the run of a YAML file or a RunConfig with
    `changes` as in `train`, run as some `ranks` of its layout on tensors without values, with the
    kernels of `device`; `composed`: of a few layers, which are run once and kept. `report.ledgers`
    has every operation of each rank, `report.as_dict()` what --json writes, `report.table()` both
    in words. Raises ValueError on bad input, and for a step that would crash.

        report = dolmen.dryrun("gpt3-175b", layout={"tp": 8, "pp": 16, "dp": 8}, ranks=[0, 1023])
        report.ledgers[0].peak
    """
    with _told():
        named = ranks if isinstance(ranks, str) else ",".join(str(plain(one)) for one in ranks)
        how = {"device": device, "exact": exact, "composed": composed, "max_load": max_load}
        asked = _asked(DryrunConfig, ranks=named, **how)
        return dry.report(DryrunRequest(request(recipe, changes).config, asked), progress)


def plan(
    model: str | PathLike | RunConfig,
    cluster: str | PathLike,
    *,
    layout: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    top: int = 10,
    tokens: float | None = None,
    rent: float = 0.0,
    node_price: float = 0.0,
    years: float = 4.0,
    kilowatt_hour: float = 0.0,
    as_recipe: str | PathLike | None = None,
    dryrun: bool = True,
    progress: bool = True,
) -> Plan:
    """`dolmen plan MODEL --cluster CLUSTER`: the fastest layouts of a model (a recipe, a YAML file,
    a folder with a config.json, or a RunConfig) on a cluster (NAME, NAME:NODES or a YAML file).
    `layout` gives parts of the layout, `train` the batch, the length, the microbatch and the dtype.
    The answer is a frozen value: `ranked` has the layouts, each with `estimate` (seconds, low,
    high, parts), `memory` of each stage, `mfu`, `bound` and `changes`; `dry` what a dry run of the
    first of them counted beside the closed forms, unless `dryrun` is False. Raises ValueError on
    bad input, and where nothing fits.

        found = dolmen.plan("gpt-1t", "dgx-a100:384", layout={"tp": 8})
        found.ranked[0].layout, found.ranked[0].estimate.seconds
    """
    with _told():
        asked = _asked(
            PlanConfig,
            cluster=cluster,
            layout=layout or {},
            train=train or {},
            top=top,
            tokens=tokens,
            rent=rent,
            node_price=node_price,
            years=years,
            kilowatt_hour=kilowatt_hour,
            as_recipe=as_recipe,
            dryrun=dryrun,
        )
        outputs.refuse(asked)
        question = Question.of(_planned(model, asked))
        found = search.answer(question, asked, progress)
        if asked.as_recipe is not None:
            outputs.write_recipe(question, found, Path(asked.as_recipe))
        return found


def plan_inference(
    model: str | PathLike | RunConfig,
    cluster: str | PathLike,
    *,
    batch: int = 1,
    length: int | None = None,
    tp: int | None = None,
    dtype: str | None = None,
) -> serving_plan.Inference:
    """`dolmen plan MODEL --cluster CLUSTER --inference`: what weights and cache take, and how fast
    `batch` texts of `length` tokens go on, for each tp within a node. Raises ValueError on bad
    input.

        dolmen.plan_inference("llama-70b", "hgx-h100:1", batch=32, length=8192).rows[-1].seconds
    """
    with _told({"layout.tp": "tp"}):
        asked = _asked(
            PlanConfig,
            cluster=cluster,
            inference=True,
            batch=batch,
            length=length,
            layout={} if tp is None else {"tp": tp},
            train={} if dtype is None else {"dtype": dtype},
        )
        question = Question.of(_planned(model, asked))
        return serving_plan.inference(question, asked.batch, asked.length)


def _planned(model: str | PathLike | RunConfig, asked: PlanConfig) -> PlanRequest:
    if isinstance(model, RunConfig):
        return PlanRequest(model.name, model, asked)
    name = plain(model)
    if not isinstance(name, str):
        raise ValueError(
            f"the model is {shown(model)}: it must be a recipe, a YAML file, a folder with a "
            "config.json or a RunConfig"
        )
    return PlanRequest(name, planned(name), asked)


def _generation(
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
            raise ValueError(f"there is no option {shown(name)}: {choices(name, known)}")
    if isinstance(said.get("stop"), str):
        said["stop"] = (said["stop"],)
    bias = said.get("logit_bias")
    if isinstance(bias, Mapping):
        said["logit_bias"] = ",".join(f"{token}:{value}" for token, value in bias.items())
    asked = _asked(
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


def _continued(model: Model, prompt: Prompt, asked: GenerateConfig, batch: int) -> Any:
    if not isinstance(plain(batch), int):
        raise ValueError(f"batch is {shown(batch)}: it must be a whole number")
    prompts = _several(prompt)
    asked, told = resolved(asked, model.source.generation_config)
    asked.of_tokens.check()
    for line in told:
        print(line, file=sys.stderr)
    begin = [_begun(model, one) for one in prompts]
    ends = special.ends(model.special_tokens)
    decoder, tokenizer = model.decoder, model.tokenizer
    found = continued(decoder, tokenizer, model.source, begin, asked, batch, ends)
    each = [samples[0] if asked.num_samples == 1 else samples for samples in found]
    return each[0] if len(prompts) == 1 and prompts[0] is prompt else each


def parallelize(
    module: torch.nn.Module,
    plan: Mapping[str, styles.Style],
    mesh: Mesh,
    *,
    zero: int = 0,
) -> torch.nn.Module:
    """Any module of torch, in place, split over the axis tp of `mesh`, and over dp as stage `zero`
    of ZeRO. `plan` names its parts, patterns too, and how each is split: columns or rows of a
    linear layer, a norm by the tokens of a sequence, an embedding or a head by its vocabulary.
    Every rank has the same values before, and the same answers after. Gradients are summed over dp,
    so a loss is divided by the count of the whole batch. Raises ValueError for what cannot be split
    so.

        mesh = Layout(tp=2).mesh(torch.device("cpu"))
        model = dolmen.parallelize(ToyModel(), {"net1": "columns", "net2": "rows"}, mesh)

    See examples/toymodel.py and docs/parallelize.md.
    """
    return styles.parallelize(module, plan, mesh, zero)


def _begun(model: Model, prompt: Any) -> Begun:
    """A prompt, and the tokens that it begins with."""
    if isinstance(prompt, NUMBERS):
        tokens = model.checked_ids(prompt)
        return Begun(tokens, tokens)
    return Begun(prompt, encode(model.reader, prompt, model.source.model))


def _several(prompt: Any) -> list[Any]:
    """A list or tuple of prompts, or the one: a list of numbers is the tokens of one. What is no
    prompt, `check_text` refuses.
    """
    if isinstance(prompt, (list, tuple)) and not any(isinstance(one, int) for one in prompt):
        return list(prompt)
    return [prompt]


def _dtype(asked: torch.dtype | str | None) -> torch.dtype | None:
    """Of torch, or by its name. Raises ValueError for one that weights cannot have."""
    if asked is None or asked in hf.FLOATS:
        return cast("torch.dtype | None", asked)
    if isinstance(asked, str) and asked in DTYPES:
        return DTYPES[asked]
    raise ValueError(f"dtype is {shown(asked)}: {choices(str(asked), DTYPES)}")
