"""Rotary positions in a config.json: `rope_parameters` as transformers 5 writes them, or
`rope_theta` and `rope_scaling` of transformers 4; a theta inside wins.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from dolmen.families.family import Field, mapping
from dolmen.files import kinds
from dolmen.files.schema import Real, optional
from dolmen.model.tree import Linear, Llama3, Rope
from dolmen.model.tree.positions import Scaling

# rope_type -> the fields that it uses
USED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
PARAMETERS = (
    Field(
        "rope_theta",
        Real(0, above=True),  # a wavelength is a power of it
        None,
        "Base of the geometric series of wavelengths.",
        common=("rope_theta", "rope.theta"),
    ),
    Field(
        "rope_type",
        kinds.NAME,
        None,
        "How the context is extended: default | linear (positions divided by factor) | llama3 "
        "(long wavelengths divided, short kept, smooth between).",
        common=("rope_scaling.rope_type", "rope_scaling.type", "rope.scaling"),
    ),
    Field(
        "factor",
        optional(Real(0, above=True)),
        None,
        "Context extension factor of linear and llama3.",
        common=("rope_scaling.factor", "rope.factor"),
    ),
    Field(
        "low_freq_factor",
        optional(Real(0, above=True)),
        None,
        "llama3: wavelengths longer than original / this are divided by `factor`.",
        common=("rope_scaling.low_freq_factor", "rope.low_freq_factor"),
    ),
    Field(
        "high_freq_factor",
        optional(Real(0, above=True)),
        None,
        "llama3: wavelengths shorter than original / this are kept.",
        common=("rope_scaling.high_freq_factor", "rope.high_freq_factor"),
    ),
    Field(
        "original_max_position_embeddings",
        optional(kinds.POSITIONS),
        None,
        "llama3: context length the model was first trained at, tokens.",
        common=(
            "rope_scaling.original_max_position_embeddings",
            "rope.original_max_position_embeddings",
        ),
    ),
)
NEVER = (Field("type", kinds.NAME), Field("partial_rotary_factor", optional(Real())))
NAMES = frozenset(field.name for field in PARAMETERS + NEVER)


def fields(theta: float = 10000.0) -> tuple[Field, ...]:
    """The fields of config.json that `read` takes; `theta` where none states one."""
    return (
        mapping("rope_parameters", *PARAMETERS, *NEVER, spell=spell),
        mapping("rope_scaling", *(Field(f.name, f.kind) for f in PARAMETERS + NEVER)),
        Field("rope_theta", Real(0, above=True), theta),
        Field("original_max_position_embeddings", optional(kinds.POSITIONS)),
    )


def read(c: Mapping[str, Any], size: int) -> Rope:
    """Rope over heads of `size`, rotated in halves. Raises ValueError for a type that is not
    implemented, and for a part of the head left unrotated.
    """
    knob = "rope_scaling" if c["rope_scaling"] else "rope_parameters"
    given = c[knob] or {}
    if any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"{knob} is {given}: dolmen supports one rope for all layers")
    if given.get("partial_rotary_factor", 1.0) not in (1.0, None):
        raise ValueError(
            f"{knob}.partial_rotary_factor is {given['partial_rotary_factor']}: dolmen supports "
            f"only 1.0"
        )
    theta = float(given.get("rope_theta", c["rope_theta"]))
    return Rope(size, theta, _scaling(c, knob, given))


def _scaling(c: Mapping[str, Any], knob: str, given: Mapping[str, Any]) -> Scaling | None:
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in USED:
        raise ValueError(f"{knob}.rope_type is {kind!r}: dolmen supports {', '.join(USED)}")
    original = c["original_max_position_embeddings"] or given.get(
        "original_max_position_embeddings"
    )
    values = {
        **given,
        "original_max_position_embeddings": original or c["max_position_embeddings"],
    }
    if missing := [name for name in USED[kind] if values.get(name) is None]:
        raise ValueError(f"{knob} is {given}: rope_type {kind} needs {', '.join(missing)}")
    match kind:
        case "linear":
            return Linear(float(values["factor"]))
        case "llama3":
            return Llama3(
                float(values["factor"]),
                float(values["low_freq_factor"]),
                float(values["high_freq_factor"]),
                values["original_max_position_embeddings"],
            )
    return None


def new(rope: Rope) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 writes it: only what the type uses."""
    match rope.scaling:
        case Linear(factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case Llama3(factor, low, high, original):
            scaling = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
        case None:
            scaling = {"rope_type": "default"}
        case _:
            raise ValueError(f"rope scaling = {rope.scaling} (it has {', '.join(USED)})")
    return {**scaling, "rope_theta": rope.theta}


def spell(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `config` that say `wanted`, in the spelling it uses; what its own mapping has
    beside our fields is kept, and what the type does not use is not written.
    """
    uses = {"rope_type", "rope_theta", *USED.get(wanted["rope_type"], wanted)}
    if "rope_parameters" in config or "rope_theta" not in config and "rope_scaling" not in config:
        own = _unknown(config.get("rope_parameters"))
        return {"rope_parameters": own | {k: v for k, v in wanted.items() if k in uses}}
    uses.remove("rope_theta")
    scaling = _unknown(config.get("rope_scaling"))
    scaling |= {name: value for name, value in wanted.items() if name in uses}
    return {
        "rope_theta": wanted["rope_theta"],
        "rope_scaling": None if wanted["rope_type"] == "default" else scaling,
    }


def _unknown(own: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: deepcopy(value) for name, value in (own or {}).items() if name not in NAMES}
