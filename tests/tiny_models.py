"""Tiny models of the tests: `Flat` names the fields of all families, `Tiny` takes any spec."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from dolmen.core.config import config, from_dict
from dolmen.core.mesh import Mesh
from dolmen.families import ModelConfig, families
from dolmen.families.model import model_from_spec, replace_fields
from dolmen.model import build as building
from dolmen.model.build import initialize, load
from dolmen.model.decoder import Decoder
from dolmen.model.layout import Layout
from dolmen.model.spec import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    LinearScaling,
    Llama3Scaling,
    LMHeadSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    PositionTable,
    RopeSpec,
    RouterSpec,
    group_repeats,
)
from dolmen.model.spec.layers import Activation
from dolmen.model.spec.positions import RopeScaling
from dolmen.model.split import ModelSplit
from dolmen.model.training import RouterTraining, Training
from dolmen.parallel.schedule import Schedule

__all__ = [
    "Flat",
    "Tiny",
    "build",
    "decoder",
    "flat_model",
    "initialize",
    "load",
    "with_mixer_fields",
    "with_num_layers",
    "tiny",
]


@config()
class FlatRope:
    """Rotary position embedding."""

    theta: float = 10000.0
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @property
    def component(self) -> RopeScaling | None:
        """Scaling of the positions as in the spec; None: no scaling."""
        match self.scaling:
            case "linear":
                return LinearScaling(self.factor)
            case "llama3":
                return Llama3Scaling(
                    self.factor,
                    self.low_freq_factor,
                    self.high_freq_factor,
                    self.original_max_position_embeddings,
                )
        return None


@config()
class Flat:
    """A model as one flat set of fields for all families: a test varies a field by its name,
    whatever component it belongs to.
    """

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

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, in tokens, or None."""
        layers = self.sliding_layers
        return self.sliding_window if layers is None or layer in layers else None

    @property
    def experts(self) -> MoESpec:
        """The expert layer of the sparse blocks. Raises ValueError for impossible numbers."""
        size = self.moe_intermediate_size
        return MoESpec(
            self.num_experts,
            self.num_experts_per_tok,
            self.intermediate_size if size is None else size,
            self.activation,
            RouterSpec(normalise=self.norm_topk_prob, aux_loss_coef=self.router_aux_loss_coef),
        )

    def block(self, layer: int) -> BlockSpec:
        """Return the spec of a layer, counted from 0. Raises ValueError for impossible numbers."""
        bias = self.attention_bias
        sparse = self.num_experts > 0 and layer not in self.dense_layers
        rope = RopeSpec(self.head_dim, self.rope.theta, self.rope.component)
        return BlockSpec(
            AttentionSpec(
                self.num_attention_heads,
                self.num_key_value_heads,
                self.head_dim,
                q_bias=bias,
                k_bias=bias,
                v_bias=bias,
                o_bias=self.output_bias,
                qk_norm=NormSpec("rmsnorm", self.norm_eps) if self.qk_norm else None,
                positions=rope if self.position == "rope" else None,
                window=self.window(layer),
            ),
            self.experts
            if sparse
            else MLPSpec(
                self.intermediate_size, self.mlp == "gated", self.activation, self.mlp_bias
            ),
            NormSpec(self.norm, self.norm_eps, self.norm == "layernorm"),
        )

    @property
    def spec(self) -> ModelSpec:
        """The model's spec, whether a family can express it or not. Raises ValueError for
        impossible numbers.
        """
        table = PositionTable(self.max_position_embeddings) if self.position == "learned" else None
        return ModelSpec(
            hidden_size=self.hidden_size,
            embedding=EmbeddingSpec(self.vocab_size, positions=table),
            runs=group_repeats([self.block(i) for i in range(self.num_hidden_layers)]),
            final_norm=NormSpec(self.norm, self.norm_eps, self.norm == "layernorm"),
            head=LMHeadSpec(self.tie_word_embeddings),
            max_position_embeddings=self.max_position_embeddings,
            initializer_range=self.initializer_range,
        )

    @property
    def training(self) -> Training:
        """The training options among the fields."""
        router = RouterTraining(
            self.router_balance, None, self.router_z_loss_coef, self.router_bias_rate
        )
        return Training(self.dropout, router)

    @property
    def model(self) -> ModelConfig:
        """The model as its config.json. Raises ValueError where the family cannot express it."""
        model = model_from_spec(self.spec, self.family)
        # the config.json has an intermediate_size even where all layers are sparse
        width = {model.family.names["intermediate_size"]: self.intermediate_size}
        with_width = replace_fields(model, width)
        return with_width if with_width.spec == model.spec else model


@dataclass(frozen=True)
class Tiny:
    """A model spec and its training options."""

    spec: ModelSpec
    training: Training = Training()


def with_num_layers(model: Flat | Tiny, number: int) -> Tiny:
    """Return `model` with `number` layers. Its layers must be alike."""
    (run,) = model.spec.runs
    return Tiny(replace(model.spec, runs=(replace(run, repeat=number),)), model.training)


def with_mixer_fields(model: Flat | Tiny, **fields) -> Tiny:
    """Return `model` with other fields in the mixer spec of every layer."""
    runs = tuple(
        replace(run, blocks=tuple(replace(b, mixer=replace(b.mixer, **fields)) for b in run.blocks))
        for run in model.spec.runs
    )
    return Tiny(replace(model.spec, runs=runs), model.training)


def tiny(model_type: str, dropout: float = 0.0, **fields) -> Tiny:
    """Return the model of a config.json with these fields."""
    return Tiny(ModelConfig({"model_type": model_type, **fields}).spec, Training(dropout))


def flat_model(**fields) -> ModelConfig:
    """Return the model of flat fields; without `family`, of the first that can express them."""
    if "family" not in fields:
        for name in ("llama", *families()):
            with suppress(ValueError):
                return from_dict(Flat, {**fields, "family": name}).model
    return from_dict(Flat, fields, path="model").model


def build(
    flat: Flat | Tiny,
    mesh: Mesh,
    layout: Layout | None = None,
    schedule: Schedule | None = None,
    **options,
) -> Decoder:
    """Build and place a decoder as dolmen.model.build does, with the model's training options."""
    return building.build(flat.spec, mesh, layout, schedule, training=flat.training, **options)


def decoder(flat: Flat | Tiny, split: ModelSplit | None = None) -> Decoder:
    """Return a decoder that is not placed; its values are those of torch.empty."""
    return Decoder(flat.spec, split, flat.training)
