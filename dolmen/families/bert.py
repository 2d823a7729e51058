"""BERT and RoBERTa: bidirectional encoders with a masked-LM head."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from annotated_types import MaxLen

from dolmen.families import common, llama
from dolmen.families.family import BESIDE as SPECIAL
from dolmen.families.family import Family, Field, activation, expect
from dolmen.families.rules import Rename, Rule
from dolmen.files import kinds
from dolmen.model.spec import (
    BlockSpec,
    EmbeddingSpec,
    HeadTransformSpec,
    LMHeadSpec,
    MLPSpec,
    ModelSpec,
    PositionTable,
    SequentialResidual,
)
from dolmen.model.spec.layers import Activation

# What BERT and RoBERTa share: bidirectional encoders with a masked-LM head.

EPS = common.eps("layer_norm_eps", 1e-12)
FIELDS = (
    common.vocab_size(30522),
    common.standard("hidden_size", 768),
    common.standard("num_hidden_layers", 12, help="Encoder blocks."),
    common.standard("num_attention_heads", 12, help="Heads."),
    common.standard("intermediate_size", 3072),
    common.standard(
        "hidden_act",
        "gelu",
        help="Activation of the feed-forward layer and of the head, as in other families.",
    ),
    common.standard("max_position_embeddings", 512, help="Rows of the position embedding."),
    Field("type_vocab_size", kinds.VOCABULARY, 2, "Number of token types (segment ids)."),
    *common.last_fields(EPS, tied=True),
)
ONLY = {
    "is_decoder": (False, None),
    "position_embedding_type": ("absolute", None),
    "embedding_size": (None,),
}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BESIDE = {**SPECIAL, **DROPOUT}
HARMLESS = "classifier_dropout hidden_dropout_prob attention_probs_dropout_prob"
LAYER = {
    "attention.self.query": "attn.q",
    "attention.self.key": "attn.k",
    "attention.self.value": "attn.v",
    "attention.output.dense": "attn.o",
    "attention.output.LayerNorm": "attn_norm",
    "intermediate.dense": "mlp.up",
    "output.dense": "mlp.down",
    "output.LayerNorm": "mlp_norm",
}
EMBEDDINGS = {
    "word_embeddings": "embed",
    "position_embeddings": "positions",
    "token_type_embeddings": "types",
    "LayerNorm": "embed_norm",
}


def read_encoder(
    config: dict[str, Any],
    padding: int | None = None,
    follows: bool = False,
    head_activation: Activation | None = None,
) -> ModelSpec:
    """Return the spec of a BERT-like config.json. `padding`: id of the padding token, which no
    position counts; real positions use the table rows after `padding` (RoBERTa). `follows`: the
    head also has next-sentence logits. `head_activation`: unset, that of the layers. Raises
    ValueError for an untied head and for a position table without usable rows.
    """
    # RoBERTa: rows 0 to pad_token_id belong to no real position
    offset = 0 if padding is None else padding + 1
    if not config["tie_word_embeddings"]:
        raise ValueError(
            "tie_word_embeddings is False: only models whose head is tied to the embedding are "
            "supported"
        )
    norm = common.layer_norm(config, EPS)
    act, longest = activation(config, "hidden_act"), config["max_position_embeddings"] - offset
    if longest < 1:
        raise ValueError(
            f"max_position_embeddings ({longest + offset}) leaves no positions after the first "
            f"{offset} unused rows: use a larger --model.max-position-embeddings"
        )
    mixer = common.biased_attention(config, FIELDS, mask="both")
    mlp = MLPSpec(config["intermediate_size"], False, act, True)
    # x = norm(x + branch(x))
    block = BlockSpec(mixer, mlp, norm, SequentialResidual("post"))
    embedding = EmbeddingSpec(
        config["vocab_size"],
        norm=norm,
        positions=PositionTable(longest, offset, padding=padding),
        types=config["type_vocab_size"],
    )
    spec = common.make_spec(config, FIELDS, [block] * config["num_hidden_layers"], embedding)
    transform = HeadTransformSpec(head_activation or act, norm)
    # the logits have a bias of their own though the weight is tied
    head = replace(spec.head, bias=True, transform=transform, follows=follows)
    # post-norm: the last block ends in a norm
    return replace(spec, final_norm=None, head=head, max_position_embeddings=longest)


def write_encoder(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields that BERT and RoBERTa share, for a spec. Raises ValueError without a
    position table.
    """
    table = expect(spec.embedding.positions, PositionTable, "positions")
    return {
        # RoBERTa: 514 for 512 tokens
        "max_position_embeddings": table.length + table.offset,
        "type_vocab_size": spec.embedding.types,
    }


def follows(spec: ModelSpec) -> bool:
    """Return whether the spec's LM head has next-sentence logits. Raises ValueError for a scalar
    head.
    """
    return expect(spec.head, LMHeadSpec, "head").follows


