"""One decoder for every family: embedding, pre-norm blocks, final norm, head. Structure comes from ModelConfig alone.

    tokens [b, s] -> embed -> x [b * s, hidden] -> { x + attn(norm x);  x + mlp(norm x) } * layers -> norm -> head
                              `---------------- I@tp, or S(0)@tp under sequence parallelism ----------------'
"""

import torch
from torch import Tensor, nn

from dolmen.core.state import Placement, local
from dolmen.model.attention import Attention
from dolmen.model.config import ModelConfig
from dolmen.model.layers import Column, Embedding, Leaf, Norm, Positions
from dolmen.model.mlp import MLP
from dolmen.ops import dropout, rope
from dolmen.parallel import tensor
from dolmen.parallel.loss import linear_cross_entropy
from dolmen.parallel.tensor import TensorParallel


class Block(nn.Module):
    """One layer. x [batch * length, hidden] -> the same."""

    def __init__(self, c: ModelConfig, layer: int, tp: TensorParallel):
        super().__init__()
        self.attn_norm = Norm(c.hidden_size, c.norm, c.norm_eps, tp.residual_grad)
        self.attn = Attention(c, layer, tp)
        self.mlp_norm = Norm(c.hidden_size, c.norm, c.norm_eps, tp.residual_grad)
        self.mlp = MLP(c, tp)
        self.layer, self.dropout = layer, c.dropout

    def forward(self, x: Tensor, batch: int, cos: Tensor | None, sin: Tensor | None, cache=None, noise: dropout.Noise | None = None,
                rows: Tensor | None = None) -> Tensor:
        def drop(y: Tensor, site: int) -> Tensor:
            return y if noise is None else dropout.residual(y, self.dropout, noise, 3 * self.layer + site, rows)

        x = x + drop(self.attn(self.attn_norm(x), batch, cos, sin, cache, noise), 2)
        return x + drop(self.mlp(self.mlp_norm(x)), 3)


class Decoder(nn.Module):
    """The model. Build it on meta, place it (`plan`), shard it, then initialise or load it: see train/build.py.

    forward(tokens, labels) -> sum of the real tokens' losses, a scalar.   forward(tokens) -> logits of this rank's vocabulary.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel):
        super().__init__()
        if (tp.axis.size - 1) * -(-config.vocab_size // tp.axis.size) >= config.vocab_size:
            raise ValueError(f"vocab_size ({config.vocab_size}) leaves a rank of tp ({tp.axis.size}) without a row: use a smaller --layout.tp")
        self.config, self.tp = config, tp
        self.embed = Embedding(config.vocab_size, config.hidden_size, tp)
        self.positions = Positions(config.max_position_embeddings, config.hidden_size, tp) if config.position == "learned" else None
        self.layers = nn.ModuleDict({str(i): Block(config, i, tp) for i in range(config.num_hidden_layers)})
        self.final_norm = Norm(config.hidden_size, config.norm, config.norm_eps, tp.residual_grad)
        self.head = None if config.tie_word_embeddings else Column(config.hidden_size, config.vocab_size, bias=False)
        self.compiled = False

    def compile_parts(self) -> None:
        """torch.compile of what repeats: each block, and the loss of a chunk of tokens. Before sharding over dp."""
        for block in self.layers.values(): block.compile()
        self.compiled = True

    def plan(self) -> dict[str, Placement]:
        """Parameter name -> placement on tp: what the sharder carries out and the memory planner counts."""
        return {f"{prefix}.{name}": leaf.placements[name] for prefix, leaf in self.named_modules() if isinstance(leaf, Leaf)
                for name, _ in leaf.named_parameters(recurse=False)}

    def rope(self, positions: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """cos and sin of positions [b or 1, s], fp32, or Nones where positions are learned."""
        c, r = self.config, self.config.rope
        if c.position != "rope": return None, None
        inv = rope.inverse_frequencies(c.head_dim, r.theta, r.scaling, r.factor, r.low_freq_factor, r.high_freq_factor,
                                       r.original_max_position_embeddings, positions.device)
        return rope.tables(positions, inv)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, cache=None, noise: dropout.Noise | None = None) -> Tensor:
        """tokens, labels [b, s] int64, the same on every rank of tp; labels are already shifted, IGNORED where there is no loss.

        `noise` is required while training with dropout, and unused otherwise. `cache` (serve/cache.py) holds the keys and
        values of the tokens before these. Logits are [b, s, rows of this rank].
        """
        batch, length = tokens.shape
        start = 0 if cache is None else cache.length
        if start + length > self.config.max_position_embeddings and self.positions is not None:
            raise ValueError(f"{start + length} tokens, but the table of positions has {self.config.max_position_embeddings} "
                             "(max_position_embeddings): use a shorter sequence")
        positions = torch.arange(start, start + length, device=tokens.device)[None]
        cos, sin = self.rope(positions)
        x = self.embed(tokens.reshape(-1))
        if self.positions is not None: x = x + self.positions(tensor.own_tokens(positions.expand(batch, -1).reshape(-1), self.tp))
        noise, rows = self._noise(noise, length)
        if noise is not None: x = dropout.residual(x, self.config.dropout, noise, 0, rows)
        for name, block in self.layers.items():
            x = block(x, batch, cos, sin, None if cache is None else cache.layers[int(name)], noise, rows)
        x = self.final_norm(x)
        weight = local((self.head or self.embed).weight)
        if labels is not None: return linear_cross_entropy(x, weight, labels.reshape(-1), self.config.vocab_size, self.tp, self.compiled)
        return tensor.columns(x, [weight], [None], self.tp)[0].view(batch, length, -1)

    def _noise(self, noise: dropout.Noise | None, length: int) -> tuple[dropout.Noise | None, Tensor | None]:
        """`noise` where dropout acts, and the index in the global batch of each token of this rank's residual stream."""
        if not self.training or self.config.dropout == 0: return None, None
        if noise is None: raise ValueError(f"training with dropout ({self.config.dropout}) needs `noise`: pass it, or set --model.dropout 0")
        rows = noise.sequences[:, None] * length + torch.arange(length, device=noise.sequences.device)
        return noise, tensor.own_tokens(rows.reshape(-1), self.tp)
