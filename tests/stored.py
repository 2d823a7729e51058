"""What is stored of a model beside its weights: of those that gradients train alone."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dolmen.conversion.hf_export import export_weights
from dolmen.families import ModelConfig, weight_map


def exported_trained(
    model: ModelConfig, full: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """As export_weights, each parameter once: (stored name, tensor) made of what `full(our name)`
    gives, gradients or moments; `full` is not asked for what no gradient trains, as a bias that
    balances experts.
    """
    params, entries = model.spec.params, weight_map(model).entries

    def trained_full(name: str) -> Tensor:
        return full(name) if params[name].trained else torch.empty(params[name].shape)

    for stored, tensor in export_weights(model, trained_full):
        if stored in entries and params[entries[stored].ours[0]].trained:
            yield stored, tensor
