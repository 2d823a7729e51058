"""EleutherAI's GPT-Neo, GPT-NeoX, Pythia and GPT-J; CodeGen, which is derived from GPT-J."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Len

from dolmen.core.messages import plural
from dolmen.families import common, gpt2, llama, rope
from dolmen.families.family import BESIDE, Family, Field, expect, flag
from dolmen.families.gpt2 import LAYER, OURS
from dolmen.families.rules import Rename, Rule, Split
from dolmen.files import kinds
from dolmen.model.spec import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    ModelSpec,
    ParallelResidual,
    PositionTable,
    RopeSpec,
    SequentialResidual,
)

# GPT-Neo (Black et al., 2021): GPT-2 with alternating full and windowed (256) layers, unscaled
# attention scores, and no biases on q, k, v.
# Layer types are stated twice: as patterns with repeat counts (`attention_types`), and per layer
# (`attention_layers`).

GLOBAL, LOCAL = "global", "local"
KINDS = Annotated[list[Literal[GLOBAL, LOCAL]], Len(1, kinds.MOST_LAYERS)]
LAYERS, TYPES = "attention_layers", "attention_types"


def _spell(config: Mapping[str, Any], stated: Any) -> dict[str, Any]:
    """Return both fields that state the attention type of each layer, attention_layers and
    attention_types, set to `stated` ("global" or "local" per layer; None: the default pattern).
    """
    return {LAYERS: stated, TYPES: None if stated is None else [[list(stated), 1]]}


GPT_NEO_FIELDS = (
    common.vocab_size(50257),
    common.standard("max_position_embeddings", 2048, help=common.TABLE_LENGTH),
    common.standard("hidden_size", 2048),
    common.standard("num_hidden_layers", 24, "num_layers", aliased=True),
    common.standard("num_attention_heads", 16, "num_heads", aliased=True, help="Heads."),
    Field(TYPES, Annotated[list[tuple[KINDS, kinds.LAYERS]] | None, Len(1, kinds.MOST_LAYERS)]),
    Field(
        LAYERS,
        KINDS | None,
        None,
        f"{GLOBAL} or {LOCAL}, per layer. None: alternating, {GLOBAL} first.",
        spell=_spell,
    ),
    Field(
        "window_size",
        kinds.POSITIONS,
        256,
        f"Window of {LOCAL} layers in tokens, including the query.",
        common=("sliding_window",),
    ),
    common.standard("intermediate_size", None, help=common.FOUR_TIMES),
    common.standard("hidden_act", "gelu_new", "activation_function"),
    *common.last_fields(common.LAYER_NORM_EPS, tied=True),
)


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Return "global" or "local" for each layer: from attention_types, else from attention_layers,
    else alternating from global. Raises ValueError if their number is not num_layers, or both
    fields are given and disagree.
    """
    layers, types, layer_kinds = config["num_layers"], config[TYPES], config[LAYERS]
    if types is None:
        types = [[layer_kinds or [(GLOBAL, LOCAL)[i % 2] for i in range(layers)], 1]]
    if (number := sum(len(pattern) * times for pattern, times in types)) != layers:
        raise ValueError(
            f"{TYPES} and {LAYERS} have {plural(number, 'layer')}, but num_layers is {layers}: "
            f"set {flag(LAYERS)} to one per layer"
        )
    kinds = [kind for pattern, times in types for _ in range(times) for kind in pattern]
    if layer_kinds not in (None, kinds):
        raise ValueError(f"{LAYERS} contradicts {TYPES}: state only one of them")
    return kinds


