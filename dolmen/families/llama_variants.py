"""Families close to Llama: Granite, InternLM 2, Mistral and Mixtral, StableLM, StarCoder2."""

from dataclasses import replace
from typing import Any

from dolmen.core.config import AboveZero
from dolmen.families import common, experts, llama, rope
from dolmen.families.family import Family, Field, expect
from dolmen.families.rules import Rename, Rule, Split, Stack
from dolmen.model.spec import ModelSpec, NormSpec, ParallelResidual, SequentialResidual

# Granite 3 (IBM, 2024): Llama with four multipliers in the manner of muP (2203.03466): of the
# embedding, of the branches' outputs, of attention scores, and a divisor of the logits.


def read_granite(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Granite config.json: Llama with muP-like multipliers of embedding,
    scores, branches and logits. `attention_bias` puts biases on q, k, v and o.
    """
    bias, mlp_bias = bool(config["attention_bias"]), bool(config["mlp_bias"])
    spec = llama.read_llama_like(config, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
    scale = float(config["attention_multiplier"])
    # the default scale is None, so that equal models have equal specs
    multiplier = None if scale == common.attention(spec).head_size ** -0.5 else scale
    added = SequentialResidual(branch_scale=float(config["residual_multiplier"]))
    spec = common.map_blocks(
        spec, lambda b: replace(b, mixer=replace(b.mixer, scale=multiplier), arrangement=added)
    )
    return replace(
        spec,
        embedding=replace(spec.embedding, scale=float(config["embedding_multiplier"])),
        # logits are divided by it
        head=replace(spec.head, scale=1 / config["logits_scaling"]),
    )


def write_granite(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a Granite config.json that `common.write` does not state: its four
    multipliers; logits_scaling is rounded to 15 digits.
    """
    mixer = common.attention(spec)
    arrangement = expect(spec.blocks[0].arrangement, SequentialResidual, "arrangement")
    return {
        "embedding_multiplier": spec.embedding.scale,
        "attention_multiplier": mixer.head_size**-0.5 if mixer.scale is None else mixer.scale,
        "residual_multiplier": arrangement.branch_scale,
        # 49, and not 49.00000000000001
        "logits_scaling": float(f"{1 / spec.head.scale:.15g}"),
    }


GRANITE = replace(
    llama.LLAMA,
    model_type="granite",
    title="Granite 3",
    architecture="GraniteForCausalLM",
    scorer=None,
    read=read_granite,
    write=write_granite,
    fields=(
        *llama.LLAMA.fields,
        Field("embedding_multiplier", AboveZero, 1.0, "Factor of embeddings."),
        Field("attention_multiplier", AboveZero, 1.0, "Factor of attention scores."),
        Field(
            "residual_multiplier", AboveZero, 1.0, "Factor of layer outputs on the residual stream."
        ),
        Field("logits_scaling", AboveZero, 1.0, "Divisor of logits."),
    ),
)


# InternLM 2 (2403.17297): Llama under other names, with q, k, v in one tensor: of each key-value
# head first its queries, then k, then v.

INTERNLM2_BIAS = Field(
    "bias", bool, False, "Biases on q, k, v and on the attention output projection."
)
INTERNLM2_FIELDS = llama.drop_fields(llama.FIELDS, "head_dim")


def read_internlm2(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of an InternLM 2 config.json: Llama, where `bias` puts biases on q, k, v and
    o.
    """
    bias = config["bias"]
    return llama.read_llama_like({**config, "head_dim": None}, qkv_bias=bias, o_bias=bias)


def write_internlm2(spec: ModelSpec) -> dict[str, Any]:
    """Return the field of an InternLM 2 config.json that `common.write` does not state: bias."""
    return {"bias": common.attention(spec).q_bias}


def internlm2_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of InternLM 2: q, k, v fused per key-value head, its queries
    first.
    """
    mixer, layer, ours = common.attention(spec), llama.LAYER, "layers.{}."
    # queries per key-value head, stored before its k and v
    group = mixer.heads // mixer.kv_heads
    names = {
        "attention.wo": "attn.o",
        "feed_forward.w1": "mlp.gate",
        "feed_forward.w3": "mlp.up",
        "feed_forward.w2": "mlp.down",
    }
    renames = [
        Rename("model.tok_embeddings", "embed"),
        Split(layer + "attention.wqkv", common.QKV, mixer.kv_heads, (group, 1, 1)),
        *(Rename(layer + hf, ours + name) for hf, name in names.items()),
        Rename("output", "head"),
    ]
    norms = {"attention_norm": "attn_norm", "ffn_norm": "mlp_norm"}
    return llama.llama_like_rules(spec, norms, instead=renames)


INTERNLM2 = Family(
    model_type="internlm2",
    title="InternLM 2",
    architecture="InternLM2ForCausalLM",
    in_transformers=False,
    read=read_internlm2,
    write=write_internlm2,
    rules=internlm2_rules,
    fields=llama.change_fields(INTERNLM2_FIELDS, INTERNLM2_BIAS, vocab_size=103168),
    only={**common.NO_WINDOWS, **llama.NO_BIAS},
    # attn_implementation selects how its own code computes the same
    harmless="attn_implementation",
    extra_fields=llama.BESIDE,
    ignored=(r"model\.layers\.[0-9]+\.attention\.rotary_emb\.inv_freq",),
    remote_code=(
        "configuration_internlm2",
        "modeling_internlm2",
        "tokenization_internlm2",
        "tokenization_internlm2_fast",
    ),
)


# Mistral 7B, Nemo, Small (Jiang et al., 2310.06825): Llama without biases, with one sliding window
# for all layers.


def read_mistral(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Mistral config.json: Llama with one window for all layers."""
    return llama.read_llama_like(config, windows=common.uniform_windows(config))


MISTRAL = replace(
    llama.LLAMA,
    model_type="mistral",
    title="Mistral 7B, Nemo, Small",
    architecture="MistralForCausalLM",
    read=read_mistral,
    fields=llama.change_fields(
        (*llama.FIELDS, common.WINDOW_SIZE),
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        sliding_window=4096,
    ),
    only={**llama.NO_BIAS, **common.NO_LAYER_TYPES},
)


# Mixtral 8x7B and 8x22B (2401.04088): Mistral with an MoE of 8 experts in every layer, 2 per token,
# whose weights are normalised.


def read_mixtral(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Mixtral config.json: Mistral with every layer MoE; `intermediate_size`
    is an expert's width.
    """
    layer = experts.read(config, config["intermediate_size"], normalise=True)
    return llama.read_llama_like(
        config, mlp=lambda _: layer, windows=common.uniform_windows(config)
    )


def mixtral_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of Mixtral: w1 is the gate, w3 up and w2 down of each expert."""
    names = {"w1": "gate", "w3": "up", "w2": "down"}
    module = f"{llama.LAYER}block_sparse_moe"
    return [*llama.llama_like_rules(spec), *experts.rules(spec, module, names)]


MIXTRAL = replace(
    llama.LLAMA,
    model_type="mixtral",
    title="Mixtral 8x7B and 8x22B",
    architecture="MixtralForCausalLM",
    read=read_mixtral,
    rules=mixtral_rules,
    fields=llama.change_fields(
        (*llama.FIELDS, common.WINDOW_SIZE, *experts.FIELDS),
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
    ),
    only={**llama.NO_BIAS, **common.NO_LAYER_TYPES, "router_jitter_noise": (0.0, None)},
    harmless="output_router_logits",
)


# StableLM (Bellagente et al., 2402.17834): Llama with LayerNorms and rope over a part of each
# head; some have biases on q, k, v, a norm per query and key head, or parallel attention and mlp.

STABLELM_EPS = "layer_norm_eps"
STABLELM_FIELDS = llama.drop_fields(
    llama.fields_with(common.eps(STABLELM_EPS, 1e-5), rope.fields(part=0.25)), "head_dim"
)


def read_stablelm(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a StableLM config.json: LayerNorms, partial rope, and, where stated, q, k,
    v biases, a norm per head, and parallel blocks.
    """
    eps, bias = float(config[STABLELM_EPS]), config["use_qkv_bias"]
    spec = llama.read_llama_like(
        {**config, "head_dim": None}, norm=NormSpec("layernorm", eps, bias=True), qkv_bias=bias
    )
    arrangement = ParallelResidual(1) if config["use_parallel_residual"] else SequentialResidual()
    norm = NormSpec("layernorm", eps) if config["qk_layernorm"] else None
    mixer = replace(common.attention(spec), qk_norm=norm, qk_norm_of="each head")
    return common.map_blocks(spec, lambda b: replace(b, mixer=mixer, arrangement=arrangement))


def write_stablelm(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a StableLM config.json that `common.write` does not state: use_qkv_bias,
    qk_layernorm and use_parallel_residual.
    """
    mixer = common.attention(spec)
    return {
        "use_qkv_bias": mixer.q_bias,
        "qk_layernorm": mixer.qk_norm is not None,
        "use_parallel_residual": spec.blocks[0].arrangement == ParallelResidual(1),
    }


def stablelm_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of StableLM; on disk the q or k norm of each head is a module, here
    one matrix has a row per head.
    """
    mixer, parallel_norm = common.attention(spec), spec.blocks[0].arrangement == ParallelResidual(1)
    # one stored norm per head is one row of ours
    numbers = {"q": mixer.heads, "k": mixer.kv_heads}
    layer, ours = f"{llama.LAYER}self_attn.", "layers.{}.attn."
    norms = [
        Stack(f"{layer}{part}_layernorm.norms.{{}}", f"{ours}{part}_norm", number)
        for part, number in numbers.items()
    ]
    names = {"input_layernorm": "norm"} if parallel_norm else llama.NORMS
    return llama.llama_like_rules(spec, names, instead=norms)


STABLELM = Family(
    model_type="stablelm",
    title="StableLM",
    architecture="StableLmForCausalLM",
    read=read_stablelm,
    write=write_stablelm,
    rules=stablelm_rules,
    fields=llama.change_fields(
        STABLELM_FIELDS,
        Field("use_qkv_bias", bool, False, "Biases on q, k, v."),
        Field(
            "qk_layernorm",
            bool,
            False,
            "LayerNorm on every query and key head, with a weight per head.",
        ),
        Field(
            "use_parallel_residual",
            bool,
            False,
            "Compute attention and feed-forward layer in parallel, not one after the other.",
        ),
        vocab_size=50304,
        hidden_size=2560,
        intermediate_size=6912,
        num_key_value_heads=32,
        max_position_embeddings=4096,
    ),
    only={**common.NO_WINDOWS, **llama.NO_BIAS},
    harmless="head_dim hidden_dropout",
    extra_fields={**llama.BESIDE, "hidden_dropout": 0.0},
    ignored=llama.IGNORED,
)


# StarCoder2 (Lozhkov et al., 2402.19173): Llama with LayerNorms, a plain feed-forward layer,
# biases everywhere and a sliding window in every layer.

STARCODER2_EPS = common.eps("norm_epsilon", 1e-5)
STARCODER2_FIELDS = llama.fields_with(STARCODER2_EPS)


def read_starcoder2(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a StarCoder2 config.json: Llama with LayerNorms, a plain feed-forward
    layer and one window for all layers; `use_bias` puts biases on all linears but the head.
    """
    bias = config["use_bias"]
    plain = common.plain_mlp(config, STARCODER2_FIELDS, bias)
    return llama.read_llama_like(
        config,
        mlp=lambda layer: plain,
        windows=common.uniform_windows(config),
        norm=common.layer_norm(config, STARCODER2_EPS),
        qkv_bias=bias,
        o_bias=bias,
    )


def write_starcoder2(spec: ModelSpec) -> dict[str, Any]:
    """Return the field of a StarCoder2 config.json that `common.write` does not state: use_bias."""
    return {"use_bias": common.attention(spec).q_bias}


def starcoder2_rules(spec: ModelSpec) -> list[Rule]:
    """Return the rules that map StarCoder2's stored tensors to our parameters."""
    names = {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
    renames = [Rename(llama.LAYER + hf, f"layers.{{}}.{ours}") for hf, ours in names.items()]
    return llama.llama_like_rules(spec, instead=renames)


STARCODER2_DROPOUT = ("residual_dropout", "embedding_dropout")
STARCODER2 = Family(
    model_type="starcoder2",
    title="StarCoder2",
    architecture="Starcoder2ForCausalLM",
    read=read_starcoder2,
    write=write_starcoder2,
    rules=starcoder2_rules,
    fields=llama.change_fields(
        STARCODER2_FIELDS,
        common.WINDOW_SIZE,
        Field("use_bias", bool, True, "Biases on all linears but the head."),
        vocab_size=49152,
        hidden_size=3072,
        intermediate_size=12288,
        num_hidden_layers=30,
        num_attention_heads=24,
        num_key_value_heads=2,
        hidden_act="gelu_pytorch_tanh",
        max_position_embeddings=4096,
        initializer_range=0.018042,
        tie_word_embeddings=True,
    ),
    only={
        **common.NO_LAYER_TYPES,
        "mlp_type": ("default",),
        "norm_type": ("layer_norm",),
        "scale_attn_weights": (True,),
    },
    harmless=(
        "residual_dropout embedding_dropout layer_norm_epsilon attention_softmax_in_fp32 "
        "scale_attention_softmax_in_fp32"
    ),
    extra_fields={**llama.BESIDE, **dict.fromkeys(STARCODER2_DROPOUT, 0.0)},
    ignored=llama.IGNORED,
)
