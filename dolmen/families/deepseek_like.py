"""What DeepSeek-V2 and V3 share: latent attention, and dense layers before those of many small
experts and a shared one.

In the configs of transformers `n_shared_experts` make one dense layer of so many times the width of
an expert. The norms of the latents have the eps of its class, 1e-6, whatever `rms_norm_eps` says.
"""

from dataclasses import replace
from typing import Any

from dolmen.families import common, experts, llama_like, rope
from dolmen.families.family import Field, activation_name, expect, knob
from dolmen.families.rules import Rename, Rule
from dolmen.files import kinds
from dolmen.files.schema import Flag, Int, Real, optional
from dolmen.model.tree import Block, Experts, LatentAttention, Mlp, Norm, Router, Tree

LATENT_EPS = 1e-6
SIZES_OF_HEADS = ("num_key_value_heads", "head_dim")  # which here are others
FIELDS = (
    *(field for field in llama_like.FIELDS if field.name not in SIZES_OF_HEADS),
    Field(
        "num_key_value_heads",
        optional(kinds.HEADS),
        None,
        "Key and value heads: as many as query heads, if stated.",
    ),
    Field(
        "q_lora_rank",
        optional(kinds.WIDTH),
        1536,
        "Width of the latent of queries. None: there is none.",
    ),
    Field("kv_lora_rank", kinds.WIDTH, 512, "Width of the latent of keys and values."),
    Field("qk_nope_head_dim", kinds.WIDTH, 128, "Of each query and key head, what is not turned."),
    Field("qk_rope_head_dim", kinds.WIDTH, 64, "Of each query and key head, what rope turns."),
    Field("v_head_dim", kinds.WIDTH, 128, "Size of a value head."),
    Field(
        "attention_bias",
        Flag(),
        False,
        "Biases on what makes the latents and on the attention output projection.",
    ),
    experts.SIZE,
    Field("n_shared_experts", Int(1, kinds.EXPERTS.high), 2, "Experts that every token passes."),
    Field(
        "routed_scaling_factor",
        Real(0, above=True),
        1.0,
        "What the weights of a token's experts are multiplied by.",
    ),
    Field("first_k_dense_replace", Int(0, kinds.LAYERS.high), 0, "Dense layers before the others."),
    replace(experts.AUX_LOSS, name="aux_loss_alpha", common=(experts.AUX_LOSS.name,)),
)
ONLY = {"mlp_bias": (False, None), "moe_layer_freq": (1, None)}
CODE = ("configuration_deepseek", "modeling_deepseek")
HARMLESS = ("head_dim", "qk_head_dim", "ep_size", "seq_aux", "output_router_logits")


def read(config: dict[str, Any], router: Router, interleaved: bool) -> Tree:
    """The tree of a config.json, given how a token's experts are chosen and what a pair of rope
    is. Raises ValueError naming the field.
    """
    mixer, norm = _mixer(config, interleaved), llama_like.rms_norm(config)
    size, dense = config["moe_intermediate_size"], llama_like.dense_mlp(config)
    sparse = Experts(
        config["n_routed_experts"],
        config["num_experts_per_tok"],
        size,
        dense.activation,
        replace(
            router,
            scale=float(config["routed_scaling_factor"]),
            aux_loss_coef=float(config["aux_loss_alpha"]),
        ),
        shared=replace(dense, size=size * config["n_shared_experts"]),
    )
    first = config["first_k_dense_replace"]
    blocks = [
        Block(mixer, dense if i < first else sparse, norm)
        for i in range(config["num_hidden_layers"])
    ]
    return common.tree(config, FIELDS, blocks)


