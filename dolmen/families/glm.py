"""GLM-4 as transformers has it, and the GLMs before it: GLM-10B and GLM-130B."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dolmen.families import common, llama, rope, special_tokens
from dolmen.families.family import BARE, BESIDE, Family, Field, Ids, expect
from dolmen.families.rules import Rename, Rule, Split
from dolmen.files import kinds
from dolmen.model.spec import (
    AttentionSpec,
    BlankInfilling,
    BlankMask,
    BlockSpec,
    EmbeddingSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    PositionTable,
    RopeSpec,
    SequentialResidual,
)
from dolmen.model.spec.block import Arrangement

# GLM-4 and GLM-4-9B as transformers has them (2406.12793): Llama with biases on q, k, v, rope over
# neighbours in the first half of each head, and gate and up of the mlp fused in one tensor.
# ChatGLM2, ChatGLM3 and the first form of GLM-4-9B are the same under other names (chatglm.py).

GLM_FIELDS = llama.change_fields(
    llama.fields_with(rope_fields=rope.fields(part=0.5)),
    replace(llama.ATTENTION_BIAS, default=True, help="Biases on q, k and v."),
    vocab_size=151552,
    hidden_size=4096,
    intermediate_size=13696,
    num_hidden_layers=40,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1.5625e-7,
)


def read_arranged(config: dict[str, Any], arrangement: Arrangement) -> ModelSpec:
    """Return the spec of a GLM-4 config.json with the given arrangement of norms, rope over
    neighbours.
    """
    spec = llama.read_llama_like(config, qkv_bias=bool(config["attention_bias"]))
    mixer = common.attention(spec)
    positions = replace(expect(mixer.positions, RopeSpec, "positions"), interleaved=True)
    mixer = replace(mixer, positions=positions)
    return common.map_blocks(spec, lambda b: replace(b, mixer=mixer, arrangement=arrangement))


def read_glm(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a GLM-4 config.json, with pre-norm blocks."""
    return read_arranged(config, SequentialResidual())


def glm_rules(spec: ModelSpec, norms: Mapping[str, str] = llama.NORMS) -> list[Rule]:
    """Return the weight rules of GLM-4: Llama's with gate and up fused; `norms`: stored norm names
    -> ours.
    """
    # rows of gate, then rows of up
    fused = Split(llama.LAYER + "mlp.gate_up_proj", common.GATE_UP, 1, (1, 1))
    return llama.llama_like_rules(spec, norms, instead=[fused])


GLM = replace(
    llama.LLAMA,
    model_type="glm",
    title="GLM-4 and GLM-4-9B as transformers has them",
    architecture="GlmForCausalLM",
    read=read_glm,
    rules=glm_rules,
    fields=GLM_FIELDS,
    only={},
)


# What the GLMs before GLM-4 share (also those of chatglm.py): names of fields, biased attention
# with a prefix mask, and names of tensors.


def sizes(width: int, layers: int, heads: int) -> tuple[Field, ...]:
    """Return the config.json Fields hidden_size, num_layers and num_attention_heads with the
    defaults `width`, `layers` and `heads`.
    """
    return (
        common.standard("hidden_size", width),
        common.standard("num_hidden_layers", layers, "num_layers"),
        common.standard("num_attention_heads", heads, help="Heads."),
    )


def longest(default: int, what: str = "Longest sequence, tokens.") -> Field:
    """Return the config.json Field max_sequence_length with this default and `what` as its help
    text.
    """
    common_name = ("max_position_embeddings",)
    return Field("max_sequence_length", kinds.POSITIONS, default, what, common=common_name)


def attention(
    config: dict[str, Any], fields: tuple[Field, ...], positions: RopeSpec | None = None
) -> AttentionSpec:
    """Return the attention spec of the older GLMs: biases on all projections, a prefix mask, one
    key-value head per query head, and rope `positions` (None: position tables).
    """
    return common.biased_attention(config, fields, positions=positions, mask="prefix")


def glm_like_rules(
    spec: ModelSpec,
    embedding: str = "transformer.word_embeddings",
    encoder: str = "transformer.",
    attention: str = "attention.",
    head: str = "lm_head",
    packed: tuple[int, tuple[int, int, int]] | None = None,
    first: str | tuple[str, str] = "up",
    more: tuple[Rule, ...] = (),
) -> list[Rule]:
    """Return the weight rules of the older GLMs, whose modules have these names or prefixes.
    `packed`: groups and counts of the fused q, k, v (see Split); None: q, k, v per head. `first`:
    our name of dense_h_to_4h, or the two names of its halves. `more`: rules of other modules beside
    the embedding.
    """
    layer, ours = f"{encoder}layers.{{}}.", "layers.{}."
    groups, counts = packed or (common.attention(spec).heads, (1, 1, 1))
    into = layer + "mlp.dense_h_to_4h"
    return [
        Rename(embedding, "embed"),
        *more,
        Rename(layer + "input_layernorm", ours + "attn_norm"),
        Split(layer + attention + "query_key_value", common.QKV, groups, counts),
        Rename(layer + attention + "dense", ours + "attn.o"),
        Rename(layer + "post_attention_layernorm", ours + "mlp_norm"),
        Rename(into, f"{ours}mlp.{first}")
        if isinstance(first, str)
        # two halves of one matrix
        else Split(into, tuple(f"{ours}mlp.{half}" for half in first), 1, (1, 1)),
        Rename(layer + "mlp.dense_4h_to_h", ours + "mlp.down"),
        Rename(encoder + "final_layernorm", "final_norm"),
        Rename(head, "head"),
    ]


