"""Names of transformers that are no part of what it documents. Imported where one is called: it
takes 2.4 s.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def revert_weight_names(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a transformers model, by the names of its parameters, under the names
    that its files have, with fused experts split. transformers saves through this, and reads
    through its inverse. 5.23.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # a PreTrainedModel, which our stubs do not name
    return revert_weight_conversion(model, dict(tensors))  # pyright: ignore[reportArgumentType]


@contextmanager
def observe_attention(
    model: Any, name: str, see: Callable[[nn.Module, dict[str, Tensor]], None]
) -> Iterator[None]:
    """Context manager: inside, call `see(module, {query, key, value})` with the inputs of each
    attention of a model, [batch, heads, length, size], before its own eager function computes.
    `name` is registered for this with transformers. Does nothing for a model whose class does not
    let its attention be chosen. 5.23: the registries are public, which function is a class's own
    (`eager_attention_forward` of its file) is not.
    """
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.modeling_utils import AttentionInterface

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args, **options):
        """Call `see` with the inputs, then compute as the model's own file does."""
        see(module, {"query": query, "key": key, "value": value})
        eager = sys.modules[type(module).__module__].__dict__["eager_attention_forward"]
        return eager(module, query, key, value, *args, **options)

    before = model.config._attn_implementation
    if "eager_attention_forward" not in sys.modules[type(model).__module__].__dict__:
        yield
        return
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, eager_mask)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
