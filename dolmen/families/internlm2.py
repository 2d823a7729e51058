"""InternLM 2 (2403.17297): Llama under other names, with q, k, v in one tensor: of each key-value
head first its queries, then k, then v.
"""

from typing import Any

from dolmen.families import common, llama, windows
from dolmen.families.family import Family, Field
from dolmen.families.rules import Rename, Rule, Split
from dolmen.model.spec import ModelSpec

BIAS = Field("bias", bool, False, "Biases on q, k, v and on the attention output projection.")
FIELDS = llama.drop_fields(llama.FIELDS, "head_dim")


def read(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of an InternLM 2 config.json; `bias` puts biases on q, k, v and o."""
    bias = config["bias"]
    return llama.read_llama_like({**config, "head_dim": None}, qkv_bias=bias, o_bias=bias)


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return the field of an InternLM 2 config.json that `common.write` does not state."""
    return {"bias": common.attention(spec).q_bias}


def rules(spec: ModelSpec) -> list[Rule]:
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
    read=read,
    write=write,
    rules=rules,
    fields=llama.change_fields(FIELDS, BIAS, vocab_size=103168),
    only={**windows.NONE, **llama.NO_BIAS},
    # attn_implementation selects how its own code computes the same
    harmless="attn_implementation",
    extra_fields=llama.BESIDE,
    ignored=(r"model\.layers\.\d+\.attention\.rotary_emb\.inv_freq",),
    remote_code=(
        "configuration_internlm2",
        "modeling_internlm2",
        "tokenization_internlm2",
        "tokenization_internlm2_fast",
    ),
)
