"""Text from a model: load a source, add requests, and step until they have ended.

    model = load_decoder(open_source("path/to/model"))
    with Engine(model, stop=stop_tokens(source)) as engine:
        engine.add(Request([1, 15043], Options(temperature=0.7, max_new_tokens=64), id="row 1"))
        while engine.busy:
            for ended in engine.step().ended:
                print(ended.id, ended.tokens)

    generate(model, [[1, 15043]], max_new_tokens=16) -> [[3186, ...]]       the same, as a function

Every step is one forward (running.py says of what, forward.py makes it), from whose scores one
token is chosen for each text that has none unread (next_tokens.py). All ranks of tp and pp make the
same calls with the same values: they choose the same tokens, and so decide the same. Where one of
them decides what comes and goes, as a server's does, it tells the others between steps
(`agree.once`; docs/generation.md).
"""

import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from dolmen.conversion.hf import stated_dtype
from dolmen.conversion.moments import check_whole
from dolmen.conversion.source import Source, load_weights
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.data.batch import Batch
from dolmen.families import special_tokens
from dolmen.model import alone, build, head
from dolmen.model.decoder import Decoder
from dolmen.parallel import data
from dolmen.parallel import schedule as schedules
from dolmen.parallel.actions import Schedule
from dolmen.parallel.laid_out import Weights
from dolmen.serving.adapters import Adapters, check_name
from dolmen.serving.cache import Memory
from dolmen.serving.forward import Forward
from dolmen.serving.next_tokens import ForwardOutput, SampledToken, broadcast
from dolmen.serving.options import Options
from dolmen.serving.request import (
    Chosen,
    Ended,
    Happened,
    Limits,
    Request,
    check,
    check_int8,
    span_of,
)
from dolmen.serving.running import Row, Running, groups

TOKENS_AT_ONCE = 1 << 12  # of prompts, one forward: bounds activations
AT_ONCE = 256  # prompts


def load_decoder(
    source: Source,
    mesh: Mesh = SINGLE,
    dtype: torch.dtype | None = None,
    schedule: Schedule | None = None,
    weights: Weights = "stated",
) -> Decoder:
    """A source's model on the axes of `mesh`, for inference: in `dtype`, or else that of its
    config.json. `schedule` places its stages; None: there is one. `weights`: int8 are all that it
    holds of its matrices, and engines of it are of them. Raises ValueError or KeyError, before
    anything is built, for what does not fit.
    """
    check_whole(source)
    dtype = dtype or stated_dtype(source.model)
    if weights == "int8":
        check_int8(source.tree, mesh.device.type, sharded=False)
    model = build.place(source.tree, mesh, schedule=schedule, dtype=dtype)
    own = None if schedule is None else [name for name, _ in model.named_parameters()]

    def stream(write: Callable[[str, Tensor], None]) -> None:
        load_weights(source, write, own)

    if weights == "int8":
        alone.load(model, mesh, weights, stream)
    else:
        build.load(build.allocate(model, mesh.device), stream)
    return model.eval()


def load_placed(
    source: Source, mesh: Mesh, dtype: torch.dtype | None, weights: Weights = "stated"
) -> Decoder:
    """`load_decoder`, this rank's stage of it: of `mesh.pp` each rank has one."""
    pp = mesh.pp.size
    schedule = None if pp == 1 else schedules.make("1f1b", pp, pp)
    return load_decoder(source, mesh, dtype, schedule, weights)


def ask(model: Decoder, tokens: Int64[Tensor, "texts length"], end: head.End) -> Any:
    """What `end` makes of whole texts, `tokens` on the host, each as long as the others, read
    without a cache. Raises ValueError where nobody has said which tokens positions follow from.
    """
    device = model.device
    batch = Batch(tokens, tokens).read_by(model.tree).to(device)
    return model(batch.tokens, end, documents=batch.documents, positions=batch.positions)


def stop_tokens(source: Source) -> set[int]:
    """The end-of-text ids that a source names, in generation_config.json or else config.json, and
    the ends among its special tokens.
    """
    ends = special_tokens.ends(special_tokens.ids_of(source.model))
    for said in (source.generation_config, source.model.config):
        ids = said.get("eos_token_id")
        if ids is not None:
            return ends | (set(ids) if isinstance(ids, list) else {ids})
    return ends


