"""What families with experts share: the fields of a sparse feed-forward layer, and the names of its
weights.
"""

from collections.abc import Mapping
from typing import Any

from dolmen.families.family import Field, activation
from dolmen.families.rules import Rename, Rule, Stack
from dolmen.files import kinds
from dolmen.files.schema import Real
from dolmen.model.tree import Experts, Router, Tree

NUMBER = "Experts of a sparse feed-forward layer."
PER_TOKEN = "Experts that compute a token."
SIZE = Field("moe_intermediate_size", kinds.WIDTH, 768, "Width of an expert.")
NORMALISED = "The weights of a token's experts are divided by their sum."
AUX_LOSS = Field(
    "router_aux_loss_coef",
    Real(0),
    0.001,
    "Weight of the loss that keeps experts equally busy, summed over layers, mean over sequences; "
    "--train.router.aux-loss-coef over it.",
)
# of Mixtral and of Qwen3
FIELDS = (
    Field("num_local_experts", kinds.EXPERTS, 8, NUMBER, ("num_experts",)),
    Field("num_experts_per_tok", kinds.EXPERTS, 2, PER_TOKEN),
    AUX_LOSS,
)


def read(config: dict[str, Any], size: int, normalise: bool) -> Experts:
    """The sparse layer that FIELDS say, with experts of a width. Raises ValueError naming the
    field.
    """
    return Experts(
        config["num_local_experts"],
        config["num_experts_per_tok"],
        size,
        activation(config, "hidden_act"),
        Router(normalise=normalise, aux_loss_coef=float(config["router_aux_loss_coef"])),
    )


def new(layer: Experts) -> dict[str, Any]:
    """FIELDS of a sparse layer."""
    return {
        "num_local_experts": layer.number,
        "num_experts_per_tok": layer.per_token,
        "router_aux_loss_coef": layer.router.aux_loss_coef,
    }


def rules(tree: Tree, module: str, names: Mapping[str, str], bias: str = "bias") -> list[Rule]:
    """Of the sparse layers: the router, whose bias the file calls `bias`, and stacks of the
    experts' matrices, stored under `module` with the `names` -> ours.
    """
    ours = "layers.{}.mlp."
    number = max((block.mlp.experts for block in tree.blocks), default=0)
    return [
        Rename(f"{module}.gate", ours + "router", bias),
        *(
            Stack(f"{module}.experts.{{}}.{hf}", f"{ours}experts.{name}", number)
            for hf, name in names.items()
        ),
    ]
