"""GLM-10B, GLM-2B and smaller ones (Du et al., 2103.10360): GPT-2 with two tables of positions,
whose prefix, and where its tokens stand, are known by special tokens (tree/blanks.py).

Their model_type is that of GLM-4, another model (glm.py). A config.json does not say the norms' eps
nor the width of the feed-forward layer; files have names with and without the leading "glm.". Any
of three mask tokens marks the blank, whichever comes first.
"""

from collections.abc import Mapping
from typing import Any

from dolmen.families import common, glm_like, special_tokens
from dolmen.families.family import BARE, Family, Field, Ids, expect
from dolmen.families.rules import Rename, Rule
from dolmen.files.schema import Flag
from dolmen.model.tree import Blanks, Block, Embedding, Mask, Mlp, Norm, Table, Tree

NORM = Norm("layernorm", 1e-5, bias=True)
MASKS = ("mask", "smask", "gmask")
FIELDS = (
    common.vocab_size(30592),
    *glm_like.sizes(1024, 24, 16),
    glm_like.longest(512, "Longest sequence, tokens: rows of each table of positions, less one."),
    common.INITIALIZER_RANGE,
    Field("tie_word_embeddings", Flag(), True, "Head and embedding are one parameter."),
    special_tokens.SPECIAL_TOKENS,
    BARE,
)


def read(config: dict[str, Any]) -> Tree:
    mixer = glm_like.attention(config, FIELDS)
    mlp = Mlp(4 * config["hidden_size"], gated=False, activation="gelu", bias=True)
    blocks = [Block(mixer, mlp, NORM)] * config["num_layers"]
    table = Table(config["max_sequence_length"], streams=2)
    ids = special_tokens.said(config)
    blanks = Blanks(ids["sop"], tuple(Mask(name, ids[name]) for name in MASKS), nearest=True)
    embedding = Embedding(config["vocab_size"], positions=table)
    return common.tree(config, FIELDS, blocks, embedding, blanks)


def new(tree: Tree) -> dict[str, Any]:
    blanks = expect(tree.blanks, Blanks, "blanks")
    ids = {"sop": blanks.start, **{mask.name: mask.token for mask in blanks.masks}}
    return {
        **common.new(tree, FIELDS),
        "num_attention_heads": common.attention(tree).heads,
        **special_tokens.stated(ids),
    }


def rules(tree: Tree) -> list[Rule]:
    """q, k and v lie one behind the other."""
    tables = (
        Rename("glm.transformer.position_embeddings", "positions"),
        Rename("glm.transformer.block_position_embeddings", "block_positions"),
    )
    names = "glm.word_embeddings", "glm.transformer."
    return glm_like.rules(tree, *names, packed=(1, (1, 1, 1)), more=tables)


def tells(config: Mapping[str, Any]) -> bool:
    """By fields that GLM-4 has not."""
    named = any(name.startswith("GLM") for name in config.get("architectures") or ())
    fields = {"num_layers", "max_sequence_length", "block_position_encoding"}
    return named or bool(fields & config.keys())


def framed(tokens: list[int], ids: Ids) -> list[int]:
    """[CLS] and the end around a text, whose blank is at its end where it has none, then <sop>."""
    if ids["sop"] in tokens:
        return tokens
    masks = {ids[name] for name in MASKS if name in ids}
    blank = [] if masks & {*tokens} else [ids["gmask"]]
    begin, end = ids["cls"], ids["eos"]
    inner = [*([] if tokens[:1] == [begin] else [begin]), *tokens]
    inner = inner[:-1] if inner[-1:] == [end] else inner
    return [*inner, *blank, end, ids["sop"]]


FAMILY = Family(
    model_type="glm",
    called="glm_10b",
    tells=tells,
    architecture="GLMModel",
    native=False,
    read=read,
    new=new,
    rules=rules,
    fields=FIELDS,
    framed=framed,
    only={
        "block_position_encoding": (True,),
        "relative_encoding": (False, None),
        "rotary_type": ("none", None),
        "use_rmsnorm": (False, None),
        "use_swiglu": (False, None),
    },
    harmless=(
        "attention_dropout_prob",
        "attention_scale",
        "checkpoint_activations",
        "checkpoint_num_layers",
        "classifier_dropout",
        "embedding_dropout_prob",
        "max_memory_length",
        "output_dropout_prob",
        "output_predict",
        "parallel_output",
        "pool_token",
        "spell_func",
        "spell_length",
    ),
    beside={
        "block_position_encoding": True,
        "attention_dropout_prob": 0.0,
        "embedding_dropout_prob": 0.0,
        "output_dropout_prob": 0.0,
        "output_predict": True,
    },
    prefix="glm.",
    code=("configuration_glm", "modeling_glm", "tokenization_glm"),
)
