"""Fields and weight rules of a mixture-of-experts layer that several families share."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from annotated_types import MaxLen

from dolmen.core.config import NonNegative
from dolmen.families.family import Field, activation
from dolmen.families.rules import Rename, Rule, Stack
from dolmen.files import kinds
from dolmen.model.spec import MLPSpec, ModelSpec, MoESpec, RouterSpec

NUMBER = "Number of experts of an MoE layer."
PER_TOKEN = "Number of experts per token (top-k)."
SIZE = Field("moe_intermediate_size", kinds.WIDTH, 768, "Width of an expert.")
NORMALISED = "Normalise the routing weights of a token to sum to 1."
AUX_LOSS = Field(
    "router_aux_loss_coef",
    NonNegative,
    0.001,
    "Weight of the auxiliary load-balancing loss, summed over layers, mean over sequences; "
    "--train.router.aux-loss-coef overrides it.",
)
# fields of Mixtral and Qwen3
FIELDS = (
    Field("num_local_experts", kinds.EXPERTS, 8, NUMBER, ("num_experts",)),
    Field("num_experts_per_tok", kinds.EXPERTS, 2, PER_TOKEN),
    AUX_LOSS,
)
# fields of Qwen2-MoE and Qwen3-MoE that state which layers are sparse
WHICH = (
    Field(
        "decoder_sparse_step",
        kinds.LAYERS,
        1,
        "Every n-th layer is an MoE layer, the others are dense.",
    ),
    Field(
        "mlp_only_layers",
        Annotated[list[kinds.LAYER] | None, MaxLen(kinds.MOST_LAYERS)],
        None,
        "Layers that stay dense, counted from 0.",
        common=("dense_layers",),
    ),
)


def sparse_or_dense(
    config: dict[str, Any], dense: MLPSpec, sparse: MoESpec
) -> Callable[[int], MLPSpec | MoESpec]:
    """Return a function from layer index to its feed-forward spec, `sparse` or `dense`: a layer is
    sparse if its number, from 1, is a multiple of the config's decoder_sparse_step and
    mlp_only_layers does not name it.
    """
    step, only = config["decoder_sparse_step"], set(config["mlp_only_layers"] or ())
    return lambda i: dense if i in only or (i + 1) % step else sparse


def read(
    config: dict[str, Any], size: int, normalise: bool, number: str = "num_local_experts"
) -> MoESpec:
    """Return the MoESpec of a config's num_experts_per_tok, hidden_act and router_aux_loss_coef,
    with experts of width `size`. `normalise`: divide a token's routing weights by their sum;
    `number`: the family's name of the field with the number of experts.
    """
    return MoESpec(
        config[number],
        config["num_experts_per_tok"],
        size,
        activation(config, "hidden_act"),
        RouterSpec(normalise=normalise, aux_loss_coef=float(config["router_aux_loss_coef"])),
    )


def rules(spec: ModelSpec, module: str, names: Mapping[str, str], bias: str = "bias") -> list[Rule]:
    """Return the weight rules of MoE layers whose modules are under `module`: the router, whose
    bias is stored as `bias`, and each expert's matrices, `names` mapping stored names to ours.
    """
    ours = "layers.{}.mlp."
    # dense layers have 0, and their rules make nothing
    number = max((block.mlp.experts for block in spec.blocks), default=0)
    return [
        Rename(f"{module}.gate", ours + "router", bias),
        *(
            Stack(f"{module}.experts.{{}}.{hf}", f"{ours}experts.{name}", number)
            for hf, name in names.items()
        ),
    ]
