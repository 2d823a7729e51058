"""Every layout of a model on so many GPUs, as numbers: what `Layout.check` takes, without what has
no effect (sequence parallelism without tp, ZeRO without ranks to shard over). It is checked for
each axis once and not of each layout, of which there are a hundred thousand.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Literal, NamedTuple

from dolmen.core.config import config
from dolmen.core.messages import plural
from dolmen.model.layout import Layout
from dolmen.model.spec import ModelSpec, check_sharding

CONTEXT_TOKENS = 4096
"""Tokens of a sequence that a rank of cp keeps at least: cp that leaves less is planned if pinned.
"""


@config("layout")
class Pins:
    """Fixed parts of the layout; unset ones are searched."""

    tp: int | None = None
    """Tensor parallelism."""
    cp: int | None = None
    """Context parallelism. Unset: searched, with at least 4,096 tokens of a sequence per rank."""
    pp: int | None = None
    """Pipeline parallelism."""
    dp: int | None = None
    """Data parallelism."""
    ep: int | None = None
    """Expert parallelism."""
    zero: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage."""
    sequence_parallel: bool | None = None
    """Split the residual stream over tp by tokens."""
    context: Literal["ring", "gather"] | None = None
    """Attention with cp: ring or all-gather of keys and values."""
    schedule: str | None = None
    """Order of microbatches: gpipe, 1f1b, interleaved, zero-bubble, zero-bubble-v."""
    virtual_stages: int | None = None
    """Stages per process of pp."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Activations that are recomputed in backward: none, core attention, or whole layers."""
    recompute_layers: int | None = None
    """Number of layers of each stage that recompute, counted from the first. Unset: all."""

    def __post_init__(self):
        """Raise ValueError for options that no layout can have."""
        Layout(**self.specified)  # which refuses its own

    @property
    def specified(self) -> dict:
        """The options that are pinned, by name. With recompute_layers alone, recompute is
        "full".
        """
        stated = {name: value for name, value in asdict(self).items() if value is not None}
        if stated.get("recompute_layers") is not None and "recompute" not in stated:
            stated["recompute"] = "full"
        return stated


