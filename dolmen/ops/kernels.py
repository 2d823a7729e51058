"""The choice of the kernels that a model computes with, made once, where it is built, from the
hardware, the dtype and the sizes. No layer reads a tensor's device, so a fake or a CPU tensor
takes the road of an H100 where one is named, and what a run will call is known before it starts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dolmen.core.torch_private.compute import has_amx
from dolmen.ops.attention import Attend
from dolmen.ops.attention_support import (
    AttentionChoice,
    AttentionName,
    AttentionNeeds,
    Feature,
    choose_attention,
    find_lack,
)
from dolmen.ops.numerics import Exact, Fp8

HALF = (torch.float16, torch.bfloat16)
NORMS = {"passes": "in passes", "fused": "by one kernel"}  # in words
SQUARES = {"pieces": "in pieces", "whole": "at once"}


@dataclass(frozen=True)
class Hardware:
    """Device properties that the choice of kernels depends on."""

    kind: Literal["cpu", "cuda"]
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability; of a CPU (0, 0)."""
    name: str = "CPU"
    """For a person."""
    tiles: bool = False
    """A CPU that multiplies tiles of bfloat16 (AMX)."""

    @staticmethod
    def from_device(device: torch.device) -> "Hardware":
        """Return the properties of a device of this machine: a GPU's compute capability and name,
        or whether the CPU has AMX.
        """
        if device.type != "cuda":
            return Hardware("cpu", tiles=has_amx())
        name = torch.cuda.get_device_name(device)
        return Hardware("cuda", torch.cuda.get_device_capability(device), name)


CPU = Hardware("cpu")
H100 = Hardware("cuda", (9, 0), "NVIDIA H100 80GB HBM3")
KNOWN = {
    "cpu": CPU,
    "v100": Hardware("cuda", (7, 0), "NVIDIA V100"),
    "a100": Hardware("cuda", (8, 0), "NVIDIA A100"),
    "h100": H100,
    "h200": Hardware("cuda", (9, 0), "NVIDIA H200"),
    "b200": Hardware("cuda", (10, 0), "NVIDIA B200"),
    "gb200": Hardware("cuda", (10, 0), "NVIDIA GB200"),
}
"""Hardware by the names that users give."""


@dataclass(frozen=True)
class Kernels:
    """The kernel chosen at each place where hardware decides. The defaults are a CPU's, which are
    right everywhere.
    """

    attention: AttentionName = "blocks"
    """blocks: our own, in blocks of queries, on any device and in any dtype. flash: torch's
    FlashAttention operators. flash3: these, computed by FlashAttention-3. cudnn: cuDNN's for whole
    sequences, flash for documents and windows. All take memory in proportion to queries + keys;
    attention_support.py has what each computes.
    """
    attention_reason: str = ""
    """Why: what flash lacks where a GPU has blocks, or the times of a timed choice."""
    grouped: Literal["loop", "grouped_mm"] = "loop"
    """The products of experts. loop: one per expert, whose rows the host counts. grouped_mm: one
    kernel for all, whose offsets stay on the device.
    """
    logits_at_once: int = 1 << 22
    """Elements of the logits of one chunk of the loss: what a CPU's cache holds (16 MiB in fp32),
    1 GiB of a GPU.
    """
    squares: Literal["pieces", "whole"] = "pieces"
    """How the squares of gradients are summed. pieces: fp32 in pieces, these in fp64 (on CPU torch
    adds one by one). whole: torch's norm, a tree on a GPU.
    """

    norm: Literal["passes", "fused"] = "passes"
    """RMSNorm where nothing is compiled. passes: elementwise operators, with a backward of our own.
    fused: torch's kernel, then the product with the weight: 18 bytes per element and not 126.
    """

    turned: bool = False
    """Weight gradients transpose one factor first: the input, once for all its products, or their
    gradients where these are narrower together. Else it is left to the kernel to transpose the
    wider one, each time (of AMX at half the speed of the other products: 2 x
    4,096 x 512 x 1,536 in bf16, 33 ms, turned 24).
    """

    fp8: Literal["rounded", "scaled_mm"] = "rounded"
    """Products in 8 bits. rounded: of the dequantised payloads, in fp32, on any device. scaled_mm:
    torch's scaled products of the payloads themselves.
    """

    lays_out: bool = True
    """Prepack weights for a CPU where no gradient is kept (parallel/inference_linear.py)."""

    exact: Exact | None = None
    """Leaves of all sums, which are then added by trees, of operators that are invariant
    (ops/invariant.py): the same bits at every layout. None: sums as each kernel makes them.
    """

    def describe(self, experts: bool) -> str:
        """Return the kernels in words for the run's header: `attention by flash, norms by one
        kernel, ...`. `experts`: include how experts' products are computed.
        """
        reason = f" ({self.attention_reason})" if self.attention_reason else ""
        grouped = f"experts by {self.grouped}, " if experts else ""
        return (
            f"attention by {self.attention}{reason}, {grouped}"
            f"norms {NORMS[self.norm]}, {self.logits_at_once >> 20} Mi logits at once, "
            f"squares {SQUARES[self.squares]}"
            + (
                f", all sums exact for tp up to {self.exact.tp}, cp up to {self.exact.cp}"
                if self.exact
                else ""
            )
        )


