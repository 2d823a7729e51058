"""Names of transformers that are no part of what it documents. Imported where one is called: it
takes 2.4 s.
"""

from collections.abc import Mapping

from torch import Tensor, nn


def as_stored(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of the parameters of a model of transformers -> under the names that
    its files have, experts apart. It saves through this, and reads through its inverse. 5.23.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # a PreTrainedModel, which our stubs do not name
    return revert_weight_conversion(model, dict(tensors))  # pyright: ignore[reportArgumentType]
