"""State of a run that a checkpoint keeps beside its tensors: all that a resumed run needs to
continue as if it had never stopped.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dolmen.checkpoint import folders
from dolmen.checkpoint.folders import STATE, Damaged
from dolmen.core.config import from_dict
from dolmen.families import ModelConfig
from dolmen.families.adapters import AdapterConfig
from dolmen.files import gate, kinds
from dolmen.model.training import RouterTraining, Training


@dataclass(frozen=True)
class Validation:
    """Result of a run's last validation."""

    step: int
    """Step after which it ran."""
    loss: float
    """Nats per predicted token."""
    tokens: int
    """Number of held-out tokens that were evaluated."""
    held_out_tokens: int
    """Number of tokens of the validation split."""
    bits_per_byte: float | None
    """Bits per byte of the validation split; None where only a part of it was read."""
    sources: dict[str, float] = field(default_factory=dict)
    """Loss per source, where it was measured."""
    sources_per_byte: dict[str, float] = field(default_factory=dict)
    """Bits per byte of each source whose bytes are known."""
    sources_before: dict[str, float] = field(default_factory=dict)
    """Loss per source before the first step."""


@dataclass(frozen=True)
class SavedCritic:
    """State of the critic that is trained beside a policy."""

    updates: int
    """Number of its optimizer's updates."""
    loss_scale: tuple[float, int]
    """fp16 loss scale, and steps since it last changed."""
    norms: tuple[float, ...]
    """Gradient norms that the spike policy remembers."""
    kl_coef: float
    """Coefficient of the KL penalty in the rewards of the next iteration."""


@dataclass(frozen=True)
class Saved:
    """The state.json of a run's checkpoint."""

    run: dict[str, Any]
    """The resolved configuration."""
    step: int
    """Steps made, skipped ones included."""
    tokens: int
    """Real tokens trained on."""
    updates: int
    """Optimizer updates in these steps: those not skipped."""
    inherited: int
    """The optimizer's update count less the run's: updates that an earlier run made with the
    moments that this one started with; negative where the optimizer was reset since.
    """
    samples: int
    """Number of training samples read; the next batch begins with this one."""
    seconds: float
    """Wall-clock seconds spent on these steps, over all starts of the run."""
    data: dict[str, str]
    """The data's fingerprint, see data/loader.py."""
    loss_scale: tuple[float, int]
    """fp16 loss scale, and steps since it last changed."""
    norms: tuple[float, ...]
    """Gradient norms that the spike policy remembers."""
    validation: Validation | None
    critic: SavedCritic | None = None

    def meta(self) -> dict[str, Any]:
        """Return all fields as a dict that JSON can store (tuples as lists), the content of
        state.json; `read_saved` reads it back.
        """
        return asdict(self)


def read_saved(meta: Mapping[str, Any], where: Path) -> Saved:
    """Return the `Saved` (step, tokens, updates, data position, loss scale, ...) that the content
    `meta` of a state.json describes. `where`: folder of the checkpoint. Raises Damaged if a field
    is missing or wrong, the step is not that of the folder's name, or there are more updates than
    steps.
    """
    try:
        gate.check_schema(dict(meta), where / STATE, kinds.STATE.schema)
    except gate.Refused as error:
        raise Damaged(str(error)) from None
    # a renamed folder would be resumed at the wrong step
    named = folders.WHOLE.fullmatch(where.name)
    if named and int(named[1]) != meta["step"]:
        raise Damaged(f"{where} has the name of another step than its {STATE} ({meta['step']})")
    if meta["updates"] > meta["step"]:
        raise Damaged(f"{where / STATE}: updates ({meta['updates']}) exceeds step ({meta['step']})")
    scale, good_steps = meta["loss_scale"]
    last = meta["validation"]
    return Saved(
        run=meta["run"],
        step=meta["step"],
        tokens=meta["tokens"],
        updates=meta["updates"],
        inherited=meta["inherited"],
        samples=meta["samples"],
        seconds=float(meta["seconds"]),
        data=meta["data"],
        loss_scale=(float(scale), good_steps),
        norms=tuple(meta["norms"]),
        validation=None if last is None else Validation(**last),
        critic=_critic(meta["critic"]),
    )


def _critic(meta: Mapping[str, Any] | None) -> SavedCritic | None:
    """Return the state of the critic from its part of state.json; None for None."""
    if meta is None:
        return None
    scale, good_steps = meta["loss_scale"]
    scaled = float(scale), good_steps
    norms = tuple(meta["norms"])
    return SavedCritic(meta["updates"], scaled, norms, float(meta["kl_coef"]))


def model_of(run: Mapping[str, Any]) -> tuple[ModelConfig, Training]:
    """Return, from a run's configuration as plain values, the model's family and config fields, and
    what training adds to it (router losses and biases, adapters). The rest of the configuration is
    not read. Raises ValueError for wrong values.
    """
    router = from_dict(RouterTraining, run["train"].get("router", {}), path="train.router")
    adapter = from_dict(AdapterConfig, run.get("adapter", {}), path="adapter")
    model = ModelConfig.from_plain(run["model"])
    return model, Training(router=router, adapter=adapter.resolve(model))
