"""Table of what each attention backend computes, which the choice (ops/kernels.py), `-v` and
docs/performance.md read. Needs no torch.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

AttentionName = Literal["blocks", "flash", "flash3", "cudnn"]
AttentionOption = Literal["auto", AttentionName]
Feature = Literal["window", "documents", "sinks", "soft cap", "ALiBi", "prefix mask"]
FEATURES: tuple[Feature, ...] = get_args(Feature)
PLAIN: frozenset[Feature] = frozenset({"window", "documents", "sinks"})
"""Features that the kernel itself has, or that are computed from its log-sum-exp."""


class AttentionChoice(NamedTuple):
    """The attention backend that a model is built with."""

    backend: AttentionOption = "auto"
    """auto: by rule (`choose_attention`)."""
    times: tuple[tuple[AttentionName, float], ...] = ()
    """Milliseconds that each of the timed backends took; empty where none was timed."""


class AttentionNeeds(NamedTuple):
    """Properties of a model, and of the hardware, that an attention backend must support."""

    device: str
    """Name of the hardware, for messages."""
    capability: tuple[int, int] | None
    """CUDA compute capability; None: a CPU."""
    dtype: str = "bfloat16"
    """Dtype of queries, keys and values."""
    head_dim: int = 128
    """Longest head, of queries, keys or values."""
    features: tuple[Feature, ...] = ()
    """Features that some layer of the model uses."""
    deterministic: bool = False
    """The gradients must have the same bits every time."""


@dataclass(frozen=True)
class AttentionSupport:
    """Hardware, head sizes and features that an attention backend supports."""

    title: str
    """Name for a person."""
    majors: tuple[int, int | None] | None = None
    """First and last major compute capability of its GPUs (None: no last); None: any device, in
    any dtype. With a GPU comes half precision, and heads whose size is a multiple of 8.
    """
    longest_head: int | None = None
    """Largest size of a head; None: any."""
    longest_head_small: int | None = None
    """The same on GPUs with 100 KiB of shared memory (8.6 to 8.9 and 12.x); None: `longest_head`.
    """
    longest_head_deterministic: int | None = None
    """The same where the gradients must have the same bits every time; 0: they never have."""
    features: frozenset[Feature] = PLAIN
    """Features that it computes, alone or by FlashAttention-2."""
    by_flash: frozenset[Feature] = frozenset()
    """Features that FlashAttention-2 computes for it."""


SUPPORT: dict[AttentionName, AttentionSupport] = {
    "blocks": AttentionSupport("our blocks", features=frozenset(FEATURES)),
    # 16 bytes, 8 numbers, are the width of one load; its backward exceeds the shared memory of
    # consumer and inference cards above heads of 192
    "flash": AttentionSupport(
        "FlashAttention-2",
        majors=(8, None),
        longest_head=256,
        longest_head_small=192,
        longest_head_deterministic=256,
    ),
    # hopper/flash_api.cpp: "Deterministic backward not supported for hdim 256", to which heads
    # above 192 are rounded
    "flash3": AttentionSupport(
        "FlashAttention-3",
        majors=(9, 9),
        longest_head=256,
        longest_head_deterministic=192,
    ),
    # operators.py: no window, causal only where square, a backward for heads up to 128 that adds
    # up in any order
    "cudnn": AttentionSupport(
        "cuDNN",
        majors=(9, 10),
        longest_head=128,
        longest_head_deterministic=0,
        by_flash=frozenset({"window", "documents"}),
    ),
}

RULE: tuple[AttentionName, ...] = ("cudnn", "flash", "blocks")
"""Backends in the order in which the rule takes them: cuDNN took 0.56 of FlashAttention-2's time
on an H200, forward and backward; FlashAttention-3 is taken where it was timed, or by option.
"""
TIMED: tuple[AttentionName, ...] = ("cudnn", "flash", "flash3")
"""Backends that a timed choice compares."""


def find_lack(backend: AttentionName, needs: AttentionNeeds) -> str:
    """Return what the backend lacks to compute `needs`, as the rest of a sentence about it ("has
    no soft cap"); "" if it lacks nothing. Whether it is installed is not asked.
    """
    support = SUPPORT[backend]
    if lacking := [name for name in needs.features if name not in support.features]:
        return f"has no {' and no '.join(lacking)}"
    if support.majors is None:
        return ""
    first, last = support.majors
    major = 0 if needs.capability is None else needs.capability[0]
    if major < first or last is not None and major > last:
        until = "or later" if last is None else f"to {last}.x" if last > first else ""
        return f"needs a GPU of compute capability {first}.x {until}".rstrip()
    if needs.dtype not in ("float16", "bfloat16"):
        return f"computes float16 and bfloat16, not {needs.dtype}"
    longest = support.longest_head
    small = needs.capability is not None and (
        (8, 6) <= needs.capability <= (8, 9) or needs.capability >= (12, 0)
    )
    if small and support.longest_head_small is not None:
        longest = support.longest_head_small
    if longest is not None and (needs.head_dim > longest or needs.head_dim % 8):
        return f"takes heads of multiples of 8 up to {longest}, not {needs.head_dim}"
    repeatable = support.longest_head_deterministic
    if needs.deterministic and repeatable is not None and needs.head_dim > repeatable:
        above = f" for heads above {repeatable}" if repeatable else ""
        return f"has no deterministic backward{above}"
    return ""


def choose_attention(needs: AttentionNeeds, backend: AttentionOption) -> AttentionName:
    """Return the backend for `needs`: `backend`, or for auto the first of `RULE` that computes
    them. Raises ValueError if `backend` does not.
    """
    if backend == "auto":
        return next(name for name in RULE if not find_lack(name, needs))
    if lack := find_lack(backend, needs):
        raise ValueError(
            f"train.attention {backend}: {SUPPORT[backend].title} {lack} ({needs.device}): use "
            "--train.attention auto"
        )
    return backend


def support_table() -> str:
    """Return the table of backends and what they compute, in Markdown, for the documentation."""
    columns = ("`--train.attention`", "", "GPU", "heads up to", "deterministic", *FEATURES)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name, support in SUPPORT.items():
        row = (f"`{name}`", support.title, *_words(support))
        for feature in FEATURES:
            other = SUPPORT["flash"].title if feature in support.by_flash else "yes"
            row += (other if feature in support.features else "no",)
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _words(support: AttentionSupport) -> tuple[str, str, str]:
    """Return the table's words on the hardware, head sizes and deterministic gradients."""
    if support.majors is None:
        return "any device, any dtype", "any", "yes"
    first, last = support.majors
    gpus = f"{first}.x" if last == first else f"{first}.x and {last}.x"
    if last is None:
        gpus = f"{first}.x or later"
    heads = str(support.longest_head)
    if support.longest_head_small is not None:
        heads += f" ({support.longest_head_small} on 8.6 to 8.9 and 12.x)"
    deterministic = "yes"
    if support.longest_head_deterministic != support.longest_head:
        longest = support.longest_head_deterministic
        deterministic = f"heads up to {longest}" if longest else "no"
    return gpus, heads, deterministic
