"""Speculative decoding (2211.17192, 2302.01318): tokens are drafted cheaply, and one forward of
the model verifies several of them.

    text so far             t1 ... tn                    d1 d2 d3 are drafts
    the forward reads                  tn d1 d2 d3
    and samples after each of these      x1 x2 x3 x4     x1 = d1, x2 = d2, x3 != d3
    appended                             x1 x2 x3        the cache forgets d3

Every position is sampled as without drafts, by the uniform number of its own (sampling.py), and
what follows a token that is not the draft is dropped. So each appended token has the distribution
of the model, whatever the draft was; the draft only decides how many tokens a forward yields.

Where the draft follows from the text alone (n-gram; greedy decoding), x is sampled from the model's
distribution p itself: it is d with probability p(d), and else has the distribution p without d,
which is rejection sampling from a proposal that is certain. The tokens are those without
speculation, not only their distribution.

Where d was sampled from a draft model's distribution q, x is sampled from the mixture of Leviathan
et al. and Chen et al. (`sampling.condition_on_draft`): d with probability min(1, p(d) / q(d)), else
from max(p - q, 0), normalized. Over all d that is p again, and x = d as often as is possible.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from dolmen.core import collectives
from dolmen.core.device import read_back
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.core.messages import plural
from dolmen.model.decoder import Decoder
from dolmen.model.spec import ModelSpec
from dolmen.parallel import data
from dolmen.parallel.inference_linear import Weights
from dolmen.serving.adapters import Adapters
from dolmen.serving.config import SpeculativeConfig
from dolmen.serving.model_runner import ModelRunner, SequenceChunk
from dolmen.serving.request import Limits
from dolmen.serving.sampler import Draw, sample_drafts
from dolmen.serving.scheduler import Draft, SequenceGroup


@dataclass
class Acceptance:
    """Counts of drafted tokens since an engine started."""

    drafted: int = 0
    """Drafts that the model has verified."""
    accepted: int = 0

    @property
    def rate(self) -> float:
        """Accepted share of the drafts; 0 without drafts."""
        return self.accepted / max(self.drafted, 1)

    def __str__(self) -> str:
        """Format for the log: `accepted 120 of 400 drafted tokens (30 %)`."""
        drafts = plural(self.drafted, "drafted token")
        return f"accepted {self.accepted:,} of {drafts} ({self.rate:.0%})"


class Proposer(Protocol):
    """Drafts the next tokens of sequences that decode."""

    num_speculative_tokens: int
    """Most tokens that are drafted for a sequence at once."""

    def inference(self) -> AbstractContextManager[None]:
        """Return a context manager within which `propose` may be called."""
        ...

    def propose(
        self, groups: Mapping[int, SequenceGroup], counts: Mapping[int, int]
    ) -> dict[int, Draft]:
        """Return a draft of at most `counts` tokens (0 or more) for each of `groups`, all by
        sequence key; a sequence without one may be left out. `groups` are all that run and decode:
        what is remembered of others is forgotten.
        """
        ...


class NgramProposer:
    """Prompt lookup: the tokens that followed the latest earlier place where the last tokens of a
    sequence stood. Needs no model and costs microseconds; accepted where a text repeats itself.
    """

    def __init__(self, config: SpeculativeConfig):
        """Takes from `config` how many tokens are drafted at once, and the lengths of suffixes to
        look up.
        """
        self.num_speculative_tokens = config.num_speculative_tokens
        # the longest match first
        self.lengths = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)

    def inference(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing, as no model is needed."""
        return nullcontext()

    def propose(
        self, groups: Mapping[int, SequenceGroup], counts: Mapping[int, int]
    ) -> dict[int, Draft]:
        """Return for each sequence (by key) a draft of up to counts[key] tokens by prompt lookup:
        those that followed an earlier occurrence of its last tokens; empty where there is none.
        Nothing is remembered between calls.
        """
        found = {key: self.lookup(group.tokens, counts[key]) for key, group in groups.items()}
        return {key: Draft(tokens, [None] * len(tokens)) for key, tokens in found.items()}

    def lookup(self, tokens: list[int], count: int) -> list[int]:
        """Return the `count` tokens that followed the latest earlier occurrence of the longest
        suffix of `tokens` that has one, among suffixes of prompt_lookup_min to prompt_lookup_max
        tokens. Where fewer follow, they are repeated from their first. An empty list without an
        occurrence.
        """
        if count < 1:
            return []
        # a token is a character: str searches at the speed of C, and vocabularies are smaller than
        # Unicode (1,114,112)
        text = "".join(map(chr, tokens))
        for length in self.lengths:
            # at least one token lies behind the match, so it is not the suffix itself
            at = text.rfind(text[-length:], 0, len(text) - 1) if len(text) > length else -1
            if at >= 0:
                # a text that repeats itself goes on to do so: the match may end before `count`
                follows = tokens[at + length :]
                return [follows[i % len(follows)] for i in range(count)]
        return []


