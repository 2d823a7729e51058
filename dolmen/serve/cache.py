"""What a model keeps of the tokens it has read, so that the next token costs one token and not the
whole text.

    Cache.layers[i].append(k, v) -> all keys and values so far
                                    [batch, length, kv_heads of this rank, head_dim]

A mixer says what that is by what it appends: keys and values of its heads, 2 * kv_heads * head_dim
numbers per token and layer in the dtype of the compute, or a latent and a rope key (kv_rank + rope
size). Each tp rank holds its own heads, and what all heads share whole; a batch is of equal length
throughout. All keys are kept, also where a sliding window sees the last of them alone.
"""

from torch import Tensor

from dolmen.model.tree import Tree


class LayerCache:
    """One layer's tensors, in memory that doubles when full, up to `maximum` tokens."""

    def __init__(self, maximum: int):
        self.maximum, self.length = maximum, 0
        self.kept: tuple[Tensor, ...] = ()

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Each [batch, new, ...], such as k and v with rope applied -> views [batch, length, ...]
        of all. Written in place: no autograd. Raises ValueError past `maximum`.
        """
        end = self.length + new[0].shape[1]
        if end > self.maximum:
            raise ValueError(
                f"{end} tokens are over the cache's maximum ({self.maximum}): give Cache a "
                f"larger one"
            )
        if not self.kept or end > self.kept[0].shape[1]:
            old = self.kept or (None,) * len(new)
            self.kept = tuple(self._grown(*pair, end) for pair in zip(old, new, strict=True))
        for kept, tensor in zip(self.kept, new, strict=True):
            kept[:, self.length : end] = tensor
        self.length = end
        return tuple(kept[:, :end] for kept in self.kept)

    def _grown(self, old: Tensor | None, like: Tensor, end: int) -> Tensor:
        capacity = min(self.maximum, max(end, 2 * self.length))
        new = like.new_empty((like.shape[0], capacity, *like.shape[2:]))
        if old is not None:
            new[:, : self.length] = old[:, : self.length]
        return new


class Cache:
    """What `Decoder.forward(tokens, cache=...)` reads and fills: an entry per layer."""

    def __init__(self, model: Tree, maximum: int):
        self.layers = [LayerCache(maximum) for _ in model.blocks]

    @property
    def length(self) -> int:
        """Tokens that every layer holds: the position of the next one."""
        return self.layers[-1].length
