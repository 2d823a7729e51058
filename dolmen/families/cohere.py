"""Cohere's Command R, Command R7B and Command A."""

from dataclasses import replace
from typing import Any

from dolmen.core.config import AboveZero
from dolmen.families import common, llama
from dolmen.families.family import Field, flag
from dolmen.families.rules import Rule
from dolmen.model.spec import ModelSpec, NormSpec, ParallelResidual, group_repeats

# Command R (Cohere, 2024): Llama with LayerNorms without bias, parallel attention and mlp after one
# of them, rope over neighbours, and scaled logits.

EPS = "layer_norm_eps"
COHERE_FIELDS = llama.fields_with(common.eps(EPS, 1e-5))


def read_cohere(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Command R config.json: parallel blocks after one LayerNorm, rope over
    neighbours, scaled logits. `attention_bias` puts biases on q, k, v and o.
    """
    bias = bool(config["attention_bias"])
    spec = llama.read_llama_like(
        config,
        norm=NormSpec("layernorm", float(config[EPS])),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=bool(config["use_qk_norm"]),
        qk_norm_of="each head",
        interleaved=True,
    )
    spec = common.map_blocks(spec, lambda block: replace(block, arrangement=ParallelResidual(1)))
    return replace(spec, head=replace(spec.head, scale=float(config["logit_scale"])))


def write_cohere(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a Command R config.json that `common.write` does not state: use_qk_norm
    and logit_scale.
    """
    mixer = common.attention(spec)
    return {"use_qk_norm": mixer.qk_norm is not None, "logit_scale": spec.head.scale}


def cohere_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of Command R: Llama's with one norm per block."""
    return llama.llama_like_rules(spec, {"input_layernorm": "norm"})


COHERE = replace(
    llama.LLAMA,
    model_type="cohere",
    title="Command R",
    architecture="CohereForCausalLM",
    scorer=None,
    read=read_cohere,
    write=write_cohere,
    rules=cohere_rules,
    fields=llama.change_fields(
        COHERE_FIELDS,
        llama.ATTENTION_BIAS,
        Field(
            "use_qk_norm",
            bool | None,
            False,
            "LayerNorm on every query and key head, with a weight per head.",
        ),
        Field("logit_scale", AboveZero, 0.0625, "Factor of logits."),
        vocab_size=256000,
        hidden_size=8192,
        intermediate_size=22528,
        num_hidden_layers=40,
        num_attention_heads=64,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=True,
    ),
    only={**common.NO_WINDOWS, "mlp_bias": (False, None)},
    harmless="model_max_length",
)


# Command R7B and Command A (Cohere, 2504.00698): Command R in which three of four layers have a
# sliding window and rope; the fourth has full attention and no positions (NoPE).

COHERE2_FIELDS = llama.drop_fields(
    (*COHERE.fields, common.WINDOW_SIZE, *common.pattern_fields(4)), "use_qk_norm", "head_dim"
)


def read_cohere2(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Command R7B config.json: only layers with a window have rope. Raises
    ValueError if no layer has a window, as rope would then act nowhere.
    """
    sizes = common.pattern_windows(config)
    if not any(sizes):
        raise ValueError(
            "layer_types has no sliding_attention layer, the only kind with rope: set "
            f"{flag('layer_types')} so that it has one"
        )
    spec = read_cohere({**config, "use_qk_norm": False, "head_dim": None})
    blocks = []
    for block, size in zip(spec.blocks, sizes, strict=True):
        # full layers have no positions (NoPE)
        positions = block.mixer.positions if size is not None else None
        mixer = replace(block.mixer, window=size, positions=positions)
        blocks.append(replace(block, mixer=mixer))
    return replace(spec, runs=group_repeats(blocks))


COHERE2 = replace(
    llama.LLAMA,
    model_type="cohere2",
    title="Command R7B and Command A",
    architecture="Cohere2ForCausalLM",
    scorer=None,
    read=read_cohere2,
    write=lambda spec: {"logit_scale": spec.head.scale},
    rules=cohere_rules,
    fields=llama.change_fields(COHERE2_FIELDS, sliding_window=4096, rope_theta=10000.0),
    only={"mlp_bias": (False, None)},
    # what transformers does not read, of the code that it was made with
    harmless=(
        "model_max_length head_dim cache_implementation order_of_interleaved_layers "
        "position_embedding_type rotary_pct use_embedding_sharing use_gated_activation "
        "use_parallel_block use_parallel_embedding"
    ),
)
