"""Text from a model: load a source, read the prompts, draw one token per step.

    model = load_decoder(open_source("path/to/model"))
    generate(model, [[1, 15043]], max_new_tokens=16) -> [[3186, ...]]

Every rank of tp runs the same calls on the same prompts, gathers the same logits and chooses the
same token.
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dolmen.conversion.hf import stated_dtype
from dolmen.conversion.source import Source, load_weights
from dolmen.core import collectives, host
from dolmen.core.mesh import SINGLE, Axis, Mesh
from dolmen.core.words import counted
from dolmen.data.batch import Batch
from dolmen.families import special_tokens
from dolmen.model import build, head
from dolmen.model.decoder import Decoder
from dolmen.model.tree import Span, Tree
from dolmen.model.tree.blanks import of_prefix
from dolmen.parallel import data, vocabulary
from dolmen.parallel.actions import Schedule
from dolmen.serving import sample
from dolmen.serving.cache import Cache, Memory

TOKENS_AT_ONCE = 1 << 12  # of prompts, one forward: bounds the logits nobody reads
AT_ONCE = 256  # prompts


def load_decoder(
    source: Source,
    mesh: Mesh = SINGLE,
    dtype: torch.dtype | None = None,
    schedule: Schedule | None = None,
) -> Decoder:
    """A source's model on the axes of `mesh`, for inference: in `dtype`, or else that of its
    config.json. `schedule` places its stages; None: there is one. Raises ValueError or KeyError,
    before anything is built, for what does not fit.
    """
    _ = source.specs
    dtype = dtype or stated_dtype(source.model)
    model = build.build(source.tree, mesh, schedule=schedule, dtype=dtype)
    own = None if schedule is None else [name for name, _ in model.named_parameters()]
    build.load(model, lambda write: load_weights(source, write, own))
    return model.eval()


def ask(model: Decoder, tokens: Int64[Tensor, "texts length"], end: head.End) -> Any:
    """What `end` makes of whole texts, `tokens` on the host, each as long as the others, read
    without a cache. Raises ValueError where nobody has said which tokens positions follow from.
    """
    device = next(model.parameters()).device
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
    if model.tree.both_ways:
        raise ValueError(
            "the model sees both ways: each token knows those behind it, and there is no next one "
            "to foretell; it fills in masked tokens, and cannot generate"
        )
    sample.check_knobs(temperature, top_k, top_p)
    _check(model, prompts, max_new_tokens, batch)
    unknown = sorted(set(range(model.tree.vocab_size)) - set(known)) if known else []
    draw = _Draw(temperature, top_k, top_p, seed, unknown)
    out: list[list[int]] = [[] for _ in prompts]

    def emit(index: int, token: int) -> bool:
        """Whether the prompt goes on after this token."""
        out[index].append(token)
        if on_token is not None:
            on_token(index, token)
        return token not in stop and len(out[index]) < max_new_tokens

    spans = {i: span for i, p in enumerate(prompts) if (span := span_of(model.tree, p)) is not None}
    cache, waiting = Cache(model.tree), deque(enumerate(prompts))
    unread: dict[int, Sequence[int]] = {}  # of each prompt that runs, what the cache has not
    lengths = {i: len(prompt) for i, prompt in enumerate(prompts)}  # that texts are read as
    # a compiled block would be compiled again for every length
    with data.inference(model), torch.compiler.set_stance("force_eager"):
        while unread or waiting:
            while waiting and len(unread) < batch:
                index, prompt = waiting.popleft()
                unread[index] = prompt
            read, indices, logits = _read(model, cache, unread, spans, lengths)
            unread |= {i: unread[i][n:] for i, n in read.items()}
            if not indices:
                continue
            _check_finite(logits, indices, out)
            chosen = draw.tokens(logits, {i: len(out[i]) for i in indices}, model.tp.axis)
            for i, token in zip(indices, chosen, strict=True):
                if not emit(i, token):
                    del unread[i]
                    cache.end(i)
                elif model.tree.read_again(lengths[i], len(prompts[i]) + len(out[i])):
                    cache.end(i)
                    unread[i] = [*prompts[i], *out[i]]
                    lengths[i] = len(unread[i])
                else:
                    unread[i] = [token]
    if on_memory is not None:
        on_memory(cache.memory)
    return out


def span_of(model: Tree, prompt: Sequence[int]) -> Span | None:
    """How the tokens of a prompt, and of what follows it, stand for the model; None: each at its
    index, and all see back alone. Raises ValueError where nobody has said which tokens say it.
    """
    if model.blanks is not None:
        return model.blanks.span(prompt)
    return of_prefix(len(prompt), model.streams) if model.prefixed else None


@dataclass(frozen=True)
class _Draw:
    """How tokens are chosen from logits."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    never: list[int]
    """Ids that are not drawn."""

    def tokens(
        self, logits: Float[Tensor, "prompts vocab"], steps: Mapping[int, int], tp: Axis
    ) -> list[int]:
        """The next one of each prompt, the same on every rank of `tp`; `steps`: of each, in order,
        how many it has. Writes into the logits.
        """
        uniforms = [sample.uniform(self.seed, i, step) for i, step in steps.items()]
        if self.never:
            logits[:, self.never] = -math.inf
        drawn = torch.tensor(uniforms, dtype=torch.float64)
        chosen = sample.sample(logits, drawn, self.temperature, self.top_k, self.top_p)
        # all ranks have the same logits, but sums on a GPU may differ in the last bit from run to
        # run: agree on one
        return collectives.reduce_scalar(chosen, tp, "max").tolist()


