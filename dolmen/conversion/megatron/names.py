"""Megatron's names of our parameters, for all families and each generation of its code.

One set of rules speaks Megatron-Core's names, those of its local layers, with layers and experts
counted over the whole model:

    decoder.layers.3.self_attention.linear_qkv.weight    q, k, v by groups of heads (Split)
    decoder.layers.3.mlp.linear_fc1.weight               [gate; up]
    decoder.layers.3.mlp.experts.linear_fc1.weight       the same of every expert, [experts, ...]

Other names are spellings of these: what a layer's modules are called (`canonical` reads all of
them, a `Dialect` writes one), and where norms stand that Transformer Engine joins to the product
behind them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dolmen.families.rules import Each, Rename, Rule, Split, StoredTensor, entries
from dolmen.model.spec import AttentionSpec, BlockSpec, LatentAttentionSpec, MLPSpec, ModelSpec

LAYER = "decoder.layers.{}."
QKV, FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"
IN_NORM, MLP_NORM = "input_layernorm", "pre_mlp_layernorm"
Q_NORM, KV_NORM = "self_attention.q_layernorm", "self_attention.kv_layernorm"
DOWN = re.compile(r".*\.self_attention\.linear_(?:q|kv)_down_proj\.weight")
"""Down-projections of latent attention. Megatron's own layers shard them by rows; Transformer
Engine's keep them whole on every rank.
"""
HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


def rules(spec: ModelSpec, version: float = 3.0) -> list[Rule]:
    """Return the weight rules between Megatron-Core's tensor names and ours. `version`: the
    checkpoint_version, which decides how q, k and v are interleaved. Raises ValueError for a spec
    whose layers have no names in Megatron.
    """
    ours = "layers.{}."
    gate_up = ("gate", "up")
    return [
        Rename("embedding.word_embeddings", "embed"),
        Rename("embedding.position_embeddings", "positions"),
        Rename(LAYER + IN_NORM, ours + "attn_norm"),
        *_mixer(spec, version),
        Rename(LAYER + "self_attention.linear_proj", ours + "attn.o"),
        Rename(LAYER + MLP_NORM, ours + "mlp_norm"),
        *_mlp(spec, LAYER + "mlp.", ours + "mlp."),
        Rename(LAYER + "mlp.router", ours + "mlp.router", "expert_bias"),
        Each(
            Split(
                LAYER + "mlp.experts.linear_fc1",
                tuple(f"{ours}mlp.experts.{name}" for name in gate_up),
                1,
                (1, 1),
                shard_parts=True,
            )
        ),
        Each(Rename(LAYER + "mlp.experts.linear_fc2", ours + "mlp.experts.down")),
        _split_gate(LAYER + "mlp.shared_experts.", ours + "mlp.shared."),
        Rename(LAYER + "mlp.shared_experts.linear_fc2", ours + "mlp.shared.down"),
        Rename("decoder.final_layernorm", "final_norm"),
        Rename("output_layer", "head"),
    ]


def _split_gate(hf: str, ours: str) -> Split:
    """Return the rule of the fused [gate; up] weight under the stored prefix `hf` and our prefix
    `ours`, each half sharded by itself.
    """
    return Split(hf + "linear_fc1", (ours + "gate", ours + "up"), 1, (1, 1), shard_parts=True)


def _mlp(spec: ModelSpec, hf: str, ours: str) -> list[Rule]:
    """Return the weight rules of dense MLP layers, under the stored prefix `hf` and our prefix
    `ours`. Raises ValueError where some layers are gated and some are not.
    """
    gated = {block.mlp.gated for block in spec.blocks if isinstance(block.mlp, MLPSpec)}
    if len(gated) > 1:
        raise ValueError("only some feed-forward layers are gated, which Megatron does not support")
    first = _split_gate(hf, ours) if True in gated else Rename(hf + "linear_fc1", ours + "up")
    return [first, Rename(hf + "linear_fc2", ours + "down")]


def _mixer(spec: ModelSpec, version: float) -> list[Rule]:
    """Return the weight rules of all attention weights except the output projection. Raises
    ValueError as `_qkv`.
    """
    if all(isinstance(block.mixer, LatentAttentionSpec) for block in spec.blocks):
        # all layers have latent attention, or none
        return [Rename(f"{LAYER}{stored}", f"layers.{{}}.attn.{ours}") for stored, ours in LATENT]
    return [
        _qkv(spec, version),
        Rename(LAYER + Q_NORM, "layers.{}.attn.q_norm"),
        Rename(LAYER + "self_attention.k_layernorm", "layers.{}.attn.k_norm"),
    ]


LATENT = (
    ("self_attention.linear_q_proj", "q"),
    ("self_attention.linear_q_down_proj", "q_a"),
    (Q_NORM, "q_a_norm"),
    ("self_attention.linear_q_up_proj", "q_b"),
    ("self_attention.linear_kv_down_proj", "kv_a"),
    (KV_NORM, "kv_a_norm"),
    ("self_attention.linear_kv_up_proj", "kv_b"),
)


def _qkv(spec: ModelSpec, version: float) -> Split:
    """Return the weight rule of the fused q, k, v. Raises ValueError for layers with other mixers
    or unequal heads, and for grouped queries before checkpoint version 2.
    """
    mixers = [block.mixer for block in spec.blocks]
    heads = {(m.heads, m.kv_heads, m.head_size) for m in mixers if isinstance(m, AttentionSpec)}
    if len(heads) != 1 or not all(isinstance(m, AttentionSpec) for m in mixers):
        raise ValueError(
            "layers have different attention types or head counts, which Megatron does not support"
        )
    ((number, groups, size),) = heads
    names = tuple(f"layers.{{}}.attn.{part}" for part in "qkv")
    stored = LAYER + QKV
    if version < 2 and number != groups:
        raise ValueError(
            f"checkpoint_version is {version}, which does not support grouped-query attention"
        )
    # The layout of fused q, k, v changed twice (checkpoint_version 0, 1, 2 and later):
    if version < 1:  # [3, heads, size] on each rank
        return Split(stored, names, 1, (1, 1, 1), shard_parts=True)
    if version < 2:  # [heads, size, 3]
        return Split(stored, names, number * size, (1, 1, 1))
    return Split(stored, names, groups, (number // groups, 1, 1))


def weights(spec: ModelSpec, version: float = 3.0) -> dict[str, StoredTensor]:
    """Return canonical Megatron name -> entry that says which of our parameters the tensor holds
    and how. Raises ValueError as `rules`, and KeyError for parameters without a rule.
    """
    return entries(rules(spec, version), spec.shapes, spec.layers)


@dataclass(frozen=True)
class Dialect:
    """Tensor names in one generation of Megatron's code."""

    layers: str = "decoder.layers."
    ends: Mapping[str, str] = field(default_factory=dict)
    """Canonical prefix -> this dialect's, for names outside of layers."""
    within: Mapping[str, str] = field(default_factory=dict)
    """Canonical prefix -> this dialect's, within a layer."""
    latent: Mapping[str, str] = field(default_factory=dict)
    """Canonical prefix -> this dialect's, within a layer with latent attention."""
    cuts_down: bool = True
    """True if tp ranks shard the latent down-projections (DOWN) by rows."""
    tied: str = HEAD
    """Name of the last stage's copy of the embedding, where the head is tied."""
    stateful: bool = True
    """True if an `_extra_state` is stored next to the weight of every linear layer and of the
    head.
    """
    grouped: bool = False
    """True if an expert's tensor is named linear_fc1.weight3, not
    local_experts.3.linear_fc1.weight.
    """
    legacy: bool = False
    """True for the classes from before Megatron-Core, which nest a mapping of tensors per
    module.
    """

    def spell(
        self,
        name: str,
        layer: int | None = None,
        block: BlockSpec | None = None,
        expert: int | None = None,
    ) -> str:
        """Return the name of a tensor in this dialect. Outside of layers, `name` is the canonical
        name. In a layer, pass both `layer` (its number in the file) and `block`, and as `name` the
        part after the layer's number; `expert` is the expert's number on the rank. `block` decides
        the names of norms: Transformer Engine fuses them with the next linear layer, but not the
        norm before experts.
        """
        if layer is None or block is None:
            # outside of layers
            return _replace_start(name, self.ends)
        # a router needs the normed input too, so the norm is a module of its own
        if block.mlp.experts and name.startswith(MLP_NORM):
            return f"{self.layers}{layer}.{name}"
        if expert is not None:
            *start, module, kind = name.split(".")
            spelled = f"{module}.{kind}{expert}"
            if not self.grouped:
                spelled = f"local_experts.{expert}.{module}.{kind}"
            name = ".".join([*start, spelled])
        within = self.latent if isinstance(block.mixer, LatentAttentionSpec) else self.within
        return f"{self.layers}{layer}.{_replace_start(name, within)}"


