"""What a checkpoint of a run keeps beside its tensors: everything else that a run that goes on must
know to be the run that never stopped.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dolmen.checkpoint.folders import Damaged


@dataclass(frozen=True)
class Validation:
    """The last validation of a run."""

    step: int
    """After so many steps."""
    loss: float
    """Nats per predicted token."""
    tokens: int
    """Held-out tokens that were read."""
    held_out_tokens: int
    """Of so many."""
    bits_per_byte: float | None
    """Of the held-out text; None where only a part of it was read."""


@dataclass(frozen=True)
class Saved:
    """The state.json of a run's checkpoint."""

    run: dict[str, Any]
    """The resolved configuration."""
    step: int
    """Steps made, those skipped among them."""
    tokens: int
    """Real tokens trained on."""
    updates: int
    """Updates that AdamW has made: steps less those skipped."""
    samples: int
    """Samples of the training data read: where the next batch begins."""
    seconds: float
    """Spent on these steps, by all starts of the run."""
    data: dict[str, str]
    """The data's fingerprint, see data/loader.py."""
    loss_scale: tuple[float, int]
    """Of fp16, and steps since it last changed."""
    norms: tuple[float, ...]
    """Gradient norms that the spike policy remembers."""
    validation: Validation | None

    def meta(self) -> dict[str, Any]:
        """As JSON keeps it; `read` is its inverse."""
        return asdict(self)


def read(meta: Mapping[str, Any], where: object) -> Saved:
    """What `Saved.meta` has written. `where` names the checkpoint in messages. What checkpoints of
    before do not say is taken as it was: batches all of one size, no validation. Raises Damaged.
    """
    try:
        run = _of(meta, "run", dict)
        _of(run, "model", dict)
        train = _of(run, "train", dict)
        step, data = _count(meta, "step"), _of(meta, "data", dict)
        if not all(isinstance(text, str) for text in data.values()):
            raise ValueError("data is no mapping of texts")
        value, good = _of(meta, "loss_scale", list) if "loss_scale" in meta else (1.0, 0)
        norms = tuple(_of(meta, "norms", list)) if "norms" in meta else ()
        if not all(_real(n) for n in (value, good, *norms)) or value <= 0:
            raise ValueError("loss_scale or norms are no numbers")
        found = Saved(
            run,
            step,
            _count(meta, "tokens"),
            _count(meta, "updates"),
            _count(meta, "samples")
            if "samples" in meta
            else step * _count(train, "global_batch_size"),
            float(_number(meta, "seconds")) if "seconds" in meta else 0.0,
            data,
            (float(value), int(good)),
            norms,
            _validation(meta.get("validation")),
        )
        if found.updates > step:
            raise ValueError(f"updates ({found.updates}) is over step ({step})")
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged(f"{where}: state.json is no state of a run: {error}") from None
    return found


def _validation(value: Any) -> Validation | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("validation is no mapping")
    bits = value.get("bits_per_byte")
    return Validation(
        _count(value, "step"),
        float(_of(value, "loss", float)),
        _count(value, "tokens"),
        _count(value, "held_out_tokens"),
        bits if bits is None else float(_of(value, "bits_per_byte", float)),
    )


def _of(values: Mapping[str, Any], name: str, kind: type) -> Any:
    if name not in values:
        raise ValueError(f"it has no {name}")
    if type(values[name]) is not kind:
        raise ValueError(f"{name} is {ascii(values[name])[:80]}, no {kind.__name__}")
    return values[name]


def _count(values: Mapping[str, Any], name: str) -> int:
    found = _of(values, name, int)
    if not 0 <= found < 2**62:
        raise ValueError(f"{name} is {ascii(found)[:80]}")
    return found


def _number(values: Mapping[str, Any], name: str) -> float:
    if name not in values or not _real(values[name]) or values[name] < 0:
        raise ValueError(f"{name} is {ascii(values.get(name))[:80]}, no number")
    return values[name]


def _real(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**1000 and math.isfinite(value)
