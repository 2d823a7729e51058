"""Models as dolmen spelled them before a model was its config.json: one flat set of choices for all
families, training knobs among them. Runs and checkpoints of then are read through this file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from dolmen.core.config import from_dict, to_dict
from dolmen.core.words import cut, shown
from dolmen.families import known
from dolmen.families.model import CARRIED, Model, changed, explicit, new
from dolmen.files import kinds
from dolmen.files.schema import Int, Mismatch, Object, Schema, check_value, optional
from dolmen.model.training import RouterTraining, Training
from dolmen.model.tree import (
    Attention,
    Block,
    Embedding,
    Experts,
    Head,
    Linear,
    Llama3,
    Mlp,
    Norm,
    Rope,
    Router,
    Table,
    Tree,
    runs_of,
)
from dolmen.model.tree.mlp import Activation
from dolmen.model.tree.positions import Scaling

# A tree of more than a config.json can ask for would fill the memory before it is refused.
SIZES: dict[str, Schema] = {
    "vocab_size": kinds.VOCABULARY,
    "hidden_size": kinds.WIDTH,
    "intermediate_size": kinds.WIDTH,
    "num_hidden_layers": kinds.LAYERS,
    "num_attention_heads": kinds.HEADS,
    "num_key_value_heads": kinds.HEADS,
    "head_dim": kinds.WIDTH,
    "max_position_embeddings": kinds.POSITIONS,
    "num_experts": Int(0, kinds.EXPERTS.high),
    "moe_intermediate_size": optional(kinds.WIDTH),
}
LISTS = ("dense_layers", "sliding_layers")  # of layers, counted from 0


@dataclass(frozen=True)
class FlatRope:
    """Rotary positions then."""

    theta: float = 10000.0
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @property
    def component(self) -> Scaling | None:
        """How positions are scaled, as the tree says it; None: they are not."""
        match self.scaling:
            case "linear":
                return Linear(self.factor)
            case "llama3":
                return Llama3(
                    self.factor,
                    self.low_freq_factor,
                    self.high_freq_factor,
                    self.original_max_position_embeddings,
                )
        return None


@dataclass(frozen=True)
class Flat:
    """The fields and defaults of then."""

    family: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 2048
    position: Literal["rope", "learned"] = "rope"
    rope: FlatRope = FlatRope()
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    qk_norm: bool = False
    mlp: Literal["gated", "plain"] = "gated"
    activation: Activation = "silu"
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    dense_layers: tuple[int, ...] = ()
    router_balance: Literal["loss", "bias", "none"] = "loss"
    router_aux_loss_coef: float = 0.001
    router_z_loss_coef: float = 0.0
    router_bias_rate: float = 0.001
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    tie_word_embeddings: bool = False
    dropout: float = 0.0
    initializer_range: float = 0.02
    hf: dict[str, Any] = field(default_factory=dict)
    """The config.json that the model came from, whole, if any; or fields to write beside it."""

    def __post_init__(self):
        try:
            check_value({name: vars(self)[name] for name in SIZES}, Object(SIZES), "model")
        except Mismatch as error:
            raise ValueError(str(error)) from None
        for name in LISTS:
            for layer in vars(self)[name] or ():
                if not 0 <= layer < self.num_hidden_layers:
                    raise ValueError(
                        f"model.{name} has {layer}: there are layers 0 to "
                        f"{self.num_hidden_layers - 1}"
                    )

    def window(self, layer: int) -> int | None:
        """Tokens that a query of a layer sees; None: all before it."""
        layers = self.sliding_layers
        return self.sliding_window if layers is None or layer in layers else None

    @property
    def experts(self) -> Experts:
        """The feed-forward layer of those that are sparse. Raises ValueError for numbers that
        cannot be.
        """
        size = self.moe_intermediate_size
        return Experts(
            self.num_experts,
            self.num_experts_per_tok,
            self.intermediate_size if size is None else size,
            self.activation,
            Router(normalise=self.norm_topk_prob, aux_loss_coef=self.router_aux_loss_coef),
        )

    def block(self, layer: int) -> Block:
        """A layer, counted from 0. Raises ValueError for numbers that cannot be."""
        bias = self.attention_bias
        sparse = self.num_experts > 0 and layer not in self.dense_layers
        rope = Rope(self.head_dim, self.rope.theta, self.rope.component)
        return Block(
            Attention(
                self.num_attention_heads,
                self.num_key_value_heads,
                self.head_dim,
                q_bias=bias,
                k_bias=bias,
                v_bias=bias,
                o_bias=self.output_bias,
                qk_norm=Norm("rmsnorm", self.norm_eps) if self.qk_norm else None,
                positions=rope if self.position == "rope" else None,
                window=self.window(layer),
            ),
            self.experts
            if sparse
            else Mlp(self.intermediate_size, self.mlp == "gated", self.activation, self.mlp_bias),
            Norm(self.norm, self.norm_eps, self.norm == "layernorm"),
        )

    @property
    def tree(self) -> Tree:
        """What is computed, whether a family can express it or not. Raises ValueError for numbers
        that cannot be.
        """
        table = Table(self.max_position_embeddings) if self.position == "learned" else None
        return Tree(
            hidden_size=self.hidden_size,
            embedding=Embedding(self.vocab_size, positions=table),
            runs=runs_of([self.block(i) for i in range(self.num_hidden_layers)]),
            final_norm=Norm(self.norm, self.norm_eps, self.norm == "layernorm"),
            head=Head(self.tie_word_embeddings),
            max_position_embeddings=self.max_position_embeddings,
            initializer_range=self.initializer_range,
        )

    @property
    def training(self) -> Training:
        """What a run then said of the model, and says of training now."""
        router = RouterTraining(
            self.router_balance, None, self.router_z_loss_coef, self.router_bias_rate
        )
        return Training(self.dropout, router)

    @property
    def model(self) -> Model:
        """Its config.json: that it came from with what changed since, or one made here. Raises
        ValueError where the family cannot express it.
        """
        if self.hf.get("model_type") == self.family:
            return _changed(Model(self.hf), self.tree)
        extra = self.hf
        if "model_type" in extra:
            extra = {name: value for name, value in extra.items() if name in CARRIED}
        made = new(self.tree, self.family, extra)
        # a width that no layer has was kept too
        kept = changed(made, {made.family.names["intermediate_size"]: self.intermediate_size})
        return kept if kept.tree == made.tree else made


def _changed(source: Model, tree: Tree) -> Model:
    """`source` with the fields that differ, in its own spelling."""
    if source.tree == tree:
        return source
    wanted = explicit(new(tree, source.model_type))
    before, own = explicit(source), source.family.new(tree)
    made = changed(source, {name: wanted[name] for name in own if wanted[name] != before[name]})
    if made.tree == tree:
        return made
    return changed(source, {name: wanted[name] for name in own})  # absent ones followed a changed


# Fields of then that are training's -> the option of train that has them.
KNOBS = {
    "dropout": "dropout",
    "router_balance": "router",
    "router_z_loss_coef": "router",
    "router_bias_rate": "router",
}

FIELDS = {one.name for one in fields(Flat)}


def run(values: Mapping[str, Any]) -> dict[str, Any]:
    """A run as its YAML or state.json has it, its model and training knobs as of now. Raises
    ValueError.
    """
    old = values.get("model")
    if not isinstance(old, dict) or "model_type" in old:
        return dict(values)
    strange = [name for name in map(str, old) if name.replace("-", "_") not in FIELDS]
    if strange and "family" not in old:
        raise ValueError(
            f"model has {cut(strange[0])} and no model_type: set model.model_type to the family "
            f"whose config.json it is, one of {', '.join(known.families())}"
        )
    train = values.get("train") or {}
    if not isinstance(train, dict):
        raise ValueError(f"train must be a mapping of options, not {shown(train)}")
    flat = from_dict(Flat, old, path="model")
    twice = [f"model.{name}" for name in KNOBS if name in old and KNOBS[name] in train]
    if twice:
        raise ValueError(f"{twice[0]} is now said under train, which says it too: leave it out")
    knobs = {"dropout": flat.dropout, "router": to_dict(flat.training.router)}
    return {**values, "model": flat.model.plain(), "train": {**knobs, **train}}
