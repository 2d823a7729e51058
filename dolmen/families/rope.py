"""Rotary positions in a config.json: `rope_parameters` as transformers 5 writes them, or
`rope_theta`, `partial_rotary_factor` and `rope_scaling` of transformers 4; what stands inside wins.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Interval, MaxLen

from dolmen.core.config import AboveZero, NonNegative
from dolmen.core.messages import brief, plural
from dolmen.families.family import Field, mapping
from dolmen.files import kinds
from dolmen.model.spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)
from dolmen.model.spec.positions import RopeScaling, yarn_temperature

# rope_type -> parameters that it requires; optional ones are in BESIDE
NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
BESIDE = {
    "longrope": ("factor", "attention_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}
USED = {of: (*needed, *BESIDE.get(of, ())) for of, needed in NEEDED.items()}
OLDER = {"su": "longrope"}  # names of types
TYPE = Literal[*USED, *OLDER]
PAIRS = Annotated[list[AboveZero] | None, MaxLen(2**22)]
TURNS = Annotated[float, Interval(ge=2**-20, le=2**20)] | None  # a wavelength is divided by it
PARAMETERS = (
    Field(
        "rope_theta",
        AboveZero,  # a wavelength is a power of it
        None,
        "Base of the geometric series of wavelengths.",
        common=("rope_theta", "rope.theta"),
    ),
    Field(
        "rope_type",
        TYPE,
        None,
        "How the context is extended: default | linear (positions divided by factor) | llama3 "
        "(frequencies of long wavelengths divided, short ones kept, smooth between) | yarn (the "
        "same, with an attention temperature) | dynamic (a base that grows with the sequence) | "
        "longrope (a factor per frequency; other factors for long sequences).",
        common=("rope_scaling.rope_type", "rope_scaling.type", "rope.scaling"),
    ),
    Field(
        "factor",
        AboveZero | None,
        None,
        "Context extension factor of linear, llama3, yarn and dynamic.",
        common=("rope_scaling.factor", "rope.factor"),
    ),
    Field(
        "low_freq_factor",
        AboveZero | None,
        None,
        "llama3: wavelengths longer than original / this are divided by `factor`.",
        common=("rope_scaling.low_freq_factor", "rope.low_freq_factor"),
    ),
    Field(
        "high_freq_factor",
        AboveZero | None,
        None,
        "llama3: wavelengths shorter than original / this are kept.",
        common=("rope_scaling.high_freq_factor", "rope.high_freq_factor"),
    ),
    Field(
        "original_max_position_embeddings",
        kinds.POSITIONS | None,
        None,
        "llama3, yarn and longrope: context length the model was first trained at, tokens.",
        common=(
            "rope_scaling.original_max_position_embeddings",
            "rope.original_max_position_embeddings",
        ),
    ),
    Field(
        "beta_fast",
        TURNS,
        None,
        "yarn: pairs that rotate more often in the original context are kept.",
    ),
    Field(
        "beta_slow",
        TURNS,
        None,
        "yarn: pairs that rotate less often in it are divided by `factor`.",
    ),
    Field(
        "attention_factor",
        AboveZero | None,
        None,
        "yarn: factor of cos and sin. None: 0.1 ln(factor) + 1, or the same times "
        "mscale over the same times mscale_all_dim.",
    ),
    Field("mscale", NonNegative | None, None, "yarn: see attention_factor."),
    Field(
        "mscale_all_dim",
        NonNegative | None,
        None,
        "yarn: see attention_factor. DeepSeek multiplies scores by the square of 0.1 x this x "
        "ln(factor) + 1.",
    ),
    Field("truncate", bool, True),  # no option: a flag cannot be left unsaid
    # no options: numbers of each pair
    Field("short_factor", PAIRS),
    Field("long_factor", PAIRS),
)
ORIGINAL = ("original_max_position_embeddings",)  # also a field of its own, which is read first
FRACTION = Annotated[float, Interval(gt=0, le=1)]
PART = Field(
    "partial_rotary_factor",
    FRACTION,
    None,
    "Leading fraction of each head with rope.",
    common=("partial_rotary_factor",),
)
# not command-line options: the older name of rope_type, and the rotated fraction in families that
# rotate whole heads
NEVER = (Field("type", TYPE), Field("partial_rotary_factor", float | None))
NAMES = frozenset(field.name for field in PARAMETERS + NEVER)
# fields that transformers 4 has at top level, next to `rope_scaling` -> their usual names
OUTER = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}


def fields(
    theta: float = 10000.0, part: float | None = None, outer: Mapping[str, str] = OUTER
) -> tuple[Field, ...]:
    """Return the config.json Fields of rope, which `read` takes. `theta`: default base. `part`:
    default of the rotated fraction of each head; None: the family always rotates whole heads.
    `outer`: usual name -> the family's name of the two fields that transformers 4 has at top level
    (rope_theta, partial_rotary_factor).
    """

    def outer_field(kind: Any, name: str, default: float) -> Field:
        """Return a top-level field under its standard name, with the family's own name as
        an alias.
        """
        aliases = () if outer[name] == name else (outer[name],)
        return Field(name, kind, default, aliases=aliases)

    def add_alias(field: Field) -> Field:
        """Return the field, with the family's top-level name as one more name for the
        command line.
        """
        more = {outer.get(field.name, field.name)} - {field.name, *field.common}
        return replace(field, common=(*field.common, *more))

    never = NEVER if part is None else (NEVER[0], PART)
    inside = tuple(add_alias(field) for field in PARAMETERS + never)
    return (
        mapping("rope_parameters", *inside, spell=partial(spell, outer=outer)),
        mapping("rope_scaling", *(Field(f.name, f.kind) for f in inside)),
        outer_field(AboveZero, "rope_theta", theta),
        *(() if part is None else (outer_field(FRACTION, PART.name, part),)),
        Field("original_max_position_embeddings", kinds.POSITIONS | None),
    )


def stated_rope(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the field that states rope (rope_scaling if it is set, else
    rope_parameters) and its mapping, {} if it is null.
    """
    field = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
    return field, config[field] or {}


