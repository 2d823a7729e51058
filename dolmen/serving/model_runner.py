"""Model runner: one forward of the scheduled sequences through this rank's pipeline stage.

    tokens -> stage 0 -> hidden -> ... -> last stage -> each sequence's last hidden vector -> logits

Each rank of a pipeline calls it with the same chunks, computes its stage and sends the result on;
only the last stage has logits. The head multiplies just the hidden vectors whose next token is
wanted: for the other tokens of a prompt no logits are computed, unless their log-probabilities were
requested, and then in pieces.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor

from dolmen.core import collectives, transfers
from dolmen.core.device import to_device
from dolmen.core.mesh import Mesh
from dolmen.core.reduction import widen
from dolmen.model.decoder import Decoder
from dolmen.model.head import HeadFunction, LMHead
from dolmen.model.spec import PositionSpan
from dolmen.parallel import inference_linear, vocabulary
from dolmen.serving import sampling
from dolmen.serving.adapters import Adapters
from dolmen.serving.kv_cache import CacheBatch, KVCache

MAX_LOGITS = 1 << 22  # logits held at once for log-probabilities of a prompt: 16 MiB in fp32


@dataclass(frozen=True)
class SequenceChunk:
    """The tokens of a sequence that a forward reads."""

    tokens: Sequence[int]
    """At least one."""
    last: bool
    """True if these are the last tokens of the sequence, so that the next one is sampled."""
    drafts: int = 0
    """Tokens at the end that are drafts: what follows each of them is sampled too."""
    labels: Sequence[int] = ()
    """Prompt tokens whose log-probabilities are wanted."""
    first: int = 0
    """Index, among `tokens`, of the one that the first label follows."""
    top: int = 0
    """Likeliest tokens whose log-probabilities are wanted beside each label."""
    span: PositionSpan | None = None
    """Bidirectional prefix and positions; None: causal, each token at its index."""
    length: int = 1
    """Length that rope scaling takes the sequence to have."""
    adapter: str | None = None
    """LoRA adapter; None: the base model alone."""


@dataclass(frozen=True, eq=False)
class RunnerOutput:
    """Logits and log-probabilities of a forward, in fp32 or wider; only the last pipeline stage has
    them.
    """

    following: Float[Tensor, "sequences vocabulary"]
    """Logits of the next token of each sequence whose chunk is its last, and behind these those of
    the tokens that follow its drafts.
    """
    labelled: dict[int, Float[Tensor, "labels numbers"]]
    """For each sequence with labels the rows of `sampling.log_probabilities`."""


class ModelRunner:
    """Runs this rank's pipeline stage of a model over its KV cache, and sends the hidden vectors
    on.
    """

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        page_size: int,
        adapters: Adapters,
        compile: bool = False,
    ):
        """Creates an empty KV cache. `page_size`: tokens per page of it. `compile`: compile the
        blocks for forwards that only decode.
        """
        # exact numerics have one attention for prompts and decode steps: its blocks decide bits
        decodes = model.split.kernels.exact is None
        cache = KVCache(model.spec, page_size, compile, decodes)
        self.model, self.mesh, self.cache = model, mesh, cache
        self.adapters = adapters
        self._sends: list[tuple[dist.Work, Tensor]] = []

    def forward(self, chunks: Mapping[int, SequenceChunk]) -> tuple[list[int], RunnerOutput | None]:
        """Run one forward over chunks (sequence key -> tokens), which enter the KV cache.

        Returns the sequences whose next token is to be sampled, in the order of their logits, and
        the logits on the last pipeline stage; other stages send their hidden vectors on and return
        None.
        """
        tp, device = self.model.tp, self.model.device
        width = 1 + max(chunk.drafts for chunk in chunks.values())
        # sequence parallelism splits tokens evenly, so they are padded
        multiple = tp.axis.size if tp.sequence else 1
        batch = self.cache.append(
            {sequence: len(chunk.tokens) for sequence, chunk in chunks.items()},
            device,
            multiple,
            {sequence: c.span for sequence, c in chunks.items() if c.span is not None},
            {sequence: chunk.length for sequence, chunk in chunks.items()},
            width,
        )
        ordered = [chunks[sequence] for sequence in batch.sequences]
        tokens = [token for chunk in ordered for token in chunk.tokens]
        tokens += [0] * (batch.positions.shape[2] - len(tokens))
        sent = to_device(torch.tensor([tokens]), device)
        if self.adapters.names:
            names, counts = [c.adapter for c in ordered], [len(c.tokens) for c in ordered]
            # tokens of one adapter are one segment of the flat row, multiplied at once
            self.adapters.turn.segments = inference_linear.segments(names, counts, device)
        wanted = [sequence for sequence in batch.sequences if chunks[sequence].last]
        stage = self.model.split.parts[0]
        x = None if stage.first else self._receive(len(tokens))
        if stage.last:
            output = self.model(sent, _make_head_function(self.model, batch, chunks), batch, x=x)
            return wanted, RunnerOutput(*output)
        hidden = self.model(sent, None, batch, x=x).contiguous()
        work = transfers.start_send(hidden, self.mesh.up, self.mesh.pp.rank + 1)
        # the tensor must live until it has been sent, and the next forward need not wait
        self._sends.append((work, hidden))
        return wanted, None

    def finish(self) -> None:
        """Wait until all hidden vectors have been sent to the next stage, and release them."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _receive(self, tokens: int) -> Float[Tensor, "here hidden"]:
        """Receive the hidden vectors of `tokens` tokens from the previous stage; blocks until they
        are here.
        """
        x = self.model.boundary(1, tokens)
        transfers.start_receive(x, self.mesh.up, self.mesh.pp.rank - 1).wait()
        return x