def encoder_rules(prefix: str, head: Mapping[str, str], logits: Rename) -> list[Rule]:
    """Return the weight rules of an encoder: its body under `prefix`, the `head` modules (stored
    name -> ours), and the rule of its `logits`.
    """
    return [
        *(Rename(f"{prefix}.embeddings.{hf}", ours) for hf, ours in EMBEDDINGS.items()),
        *(
            Rename(f"{prefix}.encoder.layer.{{}}.{hf}", f"layers.{{}}.{ours}")
            for hf, ours in LAYER.items()
        ),
        *(Rename(hf, ours) for hf, ours in head.items()),
        logits,
    ]


# BERT (1810.04805): an encoder with a masked-LM head and, in some checkpoints, a next-sentence
# head.
# `architectures` states which heads a file has: BertForPreTraining has both. If files store a
# next-sentence head that the config.json does not state, as the first published ones do, it is
# ignored.

BOTH, MASKED = "BertForPreTraining", "BertForMaskedLM"
BERT_HEAD = {
    "cls.predictions.transform.dense": "transform",
    "cls.predictions.transform.LayerNorm": "transform.norm",
    "bert.pooler.dense": "pooler",
    "cls.seq_relationship": "follows",
}


def read_bert(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a BERT config.json, with the next-sentence head if its architecture is
    BertForPreTraining.
    """
    return read_encoder(config, follows=BOTH in (config["architectures"] or ()))


def write_bert(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a BERT config.json that `common.write` does not state: table sizes, and
    architectures, which determines the head.
    """
    architecture = BOTH if follows(spec) else MASKED
    return {**write_encoder(spec), "architectures": [architecture]}


def bert_rules(spec: ModelSpec) -> list[Rule]:
    """Return the rules that map BERT's stored tensors to our parameters; the logits' bias is stored
    as cls.predictions.bias.
    """
    logits = Rename("cls.predictions", "head", weight="decoder.weight")
    return encoder_rules("bert", BERT_HEAD, logits)


BERT = Family(
    model_type="bert",
    title="BERT",
    architecture=MASKED,
    read=read_bert,
    write=write_bert,
    rules=bert_rules,
    fields=(
        *FIELDS,
        Field(
            "architectures",
            Annotated[list[kinds.NAME] | None, MaxLen(16)],
            None,
            f"{BOTH}: with a next-sentence head. Otherwise {MASKED}.",
        ),
    ),
    only=ONLY,
    harmless=HARMLESS,
    extra_fields=BESIDE,
    ignored=(
        r"bert\.embeddings\.position_ids",
        r"bert\.pooler\.dense\.(weight|bias)",
        r"cls\.seq_relationship\.(weight|bias)",
        r"cls\.predictions\.decoder\.bias",  # cls.predictions.bias once more
    ),
    legacy_suffixes={".gamma": ".weight", ".beta": ".bias"},
)


# RoBERTa (1907.11692): BERT with one token type and no next-sentence head, whose first position is
# pad_token_id + 1; padding tokens all have position pad_token_id and are not counted.

PADDING = "pad_token_id"
ROBERTA_HEAD = {"lm_head.dense": "transform", "lm_head.layer_norm": "transform.norm"}


def read_roberta(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a RoBERTa config.json: position i uses the table row pad_token_id + 1 + i,
    padding tokens the row pad_token_id; the head's activation is gelu whatever the layers have.
    Raises ValueError without a padding token.
    """
    padding = config[PADDING]
    if padding is None or padding < 0:
        raise ValueError(
            f"{PADDING} is {padding}: RoBERTa counts positions from pad_token_id + 1, so set it"
        )
    return read_encoder(config, padding, head_activation="gelu")


def write_roberta(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a RoBERTa config.json that `common.write` does not state: table sizes
    and pad_token_id.
    """
    table = expect(spec.embedding.positions, PositionTable, "positions")
    return {**write_encoder(spec), PADDING: table.padding}


def roberta_rules(spec: ModelSpec) -> list[Rule]:
    """Return the rules that map RoBERTa's stored tensors to our parameters."""
    return encoder_rules(
        "roberta", ROBERTA_HEAD, Rename("lm_head", "head", weight="decoder.weight")
    )


ROBERTA = Family(
    model_type="roberta",
    title="RoBERTa",
    architecture="RobertaForMaskedLM",
    read=read_roberta,
    write=write_roberta,
    rules=roberta_rules,
    fields=llama.change_fields(
        FIELDS,
        Field(
            PADDING,
            kinds.OPTIONAL_TOKEN,
            1,
            "Id of the padding token; positions start at pad_token_id + 1.",
        ),
        vocab_size=50265,
    ),
    only=ONLY,
    harmless=HARMLESS,
    extra_fields={name: value for name, value in BESIDE.items() if name != PADDING},
    ignored=(
        r"roberta\.embeddings\.position_ids",
        r"roberta\.pooler\.dense\.(weight|bias)",
        r"lm_head\.decoder\.bias",  # lm_head.bias once more
    ),
)
