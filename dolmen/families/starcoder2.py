"""StarCoder2 (Lozhkov et al., 2402.19173): Llama with LayerNorms, a plain feed-forward layer,
biases everywhere and a sliding window in every layer.
"""

from typing import Any

from dolmen.families import common, llama, windows
from dolmen.families.family import Family, Field
from dolmen.families.rules import Rename, Rule
from dolmen.model.spec import ModelSpec

EPS = common.eps("norm_epsilon", 1e-5)
FIELDS = llama.fields_with(EPS)


def read(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a StarCoder2 config.json; `use_bias` puts biases on all linears but the
    head.
    """
    bias = config["use_bias"]
    plain = common.plain_mlp(config, FIELDS, bias)
    return llama.read_llama_like(
        config,
        mlp=lambda layer: plain,
        windows=windows.uniform_windows(config),
        norm=common.layer_norm(config, EPS),
        qkv_bias=bias,
        o_bias=bias,
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return the field of a StarCoder2 config.json that `common.write` does not state."""
    return {"use_bias": common.attention(spec).q_bias}


def rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of StarCoder2."""
    names = {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
    renames = [Rename(llama.LAYER + hf, f"layers.{{}}.{ours}") for hf, ours in names.items()]
    return llama.llama_like_rules(spec, instead=renames)


DROPOUT = ("residual_dropout", "embedding_dropout")
STARCODER2 = Family(
    model_type="starcoder2",
    title="StarCoder2",
    architecture="Starcoder2ForCausalLM",
    read=read,
    write=write,
    rules=rules,
    fields=llama.change_fields(
        FIELDS,
        windows.SIZE,
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
        **windows.NO_TYPES,
        "mlp_type": ("default",),
        "norm_type": ("layer_norm",),
        "scale_attn_weights": (True,),
    },
    harmless=(
        "residual_dropout embedding_dropout layer_norm_epsilon attention_softmax_in_fp32 "
        "scale_attention_softmax_in_fp32"
    ),
    extra_fields={**llama.BESIDE, **dict.fromkeys(DROPOUT, 0.0)},
    ignored=llama.IGNORED,
)
