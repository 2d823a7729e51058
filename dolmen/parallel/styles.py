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
    module: nn.Module, plan: Mapping[str, Style], mesh: Mesh, *, zero: int = 0
) -> nn.Module:
    """Shard a module in place over the mesh axis tp, and over dp by ZeRO stage `zero`; return it.

    `plan` maps names of submodules (patterns too) to how each is split: columns or rows of a linear
    layer, a norm by the tokens of a sequence, an embedding or a head by its vocabulary. Every rank
    must have the same values before, and has the same outputs after. Gradients are summed over dp,
    so divide the loss by the count of the whole batch. Raises ValueError for a module that cannot
    be split so.

        mesh = Layout(tp=2).mesh(torch.device("cpu"))
        model = dolmen.parallelize(ToyModel(), {"net1": "columns", "net2": "rows"}, mesh)
        optimizer = torch.optim.AdamW(model.parameters())

    See examples/toymodel.py and docs/how-to/parallelize.md.
    """
    styles = _styles(module, plan)
    for name, style in styles.items():
        _check(name, module.get_submodule(name), style, mesh.tp)
    places = _places(module, styles)
    # `distribute` allocates shards; values are written into them afterwards
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    partial = set()
    for name, style in styles.items():
        part = module.get_submodule(name)
        if style == "sequence":
            # each rank sees its own tokens, so its gradients are a part of the sum
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
    """Column-parallel nn.Linear: y_i = x W_i^T + b_i, this rank's outputs."""

    def __init__(self, linear: nn.Linear, tp: Axis):
        """Take over the parameters of `linear`."""
        super().__init__()
        self.weight, self.bias, self.tp = linear.weight, linear.bias, tp

    def forward(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows here"]:
        """Return this rank's outputs of x, which is whole on every rank of tp; in backward the
        gradient of x is summed over tp.
        """
        # copy: identity whose backward sums the gradients of x over tp
        return F.linear(collectives.copy(x, self.tp), self.weight, self.bias)


class _Rows(nn.Module):
    """Row-parallel nn.Linear: y = sum over ranks of x_i W_i^T, plus b once."""

    def __init__(self, linear: nn.Linear, tp: Axis):
        """Take over the parameters of `linear`."""
        super().__init__()
        self.weight, self.bias, self.tp = linear.weight, linear.bias, tp

    def forward(self, x: Float[Tensor, "*rows here"]) -> Float[Tensor, "*rows outputs"]:
        """Return all outputs on every rank of tp, from this rank's inputs: the partial products
        summed over tp.
        """
        full = collectives.all_reduce_(F.linear(x, self.weight), self.tp)
        return full if self.bias is None else full + self.bias


class _Table(nn.Module):
    """Vocabulary-parallel nn.Embedding: each rank looks up its own rows, and the sum is
    over ranks.
    """

    def __init__(self, table: nn.Embedding, tp: Axis):
        """Take over the parameter of `table`."""
        super().__init__()
        self.weight, self.rows, self.padding = table.weight, table.num_embeddings, table.padding_idx
        self.tp = TensorParallel(tp)

    def forward(self, tokens: Int64[Tensor, "*shape"]) -> Float[Tensor, "*shape width"]:
        """Return each token's row of the table; that of the padding index has no gradient."""
        embedded = vocabulary.embed(tokens.reshape(-1), self.weight, self.rows, self.tp)
        embedded = embedded.view(*tokens.shape, -1)
        if self.padding is None:
            return embedded
        # nn.Embedding gives the row of padding no gradient
        return torch.where((tokens == self.padding)[..., None], embedded.detach(), embedded)


class _Logits(nn.Module):
    """Vocabulary-parallel nn.Linear: column-parallel, its outputs gathered on every rank."""

    def __init__(self, linear: nn.Linear, tp: Axis):
        """Take over the parameters of `linear`."""
        super().__init__()
        self.weight, self.bias, self.tp = linear.weight, linear.bias, tp
        self.rows = linear.out_features

    def forward(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows vocabulary"]:
        """Return all outputs, [..., vocabulary], on every rank of tp, from x, which is whole on
        each. The ranks' shares of the rows may differ in length (10 over tp 4: 3, 3, 3, 1).
        """
        here = F.linear(collectives.copy(x, self.tp), self.weight, self.bias)
        # rows need not divide: 10 over tp 4 are 3, 3, 3 and 1
        first, _ = vocabulary.vocabulary_range(self.rows, self.tp)
        return _join_parts(here, -1, first, self.rows, self.tp)


MADE: dict[tuple[Style, type[nn.Module]], Callable[[Any, Axis], nn.Module]] = {
    ("columns", nn.Linear): _Columns,
    ("rows", nn.Linear): _Rows,
    ("vocabulary", nn.Embedding): _Table,
    ("vocabulary", nn.Linear): _Logits,
}


def _shard_tokens(part: nn.Module, tp: Axis) -> None:
    """Add hooks to `part` so that each rank of tp runs it on its own tokens (dim -2) of the first
    argument, which is whole on each, and the output is gathered over all tokens. Does nothing for
    one rank.
    """
    if tp.size == 1:
        return

    def slice_tokens(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with the first cut to this rank's tokens."""
        # the copy's backward sums over tp what the slice gives to each rank
        x, *rest = args
        return collectives.local_part(collectives.copy(x, tp), -2, tp), *rest

    def gather_tokens(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> Tensor:
        """Return the output gathered over all tokens."""
        here = y.shape[-2]
        return _join_parts(y, -2, here * tp.rank, here * tp.size, tp)

    part.register_forward_pre_hook(slice_tokens)
    part.register_forward_hook(gather_tokens)


def _join_parts(here: Tensor, dim: int, first: int, size: int, tp: Axis) -> Tensor:
    """Return the parts of all ranks of tp joined along `dim` (negative), with autograd; parts may
    differ in size: `here` starts at index `first` of `size`. Each rank pads its part with zeros and
    all are summed, so its gradient is the slice of its part.
    """
    if tp.size == 1:
        return here
    trailing = size - first - here.shape[dim]
    # F.pad counts dims from the last, (before, after) each
    padding = [0, 0] * (-dim - 1) + [first, trailing]
    return collectives.all_reduce_(F.pad(here, padding), tp)


def _styles(module: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    """Return the style of each part that the plan's names and patterns match. Raises ValueError for
    an unknown style, a pattern without match, or two styles for one part.
    """
    names = [name for name, _ in module.named_modules() if name]
    styles: dict[str, Style] = {}
    for pattern, style in plan.items():
        if style not in get_args(Style):
            raise ValueError(
                f"plan: {pattern} is {style!r}: {choices(str(style), get_args(Style))}"
            )
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            hint = did_you_mean(pattern, names, f"it has {names[:6]}")
            raise ValueError(f"plan: the module has no part {pattern}: {hint}")
        for name in matching:
            if styles.get(name, style) != style:
                raise ValueError(f"plan: {name} is {styles[name]} and {style}: list it once")
            styles[name] = style
    return styles


def _places(module: nn.Module, styles: Mapping[str, Style]) -> dict[str, state.Places]:
    """Return the placement on tp of each parameter of the module, by name, from the styles of its
    parts. Raises ValueError where two parts share a parameter that their styles place differently.
    """
    places: dict[str, state.Places] = {}
    first: dict[Tensor, str] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        part, _, last = name.rpartition(".")
        match styles.get(part), last:
            case (("columns" | "vocabulary"), _):
                places[name] = state.Shard(0)
            # the bias of rows stays whole: it is added once, after the sum
            case "rows", "weight":
                places[name] = state.Shard(1)
            case _:
                places[name] = state.Replicate()
        # tied weights are one tensor and can be cut in one way only
        other = first.setdefault(p, name)
        if places[other] != places[name]:
            raise ValueError(
                f"plan: {other} and {name} are one parameter, but would be sharded in two ways: "
                "give both the same style, or leave both out"
            )
    return places


def _check(name: str, part: nn.Module, style: Style, tp: Axis) -> None:
    """Raise ValueError if `part` cannot have the style: wrong module class, an embedding with
    max_norm or scale_grad_by_freq, or a size that tp does not divide.
    """
    if style == "sequence":
        return
    if (style, type(part)) not in MADE:
        able = [kind.__name__ for known, kind in MADE if known == style]
        raise ValueError(
            f"plan: {name} is a {type(part).__name__}, but {style} is for {' or '.join(able)}"
        )
    if isinstance(part, nn.Embedding) and (part.max_norm is not None or part.scale_grad_by_freq):
        raise ValueError(
            f"plan: {name} has max_norm or scale_grad_by_freq, which cannot be sharded: leave it "
            "out"
        )
    if isinstance(part, nn.Linear) and style != "vocabulary":
        size = part.out_features if style == "columns" else part.in_features
        if size % tp.size:
            raise ValueError(
                f"plan: {name} has {size} {style}, not divisible by tp ({tp.size}): use another "
                "tp, or leave it out"
            )