def rope_type(stated: Mapping[str, Any]) -> str:
    """Return the rope type that is stated, as `rope_type` or, in older files, `type`, in its
    current spelling. Raises ValueError if both are stated and differ.
    """
    of = stated.get("rope_type", stated.get("type", "default"))
    if stated.get("type", of) != of:
        raise ValueError(
            f"rope_type is {of!r} and type is {stated['type']!r}: they are two names of one field, "
            "state one of them"
        )
    return OLDER[of] if of in OLDER else of


def read(config: Mapping[str, Any], size: int) -> RopeSpec:
    """Return the RopeSpec of heads of `size` (rotate-half pairs), over their leading part if the
    family rotates a part. Raises ValueError for an unsupported type, missing parameters, and a part
    that is not whole pairs.
    """
    field, stated = stated_rope(config)
    # Gemma 3's form, which gemma.py resolves before it calls this
    if any(isinstance(value, dict) for value in stated.values()):
        raise ValueError(f"{field} is {brief(stated)}: dolmen supports one rope for all layers")
    theta = float(stated.get("rope_theta", config["rope_theta"]))
    rotated = _rotary_size(config, field, stated, size)
    return RopeSpec(rotated, theta, _scaling(config, field, stated, theta, rotated))


def _rotary_size(
    config: Mapping[str, Any], field: str, stated: Mapping[str, Any], size: int
) -> int:
    """Return how many of a head's `size` elements are rotated, truncated as in transformers.
    `stated`: the entries of the config's rope dict, which is the config's `field`. Raises
    ValueError for an odd number or zero.
    """
    name = PART.name
    if name not in config:  # the family has no part
        if stated.get(name) not in (1.0, None):
            raise ValueError(f"{field}.{name} is {stated[name]}: dolmen supports only 1.0")
        return size
    factor = stated.get(name, config[name])
    # truncated as transformers does: 0.4 of 80 is 32, and 0.3 of 64 is 19, which is refused
    rotated = int(size * factor)
    if rotated < 2 or rotated % 2:
        raise ValueError(
            f"{name} is {factor}, which is {rotated} of {size} elements of a head, but rope "
            f"rotates pairs: set it to an even number / {size}"
        )
    return rotated


