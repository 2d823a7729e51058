"""What DeepSeek-V2 and V3 share: latent attention, and dense layers before those of many small
experts and a shared one.

In the configs of transformers `n_shared_experts` make one dense layer of so many times the width of
an expert. The norms of the latents have the eps of its class, 1e-6, whatever `rms_norm_eps` says.
"""

from dataclasses import replace
from typing import Any

from dolmen.families import llama_like, rope
from dolmen.families.family import Field, activation, activation_name, expect
from dolmen.families.rules import Rename, Rule
from dolmen.files import kinds
from dolmen.files.schema import Flag, Int, Real, optional
from dolmen.model.tree import (
    Block,
    Embedding,
    Experts,
    Head,
    LatentAttention,
    Mlp,
    Norm,
    Router,
    Tree,
    Yarn,
    runs_of,
)

LATENT_EPS = 1e-6
NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "initializer_range",
    "tie_word_embeddings",
)
FIELDS = (
    *(field for field in llama_like.FIELDS if field.name in NAMES),
    *rope.fields(),
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
    Field("moe_intermediate_size", kinds.WIDTH, 1407, "Width of an expert."),
    Field("n_shared_experts", Int(1, kinds.EXPERTS.high), 2, "Experts that every token passes."),
    Field(
        "routed_scaling_factor",
        Real(0, above=True),
        1.0,
        "What the weights of a token's experts are multiplied by.",
    ),
    Field("first_k_dense_replace", Int(0, kinds.LAYERS.high), 0, "Dense layers before the others."),
    Field(
        "aux_loss_alpha",
        Real(0),
        0.001,
        "Weight of the loss that keeps experts equally busy, summed over layers, mean over "
        "sequences; --train.router.aux-loss-coef over it.",
        common=("router_aux_loss_coef",),
    ),
)
ONLY = {"mlp_bias": (False, None), "moe_layer_freq": (1, None)}
CODE = ("configuration_deepseek", "modeling_deepseek")
HARMLESS = ("head_dim", "qk_head_dim", "ep_size", "seq_aux", "output_router_logits")


def read(c: dict[str, Any], router: Router, interleaved: bool) -> Tree:
    """The tree of a config.json, given how a token's experts are chosen and what a pair of rope
    is.
    """
    norm = Norm("rmsnorm", float(c["rms_norm_eps"]))
    mixer, act = _mixer(c, interleaved), activation(c["hidden_act"], "hidden_act")
    size, dense = c["moe_intermediate_size"], Mlp(c["intermediate_size"], True, act)
    sparse = Experts(
        c["n_routed_experts"],
        c["num_experts_per_tok"],
        size,
        act,
        replace(
            router,
            scale=float(c["routed_scaling_factor"]),
            aux_loss_coef=float(c["aux_loss_alpha"]),
        ),
        shared=Mlp(size * c["n_shared_experts"], True, act),
    )
    first = c["first_k_dense_replace"]
    blocks = [
        Block(mixer, dense if i < first else sparse, norm) for i in range(c["num_hidden_layers"])
    ]
    return Tree(
        hidden_size=c["hidden_size"],
        embedding=Embedding(c["vocab_size"]),
        runs=runs_of(blocks),
        final_norm=norm,
        head=Head(tied=c["tie_word_embeddings"]),
        max_position_embeddings=c["max_position_embeddings"],
        initializer_range=float(c["initializer_range"]),
    )


def _mixer(c: dict[str, Any], interleaved: bool) -> LatentAttention:
    heads, stated = c["num_attention_heads"], c["num_key_value_heads"]
    if stated not in (None, heads):
        raise ValueError(
            f"num_key_value_heads ({stated}) is not num_attention_heads ({heads}): latent "
            "attention has a key and a value for each query head"
        )
    if c["qk_rope_head_dim"] % 2:
        raise ValueError(
            f"qk_rope_head_dim ({c['qk_rope_head_dim']}) is odd, rope rotates pairs: set "
            "model.qk-rope-head-dim to an even size"
        )
    turned = rope.read(c, c["qk_rope_head_dim"])
    knob, parameters = rope.given(c)
    mscale = float(parameters.get("mscale_all_dim") or 0.0)
    if mscale and turned.scaling is not None and not isinstance(turned.scaling, Yarn):
        raise ValueError(f"{knob}.mscale_all_dim is {mscale}: it is of rope_type yarn alone")
    return LatentAttention(
        heads,
        c["q_lora_rank"],
        c["kv_lora_rank"],
        c["qk_nope_head_dim"],
        c["v_head_dim"],
        Norm("rmsnorm", LATENT_EPS),
        replace(turned, interleaved=interleaved),
        mscale_all_dim=0.0 if turned.scaling is None else mscale,
        down_bias=c["attention_bias"],
        o_bias=c["attention_bias"],
    )


def new(tree: Tree) -> dict[str, Any]:
    """The fields that both families have: of the first layer, of the first dense one, if there is
    any, and of the first sparse one.
    """
    mixer = expect(tree.blocks[0].mixer, LatentAttention, "mixer")
    dense = [block.mlp for block in tree.blocks if isinstance(block.mlp, Mlp)]
    sparse = experts(tree)
    return {
        "vocab_size": tree.embedding.rows,
        "hidden_size": tree.hidden_size,
        "num_hidden_layers": len(tree.blocks),
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.heads,
        "hidden_act": activation_name(tree.blocks[0].mlp.activation),
        "max_position_embeddings": tree.max_position_embeddings,
        "rms_norm_eps": tree.final_norm.eps,
        "initializer_range": tree.initializer_range,
        "tie_word_embeddings": tree.head.tied,
        "q_lora_rank": mixer.q_rank,
        "kv_lora_rank": mixer.kv_rank,
        "qk_nope_head_dim": mixer.nope_size,
        "qk_rope_head_dim": mixer.positions.size,
        "v_head_dim": mixer.value_size,
        "attention_bias": mixer.o_bias,
        "rope_parameters": _rope(mixer),
        "first_k_dense_replace": len(dense),
        **({"intermediate_size": dense[0].size} if dense else {}),
        **({} if sparse is None else _experts(sparse)),
    }


def experts(tree: Tree) -> Experts | None:
    """The first sparse layer, if there is any."""
    return next((b.mlp for b in tree.blocks if isinstance(b.mlp, Experts)), None)


def _rope(mixer: LatentAttention) -> dict[str, Any]:
    """With the scores' temperature; an attention factor of 1 follows from equal mscales."""
    stated, mscale = rope.new(mixer.positions), mixer.mscale_all_dim
    if not mscale:
        return stated
    if stated.get("attention_factor") == 1.0:
        del stated["attention_factor"]
        stated["mscale"] = mscale
    return {**stated, "mscale_all_dim": mscale}


def _experts(sparse: Experts) -> dict[str, Any]:
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
    matrices = {f"{name}_proj": name for name in ("gate", "up", "down")}
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
        *llama_like.expert_rules(tree, "mlp", matrices, bias="e_score_correction_bias"),
        Rename("model.norm", "final_norm"),
        Rename("lm_head", "head"),
    ]
