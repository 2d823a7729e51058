"""LoRA options of a run, and the weights that a target names: as in PEFT the last part of a
module's name in transformers, in every layer that has one, or all linear layers but the head.

    q_proj        model.layers.0.self_attn.q_proj, ...          -> layers.0.attn.q.weight, ...
    c_attn        one fused tensor in transformers' GPT-2        -> q, k and v, an adapter each
    gate_proj     model.layers.0.mlp.experts.0.gate_proj, ...   -> of every expert
"""

from collections.abc import Collection
from dataclasses import fields
from typing import Annotated, Literal

from dolmen.core.config import AboveZero, Positive, config, require
from dolmen.core.messages import brief
from dolmen.families.model import ModelConfig
from dolmen.families.weights import weight_map
from dolmen.model.spec import LoraSpec
from dolmen.model.spec.lora import ADAPTED

ALL = "all-linear"


@config("adapter")
class AdapterConfig:
    """Low-rank adapters (LoRA), trained while the model's own weights are frozen."""

    rank: Positive | None = None
    """Rank of LoRA adapters to train in place of all parameters. y = W x + alpha / rank * B A x,
    where A has `rank` rows and B `rank` columns; W and all other parameters of the model are
    frozen. Default: no adapters.
    """
    alpha: AboveZero = 16.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], require(bool, f"a layer, such as q_proj, or {ALL}")] = (
        ALL,
    )
    """Layers with an adapter, by the last part of their name in transformers, as PEFT's
    target_modules: q_proj k_proj v_proj o_proj gate_proj up_proj down_proj. In an MoE model each
    expert has its own adapter. all-linear: all linear layers but the head and routers.
    """
    frozen: Literal["whole", "int8"] = "whole"
    """Storage of the frozen weights. whole: like trained weights. int8: matrices of layers and
    experts in eight bits with a scale per output, a quarter of the memory.
    """
    scaling: Literal["rank", "root"] = "rank"
    """Divisor of alpha. rank: the rank; root: its square root (rsLoRA, PEFT's use_rslora), so
    that adapters of high rank do not learn more slowly.
    """
    kind: Literal["lora", "dora"] = "lora"
    """lora: B A x is added. dora: the magnitude of each row of W is a trained parameter, and B A
    changes only the row's direction (2402.09353).
    """

    def __post_init__(self):
        """Raise ValueError for an option without a rank, which would have no effect."""
        # options that would have no effect
        options = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        if self.rank is None and options:
            raise ValueError(
                f"adapter.{options[0]} is {brief(getattr(self, options[0]))}, but there are no "
                "adapters: set --adapter.rank, such as 8"
            )

    def resolve(self, model: ModelConfig) -> LoraSpec | None:
        """Return the LoRA spec of a model; None if no rank is set. Raises ValueError for a target
        that the model lacks, and for a rank above that of every matrix.
        """
        if self.rank is None:
            return None
        names = targets(model, self.targets)
        # B A cannot have a higher rank than W
        highest = max(min(model.spec.params[name].shape[-2:]) for name in names)
        if self.rank > highest:
            raise ValueError(
                f"adapter.rank is {self.rank}: the matrices of adapter.targets have at most rank "
                f"{highest}; set --adapter.rank {highest} or less, such as 8"
            )
        return LoraSpec(self.rank, self.alpha, names, self.frozen, self.scaling, self.kind)


def targets(model: ModelConfig, names: Collection[str]) -> frozenset[str]:
    """Return the full names of our weights that get an adapter: of every module, in every layer,
    whose name in transformers ends in one of `names` (q_proj); with "all-linear" of all that can
    have one. Raises ValueError for a name that selects none.
    """
    known = _module_weights(model)
    if unknown := sorted(set(names) - known.keys() - {ALL}):
        head = (
            ": adapters of the LM head are not supported"
            if unknown[0] == _module_name(weight_map(model).head)
            else ""
        )
        raise ValueError(
            f"adapter.targets has {unknown[0]}, which is not a layer of {model.model_type} that "
            f"can have an adapter{head}: choose from {', '.join(known)}, or {ALL}"
        )
    requested = known if ALL in names else names
    return frozenset(weight for name in requested for weight in known[name])


def _module_weights(model: ModelConfig) -> dict[str, set[str]]:
    """Return, for everything that can have an adapter: last part of a module's name in transformers
    (q_proj) -> full names of our weights that such modules store, in all layers.
    """
    params, weights = model.spec.params, dict[str, set[str]]()
    for stored, entry in weight_map(model).entries.items():
        ours = {name for name in entry.ours if params[name].role in ADAPTED}
        if ours:
            weights.setdefault(_module_name(stored), set()).update(ours)
    return weights


def _module_name(stored: str) -> str:
    """Return the last part of a stored weight's module name: q_proj for
    model.layers.0.self_attn.q_proj.weight.
    """
    return stored.removesuffix(".weight").rpartition(".")[2]