class Engine:
    """Texts that a model writes, step by step; requests come and go between steps.

    Within `with` the model is in evaluation mode and keeps no graph; afterwards it is as before.
    One thread alone calls it.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        stop: Collection[int] = (),
        known: Collection[int] | None = None,
        limits: Limits = Limits(),
        mesh: Mesh = SINGLE,
        weights: Weights = "stated",
        adapters: Adapters | None = None,
    ):
        """`stop`: tokens that end every text. `known`: the tokenizer's ids; none that is not one of
        them is chosen. `mesh`: that of the model, where it lies over pp. `weights`: int8 rounds
        those of products, each row by a scale of its own. `adapters`: of the model, of which each
        request may name one (adapters.placed). Raises ValueError for a model that foretells no
        next token, for one whose ranks hold several stages, and where int8 cannot be.
        """
        tree = model.tree
        if tree.both_ways:
            raise ValueError(
                "the model sees both ways: each token knows those behind it, and there is no next "
                "one to foretell; it fills in masked tokens, and cannot generate"
            )
        if len(model.split.parts) > 1:
            raise ValueError(
                f"a rank holds {len(model.split.parts)} stages of the model, and generation takes "
                "one: set --layout.virtual-stages 1"
            )
        if model.alone is not None and model.alone != weights:
            raise ValueError(
                f"the model was opened for --weights {model.alone} alone, and {weights} ones are "
                "asked for: open it again"
            )
        if weights == "int8":
            device = model.device.type
            check_int8(tree, device, sharded=bool(data.units(model)))
        self.model, self.mesh, self.limits = model, mesh, limits
        self._weights: Weights = weights
        self.adapters = adapters or Adapters()
        self._stop = frozenset(stop)
        self._forward = Forward(model, mesh, limits.page, self.adapters)
        self._rows = Running(limits, tree.prefixed, self._forward.cache.table)
        self._never = sorted(set(range(tree.vocab_size)) - set(known)) if known else []
        self._numbers, self._within = itertools.count(), ExitStack()
        self._warned = False

    def __enter__(self) -> "Engine":
        keep = not self.model.training
        self._within.enter_context(data.inference(self.model))
        # a compiled block would be compiled again for every length
        self._within.enter_context(torch.compiler.set_stance("force_eager"))
        self._within.enter_context(_laid_out(self.model, self._weights, keep))
        if self.adapters.names:
            self._within.callback(self.model.stand_beside, {})
            self.model.stand_beside(self.adapters.beside)
        return self

    def __exit__(self, *_: object) -> None:
        self._within.close()

    @property
    def busy(self) -> bool:
        """Whether a text waits or runs."""
        return bool(self._rows.waiting or self._rows.running)

    @property
    def waiting(self) -> int:
        """Samples that wait."""
        return sum(len(row.samples) for row in self._rows.waiting)

    @property
    def running(self) -> int:
        """Samples that run."""
        return sum(len(row.samples) for row in self._rows.running.values())

    @property
    def pages(self) -> int:
        """Pages of the cache that texts have."""
        return self._forward.cache.table.in_use

    @property
    def memory(self) -> Memory:
        """What the cache has held, until now."""
        return self._forward.cache.memory

    def add(self, request: Request) -> int:
        """It will run when its turn has come. -> Its number, by which the engine speaks of it.
        Raises ValueError, with nothing changed, for what the model cannot take.
        """
        model, rows = self.model, self._rows
        check_name(request.adapter, self.adapters.names)
        beyond = check(model.tree, request, self.limits)
        if beyond and not self._warned:
            self._warned = True
            warnings.warn(beyond, stacklevel=2)
        options = replace(request.options, stop=(*self._stop, *request.options.stop))
        request = replace(request, options=options)
        number, text = next(self._numbers), list(request.tokens)
        span = span_of(model.tree, text)
        for samples in rows.split(request.samples, len(text)):
            rows.waiting.append(Row(number, request, samples, span, list(text), len(text)))
        return number

    def cancel(self, number: int, sample: int | None = None) -> list[Ended]:
        """The request ends here, or one sample of it that has begun, and its pages are free at
        once. -> What there was of the samples that had not ended; of a request that is not known
        there are none.
        """
        rows = self._rows.cancel(number, sample)
        return [row.ended(sample, "cancelled") for row in rows for sample in row.samples]

    def step(self) -> Happened:
        """One forward, and what comes of it; nothing where no text waits or runs."""
        self._rows.admit()
        new = self._rows.next()
        if not new:
            return Happened()
        running, tp, pp = self._rows.running, self.model.tp.axis, self.mesh.pp
        outputs = []
        # several fill a pipeline: a stage reads the next while another one reads this
        for some in groups(new, pp.size):
            parts = {key: running[key].part(n) for key, n in some.items()}
            texts, scores = self._forward.read(parts)
            outputs.append(ForwardOutput(parts, [(key, running[key]) for key in texts], scores))
        values = broadcast(outputs, self._never, tp, pp, self.model.device)
        found = [output.parse(values) for output in outputs]
        self._forward.finish()
        for key, n in new.items():
            running[key].read += n
        happened = Happened(read=sum(new.values()))
        for sampled, labelled in found:
            for key, of_prompt in labelled.items():
                running[key].prompt_logprobs += of_prompt
            for key, tokens in sampled.items():
                self._append(key, tokens, happened)
        return happened

    def _append(self, key: int, tokens: list[SampledToken], happened: Happened) -> None:
        """Append the sampled tokens to a sequence, which forks into its samples at the first."""
        rows = self._rows
        if not tokens:
            row = rows.end(key)
            happened.ended.extend(row.ended(sample, "length") for sample in row.samples)
            return
        row = rows.running[key]
        texts = {key: row} | {rows.key(): row.sampled(number) for number in row.samples[1:]}
        row.samples = row.samples[:1]
        for other in list(texts)[1:]:
            self._forward.cache.fork(key, other)
        rows.running |= texts
        for (text, one), chosen in zip(texts.items(), tokens, strict=True):
            self._chosen(text, one, chosen, happened)

    def _chosen(self, key: int, row: Row, choice: SampledToken, happened: Happened) -> None:
        sample = row.samples[0]
        why = (
            row.take(choice.token, choice.logprob, choice.close) if choice.finite else "not finite"
        )
        if choice.finite:
            happened.chosen.append(Chosen(row.number, sample, choice.token, choice.logprob))
        if why is not None:
            happened.ended.append(self._rows.end(key).ended(sample, why))
        elif self.model.tree.read_again(row.length, len(row.text)):
            self._rows.forget(key, row)
            row.length = len(row.text)


@contextmanager
def _laid_out(model: Decoder, weights: Weights, keep: bool) -> Iterator[None]:
    """Weights as products without gradients read them fastest, which takes their memory once or
    twice more; afterwards that is given up, or kept for the next engine. Under ZeRO, where each is
    there for a moment, they stay as they are.
    """
    if not data.units(model):
        model.lay_out(weights)
    try:
        yield
    finally:
        model.at_rest(keep)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Collection[int] = (),
    seed: int = 0,
    on_token: Callable[[int, int], None] | None = None,
    known: Collection[int] | None = None,
    batch: int = AT_ONCE,
    on_memory: Callable[[Memory], None] | None = None,
) -> list[list[int]]:
    """New tokens of each prompt: at most `max_new_tokens`, the last a member of `stop` where it
    stopped at one; with `known`, the tokenizer's ids, none that is not one of them.

    Of a model with a prefix mask the prompt is the prefix, or what its special tokens say is.
    Temperature 0 is greedy. `on_token(prompt index, token)` is called as each token is chosen, and
    `on_memory` at the end with what the cache has held. At most `batch` prompts of any lengths run
    at once, and when one ends the next begins; the random numbers of a prompt follow from (seed,
    its index). A model under ZeRO needs the same call on every rank of dp. Raises ValueError before
    the first forward for settings and prompts the model cannot take, and later for logits that are
    not finite.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: use --max-new-tokens 1 or more")
    if batch < 1:
        raise ValueError(f"batch is {batch}: it must be at least 1")
    options = Options(temperature, top_k, top_p, max_new_tokens=max_new_tokens)
    out: list[list[int]] = [[] for _ in prompts]
    limits = Limits(rows=batch, tokens=TOKENS_AT_ONCE)
    with Engine(model, stop=stop, known=known, limits=limits) as engine:
        for i, prompt in enumerate(prompts):  # numbered alike
            engine.add(Request(prompt, options, id=i, seed=seed))
        while engine.busy:
            happened = engine.step()
            for chosen in happened.chosen:
                out[chosen.number].append(chosen.token)
                if on_token is not None:
                    on_token(chosen.number, chosen.token)
            require_finite(happened.ended)
        if on_memory is not None:
            on_memory(engine.memory)
    return out


def require_finite(ended: Sequence[Ended]) -> None:
    """Raises ValueError that names the first text that has ended because its logits are no
    numbers.
    """
    for one in sorted(ended, key=lambda one: one.number):
        if one.why == "not finite":
            raise ValueError(
                f"the logits of new token {len(one.tokens) + 1} of prompt {one.id} are not finite: "
                "the model has diverged, or needs --dtype float32 (generate), or "
                "`dolmen.load(..., dtype=torch.float32)`"
            )