def _replace_start(name: str, starts: Mapping[str, str]) -> str:
    """Return the name with the first prefix of `starts` (old -> new) that it has replaced; the name
    itself where it has none.
    """
    for start, canonical_start in starts.items():
        if name.startswith(start):
            return canonical_start + name.removeprefix(start)
    return name


LOCAL = Dialect()
TE = Dialect(
    within={f"{IN_NORM}.": f"{QKV}.layer_norm_", f"{MLP_NORM}.": f"{FC1}.layer_norm_"},
    latent={
        f"{Q_NORM}.": "self_attention.linear_q_up_proj.layer_norm_",
        f"{KV_NORM}.": "self_attention.linear_kv_up_proj.layer_norm_",
        f"{MLP_NORM}.": f"{FC1}.layer_norm_",
    },
    cuts_down=False,
    grouped=True,
)
LEGACY = Dialect(
    layers="language_model.encoder.layers.",
    ends={
        "embedding.": "language_model.embedding.",
        "decoder.final_layernorm.": "language_model.encoder.final_norm.",
        "output_layer.": "language_model.output_layer.",
    },
    within={
        f"{IN_NORM}.": "input_norm.",
        f"{QKV}.": "self_attention.query_key_value.",
        "self_attention.linear_proj.": "self_attention.dense.",
        f"{MLP_NORM}.": "post_attention_norm.",
        f"{FC1}.": "mlp.dense_h_to_4h.",
        "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
    },
    tied="word_embeddings_for_head.weight",
    stateful=False,
    legacy=True,
)