def _scaling(
    config: Mapping[str, Any], field: str, stated: Mapping[str, Any], theta: float, rotated: int
) -> RopeScaling | None:
    """Return the scaling spec of the rope type that `stated` (the mapping in the config's `field`)
    names; None for the default type. `theta`: base; `rotated`: how many elements of a head rotate.
    Raises ValueError naming the parameters that the type needs and that are missing.
    """
    of = rope_type(stated)
    # Phi-3 states it as a field of its own, which transformers reads first
    original = config["original_max_position_embeddings"] or stated.get(
        "original_max_position_embeddings"
    )
    values = {
        **stated,
        "original_max_position_embeddings": original or config["max_position_embeddings"],
    }
    if missing := [name for name in NEEDED[of] if values.get(name) is None]:
        raise ValueError(f"{field} is {stated}: rope_type {of} needs {', '.join(missing)}")
    match of:
        case "linear":
            return LinearScaling(float(values["factor"]))
        case "llama3":
            return Llama3Scaling(
                float(values["factor"]),
                float(values["low_freq_factor"]),
                float(values["high_freq_factor"]),
                values["original_max_position_embeddings"],
            )
        # YaRN divides by ln(theta)
        case "yarn" if theta <= 1:
            raise ValueError(f"rope_theta is {theta}: rope_type yarn needs a value over 1")
        case "yarn":
            return _yarn(values)
        case "dynamic":  # of the field alone, in transformers
            return DynamicScaling(float(values["factor"]), config["max_position_embeddings"])
        case "longrope":
            return _longrope(values, config["max_position_embeddings"], rotated)
    return None


def _longrope(values: Mapping[str, Any], longest: int, rotated: int) -> LongRopeScaling:
    """Return the LongRoPE spec; the default attention factor is transformers' sqrt(1 + ln f / ln
    original), with f = `longest` / original. Raises ValueError if a factor list does not have one
    number per pair of the `rotated` elements.
    """
    for name in ("short_factor", "long_factor"):
        if len(values[name]) != rotated // 2:
            raise ValueError(
                f"{name} has {plural(len(values[name]), 'number')}, but rope rotates "
                f"{rotated // 2} pairs of each head: give one number per pair"
            )
    original = values["original_max_position_embeddings"]
    # Phi-3 states no factor: 131072 / 4096 = 32
    factor = values.get("factor") or longest / original
    attention_factor = values.get("attention_factor")
    if attention_factor is None:
        # Ding et al., 2402.13753; 1.19 for 128K tokens over 4K
        grown = 1 + math.log(factor) / math.log(original) if factor > 1 < original else 1.0
        attention_factor = math.sqrt(grown)
    short, long = (tuple(map(float, values[f"{name}_factor"])) for name in ("short", "long"))
    return LongRopeScaling(float(attention_factor), short, long, original)


def _yarn(values: Mapping[str, Any]) -> YarnScaling:
    """Return YaRN with transformers' defaults for fields that are absent, null or 0."""
    defaults, factor = YarnScaling(1.0, 1), float(values["factor"])
    attention_factor = values.get("attention_factor")
    if attention_factor is None:
        attention_factor = _attention_factor(
            factor, values.get("mscale"), values.get("mscale_all_dim")
        )
    return YarnScaling(
        factor,
        values["original_max_position_embeddings"],
        float(values.get("beta_fast") or defaults.beta_fast),
        float(values.get("beta_slow") or defaults.beta_slow),
        float(attention_factor),
        values.get("truncate", defaults.truncate),
    )


