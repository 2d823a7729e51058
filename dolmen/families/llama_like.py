"""What Llama and its descendants share: the fields of their config.json, the tree that they say,
and the names of the weights.

Rope is the rotate-half layout in transformers and here: q and k rows are never permuted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dolmen.families import rope
from dolmen.families.family import BESIDE, Field, activation, activation_name, expect
from dolmen.families.rules import Rename, Rule, Stack
from dolmen.files import kinds
from dolmen.files.schema import Flag, Int, Real, optional
from dolmen.model.tree import (
    Attention,
    Block,
    Embedding,
    Experts,
    Head,
    Mlp,
    Norm,
    Rope,
    Router,
    Tree,
    runs_of,
)

LAYER = "model.layers.{}."
IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
NO_BIAS = {"attention_bias": (False, None), "mlp_bias": (False, None)}
NO_WINDOW = {"layer_types": (None,)}
BESIDE = {**BESIDE, "attention_dropout": 0.0}

FIELDS = (
    Field("vocab_size", kinds.VOCABULARY, 32000, "Rows of the embedding and of the head, tokens."),
    Field("hidden_size", kinds.WIDTH, 4096, "Width of the residual stream."),
    Field("intermediate_size", kinds.WIDTH, 11008, "Width of the feed-forward layer."),
    Field("num_hidden_layers", kinds.LAYERS, 32, "Decoder blocks."),
    Field("num_attention_heads", kinds.HEADS, 32, "Query heads."),
    Field(
        "num_key_value_heads",
        optional(kinds.HEADS),
        None,
        "Key and value heads; fewer than query heads is grouped-query attention. None: as many.",
    ),
    Field(
        "head_dim",
        optional(kinds.WIDTH),
        None,
        "Size of one head. None: hidden_size / num_attention_heads.",
    ),
    Field(
        "hidden_act",
        kinds.NAME,
        "silu",
        "Activation of the feed-forward layer: silu, gelu (the exact erf form), "
        "gelu_pytorch_tanh, relu.",
    ),
    Field("max_position_embeddings", kinds.POSITIONS, 2048, "Longest sequence, tokens."),
    *rope.fields(),
    Field(
        "rms_norm_eps",
        Real(0),
        1e-6,
        "Added to the variance inside every norm.",
        common=("norm_eps",),
    ),
    Field(
        "initializer_range",
        Real(0),
        0.02,
        "Standard deviation of initial weights; output projections get it divided by "
        "sqrt(2 * layers).",
    ),
    Field("tie_word_embeddings", Flag(), False, "Head and embedding are one parameter."),
)
ATTENTION_BIAS = Field(
    "attention_bias",
    optional(Flag()),
    False,
    "Biases on q, k, v and the attention output projection.",
)
SLIDING_WINDOW = Field(
    "sliding_window",
    optional(Int(0, kinds.POSITIONS.high)),
    None,
    "Tokens a query sees, itself included; None: all before it.",
)
EXPERTS_PER_TOKEN = Field("num_experts_per_tok", kinds.EXPERTS, 2, "Experts that compute a token.")
AUX_LOSS = Field(
    "router_aux_loss_coef",
    Real(0),
    0.001,
    "Weight of the loss that keeps experts equally busy, summed over layers, mean over sequences; "
    "--train.router.aux-loss-coef over it.",
)


def changed(fields: Sequence[Field], *more: Field, **defaults: Any) -> tuple[Field, ...]:
    """`fields` with other defaults, and more of them."""
    assert not defaults.keys() - {field.name for field in fields}
    return (
        *(replace(f, default=defaults.get(f.name, f.default)) for f in fields),
        *more,
    )


def read(
    c: dict[str, Any],
    mlp: Callable[[int], Mlp | Experts] | None = None,
    windows: Sequence[int | None] | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    mlp_bias: bool = False,
) -> Tree:
    """The tree of a config.json; what the family decides beside the common fields is given: layer
    -> its feed-forward layer (unset: the dense one), the windows of the layers. Raises ValueError
    naming the field.
    """
    heads, hidden, layers = c["num_attention_heads"], c["hidden_size"], c["num_hidden_layers"]
    if c["head_dim"] is None and hidden % heads:
        raise ValueError(
            f"hidden_size ({hidden}) is not divisible by num_attention_heads ({heads}): give "
            f"head_dim"
        )
    size = hidden // heads if c["head_dim"] is None else c["head_dim"]
    norm = Norm("rmsnorm", float(c["rms_norm_eps"]))
    mixer = Attention(
        heads,
        heads if c["num_key_value_heads"] is None else c["num_key_value_heads"],
        size,
        q_bias=qkv_bias,
        k_bias=qkv_bias,
        v_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=norm if qk_norm else None,
        positions=rope.read(c, size),
    )
    dense = Mlp(c["intermediate_size"], True, activation(c["hidden_act"], "hidden_act"), mlp_bias)
    blocks = [
        Block(
            replace(mixer, window=None if windows is None else windows[i]),
            dense if mlp is None else mlp(i),
            norm,
        )
        for i in range(layers)
    ]
    return Tree(
        hidden_size=hidden,
        embedding=Embedding(c["vocab_size"]),
        runs=runs_of(blocks),
        final_norm=norm,
        head=Head(tied=c["tie_word_embeddings"]),
        max_position_embeddings=c["max_position_embeddings"],
        initializer_range=float(c["initializer_range"]),
    )


def experts(c: dict[str, Any], size: int, normalise: bool) -> Experts:
    """The sparse layer that Mixtral and Qwen3 have."""
    router = Router(normalise=normalise, aux_loss_coef=float(c["router_aux_loss_coef"]))
    return Experts(
        c["num_local_experts"],
        c["num_experts_per_tok"],
        size,
        activation(c["hidden_act"], "hidden_act"),
        router,
    )


def mixer(tree: Tree) -> Attention:
    """Attention of the first layer. Raises ValueError where it is none."""
    return expect(tree.blocks[0].mixer, Attention, "mixer")


def new(tree: Tree) -> dict[str, Any]:
    """The fields that all llama-like families have, of the first layer."""
    attention, mlp = mixer(tree), tree.blocks[0].mlp
    return {
        "vocab_size": tree.embedding.rows,
        "hidden_size": tree.hidden_size,
        "intermediate_size": mlp.size,
        "num_hidden_layers": len(tree.blocks),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_size,
        "rms_norm_eps": tree.final_norm.eps,
        "hidden_act": activation_name(mlp.activation),
        "max_position_embeddings": tree.max_position_embeddings,
        "initializer_range": tree.initializer_range,
        "tie_word_embeddings": tree.head.tied,
        "rope_parameters": rope.new(expect(attention.positions, Rope, "positions")),
    }


def new_experts(layer: Experts) -> dict[str, Any]:
    """The fields of a sparse layer, less its width."""
    return {
        "num_local_experts": layer.number,
        "num_experts_per_tok": layer.per_token,
        "router_aux_loss_coef": layer.router.aux_loss_coef,
    }


def rules(tree: Tree, norms: Mapping[str, str] = NORMS) -> list[Rule]:
    """Weight names of Llama and those like it, whose blocks have these `norms`; q and k norms and
    biases exist where the tree has them.
    """
    names = {
        **norms,
        "self_attn.q_proj": "attn.q",
        "self_attn.k_proj": "attn.k",
        "self_attn.v_proj": "attn.v",
        "self_attn.o_proj": "attn.o",
        "self_attn.q_norm": "attn.q_norm",
        "self_attn.k_norm": "attn.k_norm",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
    }
    return [
        Rename("model.embed_tokens", "embed"),
        *(Rename(LAYER + hf, "layers.{}." + ours) for hf, ours in names.items()),
        Rename("model.norm", "final_norm"),
        Rename("lm_head", "head"),
    ]


def expert_rules(tree: Tree, module: str, names: dict[str, str], bias: str = "bias") -> list[Rule]:
    """Rules of the sparse layers: the router, whose bias the file calls `bias`, and stacks of the
    experts' matrices, stored under `module` with the `names` -> ours.
    """
    ours = "layers.{}.mlp."
    number = max((b.mlp.experts for b in tree.blocks), default=0)
    return [
        Rename(f"{LAYER}{module}.gate", ours + "router", bias),
        *(
            Stack(f"{LAYER}{module}.experts.{{}}.{hf}", f"{ours}experts.{name}", number)
            for hf, name in names.items()
        ),
    ]