def _mixer(config: dict[str, Any], interleaved: bool) -> LatentAttention:
    heads, stated = config["num_attention_heads"], config["num_key_value_heads"]
    if stated not in (None, heads):
        raise ValueError(
            f"num_key_value_heads ({stated}) is not num_attention_heads ({heads}): latent "
            f"attention has a key and a value for each query head; set "
            f"{knob('num_key_value_heads')} to as many"
        )
    size = config["qk_rope_head_dim"]
    if size % 2:
        raise ValueError(
            f"qk_rope_head_dim ({size}) is odd, rope rotates pairs: set "
            f"{knob('qk_rope_head_dim')} to an even size"
        )
    turned = rope.read(config, size)
    field, parameters = rope.given(config)
    mscale = float(parameters.get("mscale_all_dim") or 0.0)
    if mscale and rope.kind(parameters) not in ("yarn", "default"):
        raise ValueError(f"{field}.mscale_all_dim is {mscale}: it is of rope_type yarn alone")
    return LatentAttention(
        heads,
        config["q_lora_rank"],
        config["kv_lora_rank"],
        config["qk_nope_head_dim"],
        config["v_head_dim"],
        Norm("rmsnorm", LATENT_EPS),
        replace(turned, interleaved=interleaved),
        mscale_all_dim=0.0 if turned.scaling is None else mscale,
        down_bias=config["attention_bias"],
        o_bias=config["attention_bias"],
    )


def new(tree: Tree) -> dict[str, Any]:
    """The fields that both families have: of the first layer, of the first dense one, if there is
    any, and of the first sparse one. Raises ValueError where the mixer is no latent attention.
    """
    mixer = expect(tree.blocks[0].mixer, LatentAttention, "mixer")
    dense, sparse = common.dense(tree), common.sparse(tree)
    return {
        **common.new(tree, FIELDS),
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.heads,
        "hidden_act": activation_name(tree.blocks[0].mlp.activation),
        "q_lora_rank": mixer.q_rank,
        "kv_lora_rank": mixer.kv_rank,
        "qk_nope_head_dim": mixer.nope_size,
        "qk_rope_head_dim": mixer.positions.size,
        "v_head_dim": mixer.value_size,
        "attention_bias": mixer.o_bias,
        "rope_parameters": _rope(mixer),
        "first_k_dense_replace": len(dense),
        **({"intermediate_size": dense[0].size} if dense else {}),
        **(_new_experts(sparse[0]) if sparse else {}),
    }


def _rope(mixer: LatentAttention) -> dict[str, Any]:
    """With the scores' temperature; an attention factor of 1 follows from equal mscales."""
    stated, mscale = rope.new(mixer.positions), mixer.mscale_all_dim
    if not mscale:
        return stated
    if stated.get("attention_factor") == 1.0:
        del stated["attention_factor"]
        stated["mscale"] = mscale
    return {**stated, "mscale_all_dim": mscale}


def _new_experts(sparse: Experts) -> dict[str, Any]:
    shared = expect(sparse.shared, Mlp, "shared")
    return {
        "n_routed_experts": sparse.number,
        "num_experts_per_tok": sparse.per_token,
        "moe_intermediate_size": sparse.size,
        "n_shared_experts": shared.size // sparse.size,
        "routed_scaling_factor": sparse.router.scale,
        "aux_loss_alpha": sparse.router.aux_loss_coef,
    }


def rules(tree: Tree) -> list[Rule]:
    """Weight names; q_proj exists where queries have no latent."""
    attention = {
        "q_proj": "q",
        "q_a_proj": "q_a",
        "q_a_layernorm": "q_a_norm",
        "q_b_proj": "q_b",
        "kv_a_proj_with_mqa": "kv_a",
        "kv_a_layernorm": "kv_a_norm",
        "kv_b_proj": "kv_b",
        "o_proj": "o",
    }
    matrices = llama_like.MATRICES
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
        **{f"self_attn.{hf}": f"attn.{ours}" for hf, ours in attention.items()},
        **{f"mlp.{hf}": f"mlp.{ours}" for hf, ours in matrices.items()},
        **{f"mlp.shared_experts.{hf}": f"mlp.shared.{ours}" for hf, ours in matrices.items()},
    }
    return [
        Rename("model.embed_tokens", "embed"),
        *(Rename(llama_like.LAYER + hf, "layers.{}." + ours) for hf, ours in names.items()),
        *experts.rules(tree, f"{llama_like.LAYER}mlp", matrices, bias="e_score_correction_bias"),
        Rename("model.norm", "final_norm"),
        Rename("lm_head", "head"),
    ]
