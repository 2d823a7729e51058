"""Scheduler of the engine: which sequences run, and how many tokens of each the next forward reads.

Problem: a forward should be full, but a long prompt must not delay the sequences that decode, and
the pages of the KV cache may run out while sequences grow.

Idea: continuous batching with chunked prefill, as in vLLM.

    add ---> waiting --admit--> running --finish--> (removed)
               ^                   |
               '--- preempt -------'     pages freed, prompt and new tokens are read again later

    tokens of a forward (max_batch_tokens)
    | d d d d d d |  p p p p p p p p p p p p  | q q q q q q |
      decodes, one   chunk that ends prompt p   first chunk of prompt q; the rest in later steps
      token each, and their drafts

Invariants:
- decode sequences are scheduled first, then their drafts (speculation.py); the remaining token
  budget goes to chunked prefill;
- where pages are lacking, drafts are dropped before a sequence is preempted;
- sequences are admitted in the order in which they came, preempted ones before all others;
- where pages are lacking, the youngest running sequence is preempted; one always runs, so that the
  engine makes progress (`request.check` has refused what alone does not fit);
- a prompt with several samples is read once as one group, and forks when it has been read;
- what is decided here depends on numbers alone and on no tensor, so ranks that are given the same
  requests decide the same.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxtyping import Float
from torch import Tensor

from dolmen.model.spec import PositionSpan
from dolmen.serving.block_table import BlockTable
from dolmen.serving.model_runner import SequenceChunk
from dolmen.serving.request import FinishedSequence, FinishReason, Limits, LogProb, Request


@dataclass(frozen=True, eq=False)
class Draft:
    """Tokens that may follow those of a sequence, to be verified (speculation.py)."""

    tokens: list[int]
    scores: list[Float[Tensor, " vocabulary"] | None]
    """Logits, up to a constant, of the distribution that each token was sampled from; None: it is
    the only token that could be drafted.
    """


@dataclass(eq=False)
class SequenceGroup:
    """One sample of a request, or several samples that share the prompt until it has been read
    (`fork`).
    """

    number: int
    """Number of the request."""
    request: Request
    samples: range
    """Numbers of its samples within the request; only one once it decodes."""
    span: PositionSpan | None
    """Bidirectional prefix and positions; None: causal, each token at its index."""
    tokens: list[int]
    """Prompt and new tokens."""
    length: int
    """Length that rope scaling takes the sequence to have (`SequenceChunk.length`)."""
    num_computed: int = 0
    """Tokens that are in the KV cache."""
    logprobs: list[LogProb] = field(default_factory=list)
    """Log-probabilities of the new tokens, if requested."""
    prompt_logprobs: list[LogProb] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens after the first, if requested."""
    close: int = 0
    """Number of new tokens that were near ties (`sampling.CLOSE`)."""
    draft: Draft | None = None
    """Tokens that the next forward verifies."""
    num_draft_tokens: int = 0
    """Drafts that were verified."""
    num_accepted_tokens: int = 0
    """Drafts that were appended."""

    @property
    def new_tokens(self) -> list[int]:
        """Ids of the tokens sampled so far, without the prompt."""
        return self.tokens[len(self.request.tokens) :]

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are not in the KV cache yet; 1 for a sequence that decodes."""
        return len(self.tokens) - self.num_computed

    @property
    def drafted(self) -> list[int]:
        """Draft tokens that the next forward verifies; an empty list if there is no draft."""
        return [] if self.draft is None else self.draft.tokens

    def next_chunk(self, count: int) -> SequenceChunk:
        """Return the next `count` uncomputed tokens, and behind the last of them drafts, as a chunk
        for the model runner, with the prompt tokens whose log-probabilities are wanted.
        """
        labels, first = self._labels(count)
        drafts = max(count - self.num_uncomputed, 0)
        tokens = self.tokens[self.num_computed : self.num_computed + count]
        return SequenceChunk(
            tokens + self.drafted[:drafts],
            last=count >= self.num_uncomputed,
            drafts=drafts,
            labels=labels,
            first=first - self.num_computed,
            top=self.request.top,
            span=self.span,
            length=self.length,
            adapter=self.request.adapter,
        )

    def _labels(self, count: int) -> tuple[list[int], int]:
        """Return the prompt tokens that still need a log-probability, of those that follow one of
        the next `count`; and the index of the token that the first of them follows.
        """
        if not self.request.prompt_logprobs:
            return [], self.num_computed
        first = max(self.num_computed, len(self.prompt_logprobs))
        # the last prompt token predicts the first new token, which is no label
        end = min(self.num_computed + count, len(self.request.tokens) - 1)
        return list(self.request.tokens[first + 1 : end + 1]), first

    def fork(self, sample: int) -> "SequenceGroup":
        """Return a copy for one of the samples: the tokens of the prompt, and no log-probabilities
        of new tokens. The cache is forked by the caller.
        """
        return replace(
            self,
            samples=range(sample, sample + 1),
            tokens=list(self.tokens),
            logprobs=[],
            prompt_logprobs=list(self.prompt_logprobs),
        )

    def append(self, token: int, logprob: LogProb | None, close: bool) -> FinishReason | None:
        """Append a sampled token with its log-probability; return "stop" or "length" if it finishes
        the sequence, else None. `close`: the token was a near tie with another one
        (`sampling.CLOSE`), which is counted.
        """
        self.tokens.append(token)
        self.close += close
        if logprob is not None:
            self.logprobs.append(logprob)
        params = self.request.params
        if token in params.stop:
            return "stop"
        return "length" if len(self.new_tokens) >= params.max_new_tokens else None

    def finish(self, sample: int, reason: FinishReason) -> FinishedSequence:
        """Return the result of one sample, with the tokens so far and the reason why it
        finished.
        """
        return FinishedSequence(
            number=self.number,
            sample=sample,
            id=self.request.id,
            tokens=self.new_tokens,
            finish_reason=reason,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            close=self.close,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )


class Scheduler:
    """Decides which sequences wait and which run. Running ones have keys, which the KV cache uses
    too.
    """

    def __init__(self, limits: Limits, whole_prompts: bool, table: BlockTable):
        """`whole_prompts`: read each prompt in one forward, without chunks, because its tokens
        attend to one another. `table`: the block table of the KV cache, whose pages are counted and
        freed here.
        """
        self.limits, self.whole_prompts, self.table = limits, whole_prompts, table
        self.waiting: deque[SequenceGroup] = deque()
        self.running: dict[int, SequenceGroup] = {}
        self._keys = 0

    def new_key(self) -> int:
        """Return a key that no sequence has had."""
        self._keys += 1
        return self._keys

    def split_samples(self, samples: int, prompt: int) -> list[range]:
        """Split the sample numbers of a request, whose prompt has `prompt` tokens, into ranges that
        can run at once: bounded by rows and tokens of a forward, and by the pages beside those of
        the prompt.
        """
        most, pages = min(self.limits.rows, self.limits.tokens), self.limits.pages
        if pages is not None:
            # each sample needs at least one page of its own behind those of the prompt
            most = max(1, min(most, pages - self.table.pages_for([prompt])))
        return [range(i, min(i + most, samples)) for i in range(0, samples, most)]

    def admit(self) -> None:
        """Move waiting groups to the running ones, first come first served, until the next one does
        not fit: too many samples for one forward, or too few free pages of the KV cache. If nothing
        runs, the first one is admitted whatever pages it needs.
        """
        most = min(self.limits.rows, self.limits.tokens)
        while self.waiting:
            group = self.waiting[0]
            rows = sum(len(other.samples) for other in self.running.values())
            # FIFO: later groups do not overtake one that has no room, or it might wait forever
            if rows + len(group.samples) > most or rows and not self._fits(group):
                return
            self.running[self.new_key()] = self.waiting.popleft()

    def _fits(self, group: SequenceGroup) -> bool:
        """Return whether the pool has pages for the prompt and each sample of a group, besides
        those in use and those that running sequences will need for their unread tokens.
        """
        if self.limits.pages is None:
            return True
        pending = {key: other.num_uncomputed for key, other in self.running.items()}
        # each further sample copies the last page when the group forks
        needed = self.table.pages_for([len(group.tokens)]) + len(group.samples) - 1
        return self.table.in_use + self.table.growth(pending) + needed <= self.limits.pages

    def schedule(self) -> dict[int, int]:
        """Return for each sequence key how many tokens the next forward reads. If the KV cache
        lacks pages for them, all drafts are dropped first, then the youngest running sequence is
        preempted, again and again, until they suffice.
        """
        new = self._budget()
        if self._lacks_pages(new):
            for group in self.running.values():
                group.draft = None
            new = self._budget()
        while self._lacks_pages(new):
            # dicts keep the order of insertion, so the last key is the youngest sequence
            self.preempt(next(reversed(self.running)))
            new = self._budget()
        return new

    def _budget(self) -> dict[int, int]:
        """Return sequence key -> tokens to read: 1 for each decode, then their drafts, and the rest
        of the token limit to prompts in order of admission, the last of them cut to a chunk. At
        least one token is read; `whole_prompts` may exceed the limit.
        """
        new = {key: 1 for key, group in self.running.items() if group.num_uncomputed == 1}
        # at least one token is read, or the engine would make no progress
        left = max(self.limits.tokens - len(new), 0 if new else 1)
        for key in new:
            drafts = min(len(self.running[key].drafted), left)
            new[key] += drafts
            left -= drafts
        for key, group in self.running.items():
            if group.num_uncomputed > 1 and left > 0:
                chunk = min(group.num_uncomputed, left)
                new[key] = group.num_uncomputed if self.whole_prompts else chunk
                left -= new[key]
        return new

    def _lacks_pages(self, new: Mapping[int, int]) -> bool:
        """Return whether the pages in use and those that `new` (sequence key -> tokens to read)
        adds exceed the limit. Never true for a sequence that runs alone.
        """
        if self.limits.pages is None or len(self.running) == 1:
            return False
        scheduled = [(self.running[key], count) for key, count in new.items()]
        # a prompt that has been read forks, and each further sample copies its last page
        copies = sum(len(g.samples) - 1 for g, count in scheduled if g.num_uncomputed == count)
        needed = self.table.in_use + self.table.growth(new) + copies
        return needed > self.limits.pages

    def preempt(self, key: int) -> None:
        """Free the pages of a running sequence and put it at the front of the waiting ones."""
        group = self.running.pop(key)
        self.free(key, group)
        # before all others: it was admitted before them
        self.waiting.appendleft(group)

    def free(self, key: int, group: SequenceGroup) -> None:
        """Free the pages of a sequence, if it has any; all its tokens have to be read again."""
        if key in self.table.lengths:
            self.table.remove(key)
        group.num_computed, group.draft = 0, None

    def remove(self, key: int) -> SequenceGroup:
        """Remove a running sequence, free its pages, and return it."""
        group = self.running.pop(key)
        self.free(key, group)
        return group

    def cancel(self, number: int, sample: int | None) -> list[SequenceGroup]:
        """Remove the groups of request `number`, waiting and running, free their pages, and return
        them. With a `sample` only a group that consists of that sample alone is removed.
        """

        def matches(group: SequenceGroup) -> bool:
            """Return whether a group is to be removed."""
            return group.number == number and (sample is None or list(group.samples) == [sample])

        waiting = [group for group in self.waiting if matches(group)]
        self.waiting = deque(group for group in self.waiting if not matches(group))
        keys = [key for key, group in self.running.items() if matches(group)]
        return [self.remove(key) for key in keys] + waiting


def split_forwards(new: Mapping[int, int], count: int) -> Sequence[dict[int, int]]:
    """Split the scheduled sequences (key -> tokens to read) into up to `count` forwards of about as
    many sequences each, so that every stage of a pipeline has one to compute.
    """
    keys = list(new)
    # strided, so that decodes and prompts are spread evenly over the forwards
    return [{key: new[key] for key in keys[i::count]} for i in range(min(count, len(keys)))]
