"""OLMoE (2409.02060): OLMo 2's norms of queries and keys in Llama's blocks, whose feed-forward
layers are many small experts; queries, keys and values may be clipped.
"""

from typing import Any

from dolmen.families import common, experts, llama_like, olmo, windows
from dolmen.families.family import Family, Field, expect
from dolmen.families.rules import Rule
from dolmen.files import kinds
from dolmen.files.schema import Flag
from dolmen.model.tree import Experts, Tree

NUMBER = "num_experts"


def read(config: dict[str, Any]) -> Tree:
    """`intermediate_size` is an expert's width; `attention_bias` puts biases on q, k, v and on the
    output projection.
    """
    size, bias = config["intermediate_size"], bool(config["attention_bias"])
    sparse = experts.read(config, size, config["norm_topk_prob"], NUMBER)
    tree = llama_like.read(
        config,
        mlp=lambda _: sparse,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        qk_norm_of="width",
    )
    return olmo.clipped(config, tree)


def new(tree: Tree) -> dict[str, Any]:
    layer, mixer = expect(tree.blocks[0].mlp, Experts, "mlp"), common.attention(tree)
    return {
        **llama_like.new(tree),
        **experts.new(layer, NUMBER),
        "norm_topk_prob": layer.router.normalise,
        "attention_bias": mixer.q_bias,
        olmo.CLIP.name: mixer.clip,
    }


def rules(tree: Tree) -> list[Rule]:
    module = f"{llama_like.LAYER}mlp"
    return [*llama_like.rules(tree), *experts.rules(tree, module, llama_like.MATRICES)]


FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    read=read,
    new=new,
    rules=rules,
    fields=llama_like.changed(
        (
            *llama_like.FIELDS,
            Field(NUMBER, kinds.EXPERTS, 64, experts.NUMBER, ("num_local_experts",)),
            *experts.FIELDS[1:],
        ),
        llama_like.ATTENTION_BIAS,
        olmo.CLIP,
        Field("norm_topk_prob", Flag(), False, experts.NORMALISED),
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=16,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        num_experts_per_tok=8,
        router_aux_loss_coef=0.01,
    ),
    only={**windows.NONE, "mlp_bias": (False, None)},
    harmless=("output_router_logits",),
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
