"""Falcon (Almazrouei et al., 2311.16867): LayerNorms, a plain feed-forward layer, and q, k, v in
one tensor. Three shapes of it:

    7B          one norm before attention and feed-forward layer side by side, one key-value head
    40B, 180B   new_decoder_architecture: a norm for each of the two, groups of queries
    RW          parallel_attn false: one after the other; biases, ALiBi, as many key-value heads as
                queries

q, k, v are stored per key-value head, first its queries: [q ... q, k, v] of one, [q, k, v] per head
of the classic layout.
"""

from typing import Annotated, Any

from annotated_types import Interval

from dolmen.core.messages import plural
from dolmen.families import common, rope
from dolmen.families.family import BESIDE, Family, Field, expect, flag
from dolmen.families.rules import Rename, Rule, Split
from dolmen.files import kinds
from dolmen.model.spec import (
    AttentionSpec,
    BlockSpec,
    FalconAlibiSpec,
    ModelSpec,
    ParallelResidual,
    RopeSpec,
    SequentialResidual,
)
from dolmen.model.spec.block import Arrangement

FIELDS = (
    common.vocab_size(65024),
    Field("hidden_size", kinds.WIDTH, 4544, "Width of the residual stream.", ("n_embed",)),
    common.standard("num_hidden_layers", 32),
    common.standard("num_attention_heads", 71),
    Field(
        "num_kv_heads",
        kinds.HEADS | None,
        None,
        "Key and value heads with new_decoder_architecture. None: as many as query heads.",
        common=("num_key_value_heads",),
    ),
    Field(
        "new_decoder_architecture",
        bool | None,
        False,
        "Grouped-query attention, computed in parallel with the feed-forward layer, each with its "
        "own norm.",
    ),
    Field(
        "multi_query",
        bool | None,
        True,
        "Without new_decoder_architecture: one key-value head, not one per query head.",
    ),
    Field(
        "parallel_attn",
        bool | None,
        True,
        "Compute attention and feed-forward layer in parallel, not one after the other.",
    ),
    Field(
        "num_ln_in_parallel_attn",
        Annotated[int | None, Interval(ge=1, le=2)],
        None,
        "Number of norms before parallel attention and feed-forward layer. None: 2 with "
        "new_decoder_architecture, else 1.",
    ),
    Field("bias", bool | None, False, "Biases on all linears."),
    Field(
        "alibi",
        bool | None,
        False,
        "ALiBi in place of rope; needs as many key-value heads as query heads.",
    ),
    common.standard("intermediate_size", None, "ffn_hidden_size", help=common.FOUR_TIMES),
    common.standard("hidden_act", "gelu", "activation"),
    common.standard("max_position_embeddings", 2048),
    *rope.fields(),
    *common.last_fields(common.LAYER_NORM_EPS, tied=True),
)


def _arrangement(config: dict[str, Any]) -> Arrangement:
    """Return how attention, feed-forward layer and their norms are arranged in a Falcon block:
    sequential, or parallel with one or two norms. Raises ValueError for combinations of fields that
    transformers does not compute either.
    """
    names = ("new_decoder_architecture", "parallel_attn", "num_ln_in_parallel_attn")
    grouped, parallel, norms = (config[name] for name in names)
    if grouped and not parallel:
        raise ValueError(
            f"parallel_attn is {parallel}, but new_decoder_architecture is {grouped}, which "
            f"implies parallel attention: set {flag('parallel_attn')}"
        )
    if not parallel:
        return SequentialResidual()
    if norms == 2 and not grouped:
        raise ValueError(
            f"num_ln_in_parallel_attn is 2, but new_decoder_architecture is {grouped}, without "
            f"which there is one norm: set {flag('num_ln_in_parallel_attn')} 1"
        )
    return ParallelResidual(norms or (2 if grouped else 1))


def _kv_heads(config: dict[str, Any]) -> int:
    """Return the number of key-value heads: in the new architecture num_kv_heads, or one per query
    head if unset; else 1 (multi_query) or one per query head. There, raises ValueError for a
    num_kv_heads that is neither that nor num_attention_heads, which transformers writes and
    ignores.
    """
    heads, stated = config["num_attention_heads"], config["num_kv_heads"]
    if config["new_decoder_architecture"]:
        return stated or heads
    # 7B: one key-value head for 71 queries
    used = 1 if config["multi_query"] else heads
    if stated not in (None, used, heads):  # transformers writes `heads`, and does not read it
        raise ValueError(
            f"num_kv_heads is {stated}, but without new_decoder_architecture and with multi_query "
            f"{config['multi_query']} there are {used}: leave it out, or set "
            f"{flag('new_decoder_architecture')}"
        )
    return used


