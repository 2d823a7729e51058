"""Recording of one side of a comparison: for each tensor, the pieces that its ranks held, their
place in the logical tensor, and the order in which they were computed.

    layers.0.attn.q [tokens, heads x head_size]   rank 0: all rows, columns  0:16
                                                  rank 1: all rows, columns 16:32

A tensor of activations has a row for each token of the whole batch, sequence after sequence; a
parameter has its own shape. Ranks may hold the same region, and then must hold the same values,
unless the tensor is `partial`: it is their sum.

Names are those of our modules: `layers.3.attn.q` is the product with `layers.3.attn.q.weight`. What
has no module has a name of its own:

    embed                    input of the first layer
    layers.N                 the residual stream after a layer
      .attn_norm             inside it:
      .attn.q .k .v          projections, with their biases
      .attn.q_norm .k_norm
      .attn.query .key .value    as they attend: rotated by rope
      .attn.scores           softmax(scale q k^T + mask), computed from these by the definition
      .attn.sums             values weighted by the scores, before the output projection
      .attn                  after it
      .middle                the residual stream between mixer and mlp
      .mlp_norm
      .mlp.router .mlp.gate .mlp.up
      .mlp.act               act(gate) * up, or act(up)
      .mlp
    final_norm, logits
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from dolmen.core.topology import Topology
from dolmen.files import safetensors
from dolmen.files.safetensors import Spec

Stage = Literal[
    "weights", "forward", "backward", "gradients", "exp_avg", "exp_avg_sq", "update", "numbers"
]
STAGES: tuple[Stage, ...] = get_args(Stage)
MOMENTS: tuple[Stage, ...] = ("exp_avg", "exp_avg_sq")
"""AdamW's names of its state."""


@dataclass(frozen=True, eq=False)
class RecordedShard:
    """A rank's part of a tensor, in its computing dtype, on the CPU."""

    rank: int
    where: tuple[slice, ...]
    """Its region of the logical tensor, one slice per dim."""
    values: Tensor
    rows: Tensor | None = None
    """Index of each row in the logical tensor, in place of the first slice."""

    @property
    def index(self) -> tuple[slice | Tensor, ...]:
        """Index that selects this shard's region in the full logical tensor."""
        return self.where if self.rows is None else (self.rows, *self.where[1:])


@dataclass(eq=False)
class Recorded:
    """One logical tensor as its ranks hold it."""

    shape: tuple[int, ...]
    partial: bool = False
    """True if the tensor is the sum of the pieces that cover a region."""
    pieces: list[RecordedShard] = field(default_factory=list)

    def join(self, pieces: list[RecordedShard] | None = None) -> Tensor:
        """Return the full tensor assembled from shards (default: all): where several ranks hold a
        region, the last one's values, or their sum if `partial`. NaN where no rank holds anything.
        """
        pieces = self.pieces if pieces is None else pieces
        dtype = pieces[0].values.dtype
        if not self.partial:
            # NaN shows a region that no rank has recorded
            out = torch.full(self.shape, torch.nan, dtype=dtype)
            for piece in pieces:
                out[piece.index] = piece.values
            return out
        out, covered = (
            torch.zeros(self.shape, dtype=dtype),
            torch.zeros(self.shape, dtype=torch.bool),
        )
        for piece in pieces:
            out[piece.index] += piece.values
            covered[piece.index] = True
        return out.masked_fill(~covered, torch.nan)


Tensors = dict[tuple[Stage, str], Recorded]


@dataclass(eq=False)
class Recording:
    """All recorded tensors of one side, of all its ranks."""

    title: str
    topology: Topology
    dtype: torch.dtype
    """Dtype of the computation."""
    rest: torch.dtype
    """Dtype of the stored parameters."""
    tensors: Tensors

    def names(self, stage: Stage) -> list[str]:
        """Return the names of the tensors of a stage, in the order in which they were recorded."""
        return [name for at, name in self.tensors if at == stage]

    def tensor(self, stage: Stage, name: str) -> Tensor | None:
        """Return the full tensor of this stage and name, joined from its shards; None where this
        side has not recorded it.
        """
        recorded = self.tensors.get((stage, name))
        return None if recorded is None else recorded.join()