class LayoutChoice(NamedTuple):
    """One layout of a run, with its microbatch size."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    zero: Literal[0, 1, 2, 3]
    sequence_parallel: bool
    context: Literal["ring", "gather"]
    schedule: str
    virtual_stages: int
    recompute: Literal["none", "selective", "full"]
    recompute_layers: int | None
    microbatch_size: int

    @property
    def layout(self) -> Layout:
        """The same choice as the `Layout` of a run, which has no microbatch size."""
        return Layout(**{k: v for k, v in self._asdict().items() if k != "microbatch_size"})

    @property
    def options(self) -> dict[str, int | str | bool]:
        """The options of `dolmen train` that select it, without those that have their default."""
        options: dict[str, int | str | bool] = {}
        sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "ep": self.ep}
        options |= {f"layout.{name}": size for name, size in sizes.items() if size > 1}
        options["layout.dp"] = self.dp
        if self.dp * self.cp > 1:
            options["layout.zero"] = self.zero
        if self.sequence_parallel:
            options["layout.sequence-parallel"] = True
        if self.cp > 1:
            options["layout.context"] = self.context
        if self.pp > 1:
            options["layout.schedule"] = self.schedule
        if self.virtual_stages > 1:
            options["layout.virtual-stages"] = self.virtual_stages
        if self.recompute != "none":
            options["layout.recompute"] = self.recompute
            if self.recompute_layers is not None:
                options["layout.recompute-layers"] = self.recompute_layers
        options["train.microbatch-size"] = self.microbatch_size
        return options


@dataclass(frozen=True)
class Space:
    """All layouts of a model on `gpus` GPUs with a batch, as far as `pins` leave them open."""

    spec: ModelSpec
    gpus: int
    global_batch_size: int
    sequence_length: int
    microbatch_size: int | None = None
    compile: bool = False
    """Blocks are compiled, so that no schedule with a split backward is possible."""
    pins: Pins = Pins()

    def choices(self) -> Iterator[LayoutChoice]:
        """Yield every layout with every microbatch size and schedule that training accepts."""
        for tp, cp, pp, dp, ep in self.meshes():
            if self.global_batch_size % dp:
                continue
            for size in _divisors_or_pinned(self.global_batch_size // dp, self.microbatch_size):
                yield from self._layouts(tp, cp, pp, dp, ep, size)

    def meshes(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield the (tp, cp, pp, dp, ep) that use all GPUs, divide the model and fit the pins,
        whatever the batch.
        """
        pins, spec = self.pins, self.spec
        if (pins.recompute_layers or 0) > spec.layers:
            return
        # kinds of cuts, not parameters: a few per model
        cuts = _Cuts(spec)
        experts = spec.experts
        for tp in _divisors_or_pinned(self.gpus, pins.tp):
            if not cuts.take("tp", tp):
                continue
            for cp in _divisors_or_pinned(self.gpus // tp, pins.cp):
                if not self._cp_divides_sequence(cp):
                    continue
                for pp in _divisors_or_pinned(self.gpus // tp // cp, pins.pp):
                    dp = self.gpus // tp // cp // pp
                    # embedding and head may be stages of their own
                    if pp > spec.layers + 2 or pins.dp not in (None, dp):
                        continue
                    # ep uses the ranks of dp and cp
                    for ep in _divisors_or_pinned(
                        math.gcd(dp * cp, experts) if experts else 1, pins.ep
                    ):
                        if cuts.take("ep", ep):
                            yield tp, cp, pp, dp, ep

    def _cp_divides_sequence(self, cp: int) -> bool:
        """Return whether context parallelism of size cp may be planned: it is 1, or divides the
        sequence into 2 * cp chunks and leaves at least 4,096 tokens per rank (or is pinned).
        """
        if cp == 1:
            return True
        # shorter ones gain nothing
        enough = self.pins.cp is not None or self.sequence_length >= cp * CONTEXT_TOKENS
        return enough and self.sequence_length % (2 * cp) == 0

    def _layouts(
        self, tp: int, cp: int, pp: int, dp: int, ep: int, size: int
    ) -> Iterator[LayoutChoice]:
        """Yield the layouts of one mesh and microbatch size `size`: all schedules, sequence
        parallelism, ZeRO stages, context kinds and recomputation that are possible and not pinned
        otherwise.
        """
        pins = self.pins
        tokens = size * self.sequence_length // cp
        # sequence parallelism splits the tokens evenly
        splits = tp > 1 and tokens % tp == 0
        stream = _pinned_values((False, True) if splits else (False,), pins.sequence_parallel)
        zeros = _pinned_values((0, 1, 2, 3) if dp * cp > 1 else (1,), pins.zero, alone=dp * cp == 1)
        contexts = _pinned_values(
            ("ring", "gather") if cp > 1 else ("ring",), pins.context, alone=cp == 1
        )
        again = (pins.recompute,) if pins.recompute else ("none", "selective", "full")
        if pins.recompute_layers is not None and pins.recompute is None:
            again = ("full",)
        micros = self.global_batch_size // dp // size
        for name, chunks in _schedules(pp, micros, self.spec.layers, pins):
            # a compiled backward makes both gradients at once
            if self.compile and name.startswith("zero-bubble"):
                continue
            for sequence_parallel in stream:
                for zero in zeros:
                    for context in contexts:
                        for recompute in again:
                            yield LayoutChoice(
                                tp,
                                cp,
                                pp,
                                dp,
                                ep,
                                zero,
                                sequence_parallel,
                                context,
                                name,
                                chunks,
                                recompute,
                                pins.recompute_layers,
                                size,
                            )

    def refuse(self) -> None:
        """Raise the ValueError that explains why there is no layout at all, with the numbers and
        the option.
        """
        # the checks of a run explain themselves, so try these first
        layout = Layout(**self.pins.specified)
        # the clearest reason first
        if self.gpus % layout.inner or layout.dp and layout.inner * layout.dp > self.gpus:
            layout.resolve(self.gpus)
        meshes = list(self.meshes())
        if not meshes:
            pinned = layout.resolve(self.gpus)
            pinned.check(self.spec, self.sequence_length, pinned.dp or 1, 1)
            raise ValueError(
                f"no layout splits this model over {plural(self.gpus, 'GPU')} with the given "
                "--layout options: leave some of them out"
            )
        # the mesh fits; only the batch may not
        degrees = sorted({dp for _, _, _, dp, _ in meshes})
        if all(self.global_batch_size % dp for dp in degrees):
            least = degrees[0]
            raise ValueError(
                f"train.global-batch-size ({self.global_batch_size:,}) is not divisible by any "
                f"possible dp on {plural(self.gpus, 'GPU')} (the smallest is {least}): set "
                "--train.global-batch-size to a multiple, such as "
                f"{-(-self.global_batch_size // least) * least}"
            )
        raise ValueError(
            f"no layout of {plural(self.gpus, 'GPU')} takes train.global-batch-size "
            f"({self.global_batch_size:,}) with the given --layout options and "
            "--train.microbatch-size: leave some of them out"
        )


class _Cuts:
    """Checks whether an axis of a size splits all parameters, each kind of cut once."""

    def __init__(self, spec: ModelSpec):
        """Keep one parameter for each kind of sharding in the model."""
        # one parameter per kind of cut
        self.params = {str(param.shards): param for param in spec.params.values()}
        self.taken: dict[tuple[str, int], bool] = {}

    def take(self, axis: Literal["tp", "ep"], size: int) -> bool:
        """Return whether `size` ranks of an axis can split all parameters of the model; cached."""
        if (axis, size) not in self.taken:
            try:
                check_sharding(self.params, {"tp": 1, "ep": 1, axis: size})
            except ValueError:
                self.taken[axis, size] = False
            else:
                self.taken[axis, size] = True
        return self.taken[axis, size]


@cache
def _schedules(pp: int, micros: int, layers: int, pins: Pins) -> tuple[tuple[str, int], ...]:
    """Return (name, virtual stages) of the schedules that `pp` ranks can run with so many
    microbatches and layers, as far as pins allow; without a pipeline only 1f1b. Cached.
    """
    # embedding and head count as layers in the balance
    things = layers + 2
    if pp == 1:
        schedules = [("1f1b", 1)]
    else:
        schedules = [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1)]
        if 2 * pp <= things:
            schedules.append(("zero-bubble-v", 2))
        # interleaved 1F1B needs whole rounds of pp microbatches
        if micros % pp == 0:
            schedules += [("interleaved", chunks) for chunks in range(2, things // pp + 1)]
    return tuple(
        (name, chunks)
        for name, chunks in schedules
        if pins.schedule in (None, name) and pins.virtual_stages in (None, chunks)
    )


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number in increasing order; cached."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def _divisors_or_pinned(number: int, pinned: int | None) -> list[int]:
    """Return the divisors of `number`; only `pinned`, if it is set (none if it is no divisor)."""
    if pinned is not None:
        return [pinned] if number % pinned == 0 else []
    return list(divisors(number))


def _pinned_values(known: tuple, pinned: object, alone: bool = False) -> tuple:
    """Return the `known` values, or only the pinned one. `alone`: the option has no effect here, so
    any pinned value stands for the one known value.
    """
    return known if pinned is None or alone else tuple(value for value in known if value == pinned)
