"""Specs of a block: its mixer, its mlp, and the placement of norms and residual (the arrangement).

    norms       sequential, for branch in mixer, mlp                      published by
    "pre"       x = x + branch(norm(x))                                   GPT-2, Llama; 2002.04745
    "post"      x = norm(x + branch(x))                                   BERT; 1706.03762
    "output"    x = x + norm(branch(x))                                   OLMo 2; 2501.00656, 3.1
    "sandwich"  x = x + norm(branch(norm(x)))                             Gemma 2; 2408.00118
    parallel    x = x + mixer(norm(x)) + mlp(norm(x)), one norm or two    GPT-J; PaLM, 2204.02311

DeepNorm (2203.00555, equation 4) as GLM-130B has it (2210.02414, section 2.1) is "pre" with the
norm's output as residual, times alpha: y = norm(x); x = alpha y + branch(y). BLOOM with
`apply_residual_connection_post_layernorm` is the same with alpha 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from dolmen.model.spec.attention import AttentionSpec, LatentAttentionSpec
from dolmen.model.spec.layers import MLPSpec, MoESpec, NormSpec
from dolmen.model.spec.param import ParamSpecs, ResidualStream, add_prefix


@dataclass(frozen=True)
class SequentialResidual:
    """Mixer, then mlp, each added to the residual stream."""

    norms: Literal["pre", "post", "output", "sandwich"] = "pre"
    residual: Literal["input", "normed"] = "input"
    """Input of the sum: the block's input, or the output of the norm before the branch."""
    residual_scale: float = 1.0
    """Multiplies the residual (DeepNorm: alpha)."""
    branch_scale: float = 1.0
    """Multiplies the output of mixer and mlp (Granite: residual_multiplier)."""

    @classmethod
    def deepnorm(cls, alpha: float) -> "SequentialResidual":
        """Return DeepNorm's arrangement: y = norm(x); x = alpha y + branch(y)."""
        return cls(residual="normed", residual_scale=alpha)

    @property
    def norm_count(self) -> int:
        """Number of norms of a block."""
        return len(self.modules) - 2

    @property
    def streams(self) -> int:
        """Number of tensors of the residual stream's width that backward needs of a block: the
        inputs of its norms and of its column-parallel layers.
        """
        return 2 + self.norm_count

    @property
    def additions(self) -> int:
        """Number of times a branch is added to the residual stream, each with its own dropout."""
        return 2

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of a block's norms, mixer ("attn") and mlp, in the order of use."""
        before, behind = {
            "pre": (["{}_norm"], []),
            "post": ([], ["{}_norm"]),
            "output": ([], ["{}_post_norm"]),
            "sandwich": (["{}_norm"], ["{}_post_norm"]),
        }[self.norms]
        names = [*before, "{}", *behind]
        return tuple(name.format(branch) for branch in ("attn", "mlp") for name in names)


@dataclass(frozen=True)
class ParallelResidual:
    """Mixer and mlp of the same input, their sum added to the residual stream; one norm for both,
    or one each.
    """

    norms: Literal[1, 2] = 1

    @property
    def norm_count(self) -> int:
        """Number of norms of a block."""
        return self.norms

    @property
    def streams(self) -> int:
        """Number of tensors of the residual stream's width that backward needs of a block: its
        input, and the output of each norm.
        """
        return 1 + self.norms

    @property
    def additions(self) -> int:
        """Number of times a branch sum is added to the residual stream, with dropout: once."""
        return 1

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of a block's norms, mixer ("attn") and mlp, in the order of use."""
        if self.norms == 1:
            return "norm", "attn", "mlp"
        return "attn_norm", "attn", "mlp_norm", "mlp"


Arrangement = SequentialResidual | ParallelResidual


Mixer = AttentionSpec | LatentAttentionSpec


@dataclass(frozen=True)
class BlockSpec:
    """One layer: mixer and mlp, their norms, and how both are added to the residual stream."""

    mixer: Mixer
    mlp: MLPSpec | MoESpec
    norm: NormSpec
    """Spec of each norm; the arrangement defines where they are."""
    arrangement: Arrangement = SequentialResidual()

    def params(self, stream: ResidualStream) -> ParamSpecs:
        """Return the specs of the block's parameters by name, in the order in which its modules are
        used.
        """
        norm = self.norm.params(stream.hidden_size)
        branches = {"attn": self.mixer.params(stream), "mlp": self.mlp.params(stream)}
        params: ParamSpecs = {}
        for name in self.arrangement.modules:
            params |= add_prefix(name, branches.get(name, norm))
        return params


@dataclass(frozen=True)
class LayerRun:
    """A sequence of blocks, repeated `repeat` times: Llama is one block x 32, Gemma 2 two blocks x
    13.
    """

    blocks: tuple[BlockSpec, ...]
    repeat: int


def group_repeats(blocks: Sequence[BlockSpec]) -> tuple[LayerRun, ...]:
    """Return the layers as runs, in a canonical form: one run of the shortest pattern that yields
    all of them when repeated, otherwise one run per group of equal neighbours.
    """
    layers = tuple(blocks)
    for period in range(1, len(layers) // 2 + 1):
        # equal to itself shifted by `period`: the pattern repeats
        if len(layers) % period == 0 and layers[period:] == layers[:-period]:
            return (LayerRun(layers[:period], len(layers) // period),)
    return tuple(LayerRun((block,), len(list(same))) for block, same in groupby(layers))
