"""BERT (1810.04805): an encoder that fills in masked tokens and, where its head has it, says of two
texts whether the second follows the first.

Which head a file has is stated by `architectures`: BertForPreTraining has both. A file that has
more of the head than its config.json states, as those first published, is read without it.
"""

from typing import Any

from dolmen.families import bert_like
from dolmen.families.family import Family, Field
from dolmen.families.rules import Rename, Rule
from dolmen.files import kinds
from dolmen.files.schema import List, optional
from dolmen.model.tree import Tree

BOTH, MASKED = "BertForPreTraining", "BertForMaskedLM"
HEAD = {
    "cls.predictions.transform.dense": "transform",
    "cls.predictions.transform.LayerNorm": "transform.norm",
    "bert.pooler.dense": "pooler",
    "cls.seq_relationship": "follows",
}


def read(config: dict[str, Any]) -> Tree:
    return bert_like.read(config, follows=BOTH in (config["architectures"] or ()))


def new(tree: Tree) -> dict[str, Any]:
    architecture = BOTH if bert_like.follows(tree) else MASKED
    return {**bert_like.new(tree), "architectures": [architecture]}


def rules(tree: Tree) -> list[Rule]:
    logits = Rename("cls.predictions", "head", weight="decoder.weight")
    return bert_like.rules("bert", HEAD, logits)


FAMILY = Family(
    model_type="bert",
    architecture=MASKED,
    read=read,
    new=new,
    rules=rules,
    fields=(
        *bert_like.FIELDS,
        Field(
            "architectures",
            optional(List(kinds.NAME, longest=16)),
            None,
            f"{BOTH}: its head also says of two texts whether the second follows the first. "
            f"Otherwise {MASKED}.",
        ),
    ),
    only=bert_like.ONLY,
    harmless=bert_like.HARMLESS,
    beside=bert_like.BESIDE,
    ignored=(
        r"bert\.embeddings\.position_ids",
        r"bert\.pooler\.dense\.(weight|bias)",
        r"cls\.seq_relationship\.(weight|bias)",
        r"cls\.predictions\.decoder\.bias",  # cls.predictions.bias once more
    ),
    endings={".gamma": ".weight", ".beta": ".bias"},
)
