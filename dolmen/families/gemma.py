"""Gemma, Gemma 2 and the text model of Gemma 3."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from annotated_types import Interval

from dolmen.core.config import AboveZero
from dolmen.families import common, llama, rope
from dolmen.families.family import Field, OuterModel, expect
from dolmen.families.rules import Rule
from dolmen.files.schema import typed_dict
from dolmen.model.spec import (
    AttentionSpec,
    BlockSpec,
    ModelSpec,
    RopeSpec,
    SequentialResidual,
    group_repeats,
)

# Gemma (2403.08295): Llama with norm weights stored minus 1, an embedding scaled by
# sqrt(hidden_size), and a head size independent of the width.

TANH = "gelu_pytorch_tanh"


def read_gemma(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Gemma config.json. "gelu" is read as the tanh form, as transformers
    does, because the first files meant that.
    """
    name = config["hidden_act"]
    return read_stated({**config, "hidden_act": TANH if name == "gelu" else name})


def read_stated(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Gemma config.json with the activation as stated; also the base of Gemma
    2's. `attention_bias` puts biases on q, k, v and o; norms are zero-centred, and the embedding is
    scaled by sqrt(hidden_size).
    """
    bias = bool(config["attention_bias"])
    spec = llama.read_llama_like(config, qkv_bias=bias, o_bias=bias)
    norm = replace(spec.blocks[0].norm, zero_centred=True)
    # the tied head is not scaled
    embedding = replace(spec.embedding, scale=math.sqrt(spec.hidden_size))
    spec = common.map_blocks(spec, lambda block: replace(block, norm=norm))
    return replace(spec, embedding=embedding, final_norm=norm)


DEFAULTS = dict(
    vocab_size=256000, head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True
)
ONLY = {"mlp_bias": (False, None), "use_bidirectional_attention": (None, False)}

GEMMA = replace(
    llama.LLAMA,
    model_type="gemma",
    title="Gemma",
    architecture="GemmaForCausalLM",
    read=read_gemma,
    fields=llama.change_fields(
        llama.FIELDS,
        llama.ATTENTION_BIAS,
        hidden_size=3072,
        intermediate_size=24576,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        hidden_act=TANH,
        **DEFAULTS,
    ),
    only={**common.NO_WINDOWS, **ONLY},
    harmless="hidden_activation",
)


# Gemma 2 (2408.00118): Gemma with sandwich norms, soft caps of scores (50) and logits (30), a
# sliding window of 4,096 on every other layer, and a softmax scale from query_pre_attn_scalar.

WINDOW = 4096
NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}


def read_gemma2(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Gemma 2 config.json: sandwich norms, soft caps of scores and logits, and
    a sliding window on alternating layers. Raises ValueError as `read_windowed`.
    """
    return read_windowed(config, common.alternating_windows(config))


def read_windowed(config: dict[str, Any], sizes: Sequence[int | None]) -> ModelSpec:
    """Return the spec of a Gemma 2 or 3 config.json, given the window of each layer (None: full
    attention). Raises ValueError if heads do not divide the width, whatever head_dim is, as
    transformers does.
    """
    common.head_size(config, llama.FIELDS)
    spec = read_stated({**config, "hidden_act": config["hidden_activation"]})
    scalar = config["query_pre_attn_scalar"]
    cap, logits_cap = (
        None if (cap := config[f"{of}_logit_softcapping"]) is None else float(cap)
        for of in ("attn", "final")
    )
    blocks = [
        replace(
            block,
            mixer=replace(
                block.mixer,
                # 27B: 144 for heads of 128, so that the default scale would be wrong
                scale=None if scalar == block.mixer.head_size else scalar**-0.5,
                window=window,
                soft_cap=cap,
            ),
            arrangement=SequentialResidual("sandwich"),
        )
        for block, window in zip(spec.blocks, sizes, strict=True)
    ]
    return replace(spec, runs=group_repeats(blocks), head=replace(spec.head, soft_cap=logits_cap))


def write_gemma2(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a Gemma 2 config.json that `common.write` does not state, and a window
    even if no layer has one, because transformers builds its masks from it.
    """
    mixer = common.attention(spec)
    return {
        "sliding_window": common.first_window(spec) or WINDOW,
        "query_pre_attn_scalar": (
            # the field is an integer: scale = scalar^-1/2
            mixer.head_size if mixer.scale is None else round(mixer.scale**-2)
        ),
        "attn_logit_softcapping": mixer.soft_cap,
        "final_logit_softcapping": spec.head.soft_cap,
    }


def gemma2_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of Gemma 2 and 3, which have four norms per block."""
    return llama.llama_like_rules(spec, NORMS)


FIELDS = tuple(
    replace(field, name="hidden_activation", common=("hidden_act",))
    if field.name == "hidden_act"
    else field
    for field in llama.FIELDS
)

GEMMA2 = replace(
    llama.LLAMA,
    model_type="gemma2",
    title="Gemma 2",
    architecture="Gemma2ForCausalLM",
    read=read_gemma2,
    write=write_gemma2,
    rules=gemma2_rules,
    fields=llama.change_fields(
        (*FIELDS, common.WINDOW_SIZE),
        llama.ATTENTION_BIAS,
        common.layer_types_field(
            "every other layer, starting with the first, is sliding_attention"
        ),
        Field(
            "query_pre_attn_scalar",
            Annotated[int, Interval(ge=1, le=1 << 20)],
            256,
            "Attention scores are divided by its square root.",
        ),
        Field(
            "attn_logit_softcapping",
            AboveZero | None,
            50.0,
            "Soft cap of attention scores: cap * tanh(score / cap). None: no cap.",
        ),
        Field(
            "final_logit_softcapping",
            AboveZero | None,
            30.0,
            "Soft cap of logits: cap * tanh(logit / cap). None: no cap.",
        ),
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        hidden_activation=TANH,
        sliding_window=WINDOW,
        **DEFAULTS,
    ),
    only={**ONLY, "sliding_window_pattern": (2, None)},
    harmless="hidden_act sliding_window_size cache_implementation",
)


# Gemma 3, text (2503.19786): Gemma 2 without caps, with q and k norms, five layers with a sliding
# window to one without, and two ropes: base 10,000 in sliding layers, 1,000,000 in full ones.
# transformers 5 states both ropes in `rope_parameters`, by layer type; older files state that of
# full attention as all families do, and the other one's base as `rope_local_base_freq`.

FULL, SLIDING = common.FULL, common.SLIDING
LOCAL = "rope_local_base_freq"


def _one_rope(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a Gemma 3 config.json rewritten to state a single rope: that of layers of type `kind`
    (full_attention or sliding_attention).
    """
    stated, scaling = (config["rope_parameters"] or {}).get(kind) or {}, {}
    theta = config[LOCAL]
    if kind == FULL:
        scaling, theta = config["rope_scaling"] or {}, config["rope_theta"]
    # rope_scaling belongs to full attention only
    rope = {**stated, **scaling}
    return {**config, "rope_parameters": rope, "rope_scaling": None, "rope_theta": theta}


def read_gemma3(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Gemma 3 text config.json: q and k norms, and one rope for sliding and
    one for full layers. Raises ValueError for a soft cap on scores, a field that Gemma 3 has and
    ignores.
    """
    if config["attn_logit_softcapping"] is not None:
        raise ValueError(
            f"attn_logit_softcapping is {config['attn_logit_softcapping']}: Gemma 3 has no soft "
            "cap of scores; set it to null"
        )
    # all layers get the full rope first
    spec = read_windowed(_one_rope(config, FULL), common.pattern_windows(config))
    local = rope.read(_one_rope(config, SLIDING), common.attention(spec).head_size)

    def add_rope(block: BlockSpec) -> BlockSpec:
        """Return the block with q and k norms and, if it slides, the local rope."""
        positions = block.mixer.positions if block.mixer.window is None else local
        return replace(block, mixer=replace(block.mixer, positions=positions, qk_norm=block.norm))

    return common.map_blocks(spec, add_rope)


def write_gemma3(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a Gemma 3 config.json that `common.write` does not state: Gemma 2's, and
    rope_parameters by layer type, each from the first layer of that type.
    """
    stated = {
        FULL if mixer.window is None else SLIDING: rope.write(_rope(mixer))
        # reversed: of each type the first layer is written last, and stays
        for mixer in reversed(list(_mixers(spec)))
    }
    return {**write_gemma2(spec), "rope_parameters": stated}


def _rope(mixer: AttentionSpec) -> RopeSpec:
    """Return a mixer's RopeSpec. Raises ValueError if it has none."""
    return expect(mixer.positions, RopeSpec, "positions")


def _mixers(spec: ModelSpec) -> Iterable[AttentionSpec]:
    """Yield the attention spec of each layer. Raises ValueError for another mixer."""
    return (expect(block.mixer, AttentionSpec, "mixer") for block in spec.blocks)


STATED = typed_dict({}, {field.name: field.kind for field in (*rope.PARAMETERS, *rope.NEVER)})
OF_TYPES = tuple(Field(kind, STATED | None) for kind in (FULL, SLIDING))
# not command-line options: they could not say which of the two ropes they mean
ROPES = (
    Field(
        "rope_parameters",
        typed_dict({}, {field.name: field.kind for field in OF_TYPES}, rest=None) | None,
        nested=OF_TYPES,
    ),
    *(field for field in rope.fields(theta=1000000.0) if field.name != "rope_parameters"),
    Field(LOCAL, AboveZero, 10000.0),
)
OTHER = {*(field.name for field in ROPES), "layer_types"}

GEMMA3 = replace(
    llama.LLAMA,
    model_type="gemma3_text",
    title="Gemma 3, text",
    architecture="Gemma3ForCausalLM",
    scorer="Gemma3TextForSequenceClassification",
    read=read_gemma3,
    write=write_gemma3,
    rules=gemma2_rules,
    fields=llama.change_fields(
        [field for field in GEMMA2.fields if field.name not in OTHER],
        *ROPES,
        *common.pattern_fields(6),
        vocab_size=262208,
        max_position_embeddings=131072,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    only=ONLY,
    harmless="hidden_act cache_implementation",
    outer=OuterModel(
        "gemma3",
        "text_config",
        {"language_model.": "", "model.language_model.": "model."},
        tuple(
            f"{before}{part}."
            for before in ("", "model.")
            for part in ("vision_tower", "multi_modal_projector")
        ),
    ),
)
