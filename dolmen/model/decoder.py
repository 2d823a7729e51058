"""One decoder for every family: embedding, pre-norm blocks, final norm, head. Structure comes from
ModelConfig alone.

    tokens [b, s] -> embed -> x [b * s, hidden]
                  -> { x + attn(norm x);  x + mlp(norm x) } * layers -> norm -> head

x is I@tp, or S(0)@tp under sequence parallelism.

A rank holds the parts of it that its pipeline schedule gives it, under their names in the whole,
and under context parallelism s is its part of every sequence. Both are in `Split`; on one process
it is all there is.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dolmen.core.state import Places, local
from dolmen.model.attention import Attention
from dolmen.model.config import ModelConfig
from dolmen.model.given import Balance, Given
from dolmen.model.layers import Column, Embedding, Leaf, Norm, Positions
from dolmen.model.mlp import MLP
from dolmen.model.moe import MoE
from dolmen.model.split import Split, whole
from dolmen.ops import dropout, rope
from dolmen.parallel import tensor
from dolmen.parallel.data import Unit
from dolmen.parallel.loss import linear_cross_entropy
from dolmen.parallel.recompute import again


class Block(nn.Module):
    """One layer. x [batch * length, hidden] -> the same."""

    def __init__(self, c: ModelConfig, layer: int, split: Split):
        super().__init__()
        norm = (c.hidden_size, c.norm, c.norm_eps, split.tp.residual_grad, split.kernels)
        self.attn_norm = Norm(*norm)
        self.attn = Attention(c, layer, split)
        self.mlp_norm = Norm(*norm)
        self.mlp = MoE(c, split) if c.sparse(layer) else MLP(c, split.tp)
        self.layer, self.dropout, self.whole = layer, c.dropout, split.recompute.of(layer) == "full"

    def forward(self, x: Tensor, given: Given, cache=None) -> Tensor:
        return (
            again(self._layer, x, given)
            if self.whole and cache is None
            else self._layer(x, given, cache)
        )

    def _layer(self, x: Tensor, given: Given, cache=None) -> Tensor:
        def drop(y: Tensor, site: int) -> Tensor:
            return (
                y
                if given.noise is None
                else dropout.residual(
                    y, self.dropout, given.noise, given.noise.site(site), given.rows
                )
            )

        x = x + drop(self.attn(self.attn_norm(x), given, cache), 2)
        return x + drop(self.mlp(self.mlp_norm(x), given), 3)


class Decoder(nn.Module):
    """The model, or this rank's stages of it. Build it on meta, place it (`plan`), shard it, then
    initialise or load it: see train/build.py.

    forward(tokens, labels) -> sum of the real tokens' losses, a scalar
    forward(tokens)         -> logits of this rank's vocabulary
    """

    def __init__(self, config: ModelConfig, split: Split | None = None):
        """`split` None: all of it, in one process."""
        super().__init__()
        split = split or whole(config.num_hidden_layers)
        tp = split.tp
        if (tp.axis.size - 1) * -(-config.vocab_size // tp.axis.size) >= config.vocab_size:
            raise ValueError(
                f"vocab_size ({config.vocab_size}) leaves a rank of tp ({tp.axis.size}) without a "
                f"row: use a smaller --layout.tp"
            )
        self.config, self.split, self.tp, tied = config, split, tp, config.tie_word_embeddings
        self.embed = (
            Embedding(config.vocab_size, config.hidden_size, tp)
            if split.first or split.last and tied
            else None
        )
        learned = split.first and config.position == "learned"
        self.positions = (
            Positions(config.max_position_embeddings, config.hidden_size, tp) if learned else None
        )
        self.layers = nn.ModuleDict({str(i): Block(config, i, split) for i in split.layers})
        self.final_norm = (
            Norm(config.hidden_size, config.norm, config.norm_eps, tp.residual_grad, split.kernels)
            if split.last
            else None
        )
        self.head = (
            Column(config.hidden_size, config.vocab_size, bias=False)
            if split.last and not tied
            else None
        )
        self.compiled, self.compute = False, None  # None: in the dtype of the parameters

    def compile_parts(self) -> None:
        """torch.compile of what repeats: each block, and the loss of a chunk of tokens. Before
        sharding over dp. Of sparse blocks only attention, where how many rows an expert gets is
        read.
        """
        for block in self.layers.values():
            static = not isinstance(block.mlp, MoE) or block.mlp.static
            (block if static else block.attn).compile()
        self.compiled = True

    def plan(self) -> dict[str, Places]:
        """Parameter name -> placement on tp, of experts on (ep, tp): what the sharder carries out
        and the memory planner counts.
        """
        return {
            f"{prefix}.{name}": leaf.placements[name]
            for prefix, leaf in self.named_modules()
            if isinstance(leaf, Leaf)
            for name, _ in leaf.named_parameters(recurse=False)
        }

    def partial(self) -> set[str]:
        """Names of the parameters whose gradient on tp is a partial sum."""
        return {
            f"{prefix}.{name}"
            for prefix, leaf in self.named_modules()
            if isinstance(leaf, Leaf)
            for name, grad in leaf.gradients.items()
            if grad is not None
        }

    def units(self) -> list[Unit]:
        """What is gathered and reduced together over fsdp, inner modules first."""
        out = []
        for block in self.layers.values():
            if isinstance(block.mlp, MoE):
                out += [Unit(block.mlp.router, precise=True), Unit(block.mlp.experts, experts=True)]
            out.append(Unit(block))
        return out

    def ahead(self) -> list[list[list[nn.Module]]]:
        """What to gather ahead (data.prefetch): of each stage, each block's units in the order of
        use. Empty where forward does not stop to read the device.
        """
        sparse = [b.mlp for b in self.layers.values() if isinstance(b.mlp, MoE)]
        if all(mlp.static for mlp in sparse):
            return []
        return [
            [
                [b, *((b.mlp.router, b.mlp.experts) if isinstance(b.mlp, MoE) else ())]
                for b in self.blocks(part)
            ]
            for part in range(len(self.split.parts))
        ]

    def blocks(self, part: int) -> list[Block]:
        """The layers of one of this rank's stages."""
        return [self.layers[str(i)] for i in self.split.parts[part].layers]

    @property
    def tied_apart(self) -> nn.Parameter | None:
        """The weight that this rank shares with the other end of the pipeline."""
        return (
            self.embed.weight
            if self.split.tied_apart and self.config.tie_word_embeddings and self.embed is not None
            else None
        )

    def boundary(self, batch: int, length: int) -> Tensor:
        """An empty residual stream of this rank, as it crosses stages."""
        tokens = (
            batch
            * length
            // self.split.cp.axis.size
            // (self.tp.axis.size if self.tp.gathers else 1)
        )
        weight = next(self.parameters())
        return torch.empty(
            tokens,
            self.config.hidden_size,
            dtype=self.compute or weight.dtype,
            device=weight.device,
        )

    def rope(self, positions: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """cos and sin of positions [b or 1, s], fp32 or wider, or Nones where positions are
        learned.
        """
        c, r = self.config, self.config.rope
        if c.position != "rope":
            return None, None
        inv = rope.inverse_frequencies(
            c.head_dim,
            r.theta,
            r.scaling,
            r.factor,
            r.low_freq_factor,
            r.high_freq_factor,
            r.original_max_position_embeddings,
            positions.device,
            torch.promote_types(self.compute or next(self.parameters()).dtype, torch.float32),
        )
        return rope.tables(positions, inv)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        cache=None,
        noise: dropout.Noise | None = None,
        starts: Tensor | None = None,
        balance: Mapping[int, Balance] | None = None,
        x: Tensor | None = None,
        part: int = 0,
        host: Tensor | None = None,
    ) -> Tensor:
        """tokens, labels [b, s] int64, the same on every rank of tp and cp; labels are already
        shifted, IGNORED where there is no loss. Of a pipeline, the stage `part` of this rank: `x`
        is what the stage before gave, [b * s / cp, hidden] (/ tp under sequence parallelism), and
        so is the result of all but the last.

        `noise` is required while training with dropout, and unused otherwise. `starts` [b, s]
        int64: where each token's document starts, `host` the same on the host, which without it
        waits for them. `cache` (serve/cache.py) holds the keys and values of the tokens before
        these. `balance`: of each layer of experts. Logits are [b, s / cp, rows of this rank].
        """
        here, cp = self.split.parts[part], self.split.cp
        given, positions = self._given(tokens, cache, noise, starts, host)
        if here.first:
            x = self.embed(cp.split(tokens, 1).reshape(-1))
            if self.positions is not None:
                x = x + self.positions(
                    tensor.own_tokens(positions.expand(len(tokens), -1).reshape(-1), self.tp)
                )
            if given.noise is not None:
                x = dropout.residual(x, self.config.dropout, given.noise, 0, given.rows)
        for block in self.blocks(part):
            kept = None if cache is None else cache.layers[block.layer]
            x = block(x, given.of_layer(block.layer, (balance or {}).get(block.layer)), kept)
        if not here.last:
            return x
        x = self.final_norm(x)
        weight = local((self.head or self.embed).weight)
        if labels is None:
            return tensor.columns(x, [weight], [None], self.tp)[0].view(
                len(tokens), -1, weight.shape[0]
            )
        return linear_cross_entropy(
            x,
            weight,
            cp.split(labels, 1).reshape(-1),
            self.config.vocab_size,
            self.tp,
            self.compiled,
            self.split.kernels.logits_at_once,
        )

    def _given(
        self,
        tokens: Tensor,
        cache,
        noise: dropout.Noise | None,
        starts: Tensor | None,
        host: Tensor | None,
    ) -> tuple[Given, Tensor]:
        """What all layers share, and the positions [1, s / cp] of this rank's tokens."""
        (batch, length) = tokens.shape
        start = 0 if cache is None else cache.length
        cp = self.split.cp
        most = self.config.max_position_embeddings
        if start + length > most and self.config.position == "learned":
            raise ValueError(
                f"{start + length} tokens, but the table of positions has {most} "
                f"(max_position_embeddings): use a shorter sequence"
            )
        positions = start + cp.indices(length, tokens.device)[None]
        noise, rows = self._noise(noise, length, positions[0])
        documents = None if starts is None else cp.documents(starts, host)
        return Given(batch, *self.rope(positions), documents, noise, rows), positions

    def _noise(
        self, noise: dropout.Noise | None, length: int, positions: Tensor
    ) -> tuple[dropout.Noise | None, Tensor | None]:
        """`noise` where dropout acts, and the index in the global batch of each token of this
        rank's residual stream.
        """
        if not self.training or self.config.dropout == 0:
            return None, None
        if noise is None:
            raise ValueError(
                f"training with dropout ({self.config.dropout}) needs `noise`: pass it, or set "
                f"--model.dropout 0"
            )
        rows = noise.sequences[:, None] * length + positions
        return noise, tensor.own_tokens(rows.reshape(-1), self.tp)
