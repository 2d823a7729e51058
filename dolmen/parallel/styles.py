"""Tensor parallelism of any nn.Module, by the names of its parts: what comes into each and what
goes out is whole on every rank of tp (I@tp) but between columns and rows, so that all else of the
module need not know.

    columns      nn.Linear      x, I -> this rank's outputs, S(-1); weight S(0)
    rows         nn.Linear      this rank's inputs, S(-1) -> y, I; weight S(1), the bias added once
    sequence     any            each rank its own tokens (dim -2); parameters whole, and their
                                gradients summed over tp
    vocabulary   nn.Embedding   rows of the table S(0), which need not divide, and their sum
                 nn.Linear      columns whose outputs are put together

    ToyModel     x -> net1 (columns) -> relu -> net2 (rows) -> y

State at rest is DTensor, over dp by ZeRO as any model's (parallel/data.py); gradients are summed
over dp, so that a loss is to be divided by the count of the whole batch.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from dolmen.core import collectives, state
from dolmen.core.mesh import Axis, Mesh
from dolmen.core.messages import choices, did_you_mean
from dolmen.parallel import data, vocabulary
from dolmen.parallel.tensor import TensorParallel

Style = Literal["columns", "rows", "sequence", "vocabulary"]


def parallelize(
    module: nn.Module, plan: Mapping[str, Style], mesh: Mesh, zero: int = 0
) -> nn.Module:
    """`module`, whose values every rank has alike, split over tp as `plan` says, and over dp as
    stage `zero` of ZeRO; in place. A name of the plan may be a pattern, `layers.*.q_proj`; parts
    that it does not name stay whole. Raises ValueError, with nothing changed, for a name that no
    part has, a style that the part has not, and sizes that tp does not divide.
    """
    styles = _styles(module, plan)
    for name, style in styles.items():
        _check(name, module.get_submodule(name), style, mesh.tp)
    places = _places(module, styles)
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    partial = set()
    for name, style in styles.items():
        part = module.get_submodule(name)
        if style == "sequence":
            partial |= {f"{name}.{n}" for n, _ in part.named_parameters()}
            _shard_tokens(part, mesh.tp)
            continue
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, MADE[style, type(part)](part, mesh.tp))
    state.distribute(module, places, mesh)
    with torch.no_grad():
        for name, p in module.named_parameters():
            state.write_region(p, values[name])
    data.shard_model(module, (), mesh, zero, state.dtype_of(module), partial)
    return module


class _Columns(nn.Module):
    """y_i = x W_i^T + b_i."""

    def __init__(self, linear: nn.Linear, tp: Axis):
        super().__init__()
        self.weight, self.bias, self.tp = linear.weight, linear.bias, tp

    def forward(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows here"]:
        return F.linear(collectives.copy(x, self.tp), self.weight, self.bias)


class _Rows(nn.Module):
    """y = sum over ranks of x_i W_i^T, + b."""

    def __init__(self, linear: nn.Linear, tp: Axis):
        super().__init__()
        self.weight, self.bias, self.tp = linear.weight, linear.bias, tp

    def forward(self, x: Float[Tensor, "*rows here"]) -> Float[Tensor, "*rows outputs"]:
        whole = collectives.all_reduce_(F.linear(x, self.weight), self.tp)
        return whole if self.bias is None else whole + self.bias


class _Table(nn.Module):
    """The row of each token."""

    def __init__(self, table: nn.Embedding, tp: Axis):
        super().__init__()
        self.weight, self.rows, self.padding = table.weight, table.num_embeddings, table.padding_idx
        self.tp = TensorParallel(tp)

    def forward(self, tokens: Int64[Tensor, "*shape"]) -> Float[Tensor, "*shape width"]:
        found = vocabulary.embed(tokens.reshape(-1), self.weight, self.rows, self.tp)
        found = found.view(*tokens.shape, -1)
        if self.padding is None:
            return found
        # nn.Embedding gives the row of padding no gradient
        return torch.where((tokens == self.padding)[..., None], found.detach(), found)


class _Logits(nn.Module):
    """Columns, put together."""

    def __init__(self, linear: nn.Linear, tp: Axis):
        super().__init__()
        self.weight, self.bias, self.tp = linear.weight, linear.bias, tp
        self.rows = linear.out_features

    def forward(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows vocabulary"]:
        here = F.linear(collectives.copy(x, self.tp), self.weight, self.bias)
        first, _ = vocabulary.vocabulary_range(self.rows, self.tp)
        return _join_parts(here, -1, first, self.rows, self.tp)


MADE: dict[tuple[Style, type[nn.Module]], Callable[[Any, Axis], nn.Module]] = {
    ("columns", nn.Linear): _Columns,
    ("rows", nn.Linear): _Rows,
    ("vocabulary", nn.Embedding): _Table,
    ("vocabulary", nn.Linear): _Logits,
}


def _shard_tokens(part: nn.Module, tp: Axis) -> None:
    """Let each rank compute `part` of its own tokens."""
    if tp.size == 1:
        return

    def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = given
        return collectives.local_part(collectives.copy(x, tp), -2, tp), *others

    def after(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> Tensor:
        here = y.shape[-2]
        return _join_parts(y, -2, here * tp.rank, here * tp.size, tp)

    part.register_forward_pre_hook(before)
    part.register_forward_hook(after)


def _join_parts(here: Tensor, dim: int, first: int, size: int, tp: Axis) -> Tensor:
    """S(dim) -> I, of parts that need not be equal: each is a partial sum of the whole, and its
    gradient is that of its own part.
    """
    if tp.size == 1:
        return here
    behind = size - first - here.shape[dim]
    beside = [0, 0] * (-dim - 1) + [first, behind]
    return collectives.all_reduce_(F.pad(here, beside), tp)


def _styles(module: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    """The style of each part that is named. Raises ValueError."""
    names = [name for name, _ in module.named_modules() if name]
    found: dict[str, Style] = {}
    for pattern, style in plan.items():
        if style not in get_args(Style):
            raise ValueError(
                f"plan: {pattern} is {style!r}: {choices(str(style), get_args(Style))}"
            )
        own = [name for name in names if fnmatchcase(name, pattern)]
        if not own:
            hint = did_you_mean(pattern, names, f"it has {names[:6]}")
            raise ValueError(f"plan: the module has no part {pattern}: {hint}")
        for name in own:
            if found.get(name, style) != style:
                raise ValueError(f"plan: {name} is {found[name]} and {style}: name it once")
            found[name] = style
    return found


def _places(module: nn.Module, styles: Mapping[str, Style]) -> dict[str, state.Places]:
    """How each parameter lies on tp. Raises ValueError where one that two parts share would lie in
    two ways.
    """
    places: dict[str, state.Places] = {}
    first: dict[Tensor, str] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        part, _, last = name.rpartition(".")
        match styles.get(part), last:
            case (("columns" | "vocabulary"), _):
                places[name] = state.Shard(0)
            case "rows", "weight":
                places[name] = state.Shard(1)
            case _:
                places[name] = state.Replicate()
        other = first.setdefault(p, name)
        if places[other] != places[name]:
            raise ValueError(
                f"plan: {other} and {name} are one parameter, and would be cut in two ways: give "
                "both parts one style, or leave both whole"
            )
    return places


def _check(name: str, part: nn.Module, style: Style, tp: Axis) -> None:
    """Raises ValueError for a part that cannot have the style."""
    if style == "sequence":
        return
    if (style, type(part)) not in MADE:
        able = [kind.__name__ for one, kind in MADE if one == style]
        raise ValueError(
            f"plan: {name} is a {type(part).__name__}, and {style} is of {' or '.join(able)}"
        )
    if isinstance(part, nn.Embedding) and (part.max_norm is not None or part.scale_grad_by_freq):
        raise ValueError(f"plan: {name} has max_norm or scale_grad_by_freq: leave it whole")
    if isinstance(part, nn.Linear) and style != "vocabulary":
        size = part.out_features if style == "columns" else part.in_features
        if size % tp.size:
            raise ValueError(
                f"plan: {name} has {size} {style}, which tp ({tp.size}) does not divide: use "
                "another tp, or leave it whole"
            )