# What stands before a layer's number, and beside the layers.
ENDS = (
    (r"(?:module\.)?language_model\.embedding\.", "embedding."),
    (r"(?:module\.)?language_model\.(?:encoder|transformer)\.layers\.", "decoder.layers."),
    (
        r"(?:module\.)?language_model\.(?:encoder|transformer)\.final_(?:layer)?norm\.",
        "decoder.final_layernorm.",
    ),
    (r"(?:module\.)?language_model\.output_layer\.", "output_layer."),
    (r"(?:module\.)?word_embeddings_for_head\.", "output_layer."),
    (r"module\.", ""),
)
# Within a layer: old Megatron, Transformer Engine's classes of 2023, its fused operations.
WITHIN = (
    (r"input_norm\.", f"{IN_NORM}."),
    (r"post_attention_(?:layer)?norm\.", f"{MLP_NORM}."),
    (r"mlp\.0\.", f"{MLP_NORM}."),
    (r"self_attention\.(?:linear|layernorm)_qkv\.layer_norm_", f"{IN_NORM}."),
    (r"self_attention\.linear_q_up_proj\.layer_norm_", f"{Q_NORM}."),
    (r"self_attention\.linear_kv_up_proj\.layer_norm_", f"{KV_NORM}."),
    (r"(?:mlp\.linear_fc1|layernorm_mlp)\.layer_norm_", f"{MLP_NORM}."),
    (r"(?:self_)?attention\.query_key_value\.", f"{QKV}."),
    (r"self_attention\.layernorm_qkv\.", f"{QKV}."),
    (r"(?:self_)?attention\.dense\.", "self_attention.linear_proj."),
    (r"self_attention\.proj\.", "self_attention.linear_proj."),
    (r"(?:mlp\.dense_h_to_4h\.|layernorm_mlp\.fc1_|mlp\.1\.basic_ops\.0\.)", f"{FC1}."),
    (r"(?:mlp\.dense_4h_to_h\.|layernorm_mlp\.fc2_|mlp\.3\.basic_ops\.0\.)", "mlp.linear_fc2."),
)
EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<local>[0-9]+)\.(?P<one>linear_fc[12])\.(?P<kind>weight|bias)"
    r"|(?P<all>linear_fc[12])\.(?P<of>weight|bias)(?P<grouped>[0-9]+))"
)
IGNORED = re.compile(
    r"(?:.*\.)?(?:_extra_state|rotary_pos_emb\.inv_freq|rotary_emb\.inv_freq)[0-9]*"
)


@dataclass(frozen=True)
class Name:
    """A stored tensor's canonical name, in parts."""

    start: str
    """Part before the layer's number."""
    layer: int | None
    rest: str
    expert: int | None = None

    def with_layers_before(self, layers: int) -> str:
        """Return the full canonical name in the whole model, where `layers` layers precede those of
        its file.
        """
        return self.rest if self.layer is None else f"{self.start}{self.layer + layers}.{self.rest}"


def canonical(stored: str) -> Name | None:
    """Parse a stored tensor name of any Megatron dialect; layer and expert are counted as in its
    own file. A name outside of layers has layer None, an unknown one stays as it is. None for names
    that hold no parameter, such as `_extra_state`.
    """
    if IGNORED.fullmatch(stored):
        return None
    # first the part outside of the layer, then the part inside
    name = _first(ENDS, stored)
    layer = re.fullmatch(r"(decoder\.layers\.)([0-9]{1,6})\.(.+)", name)
    if layer is None:
        return Name("", None, name)
    start, number, rest = layer.groups()
    if expert := EXPERT.fullmatch(rest):
        groups = expert.groupdict()
        module, kind = groups["one"] or groups["all"], groups["kind"] or groups["of"]
        # SequentialMLP counts modules, GroupedLinear numbers its weights
        number_of = int(groups["local"] or groups["grouped"])
        return Name(start, int(number), f"mlp.experts.{module}.{kind}", number_of)
    return Name(start, int(number), _first(WITHIN, rest))


def _first(spellings: tuple[tuple[str, str], ...], name: str) -> str:
    """Return the name with the part that the first matching of `spellings` (pattern, canonical
    prefix) matches at its start replaced; unchanged if none matches.
    """
    for pattern, canonical_start in spellings:
        if match := re.match(pattern, name):
            return canonical_start + name[match.end() :]
    return name
