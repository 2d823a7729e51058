"""GPT-NeoX, Pythia and what was trained like them (Black et al., 2204.06745): rope over a part of
each head, attention and feed-forward layer side by side with a norm each, and q, k, v of each head
in one tensor.

In transformers 4 a config.json said `rotary_pct` and `rotary_emb_base`; the head is stored as
`embed_out` by 5 too.
"""

from typing import Any

from dolmen.families import common, rope
from dolmen.families.family import (
    ACTIVATION,
    BESIDE,
    Family,
    Field,
    activation_name,
    expect,
)
from dolmen.families.rules import Rename, Rule, Split
from dolmen.files import kinds
from dolmen.files.schema import Flag
from dolmen.model.tree import Attention, Block, Parallel, Rope, Sequential, Tree

EPS = common.eps("layer_norm_eps", 1e-5)
FIELDS = (
    common.vocab_size(50432),
    Field("hidden_size", kinds.WIDTH, 6144, "Width of the residual stream."),
    Field("num_hidden_layers", kinds.LAYERS, 44, "Decoder blocks."),
    Field("num_attention_heads", kinds.HEADS, 64, "Heads."),
    Field("intermediate_size", kinds.WIDTH, 24576, "Width of the feed-forward layer."),
    Field(
        "hidden_act",
        ACTIVATION,
        "gelu",
        "Activation of the feed-forward layer: gelu (the exact erf form), gelu_fast, silu, relu.",
    ),
    Field(
        "use_parallel_residual",
        Flag(),
        True,
        "Attention and feed-forward layer stand side by side, not one after the other.",
    ),
    Field("attention_bias", Flag(), True, "Biases on q, k, v and the attention output projection."),
    Field("max_position_embeddings", kinds.POSITIONS, 2048, "Longest sequence, tokens."),
    *rope.fields(
        part=0.25, outer={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    ),
    *common.ends(EPS, tied=False),
)


def read(config: dict[str, Any]) -> Tree:
    heads, size = config["num_attention_heads"], common.head_size(config, FIELDS)
    bias = config["attention_bias"]
    mixer = Attention(
        heads,
        heads,
        size,
        q_bias=bias,
        k_bias=bias,
        v_bias=bias,
        o_bias=bias,
        positions=rope.read(config, size),
    )
    arrangement = Parallel(2) if config["use_parallel_residual"] else Sequential()
    block = Block(mixer, common.plain(config, FIELDS), common.layer_norm(config, EPS), arrangement)
    return common.tree(config, FIELDS, [block] * config["num_hidden_layers"])


def new(tree: Tree) -> dict[str, Any]:
    mixer, mlp = common.attention(tree), common.mlp(tree)
    turned = expect(mixer.positions, Rope, "positions")
    return {
        **common.new(tree, FIELDS),
        "num_attention_heads": mixer.heads,
        "intermediate_size": mlp.size,
        "hidden_act": activation_name(mlp.activation),
        "use_parallel_residual": tree.blocks[0].arrangement == Parallel(2),
        "attention_bias": mixer.q_bias,
        "rope_parameters": rope.new(turned, mixer.head_size),
    }


def rules(tree: Tree) -> list[Rule]:
    layer, ours = "gpt_neox.layers.{}.", "layers.{}."
    heads = common.attention(tree).heads
    return [
        Rename("gpt_neox.embed_in", "embed"),
        Rename(layer + "input_layernorm", ours + "attn_norm"),
        Split(layer + "attention.query_key_value", common.QKV, heads, (1, 1, 1)),
        Rename(layer + "attention.dense", ours + "attn.o"),
        Rename(layer + "post_attention_layernorm", ours + "mlp_norm"),
        Rename(layer + "mlp.dense_h_to_4h", ours + "mlp.up"),
        Rename(layer + "mlp.dense_4h_to_h", ours + "mlp.down"),
        Rename("gpt_neox.final_layer_norm", "final_norm"),
        Rename("embed_out", "head"),
    ]


FAMILY = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    scorer="GPTNeoXForSequenceClassification",
    read=read,
    new=new,
    rules=rules,
    fields=FIELDS,
    harmless=(
        "hidden_dropout",
        "classifier_dropout",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
    ),
    beside={**BESIDE, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    prefix="gpt_neox.",
)
