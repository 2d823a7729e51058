"""OPT and Galactica (Zhang et al., 2205.01068; Taylor et al., 2211.09085): learned positions whose
table begins two rows before the first, LayerNorm, a plain feed-forward layer.

OPT-350m alone norms after each layer, and has narrow rows in its embedding, which a matrix widens.
The epsilon of the norms is in no config.json.
"""

from dataclasses import replace
from typing import Any

from dolmen.families import common
from dolmen.families.family import BESIDE, Family, Field
from dolmen.families.rules import Rename, Rule
from dolmen.files import kinds
from dolmen.model.spec import (
    BlockSpec,
    EmbeddingSpec,
    ModelSpec,
    NormSpec,
    PositionTable,
    SequentialResidual,
)

OFFSET = 2  # rows of the table before that of position 0
FIELDS = (
    common.vocab_size(50272),
    common.standard("hidden_size", 768),
    Field(
        "word_embed_proj_dim",
        kinds.WIDTH | None,
        None,
        "Width of embedding and head; if it differs from hidden_size, linear layers project in "
        "and out. None: hidden_size.",
    ),
    common.standard("num_hidden_layers", 12),
    common.standard("num_attention_heads", 12, help="Heads."),
    common.standard("intermediate_size", 3072, "ffn_dim"),
    common.standard("hidden_act", "relu", "activation_function"),
    Field(
        "do_layer_norm_before",
        bool,
        True,
        "Norms before each layer and before the head (pre-norm), not after each layer (post-norm).",
    ),
    Field("_remove_final_layer_norm", bool, False, "No norm before the head."),
    Field("enable_bias", bool, True, "Biases on all linears but the head."),
    Field("layer_norm_elementwise_affine", bool, True, "Norms have weights and biases."),
    common.standard(
        "max_position_embeddings",
        2048,
        help="Maximum sequence length in tokens: rows of the position embedding, minus 2.",
    ),
    replace(common.INITIALIZER_RANGE, name="init_std", common=("initializer_range",)),
    common.TIED[True],
)


def read(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of an OPT config.json: a position table with two unused rows, and post-norm
    blocks without final norm if do_layer_norm_before is false (OPT-350m).
    """
    bias, before = config["enable_bias"], config["do_layer_norm_before"]
    mixer = common.biased_attention(config, FIELDS, bias)
    mlp = common.plain_mlp(config, FIELDS, bias)
    affine = config["layer_norm_elementwise_affine"]
    norm = NormSpec("layernorm", bias=affine, affine=affine)
    block = BlockSpec(
        mixer, mlp, norm, SequentialResidual() if before else SequentialResidual("post")
    )
    width = config["word_embed_proj_dim"]
    embedding = EmbeddingSpec(
        config["vocab_size"],
        # 2,050 rows for 2,048 positions
        positions=PositionTable(config["max_position_embeddings"], OFFSET),
        # OPT-350m: 512 and 1,024
        width=None if width == config["hidden_size"] else width,
    )
    spec = common.make_spec(config, FIELDS, [block] * config["num_hidden_layers"], embedding)
    # post-norm blocks (OPT-350m) end in a norm already
    last = before and not config["_remove_final_layer_norm"]
    return spec if last else replace(spec, final_norm=None)


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of an OPT config.json that `common.write` does not state: embedding width,
    places of norms, biases and affine norms.
    """
    mlp, before = common.mlp(spec), spec.blocks[0].arrangement == SequentialResidual()
    return {
        "word_embed_proj_dim": spec.width,
        "do_layer_norm_before": before,
        "_remove_final_layer_norm": before and spec.final_norm is None,
        "enable_bias": mlp.bias,
        "layer_norm_elementwise_affine": spec.blocks[0].norm.affine,
    }


def rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of OPT, with project_in and project_out for narrow embeddings."""
    layer, ours = "model.decoder.layers.{}.", "layers.{}."
    return [
        Rename("model.decoder.embed_tokens", "embed"),
        Rename("model.decoder.project_in", "project_in"),
        Rename("model.decoder.embed_positions", "positions"),
        *(Rename(f"{layer}self_attn.{part}_proj", f"{ours}attn.{part}") for part in "qkv"),
        Rename(layer + "self_attn.out_proj", ours + "attn.o"),
        Rename(layer + "self_attn_layer_norm", ours + "attn_norm"),
        Rename(layer + "fc1", ours + "mlp.up"),
        Rename(layer + "fc2", ours + "mlp.down"),
        Rename(layer + "final_layer_norm", ours + "mlp_norm"),
        Rename("model.decoder.final_layer_norm", "final_norm"),
        Rename("model.decoder.project_out", "project_out"),
        Rename("lm_head", "head"),
    ]


OPT = Family(
    model_type="opt",
    title="OPT and Galactica",
    architecture="OPTForCausalLM",
    read=read,
    write=write,
    rules=rules,
    fields=FIELDS,
    only={"learned_embeddings": (True,), "scale_embeddings": (False,)},
    harmless="dropout activation_dropout layerdrop",
    extra_fields={**BESIDE, "dropout": 0.0, "attention_dropout": 0.0},
    ignored=(r"model\.decoder\.version",),
    prefix="model.",
)
