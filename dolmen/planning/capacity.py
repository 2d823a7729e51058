"""Peak memory of each pipeline rank in closed form, fast enough for a hundred thousand layouts. A
dry run (dryrun.py) counts the best of these to the byte.

Parameters, gradients and optimizer state follow from the parameter specs (docs/concepts/zero.md has
the formulas), the activations of a layer from its components (model/count.py), and the number of
microbatches in flight from the schedule:

    gpipe           m
    1f1b            min(m, p - r)
    interleaved     min(m v, 2 (p - r - 1) + (v - 1) p + 1) / v
    zero-bubble     min(m, p)
    zero-bubble-v   min(m, p, (m + r + 1) / 2)

of a rank's layers, with p ranks of v virtual stages, rank r, m microbatches
(tests/planning/test_capacity.py holds them to the simulated lists).
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from dolmen.model.count import activation_bytes_per_layer
from dolmen.model.spec import AttentionSpec, BlockSpec, LayerRun, MLPSpec, ModelSpec, MoESpec
from dolmen.planning.ledger import Live
from dolmen.planning.plan import StageMemory
from dolmen.planning.ranks import ModelRanks, ParameterCount, stages_of
from dolmen.planning.space import LayoutChoice


def layer_bytes(
    spec: ModelSpec,
    block: BlockSpec,
    batch: int,
    length: int,
    *,
    cp: int,
    recompute: str,
    element_bytes: int,
    **more: Any,
) -> float:
    """Return the bytes of activations that a layer keeps of one microbatch from forward to
    backward, as `activation_bytes_per_layer` (model/count.py), but for any kind of block. Experts
    keep what a dense layer of the chosen experts keeps, and the routed tokens twice; latent
    attention also keeps its latents. `more`: further arguments of that function.
    """
    tokens, extra, e = batch * length / cp, 0.0, element_bytes
    if isinstance(block.mlp, MoESpec):
        experts = block.mlp
        # sent to the experts, and returned
        extra += tokens * 2 * e * experts.per_token * spec.hidden_size
        extra += tokens * 8 * experts.number  # the router's, in fp32
        block = replace(block, mlp=MLPSpec(experts.per_token * experts.size))
    if not isinstance(block.mixer, AttentionSpec):
        mixer = block.mixer
        extra += tokens * e * 2 * ((mixer.q_rank or 0) + mixer.kv_rank)
        block = replace(block, mixer=AttentionSpec(mixer.heads, mixer.heads, mixer.head_size))
    block_model = replace(spec, runs=(LayerRun((block,), 1),))
    how = {"cp": cp, "recompute": recompute, "element_bytes": e, **more}
    bytes_per_layer = activation_bytes_per_layer(block_model, batch, length, **how)
    # full recomputation keeps the input of the layer only
    return bytes_per_layer + (0.0 if recompute == "full" else extra)


LOGITS = 1 << 28
"""Logits in a chunk of the loss on a GPU (ops/kernels.py: logits_at_once)."""
LOGIT_BYTES = 6
"""Bytes of each: in half precision and in fp32, which becomes its gradient."""


def microbatches_in_flight(schedule: str, ranks: int, micros: int, chunks: int, rank: int) -> float:
    """Return the most microbatches whose activations a pipeline rank holds at once, in units of all
    its layers (`chunks` virtual stages), so that it may be a fraction.
    """
    match schedule:
        case "gpipe":
            return micros
        case "1f1b":
            return min(micros, ranks - rank)
        case "interleaved":
            warm = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
            return min(micros * chunks, warm + 1) / chunks
        case "zero-bubble":
            return min(micros, ranks)
    return min(micros, ranks, (micros + rank + 1) / 2)


class States(NamedTuple):
    """Bytes of a rank that do not depend on a microbatch."""

    held: Live
    """Parameters, their compute copy, and optimizer state, held at any moment."""
    always: int
    """Sum of `held`."""
    whole: int
    """Gradients that accumulate in fp32 and are not reduced yet."""
    sharded: int
    """Reduced gradients of this rank's shard."""
    arriving: int
    """Gradients of one block and of embedding and head, before any is reduced."""
    packed: int
    """Buffer into which FSDP packs the gradients of the largest unit to reduce them."""
    lasting: int
    """The part of that buffer that the last unit keeps until the next backward."""
    early: int
    """Gradients of the head that a split backward makes before those of other weights."""


