"""GPT-J and CodeGen: parallel blocks with rope on part of each head."""

from dataclasses import replace
from typing import Any

from dolmen.families import common, gpt2, llama
from dolmen.families.family import Family, Field, expect, flag
from dolmen.families.gpt2 import LAYER, OURS
from dolmen.families.rules import Rename, Rule, Split
from dolmen.files import kinds
from dolmen.model.spec import AttentionSpec, BlockSpec, ModelSpec, ParallelResidual, RopeSpec

# GPT-J (Wang and Komatsuzaki, 2021): parallel attention and mlp after one LayerNorm, rope over
# neighbours in a part of each head, biases on the mlp and the LM head only.

FIELDS = llama.change_fields(
    gpt2.GPT2_LIKE_FIELDS,
    Field(
        "rotary_dim",
        kinds.WIDTH,
        64,
        "Size of the leading part of each head with rope (pairs of adjacent elements).",
    ),
    vocab_size=50400,
    n_positions=2048,
    n_embd=4096,
    n_layer=28,
    n_head=16,
    tie_word_embeddings=False,
)


def read_gptj(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a GPT-J config.json: parallel blocks after one norm, rope over neighbours
    of the first rotary_dim elements. Raises ValueError if rotary_dim is odd or exceeds the head.
    """
    heads, size = config["n_head"], common.head_size(config, FIELDS)
    turned = config["rotary_dim"]
    if turned > size or turned % 2:
        raise ValueError(
            f"rotary_dim is {turned} for heads of size {size}, but rope rotates pairs: set "
            f"{flag('rotary_dim')} to an even number up to {size}"
        )
    mixer = AttentionSpec(heads, heads, size, positions=RopeSpec(turned, interleaved=True))
    mlp, norm = common.plain_mlp(config, FIELDS), common.layer_norm(config)
    spec = common.make_spec(
        config, FIELDS, [BlockSpec(mixer, mlp, norm, ParallelResidual(1))] * config["n_layer"]
    )
    return replace(spec, head=replace(spec.head, bias=True))


def write_gptj(spec: ModelSpec) -> dict[str, Any]:
    """Return the field of a GPT-J config.json that `common.write` does not state."""
    return {"rotary_dim": expect(common.attention(spec).positions, RopeSpec, "positions").size}


MATRICES = (
    Rename(LAYER + "attn.out_proj", OURS + "attn.o"),
    Rename(LAYER + "mlp.fc_in", OURS + "mlp.up"),
    Rename(LAYER + "mlp.fc_out", OURS + "mlp.down"),
)


def gptj_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of GPT-J."""
    qkv = (Rename(f"{LAYER}attn.{part}_proj", f"{OURS}attn.{part}") for part in "qkv")
    return gpt2.gpt2_like_rules([*qkv, *MATRICES], first="norm")


GPTJ = Family(
    model_type="gptj",
    title="GPT-J",
    architecture="GPTJForCausalLM",
    read=read_gptj,
    write=write_gptj,
    rules=gptj_rules,
    fields=FIELDS,
    only={"rotary": (True,), "scale_attn_weights": (True,)},
    harmless=gpt2.HARMLESS,
    extra_fields=gpt2.BESIDE,
    ignored=gpt2.IGNORED,
    prefix="transformer.",
)


# CodeGen (Nijkamp et al., 2203.13474): GPT-J with q, k, v in one tensor, in four blocks of rows,
# one for each of the cores that it was trained on, and in each block a quarter of the queries, of
# the values, then of the keys.

BLOCKS = 4
PARTS = tuple(f"{OURS}attn.{part}" for part in "qvk")


def read_codegen(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a CodeGen config.json: as GPT-J's. Raises ValueError if n_head is not a
    multiple of the 4 blocks in which q, v and k are stored.
    """
    common.head_size(config, FIELDS)
    if (heads := config["n_head"]) % BLOCKS:
        raise ValueError(
            f"n_head ({heads}) is not divisible by {BLOCKS}, the blocks that CodeGen stores q, k "
            f"and v in: set {flag('n_head')}, or {flag('model_type')} to gptj"
        )
    return read_gptj(config)


def codegen_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of CodeGen: GPT-J's, with q, v, k (in this order) fused in each of 4
    blocks.
    """
    qkv = Split(LAYER + "attn.qkv_proj", PARTS, BLOCKS, (1, 1, 1))
    return gpt2.gpt2_like_rules([qkv, *MATRICES], first="norm")


CODEGEN = Family(
    model_type="codegen",
    title="CodeGen",
    architecture="CodeGenForCausalLM",
    scorer=None,
    read=read_codegen,
    write=write_gptj,
    rules=codegen_rules,
    fields=FIELDS,
    only=GPTJ.only,
    harmless=gpt2.HARMLESS,
    extra_fields=gpt2.BESIDE,
    ignored=(*gpt2.IGNORED, r"transformer\.h\.\d+\.attn\.causal_mask"),
    prefix="transformer.",
)
