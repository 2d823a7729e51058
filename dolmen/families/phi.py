"""Phi-1, 1.5 and 2 (2306.11644, 2309.05463): attention and a plain feed-forward layer side by side
after one LayerNorm, rope over a part of each head, biases everywhere, that of the head too.
"""

from dataclasses import replace
from typing import Any

from dolmen.families import common, llama_like, rope, windows
from dolmen.families.family import Family, Field, activation
from dolmen.families.rules import Rename, Rule
from dolmen.files.schema import Flag
from dolmen.model.tree import Mlp, Norm, Parallel, Tree

EPS = "layer_norm_eps"
FIELDS = llama_like.without(
    llama_like.fields_with(common.eps(EPS, 1e-5), rope.fields(part=0.5)), "head_dim"
)


def read(config: dict[str, Any]) -> Tree:
    norm = Norm("layernorm", float(config[EPS]), bias=True)
    plain = Mlp(config["intermediate_size"], False, activation(config, "hidden_act"), bias=True)
    tree = llama_like.read(
        {**config, "head_dim": None},
        mlp=lambda layer: plain,
        norm=norm,
        qkv_bias=True,
        o_bias=True,
        qk_norm=config["qk_layernorm"],
    )
    tree = common.each_block(tree, lambda block: replace(block, arrangement=Parallel(1)))
    return replace(tree, head=replace(tree.head, bias=True))


def new(tree: Tree) -> dict[str, Any]:
    fields = llama_like.new(tree, FIELDS)
    if fields["hidden_act"] == "gelu_pytorch_tanh":
        fields["hidden_act"] = "gelu_new"
    return {**fields, "qk_layernorm": common.attention(tree).qk_norm is not None}


def rules(tree: Tree) -> list[Rule]:
    names = {
        "self_attn.dense": "attn.o",
        "self_attn.q_layernorm": "attn.q_norm",
        "self_attn.k_layernorm": "attn.k_norm",
        "mlp.fc1": "mlp.up",
        "mlp.fc2": "mlp.down",
    }
    own = [Rename(llama_like.LAYER + hf, f"layers.{{}}.{ours}") for hf, ours in names.items()]
    own.append(Rename("model.final_layernorm", "final_norm"))
    return llama_like.rules(tree, {"input_layernorm": "norm"}, instead=own)


FAMILY = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    scorer="PhiForSequenceClassification",
    read=read,
    new=new,
    rules=rules,
    fields=llama_like.changed(
        FIELDS,
        Field("qk_layernorm", Flag(), False, "A LayerNorm of every query and key head."),
        vocab_size=51200,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        hidden_act="gelu_new",
    ),
    only={**windows.NONE, **llama_like.NO_BIAS},
    harmless=("resid_pdrop", "embd_pdrop"),
    beside={**llama_like.BESIDE, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ignored=llama_like.IGNORED,
)