def _read(
    model: Decoder,
    cache: Cache,
    unread: Mapping[int, Sequence[int]],
    spans: Mapping[int, Span],
    lengths: Mapping[int, int],
) -> tuple[dict[int, int], list[int], Tensor]:
    """One forward. -> how many tokens it read of each prompt; those of which none is left; and
    logits [those, vocab], fp32 or wider, of what follows each.
    """
    tp, new = model.tp, _share({i: len(t) for i, t in unread.items()}, model.tree.prefixed)
    # sequence parallelism splits tokens evenly: fill up with some that nobody reads
    device, multiple = next(model.parameters()).device, tp.axis.size if tp.sequence else 1
    reading = cache.read(new, device, multiple, spans, lengths)
    tokens = [token for i in reading.texts for token in unread[i][: new[i]]]
    tokens += [0] * (reading.positions.shape[2] - len(tokens))
    logits = model(host.send(torch.tensor([tokens]), device), head.logits, reading)
    whole = [k for k, i in enumerate(reading.texts) if new[i] == len(unread[i])]
    indices = [reading.texts[k] for k in whole]
    last = reading.last if len(whole) == len(reading.texts) else reading.last[whole]
    logits = vocabulary.gather_vocabulary(logits[0, last], model.tree.vocab_size, tp.axis)
    return new, indices, logits if logits.dtype == torch.float64 else logits.float()


def _share(lengths: Mapping[int, int], whole: bool = False) -> dict[int, int]:
    """How many unread tokens of each prompt the next forward reads: the one of each that has one,
    and of the others, in their order, what leaves it at TOKENS_AT_ONCE; or `whole` prompts, until
    there are so many.
    """
    new = {i: n for i, n in lengths.items() if n == 1}
    left = max(TOKENS_AT_ONCE - len(new), 0 if new else 1)
    for i, n in lengths.items():
        if n > 1 and left > 0:
            new[i] = n if whole else min(n, left)
            left -= new[i]
    return new


def _check_finite(logits: Tensor, indices: list[int], out: list[list[int]]) -> None:
    """Raises ValueError that names the first prompt whose logits are not finite."""
    finite = logits.amax(-1).isfinite()
    if finite.all():
        return
    index = min(i for i, is_finite in zip(indices, finite.tolist(), strict=True) if not is_finite)
    raise ValueError(
        f"the logits of new token {len(out[index]) + 1} of prompt {index} are not finite: the "
        "model has diverged, or needs --dtype float32 (generate), or "
        "`dolmen.load(..., dtype=torch.float32)`"
    )


def _check(
    model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch: int
) -> None:
    if batch < 1:
        raise ValueError(f"batch is {batch}: it must be at least 1")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: use --max-new-tokens 1 or more")
    vocabulary, most = model.tree.vocab_size, model.tree.max_position_embeddings
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(
                f"prompt {i} has 0 tokens: give at least 1, such as the tokenizer's beginning "
                f"of text"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise ValueError(
                f"prompt {i} has tokens {min(prompt)} to {max(prompt)}, the model's vocab_size is "
                f"{vocabulary}: use the tokenizer of the model"
            )
    longest = max(map(len, prompts), default=0)
    read = longest + max_new_tokens - 1  # the last new token is not read
    if read <= most:
        return
    text = (
        f"a prompt of {counted(longest, 'token')} and {max_new_tokens:,} new ones read {read:,} "
        f"positions, "
        f"max_position_embeddings is {most}"
    )
    if model.tree.longest is not None:
        knob = (
            f"use --max-new-tokens {most - longest + 1}"
            if longest <= most
            else "use a shorter prompt"
        )
        raise ValueError(f"{text}: {knob}")
    warnings.warn(
        f"{text}: the model was not made for more, and its text may be poor", stacklevel=3
    )
