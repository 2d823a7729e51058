"""One decoder for every family: embedding, blocks, final norm. Structure comes from the tree of
components alone (dolmen/model/spec).

    tokens [b, s] -> embed -> x [b * s, hidden] -> block * layers -> norm -> hidden
                                                                        |
                                                      end(hidden, head) -> what is asked for

x is I@tp, or S(0)@tp under sequence parallelism. The decoder owns the head and has no use for it:
it is given to the end (head.py), which makes logits or a loss of the two.

A rank holds the parts of it that its pipeline schedule gives it, under their names in the whole,
and under context parallelism s is its part of every sequence. Both are in `Split`; on one process
it is all there is.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from dolmen.core.device import scalar_tensor
from dolmen.core.state import Places, dtype_of, local
from dolmen.model.block import HEADS, Block, build_block, check_supported
from dolmen.model.component import Balance, Cached, Given, Setting, Where
from dolmen.model.head import End, Transform
from dolmen.model.layers import (
    Column,
    Embedding,
    Norm,
    Parameters,
    Positions,
    Whole,
    is_partial,
    places,
)
from dolmen.model.positions import tables
from dolmen.model.routing_replay import Routes
from dolmen.model.spec import Leaf, Table, Tree, check_cuts, check_rounding, under
from dolmen.model.spec.positions import Relative
from dolmen.model.split import Split, whole
from dolmen.model.training import Training
from dolmen.ops import elementwise
from dolmen.ops.attention import Documents
from dolmen.ops.rope import PositionIds
from dolmen.parallel import tensor
from dolmen.parallel.data import Unit
from dolmen.parallel.inference_linear import Several, Weights
from dolmen.parallel.quantized_product import Delayed

BEHIND = ("final_norm", "project_out", "head", "score", "transform", "pooler", "follows")
"""Names of the modules behind the last block."""


class Decoder(nn.Module):
    """The model, or this rank's stages of it. Build it on meta, place it (`plan`), shard it, then
    initialise or load it: see model/build.py.

    forward(tokens)      -> the last hidden vectors
    forward(tokens, end) -> what `end` makes of them and the head
    """

    def __init__(self, tree: Tree, split: Split | None = None, training: Training = Training()):
        """`split` None: all of it, in one process. Raises ValueError where the split does not
        divide the model, and for what no module computes.
        """
        super().__init__()
        tree, split = training.applied(tree), split or whole(tree.layers)
        check_supported(tree)
        self.sizes = {"tp": split.tp.axis.size, "ep": split.ep.size}
        check_cuts(tree.leaves, self.sizes)
        check_rounding(tree.leaves, self.sizes)
        self.tree, self.split, self.tp = tree, split, split.tp
        self.dropout, self.router = training.dropout, training.router
        self._add_embedding()
        self.layers = nn.ModuleDict(
            {
                str(i): build_block(
                    tree.blocks[i],
                    under(tree.leaves, f"layers.{i}"),
                    Setting(i, split, training),
                )
                for i in split.layers
            }
        )
        self._add_head()
        self.compiled = False
        self.compute: torch.dtype | None = None  # None: in the dtype of the parameters
        self.alone: Weights | None = None  # what is held of weights that have gone (alone.py)

    def _add_embedding(self) -> None:
        """Make the modules before the first block. One is None where the model has none of its
        kind, and on a rank without the first stage. A tied embedding is also on the last stage.
        """
        tree, tp, first = self.tree, self.tp, self.split.first
        embedding, leaves = tree.embedding, tree.leaves
        has_table = first or (self.split.last and tree.head.tied)
        self.embed = Embedding(embedding, under(leaves, "embed"), tp) if has_table else None
        width, norm = embedding.width, embedding.norm
        self.project_in = Whole(under(leaves, "project_in"), tp) if first and width else None
        self.embed_norm = (
            Norm(norm, under(leaves, "embed_norm"), self.split.kernels) if first and norm else None
        )
        self.positions = self._positions_table("positions", embedding.positions)
        self.block_positions = self._positions_table("block_positions", embedding.positions)
        types = Table(embedding.types) if embedding.types else None
        self.types = self._positions_table("types", types)

    def _positions_table(self, name: str, table: Table | None) -> Positions | None:
        own = under(self.tree.leaves, name)
        return Positions(table, own) if self.split.first and table and own else None

    def _add_head(self) -> None:
        """Make the modules behind the last block. One is None where the model has none of its
        kind, and on a rank without the last stage.
        """
        tree, tp, last, kernels = self.tree, self.tp, self.split.last, self.split.kernels
        own = {name: under(tree.leaves, name) if last else {} for name in BEHIND}
        self.final_norm = (
            Norm(tree.final_norm, own["final_norm"], kernels) if last and tree.final_norm else None
        )
        self.project_out = Whole(own["project_out"], tp) if own["project_out"] else None
        # rows that are normalized first are read as they are, not multiplied
        head = Parameters if tree.head.normalised else Column
        self.head = head(own["head"]) if own["head"] else None
        self.score = Parameters(own["score"]) if own["score"] else None
        transform = tree.head.transform
        self.transform = (
            Transform(transform, own["transform"], tp, kernels) if last and transform else None
        )
        self.pooler = Whole(own["pooler"], tp) if own["pooler"] else None
        self.follows = Whole(own["follows"], tp) if own["follows"] else None

    def compile_parts(self) -> None:
        """torch.compile of what repeats: each block, and the loss of a chunk of tokens; and of the
        final norm. Before sharding over dp. Of a block where how many rows an expert gets is read,
        only attention.
        """
        for block in self.all_blocks():
            block.compile_static()
        if self.final_norm is not None:
            self.final_norm.compile()
        self.compiled = True

    def lay_out(self, weights: Weights) -> None:
        """How weights are held for products without gradients, until `at_rest`
        (layers.Parameters); on a GPU as they are.
        """
        if not self.split.kernels.lays_out:
            return
        for module in self._parts():
            module.lay_out(weights)

    def at_rest(self, keep: bool) -> None:
        """Weights are multiplied as they are; `keep` what was laid out, while they are the same."""
        for module in self._parts():
            module.at_rest(keep)

    def stand_beside(self, several: Mapping[str, Several]) -> None:
        """Adapters beside weights, by the names of these, until there are others or none ({});
        where no gradient is kept (layers.Parameters).
        """
        for name, module in self.named_modules():
            if isinstance(module, Parameters):
                module.stand_beside(several.get(f"{name}.weight"))

    def _parts(self) -> list[Parameters]:
        return [module for module in self.modules() if isinstance(module, Parameters)]

    def held(self) -> dict[str, Leaf]:
        """What is known of each parameter that this rank holds a part of, by its name."""
        return {name: self.tree.leaves[name] for name, _ in self.named_parameters()}

    def delayed(self) -> dict[str, Delayed]:
        """What delayed scaling knows of each weight of this rank's layers, by its name."""
        return {
            f"{name}.weight": module.rounding.delayed
            for name, module in self.named_modules()
            if isinstance(module, Parameters)
            and module.rounding is not None
            and module.rounding.delayed is not None
        }

    def scaling(self) -> dict[str, Tensor]:
        """What delayed scaling keeps, `amax_history/NAME` and `fp8_scale/NAME` of each weight."""
        return {
            f"{kind}/{name}": tensor
            for name, state in self.delayed().items()
            for kind, tensor in state.tensors.items()
        }

    def plan(self) -> dict[str, Places]:
        """Parameter name -> placement on tp, of experts on (ep, tp): what the sharder carries out
        and the memory planner counts.
        """
        return {name: places(leaf, self.sizes) for name, leaf in self.held().items()}

    def partial(self) -> set[str]:
        """Names of the parameters whose gradient on tp is a partial sum."""
        return {name for name, leaf in self.held().items() if is_partial(leaf, self.tp)}

    def units(self) -> list[Unit]:
        """What is gathered and reduced together over fsdp, inner modules first."""
        return [unit for block in self.all_blocks() for unit in (*block.units(), Unit(block))]

    def ahead(self) -> list[list[list[nn.Module]]]:
        """What to gather ahead (data.prefetch): of each stage, each block's units in the order of
        use. Empty where forward does not stop to read the device.
        """
        if all(block.mlp.static for block in self.all_blocks()):
            return []
        return [
            [[b, *(unit.module for unit in b.units())] for b in self.blocks(part)]
            for part in range(len(self.split.parts))
        ]

    def all_blocks(self) -> list[Block]:
        """The layers of all stages of this rank."""
        return [cast(Block, block) for block in self.layers.values()]

    def blocks(self, part: int) -> list[Block]:
        """The layers of one of this rank's stages."""
        return [cast(Block, self.layers[str(i)]) for i in self.split.parts[part].layers]

    @property
    def tied_apart(self) -> nn.Parameter | None:
        """The weight that this rank shares with the other end of the pipeline."""
        return (
            self.embed.weight
            if self.split.tied_apart and self.tree.head.tied and self.embed is not None
            else None
        )

    def boundary(self, batch: int, length: int) -> Float[Tensor, "here hidden"]:
        """An empty residual stream of this rank, as it crosses stages."""
        tokens = (
            batch
            * length
            // self.split.cp.axis.size
            // (self.tp.axis.size if self.tp.gathers else 1)
        )
        return torch.empty(
            tokens,
            self.tree.hidden_size,
            dtype=self.compute or dtype_of(self),
            device=self.device,
        )

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        if self.alone is not None:  # weights that have gone are on meta, and what is left a CPU's
            return torch.device("cpu")
        return next(self.parameters()).device

    def where(
        self,
        part: int,
        positions: Int64[Tensor, "streams b s"],
        lengths: Int64[Tensor, "#b #s"] | None = None,
    ) -> dict[tuple[Relative | None, int], Where]:
        """What is known of `positions`, those of each sequence or of all (b = 1), by each kind of
        layer that a stage of this rank has, in fp32 or wider; `lengths`: of the text of each token,
        where a layer asks.
        """
        dtype = torch.promote_types(self.compute or dtype_of(self), torch.float32)
        mixers = [self.tree.blocks[i].mixer for i in self.split.parts[part].layers]
        return {
            kind: tables(*kind, positions, dtype, lengths, self.training)
            for kind in {(mixer.positions, mixer.heads) for mixer in mixers}
        }

    def forward(
        self,
        tokens: Int64[Tensor, "b s"],
        end: End | None = None,
        cache: Cached | None = None,
        noise: elementwise.Noise | None = None,
        documents: Documents | None = None,
        positions: PositionIds | None = None,
        balance: Mapping[int, Balance] | None = None,
        x: Float[Tensor, "here hidden"] | None = None,
        part: int = 0,
        routes: Routes | None = None,
    ) -> Any:
        """tokens are the same on every rank of tp and cp. Of a pipeline, the stage `part` of this
        rank: `x` is what the stage before gave, [b * s / cp, hidden] (/ tp under sequence
        parallelism), and so is the result of all but the last, whose is what `end` makes of the
        last hidden vectors, these without one.

        `noise` is required while training with dropout, and unused otherwise. `documents` and
        `positions`: of the whole sequences. With a `cache` (corpus.py), which holds the keys and
        values of the tokens before these, b is 1, and the tokens of several texts follow one
        another. `balance`: of each layer of experts; `routes`: which of them tokens go to.
        """
        here = self.split.parts[part]
        given = self._given(tokens, noise, documents)
        ids = self._positions(tokens, cache, positions)
        y = self._embedded(tokens, ids, given) if here.first else x
        assert y is not None, "a stage that is not the first is given x"
        known = self.where(part, ids, self._lengths(tokens, cache, positions))
        for i, block in zip(here.layers, self.blocks(part), strict=True):
            kept = None if cache is None else cache.layers[i]
            mixer = self.tree.blocks[i].mixer
            where = known[mixer.positions, mixer.heads]
            y = block(y, given.of_layer(i, where, (balance or {}).get(i), routes), kept)
        return self._ended(y, len(tokens), end) if here.last else y

    def _embedded(self, tokens: Tensor, positions: Tensor, given: Given) -> Tensor:
        """What enters the first block, of tokens [b, s] at `positions` [streams, b, s / cp], or
        [streams, 1, s / cp] for all.
        """
        assert self.embed is not None
        x = self.embed(self.split.cp.split(tokens, 1).reshape(-1))
        if self.project_in is not None:
            x = self.project_in(x)
        of_stream = (
            (self.positions, positions[0]),
            (self.block_positions, positions[-1]),
            (self.types, positions[-1]),
        )
        for table, stream in of_stream:
            if table is not None:
                x = x + table(
                    tensor.own_tokens(stream.expand(len(tokens), -1).reshape(-1), self.tp)
                )
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if given.noise is not None:
            assert given.rows is not None
            x = elementwise.residual(
                x, self.dropout, given.noise, elementwise.EMBEDDING, given.rows
            )
        return x

    def _ended(self, x: Tensor, batch: int, end: End | None) -> Any:
        """What leaves the last block -> what `end` makes of it, in here: after forward ZeRO lets
        the head go.
        """
        hidden = x if self.final_norm is None else self.final_norm(x)
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        if end is None:
            return hidden
        table = self.embed if self.tree.head.tied else self.head or self.score
        assert table is not None
        bias = None if self.head is None else self.head.bias
        head = HEADS[type(self.tree.head)](
            self.tree,
            self.split,
            local(table.weight),
            batch,
            self.compiled,
            None if bias is None else local(bias),
            self.transform,
            None if self.follows is None else self._pair,
            None if self.tree.head.normalised else table.linear().laid_out,
        )
        return end(hidden, head)

    def _pair(self, x: Float[Tensor, "here hidden"]) -> Float[Tensor, "here 2"]:
        """See Head.follows of the tree."""
        assert self.pooler is not None and self.follows is not None
        return self.follows(self.pooler(x).tanh())

    def _given(
        self, tokens: Tensor, noise: elementwise.Noise | None, documents: Documents | None
    ) -> Given:
        """What all layers share."""
        batch, length = tokens.shape
        cp = self.split.cp
        if documents is not None and documents.reach is not None and not self.tree.prefixed:
            raise ValueError(
                "the batch has prefixes, and no layer of the model has a prefix mask: give batches "
                "without prefixes, or a model with one"
            )
        noise, rows = self._noise(noise, length)
        if self.tree.both_ways:
            none = torch.zeros(tokens.shape, dtype=torch.int64)  # where one document begins
            documents = (documents or Documents.of(none).on(tokens.device)).both_ways
        here = None if documents is None else cp.documents(documents)
        return Given(batch, documents=here, noise=noise, rows=rows)

    def _positions(
        self, tokens: Tensor, cache: Cached | None, positions: PositionIds | None
    ) -> Int64[Tensor, "streams _ here"]:
        """Of this rank's tokens, of each sequence or of all. Raises ValueError for positions that
        the model does not have.
        """
        length, most, known = tokens.shape[1], self.tree.longest, self.tree.streams
        longest = length if positions is None else positions.longest
        longest = longest if cache is None else cache.longest
        if most is not None and longest > most:
            raise ValueError(
                f"{longest} tokens, but the table of positions has {most} "
                f"(max_position_embeddings): use a shorter sequence"
            )
        if cache is not None:
            return cache.positions
        streams = 1 if positions is None else positions.ids.shape[1]
        if positions is None and self.tree.blanks is not None:
            raise ValueError(
                "the model's positions follow from special tokens: make them by "
                "Batch.read_by(the model's tree)"
            )
        typed = self.tree.embedding.types is not None
        if streams != known and not (positions is None and typed):
            raise ValueError(
                f"the model knows {known} streams of positions, and the batch has {streams}: make "
                f"them by Batch.with_positions({known})"
            )
        if positions is None:
            index = self.split.cp.indices(length, tokens.device)[None, None]
            return torch.cat((index, torch.zeros_like(index))) if typed else index
        return self.split.cp.split(positions.ids, 2).transpose(0, 1)

    def _lengths(
        self, tokens: Tensor, cache: Cached | None, positions: PositionIds | None
    ) -> Int64[Tensor, "1 _"] | None:
        """Of the text that has each token, or all (1); None where no layer asks."""
        if not self.tree.by_length:
            return None
        if cache is not None:
            return cache.lengths
        longest = tokens.shape[1] if positions is None else positions.longest
        return scalar_tensor(longest, torch.int64, tokens.device)[None, None]

    def _noise(
        self, noise: elementwise.Noise | None, length: int
    ) -> tuple[elementwise.Noise | None, Tensor | None]:
        """`noise` where dropout acts, and the index in the global batch of each token of this
        rank's residual stream.
        """
        if not self.training or self.dropout == 0:
            return None, None
        if noise is None:
            raise ValueError(
                f"training with dropout ({self.dropout}) needs `noise`: pass it, or set "
                f"--train.dropout 0"
            )
        index = self.split.cp.indices(length, noise.sequences.device)
        rows = noise.sequences[:, None] * length + index
        return noise, tensor.own_tokens(rows.reshape(-1), self.tp)