def choose(
    hardware: Hardware,
    dtype: torch.dtype,
    head_dim: int,
    widths: Iterable[int] = (),
    attends: Sequence[Attend] = (),
    fp8: Fp8 | None = None,
    one_by_one: bool = False,
    attention: AttentionChoice = AttentionChoice(),
    deterministic: bool = False,
) -> Kernels:
    """Return the kernels of a model that computes in `dtype`. `head_dim`: the longest head, of
    queries or values. `widths`: rows and columns of a rank's expert matrices; none without experts.
    `attends`: each layer's attention; empty if all are plain causal. `fp8`: how products are
    rounded. `one_by_one`: experts are multiplied one at a time, as 8-bit products need.
    `attention`: the backend, or auto. `deterministic`: gradients have the same bits every time.
    Raises ValueError for an attention backend that does not compute this.
    """
    needs = attention_needs(hardware, dtype, head_dim, attends, deterministic)
    backend = choose_attention(needs, attention.backend)
    # a CPU's defaults; only AMX changes one of them
    if hardware.kind == "cpu":
        return Kernels(turned=hardware.tiles and dtype == torch.bfloat16)
    widths = tuple(widths)
    return Kernels(
        # one layer with a feature that a backend lacks sends all layers to blocks
        attention=backend,
        attention_reason=_attention_reason(backend, needs, attention),
        grouped="grouped_mm"
        if widths and not one_by_one and _grouped_mm(hardware, dtype, widths)
        else "loop",
        # 2^28 fp32 logits are 1 GiB; fewer chunks mean fewer launches
        logits_at_once=1 << 28,
        squares="whole",
        norm="fused",
        lays_out=False,
        fp8="scaled_mm" if fp8 and _scaled_mm(hardware, dtype, fp8) else "rounded",
    )


def attention_needs(
    hardware: Hardware,
    dtype: torch.dtype,
    head_dim: int,
    attends: Sequence[Attend] = (),
    deterministic: bool = False,
) -> AttentionNeeds:
    """Return what a model with heads of up to `head_dim` and the layers `attends` asks of an
    attention backend.
    """
    features: dict[Feature, bool] = {
        "window": any(attend.window is not None for attend in attends),
        "soft cap": any(attend.soft_cap is not None for attend in attends),
        "ALiBi": any(attend.slopes is not None for attend in attends),
        "prefix mask": any(attend.mask == "prefix" for attend in attends),
    }
    return AttentionNeeds(
        hardware.name,
        hardware.capability if hardware.kind == "cuda" else None,
        str(dtype).removeprefix("torch."),
        head_dim,
        tuple(name for name, used in features.items() if used),
        deterministic,
    )


def _attention_reason(
    backend: AttentionName, needs: AttentionNeeds, choice: AttentionChoice
) -> str:
    """Return why a GPU has this backend: the times of a timed choice, by option, or what flash
    lacks where blocks are taken; "" where the rule takes the first that could be.
    """
    if choice.times:
        return "timed: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in choice.times)
    if choice.backend != "auto":
        return "train.attention"
    return f"flash {find_lack('flash', needs)}" if backend == "blocks" else ""


def _scaled_mm(hardware: Hardware, dtype: torch.dtype, fp8: Fp8) -> bool:
    """Return True if F.scaled_mm computes this recipe: one scale per tensor from Ada (8.9) on, one
    per row on Hopper (9.0), results in bfloat16 alone.
    """
    least = {"tensor": (8, 9), "row": (9, 0)}.get(fp8.granularity("input"))
    return least is not None and hardware.capability >= least and dtype == torch.bfloat16


def _grouped_mm(hardware: Hardware, dtype: torch.dtype, widths: tuple[int, ...]) -> bool:
    """Return True if F.grouped_mm is a single kernel without a host sync, and right: bfloat16 on
    Hopper, rows of whole 16 bytes. Its documentation states 8.0 or later, but the kernel is for 9.x
    and 10.x; on others it copies the offsets to the host, once per product
    (native/GroupedMMUtils.h), where a loop reads once per layer. On 10.x it leaves garbage in the
    gradient of an expert without rows (pytorch#172439).
    """
    return (
        hardware.capability[0] == 9
        and dtype == torch.bfloat16
        # rows start at multiples of 16 bytes
        and all(width % 8 == 0 for width in widths)
    )
