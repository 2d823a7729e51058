"""Specs of what is before and after the blocks: embedding, LM head and scalar head."""

from dataclasses import dataclass
from typing import ClassVar

from dolmen.model.spec.layers import Activation, NormSpec
from dolmen.model.spec.param import VOCABULARY, ParamSpec, ParamSpecs, ShardSpec, add_prefix
from dolmen.model.spec.positions import PositionTable


@dataclass(frozen=True)
class EmbeddingSpec:
    """Token embedding, and what is applied to it before the first block."""

    rows: int
    """Vocabulary size, tokens."""
    scale: float = 1.0
    """Factor of the embedding (Gemma: sqrt(hidden_size)); a tied head is not multiplied."""
    norm: NormSpec | None = None
    """Norm of the embedding, after the position table is added (BLOOM)."""
    positions: PositionTable | None = None
    types: int | None = None
    """Number of token types (BERT: which of two texts a token belongs to), stated by the last
    position stream; None: there is no type embedding.
    """
    width: int | None = None
    """Width of an embedding row, if it is not the residual stream's: project_in then widens
    embeddings before positions are added, and project_out narrows the last hidden vectors before
    the head (OPT-350m).
    """

    def params(self, hidden: int, tied: bool) -> ParamSpecs:
        """Return the specs of the parameters before the first block, by name: token table,
        project_in, norm, position and type tables. `tied`: the table is the head's weight too, so
        it counts multiply-adds.
        """
        width = self.width or hidden
        # a lookup multiplies nothing; a tied head does
        products = self.rows * width if tied else 0
        weight = ParamSpec(
            (self.rows, width), "embedding", (vocabulary_shard(self.rows),), products=products
        )
        types = ParamSpec((self.types or 0, hidden), "embedding", gradient="residual")
        return {
            "embed.weight": weight,
            **({"project_in.weight": replicated_matrix(hidden, self.width)} if self.width else {}),
            **(add_prefix("embed_norm", self.norm.params(hidden)) if self.norm else {}),
            **(self.positions.params(hidden) if self.positions else {}),
            **({"types.weight": types} if self.types else {}),
        }

    def output_params(self, hidden: int) -> ParamSpecs:
        """Return the specs of the parameters between final norm and head: project_out if embedding
        rows are narrower or wider than the residual stream, else none.
        """
        return {"project_out.weight": replicated_matrix(self.width, hidden)} if self.width else {}


@dataclass(frozen=True)
class HeadTransformSpec:
    """BERT's transform of the last hidden vectors before the head: norm(act(W x + b))."""

    activation: Activation
    norm: NormSpec

    def params(self, hidden: int) -> ParamSpecs:
        """Return the specs of weight, bias and norm parameters, replicated over tp."""
        return {**replicated_linear(hidden, hidden), **add_prefix("norm", self.norm.params(hidden))}


@dataclass(frozen=True)
class LMHeadSpec:
    """LM head: maps the last hidden vector of a token to logits over the vocabulary."""

    tied: bool = False
    """The head uses the embedding's weight."""
    soft_cap: float | None = None
    """Logits become cap * tanh(logit / cap)."""
    normalised: bool = False
    """Rows are normalised to length 1 before they multiply (NormHead of Baichuan 2, 2309.10305,
    section 2.5); they are stored and trained unnormalised.
    """
    scale: float = 1.0
    """Factor of logits (Cohere: logit_scale), before the soft cap."""
    bias: bool = False
    """Bias of logits (GPT-J, BERT), not multiplied by the scale."""
    transform: HeadTransformSpec | None = None
    """Transform of hidden vectors before the head."""
    follows: bool = False
    """Next-sentence head of BERT: two logits of tanh(W x + b), meant for the first token (Devlin et
    al., 1810.04805, section 3.1).
    """

    def params(self, rows: int, hidden: int) -> ParamSpecs:
        """Return the specs of the head's parameters by name: weight [rows, hidden] (none if tied to
        the embedding), bias, transform and next-sentence head, as far as it has them.
        """
        cuts = (vocabulary_shard(rows),)
        weight = ParamSpec((rows, hidden), "head", cuts, products=rows * hidden)
        return {
            **({} if self.tied else {"head.weight": weight}),
            **(
                {"head.bias": ParamSpec((rows,), "bias", cuts, initial="zeros")}
                if self.bias
                else {}
            ),
            **(add_prefix("transform", self.transform.params(hidden)) if self.transform else {}),
            **(add_prefix("pooler", replicated_linear(hidden, hidden)) if self.follows else {}),
            **(add_prefix("follows", replicated_linear(2, hidden)) if self.follows else {}),
        }


@dataclass(frozen=True)
class ScalarHeadSpec:
    """Scalar head: one number per token, a reward or a value; transformers' `score` with one label
    and no bias.
    """

    tied: ClassVar[bool] = False
    soft_cap: ClassVar[None] = None
    normalised: ClassVar[bool] = False
    scale: ClassVar[float] = 1.0
    transform: ClassVar[None] = None
    follows: ClassVar[bool] = False

    def params(self, rows: int, hidden: int) -> ParamSpecs:
        """Return the spec of the weight [1, hidden], by name, replicated over tp; `rows` is unused.
        It is trained together with adapters, as no stored model has it.
        """
        score = ParamSpec(
            (1, hidden), "head", gradient="residual", products=hidden, train_with_adapters=True
        )
        return {"score.weight": score}


def replicated_matrix(out: int, inp: int) -> ParamSpec:
    """Return the spec of a weight [out, inp] that every rank of tp stores whole and applies to its
    own tokens of the residual stream; its gradient is partial under sequence parallelism.
    """
    return ParamSpec((out, inp), "matrix", gradient="residual", products=out * inp)


def replicated_linear(out: int, inp: int) -> ParamSpecs:
    """Return the specs "weight" [out, inp] and "bias" [out] of a linear that every rank of tp
    stores whole.
    """
    return {
        "weight": replicated_matrix(out, inp),
        "bias": ParamSpec((out,), "bias", gradient="residual", initial="zeros"),
    }


def vocabulary_shard(rows: int) -> ShardSpec:
    """Return the split over tp of a table with one row per vocabulary token; ranks may get unequal
    numbers of rows.
    """
    return ShardSpec("tp", 0, rows, VOCABULARY, uneven=True)