class DraftModel:
    """A smaller model of the same vocabulary, which samples drafts with the sampling parameters of
    each request. Every rank of tp and pp runs all of it, with a KV cache of its own.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        model: Decoder,
        mesh: Mesh = SINGLE,
        weights: Weights = "stated",
        limits: Limits = Limits(),
    ):
        """`model`: the draft model, whole, which `check_draft` allows. `mesh`: that of the model
        that verifies. `limits`: those of the engine; tokens bound a forward here too, but pages
        only the cache of the model that verifies.
        """
        self.num_speculative_tokens = config.num_speculative_tokens
        self.model, self.mesh, self.tokens = model, mesh, limits.tokens
        self._weights: Weights = weights
        self._runner = ModelRunner(model, SINGLE, limits.page, Adapters())

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Context manager in which the draft model keeps no gradients and its weights are
        prepacked.
        """
        with data.inference(self.model):
            self.model.prepack(self._weights)
            try:
                yield
            finally:
                self.model.disable_prepack(keep=True)

    def propose(
        self, groups: Mapping[int, SequenceGroup], counts: Mapping[int, int]
    ) -> dict[int, Draft]:
        """Sample a draft of up to counts[key] tokens for each sequence (by key) with the draft
        model: one forward reads what its KV cache lacks of each sequence, then one forward per
        token. Sequences that are not in `groups` leave the cache. A sequence that would exceed the
        draft model's table of positions gets fewer drafts, or none.
        """
        if (longest := self.model.spec.longest) is not None:
            # the last draft is not read
            rooms = {key: longest + 1 - len(group.tokens) for key, group in groups.items()}
            counts = {key: min(counts[key], rooms[key]) for key in groups}
        drafts = {key: Draft([], []) for key in groups if counts[key] > 0}
        unread = self._unread(groups)
        unread = {key: unread[key] for key in drafts}
        while unread:
            for chunks in self._forwards(unread, groups):
                self._draft(chunks, groups, drafts)
            unread = {
                key: draft.tokens[-1:]
                for key, draft in drafts.items()
                if len(draft.tokens) < counts[key]
            }
        return drafts

    def _unread(self, groups: Mapping[int, SequenceGroup]) -> dict[int, list[int]]:
        """Return the tokens of each sequence that the cache lacks, at least the last one. Forgets
        sequences that are not among `groups`, and rejected drafts of the others.
        """
        cache = self._runner.cache
        for key in cache.table.lengths.keys() - groups.keys():
            cache.remove(key)
        for key, length in list(cache.table.lengths.items()):
            # behind the accepted drafts stands a sampled token, the last, which was never read here
            if length > len(groups[key].tokens) - 1:
                cache.truncate(key, len(groups[key].tokens) - 1)
        known = cache.table.lengths
        return {key: group.tokens[known.get(key, 0) :] for key, group in groups.items()}

    def _forwards(
        self, unread: Mapping[int, list[int]], groups: Mapping[int, SequenceGroup]
    ) -> Iterator[dict[int, SequenceChunk]]:
        """Yield `unread` (sequence key -> tokens) cut into forwards of at most `self.tokens` tokens
        each, as sequence key -> chunk. A long sequence is spread over several forwards.
        """
        chunks, left = {}, self.tokens
        for key, tokens in unread.items():
            first = 0
            while first < len(tokens):
                part = tokens[first : first + left]
                first, left = first + len(part), left - len(part)
                length = len(groups[key].tokens)
                chunks[key] = SequenceChunk(part, last=first == len(tokens), length=length)
                if not left:
                    yield chunks
                    chunks, left = {}, self.tokens
        if chunks:
            yield chunks

    def _draft(
        self,
        chunks: Mapping[int, SequenceChunk],
        groups: Mapping[int, SequenceGroup],
        drafts: Mapping[int, Draft],
    ) -> None:
        """Read `chunks` in one forward of the draft model, and append the next sampled token and
        its logits to the draft of each sequence that is read to its end. All ranks append the same.
        """
        keys, output = self._runner.forward(chunks)
        assert output is not None, "the draft model has a single stage"
        draws = [
            Draw(row, groups[key], groups[key].samples[0], tuple(drafts[key].tokens))
            for row, key in enumerate(keys)
        ]
        tokens, scores = sample_drafts(draws, output.following)
        # sums on a GPU may differ in the last bit between ranks: agree on one token
        for axis in (self.mesh.tp, self.mesh.pp):
            tokens = collectives.reduce_scalar(tokens, axis, "max")
        for key, token, row in zip(keys, read_back(tokens), scores, strict=True):
            drafts[key].tokens.append(token)
            drafts[key].scores.append(row)


def check_draft(draft: ModelSpec, target: ModelSpec) -> None:
    """Raise ValueError where a model cannot draft for another: another size of the vocabulary, or
    a model with a bidirectional prefix or mask.
    """
    target.check_same_vocabulary("--speculative.model", draft)
    if draft.both_ways or draft.has_prefix_mask:
        raise ValueError(
            "the draft model has a bidirectional mask or prefix: use a causal --speculative.model, "
            "or --speculative.method ngram"
        )
