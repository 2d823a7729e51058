"""One decoder for every family: embedding, blocks, final norm, head. Its structure comes from the
`ModelSpec` alone (dolmen/model/spec).

    tokens [b, s] -> embed -> x [b * s, hidden] -> block * layers -> norm -> hidden
                                                                        |
                                          head_function(hidden, head) -> logits, loss, ...

Problem. One class has to be the whole model in one process, a tensor-parallel slice of it, one or
several pipeline stages, and the model that decodes with a KV cache, for over forty families,
and give the same numbers in each case.

Idea. The residual stream x is two-dimensional, tokens by hidden, so that no layer but attention
knows of sequences. It is I@tp (replicated over tp), or S(0)@tp (sharded by tokens) under sequence
parallelism; under context parallelism s is this rank's part of every sequence. What a rank has is
in `ModelSplit`: its mesh axes and the layers of its pipeline stages. Modules keep the names of the
whole model ("layers.17.attn.q"), so that initial values, checkpoints and weight rules do not depend
on the layout. Modules that a rank lacks are None.

The head is not applied by the decoder: `forward` hands it to a head function (head.py), which
computes logits, a loss or log-probabilities. It runs inside forward, because ZeRO-3 frees the
gathered weight of the head when forward returns.

Invariants. Every parameter has exactly one `ParamSpec`; `Decoder.plan` and `Decoder.partial` follow
from it. Per-token inputs (labels, weights, positions) are those of whole sequences and equal on all
ranks of tp and cp; each rank takes its part. With several stages per rank, `part` selects which of
them a call runs, and the stage boundary has the shape of `boundary`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from dolmen.core.device import scalar_tensor
from dolmen.core.state import Places, dtype_of, local
from dolmen.core.torch_private import compute
from dolmen.model.block import HEADS, TransformerBlock, build_block, check_supported
from dolmen.model.component import (
    ForwardCache,
    LayerInputs,
    ModuleContext,
    PositionInputs,
    RouterLosses,
)
from dolmen.model.head import HeadFunction, HeadTransform
from dolmen.model.layers import (
    ColumnParallelLinear,
    Embedding,
    Norm,
    ParameterModule,
    PositionEmbedding,
    ReplicatedLinear,
    is_partial,
    placements,
)
from dolmen.model.positions import tables
from dolmen.model.routing_replay import Routes
from dolmen.model.spec import (
    ModelSpec,
    ParamSpec,
    PositionTable,
    check_fp8_sharding,
    check_sharding,
    select_prefix,
)
from dolmen.model.spec.positions import AttentionPositions
from dolmen.model.split import ModelSplit, single_process
from dolmen.model.training import Training
from dolmen.ops import elementwise
from dolmen.ops.attention import Documents
from dolmen.ops.rope import PositionIds
from dolmen.parallel import tensor
from dolmen.parallel.data import Unit
from dolmen.parallel.inference_linear import MultiLora, Weights
from dolmen.parallel.quantized_product import Delayed

HEAD_MODULES = ("final_norm", "project_out", "head", "score", "transform", "pooler", "follows")
"""Names of the modules after the last block."""


class Decoder(nn.Module):
    """The model, or this rank's pipeline stages of it. It is built on meta, placed (`plan`),
    sharded, and then initialised or loaded: see model/build.py.

    `forward(tokens)` returns the last hidden vectors; `forward(tokens, end)` returns the head
    function `end` of them.
    """

    def __init__(
        self, spec: ModelSpec, split: ModelSplit | None = None, training: Training = Training()
    ):
        """Build the modules of this rank; `split` None: the whole model in one process. Raises
        ValueError where the split does not divide the model, and for a component that no module
        computes.
        """
        super().__init__()
        # adapters, fp8 and balance biases are part of the spec from here on
        spec, split = training.apply_to(spec), split or single_process(spec.layers)
        # checks come before any module: a wrong layout should fail in milliseconds
        check_supported(spec)
        self.sizes = {"tp": split.tp.axis.size, "ep": split.ep.size}
        check_sharding(spec.params, self.sizes)
        check_fp8_sharding(spec.params, self.sizes)
        self.spec, self.split, self.tp = spec, split, split.tp
        self.dropout, self.router = training.dropout, training.router
        self._add_embedding()
        # keyed by the layer's number in the whole model, so that names do not depend on the stage
        self.layers = nn.ModuleDict(
            {
                str(i): build_block(
                    spec.blocks[i],
                    select_prefix(spec.params, f"layers.{i}"),
                    ModuleContext(i, split, training),
                )
                for i in split.layers
            }
        )
        self._add_head()
        self.compiled = False
        self.compute: torch.dtype | None = None  # None: in the dtype of the parameters
        self.packed_only: Weights | None = None  # format of packed weights that were freed

    def _add_embedding(self) -> None:
        """Set the modules before the first block. A module is None if the model has none of its
        kind, and on ranks without the first stage. A tied embedding is also on the last stage.
        """
        spec, tp, first = self.spec, self.tp, self.split.first
        embedding, params = spec.embedding, spec.params
        # a tied head on another rank keeps a copy of the embedding
        has_table = first or (self.split.last and spec.head.tied)
        self.embed = Embedding(embedding, select_prefix(params, "embed"), tp) if has_table else None
        # OPT-350m: rows of 512, widened to 1,024
        width, norm = embedding.width, embedding.norm
        self.project_in = (
            ReplicatedLinear(select_prefix(params, "project_in"), tp) if first and width else None
        )
        self.embed_norm = (
            Norm(norm, select_prefix(params, "embed_norm"), self.split.kernels)
            if first and norm
            else None
        )
        self.positions = self._positions_table("positions", embedding.positions)
        self.block_positions = self._positions_table("block_positions", embedding.positions)
        types = PositionTable(embedding.types) if embedding.types else None
        self.types = self._positions_table("types", types)

    def _positions_table(self, name: str, table: PositionTable | None) -> PositionEmbedding | None:
        """Build the embedding table `name` (positions, second stream, or token types); None if the
        model has none, and on ranks without the first stage.
        """
        params = select_prefix(self.spec.params, name)
        return (
            PositionEmbedding(table, params, self.split.kernels)
            if self.split.first and table and params
            else None
        )

    def _add_head(self) -> None:
        """Set the modules after the last block. A module is None if the model has none of its kind,
        and on ranks without the last stage.
        """
        spec, tp, last, kernels = self.spec, self.tp, self.split.last, self.split.kernels
        # no leaves: no module, on ranks without the last stage as in models without one
        head_params = {
            name: select_prefix(spec.params, name) if last else {} for name in HEAD_MODULES
        }
        self.final_norm = (
            Norm(spec.final_norm, head_params["final_norm"], kernels)
            if last and spec.final_norm
            else None
        )
        self.project_out = (
            ReplicatedLinear(head_params["project_out"], tp) if head_params["project_out"] else None
        )
        # rows that are normalized first are read as they are, not multiplied
        head = ParameterModule if spec.head.normalised else ColumnParallelLinear
        self.head = head(head_params["head"]) if head_params["head"] else None
        self.score = ParameterModule(head_params["score"]) if head_params["score"] else None
        transform = spec.head.transform
        self.transform = (
            HeadTransform(transform, head_params["transform"], tp, kernels)
            if last and transform
            else None
        )
        self.pooler = ReplicatedLinear(head_params["pooler"], tp) if head_params["pooler"] else None
        self.follows = (
            ReplicatedLinear(head_params["follows"], tp) if head_params["follows"] else None
        )

    def compile_parts(self) -> None:
        """Compile, with torch.compile, each block and the final norm, and set `compiled` so that
        the loss of a chunk of tokens is compiled too. Call before sharding over dp. Of a block with
        data-dependent expert counts only attention is compiled.
        """
        for block in self.local_blocks():
            block.compile_static()
        if self.final_norm is not None:
            self.final_norm.compile()
        self.compiled = True

    def prepack(self, weights: Weights) -> None:
        """Let every linear use a packed copy of its weight, in the format `weights`, for products
        without gradients, until `disable_prepack`. Does nothing if the kernels use no packed form
        (on a GPU, and for exact numerics, as its products have other bits).
        """
        if not self.split.kernels.lays_out or self.split.kernels.exact is not None:
            return
        for module in self._parameter_modules():
            module.prepack(weights)

    def disable_prepack(self, keep: bool) -> None:
        """Stop using packed copies of weights. `keep`: retain them for the next `prepack`, which
        reuses those whose weights are unchanged.
        """
        for module in self._parameter_modules():
            module.disable_prepack(keep)

    def set_multi_lora(self, several: Mapping[str, MultiLora]) -> None:
        """Set the multi-LoRA adapters of weights, by weight name; weights that are not named have
        none, and {} removes all. They act only without gradients.
        """
        for name, module in self.named_modules():
            if isinstance(module, ParameterModule):
                module.set_multi_lora(several.get(f"{name}.weight"))

    def _parameter_modules(self) -> list[ParameterModule]:
        """Return every module that owns parameters."""
        return [module for module in self.modules() if isinstance(module, ParameterModule)]

    def local_specs(self) -> dict[str, ParamSpec]:
        """Return the spec of each parameter that this rank holds a part of, by its name."""
        return {name: self.spec.params[name] for name, _ in self.named_parameters()}

    def delayed_scaling(self) -> dict[str, Delayed]:
        """Return the fp8 delayed-scaling state of each weight of this rank, by its name."""
        return {
            f"{name}.weight": module.rounding.delayed
            for name, module in self.named_modules()
            if isinstance(module, ParameterModule)
            and module.rounding is not None
            and module.rounding.delayed is not None
        }

    def scaling(self) -> dict[str, Tensor]:
        """Return the tensors of fp8 delayed scaling by name: `amax_history/NAME` and
        `fp8_scale/NAME` of each weight of this rank.
        """
        return {
            f"{kind}/{name}": tensor
            for name, state in self.delayed_scaling().items()
            for kind, tensor in state.tensors.items()
        }

    def plan(self) -> dict[str, Places]:
        """Return, by parameter name, how each parameter of this rank is split over tp, or, for
        experts, over (ep, tp).
        """
        return {name: placements(param, self.sizes) for name, param in self.local_specs().items()}

    def partial(self) -> set[str]:
        """Return the names of the parameters whose gradient on each tp rank is a partial sum, which
        has to be all-reduced over tp.
        """
        return {name for name, param in self.local_specs().items() if is_partial(param, self.tp)}

    def units(self) -> list[Unit]:
        """Return the FSDP units of this rank: modules whose parameters are gathered and reduced
        together, inner ones before the block that contains them.
        """
        return [unit for block in self.local_blocks() for unit in (*block.units(), Unit(block))]

    def prefetch_order(self) -> list[list[list[nn.Module]]]:
        """Return the order in which ZeRO-3 prefetches: for each stage, for each block, its modules
        in order of use. Empty if all blocks are static: only where forward stops to read the device
        (dynamic MoE) does FSDP need an explicit order.
        """
        if all(block.mlp.static for block in self.local_blocks()):
            return []
        return [
            [[b, *(unit.module for unit in b.units())] for b in self.blocks(part)]
            for part in range(len(self.split.parts))
        ]

    def local_blocks(self) -> list[TransformerBlock]:
        """Return the blocks of all of this rank's stages, in order of layer number."""
        return [cast(TransformerBlock, block) for block in self.layers.values()]

    def blocks(self, part: int) -> list[TransformerBlock]:
        """Return the blocks of this rank's stage `part`, in order."""
        return [cast(TransformerBlock, self.layers[str(i)]) for i in self.split.parts[part].layers]

    @property
    def tied_across_ranks(self) -> nn.Parameter | None:
        """The tied embedding weight if first and last pipeline stage are on different ranks, so
        that the gradients of its two copies must be summed; otherwise None.
        """
        return (
            self.embed.weight
            if self.split.tied_across_ranks and self.spec.head.tied and self.embed is not None
            else None
        )

    def boundary(self, batch: int, length: int) -> Float[Tensor, "here hidden"]:
        """Return an uninitialised tensor [tokens, hidden] of the shape and dtype that crosses
        pipeline stages: `batch` * `length` tokens / cp, and / tp under sequence parallelism.
        """
        tokens = (
            batch
            * length
            // self.split.cp.axis.size
            // (self.tp.axis.size if self.tp.gathers else 1)
        )
        return torch.empty(
            tokens,
            self.spec.hidden_size,
            dtype=self.compute or dtype_of(self),
            device=self.device,
        )

    @property
    def device(self) -> torch.device:
        """Device of the computation: that of the parameters, or the CPU if weights were freed after
        packing (`load_inference_weights`), as those are on meta.
        """
        if self.packed_only is not None:  # freed weights are on meta; only a CPU frees them
            return torch.device("cpu")
        return next(self.parameters()).device

    def position_inputs(
        self,
        part: int,
        positions: Int64[Tensor, "streams b s"],
        lengths: Int64[Tensor, "#b #s"] | None = None,
    ) -> dict[tuple[AttentionPositions | None, int], PositionInputs]:
        """Return rope tables and ALiBi biases for stage `part`, one `PositionInputs` per distinct
        (positions spec, heads), in fp32 or wider. `positions` [streams, b, s] are per sequence, or
        shared by all (b = 1); `lengths`: length of each token's sequence, for length-dependent
        scalings.
        """
        dtype = torch.promote_types(self.compute or dtype_of(self), torch.float32)
        # a set of kinds: Gemma 3 has two, most models one
        mixers = [self.spec.blocks[i].mixer for i in self.split.parts[part].layers]
        return {
            kind: tables(*kind, positions, dtype, lengths, self.training)
            for kind in {(mixer.positions, mixer.heads) for mixer in mixers}
        }

    def forward(
        self,
        tokens: Int64[Tensor, "b s"],
        end: HeadFunction | None = None,
        cache: ForwardCache | None = None,
        noise: elementwise.Noise | None = None,
        documents: Documents | None = None,
        positions: PositionIds | None = None,
        balance: Mapping[int, RouterLosses] | None = None,
        x: Float[Tensor, "here hidden"] | None = None,
        part: int = 0,
        routes: Routes | None = None,
    ) -> Any:
        """Run the stage `part` of this rank on `tokens` [b, s], which are the same on every rank of
        tp and cp.

        The first stage embeds the tokens; others take `x`, the output of the stage before, [b * s /
        cp, hidden] (/ tp under sequence parallelism). Returns the residual stream in the same
        shape; the last stage returns `end`, a head function, of the last hidden vectors, or these
        if `end` is None.

        `noise` is required in training mode with dropout, and unused otherwise. `documents` and
        `positions` are those of whole sequences. With a KV `cache` b is 1, and the new tokens of
        several sequences follow one another. `balance`: router losses of each MoE layer; `routes`:
        forced or recorded experts (routing replay).
        """
        here = self.split.parts[part]
        # what is the same for all layers
        inputs = self._layer_inputs(tokens, noise, documents)
        ids = self._positions(tokens, cache, positions)
        # this cp rank's tokens (zigzag); a cache has them in their order
        mine = tokens if cache is not None else self.split.cp.split(tokens, 1)
        y = self._embed_tokens(mine, ids, inputs) if here.first else x
        assert y is not None, "a stage that is not the first is given x"
        # once per forward and kind of layer: 2 tables for Gemma 3's 26 to 62 layers
        known = self.position_inputs(part, ids, self._lengths(tokens, cache, positions))
        caches = None if cache is None else cache.layers
        if cache is not None and cache.is_compiled:
            _mark_tokens(y, known.values())
        for i, block in zip(here.layers, self.blocks(part), strict=True):
            mixer = self.spec.blocks[i].mixer
            where = known[mixer.positions, mixer.heads]
            # a layer's positions, router losses and noise
            layer = inputs.for_layer(i, where, (balance or {}).get(i), routes)
            if caches is None:
                y = block(y, layer)
            elif cache is not None and cache.is_compiled:
                y = block.compute_compiled(y, layer, caches[i])
            else:
                y = block(y, layer, caches[i])
        return self._apply_head(y, len(tokens), end) if here.last else y

    def _embed_tokens(self, tokens: Tensor, positions: Tensor, inputs: LayerInputs) -> Tensor:
        """Return the first block's input [this rank's tokens, hidden]: embeddings of `tokens` [b, s
        / cp], projection, positions, block positions, types, norm, dropout, as the model has.
        `positions` [streams, b, s / cp]; b may be 1 for all sequences.
        """
        assert self.embed is not None
        # tp ranks add up their rows of the vocabulary
        x = self.embed(tokens.reshape(-1))
        if self.project_in is not None:
            x = self.project_in(x)
        # BERT's types and GLM's block positions are the last stream, plain positions the first
        of_stream = (
            (self.positions, positions[0]),
            (self.block_positions, positions[-1]),
            (self.types, positions[-1]),
        )
        for table, stream in of_stream:
            if table is not None:
                x = x + table(
                    tensor.local_tokens(stream.expand(len(tokens), -1).reshape(-1), self.tp)
                )
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if inputs.noise is not None:
            assert inputs.rows is not None
            x = elementwise.dropout(
                x, self.dropout, inputs.noise, elementwise.EMBEDDING, inputs.rows
            )
        return x

    def _apply_head(self, x: Tensor, batch: int, end: HeadFunction | None) -> Any:
        """Return `end` (a head function) of the normed output of the last block and the model's
        head; the normed hidden vectors if `end` is None. Called inside forward, because ZeRO frees
        the head's gathered weight after it. `batch`: number of sequences. With exact numerics and
        gradients, a tied head multiplies by a copy of the embedding, whose gradients are added by a
        tree of their own, as those of an untied head are.
        """
        hidden = x if self.final_norm is None else self.final_norm(x)
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        if end is None:
            return hidden
        # embed is tied also on the last stage, where its copy is `tied_across_ranks`
        table = self.embed if self.spec.head.tied else self.head or self.score
        assert table is not None
        bias = None if self.head is None else self.head.bias
        weight = local(table.weight)
        if self.spec.head.tied and self.split.kernels.exact and torch.is_grad_enabled():
            weight = self.tp.copy_weight("head.weight", weight)
        head = HEADS[type(self.spec.head)](
            self.spec,
            self.split,
            weight,
            batch,
            self.compiled,
            None if bias is None else local(bias),
            self.transform,
            None if self.follows is None else self._next_sentence_logits,
            None if self.spec.head.normalised else table.linear().prepacked,
        )
        return end(hidden, head)

    def _next_sentence_logits(self, x: Float[Tensor, "here hidden"]) -> Float[Tensor, "here 2"]:
        """Return BERT's two next-sentence logits of each token's last hidden vector, W tanh(pooler
        x): only the first token's are meant to be used.
        """
        assert self.pooler is not None and self.follows is not None
        return self.follows(self.pooler(x).tanh())

    def _layer_inputs(
        self, tokens: Tensor, noise: elementwise.Noise | None, documents: Documents | None
    ) -> LayerInputs:
        """Return the inputs shared by all layers: this cp rank's documents, dropout noise and token
        indices. For a bidirectional model a document's prefix is all of it. Raises ValueError for
        prefixes in the batch that no layer uses.
        """
        batch, length = tokens.shape
        cp = self.split.cp
        if documents is not None and documents.reach is not None and not self.spec.has_prefix_mask:
            raise ValueError(
                "the batch has prefixes, but the model has no prefix mask: give batches without "
                "prefixes, or a model with one"
            )
        noise, rows = self._noise(noise, length)
        if self.spec.both_ways:
            none = torch.zeros(tokens.shape, dtype=torch.int64)  # where one document begins
            documents = (
                documents or Documents.from_starts(none).to_device(tokens.device)
            ).both_ways
        # this rank's queries, against the keys that cp brings
        here = None if documents is None else cp.documents(documents)
        return LayerInputs(batch, documents=here, noise=noise, rows=rows)

    def _positions(
        self, tokens: Tensor, cache: ForwardCache | None, positions: PositionIds | None
    ) -> Int64[Tensor, "streams _ here"]:
        """Return the positions of this rank's tokens, per sequence or for all: from the cache, from
        `positions`, or 0, 1, 2, ... Raises ValueError for sequences longer than the position table,
        and where the number of position streams is not the model's.
        """
        length, most, known = tokens.shape[1], self.spec.longest, self.spec.streams
        longest = length if positions is None else positions.longest
        longest = longest if cache is None else cache.longest
        if most is not None and longest > most:
            raise ValueError(
                f"{longest} tokens, but max_position_embeddings is {most}: use a shorter sequence"
            )
        if cache is not None:
            return cache.positions
        streams = 1 if positions is None else positions.ids.shape[1]
        if positions is None and self.spec.blanks is not None:
            raise ValueError(
                "the model's positions depend on special tokens: compute them with "
                "Batch.read_by(the model's spec)"
            )
        # BERT without types in the batch: all tokens have type 0
        typed = self.spec.embedding.types is not None
        if streams != known and not (positions is None and typed):
            raise ValueError(
                f"the model needs {known} position streams, but the batch has {streams}: add them "
                f"with Batch.add_positions({known})"
            )
        if positions is None:
            index = self.split.cp.indices(length, tokens.device)[None, None]
            return torch.cat((index, torch.zeros_like(index))) if typed else index
        # ids are [sequences, streams, length]
        return self.split.cp.split(positions.ids, 2).transpose(0, 1)

    def _lengths(
        self, tokens: Tensor, cache: ForwardCache | None, positions: PositionIds | None
    ) -> Int64[Tensor, "1 _"] | None:
        """Return the length of each token's sequence, or a single length [1, 1] for all; None if no
        layer's rope depends on it.
        """
        if not self.spec.by_length:
            return None
        if cache is not None:
            return cache.lengths
        longest = tokens.shape[1] if positions is None else positions.longest
        return scalar_tensor(longest, torch.int64, tokens.device)[None, None]

    def _noise(
        self, noise: elementwise.Noise | None, length: int
    ) -> tuple[elementwise.Noise | None, Tensor | None]:
        """Return (`noise`, index in the global batch of each token of this rank's residual stream);
        (None, None) in eval mode or without dropout. Raises ValueError if dropout needs noise and
        none is given.
        """
        if not self.training or self.dropout == 0:
            return None, None
        if noise is None:
            raise ValueError(
                f"training with dropout ({self.dropout}) needs `noise`: pass it, or set "
                f"--train.dropout 0"
            )
        index = self.split.cp.indices(length, noise.sequences.device)
        # of the whole batch, so that dropout does not depend on the layout
        rows = noise.sequences[:, None] * length + index
        return noise, tensor.local_tokens(rows.reshape(-1), self.tp)


def _mark_tokens(x: Tensor, tables: Iterable[PositionInputs]) -> None:
    """Tell torch.compile that the number of tokens of x [tokens, hidden] and of the position inputs
    may change from forward to forward.
    """
    compute.mark_dynamic(x, 0)
    for tensor_ in (t for table in tables for t in table if t is not None):
        compute.mark_dynamic(tensor_, 1)