def read_gpt_neo(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a GPT-Neo config.json: unscaled scores, local layers with a window."""
    heads, size = config["num_heads"], common.head_size(config, GPT_NEO_FIELDS)
    # scores are not divided by sqrt(head size)
    mixer = AttentionSpec(heads, heads, size, o_bias=True, scale=1.0)
    block = BlockSpec(mixer, common.plain_mlp(config, GPT_NEO_FIELDS), common.layer_norm(config))
    blocks = [
        replace(
            block, mixer=replace(mixer, window=config["window_size"] if kind == LOCAL else None)
        )
        for kind in _kinds(config)
    ]
    table = PositionTable(config["max_position_embeddings"])
    return common.make_spec(
        config, GPT_NEO_FIELDS, blocks, EmbeddingSpec(config["vocab_size"], positions=table)
    )


def write_gpt_neo(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a GPT-Neo config.json that `common.write` does not state: window_size,
    and the layer types in both forms.
    """
    sizes = common.window_sizes(spec)
    kinds = [GLOBAL if size is None else LOCAL for size in sizes]
    length, times = len(spec.runs[0].blocks), spec.runs[0].repeat
    # [["global", "local"], 12] for 24 layers
    types = [[kinds[:length], times]] if len(spec.runs) == 1 else [[kinds, 1]]
    return {TYPES: types, LAYERS: kinds, "window_size": common.first_window(spec) or 256}


def gpt_neo_rules(spec: ModelSpec) -> list[Rule]:
    """Return the rules that map GPT-Neo's stored tensors to our parameters."""
    attention = LAYER + "attn.attention."
    return gpt2.gpt2_like_rules(
        [
            *(Rename(f"{attention}{part}_proj", f"{OURS}attn.{part}") for part in "qkv"),
            Rename(attention + "out_proj", OURS + "attn.o"),
            Rename(LAYER + "mlp.c_fc", OURS + "mlp.up"),
            Rename(LAYER + "mlp.c_proj", OURS + "mlp.down"),
        ]
    )


DROPOUT = ("resid_dropout", "embed_dropout", "attention_dropout")
GPT_NEO = Family(
    model_type="gpt_neo",
    title="GPT-Neo",
    architecture="GPTNeoForCausalLM",
    read=read_gpt_neo,
    write=write_gpt_neo,
    rules=gpt_neo_rules,
    fields=GPT_NEO_FIELDS,
    harmless=f"{gpt2.HARMLESS} resid_dropout embed_dropout classifier_dropout",
    extra_fields={**BESIDE, **dict.fromkeys(DROPOUT, 0.0)},
    ignored=(r"transformer\.h\.[0-9]+\.attn\.attention\.(bias|masked_bias)",),
    prefix="transformer.",
)


# GPT-NeoX, Pythia and models trained like them (Black et al., 2204.06745): rope over a quarter of
# each head, parallel attention and mlp with a norm each, and q, k, v of each head fused.
# In transformers 4 the fields were `rotary_pct` and `rotary_emb_base`; the head is stored as
# `embed_out` in 5 too.

EPS = common.eps("layer_norm_eps", 1e-5)
GPT_NEOX_FIELDS = (
    common.vocab_size(50432),
    common.standard("hidden_size", 6144),
    common.standard("num_hidden_layers", 44),
    common.standard("num_attention_heads", 64, help="Heads."),
    common.standard("intermediate_size", 24576),
    common.standard("hidden_act", "gelu"),
    Field(
        "use_parallel_residual",
        bool,
        True,
        "Compute attention and feed-forward layer in parallel, not one after the other.",
    ),
    Field("attention_bias", bool, True, "Biases on q, k, v and the attention output projection."),
    common.standard("max_position_embeddings", 2048),
    *rope.fields(
        part=0.25, outer={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    ),
    *common.last_fields(EPS, tied=False),
)


def read_gpt_neox(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a GPT-NeoX config.json: parallel blocks with two norms, or sequential
    ones, and rope on a part of each head.
    """
    positions = rope.read(config, common.head_size(config, GPT_NEOX_FIELDS))
    mixer = common.biased_attention(
        config, GPT_NEOX_FIELDS, config["attention_bias"], positions=positions
    )
    arrangement = ParallelResidual(2) if config["use_parallel_residual"] else SequentialResidual()
    block = BlockSpec(
        mixer,
        common.plain_mlp(config, GPT_NEOX_FIELDS),
        common.layer_norm(config, EPS),
        arrangement,
    )
    return common.make_spec(config, GPT_NEOX_FIELDS, [block] * config["num_hidden_layers"])


def write_gpt_neox(spec: ModelSpec) -> dict[str, Any]:
    """Return the field of a GPT-NeoX config.json that `common.write` does not state:
    use_parallel_residual.
    """
    return {"use_parallel_residual": spec.blocks[0].arrangement == ParallelResidual(2)}


def gpt_neox_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of GPT-NeoX: q, k, v of each head fused."""
    layer, ours = "gpt_neox.layers.{}.", "layers.{}."
    heads = common.attention(spec).heads
    return [
        Rename("gpt_neox.embed_in", "embed"),
        Rename(layer + "input_layernorm", ours + "attn_norm"),
        Split(layer + "attention.query_key_value", common.QKV, heads, (1, 1, 1)),
        Rename(layer + "attention.dense", ours + "attn.o"),
        Rename(layer + "post_attention_layernorm", ours + "mlp_norm"),
        Rename(layer + "mlp.dense_h_to_4h", ours + "mlp.up"),
        Rename(layer + "mlp.dense_4h_to_h", ours + "mlp.down"),
        Rename("gpt_neox.final_layer_norm", "final_norm"),
        Rename("embed_out", "head"),
    ]


GPT_NEOX = Family(
    model_type="gpt_neox",
    title="GPT-NeoX, Pythia and what was trained like them",
    architecture="GPTNeoXForCausalLM",
    read=read_gpt_neox,
    write=write_gpt_neox,
    rules=gpt_neox_rules,
    fields=GPT_NEOX_FIELDS,
    harmless="hidden_dropout classifier_dropout hidden_dropout_prob attention_probs_dropout_prob",
    extra_fields={**BESIDE, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ignored=(r"gpt_neox\.layers\.[0-9]+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    prefix="gpt_neox.",
)


# GPT-J (Wang and Komatsuzaki, 2021): parallel attention and mlp after one LayerNorm, rope over
# neighbours in a part of each head, biases on the mlp and the LM head only.

GPTJ_FIELDS = llama.change_fields(
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
    heads, size = config["n_head"], common.head_size(config, GPTJ_FIELDS)
    rotary_dim = config["rotary_dim"]
    if rotary_dim > size or rotary_dim % 2:
        raise ValueError(
            f"rotary_dim is {rotary_dim} for heads of size {size}, but rope rotates pairs: set "
            f"{flag('rotary_dim')} to an even number up to {size}"
        )
    mixer = AttentionSpec(heads, heads, size, positions=RopeSpec(rotary_dim, interleaved=True))
    mlp, norm = common.plain_mlp(config, GPTJ_FIELDS), common.layer_norm(config)
    spec = common.make_spec(
        config, GPTJ_FIELDS, [BlockSpec(mixer, mlp, norm, ParallelResidual(1))] * config["n_layer"]
    )
    return replace(spec, head=replace(spec.head, bias=True))


def write_gptj(spec: ModelSpec) -> dict[str, Any]:
    """Return the field of a GPT-J or CodeGen config.json that `common.write` does not state:
    rotary_dim.
    """
    return {"rotary_dim": expect(common.attention(spec).positions, RopeSpec, "positions").size}


GPTJ_MATRICES = (
    Rename(LAYER + "attn.out_proj", OURS + "attn.o"),
    Rename(LAYER + "mlp.fc_in", OURS + "mlp.up"),
    Rename(LAYER + "mlp.fc_out", OURS + "mlp.down"),
)


def gptj_rules(spec: ModelSpec) -> list[Rule]:
    """Return the rules that map GPT-J's stored tensors to our parameters."""
    qkv = (Rename(f"{LAYER}attn.{part}_proj", f"{OURS}attn.{part}") for part in "qkv")
    return gpt2.gpt2_like_rules([*qkv, *GPTJ_MATRICES], first="norm")


GPTJ = Family(
    model_type="gptj",
    title="GPT-J",
    architecture="GPTJForCausalLM",
    read=read_gptj,
    write=write_gptj,
    rules=gptj_rules,
    fields=GPTJ_FIELDS,
    only={"rotary": (True,), "scale_attn_weights": (True,)},
    harmless=gpt2.HARMLESS,
    extra_fields=gpt2.BESIDE,
    ignored=gpt2.IGNORED,
    prefix="transformer.",
)


# CodeGen (Nijkamp et al., 2203.13474): GPT-J with q, k, v in one tensor, in four blocks of rows,
# one for each of the cores that it was trained on, and in each block a quarter of the queries, of
# the values, then of the keys.

CODEGEN_BLOCKS = 4
CODEGEN_PARTS = tuple(f"{OURS}attn.{part}" for part in "qvk")


def read_codegen(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a CodeGen config.json: as GPT-J's. Raises ValueError if n_head is not a
    multiple of the 4 blocks in which q, v and k are stored.
    """
    common.head_size(config, GPTJ_FIELDS)
    if (heads := config["n_head"]) % CODEGEN_BLOCKS:
        raise ValueError(
            f"n_head ({heads}) is not divisible by {CODEGEN_BLOCKS}, the blocks that CodeGen "
            f"stores q, k and v in: set {flag('n_head')}, or {flag('model_type')} to gptj"
        )
    return read_gptj(config)


def codegen_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of CodeGen: GPT-J's, with q, v, k (in this order) fused in each of 4
    blocks.
    """
    qkv = Split(LAYER + "attn.qkv_proj", CODEGEN_PARTS, CODEGEN_BLOCKS, (1, 1, 1))
    return gpt2.gpt2_like_rules([qkv, *GPTJ_MATRICES], first="norm")


CODEGEN = Family(
    model_type="codegen",
    title="CodeGen",
    architecture="CodeGenForCausalLM",
    scorer=None,
    read=read_codegen,
    write=write_gptj,
    rules=codegen_rules,
    fields=GPTJ_FIELDS,
    only=GPTJ.only,
    harmless=gpt2.HARMLESS,
    extra_fields=gpt2.BESIDE,
    ignored=(*gpt2.IGNORED, r"transformer\.h\.[0-9]+\.attn\.causal_mask"),
    prefix="transformer.",
)
