"""Multi-LoRA: several adapters over one base model. Each request names one, or none, and a forward
mixes sequences of all of them (parallel/inference_linear.py).

    parse_adapters   NAME=FOLDER of --adapters, each name once
    open_adapters    shapes alone, checked against the base model
    place_adapters   the tensors of this rank: `Adapters`, for an engine

    adapters = place_adapters(open_adapters({"fr": "fr-adapter"}, source), model)
    Engine(model, adapters=adapters).add(Request([1, 15043], adapter="fr"))
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.conversion import source
from dolmen.conversion.peft import LowRank
from dolmen.conversion.source import ModelSource
from dolmen.core import collectives, consensus
from dolmen.core.mesh import SINGLE, Axis, Mesh
from dolmen.core.messages import brief, cut, message
from dolmen.core.state import dtype_of, local_view
from dolmen.model.decoder import Decoder
from dolmen.model.spec import LatentAttentionSpec, ModelSpec, ParamSpec
from dolmen.parallel import data, tensor
from dolmen.parallel.inference_linear import AdapterAssignment, MultiLora, Pair, Weights

LONGEST = 200  # characters of a name
_NO_LENGTHS = (
    "it is DoRA, which needs the norms of the unquantized weights: leave out --weights int8, or "
    "merge "
    "it (dolmen export)"
)


@dataclass(frozen=True, eq=False)
class Adapters:
    """The LoRA adapters of one model, as this rank holds them."""

    names: frozenset[str] = frozenset()
    weights: Mapping[str, MultiLora] = field(default_factory=dict)
    """For each adapted weight its low-rank pairs."""
    turn: AdapterAssignment = field(default_factory=AdapterAssignment)
    """Adapter of each token in the current forward."""


def parse_adapters(arguments: Sequence[str], taken: Collection[str] = ()) -> dict[str, str]:
    """Parse arguments NAME=FOLDER to name -> folder. `taken`: names that an adapter must not have.
    Raises ValueError for a malformed argument, and for a name that is given twice, taken or not
    printable.
    """
    pairs: list[tuple[str, str]] = []
    for argument in arguments:
        name, sign, folder = argument.partition("=")
        if not (sign and name.strip() and folder.strip()):
            raise ValueError(
                f"adapters has {brief(argument)}: use --adapters NAME=FOLDER, such as fr=fr-adapter"
            )
        pairs.append((name, folder))
    return check_adapters(pairs, taken)


def check_adapters(pairs: Iterable[tuple[str, str]], taken: Collection[str] = ()) -> dict[str, str]:
    """Return name -> folder. Raises ValueError for a name that is given twice, is `taken`, or
    cannot be printed.
    """
    folders: dict[str, str] = {}
    for name, folder in pairs:
        if not (name.strip() and name.isprintable() and len(name) <= LONGEST):
            raise ValueError(
                f"adapters has the name {brief(name)}: give one of at most {LONGEST} characters "
                "that can be printed"
            )
        if name in folders:
            raise ValueError(f"adapters has the name {brief(name)} twice: give each its own")
        if name in taken:
            raise ValueError(f"adapters has the name {brief(name)}, which is the model's own")
        folders[name] = folder
    return folders


def check_name(name: str | None, known: Collection[str]) -> None:
    """Raise ValueError, which lists up to 20 `known` names, for an adapter that is none of them;
    None is the base model.
    """
    if name is None or name in known:
        return
    there = ", ".join(sorted(known)[:20])
    raise ValueError(
        f"there is no adapter {cut(name)!r}: "
        + (f"name one of {there}" if known else "give --adapters NAME=FOLDER")
    )


def open_adapters(
    folders: Mapping[str, str | Path],
    base: ModelSource,
    mesh: Mesh | None = None,
    weights: Weights = "stated",
) -> dict[str, LowRank]:
    """Open adapters (name -> folder) and check them against the base model, without reading their
    tensors.

    On a `mesh` the first rank resolves the folders (such as a run's newest checkpoint) and all
    ranks open those. `weights`: how the base is held. Raises ValueError, which names the adapter,
    for one that does not fit the base, and for adapted weights (experts, head, embedding, kv_b of
    latent attention) that cannot be adapted per sequence.
    """

    def pin() -> dict[str, str]:
        """Return name -> folder of each adapter, where a run stands for its newest checkpoint
        now.
        """
        return {name: source.pin_adapters(folder) for name, folder in folders.items()}

    # a run's newest checkpoint may change between two ranks' looks
    together = mesh is not None and mesh.size > 1 and len(folders) > 0
    pinned = consensus.run_on_rank_zero(pin) if together else folders
    out: dict[str, LowRank] = {}
    for name, folder in pinned.items():
        try:
            out[name] = source.open_adapters(folder, base)
            _check(out[name], base.spec, weights)
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(f"adapter {name}: {message(error)}") from error
    return out


def _check(low: LowRank, spec: ModelSpec, weights: Weights) -> None:
    """Raise ValueError if an adapter changes weights that multi-LoRA cannot serve: experts,
    anything but matrices of blocks (head, embeddings, routers), kv_b of latent attention; or if it
    is DoRA and the base model is held as int8.
    """
    params = spec.params
    if low.form.kind == "dora" and weights == "int8":
        raise ValueError(_NO_LENGTHS)
    for weight in sorted(low.form.targets):
        # a segment of tokens has one adapter, but is spread over many experts
        if params[weight].stacked:
            raise ValueError(
                f"it adapts the experts of {weight}, which is not supported in multi-LoRA "
                "serving: merge it (dolmen export), or leave experts out"
            )
        if params[weight].role != "matrix":
            raise ValueError(
                f"it adapts {weight}, but multi-LoRA serving supports only linear layers of "
                "blocks: merge it into the base (dolmen export), or leave out the head, "
                "embeddings and routers"
            )
        layer, _, rest = weight.removeprefix("layers.").partition(".")
        if rest == "attn.kv_b.weight" and isinstance(
            spec.blocks[int(layer)].mixer, LatentAttentionSpec
        ):
            raise ValueError(
                f"it adapts {weight} of latent attention, which multiplies the KV cache of all "
                "sequences: merge it (dolmen export), or leave kv_b_proj out"
            )


def place_adapters(lows: Mapping[str, LowRank], model: Decoder, mesh: Mesh = SINGLE) -> Adapters:
    """Read this rank's part of the adapters: its layers, split over tp as the base weights are.

    All ranks of `mesh` must call it. Raises ValueError, the same on all of them, under sequence
    parallelism or ZeRO, and for values that are not finite in the model's dtype.
    """
    if not lows:
        return Adapters()
    return (
        _place(lows, model)
        if mesh.size == 1
        else consensus.run_on_all_ranks(lambda: _place(lows, model))
    )


def _place(lows: Mapping[str, LowRank], model: Decoder) -> Adapters:
    """Read this rank's part of all adapters and return it. An error is raised only after all
    weights were read, since the other ranks wait in collectives until then.
    """
    if model.tp.gathers or data.units(model):
        raise ValueError(
            "multi-LoRA serving needs a model split only over tp and pp: load it for generation, "
            "without sequence parallelism and ZeRO"
        )
    # one assignment for all weights: the runner sets it once per forward
    turn, local_specs = AdapterAssignment(), model.local_specs()
    pairs: dict[str, dict[str, Pair]] = {}
    refused: list[str] = []
    for name, low in lows.items():
        for weight in sorted(low.form.targets & local_specs.keys()):
            try:
                pairs.setdefault(weight, {})[name] = _read_pair(low, weight, model)
            except ValueError as error:
                refused.append(f"adapter {name}: {error}")
    if refused:
        raise ValueError(refused[0])
    # every adapter of a weight is kept; a forward multiplies those that it has tokens of
    adapted = {weight: MultiLora(pair, turn) for weight, pair in pairs.items()}
    return Adapters(frozenset(lows), adapted, turn)


def _read_pair(low: LowRank, weight: str, model: Decoder) -> Pair:
    """Return the low-rank pair of a weight on this rank: down and up projection, the scale
    multiplied into up, and for DoRA the gain per output. Raises ValueError for DoRA on a meta
    weight, and for values that are not finite in the model's dtype: keys and values of such would
    spoil other sequences of the KV cache.
    """
    form, param, tp = low.form, model.spec.params[weight], model.tp.axis
    weight_here, dtype = local_view(model.get_parameter(weight)), dtype_of(model)
    if weight_here.is_meta and form.kind == "dora":
        raise ValueError(_NO_LENGTHS)
    # one weight at a time: an adapter is not held on the host as a whole
    read = low.tensors(weight)
    params = (form.down(param), form.up(param), form.magnitude(param))
    down, up, *lengths = (
        _local_part(value.to(model.device), param, tp)
        for value, param in zip(read.values(), params, strict=False)
    )
    gain = None
    if lengths:
        # row parallel: norms over inputs are sums over tp
        inputs = any(c.axis == "tp" and c.dim == 1 and c.splits(tp.size) for c in param.shards)
        adapter = tensor.Adapter(down, up, form.scale, lengths[0], over_inputs=inputs)
        # DoRA (2402.09353): magnitude / norm of (W + scale * up down), fixed at inference
        gain = adapter.gain(weight_here, tp)
    # scaled before it is rounded to the model's dtype, so only once
    wide = torch.promote_types(up.dtype, torch.float32)
    pair = Pair(
        down.to(dtype, copy=True),
        (up.to(wide) * form.scale).to(dtype),
        None if gain is None else gain.to(dtype),
    )
    for name, value in zip(read, pair, strict=False):
        if value is not None and not value.isfinite().all():
            large = dtype == torch.float16 and bool(read[name].isfinite().all())
            raise ValueError(
                f"{name} has values that are not finite in {dtype}"
                + ": use --dtype float32" * large
            )
    return pair


def _local_part(
    full: Float[Tensor, "*whole"], param: ParamSpec, tp: Axis
) -> Float[Tensor, "*here"]:
    """Return this rank's tp shard of a parameter, or all of it if it is replicated. `param`: its
    spec.
    """
    for shard in param.shards:
        if shard.axis == "tp" and shard.splits(tp.size):
            full = collectives.local_part(full, shard.dim, tp)
    return full