class Recorder:
    """Collects the tensors of one rank."""

    def __init__(self, rank: int = 0):
        """Start with no tensors. `rank`: this process's, stored with what it records."""
        self.rank, self.tensors = rank, Tensors()

    def add(
        self,
        stage: Stage,
        name: str,
        shape: tuple[int, ...],
        where: tuple[slice, ...],
        values: Tensor,
        rows: Tensor | None = None,
        partial: bool = False,
    ) -> None:
        """Record a copy on the CPU of this rank's part `values` of a tensor of the full `shape`.
        `where`: its region, a slice per dim; `rows`: row indices in place of the first slice;
        `partial`: the tensor is the sum over ranks.
        """
        # a copy: the step goes on to overwrite gradients and weights
        on_cpu = values.detach().to("cpu", copy=True).contiguous()
        place = self.tensors.setdefault((stage, name), Recorded(shape, partial))
        assert (place.shape, place.partial) == (shape, partial), (stage, name, shape, place)
        place.pieces.append(RecordedShard(self.rank, where, on_cpu, rows))

    def add_whole(self, stage: Stage, name: str, values: Tensor) -> None:
        """Record a copy of a tensor that this rank holds all of."""
        self.add(stage, name, tuple(values.shape), tuple(slice(0, n) for n in values.shape), values)

    def add_number(self, name: str, value: float) -> None:
        """Record a scalar that is the same on all ranks, such as the loss."""
        self.add_whole("numbers", name, torch.tensor(value, dtype=torch.float64))


def merge_ranks(ranks: list[Tensors]) -> Tensors:
    """Merge what several ranks recorded into one mapping of (stage, name) -> shards, in recorded
    order: the tensors of the first rank, then those that only other ranks have.
    """
    out = Tensors()
    for tensors in ranks:
        for key, recorded in tensors.items():
            place = out.setdefault(key, Recorded(recorded.shape, recorded.partial))
            assert (place.shape, place.partial) == (recorded.shape, recorded.partial), (
                key,
                recorded.shape,
            )
            place.pieces += recorded.pieces
    return out


# On disk a piece is a tensor whose name describes it:
# stage|name|partial|shape|where|rank|number|values; its rows are another, which ends in `rows`.


def save(folder: Path, tensors: Tensors, rank: int) -> None:
    """Write what this rank recorded into its own new subfolder of `folder`, as safetensors."""
    stored = dict(_named_pieces(tensors))
    specs = {name: Spec(tuple(t.shape), t.dtype) for name, t in stored.items()}
    # one folder per rank: all ranks write at the same time
    mine = folder / f"rank-{rank:05d}"
    mine.mkdir()
    safetensors.write_tensors(mine, specs, stored.items())


def load(folder: Path, ranks: int) -> Tensors:
    """Load and merge the recordings that ranks 0 to `ranks` - 1 saved. Raises ValueError where one
    is missing.
    """
    return merge_ranks([_read(folder / f"rank-{rank:05d}") for rank in range(ranks)])


