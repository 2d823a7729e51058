"""RoBERTa (1907.11692): BERT whose positions are counted behind that of padding, which none counts,
whose tokens have one type, and whose head fills in masked tokens alone.
"""

from typing import Any

from dolmen.families import bert_like, llama_like
from dolmen.families.family import Family, Field, expect
from dolmen.families.rules import Rename, Rule
from dolmen.files import kinds
from dolmen.files.schema import Int, optional
from dolmen.model.tree import Table, Tree

PADDING = "pad_token_id"
HEAD = {"lm_head.dense": "transform", "lm_head.layer_norm": "transform.norm"}


def read(config: dict[str, Any]) -> Tree:
    """Position 0 has the row behind that of the padding's token, and padding itself that one; the
    head has gelu, whatever the layers have.
    """
    padding = config[PADDING]
    if padding is None or padding < 0:
        raise ValueError(
            f"{PADDING} is {padding}: RoBERTa counts positions from behind it, state its token"
        )
    return bert_like.read(config, padding, head_activation="gelu")


def new(tree: Tree) -> dict[str, Any]:
    table = expect(tree.embedding.positions, Table, "positions")
    return {**bert_like.new(tree), PADDING: table.padding}


def rules(tree: Tree) -> list[Rule]:
    return bert_like.rules("roberta", HEAD, Rename("lm_head", "head", weight="decoder.weight"))


FAMILY = Family(
    model_type="roberta",
    architecture="RobertaForMaskedLM",
    read=read,
    new=new,
    rules=rules,
    fields=llama_like.changed(
        bert_like.FIELDS,
        Field(
            PADDING,
            optional(Int(-1, kinds.TOKEN.high)),
            1,
            "Token of padding, behind whose row in the table of positions that of the first is.",
        ),
        vocab_size=50265,
    ),
    only=bert_like.ONLY,
    harmless=bert_like.HARMLESS,
    beside={name: value for name, value in bert_like.BESIDE.items() if name != PADDING},
    ignored=(
        r"roberta\.embeddings\.position_ids",
        r"roberta\.pooler\.dense\.(weight|bias)",
        r"lm_head\.decoder\.bias",  # lm_head.bias once more
    ),
)
