"""DeepSeek-V2 and V2-Lite (2405.04434): experts by softmax, of one group or of the groups with the
best experts.

transformers never normalises the weights of a token's experts; the original does with
`norm_topk_prob`, and then leaves `routed_scaling_factor` out. No published file sets it.
"""

from typing import Any

from dolmen.families import common, deepseek_like, experts, llama_like
from dolmen.families.family import Family, Field, knob
from dolmen.files import kinds
from dolmen.files.schema import Text, optional
from dolmen.model.tree import Router, Tree

PER_TOKEN = 6  # of both models; transformers computes nothing where none is stated
METHODS = ("greedy", "group_limited_greedy")


def read(config: dict[str, Any]) -> Tree:
    """transformers refuses heads that do not divide the width, though nothing follows from it."""
    common.head_size(config, deepseek_like.FIELDS)
    stated = config["num_experts_per_tok"]
    filled = {**config, "num_experts_per_tok": PER_TOKEN if stated is None else stated}
    return deepseek_like.read(filled, _router(config), interleaved=True)


def _router(config: dict[str, Any]) -> Router:
    if config["topk_method"] in ("greedy", None):
        return Router(normalise=False)
    for name in ("n_group", "topk_group"):
        if config[name] is None:
            raise ValueError(
                f"topk_method is {config['topk_method']}, which chooses among groups of experts, "
                f"and {name} is None: set {knob(name)}"
            )
    groups, kept = config["n_group"], config["topk_group"]
    return Router(normalise=False, groups=groups, groups_per_token=kept)


def new(tree: Tree) -> dict[str, Any]:
    sparse = common.sparse(tree)
    router = sparse[0].router if sparse else Router()
    grouped = router.groups > 1
    return {
        **deepseek_like.new(tree),
        "topk_method": METHODS[grouped],
        "n_group": router.groups if grouped else None,
        "topk_group": router.groups_per_token if grouped else None,
    }


FAMILY = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    scorer="DeepseekV2ForSequenceClassification",
    read=read,
    new=new,
    rules=deepseek_like.rules,
    fields=llama_like.changed(
        deepseek_like.FIELDS,
        Field("n_routed_experts", kinds.EXPERTS, 64, experts.NUMBER, ("num_experts",)),
        Field(
            "num_experts_per_tok",
            optional(kinds.EXPERTS),
            None,
            f"{experts.PER_TOKEN} None: {PER_TOKEN}.",
        ),
        Field(
            "topk_method",
            optional(Text(choices=METHODS)),
            "greedy",
            "How a token's experts are chosen: greedy | group_limited_greedy (from the groups with "
            "the best experts).",
        ),
        Field("n_group", optional(kinds.EXPERTS), None, "Groups of experts."),
        Field("topk_group", optional(kinds.EXPERTS), None, "Groups that a token's come from."),
        vocab_size=102400,
        moe_intermediate_size=1407,
    ),
    only={
        **deepseek_like.ONLY,
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax", None),
    },
    harmless=deepseek_like.HARMLESS,
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
    code=deepseek_like.CODE,
)