def _named_pieces(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the safetensors file, tensor) of each shard's values, and of its row indices
    if any; the name encodes stage, tensor, shape, region and rank.
    """
    for (stage, name), recorded in tensors.items():
        for number, piece in enumerate(recorded.pieces):
            shape = "x".join(map(str, recorded.shape))
            where = ",".join(f"{part.start}:{part.stop}" for part in piece.where)
            key = f"{stage}|{name}|{int(recorded.partial)}|{shape}|{where}|{piece.rank}|{number}"
            yield f"{key}|values", piece.values
            if piece.rows is not None:
                yield f"{key}|rows", piece.rows


def _read(folder: Path) -> Tensors:
    """Return what one rank recorded, read from its folder: the inverse of `_named_pieces`."""
    out, stored = Tensors(), safetensors.index(folder)
    for key, entry in stored.items():
        *words, kind = key.split("|")
        if kind != "values":
            continue
        stage, name, partial, shape, where, rank, _ = words
        at = STAGES[STAGES.index(cast(Stage, stage))]  # raises for one that is none
        sizes = tuple(int(n) for n in shape.split("x") if n)
        slices = tuple(slice(*map(int, part.split(":"))) for part in where.split(",") if part)
        rows = stored.get("|".join((*words, "rows")))
        place = out.setdefault((at, name), Recorded(sizes, partial == "1"))
        stored_rows = None if rows is None else rows.read()
        place.pieces.append(RecordedShard(int(rank), slices, entry.read(), stored_rows))
    return out


# Behind layers.N -> the operation that makes it.
INSIDE = {
    "norm": "norm before attention and MLP",
    "attn_norm": "norm before attention",
    "attn.q_a_norm": "norm of the queries' latent",
    "attn.kv_a_norm": "norm of the keys' latent",
    "attn.q": "query projection",
    "attn.k": "key projection",
    "attn.v": "value projection",
    "attn.q_norm": "norm of queries",
    "attn.k_norm": "norm of keys",
    "attn.query": "rope of queries (positions)",
    "attn.key": "rope of keys (positions)",
    "attn.value": "values of attention",
    "attn.scores": "scores: scale, mask, window, softmax",
    "attn.sums": "attention: weighted sum of values",
    "attn": "output projection",
    "attn_post_norm": "norm after attention",
    "middle": "residual sum after attention",
    "mlp_norm": "norm before the MLP",
    "mlp.router": "router",
    "mlp.shared.gate": "gate projection of shared experts",
    "mlp.shared.up": "up projection of shared experts",
    "mlp.shared.act": "activation of shared experts",
    "mlp.gate": "gate projection",
    "mlp.up": "up projection",
    "mlp.act": "activation: act(gate) * up",
    "mlp": "down projection",
    "mlp_post_norm": "norm after the MLP",
    "": "residual sum after the MLP",
}
OUTSIDE = {"embed": "embedding (and positions)", "final_norm": "final norm", "logits": "head"}
LAYER = re.compile(r"layers\.([0-9]+)\.?(.*)")

# Behind layers.N: a parameter's module -> the tensor whose gradient, once known, gives its own.
MADE_WITH = {
    "attn.o": "attn",
    "mlp.down": "mlp",
    "mlp.experts.down": "mlp",
    "mlp.shared.down": "mlp",
    "attn.sinks": "attn.sums",
    "mlp.experts.gate": "mlp",
    "mlp.experts.up": "mlp",
}
OF_HEAD = ("head", "transform", "pooler", "follows")
END, LAST_ONES = 1 << 30, ("final_norm", "logits", "project_out", *OF_HEAD)


def layer_of(name: str) -> int | None:
    """Return the layer number in the name of a tensor or parameter; None outside of layers."""
    match = LAYER.fullmatch(name)
    return None if match is None else int(match[1])


def inside(name: str) -> str:
    """Return the part of a tensor's name after its layer, "" for the layer's output; outside of
    layers the name itself.
    """
    match = LAYER.fullmatch(name)
    return name if match is None else match[2]


def place(name: str) -> int:
    """Return a sort key of a tensor's name by layer: the layer's number, -1 for what precedes the
    layers, END for what follows them.
    """
    number = layer_of(name)
    return number if number is not None else END if name.startswith(LAST_ONES) else -1


def operation(name: str) -> str:
    """Return a phrase for the operation that computes a forward tensor, for a report: "query
    projection" for layers.0.attn.q, "a part of the layer" for what has none.
    """
    return {**OUTSIDE, **INSIDE}.get(inside(name), "a part of the layer")


def gradient_tensor(parameter: str) -> str:
    """Return the name of the forward tensor whose gradient, once known, gives that of the
    parameter.
    """
    module, _, _ = parameter.rpartition(".")
    number, word = layer_of(module), inside(module)
    if number is None:
        names = {"final_norm": "final_norm", "project_out": "final_norm"}
        return "logits" if word.startswith(OF_HEAD) else names.get(word, "embed")
    return f"layers.{number}.{MADE_WITH.get(word, word)}"


def downstream(word: str) -> tuple[str, ...]:
    """Return the names, within a layer, of the tensors that everything computed from the layer's
    tensor `word` passes through.
    """
    if word in ("mlp.gate", "mlp.up"):
        return ("mlp.act",)
    if word in ("attn", "attn.sums", "attn_post_norm"):
        return ("middle",)
    return ("attn.sums", "middle") if word.startswith("attn.") else ()
