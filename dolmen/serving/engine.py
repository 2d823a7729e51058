"""Text from a model: load a source, add requests, and step until they have ended.

    model = load_decoder(open_source("path/to/model"))
    with Engine(model, stop=stop_tokens(source)) as engine:
        params = SamplingParams(temperature=0.7, max_new_tokens=64)
        engine.add(Request([1, 15043], params, id="row 1"))
        while engine.busy:
            for sequence in engine.step().finished:
                print(sequence.id, sequence.tokens)

    generate(model, [[1, 15043]], max_new_tokens=16) -> [[3186, ...]]       the same, as a function

Every step is one forward (scheduler.py decides of which tokens, model_runner.py computes it), from
whose logits the next token of each sequence that has been read is sampled (sampler.py). With a
proposer the next tokens of each sequence are drafted before, and the forward verifies them
(speculation.py). All ranks of tp and pp make the same calls with the same values, sample the same
tokens, and so schedule the same. Where one rank decides which requests come and go, as a server's
does, it informs the others between steps (`consensus.run_on_rank_zero`;
docs/how-to/generation.md).
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
from dolmen.conversion.source import ModelSource, load_weights
from dolmen.conversion.weights import check_whole
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.data.batch import Batch
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.families import special_tokens
from dolmen.model import build, head
from dolmen.model.decoder import Decoder
from dolmen.model.spec import ModelSpec, PositionSpan
from dolmen.optim.optimizer import DTYPES
from dolmen.parallel import data
from dolmen.parallel.inference_linear import Weights
from dolmen.parallel.schedule import Schedule
from dolmen.parallel.simulation import make_schedule
from dolmen.serving import adapters as multi_lora
from dolmen.serving.adapters import Adapters, check_name
from dolmen.serving.config import ChatConfig, GenerateConfig, ServeConfig, SpeculativeConfig
from dolmen.serving.kv_cache import CacheUsage
from dolmen.serving.model_runner import ModelRunner
from dolmen.serving.request import (
    FinishedSequence,
    Limits,
    NewToken,
    Request,
    SamplingParams,
    StepOutput,
    check,
    check_compile,
    check_int8,
    span_of,
)
from dolmen.serving.sampler import ForwardOutput, SampledToken, broadcast
from dolmen.serving.scheduler import Scheduler, SequenceGroup, split_forwards
from dolmen.serving.speculation import (
    Acceptance,
    DraftModel,
    NgramProposer,
    Proposer,
    check_draft,
)

TOKENS_AT_ONCE = 1 << 12  # tokens of a forward: bounds activations
AT_ONCE = 256  # sequences of a forward


def load_decoder(
    source: ModelSource,
    mesh: Mesh = SINGLE,
    dtype: torch.dtype | None = None,
    schedule: Schedule | None = None,
    weights: Weights = "stated",
) -> Decoder:
    """Load a model for inference, split over `mesh`, in `dtype` or else that of its config.json,
    and return it in evaluation mode. `schedule` places the layers on pipeline stages, and this rank
    loads only its own; None: no pipeline. `weights`: with int8 the model holds only quantized
    matrices, and serves engines of int8 alone. Raises ValueError or KeyError, before anything is
    built, for weights that are missing or do not fit.
    """
    # refuse a checkpoint with missing tensors before memory is allocated
    check_whole(source)
    dtype = dtype or stated_dtype(source.model)
    if weights == "int8":
        check_int8(source.spec, mesh.device.type, sharded=False)
    model = build.place(source.spec, mesh, schedule=schedule, dtype=dtype)
    parameter_names = None if schedule is None else [name for name, _ in model.named_parameters()]

    def stream(write: Callable[[str, Tensor], None]) -> None:
        """Call `write(name, tensor)` for each weight that this rank needs, one after the other."""
        load_weights(source, write, parameter_names)

    if weights == "int8":
        build.load_inference_weights(model, mesh, weights, stream)
    else:
        build.load(build.allocate(model, mesh.device), stream)
    return model.eval()


def load_placed(
    source: ModelSource, mesh: Mesh, dtype: torch.dtype | None, weights: Weights = "stated"
) -> Decoder:
    """Load the part of a model that this rank of `mesh` holds, its tp shard of one pipeline stage,
    for inference, in `dtype` or else that of its config.json: layers are split evenly over pp.
    `weights`: with int8 the model holds only quantized matrices. Raises ValueError or KeyError,
    before anything is built, for weights that are missing or do not fit.
    """
    pp = mesh.pp.size
    schedule = None if pp == 1 else make_schedule("1f1b", pp, pp)
    return load_decoder(source, mesh, dtype, schedule, weights)


@contextmanager
def open_engine(
    config: GenerateConfig | ChatConfig | ServeConfig,
    source: ModelSource,
    tokenizer: PreTrainedTokenizer,
    mesh: Mesh,
    limits: Limits | None = None,
    adapters: Sequence[str] = (),
    draft: ModelSource | None = None,
) -> Iterator["Engine"]:
    """Load this rank's part of a model and of its LoRA adapters (NAME=FOLDER), and the `draft`
    model of --speculative.method draft, with the dtype and weights of the options, and yield an
    engine over them. Raises ValueError.
    """
    dtype = DTYPES[config.dtype] if config.dtype else None
    model = load_placed(source, mesh, dtype, config.weights)
    low_rank = multi_lora.open_adapters(multi_lora.parse_adapters(adapters), source, mesh)
    limits = limits or Limits()
    draft_model = load_draft(draft, source.spec, mesh, dtype, config.weights)
    proposer = build_proposer(config.speculative, draft_model, mesh, config.weights, limits)
    with Engine(
        model,
        stop=stop_tokens(source),
        known=tokenizer.get_vocab().values(),
        limits=limits,
        mesh=mesh,
        weights=config.weights,
        adapters=multi_lora.place_adapters(low_rank, model, mesh),
        proposer=proposer,
        compile=config.compile,
    ) as engine:
        yield engine


def load_draft(
    draft: ModelSource | None,
    target: ModelSpec,
    mesh: Mesh = SINGLE,
    dtype: torch.dtype | None = None,
    weights: Weights = "stated",
) -> Decoder | None:
    """Load the model of --speculative.method draft whole on this rank, in `dtype` or that of its
    config.json; None if there is none. Raises ValueError where it cannot draft for a model of spec
    `target`.
    """
    if draft is None:
        return None
    check_draft(draft.spec, target)
    return load_decoder(draft, replace(SINGLE, device=mesh.device), dtype, weights=weights)


def build_proposer(
    config: SpeculativeConfig,
    draft: Decoder | None,
    mesh: Mesh = SINGLE,
    weights: Weights = "stated",
    limits: Limits = Limits(),
) -> Proposer | None:
    """Return the proposer of drafts for a model on `mesh`, with the `draft` model of `load_draft`;
    None without --speculative.method.
    """
    if config.method is None:
        return None
    if config.method == "ngram":
        return NgramProposer(config)
    assert draft is not None, "the options name a draft model"
    return DraftModel(config, draft, mesh, weights, limits)


def run_whole(
    model: Decoder, tokens: Int64[Tensor, "sequences length"], end: head.HeadFunction
) -> Any:
    """Run sequences of equal length (`tokens`, on the host) through the model without a KV cache,
    and return the result of the head function `end`. Raises ValueError where the special tokens
    that decide positions are not known.
    """
    device = model.device
    batch = Batch(tokens, tokens).read_by(model.spec).to(device)
    return model(batch.tokens, end, documents=batch.documents, positions=batch.positions)


def stop_tokens(source: ModelSource) -> set[int]:
    """Return the EOS token ids of a source: its special tokens, and eos_token_id of
    generation_config.json or, if that has none, of config.json.
    """
    ends = special_tokens.end_token_ids(special_tokens.ids_of(source.model))
    for config in (source.generation_config, source.model.config):
        ids = config.get("eos_token_id")
        if ids is not None:
            return ends | (set(ids) if isinstance(ids, list) else {ids})
    return ends


class Engine:
    """Continuous batching over one model: requests come and go between steps.

    Within `with` the model is in evaluation mode and keeps no graph; afterwards it is as before.
    Only one thread may call it.
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
        proposer: Proposer | None = None,
        compile: bool = False,
    ):
        """Check that the model can generate; nothing is allocated yet.

        `stop`: EOS tokens of every sequence. `known`: the tokenizer's ids; no other is sampled.
        `mesh`: that of the model, where it is split over pp. `weights`: int8 quantizes matrices,
        with a scale per row. `adapters`: LoRA adapters that requests may name
        (`adapters.place_adapters`). `proposer`: drafts tokens (speculative decoding); None: no
        drafts. `compile`: compile decode steps. Raises ValueError for a bidirectional model, for
        several stages on a rank, and where int8 or compiled steps are impossible.
        """
        spec = model.spec
        if spec.both_ways:
            raise ValueError(
                "bidirectional models (encoders) cannot generate: they predict masked tokens, not "
                "the next one"
            )
        if len(model.split.parts) > 1:
            raise ValueError(
                f"a rank has {len(model.split.parts)} stages of the model, but generation "
                "supports one: set --layout.virtual-stages 1"
            )
        if model.packed_only is not None and model.packed_only != weights:
            raise ValueError(
                f"the model was loaded for --weights {model.packed_only} only, not {weights}: load "
                "it again"
            )
        if weights == "int8":
            device = model.device.type
            check_int8(spec, device, sharded=bool(data.units(model)))
        if compile:
            _check_compile(model, adapters)
        self.model, self.mesh, self.limits = model, mesh, limits
        self._weights: Weights = weights
        # ZeRO keeps its gathered parameters for the next step, which must be able to train on them
        self._no_autograd = torch.no_grad if data.units(model) else torch.inference_mode
        self.adapters = adapters or Adapters()
        self._stop = frozenset(stop)
        self._runner = ModelRunner(model, mesh, limits.page, self.adapters, compile)
        self._scheduler = Scheduler(limits, spec.has_prefix_mask, self._runner.cache.table)
        # vocabularies are often padded (to a multiple of 64 or tp): those rows have no text
        self._never = sorted(set(range(spec.vocab_size)) - set(known)) if known else []
        self._proposer, self.acceptance = proposer, Acceptance()
        self._numbers, self._within = itertools.count(), ExitStack()
        self._warned, self._by_length = False, spec.by_length

    def __enter__(self) -> "Engine":
        """Set the model up for inference (no gradients, no compilation, prepacked weights, LoRA
        adapters), and return the engine.
        """
        keep = not self.model.training
        self._within.enter_context(data.inference(self.model))
        # a compiled block would be compiled again for every length
        self._within.enter_context(torch.compiler.set_stance("force_eager"))
        self._within.enter_context(_prepack_weights(self.model, self._weights, keep))
        if self._proposer is not None:
            self._within.enter_context(self._proposer.inference())
        if self.adapters.names:
            self._within.callback(self.model.set_multi_lora, {})
            self.model.set_multi_lora(self.adapters.weights)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the model's training or evaluation mode; remove its adapters and, if it was in
        training, its prepacked weights.
        """
        self._within.close()

    @property
    def busy(self) -> bool:
        """True if any sequence waits or runs, so that `step` has work."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Number of samples (not requests) that wait."""
        return sum(len(group.samples) for group in self._scheduler.waiting)

    @property
    def running(self) -> int:
        """Number of samples (not requests) that run."""
        return sum(len(group.samples) for group in self._scheduler.running.values())

    @property
    def pages(self) -> int:
        """Number of pages of the KV cache that sequences have now."""
        return self._runner.cache.table.in_use

    @property
    def usage(self) -> CacheUsage:
        """Largest numbers of KV cache pages and bytes so far, as a `CacheUsage`."""
        return self._runner.cache.usage

    def add(self, request: Request) -> int:
        """Check and queue a request; return its number, which its results carry.

        Raises ValueError, with nothing queued, for an unknown adapter or what the model or the
        limits cannot take. Warns once if a sequence may exceed the positions that the model was
        trained on.
        """
        model = self.model
        check_name(request.adapter, self.adapters.names)
        beyond = check(model.spec, request, self.limits)
        # once per engine: a server would repeat it for each request
        if beyond and not self._warned:
            self._warned = True
            warnings.warn(beyond, stacklevel=2)
        # the model's EOS tokens end every request, in addition to its own
        params = replace(request.params, stop=(*self._stop, *request.params.stop))
        request = replace(request, params=params)
        number = next(self._numbers)
        self._queue(number, request, span_of(model.spec, request.tokens))
        return number

    def _queue(self, number: int, request: Request, span: PositionSpan | None) -> None:
        """Queue the samples of a checked request, in groups that can run at once. `span`: see
        `SequenceGroup`.
        """
        tokens = list(request.tokens)
        for samples in self._scheduler.split_samples(request.samples, len(tokens)):
            self._scheduler.waiting.append(
                SequenceGroup(number, request, samples, span, list(tokens), len(tokens))
            )

    def warm_up(self) -> None:
        """Run decode steps of each kind that has a compiled graph of its own, on made-up prompts:
        of samples that share pages (several, then one), of several sequences, of a single one. Then
        no step of a request compiles. Call before the first request, whose number stays 0.
        """
        limits, page = self.limits, self.limits.page
        positions = self.model.spec.longest or 2 * page + 1
        tokens = positions if limits.pages is None else min(positions, limits.pages * page)
        # one position is for a new token; the second new one is not read
        two, one = (min(pages * page, tokens - 1) for pages in (2, 1))
        params = SamplingParams(0.0, max_new_tokens=2)
        for length, samples, requests in ((two, 3, 1), (one, 3, 1), (1, 1, 2), (1, 1, 1)):
            for _ in range(requests):
                self._queue(-1, Request([0] * length, params, samples=samples), None)
            while self.busy:
                self.step()

    def cancel(self, number: int, sample: int | None = None) -> list[FinishedSequence]:
        """Stop request `number`, or only one sample of it, and free its pages.

        Returns the unfinished samples with their tokens so far, finish reason "cancelled"; an empty
        list if the number is unknown or already finished.
        """
        groups = self._scheduler.cancel(number, sample)
        return [group.finish(sample, "cancelled") for group in groups for sample in group.samples]

    def step(self) -> StepOutput:
        """Run one step of continuous batching: admit and schedule sequences, run one forward (up to
        pp of them in a pipeline), sample, and return the new tokens and finished samples. Does
        nothing, and returns an empty result, if no sequence waits or runs.
        """
        # an operator without autograd's bookkeeping takes 0.7 of its time where tensors are small
        with self._no_autograd():
            return self._step()

    def _step(self) -> StepOutput:
        """Run `step` without autograd."""
        self._scheduler.admit()
        if self._proposer is not None:
            self._propose(self._proposer)
        new = self._scheduler.schedule()
        if not new:
            return StepOutput()
        running, tp, pp = self._scheduler.running, self.model.tp.axis, self.mesh.pp
        exact = self.model.split.kernels.exact
        block = None if exact is None else exact.block(self.model.spec.vocab_size)
        outputs = []
        # several forwards fill a pipeline: a stage reads the next while another one reads this
        for some in split_forwards(new, pp.size):
            chunks = {key: running[key].next_chunk(count) for key, count in some.items()}
            requested, logits = self._runner.forward(chunks)
            outputs.append(
                ForwardOutput(chunks, [(key, running[key]) for key in requested], logits, block)
            )
        values = broadcast(outputs, self._never, tp, pp, self.model.device)
        parsed = [output.parse(values) for output in outputs]
        # the stages' sends must have ended before their buffers are freed
        self._runner.finish()
        # only now, as chunks were cut by the old values
        for key, count in new.items():
            running[key].num_computed += count
        step = StepOutput(num_tokens=sum(new.values()))
        for sampled, prompt_logprobs in parsed:
            for key, logprobs in prompt_logprobs.items():
                running[key].prompt_logprobs += logprobs
            for key, tokens in sampled.items():
                drafts = running[key].drafted[: new[key] - 1]
                if drafts:
                    self._append_verified(key, tokens, drafts, step)
                else:
                    self._append_samples(key, tokens, step)
        return step

    def _propose(self, proposer: Proposer) -> None:
        """Set the `draft` of every decoding sequence to tokens that the proposer drafts
        (speculative decoding), at most so many that max_new_tokens leaves room for one sampled
        token after them.
        """
        running = self._scheduler.running
        groups = {k: g for k, g in running.items() if g.num_uncomputed == 1 and g.new_tokens}
        most = proposer.num_speculative_tokens
        counts = {
            key: min(most, group.request.params.max_new_tokens - len(group.new_tokens) - 1)
            for key, group in groups.items()
        }
        drafts = proposer.propose(groups, counts)
        for key, group in groups.items():
            group.draft = drafts.get(key)

    def _append_verified(
        self, key: int, tokens: list[SampledToken], drafts: list[int], step: StepOutput
    ) -> None:
        """Append the sampled tokens of sequence `key` up to the first that is not the draft in its
        place (the last has none), and forget what the cache has of later drafts. Results go to
        `step`.
        """
        scheduler, group = self._scheduler, self._scheduler.running[key]
        self.acceptance.drafted += len(drafts)
        group.num_draft_tokens += len(drafts)
        for token, draft in zip(tokens, [*drafts, None], strict=True):
            accepted = token.finite and token.token == draft
            self.acceptance.accepted += accepted
            # before the token is appended, as it may finish the sequence
            group.num_accepted_tokens += accepted
            self._append_token(key, group, token, step)
            if not accepted:
                break
            # finished, or the cache is to be computed again: what follows is of no use
            if key not in scheduler.running or not group.num_computed:
                break
        if key in scheduler.running and group.num_computed:
            group.num_computed = len(group.tokens) - 1
            self._runner.cache.truncate(key, group.num_computed)

    def _append_samples(self, key: int, tokens: list[SampledToken], step: StepOutput) -> None:
        """Append one sampled token to each sample of group `key`, which forks (cache pages too) if
        it still has several. No tokens (max_new_tokens 0): the samples finish. Results go to
        `step`.
        """
        scheduler = self._scheduler
        if not tokens:  # max_new_tokens 0
            group = scheduler.remove(key)
            step.finished.extend(group.finish(sample, "length") for sample in group.samples)
            return
        group = scheduler.running[key]
        forks = {scheduler.new_key(): group.fork(sample) for sample in group.samples[1:]}
        group.samples = group.samples[:1]
        # the prompt was computed once: its full pages are shared from here on
        for child in forks:
            self._runner.cache.fork(key, child)
        scheduler.running |= forks
        samples = {key: group} | forks
        for (sample, request), token in zip(samples.items(), tokens, strict=True):
            self._append_token(sample, request, token, step)

    def _append_token(
        self, key: int, group: SequenceGroup, token: SampledToken, step: StepOutput
    ) -> None:
        """Append a token to one sample and to `step`; if the sample is finished, remove it and add
        its result. Logits that are not finite finish it without the token. Where rope scaling
        depends on the length, its cache is freed to be computed again.
        """
        sample, reason = group.samples[0], "not finite"
        if token.finite:
            reason = group.append(token.token, token.logprob, token.close)
            step.new_tokens.append(NewToken(group.number, sample, token.token, token.logprob))
        if reason is not None:
            # its pages are free for the next step
            step.finished.append(self._scheduler.remove(key).finish(sample, reason))
        elif self._by_length and self.model.spec.needs_reprefill(group.length, len(group.tokens)):
            # rope scaling changes with the length: cached keys have other angles
            self._scheduler.free(key, group)
            group.length = len(group.tokens)