def read(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Falcon config.json: LayerNorms, a plain feed-forward layer, rope or
    ALiBi, and the block arrangement that its flags state. Raises ValueError for ALiBi with fewer
    key-value heads than query heads.
    """
    heads, kv_heads = config["num_attention_heads"], _kv_heads(config)
    size, bias = common.head_size(config, FIELDS), bool(config["bias"])
    if config["alibi"] and kv_heads != heads:
        raise ValueError(
            f"alibi is {config['alibi']} with {plural(kv_heads, 'key-value head')} of "
            f"{plural(heads, 'query head')}: dolmen computes it with as many; set "
            "--model.no-multi-query"
        )
    positions = FalconAlibiSpec() if config["alibi"] else rope.read(config, size)
    mixer = common.biased_attention(config, FIELDS, bias, kv_heads=kv_heads, positions=positions)
    block = BlockSpec(
        mixer,
        common.plain_mlp(config, FIELDS, bias),
        common.layer_norm(config),
        _arrangement(config),
    )
    return common.make_spec(config, FIELDS, [block] * config["num_hidden_layers"])


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a Falcon config.json that `common.write` does not state: flags of its
    architecture, biases and ALiBi, and rope_parameters.
    """
    mixer, arrangement = common.attention(spec), spec.blocks[0].arrangement
    # only the new architecture has two norms, or groups of queries
    grouped = arrangement == ParallelResidual(2) or mixer.kv_heads not in (1, mixer.heads)
    return {
        "new_decoder_architecture": grouped,
        "multi_query": not grouped and mixer.kv_heads == 1,
        "parallel_attn": arrangement != SequentialResidual(),
        "num_ln_in_parallel_attn": NORMS.get(arrangement),
        "bias": mixer.q_bias,
        "alibi": mixer.positions == FalconAlibiSpec(),
        "rope_parameters": _rope(mixer),
    }


def _rope(mixer: AttentionSpec) -> dict[str, Any]:
    """Return the field `rope_parameters`; with ALiBi, that of an unused default rope, which
    transformers requires.
    """
    if mixer.positions == FalconAlibiSpec():
        return rope.write(RopeSpec(mixer.head_size))
    return rope.write(expect(mixer.positions, RopeSpec, "positions"))


NORMS = {
    SequentialResidual(): None,
    ParallelResidual(1): 1,
    ParallelResidual(2): 2,
}  # num_ln_in_parallel_attn
NAMES = {  # of the norms
    SequentialResidual(): {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"},
    ParallelResidual(1): {"input_layernorm": "norm"},
    ParallelResidual(2): {"ln_attn": "attn_norm", "ln_mlp": "mlp_norm"},
}


def rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of Falcon: q, k, v fused per key-value head, norms by the
    arrangement.
    """
    layer, ours = "transformer.h.{}.", "layers.{}."
    mixer, arrangement = common.attention(spec), spec.blocks[0].arrangement
    # 40B: 16 queries, 1 key, 1 value per group, 8 groups
    per_kv_head = (mixer.heads // mixer.kv_heads, 1, 1)
    return [
        Rename("transformer.word_embeddings", "embed"),
        *(Rename(layer + hf, ours + name) for hf, name in NAMES[arrangement].items()),
        Split(layer + "self_attention.query_key_value", common.QKV, mixer.kv_heads, per_kv_head),
        Rename(layer + "self_attention.dense", ours + "attn.o"),
        Rename(layer + "mlp.dense_h_to_4h", ours + "mlp.up"),
        Rename(layer + "mlp.dense_4h_to_h", ours + "mlp.down"),
        Rename("transformer.ln_f", "final_norm"),
        Rename("lm_head", "head"),
    ]


FALCON = Family(
    model_type="falcon",
    title="Falcon",
    architecture="FalconForCausalLM",
    read=read,
    write=write,
    rules=rules,
    fields=FIELDS,
    only={"apply_residual_connection_post_layernorm": (False, None)},
    harmless="hidden_dropout",
    extra_fields={**BESIDE, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ignored=(r"transformer\.h\.[0-9]+\.self_attention\.rotary_emb\.inv_freq",),
    remote_code=("configuration_falcon", "modeling_falcon"),
    prefix="transformer.",
)
