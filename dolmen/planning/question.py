"""A run on all GPUs of a cluster, to be planned. Its space, the memory of its ranks and the time of
its layouts derive from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dolmen.core.config import from_dict, to_dict
from dolmen.model.layout import Layout
from dolmen.planning.capacity import Capacity
from dolmen.planning.config import PlanRequest
from dolmen.planning.hardware import Cluster, read_cluster
from dolmen.planning.pricing import Pricing
from dolmen.planning.space import LayoutChoice, Pins, Space
from dolmen.planning.step import error_group, read_errors
from dolmen.training.config import RunConfig, TrainConfig

PRODUCTS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Names that devices have for the dtype of a step's products."""


STEP = ("global_batch_size", "sequence_length")
"""Options without which a plan means nothing."""


@dataclass(frozen=True)
class Question:
    """A planning problem: a run on all GPUs of a cluster, with the pinned parts of its layout.
    The space, memory and prices derive from it; the last two are computed once.
    """

    name: str
    run: RunConfig
    cluster: Cluster
    pins: Pins
    microbatch_size: int | None
    """The microbatch size that is pinned; None: searched."""
    named: RunConfig
    """The run that the model's name stands for, before any option of the request."""
    assumed: tuple[str, ...] = ()
    """Options of STEP that neither that run nor the request sets: defaults."""
    headroom: float = 0.0
    """Share of the device's memory that layouts leave free."""

    @staticmethod
    def from_request(request: PlanRequest) -> "Question":
        """Resolve a request: read the cluster, apply its options to the run, choose the dtype.
        Raises ValueError without --cluster, or for options that do not fit the model or the device.
        """
        options = request.options
        if options.cluster is None:
            raise ValueError("missing --cluster (such as dgx-a100:384, or a YAML file)")
        cluster = read_cluster(options.cluster)
        step = {n: v for n, v in options.train.specified.items() if n != "microbatch_size"}
        if "dtype" not in step and request.run.train.dtype not in ("bfloat16", "float16"):
            # large models are not trained in fp32: only if --train.dtype is fp32
            step["dtype"] = "bfloat16"
        if "dtype" not in options.train.specified and "bf16" not in cluster.device.peak:
            # a V100 has no bf16
            step["dtype"] = "float16" if "fp16" in cluster.device.peak else "float32"
        split = (options.layout.schedule or "").startswith("zero-bubble")
        if split and "compile" not in step:
            # a compiled backward cannot be split
            step["compile"] = False
        run = replace(request.run, train=replace(request.run.train, **step))
        # before minutes of search
        run.check_length()
        if split:
            replace(run, layout=Layout(**options.layout.specified)).refuse_compiled()
        # raises for a dtype that the device does not multiply
        cluster.device.rate(PRODUCTS[run.train.dtype])
        default = to_dict(TrainConfig())
        named = to_dict(request.run.train)
        # shown, as they decide the result
        assumed = tuple(n for n in STEP if n not in step and named[n] == default[n])
        micro = options.train.microbatch_size
        return Question(
            request.name,
            run,
            cluster,
            options.layout,
            micro,
            request.run,
            assumed,
            options.headroom,
        )

    @property
    def memory(self) -> int:
        """Bytes of a device that a layout may use: its memory without the headroom."""
        return int(self.cluster.device.memory * (1 - self.headroom))

    @property
    def batch(self) -> int:
        """Sequences of a step (global batch size)."""
        return self.run.train.global_batch_size

    def space(self, pins: Pins | None = None) -> Space:
        """Return the space of layouts to search, with these `pins`, or the question's own
        if None.
        """
        return Space(
            self.run.trained,
            self.cluster.gpus,
            self.batch,
            self.run.sequence_length,
            self.microbatch_size,
            self.run.train.compile,
            self.pins if pins is None else pins,
        )

    @cached_property
    def capacity(self) -> Capacity:
        """Closed-form memory of each rank, for any layout of the run."""
        return Capacity(
            self.run.trained,
            self.run.sequence_length,
            self.run.train.dropout,
            4 if self.run.train.dtype == "float32" else 2,
            other=self.cluster.device.reserved,
        )

    @cached_property
    def pricing(self) -> Pricing:
        """Predictor of the seconds of a step, for any layout of the run."""
        dtype = PRODUCTS[self.run.train.dtype]
        group = error_group(self.cluster.device.name, self.run.spec.experts > 0)
        spread = read_errors().spread(group)
        return Pricing(self.capacity, self.cluster, self.batch, dtype, spread)

    def fullest_bytes(self, choice: LayoutChoice) -> int:
        """Return the peak bytes of the fullest rank of a layout, by closed forms."""
        return self.capacity.fullest(choice, self.batch)

    def fits(self, choice: LayoutChoice) -> bool:
        """Return whether the fullest rank of a layout fits the device's memory without the
        headroom.
        """
        return self.fullest_bytes(choice) <= self.memory

    def run_with_layout(self, layout: Mapping[str, int | str | bool]) -> RunConfig:
        """Return the run with a layout in place of its own. `layout`: options as
        `LayoutChoice.options` has them.
        """
        overrides: dict[str, dict[str, Any]] = {"layout": {}, "train": {}}
        for name, value in layout.items():
            section, _, option = name.partition(".")
            overrides[section][option] = value
        return from_dict(RunConfig, overrides, replace(self.run, layout=Layout()))
