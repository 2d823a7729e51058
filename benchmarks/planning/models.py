"""The model of a published run, of what its columns say. What no column has, how many experts there
are and how wide, follows from its name, or from its text ("64 experts, top 2").
"""

import re
from dataclasses import dataclass

from benchmarks.planning.published import Published, is_gated
from dolmen.model.spec import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    LayerRun,
    LMHeadSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    PositionTable,
    RopeSpec,
)


@dataclass(frozen=True)
class Sparse:
    """Experts of a known model, as its config.json has them."""

    number: int
    per_token: int
    size: int
    """Width inside one."""
    shared: int = 0
    """Width of what every token passes."""
    head_size: int | None = None


KNOWN = (
    (r"mixtral.*8x22b", Sparse(8, 2, 16384)),
    (r"mixtral|8x7b", Sparse(8, 2, 14336)),
    (r"qwen3.?235b", Sparse(128, 8, 1536, head_size=128)),
    (r"qwen3.?30b", Sparse(128, 8, 768, head_size=128)),
    (r"qwen2.?57b", Sparse(64, 8, 2560, 20480)),
    (r"deepseek.?v3|deepseek.?r1", Sparse(256, 8, 2048, 2048, head_size=192)),
    (r"gpt.?oss.?120b", Sparse(128, 4, 2880, head_size=64)),
    (r"dbrx", Sparse(16, 4, 10752)),
)
"""What a model is called -> what its config.json says; the first that is found."""


def has_experts(row: Published) -> bool:
    """Whether it says so, whatever they are."""
    names = r"mixtral|moe|[0-9]x[0-9.]+b|\bexperts\b|-a[0-9.]+b"
    return (row.count("ep") or 1) > 1 or bool(re.search(names, row.model.lower()))


def experts_of(row: Published) -> Sparse | None:
    """None of a model without, or of which that is not known."""
    said = re.search(r"\b([0-9]{1,4}) experts\b", row.text)
    chosen = re.search(r"\btop.?([0-9]{1,2})\b|\b([0-9]{1,2}) (?:active|of them)\b", row.text)
    if said and chosen and (size := row.count("ffn")):
        number, per_token = int(said[1]), int(chosen[1] or chosen[2])
        if 1 <= per_token <= number:
            return Sparse(number, per_token, size)
    name = row.model.lower()
    return next((sparse for pattern, sparse in KNOWN if re.search(pattern, name)), None)


def load_of(row: Published) -> float:
    """Rows that experts have room for, over those of a balanced router: a capacity factor, where a
    note says one.
    """
    found = re.search(r"capacity factor (?:of )?([0-9]+\.?[0-9]*)", row.text)
    return min(max(float(found[1]), 1.0), 64.0) if found else 1.0


def tree_of(row: Published, length: int) -> ModelSpec:
    """The model: of GPT's kind, or of Llama's, with its experts."""
    hidden, layers = row.count("hidden") or 0, row.count("layers") or 0
    sparse = experts_of(row)
    gated = is_gated(row) or sparse is not None
    heads = row.count("heads") or max(1, hidden // 128)
    kv = row.count("kv_heads") or heads
    kv = kv if heads % kv == 0 else heads
    size = (sparse.head_size if sparse else None) or -(-hidden // heads)
    ffn = row.count("ffn") or (8 * hidden // 3 if gated else 4 * hidden)
    b = not gated
    positions = RopeSpec(size) if gated else None
    mixer = AttentionSpec(heads, kv, size, b, b, b, b, positions=positions)
    mlp = MLPSpec(ffn, True) if gated else MLPSpec(ffn, False, "gelu", True)
    if sparse is not None:
        shared = MLPSpec(sparse.shared) if sparse.shared else None
        mlp = MoESpec(sparse.number, sparse.per_token, sparse.size, shared=shared)
    norm = NormSpec() if gated else NormSpec("layernorm", bias=True)
    table = None if gated else PositionTable(length)
    return ModelSpec(
        hidden,
        EmbeddingSpec(row.count("vocab") or (128256 if gated else 51200), positions=table),
        (LayerRun((BlockSpec(mixer, mlp, norm),), layers),),
        norm,
        LMHeadSpec(tied=not gated),
        length,
    )
