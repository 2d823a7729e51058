"""DeepSeek-V2 and V2-Lite (2405.04434): experts by softmax, of one group or of the groups with the
best experts.

transformers never normalises the weights of a token's experts; the original does with
`norm_topk_prob`, and then leaves `routed_scaling_factor` out. No published file sets it.
"""

from typing import Any

from dolmen.families import deepseek_like, llama_like
from dolmen.families.family import Family, Field
from dolmen.files import kinds
from dolmen.files.schema import Text, optional
from dolmen.model.tree import Router, Tree

PER_TOKEN = 6  # of both models; transformers computes nothing where none is stated
METHODS = ("greedy", "group_limited_greedy")


def read(c: dict[str, Any]) -> Tree:
    """transformers refuses heads that do not divide the width, though nothing follows from it."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    if hidden % heads:
        raise ValueError(
            f"hidden_size ({hidden}) is not divisible by num_attention_heads ({heads})"
        )
    stated = c["num_experts_per_tok"]
    c = {**c, "num_experts_per_tok": PER_TOKEN if stated is None else stated}
    return deepseek_like.read(c, _router(c), interleaved=True)


def _router(c: dict[str, Any]) -> Router:
    if c["topk_method"] in ("greedy", None):
        return Router(normalise=False)
    groups, kept = c["n_group"], c["topk_group"]
    if groups is None or kept is None:
        raise ValueError(
            f"topk_method is {c['topk_method']}, which needs n_group ({groups}) and topk_group "
            f"({kept})"
        )
    return Router(normalise=False, groups=groups, groups_per_token=kept)


def new(tree: Tree) -> dict[str, Any]:
    sparse = deepseek_like.experts(tree)
    router = Router() if sparse is None else sparse.router
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
    read=read,
    new=new,
    rules=deepseek_like.rules,
    fields=llama_like.changed(
        deepseek_like.FIELDS,
        Field(
            "n_routed_experts",
            kinds.EXPERTS,
            64,
            "Experts of a sparse feed-forward layer.",
            ("num_experts",),
        ),
        Field(
            "num_experts_per_tok",
            optional(kinds.EXPERTS),
            None,
            f"Experts that compute a token. None: {PER_TOKEN}.",
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
