"""What families of GLM without a class in transformers compute, from their papers' equations and
with the conventions of the code that came with their weights: which tokens see which, and where
each stands, follows from special tokens among them.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from plain import Plain
from torch import Tensor, nn

IDS = {"mask": 55, "smask": 54, "gmask": 56, "sop": 57, "cls": 58, "eos": 59}
NAMED = {"[MASK]": 55, "[sMASK]": 54, "[gMASK]": 56, "<|startofpiece|>": 57}
Placed = tuple[int, list[int], list[int]]
"""How many first tokens see one another, and both streams of positions."""


class Mlp(nn.Module):
    """`gate`: which half of what is stored the activation is of; None: it is not gated."""

    def __init__(self, hidden: int, inner: int, act: Callable, gate: int | None, bias: bool):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden, inner * (1 if gate is None else 2), bias)
        self.dense_4h_to_h = nn.Linear(inner, hidden, bias)
        self.act = self.act_fn = act
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        y = self.dense_h_to_4h(x)
        if self.gate is None:
            return self.dense_4h_to_h(self.act(y))
        halves = y.chunk(2, -1)
        return self.dense_4h_to_h(self.act(halves[self.gate]) * halves[1 - self.gate])


class Attention(nn.Module):
    """`apart`: rows of the stored tensor are all of q, then k, then v; else those of each head."""

    def __init__(self, hidden: int, heads: int, groups: int, size: int, separate: bool, bias: bool):
        super().__init__()
        self.counts, self.size, self.apart = (heads, groups, groups), size, separate
        self.query_key_value = nn.Linear(hidden, sum(self.counts) * size, True)
        self.dense = nn.Linear(heads * size, hidden, bias)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, each [..., heads, size]."""
        y = self.query_key_value(x)
        if self.apart:
            each = y.split([n * self.size for n in self.counts], -1)
            return tuple(t.unflatten(-1, (-1, self.size)) for t in each)
        return y.unflatten(-1, (self.counts[0], 3 * self.size)).chunk(3, -1)

    def forward(self, x: Tensor, turned: Callable[[Tensor], Tensor], seen: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q, k = turned(q), turned(k)
        k, v = (t.repeat_interleave(self.counts[0] // self.counts[1], -2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(self.size)
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        return self.dense(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2))


class Block(nn.Module):
    """`alpha`: of DeepNorm; None: a norm before each layer."""

    def __init__(
        self, norm: Callable, attention: str, own: nn.Module, mlp: Mlp, alpha: float | None
    ):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.add_module(attention, own)
        self.own, self.mlp, self.alpha = [own], mlp, alpha  # a list: no second name of it

    def forward(self, x: Tensor, turned: Callable[[Tensor], Tensor], seen: Tensor) -> Tensor:
        y = self.input_layernorm(x)
        x = (x if self.alpha is None else self.alpha * y) + self.own[0](y, turned, seen)
        y = self.post_attention_layernorm(x)
        return (x if self.alpha is None else self.alpha * y) + self.mlp(y)


class Glm(Plain):
    """A subclass makes its modules by the names of files, among them `blocks`, and says what is
    done before and after them.
    """

    blocks: list[Block]
    named: dict[str, int] = {}  # token -> id
    asked: int | None = None
    """Tokens of a prompt that is being continued: what follows says nothing of positions."""

    def save_pretrained(self, folder: Path, **options: Any) -> None:
        """With what names the tokens that config.json does not."""
        super().save_pretrained(folder, **options)
        (folder / "added_tokens.json").write_text(json.dumps(self.named))

    def place(self, tokens: list[int]) -> Placed:
        """Of a text."""
        raise NotImplementedError

    def embed(self, tokens: Tensor, streams: Tensor) -> Tensor:
        raise NotImplementedError

    def turn(self, x: Tensor, streams: Tensor) -> Tensor:
        """Queries or keys [b, s, heads, size] at `streams` [b, 2, s] of positions."""
        raise NotImplementedError

    def ended(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def logits(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        seen = torch.ones(length, length).tril().bool().repeat(len(tokens), 1, 1)
        streams = torch.zeros(len(tokens), 2, length, dtype=torch.int64)
        for i, row in enumerate(tokens.tolist()):
            prefix, first, second = self.place(row)
            seen[i, :, :prefix] = True
            streams[i] = torch.tensor([first, second])
        x = self.embed(tokens, streams)
        for block in self.blocks:
            x = block(x, lambda heads: self.turn(heads, streams), seen)
        return self.ended(x)

    def generate(self, prompts: Tensor, max_new_tokens: int = 16, **options: Any) -> Tensor:
        reported = getattr(self.generation_config, "max_new_tokens", None) or max_new_tokens
        self.asked = prompts.shape[1]
        try:
            return super().generate(prompts, reported, **options)
        finally:
            self.asked = None

    def filled(self, tokens: list[int], sop: int, marked: Callable[[list[int]], Any]) -> Placed:
        """`marked`: of what is before <sop> the position of the mask, how many tokens from <sop>
        on still have their index; None where nothing marks a blank.
        """
        known, count = tokens[: self.asked], range(len(tokens))
        begin = known.index(sop) if sop in known else None
        found = None if begin is None else marked(known[:begin])
        if found is None:
            return 0, [*count], [0] * len(tokens)
        at, more = found
        first = [i if i < begin + more else at for i in count]
        return begin, first, [max(0, i - begin + 1) for i in count]


def rotate(x: Tensor, positions: Tensor, halved: bool, neighbours: bool, base: float) -> Tensor:
    """x [b, s, heads, size] turned by positions [b, s]."""
    size = x.shape[-1]
    inv = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if halved:
        inv = inv.half()
    elif x.dtype == torch.float64:
        inv = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = positions[..., None, None].to(x.dtype) * inv.to(x.dtype)
    cos, sin = angle.cos(), angle.sin()
    if neighbours:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class ChatGlm(Glm):
    """ChatGLM-6B. The head is the embedding, under two names in a file."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        c = self.config
        hidden, heads = c.hidden_size, c.num_attention_heads

        def norm() -> nn.Module:
            return nn.LayerNorm(hidden, eps=c.layernorm_epsilon)

        def block() -> Block:
            own = Attention(hidden, heads, heads, hidden // heads, False, True)
            gelu = nn.GELU(approximate="tanh")
            mlp = Mlp(hidden, c.inner_hidden_size, gelu, None, True)
            return Block(norm, "attention", own, mlp, math.sqrt(2 * 28))

        self.blocks = [block() for _ in range(c.num_layers)]
        self.transformer = nn.Module()
        self.transformer.word_embeddings = nn.Embedding(c.vocab_size, hidden)
        self.transformer.layers = nn.ModuleList(self.blocks)
        self.transformer.final_layernorm = norm()
        self.lm_head = nn.Linear(hidden, c.vocab_size, bias=False)
        if config.get("tie_word_embeddings", True):
            self.lm_head.weight = self.transformer.word_embeddings.weight

    def place(self, tokens: list[int]) -> Placed:
        c = self.config
        newer = "gmask_token_id" in self.content

        def marked(prefix: list[int]) -> tuple[int, int] | None:
            if newer:
                order = [(c.gmask_token_id, 0), (c.mask_token_id, 0)]
            else:  # only <sop> keeps its own index
                order = [(150000, 0), (150001, 1)]
            for token, more in order:
                if token in prefix:
                    return prefix.index(token), more
            return None

        return self.filled(tokens, c.bos_token_id, marked)

    def embed(self, tokens: Tensor, streams: Tensor) -> Tensor:
        return self.transformer.word_embeddings(tokens)

    def turn(self, x: Tensor, streams: Tensor) -> Tensor:
        parts = zip(x.chunk(2, -1), streams.unbind(1), strict=True)
        return torch.cat([rotate(part, own, True, False, 10000.0) for part, own in parts], -1)

    def ended(self, x: Tensor) -> Tensor:
        return self.lm_head(self.transformer.final_layernorm(x))


class ChatGlm2(Glm):
    """ChatGLM2-6B, ChatGLM3-6B, GLM-4-9B: causal, one stream."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        c = self.config
        hidden = c.hidden_size

        def norm() -> nn.Module:
            return nn.RMSNorm(hidden, eps=c.layernorm_epsilon)

        def block() -> Block:
            sizes = c.num_attention_heads, c.multi_query_group_num, c.kv_channels
            own = Attention(hidden, *sizes, True, False)
            mlp = Mlp(hidden, c.ffn_hidden_size, F.silu, 0, False)
            return Block(norm, "self_attention", own, mlp, None)

        self.blocks = [block() for _ in range(c.num_layers)]
        self.transformer = nn.Module()
        self.transformer.embedding = nn.Module()
        self.transformer.embedding.word_embeddings = nn.Embedding(c.padded_vocab_size, hidden)
        self.transformer.encoder = nn.Module()
        self.transformer.encoder.layers = nn.ModuleList(self.blocks)
        self.transformer.encoder.final_layernorm = norm()
        self.transformer.output_layer = nn.Linear(hidden, c.padded_vocab_size, bias=False)

    def place(self, tokens: list[int]) -> Placed:
        return 0, [*range(len(tokens))], [0] * len(tokens)

    def embed(self, tokens: Tensor, streams: Tensor) -> Tensor:
        return self.transformer.embedding.word_embeddings(tokens)

    def turn(self, x: Tensor, streams: Tensor) -> Tensor:
        first, rest = x.chunk(2, -1)
        positions, base, ratio = streams[:, 0], 10000.0, self.config.rope_ratio
        if "chatglm2-6b-32k" in self.config._name_or_path:
            positions = positions / ratio
        else:
            base *= ratio
        return torch.cat((rotate(first, positions, False, True, base), rest), -1)

    def ended(self, x: Tensor) -> Tensor:
        return self.transformer.output_layer(self.transformer.encoder.final_layernorm(x))


class Glm10B(Glm):
    """GLM-10B: two tables of positions, the first mask of any kind marks the blank."""

    named = NAMED

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        c = self.config
        hidden, heads = c.hidden_size, c.num_attention_heads

        def norm() -> nn.Module:
            return nn.LayerNorm(hidden, eps=1e-5)

        def block() -> Block:
            own = Attention(hidden, heads, heads, hidden // heads, True, True)
            return Block(norm, "attention", own, Mlp(hidden, 4 * hidden, F.gelu, None, True), None)

        self.blocks = [block() for _ in range(c.num_layers)]
        self.glm = nn.Module()
        self.glm.word_embeddings = nn.Embedding(c.vocab_size, hidden)
        self.glm.transformer = nn.Module()
        self.glm.transformer.position_embeddings = nn.Embedding(c.max_sequence_length + 1, hidden)
        self.glm.transformer.block_position_embeddings = nn.Embedding(
            c.max_sequence_length + 1, hidden
        )
        self.glm.transformer.layers = nn.ModuleList(self.blocks)
        self.glm.transformer.final_layernorm = norm()

    def place(self, tokens: list[int]) -> Placed:
        ids = IDS

        def marked(prefix: list[int]) -> tuple[int, int] | None:
            masks = [i for i, t in enumerate(prefix) if t in (ids["mask"], ids["gmask"])]
            return (masks[0], 0) if masks else None

        return self.filled(tokens, ids["sop"], marked)

    def embed(self, tokens: Tensor, streams: Tensor) -> Tensor:
        inner = self.glm.transformer
        first, second = streams.unbind(1)
        extra = inner.position_embeddings(first) + inner.block_position_embeddings(second)
        return self.glm.word_embeddings(tokens) + extra

    def turn(self, x: Tensor, streams: Tensor) -> Tensor:
        return x

    def ended(self, x: Tensor) -> Tensor:
        return F.linear(self.glm.transformer.final_layernorm(x), self.glm.word_embeddings.weight)


class Glm130B(Glm):
    """GLM-130B: one stream, which counts on behind [gMASK] and stays behind [MASK]."""

    named = NAMED

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        c = self.config
        hidden, heads = c.hidden_size, c.num_attention_heads

        def norm() -> nn.Module:
            return nn.LayerNorm(hidden, eps=c.layernorm_epsilon)

        def block() -> Block:
            own = Attention(hidden, heads, heads, hidden // heads, False, True)
            mlp = Mlp(hidden, c.inner_hidden_size, F.gelu, 1, True)
            return Block(norm, "attention", own, mlp, math.sqrt(2 * c.num_layers))

        self.blocks = [block() for _ in range(c.num_layers)]
        self.transformer = nn.Module()
        self.transformer.word_embeddings = nn.Embedding(c.vocab_size, hidden)
        self.transformer.layers = nn.ModuleList(self.blocks)
        self.transformer.final_layernorm = norm()

    def place(self, tokens: list[int]) -> Placed:
        ids = IDS

        def marked(prefix: list[int]) -> tuple[int, int] | None:
            if ids["mask"] in prefix:
                return prefix.index(ids["mask"]), 0
            return (0, len(tokens)) if ids["gmask"] in prefix else None

        return self.filled(tokens, ids["sop"], marked)

    def embed(self, tokens: Tensor, streams: Tensor) -> Tensor:
        return self.transformer.word_embeddings(tokens)

    def turn(self, x: Tensor, streams: Tensor) -> Tensor:
        return rotate(x, streams[:, 0], True, False, 10000.0)

    def ended(self, x: Tensor) -> Tensor:
        return F.linear(
            self.transformer.final_layernorm(x), self.transformer.word_embeddings.weight
        )


def layer(model: Glm, x: Tensor) -> tuple[dict[str, Tensor], nn.Module]:
    """What layer 1 makes of x, and its feed-forward layer."""
    block = model.blocks[1]
    each = zip("qkv", block.own[0].split(x), strict=True)
    return {name: t.flatten(-2) for name, t in each}, block.mlp