class ActivationPeaks(NamedTuple):
    """Bytes of activations of a rank at its three possible peaks."""

    forward: float
    """Bytes as a forward ends: with the loss and its logits, at the last stage."""
    before: float
    """Bytes in the first backward, when no gradients exist yet."""
    after: float
    """Bytes in a later backward, when gradients exist."""
    more: bool
    """A forward comes after the first backward."""
    sent: int
    """Bytes of the batch, and of buffers that are sent to and received from neighbours."""


def _peaks_of(states: States, moments: ActivationPeaks) -> tuple[float, float, float]:
    """Return the bytes of a rank, on top of what is always held, at its three possible peaks: in a
    forward, in the first backward, in a later backward.
    """
    reduced = states.whole + states.sharded
    coming = max(states.arriving, states.packed)
    return (
        moments.forward + (reduced + states.lasting if moments.more else states.early),
        moments.before + coming,
        moments.after + reduced + coming,
    )


@dataclass
class Capacity:
    """Memory of each rank of a model that is trained on sequences of `sequence_length`, in closed
    form.
    """

    spec: ModelSpec
    sequence_length: int
    dropout: float = 0.0
    element_bytes: int = 2
    """Bytes of the compute dtype; master parameters have four."""
    moments: int = 2
    """Numbers of optimizer state per parameter, in fp32."""
    other: int = 0
    """Context, communicators and workspace, as the device's file states them."""
    _known_layers: dict[tuple, tuple[list[float], list[float]]] = field(default_factory=dict)
    _known_activations: dict[tuple, tuple[float, float]] = field(default_factory=dict)
    _known_states: dict[tuple, States] = field(default_factory=dict)
    _known_moments: dict[tuple, ActivationPeaks] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> ModelRanks:
        """Layers and parameters of each pipeline rank of the model."""
        return ModelRanks(self.spec)

    def stages(self, choice: LayoutChoice, global_batch_size: int) -> tuple[StageMemory, ...]:
        """Return the peak memory of each pipeline rank, by kind, in order of the ranks."""
        return tuple(
            self.stage_memory(choice, rank, global_batch_size) for rank in range(choice.pp)
        )

    def fullest(self, choice: LayoutChoice, global_batch_size: int) -> int:
        """Return the peak bytes of the rank that holds most. Of pipeline ranks with equal layers
        only the first and the last are looked at.
        """
        micros = global_batch_size // choice.dp // choice.microbatch_size
        most = 0
        for rank in self.ranks.extreme_ranks(choice):
            states, moments = (
                self._states(choice, rank, micros),
                self._activation_peaks(choice, rank, micros),
            )
            total = states.always + moments.sent + max(_peaks_of(states, moments))
            most = total if total > most else most
        return round(most) + self.other

    def stage_memory(self, choice: LayoutChoice, rank: int, global_batch_size: int) -> StageMemory:
        """Return the memory by kind of one pipeline rank at the highest of its three peaks."""
        micros = global_batch_size // choice.dp // choice.microbatch_size
        states, moments = (
            self._states(choice, rank, micros),
            self._activation_peaks(choice, rank, micros),
        )
        peaks = _peaks_of(states, moments)
        which = peaks.index(max(peaks))
        # peaks 1 and 2 are in a backward
        backward = which > 0
        # gradients exist already
        later = which == 2 or (which == 0 and moments.more)
        packs = states.packed if backward and states.packed > states.arriving else 0
        lasts = states.lasting if which == 0 and moments.more else 0
        early = states.early if which == 0 and not moments.more else 0
        live = states.held
        return StageMemory(
            live._replace(
                gradient=states.sharded if later else 0,
                unsharded=(states.whole if later else 0)
                + (states.arriving if backward and not packs else early),
                activation=round((moments.forward, moments.before, moments.after)[which]),
                buffer=moments.sent + packs + lasts,
            ),
            self.other,
        )

    def _states(self, choice: LayoutChoice, rank: int, micros: int) -> States:
        """Return the bytes of parameters, copies, optimizer state and gradients of a pipeline rank,
        cached.
        """
        split = choice.schedule.startswith("zero-bubble")
        one_round = choice.schedule == "interleaved" and micros == choice.pp
        key = (*choice[:6], choice.schedule, choice.virtual_stages, rank, micros > 1, one_round)
        if states := self._known_states.get(key):
            return states
        blocks, ends, largest = self.ranks.parameters(choice, rank)
        e, number = self.element_bytes, (blocks + ends).number
        rest = self._shard_bytes(choice, blocks + ends)
        gathered = number
        # parameters are gathered block by block
        if choice.zero == 3 and not split:
            gathered = (ends + largest + largest).number  # what computes, and what is next
        # gradients are reduced once, after the last microbatch
        waits = (choice.zero < 2 or split) and micros > 1
        last = choice.pp * choice.virtual_stages - 1 in stages_of(choice, rank)
        waiting = number
        if one_round:
            # all backwards of a chunk are done before those of the one before it: its gradients
            # are sent by then; those of the embedding come last
            waiting = blocks.number // choice.virtual_stages + (ends.number if rank else 0)
        # with each backward, or with the last, when nothing else is under way
        sends = choice.dp * choice.cp > 1 and (not waits or choice.pp == 1)
        live = Live(parameter=rest, compute=e * gathered, optimizer=self.moments * rest)
        states = States(
            live,
            live.total,
            4 * waiting if waits else 0,
            0 if waits else rest,
            e * (largest + ends).number,
            (4 + e) * max(largest.number, ends.number) * sends,
            4 * (ends.number or largest.number) * (sends and not waits and micros > 1),
            4 * ends.number * (split and micros > 1 and last),
        )
        self._known_states[key] = states
        return states

    def _activation_peaks(self, choice: LayoutChoice, rank: int, micros: int) -> ActivationPeaks:
        """Return the activation bytes of a pipeline rank at its three possible peaks, cached."""
        key = (
            choice.tp,
            choice.cp,
            choice.pp,
            choice.sequence_parallel,
            choice.context,
            choice.schedule,
            choice.virtual_stages,
            choice.recompute,
            choice.recompute_layers,
            choice.microbatch_size,
            rank,
            micros,
        )
        if peaks := self._known_moments.get(key):
            return peaks
        at_once = microbatches_in_flight(
            choice.schedule, choice.pp, micros, choice.virtual_stages, rank
        )
        activations, again = self._activations(choice, rank)
        loss = logits = 0.0
        if choice.pp * choice.virtual_stages - 1 in stages_of(choice, rank):
            loss, logits = self._head_bytes(choice)
        more = micros > at_once
        # without another forward one chunk has been freed
        later = at_once if more else at_once - 1 / choice.virtual_stages
        # gpipe's losses, whose gradients are made with them, all wait for the first backward
        losses = micros if choice.schedule == "gpipe" else 1
        tokens = choice.microbatch_size * self.sequence_length // choice.cp
        stream = tokens * self.spec.hidden_size * self.element_bytes
        if choice.sequence_parallel:
            stream //= choice.tp
        # the batch, and what goes to and comes from two neighbours
        sent = 16 * micros * tokens + (4 * stream if choice.pp > 1 else 0)
        peaks = ActivationPeaks(
            at_once * activations + losses * loss + logits,
            at_once * activations + losses * loss + again,
            later * activations + max(losses - 1, 1) * loss + again,
            more,
            sent,
        )
        self._known_moments[key] = peaks
        return peaks

    def _shard_bytes(self, choice: LayoutChoice, full: ParameterCount) -> int:
        """Return the bytes of this rank's shard of parameters in fp32. `full`: the parameters
        before sharding over dp and cp.
        """
        d, ed = self._shards(choice)
        return 4 * (-(-full.dense // d) + -(-full.experts // ed))

    def _shards(self, choice: LayoutChoice) -> tuple[int, int]:
        """Return over how many ranks ZeRO shards dense and expert parameters; (1, 1) at ZeRO 0."""
        if choice.zero == 0:
            return 1, 1
        fsdp = choice.dp * choice.cp
        return fsdp, max(1, fsdp // choice.ep)

    def _activations(self, choice: LayoutChoice, rank: int) -> tuple[float, float]:
        """Return the activation bytes that all layers of a pipeline rank keep per microbatch, and
        the most that recomputing one layer needs for a moment.
        """
        key = (
            choice.tp,
            choice.cp,
            choice.sequence_parallel,
            choice.context,
            choice.recompute,
            choice.recompute_layers,
            choice.microbatch_size,
        )
        rank_key = (*key, choice.pp, choice.schedule, choice.virtual_stages, rank)
        if known := self._known_activations.get(rank_key):
            return known
        if key not in self._known_layers:
            kinds = self.ranks.blocks
            plain = [self._kept_bytes(block, choice, "none") for block in kinds]
            layer_sizes = [self._kept_bytes(block, choice, choice.recompute) for block in kinds]
            self._known_layers[key] = plain, layer_sizes
        plain, layer_sizes = self._known_layers[key]
        total = moment = 0.0
        for stage in stages_of(choice, rank):
            for number, layer in enumerate(self.ranks.layers_of_stages(choice)[stage]):
                kind = self.ranks.kinds[layer]
                limit = choice.recompute_layers
                again = choice.recompute != "none" and (limit is None or number < limit)
                total += (layer_sizes if again else plain)[kind]
                moment = max(moment, plain[kind] - layer_sizes[kind] if again else 0.0)
        self._known_activations[rank_key] = total, moment
        return total, moment

    def _kept_bytes(self, block: BlockSpec, choice: LayoutChoice, recompute: str) -> float:
        """Return the activation bytes that a layer keeps of a microbatch with this kind of
        recomputation. Where cp gathers, these include keys and values of the whole sequence
        (docs/concepts/context-parallel.md).
        """
        layer_size = layer_bytes(
            self.spec,
            block,
            choice.microbatch_size,
            self.sequence_length,
            dropout=self.dropout,
            tp=choice.tp,
            sequence_parallel=choice.sequence_parallel,
            recompute=recompute,
            cp=choice.cp,
            element_bytes=self.element_bytes,
        )
        gathers = choice.cp > 1 and choice.context == "gather" and not self.dropout
        if not gathers or recompute != "none":
            return layer_size
        mixer = block.mixer
        kv_heads = mixer.kv_heads if isinstance(mixer, AttentionSpec) else mixer.heads
        # kv heads are replicated where tp exceeds them
        width = max(kv_heads / choice.tp, 1) * sum(mixer.head_sizes)
        full = choice.microbatch_size * self.sequence_length
        return layer_size + full * (1 - 0.5 / choice.cp) * width * self.element_bytes

    def _head_bytes(self, choice: LayoutChoice) -> tuple[float, float]:
        """Return the bytes that the LM head keeps from forward to backward (its input and both
        gradients), and those that it needs only for a moment (a chunk of logits, and what the
        gradient of its weight takes more in fp32).
        """
        tokens = choice.microbatch_size * self.sequence_length / choice.cp
        # of the vocabulary, padded to tp
        rows = -(-self.spec.vocab_size // choice.tp)
        h, e = self.spec.width, self.element_bytes
        moment = LOGIT_BYTES * min(tokens * rows, LOGITS) + (4 - e) * rows * h
        return (2 * tokens + rows) * h * e, moment
