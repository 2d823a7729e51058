"""What a model is, as a tree of components: small frozen values, without torch. Each says what its
parameters are (`leaves`); dolmen/model computes what it says, and a family (dolmen/families) reads
it from a `config.json`.

    Tree
      embedding    rows, scale, norm, a table of positions
      runs         ((block, ...), repeat): Llama is one block x 32
        block      mixer + mlp + norms + arrangement
      final norm, head

    param.py           a parameter: shape, cuts over tp and ep, gradient type, initialisation, role
    block.py           norms, residual stream and order of a block
    attention.py       attention and latent attention
    layers.py          norms, dense and sparse feed-forward layers
    positions.py       rope and its scalings, ALiBi, learned tables
    embedding_head.py  what is before the blocks and after them
    lora.py            adapters next to frozen weights
"""

import math
from dataclasses import dataclass
from functools import cached_property

from dolmen.model.spec.attention import Attention, LatentAttention
from dolmen.model.spec.block import Block, Parallel, Run, Sequential, runs_of
from dolmen.model.spec.embedding_head import Embedding, Head, Scalar, Transform
from dolmen.model.spec.layers import Clamped, Experts, Mlp, Norm, Router
from dolmen.model.spec.lora import Adapter
from dolmen.model.spec.param import (
    Cut,
    Leaf,
    Leaves,
    Stream,
    check_cuts,
    check_rounding,
    check_tokens,
    rounded,
    under,
    within,
)
from dolmen.model.spec.positions import (
    Alibi,
    Blanks,
    Dynamic,
    Evaluated,
    Linear,
    Llama3,
    LongRope,
    Mask,
    Rope,
    Span,
    Steps,
    Table,
    Yarn,
)
from dolmen.ops.fp8_recipe import Fp8

__all__ = [
    "Adapter",
    "Alibi",
    "Attention",
    "Blanks",
    "Block",
    "Clamped",
    "Cut",
    "Dynamic",
    "Embedding",
    "Evaluated",
    "Experts",
    "Head",
    "LatentAttention",
    "Leaf",
    "Leaves",
    "Linear",
    "Llama3",
    "LongRope",
    "Mask",
    "Mlp",
    "Norm",
    "Parallel",
    "Rope",
    "Router",
    "Run",
    "Scalar",
    "Sequential",
    "Span",
    "Steps",
    "Stream",
    "Table",
    "Transform",
    "Tree",
    "Yarn",
    "check_cuts",
    "check_rounding",
    "check_tokens",
    "runs_of",
    "under",
]


@dataclass(frozen=True)
class Tree:
    """A decoder: embedding, layers, final norm, head. Raises ValueError for an initializer_range
    that is negative or not finite.
    """

    hidden_size: int
    """Width of the residual stream."""
    embedding: Embedding
    runs: tuple[Run, ...]
    final_norm: Norm | None
    """None where the blocks leave what is normed already, and in a few others."""
    head: Head | Scalar
    max_position_embeddings: int
    """Longest sequence that the model was made for, tokens."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""
    adapter: Adapter | None = None
    """What is trained in place of all parameters."""
    fp8: Fp8 | None = None
    """How the products of its matrices are rounded while it is trained."""
    blanks: Blanks | None = None
    """By which tokens of a text its prefix and positions are known; None: it has neither."""

    def __post_init__(self):
        if not 0 <= self.initializer_range < math.inf:
            raise ValueError(
                f"initializer_range is {self.initializer_range}: it must be finite and not negative"
            )

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Every layer, in order."""
        return tuple(b for run in self.runs for _ in range(run.repeat) for b in run.blocks)

    @cached_property
    def leaves(self) -> Leaves:
        """Every parameter by its full name, in the order of the model: the names that weight rules
        and checkpoints speak.
        """
        hidden, stream = self.hidden_size, Stream(self.hidden_size, self.layers)
        leaves = self.embedding.leaves(hidden, self.head.tied)
        for i, block in enumerate(self.blocks):
            leaves |= within(f"layers.{i}", block.leaves(stream))
        if self.final_norm is not None:
            leaves |= within("final_norm", self.final_norm.leaves(hidden))
        leaves |= self.embedding.leaves_out(hidden)
        leaves |= self.head.leaves(self.vocab_size, self.width)
        if self.adapter is not None:
            leaves = self.adapter.beside(leaves)
        return leaves if self.fp8 is None else rounded(leaves, self.layers, self.fp8)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's full shape."""
        return {name: leaf.shape for name, leaf in self.leaves.items()}

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding and of the head, tokens."""
        return self.embedding.rows

    @property
    def width(self) -> int:
        """Of a row of the embedding, and of what the head multiplies."""
        return self.embedding.width or self.hidden_size

    @property
    def layers(self) -> int:
        """How many blocks there are."""
        return len(self.blocks)

    @property
    def experts(self) -> int:
        """Of each layer that has any; 0: none has. Raises ValueError where layers have unlike
        numbers.
        """
        numbers = {block.mlp.experts for block in self.blocks} - {0}
        if len(numbers) > 1:
            raise ValueError(
                f"layers have {sorted(numbers)} experts: dolmen trains equally many per layer"
            )
        return max(numbers, default=0)

    @property
    def prefixed(self) -> bool:
        """Whether a layer lets the tokens of a prefix see one another."""
        return any(block.mixer.mask == "prefix" for block in self.blocks)

    @property
    def both_ways(self) -> bool:
        """Whether all tokens of a document see one another: there is no next token to foretell."""
        return any(block.mixer.mask == "both" for block in self.blocks)

    @property
    def streams(self) -> int:
        """Of positions, that it knows, and one more of the types of tokens."""
        known = (self.embedding.positions, *(block.mixer.positions for block in self.blocks))
        own = max((p.streams for p in known if p is not None), default=1)
        return own + (self.embedding.types is not None)

    @property
    def by_length(self) -> bool:
        """Whether the length of a text tells a layer how its tokens are turned."""
        known = (block.mixer.positions for block in self.blocks)
        return any(p is not None and p.by_length for p in known)

    def read_again(self, length: int, longer: int) -> bool:
        """Whether a text that has been read as one of `length` tokens is read again now that it has
        `longer` ones.
        """
        known = (block.mixer.positions for block in self.blocks)
        bounds = {p.again_beyond for p in known if p is not None}
        return any(length <= bound < longer for bound in bounds if bound is not None)

    @property
    def longest(self) -> int | None:
        """Tokens of a sequence that a learned table has positions for; None: there is no table."""
        table = self.embedding.positions
        return None if table is None else table.length