# GLM-4-0414 (9B, 32B, Z1): GLM-4 with sandwich norms: before and after each branch.

NORMS = {
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "attn_post_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_mlp_layernorm": "mlp_post_norm",
}


def read_glm4(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a GLM-4-0414 config.json: GLM-4 with sandwich norms."""
    return read_arranged(config, SequentialResidual("sandwich"))


def glm4_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of GLM-4-0414, which has four norms per block."""
    return glm_rules(spec, NORMS)


GLM4 = replace(
    llama.LLAMA,
    model_type="glm4",
    title="GLM-4-0414",
    architecture="Glm4ForCausalLM",
    read=read_glm4,
    rules=glm4_rules,
    fields=GLM_FIELDS,
    only={},
)


# GLM-10B, GLM-2B and smaller ones (Du et al., 2103.10360): GPT-2 with two position tables; prefix
# and positions follow from special tokens (spec/positions.py).
# Their model_type is "glm", as GLM-4's. A config.json states neither the norms' eps (1e-5) nor the
# width of the mlp (4 hidden_size); names of tensors come with and without the leading "glm.". Any
# of three mask tokens marks the blank, whichever comes first.

NORM = NormSpec("layernorm", 1e-5, bias=True)
MASKS = ("mask", "smask", "gmask")
GLM_10B_FIELDS = (
    common.vocab_size(30592),
    *sizes(1024, 24, 16),
    longest(512, "Maximum sequence length in tokens: rows of each position embedding, minus 1."),
    common.INITIALIZER_RANGE,
    Field("tie_word_embeddings", bool, True, "Head and embedding are one parameter."),
    special_tokens.SPECIAL_TOKENS,
    BARE,
)


def read_glm_10b(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a GLM-10B config.json: two position tables and a prefix mask; whichever of
    three mask tokens comes first in a prompt marks its blank.
    """
    mixer = attention(config, GLM_10B_FIELDS)
    mlp = MLPSpec(4 * config["hidden_size"], gated=False, activation="gelu", bias=True)
    blocks = [BlockSpec(mixer, mlp, NORM)] * config["num_layers"]
    table = PositionTable(config["max_sequence_length"], streams=2)
    ids = special_tokens.special_ids(config)
    # smask and gmask: blanks of a sentence, and at the end
    blanks = BlankInfilling(
        ids["sop"], tuple(BlankMask(name, ids[name]) for name in MASKS), nearest=True
    )
    embedding = EmbeddingSpec(config["vocab_size"], positions=table)
    return common.make_spec(config, GLM_10B_FIELDS, blocks, embedding, blanks)


def write_blanks(spec: ModelSpec) -> dict[str, Any]:
    """Return the field special_tokens of a GLM's config.json: ids of the tokens that mark blanks
    and start their text. Raises ValueError for a spec without blanks.
    """
    blanks = expect(spec.blanks, BlankInfilling, "blanks")
    ids = {"sop": blanks.start, **{mask.name: mask.token for mask in blanks.masks}}
    return special_tokens.special_tokens_field(ids)


def glm_10b_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of GLM-10B: q, k and v are fused one after the other."""
    tables = (
        Rename("glm.transformer.position_embeddings", "positions"),
        Rename("glm.transformer.block_position_embeddings", "block_positions"),
    )
    names = "glm.word_embeddings", "glm.transformer."
    return glm_like_rules(spec, *names, packed=(1, (1, 1, 1)), more=tables)


def is_glm_10b_config(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json of model_type "glm" is GLM-10B's, not GLM-4's, by its
    architectures or by fields that GLM-4 lacks.
    """
    # GLMModel; GLM-4's is GlmForCausalLM. The schema is checked once the family is known
    classes = config.get("architectures")
    named = isinstance(classes, list) and any(str(name).startswith("GLM") for name in classes)
    fields = {"num_layers", "max_sequence_length", "block_position_encoding"}
    return named or bool(fields & config.keys())


def frame_glm_10b(tokens: list[int], ids: Ids) -> list[int]:
    """Return a prompt's token ids framed as [CLS] tokens [gMASK] </s> <sop>, without doubling [CLS]
    or </s>; [gMASK] is left out if the prompt has a mask token. Unchanged if it contains <sop>.
    """
    if ids["sop"] in tokens:
        return tokens
    masks = {ids[name] for name in MASKS if name in ids}
    blank = [] if masks & {*tokens} else [ids["gmask"]]
    begin, end = ids["cls"], ids["eos"]
    inner = [*([] if tokens[:1] == [begin] else [begin]), *tokens]
    # the tokenizer may have added [CLS] and the end already
    inner = inner[:-1] if inner[-1:] == [end] else inner
    return [*inner, *blank, end, ids["sop"]]


GLM_10B = Family(
    model_type="glm",
    registry_name="glm_10b",
    matches=is_glm_10b_config,
    title="GLM-10B, GLM-2B and smaller ones",
    architecture="GLMModel",
    in_transformers=False,
    read=read_glm_10b,
    write=write_blanks,
    rules=glm_10b_rules,
    fields=GLM_10B_FIELDS,
    frame=frame_glm_10b,
    only={
        "block_position_encoding": (True,),
        "relative_encoding": (False, None),
        "rotary_type": ("none", None),
        "use_rmsnorm": (False, None),
        "use_swiglu": (False, None),
    },
    harmless=(
        "attention_dropout_prob attention_scale checkpoint_activations "
        "checkpoint_num_layers classifier_dropout embedding_dropout_prob max_memory_length "
        "output_dropout_prob output_predict parallel_output pool_token spell_func "
        "spell_length"
    ),
    extra_fields={
        "block_position_encoding": True,
        "attention_dropout_prob": 0.0,
        "embedding_dropout_prob": 0.0,
        "output_dropout_prob": 0.0,
        "output_predict": True,
    },
    prefix="glm.",
    remote_code=("configuration_glm", "modeling_glm", "tokenization_glm"),
)


# GLM-130B (Zeng et al., 2210.02414): a GLM with rope, DeepNorm, and a gated mlp x1 * gelu(x2),
# where x1 and x2 are the halves of one stored matrix. Prefix and positions follow from special
# tokens (spec/positions.py).
# Its config.json uses the argument names of SAT, which it was trained with. Rope's frequencies are
# rounded to fp16. A completion of [gMASK] has consecutive positions, one of [MASK] the position of
# the blank.

EPS = common.eps("layernorm_epsilon", 1e-5)
GLM_130B_FIELDS = (
    common.vocab_size(150528),
    *sizes(12288, 70, 96),
    common.standard(
        "intermediate_size",
        None,
        "inner_hidden_size",
        help="Width of the feed-forward layer; None: 8 / 3 of hidden_size, rounded down.",
    ),
    longest(2048),
    *common.last_fields(EPS, tied=True),
    special_tokens.SPECIAL_TOKENS,
)


def read_glm_130b(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a GLM-130B config.json: DeepNorm with alpha sqrt(2 layers), rope with
    half-precision angles, a GELU-gated mlp.
    """
    layers, inner = config["num_layers"], config["inner_hidden_size"]
    positions = RopeSpec(common.head_size(config, GLM_130B_FIELDS), halved=True)
    mixer = attention(config, GLM_130B_FIELDS, positions)
    # 12,288 -> 32,768: as many parameters as a plain mlp of 4 hidden_size
    width = 4 * config["hidden_size"] * 2 // 3 if inner is None else inner
    mlp = MLPSpec(width, activation="gelu", bias=True)
    norm, around = (
        common.layer_norm(config, EPS),
        SequentialResidual.deepnorm(math.sqrt(2 * layers)),
    )
    ids = special_tokens.special_ids(config)
    masks = (BlankMask("mask", ids["mask"]), BlankMask("gmask", ids["gmask"], "counts"))
    blocks = [BlockSpec(mixer, mlp, norm, around)] * layers
    return common.make_spec(
        config, GLM_130B_FIELDS, blocks, blanks=BlankInfilling(ids["sop"], masks)
    )


def glm_130b_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of GLM-130B, for unsharded tensors; up and gate are fused in this
    order.
    """
    return glm_like_rules(spec, first=("up", "gate"))


def frame_glm_130b(tokens: list[int], ids: Ids) -> list[int]:
    """Return prompt tokens followed by [gMASK] (if they have no mask token), </s> (if the last
    token is no mask) and <sop>. Unchanged if they contain <sop>.
    """
    if ids["sop"] in tokens:
        return tokens
    masks = {ids[name] for name in ("mask", "gmask") if name in ids}
    blank = [] if masks & {*tokens} else [ids["gmask"]]
    inner = [*tokens, *blank]
    return [*inner, *([] if inner[-1] in masks else [ids["eos"]]), ids["sop"]]


GLM_130B = Family(
    model_type="glm-130b",
    title="GLM-130B",
    architecture="GLM130B",
    in_transformers=False,
    read=read_glm_130b,
    write=write_blanks,
    rules=glm_130b_rules,
    fields=GLM_130B_FIELDS,
    frame=frame_glm_130b,
    extra_fields=BESIDE,
    # of the checkpoint's two layouts: SAT's own mixins, and those of its port
    ignored=(
        r"transformer\.layers\.[0-9]+\.attention\.rotary_emb\.inv_freq",
        r"mixins\.rotary-embedding\.rotary_emb\.inv_freq",
    ),
)
