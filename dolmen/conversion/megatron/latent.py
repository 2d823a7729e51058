"""Latent attention (DeepSeek's) as Megatron-Core's options say it (MultiLatentAttention).

    scale of the scores    t(mscale_all_dim)^2 / sqrt(size of a query head)
                           before about core 0.13: t(mscale)^2, whatever rope_type says
    cos and sin            times t(mscale) / t(mscale_all_dim), under rope_type yarn
    t(m)                   0.1 m ln(rotary_scaling_factor) + 1, or 1 up to a factor of 1
    the first context      original_max_position_embeddings; before about core 0.13
                           max_position_embeddings, and between the two 4096, of no option

`args` do not say which code saved them. What one of these computes otherwise than another is
refused. Pairs of rope are always neighbours; norms of latents are there with qk_layernorm alone.
"""

from typing import Any

from dolmen.conversion.megatron.options import Said
from dolmen.model.spec import LatentAttentionSpec, NormSpec, RopeSpec, YarnScaling

FIRST_CONTEXT = 4096
"""Default of MLATransformerConfig."""
SIZES = {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""And what the command line has, where it is told nothing."""


def read(said: Said, norm: NormSpec, bias: bool) -> LatentAttentionSpec:
    """Raises ValueError, with option and value, for what dolmen does not compute, and for what is
    computed in two ways by two versions of Megatron-Core.
    """
    if not said["qk_layernorm"]:
        raise ValueError(
            "multi_latent_attention without qk_layernorm: dolmen computes it with norms of the "
            "latents alone"
        )
    if said["rotary_interleaved"]:
        raise ValueError(
            "rotary_interleaved is True under multi_latent_attention, whose pairs of rope are "
            "neighbours already: dolmen computes no other"
        )
    if said["rotary_percent"] not in (None, 1):
        raise ValueError(
            f"rotary_percent is {said['rotary_percent']} under multi_latent_attention: dolmen "
            "turns all of qk_pos_emb_head_dim"
        )
    sizes = {name: said.first(name, default=default) for name, default in SIZES.items()}
    scaling = _scaling(said)
    return LatentAttentionSpec(
        said["num_attention_heads"],
        said["q_lora_rank"],
        sizes["kv_lora_rank"],
        sizes["qk_head_dim"],
        sizes["v_head_dim"],
        norm,
        RopeSpec(
            sizes["qk_pos_emb_head_dim"],
            float(said.first("rotary_base", default=10000)),
            scaling,
            interleaved=True,
        ),
        mscale_all_dim=float(said["mscale"]) if scaling else 0.0,
        o_bias=bias,
    )


def _scaling(said: Said) -> YarnScaling | None:
    """None: positions and scores are as they are. Raises ValueError as `read`."""
    factor = float(said.first("rotary_scaling_factor", default=1.0))
    if factor <= 1:
        if factor < 1 and said["rope_type"] != "rope":
            raise ValueError(f"rotary_scaling_factor is {factor}: dolmen knows none under 1")
        return None
    mscale, all_dim = said["mscale"], said["mscale_all_dim"]
    if mscale is None or mscale != all_dim:
        raise ValueError(
            f"mscale is {mscale}, mscale_all_dim {all_dim}: older versions of Megatron-Core scale "
            "scores by the one, newer by the other, and args do not say which saved them; dolmen "
            "reads those where both are the same"
        )
    if said["rope_type"] == "rope":
        if mscale:
            raise ValueError(
                f"rotary_scaling_factor is {factor} and mscale {mscale} under rope_type rope, "
                "where they scale scores and not positions: dolmen computes none of that"
            )
        return None
    return YarnScaling(
        factor,
        _first_context(said),
        float(said.first("beta_fast", default=32)),
        float(said.first("beta_slow", default=1)),
    )


def _first_context(said: Said) -> int:
    stated, longest = said["original_max_position_embeddings"], said["max_position_embeddings"]
    if stated is None and longest != FIRST_CONTEXT:
        raise ValueError(
            f"original_max_position_embeddings is not given: older versions of Megatron-Core take "
            f"max_position_embeddings ({longest}), others {FIRST_CONTEXT}, and args do not say "
            "which saved them"
        )
    return stated or FIRST_CONTEXT


def new(mixer: LatentAttentionSpec) -> dict[str, Any]:
    """The options that say it, as far as they can."""
    rope = mixer.positions
    yarn = rope.scaling if isinstance(rope.scaling, YarnScaling) else None
    theta = int(rope.theta) if rope.theta == int(rope.theta) else rope.theta
    return {
        "multi_latent_attention": True,
        "group_query_attention": False,
        "num_query_groups": 1,
        "q_lora_rank": mixer.q_rank,
        "kv_lora_rank": mixer.kv_rank,
        "qk_head_dim": mixer.nope_size,
        "qk_pos_emb_head_dim": rope.size,
        "v_head_dim": mixer.value_size,
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "mla_down_proj_fusion": False,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "rope_type": "yarn" if yarn else "rope",
        "rotary_base": theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": False,
        "rotary_scaling_factor": yarn.factor if yarn else 1.0,
        "mscale": mixer.mscale_all_dim if yarn else 1.0,
        "mscale_all_dim": mixer.mscale_all_dim if yarn else 1.0,
        **_new_yarn(yarn),
        "window_size": None,
    }


def _new_yarn(yarn: YarnScaling | None) -> dict[str, Any]:
    if yarn is None:
        return {}
    return {
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
