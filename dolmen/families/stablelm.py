"""StableLM (Bellagente et al., 2402.17834): Llama with LayerNorms and rope over a part of each
head; some have biases on q, k, v, a norm per query and key head, or parallel attention and mlp.
"""

from dataclasses import replace
from typing import Any

from dolmen.families import common, llama, rope, windows
from dolmen.families.family import Family, Field
from dolmen.families.rules import Rule, Stack
from dolmen.model.spec import ModelSpec, NormSpec, ParallelResidual, SequentialResidual

EPS = "layer_norm_eps"
FIELDS = llama.drop_fields(
    llama.fields_with(common.eps(EPS, 1e-5), rope.fields(part=0.25)), "head_dim"
)


def read(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a StableLM config.json: LayerNorms, partial rope, and, where stated, q, k,
    v biases, a norm per head, and parallel blocks.
    """
    eps, bias = float(config[EPS]), config["use_qkv_bias"]
    spec = llama.read_llama_like(
        {**config, "head_dim": None}, norm=NormSpec("layernorm", eps, bias=True), qkv_bias=bias
    )
    arrangement = ParallelResidual(1) if config["use_parallel_residual"] else SequentialResidual()
    norm = NormSpec("layernorm", eps) if config["qk_layernorm"] else None
    mixer = replace(common.attention(spec), qk_norm=norm, qk_norm_of="each head")
    return common.map_blocks(spec, lambda b: replace(b, mixer=mixer, arrangement=arrangement))


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a StableLM config.json for a spec."""
    mixer = common.attention(spec)
    return {
        "use_qkv_bias": mixer.q_bias,
        "qk_layernorm": mixer.qk_norm is not None,
        "use_parallel_residual": spec.blocks[0].arrangement == ParallelResidual(1),
    }


def rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of StableLM; each head's q or k norm is a module of its own
    on disk.
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
    read=read,
    write=write,
    rules=rules,
    fields=llama.change_fields(
        FIELDS,
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
    only={**windows.NONE, **llama.NO_BIAS},
    harmless="head_dim hidden_dropout",
    extra_fields={**llama.BESIDE, "hidden_dropout": 0.0},
    ignored=llama.IGNORED,
)
