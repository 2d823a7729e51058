"""DeepSeek-V3 and R1 (2412.19437): experts by sigmoid, whose choice a bias balances, of the groups
whose best two experts are the best.

The layers of multi-token prediction that files hold behind the last (`num_nextn_predict_layers`)
are no part of the decoder: transformers leaves them out, and so is done here, aloud.
"""

from typing import Any

from dolmen.families import common, deepseek_like, experts, llama_like
from dolmen.families.family import Family, Field, expect
from dolmen.files import kinds
from dolmen.files.schema import Flag, Int, optional
from dolmen.model.tree import Rope, Router, Tree


def read(config: dict[str, Any]) -> Tree:
    router = Router(
        score="sigmoid",
        normalise=bool(config["norm_topk_prob"]),
        groups=config["n_group"],
        groups_per_token=config["topk_group"],
        group_score="top2",
        bias=True,
    )
    return deepseek_like.read(config, router, interleaved=bool(config["rope_interleave"]))


def new(tree: Tree) -> dict[str, Any]:
    rope = expect(tree.blocks[0].mixer.positions, Rope, "positions")
    fields = {**deepseek_like.new(tree), "rope_interleave": rope.interleaved}
    sparse = common.sparse(tree)
    return {**fields, **(_choice(sparse[0].router) if sparse else {})}


def _choice(router: Router) -> dict[str, Any]:
    return {
        "norm_topk_prob": router.normalise,
        "n_group": router.groups,
        "topk_group": router.groups_per_token,
    }


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    scorer="DeepseekV3ForSequenceClassification",
    read=read,
    new=new,
    rules=deepseek_like.rules,
    fields=llama_like.changed(
        deepseek_like.FIELDS,
        Field(
            "n_routed_experts",
            kinds.EXPERTS,
            256,
            experts.NUMBER,
            ("num_local_experts",),
            ("num_experts",),
        ),
        Field("num_experts_per_tok", kinds.EXPERTS, 8, experts.PER_TOKEN),
        Field("n_group", kinds.EXPERTS, 8, "Groups of experts."),
        Field("topk_group", kinds.EXPERTS, 4, "Groups that a token's experts come from."),
        Field("norm_topk_prob", optional(Flag()), True, experts.NORMALISED),
        Field(
            "rope_interleave",
            optional(Flag()),
            True,
            "Rope's pairs are neighbours, not halves of what is turned.",
        ),
        Field(
            "num_nextn_predict_layers",
            Int(0, kinds.LAYERS.high),
            1,
            "Layers of multi-token prediction that files hold behind the last, left out here.",
            ("num_mtp_layers",),
        ),
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        num_hidden_layers=61,
        num_attention_heads=128,
        max_position_embeddings=4096,
        moe_intermediate_size=2048,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        first_k_dense_replace=3,
    ),
    only={
        **deepseek_like.ONLY,
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
    },
    harmless=deepseek_like.HARMLESS,
    beside={**llama_like.BESIDE, "num_nextn_predict_layers": 0},
    beyond="num_nextn_predict_layers",
    ignored=llama_like.IGNORED,
    code=deepseek_like.CODE,
)
