"""Model specs: a model as a tree of small frozen dataclasses, without torch. Each lists its
parameters (`params`); dolmen/model computes it, and a family (dolmen/families) parses it from a
`config.json`.

    ModelSpec
      embedding    rows, scale, norm, position table                    embedding_head.py
      runs         ((block, ...), repeat): Llama is one block x 32      block.py
        block      mixer + mlp + norm + arrangement                     attention.py, layers.py
      final norm, head

Positions are in positions.py, LoRA adapters in lora.py, parameters in param.py.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from dolmen.model.spec.attention import AttentionSpec, LatentAttentionSpec
from dolmen.model.spec.block import (
    BlockSpec,
    LayerRun,
    ParallelResidual,
    SequentialResidual,
    group_repeats,
)
from dolmen.model.spec.embedding_head import (
    EmbeddingSpec,
    HeadTransformSpec,
    LMHeadSpec,
    ScalarHeadSpec,
)
from dolmen.model.spec.layers import ClampedSwiGLU, MLPSpec, MoESpec, NormSpec, RouterSpec
from dolmen.model.spec.lora import LoraSpec
from dolmen.model.spec.param import (
    ParamSpec,
    ParamSpecs,
    ResidualStream,
    ShardSpec,
    add_prefix,
    check_fp8_sharding,
    check_fp8_tokens,
    check_sharding,
    mark_fp8,
    select_prefix,
)
from dolmen.model.spec.positions import (
    AlibiSpec,
    BlankInfilling,
    BlankMask,
    DynamicScaling,
    FalconAlibiSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    PositionSpan,
    PositionTable,
    QwenScaling,
    RopeSpec,
    YarnScaling,
)
from dolmen.ops.numerics import Fp8


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: embedding, layers, final norm, head."""

    hidden_size: int
    """Width of the residual stream."""
    embedding: EmbeddingSpec
    runs: tuple[LayerRun, ...]
    final_norm: NormSpec | None
    """Norm before the head; None if blocks end in a norm (post-norm), and in a few other models."""
    head: LMHeadSpec | ScalarHeadSpec
    max_position_embeddings: int
    """Longest sequence that the model was made for, tokens."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""
    adapter: LoraSpec | None = None
    """LoRA adapters, trained instead of the model's own parameters."""
    fp8: Fp8 | None = None
    """Recipe by which products of matrices are rounded to fp8 in training; None: they are not."""
    blanks: BlankInfilling | None = None
    """Special tokens that determine prefix and positions; None: positions are plain."""

    def check_same_vocabulary(self, option: str, model: "ModelSpec") -> None:
        """Raise ValueError if another `model`, which the text `option` names, has another
        vocab_size than this one.
        """
        if model.vocab_size != self.vocab_size:
            raise ValueError(
                f"{option} has a vocab_size of {model.vocab_size:,}, but the model has "
                f"{self.vocab_size:,}: give a model with the same vocabulary"
            )

    @cached_property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Every layer's block, in order; runs are repeated."""
        return tuple(b for run in self.runs for _ in range(run.repeat) for b in run.blocks)

    @cached_property
    def params(self) -> ParamSpecs:
        """Spec of every parameter by its full name, in the order of the model; with LoRA adapters,
        int8 scales and fp8 marks where the spec has them. Weight rules and checkpoints use these
        names.
        """
        hidden, stream = self.hidden_size, ResidualStream(self.hidden_size, self.layers)
        # dicts keep their order, which is the order of checkpoints and of fsdp units
        params = self.embedding.params(hidden, self.head.tied)
        for i, block in enumerate(self.blocks):
            params |= add_prefix(f"layers.{i}", block.params(stream))
        if self.final_norm is not None:
            params |= add_prefix("final_norm", self.final_norm.params(hidden))
        params |= self.embedding.output_params(hidden)
        params |= self.head.params(self.vocab_size, self.width)
        if self.adapter is not None:
            # after all others exist, as it freezes them
            params = self.adapter.add_params(params)
        return params if self.fp8 is None else mark_fp8(params, self.layers, self.fp8)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of every parameter, by name."""
        return {name: param.shape for name, param in self.params.items()}

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: rows of the embedding and of the head."""
        return self.embedding.rows

    @property
    def width(self) -> int:
        """Width of a row of the embedding and of the head."""
        return self.embedding.width or self.hidden_size

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.blocks)

    @property
    def experts(self) -> int:
        """Number of experts of each MoE layer; 0 for a dense model. Raises ValueError if layers
        differ.
        """
        numbers = {block.mlp.experts for block in self.blocks} - {0}
        if len(numbers) > 1:
            raise ValueError(
                f"layers have different numbers of experts ({sorted(numbers)}): it must be "
                "the same in every layer"
            )
        return max(numbers, default=0)

    @property
    def has_prefix_mask(self) -> bool:
        """True if a layer has a prefix mask (bidirectional within the prefix)."""
        return any(block.mixer.mask == "prefix" for block in self.blocks)

    @property
    def both_ways(self) -> bool:
        """True if attention is bidirectional: an encoder, which cannot generate."""
        return any(block.mixer.mask == "both" for block in self.blocks)

    @property
    def streams(self) -> int:
        """Number of position streams, token types counted as one more."""
        known = (self.embedding.positions, *(block.mixer.positions for block in self.blocks))
        rope_streams = max((p.streams for p in known if p is not None), default=1)
        return rope_streams + (self.embedding.types is not None)

    @property
    def by_length(self) -> bool:
        """True if some layer's rope angles depend on the length of the sequence (dynamic NTK,
        LongRoPE, Qwen).
        """
        known = (block.mixer.positions for block in self.blocks)
        return any(p is not None and p.by_length for p in known)

    def needs_reprefill(self, length: int, longer: int) -> bool:
        """Return whether a cached sequence must be prefilled again when it grows from `length` to
        `longer` tokens, as LongRoPE rotates sequences beyond its original context by other factors.
        """
        known = (block.mixer.positions for block in self.blocks)
        # LongRoPE: the original context, 4,096 in Phi-3
        bounds = {p.reprefill_beyond for p in known if p is not None}
        return any(length <= bound < longer for bound in bounds if bound is not None)

    @property
    def longest(self) -> int | None:
        """Longest sequence, in tokens, that the learned position table has rows for; None if there
        is no table.
        """
        table = self.embedding.positions
        return None if table is None else table.length