def _check_compile(model: Decoder, adapters: Adapters | None) -> None:
    """Raise ValueError where decode steps of a model cannot be compiled."""
    check_compile(model.tp.axis.size, model.device.type)
    if adapters is not None and adapters.names:
        raise ValueError(
            "--compile compiles no products with adapters of several requests: leave out one of "
            "--compile and --adapters"
        )
    if data.units(model):
        raise ValueError("--compile needs whole weights, but ZeRO shards the model's: use zero 0")


@contextmanager
def _prepack_weights(model: Decoder, weights: Weights, keep: bool) -> Iterator[None]:
    """Prepack the weights for products without gradients within this context, which takes their
    memory once or twice more. Afterwards they are freed, or kept for the next engine (`keep`).
    Under ZeRO, where each weight is gathered only while it is used, nothing is prepacked.
    """
    if not data.units(model):
        model.prepack(weights)
    try:
        yield
    finally:
        # an evaluation during training frees them: the optimizer needs that memory
        model.disable_prepack(keep)


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
    on_memory: Callable[[CacheUsage], None] | None = None,
) -> list[list[int]]:
    """Return the new tokens of each prompt, including the token of `stop` that ended it.

    With `known`, the tokenizer's ids, no other token is sampled. For a model with a prefix mask the
    prompt is the bidirectional prefix, or its special tokens mark it. Temperature 0 is greedy.
    `on_token(prompt index, token)` is called as each token is sampled, and `on_memory` at the end
    with the usage of the KV cache. At most `batch` prompts of any lengths run at once; when one
    finishes, the next begins. Random numbers of a prompt follow from (seed, its index). A model
    under ZeRO needs the same call on every rank of dp. Raises ValueError before the first forward
    for settings and prompts that the model cannot take, and later for logits that are not finite.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: use --max-new-tokens 1 or more")
    if batch < 1:
        raise ValueError(f"batch is {batch}: it must be at least 1")
    params = SamplingParams(temperature, top_k, top_p, max_new_tokens=max_new_tokens)
    out: list[list[int]] = [[] for _ in prompts]
    limits = Limits(rows=batch, tokens=TOKENS_AT_ONCE)
    with Engine(model, stop=stop, known=known, limits=limits) as engine:
        for i, prompt in enumerate(prompts):  # request i has number i
            engine.add(Request(prompt, params, id=i, seed=seed))
        while engine.busy:
            output = engine.step()
            for new in output.new_tokens:
                out[new.number].append(new.token)
                if on_token is not None:
                    on_token(new.number, new.token)
            require_finite(output.finished)
        if on_memory is not None:
            on_memory(engine.usage)
    return out


def require_finite(finished: Sequence[FinishedSequence]) -> None:
    """Raise ValueError that names prompt and token of the first sequence (by request number) that
    finished because its logits are not finite.
    """
    for sequence in sorted(finished, key=lambda s: s.number):
        if sequence.finish_reason == "not finite":
            raise ValueError(
                f"the logits of new token {len(sequence.tokens) + 1} of prompt {sequence.id} are "
                "not finite: the model has diverged, or needs --dtype float32 (generate), or "
                "`dolmen.load(..., dtype=torch.float32)`"
            )