def _attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return YaRN's attention factor: the quotient of the temperatures for mscale and
    mscale_all_dim if both are set, else 0.1 ln(factor) + 1.
    """
    # DeepSeek: the quotient is 1 where both are equal
    if mscale and mscale_all_dim:
        return yarn_temperature(factor, mscale) / yarn_temperature(factor, mscale_all_dim)
    return yarn_temperature(factor)


def write(rope: RopeSpec, head_size: int | None = None) -> dict[str, Any]:
    """Return `rope_parameters` as transformers 5 writes it, with only the fields that the type
    uses. `head_size`: also write the rotated fraction of heads of that size; None: the family
    rotates whole heads. Raises ValueError for a scaling that no config.json states.
    """
    match rope.scaling:
        case LinearScaling(factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case Llama3Scaling(factor, low, high, original):
            scaling = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
        case YarnScaling():
            scaling = _write_yarn(rope.scaling)
        case DynamicScaling(factor):
            scaling = {"rope_type": "dynamic", "factor": factor}
        case LongRopeScaling(attention_factor, short, long, original):
            scaling = {
                "rope_type": "longrope",
                "short_factor": list(short),
                "long_factor": list(long),
                "original_max_position_embeddings": original,
                "attention_factor": attention_factor,
            }
        case None:
            scaling = {"rope_type": "default"}
        case _:
            raise ValueError(f"rope scaling = {rope.scaling} (it has {', '.join(USED)})")
    part = {} if head_size is None else {PART.name: _fraction(rope.size, head_size)}
    return {**scaling, "rope_theta": rope.theta, **part}


def _fraction(rotated: int, size: int) -> float:
    """Return the fraction f of a head with int(f * size) == rotated: the quotient, or one float
    above it if that rounds down.
    """
    factor = rotated / size
    # such as 30 of 44: int(44 * (30 / 44)) is 29
    return factor if int(size * factor) == rotated else math.nextafter(factor, 1)


def _write_yarn(yarn: YarnScaling) -> dict[str, Any]:
    """Return the fields of YaRN, without attention_factor if it is the one that follows from
    `factor`: then it keeps following when `factor` is changed.
    """
    follows = yarn.attention_factor == _attention_factor(yarn.factor, None, None)
    return {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.truncate,
        **({} if follows else {"attention_factor": yarn.attention_factor}),
    }


def spell(
    config: Mapping[str, Any], target: Mapping[str, Any], outer: Mapping[str, str]
) -> dict[str, Any]:
    """Return the entries that change rope in `config` to `target`, in the spelling that the config
    uses (rope_parameters, or rope_scaling and top-level fields). Every other place that states rope
    is changed too, so that none contradicts; unknown fields inside are kept, and fields that the
    type does not use are dropped. `outer`: see `fields`.
    """
    uses = {"rope_type", *OUTER, *USED.get(target["rope_type"], target)}
    extra = {n: target[n] for n in ORIGINAL if config.get(n) is not None and n in target}
    outer_fields = {outer[name]: target[name] for name in outer if name in target}
    # a file may have both names
    outer_fields |= {name: target[name] for name in outer if name in target and name in config}
    # spelling of transformers 5, also for a config.json that states no rope yet
    if "rope_parameters" in config or not {"rope_scaling", *outer_fields} & config.keys():
        unknown = _unknown_entries(config.get("rope_parameters"))
        # it would win over rope_parameters (`stated_rope`)
        if config.get("rope_scaling"):
            extra["rope_scaling"] = None
        extra |= {name: value for name, value in outer_fields.items() if name in config}
        stated = unknown | {k: v for k, v in target.items() if k in uses}
        return {"rope_parameters": stated, **extra}
    # spelling of transformers 4: base and fraction at top level, the rest in rope_scaling
    scaling = _unknown_entries(config.get("rope_scaling"))
    scaling |= {name: value for name, value in target.items() if name in uses - OUTER.keys()}
    return {
        **outer_fields,
        "rope_scaling": None if target["rope_type"] == "default" else scaling,
        **extra,
    }


def _unknown_entries(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of a mapping's entries that are not rope fields known here; {} for None."""
    return {
        name: deepcopy(value) for name, value in (parameters or {}).items() if name not in NAMES
    }
