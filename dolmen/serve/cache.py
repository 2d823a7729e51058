"""Keys and values of the tokens a model has read, so that the next token costs one token and not
the whole text.

    Cache.layers[i].append(k, v) -> all keys and values so far
                                    [batch, length, kv_heads of this rank, head_dim]

Each tp rank holds its own heads; a batch is of equal length throughout. All keys are kept, also
where a sliding window sees the last of them alone. A token takes 2 * kv_heads * head_dim numbers a
layer, in the dtype of the compute.
"""

from torch import Tensor

from dolmen.model import tree


class LayerCache:
    """One layer's keys and values, in memory that doubles when full, up to `maximum` tokens."""

    def __init__(self, maximum: int):
        self.maximum, self.length = maximum, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [batch, new, kv_heads, head_dim], rope applied -> views [batch, length, ...] of all.
        Written in place: no autograd. Raises ValueError past `maximum`.
        """
        end = self.length + k.shape[1]
        if end > self.maximum:
            raise ValueError(
                f"{end} tokens are over the cache's maximum ({self.maximum}): give Cache a "
                f"larger one"
            )
        if self.keys is None or end > self.keys.shape[1]:
            self.keys = self._grown(self.keys, k, end)
            self.values = self._grown(self.values, v, end)
        self.keys[:, self.length : end], self.values[:, self.length : end] = k, v
        self.length = end
        return self.keys[:, :end], self.values[:, :end]

    def _grown(self, old: Tensor | None, like: Tensor, end: int) -> Tensor:
        capacity = min(self.maximum, max(end, 2 * self.length))
        new = like.new_empty((like.shape[0], capacity, *like.shape[2:]))
        if old is not None:
            new[:, : self.length] = old[:, : self.length]
        return new


ENTRIES = {tree.Attention: LayerCache}  # what a mixer keeps


class Cache:
    """What `Decoder.forward(tokens, cache=...)` reads and fills: an entry per layer, of the kind
    that its mixer keeps.
    """

    def __init__(self, model: tree.Tree, maximum: int):
        self.layers = [ENTRIES[type(block.mixer)](maximum) for block in model.blocks]

    @property
    def length(self) -> int:
        """Tokens that every layer holds: the position of the next one."""
        return self.layers[-1].length