def _make_head_function(
    model: Decoder, batch: CacheBatch, chunks: Mapping[int, SequenceChunk]
) -> HeadFunction:
    """Return the head function of the last pipeline stage: (hidden vectors, head) -> logits of the
    positions to sample from (the last token of each sequence whose chunk is its last, and its
    drafts), and for each sequence with labels the log-probabilities of these.
    """
    device, begin, first, wanted = batch.positions.device, {}, 0, []
    for sequence in batch.sequences:
        begin[sequence], chunk = first, chunks[sequence]
        first += len(chunk.tokens)
        if chunk.last:
            wanted += range(first - 1 - chunk.drafts, first)
    # only these rows are multiplied by the head: a prompt of 4,096 tokens needs one row of logits
    rows = to_device(torch.tensor(wanted, dtype=torch.int64), device)

    def head_function(hidden: Tensor, head: LMHead) -> tuple[Tensor, dict[int, Tensor]]:
        """Return logits [rows, vocabulary] of the tokens to be sampled, and sequence ->
        log-probabilities of its labels.
        """
        full, head = _gather_tokens(hidden, head)
        labelled = {}
        for sequence, chunk in chunks.items():
            if chunk.labels:
                start = begin[sequence] + chunk.first
                logits = full[start : start + len(chunk.labels)]
                labels = to_device(torch.tensor(chunk.labels), device)
                labelled[sequence] = _label_logprobs(model, logits, head, labels, chunk.top)
        return _logits(model, full[rows], head), labelled

    return head_function


def _gather_tokens(hidden: Tensor, head: LMHead) -> tuple[Float[Tensor, "tokens hidden"], LMHead]:
    """Return the hidden vectors of all tokens, gathered over tp under sequence parallelism, and a
    head that takes them.
    """
    tp = head.split.tp
    if not tp.gathers:
        return hidden, head
    # the gathered tokens are the same on all ranks, so the head must not gather again
    split = replace(head.split, tp=replace(tp, sequence=False))
    return collectives.all_gather(hidden, 0, tp.axis), replace(head, split=split)


def _logits(
    model: Decoder, hidden: Float[Tensor, "rows hidden"], head: LMHead
) -> Float[Tensor, "rows vocabulary"]:
    """Return the logits of `hidden` over the whole vocabulary, gathered over tp, in fp32 or
    wider.
    """
    logits = head.logits(hidden)[0]
    return widen(vocabulary.gather_vocabulary(logits, model.spec.vocab_size, model.tp.axis))


def _label_logprobs(
    model: Decoder,
    hidden: Float[Tensor, "labels hidden"],
    head: LMHead,
    labels: Int64[Tensor, " labels"],
    top: int,
) -> Float[Tensor, "labels numbers"]:
    """Return for each label its log-probability, then those of the `top` most likely tokens in its
    place and the ids of these, computing at most MAX_LOGITS (2^22) logits at a time.
    """
    # 128,000 tokens of vocabulary: 32 labels at a time
    rows = max(1, MAX_LOGITS // model.spec.vocab_size)
    return torch.cat(
        [
            sampling.log_probabilities(_logits(model, some, head), row_labels, top)
            for some, row_labels in zip(hidden.split(rows), labels.split(rows), strict=True)
        ]
    )
