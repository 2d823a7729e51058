"""A run on all GPUs of a cluster, to be planned. Its space, the memory of its ranks and the time of
its layouts are computed from it once.
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
    """A run on all GPUs of a cluster, and what is given of its layout."""

    name: str
    run: RunConfig
    cluster: Cluster
    pins: Pins
    microbatch_size: int | None
    named: RunConfig
    """The run that the name stands for, before what is asked."""
    assumed: tuple[str, ...] = ()
    """Options of STEP that neither it nor what is asked says: a run's defaults."""

    @staticmethod
    def from_request(request: PlanRequest) -> "Question":
        """Resolve a request. Raises ValueError."""
        options = request.options
        if options.cluster is None:
            raise ValueError("missing --cluster (such as dgx-a100:384, or a YAML file)")
        cluster = read_cluster(options.cluster)
        step = {n: v for n, v in options.train.said.items() if n != "microbatch_size"}
        if "dtype" not in step and request.run.train.dtype not in ("bfloat16", "float16"):
            step["dtype"] = "bfloat16"
        if "dtype" not in options.train.said and "bf16" not in cluster.device.peak:
            step["dtype"] = "float16" if "fp16" in cluster.device.peak else "float32"
        split = (options.layout.schedule or "").startswith("zero-bubble")
        if split and "compile" not in step:
            step["compile"] = False
        run = replace(request.run, train=replace(request.run.train, **step))
        run.check_length()
        if split:
            replace(run, layout=Layout(**options.layout.said)).refuse_compiled()
        cluster.device.rate(PRODUCTS[run.train.dtype])
        default = to_dict(TrainConfig())
        named = to_dict(request.run.train)
        assumed = tuple(n for n in STEP if n not in step and named[n] == default[n])
        micro = options.train.microbatch_size
        return Question(request.name, run, cluster, options.layout, micro, request.run, assumed)

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.run.train.global_batch_size

    def space(self, pins: Pins | None = None) -> Space:
        """Its layouts, or those with other pins."""
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
        """Memory of its ranks."""
        return Capacity(
            self.run.trained,
            self.run.sequence_length,
            self.run.train.dropout,
            4 if self.run.train.dtype == "float32" else 2,
            other=self.cluster.device.reserved,
        )

    @cached_property
    def pricing(self) -> Pricing:
        """Time of its layouts."""
        dtype = PRODUCTS[self.run.train.dtype]
        group = error_group(self.cluster.device.name, self.run.tree.experts > 0)
        spread = read_errors().spread(group)
        return Pricing(self.capacity, self.cluster, self.batch, dtype, spread)

    def fullest_bytes(self, choice: LayoutChoice) -> int:
        """Bytes of the fullest rank."""
        return self.capacity.fullest(choice, self.batch)

    def fits(self, choice: LayoutChoice) -> bool:
        """Return whether every rank has memory enough."""
        return self.fullest_bytes(choice) <= self.cluster.device.memory

    def run_with_layout(self, layout: Mapping[str, int | str | bool]) -> RunConfig:
        """The run with a layout, whose options these are, as `dolmen train` takes it."""
        said: dict[str, dict[str, Any]] = {"layout": {}, "train": {}}
        for name, value in layout.items():
            section, _, option = name.partition(".")
            said[section][option] = value
        return from_dict(RunConfig, said, replace(self.run, layout=Layout()))
