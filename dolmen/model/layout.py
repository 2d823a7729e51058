"""A layout: how a model is split over processes, the only difference between one CPU and a cluster.
Data, checked against the model before anything is built.
"""

import math
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from dolmen.core.config import Count, Positive, config
from dolmen.core.messages import divisor, plural
from dolmen.model.spec import ModelSpec, check_sharding
from dolmen.parallel.schedule import Schedule
from dolmen.parallel.simulation import make_schedule

if TYPE_CHECKING:
    import torch

    from dolmen.core.mesh import Mesh


@config("layout")
class Layout:
    """Sizes of the mesh axes and what is sharded over them."""

    tp: Positive = 1
    """Tensor parallelism: processes that share every layer. Innermost axis, so that it stays inside
    a machine.
    """
    cp: Positive = 1
    """Context parallelism: processes that share every sequence."""
    pp: Positive = 1
    """Pipeline parallelism: processes that hold different layers. Outermost axis, as it
    communicates least.
    """
    dp: Positive | None = None
    """Data parallelism: processes that train on different sequences; unset, as many as the other
    sizes leave. Default: number of processes (or visible GPUs) divided by the other sizes.
    """
    ep: Positive = 1
    """Expert parallelism: processes of dp x cp that hold different experts. Adds no processes."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage: 1 shards optimizer state over dp x cp, 2 gradients too, 3 parameters too; 0
    shards nothing.
    """
    sequence_parallel: bool = False
    """Split the residual stream over tp by tokens: saves activation memory, and repeated norms and
    dropout.
    """
    context: Literal["ring", "gather"] = "ring"
    """Attention with cp: keys and values pass around a ring, or are all-gathered."""
    schedule: str = "1f1b"
    """Order of microbatches in the pipeline: gpipe, 1f1b, interleaved, zero-bubble, zero-bubble-v,
    or a file (dolmen schedule draws it).
    """
    virtual_stages: Positive = 1
    """Stages per process of pp: interleaved takes 2 or more, zero-bubble-v 2."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that backward recomputes in place of storing them: none, those of core attention
    (selective), or of whole layers (full).
    """
    recompute_layers: Count | None = None
    """Number of layers of each stage that recompute, counted from the first. Default: all."""

    reduction: Literal["fast", "fixed"] = "fast"
    """Order of sums over processes. fast: that of NCCL or gloo. fixed: by rank, so that sums do not
    depend on machines and network.
    """

    def __post_init__(self):
        """Raise ValueError for recompute_layers without recomputation."""
        if self.recompute_layers is not None and self.recompute == "none":
            raise ValueError(
                f"layout.recompute-layers is {self.recompute_layers}, but layout.recompute is "
                "none: set --layout.recompute full, or selective"
            )

    @property
    def inner(self) -> int:
        """Number of processes of one data-parallel replica: pp x cp x tp."""
        return self.pp * self.cp * self.tp

    @property
    def world(self) -> int:
        """Number of processes that this layout needs: pp x cp x tp x dp, where an open dp counts as
        1.
        """
        return self.inner * (self.dp or 1)

    def resolve(self, processes: int | None) -> "Layout":
        """Return the layout with dp filled in for `processes` (None: as few as the other axes
        need). Raises ValueError if they do not divide.
        """
        if processes and self.dp is None:
            self._check_divides(processes)
        # without processes: the least dp for which ep divides dp x cp
        dp = self.dp or (
            processes // self.inner if processes else math.lcm(self.ep, self.cp) // self.cp
        )
        if processes is not None and self.inner * dp != processes:
            other_layouts = "".join(
                f" x layout.{name} ({getattr(self, name)})"
                for name in ("cp", "pp")
                if getattr(self, name) > 1
            )
            # what tp x dp has to be
            left, rest = divmod(processes, self.cp * self.pp)
            way = (
                f"set --layout.tp and --layout.dp so that their product is {left}"
                if left and not rest
                else f"start a multiple of {self.inner}, or set another --layout.pp or --layout.cp"
            )
            raise ValueError(
                f"layout.tp ({self.tp}){other_layouts} x layout.dp ({dp}) = "
                f"{plural(self.inner * dp, 'process', 'processes')}, "
                f"but there are {processes}: {way}"
            )
        return replace(self, dp=dp)

    def _check_divides(self, processes: int) -> None:
        """Raise ValueError, with the options to change, if pp x cp x tp does not divide
        `processes`.
        """
        if processes % self.inner == 0:
            return
        sizes = {name: getattr(self, name) for name in ("tp", "cp", "pp")}
        split = {name: size for name, size in sizes.items() if size > 1}
        product = " x ".join(f"layout.{name} ({size})" for name, size in split.items())
        way = " and ".join(f"--layout.{name}" for name in split)
        if len(split) > 1:
            product, way = f"{product} = {self.inner}", f"{way} so that it does"
        else:
            way = f"{way} {divisor(processes, self.inner)}"
        there = plural(processes, "process", "processes")
        below = processes // self.inner * self.inner
        near = " or ".join(f"{size:,}" for size in (below, below + self.inner) if size)
        raise ValueError(
            f"{product} is not a divisor of the {there}: set {way}, or use a multiple of "
            f"{self.inner} processes, such as {near}"
        )

    def mesh(self, device: "torch.device", timeout: timedelta | None = None) -> "Mesh":
        """Build the device mesh of the current process group, whose collectives fail after
        `timeout`. Raises ValueError if the group does not have this layout's size.
        """
        # torch takes a second to import: a layout is data, and `--help` shows it
        from dolmen.core.mesh import build_mesh

        return build_mesh(
            self.dp or 1,
            self.tp,
            device,
            pp=self.pp,
            cp=self.cp,
            ep=self.ep,
            timeout=timeout,
            reduction=self.reduction,
        )

    def make_schedule(self, global_batch_size: int, microbatch_size: int) -> Schedule:
        """Return the pipeline schedule (action lists) of one step, with as many microbatches as the
        batch sizes give. Raises ValueError if the schedule does not exist for them.
        """
        return make_schedule(
            self.schedule,
            self.pp,
            global_batch_size // (self.dp or 1) // microbatch_size,
            self.virtual_stages,
        )

    def check(
        self, model: ModelSpec, sequence_length: int, global_batch_size: int, microbatch_size: int
    ) -> None:
        """Raise ValueError, with the numbers and the option to change, if this layout does not
        divide the model, the batch, the sequence length or the tokens of a microbatch, or has no
        such schedule.
        """
        self.check_model(model)
        dp = self.dp or 1
        if self.reduction == "fixed" and self.zero == 0 and dp * self.cp > 1:
            raise ValueError(
                "layout.reduction fixed needs scattered gradients, but layout.zero is 0: set "
                "--layout.zero 1"
            )
        self.check_batch(global_batch_size, microbatch_size)
        # 2 x cp: zigzag gives each rank an early and a late piece, so that causal work is equal
        if self.cp > 1 and sequence_length % (2 * self.cp):
            raise ValueError(
                f"context parallelism splits a sequence of {sequence_length} tokens into 2 x cp "
                f"({2 * self.cp}) equal parts: set --train.sequence-length to a multiple, such as "
                f"{-(-sequence_length // (2 * self.cp)) * 2 * self.cp}"
            )
        # tokens of a microbatch on a cp rank, which tp ranks share
        tokens = microbatch_size * sequence_length // self.cp
        if self.sequence_parallel and tokens % self.tp:
            raise ValueError(
                f"sequence parallelism splits the {microbatch_size} x "
                f"{sequence_length // self.cp} tokens of a microbatch over tp ({self.tp}), by "
                "which they are not divisible: set --train.sequence-length to a multiple of "
                f"{self.tp * self.cp}, or leave --layout.sequence-parallel off"
            )
        self.make_schedule(global_batch_size, microbatch_size)

    def check_batch(self, global_batch_size: int, microbatch_size: int) -> None:
        """Raise ValueError if a step's sequences cannot be divided into equally many microbatches
        per dp rank.
        """
        dp = self.dp or 1
        if global_batch_size % dp:
            below = global_batch_size // dp * dp
            batches = " or ".join(str(size) for size in (below, below + dp) if size)
            raise ValueError(
                f"train.global-batch-size ({global_batch_size}) is not divisible by dp ({dp}): set "
                f"--train.global-batch-size to {batches}, or use "
                f"{self._near_worlds(global_batch_size)}"
            )
        # sequences of a dp rank in a step, and microbatches of all dp ranks
        rank_batch, microbatches = global_batch_size // dp, global_batch_size // microbatch_size
        if rank_batch % microbatch_size:
            raise ValueError(
                f"train.global-batch-size ({global_batch_size}) / dp ({dp}) = {rank_batch} "
                "sequences per rank is not divisible by train.microbatch-size "
                f"({microbatch_size}): set --train.microbatch-size "
                f"{divisor(rank_batch, near=microbatch_size)}"
                + (f", or use {near}" if (near := self._near_worlds(microbatches)) else "")
            )

    def _near_worlds(self, parts: int) -> str:
        """Return the nearest numbers of processes below and above this layout's, with their dp, for
        which dp divides `parts`, as text; "" where there is none.
        """
        dp = self.dp or 1
        sizes = [size for size in range(1, parts + 1) if parts % size == 0]
        near = [*[size for size in sizes if size < dp][-1:], *[s for s in sizes if s > dp][:1]]
        worlds = " or ".join(f"{self.inner * size:,}" for size in near)
        named = " or ".join(str(size) for size in near)
        return (
            f"{worlds} {'process' if worlds == '1' else 'processes'} (dp {named})" if near else ""
        )

    def check_model(self, model: ModelSpec) -> None:
        """Raise ValueError if this layout does not divide the model: recomputed layers, experts, tp
        shards, and at most layers + 2 pipeline stages.
        """
        if (self.recompute_layers or 0) > model.layers:
            raise ValueError(
                f"layout.recompute-layers ({self.recompute_layers}) exceeds num_hidden_layers "
                f"({model.layers}): leave it out to recompute all"
            )
        self._check_experts(model)
        check_sharding(model.params, {"tp": self.tp, "ep": self.ep})
        if self.pp * self.virtual_stages > model.layers + 2:
            raise ValueError(
                f"layout.pp ({self.pp}) x layout.virtual-stages ({self.virtual_stages}) = "
                f"{self.pp * self.virtual_stages} stages, but there are num_hidden_layers "
                f"({model.layers}) + 2 units (embedding, layers, head): set --layout.pp x "
                f"--layout.virtual-stages to {model.layers + 2} or less"
            )

    def _check_experts(self, model: ModelSpec) -> None:
        """Raise ValueError if ep is over 1 for a model without experts, or does not divide
        dp x cp.
        """
        # experts are sharded over the ranks of dp x cp
        shared = (self.dp or 1) * self.cp
        if self.ep > 1 and not model.experts:
            raise ValueError(
                f"layout.ep ({self.ep}) splits experts, but the model has none: set --layout.ep 1"
            )
        if shared % self.ep:
            raise ValueError(
                f"layout.ep ({self.ep}) is not a divisor of layout.dp ({self.dp or 1}) x "
                f"layout.cp ({self.cp}): set --layout.dp {math.lcm(self.ep, self.cp) // self.cp}, "
                f"or --layout.ep {math.gcd(shared, model.experts, self.ep)}"
            )


@config("layout")
class TensorParallelLayout:
    """How a served model is split over processes."""

    tp: Positive = 1
    """Tensor parallelism: processes that share every layer."""


def balance(layers: int, stages: int) -> list[range]:
    """Return the layers of each pipeline stage. Embedding and head count as one layer each: of the
    layers + 2 units every stage gets an equal number, or one more. The first stage is the first to
    get one more, then the last, because embedding and head take less time than a layer: so layers
    that stages divide are divided evenly, where one stage of 3 layers among 63 of 2 would hold up
    all others. Raises ValueError if there are more stages than units.
    """
    # embedding, layers, head
    things = layers + 2
    if stages > things:
        raise ValueError(
            f"{plural(stages, 'stage')} for {plural(layers, 'layer')}, an embedding and a head: "
            f"use at most {things}"
        )
    quotient, more = divmod(things, stages)
    within = max(more - 2, 0)  # stages between the ends that have one more
    # layer at which each stage begins; the first stage has one unit less of layers, for the
    # embedding
    cuts = [
        0,
        *(
            i * quotient - 1 + (more > 0) + (i - 1) * within // (stages - 2 or 1)
            for i in range(1, stages)
        ),
        layers,
    ]
    return [range(a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
