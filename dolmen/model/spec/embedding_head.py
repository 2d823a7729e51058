"""x

What stands before the blocks and after them.
"""

from dataclasses import dataclass
from typing import ClassVar

from dolmen.model.spec.layers import Activation, Norm
from dolmen.model.spec.param import VOCABULARY, Cut, Leaf, Leaves, within
from dolmen.model.spec.positions import Table


@dataclass(frozen=True)
class Embedding:
    """What tokens become: a row of a table for each, and what is done with it before the first
    block.
    """

    rows: int
    """Of the vocabulary, tokens."""
    scale: float = 1.0
    """What its rows are multiplied by as they enter (Gemma: sqrt(hidden_size)); the head, where it
    is tied, has them as they are.
    """
    norm: Norm | None = None
    """Of what enters, after a table of positions (BLOOM)."""
    positions: Table | None = None
    types: int | None = None
    """Rows of a table of types, which the last stream of positions says: of two texts in a
    sequence, which of them a token is of (BERT). None: there is no table.
    """
    width: int | None = None
    """Of a row, where it is not the residual stream's: a matrix makes the one of the other as rows
    enter, before positions, and another the other way of the last hidden vectors, before the head
    (OPT-350m).
    """

    def leaves(self, hidden: int, tied: bool) -> Leaves:
        """`tied`: it is the head's weight too, which multiplies."""
        width = self.width or hidden
        products = self.rows * width if tied else 0
        weight = Leaf(
            (self.rows, width), "embedding", (of_vocabulary(self.rows),), products=products
        )
        types = Leaf((self.types or 0, hidden), "embedding", gradient="residual")
        return {
            "embed.weight": weight,
            **({"project_in.weight": whole(hidden, self.width)} if self.width else {}),
            **(within("embed_norm", self.norm.leaves(hidden)) if self.norm else {}),
            **(self.positions.leaves(hidden) if self.positions else {}),
            **({"types.weight": types} if self.types else {}),
        }

    def leaves_out(self, hidden: int) -> Leaves:
        """Of what stands before the head."""
        return {"project_out.weight": whole(self.width, hidden)} if self.width else {}


@dataclass(frozen=True)
class Transform:
    """norm(act(W x + b)), of the last hidden vectors before they are multiplied (BERT)."""

    activation: Activation
    norm: Norm

    def leaves(self, hidden: int) -> Leaves:
        """Whole on every rank of tp."""
        return {**biased(hidden, hidden), **within("norm", self.norm.leaves(hidden))}


@dataclass(frozen=True)
class Head:
    """What the last hidden vector of a token is multiplied by, to the logits of all tokens."""

    tied: bool = False
    """Its weight is the embedding's."""
    soft_cap: float | None = None
    """Logits become cap * tanh(logit / cap)."""
    normalised: bool = False
    """Each row of its weight counts by its direction alone, at length 1 (Baichuan 2, 2309.10305,
    section 2.5); it is stored and trained as it is.
    """
    scale: float = 1.0
    """What logits are multiplied by (Cohere: logit_scale), before they are capped."""
    bias: bool = False
    """Of logits (GPT-J, BERT), which no scale multiplies."""
    transform: Transform | None = None
    """Of hidden vectors, before."""
    follows: bool = False
    """Of a sequence of two texts, whether the second follows the first: two logits of tanh(W x + b)
    of a token's last hidden vector, which is meant for the first token's (Devlin et al.,
    1810.04805, section 3.1).
    """

    def leaves(self, rows: int, hidden: int) -> Leaves:
        """No weight where the embedding's is used."""
        cuts = (of_vocabulary(rows),)
        weight = Leaf((rows, hidden), "head", cuts, products=rows * hidden)
        return {
            **({} if self.tied else {"head.weight": weight}),
            **({"head.bias": Leaf((rows,), "bias", cuts, initial="zeros")} if self.bias else {}),
            **(within("transform", self.transform.leaves(hidden)) if self.transform else {}),
            **(within("pooler", biased(hidden, hidden)) if self.follows else {}),
            **(within("follows", biased(2, hidden)) if self.follows else {}),
        }


@dataclass(frozen=True)
class Scalar:
    """In the place of a head: one number for each token, a reward or a value. What transformers
    calls `score`, of one label and without a bias.
    """

    tied: ClassVar[bool] = False
    soft_cap: ClassVar[None] = None
    normalised: ClassVar[bool] = False
    scale: ClassVar[float] = 1.0
    transform: ClassVar[None] = None
    follows: ClassVar[bool] = False

    def leaves(self, rows: int, hidden: int) -> Leaves:
        """Whole on every rank of tp, where it sees the tokens of the residual stream."""
        score = Leaf((1, hidden), "head", gradient="residual", products=hidden, with_adapters=True)
        return {"score.weight": score}


def whole(out: int, inp: int) -> Leaf:
    """A matrix that every rank of tp stores whole, for its own tokens of the residual stream."""
    return Leaf((out, inp), "matrix", gradient="residual", products=out * inp)


def biased(out: int, inp: int) -> Leaves:
    """The same and its bias."""
    return {
        "weight": whole(out, inp),
        "bias": Leaf((out,), "bias", gradient="residual", initial="zeros"),
    }


def of_vocabulary(rows: int) -> Cut:
    """Of a table with a row for each token."""
    return Cut("tp", 0, rows, VOCABULARY, uneven=True)
