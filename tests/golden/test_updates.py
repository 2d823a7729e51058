"""Muon over layouts. Its update of a matrix is of the whole logical matrix, so unlike AdamW's it
crosses every axis that cuts one: rows of the golden table with --optimizer.name muon, in float64
and in fp32; and ways to get it wrong.

Orthogonalised, a gradient's singular value of any size becomes one of about 1, what rounding has
made of the small ones too: a difference of gradients is 25 times as large in an update at most, 2
to 5 times in the middle, of the matrices of these models. So fp32 keeps the table's bounds, by
eps 1e-3 for what is AdamW's (1.8e-6 of a gradient, 1e-7 of norms and losses were the worst), and
float64 shows that all of it is rounding (8e-14).
"""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from spawning import Row
from table import FAMILIES, Layout, alone, compare, differences, hold, run

from dolmen.core import collectives, state
from dolmen.optim import muon
from dolmen.optim.optimizer import OptimizerConfig
from dolmen.parallel import assembly
from dolmen.parallel.assembly import Assembly

MUON = OptimizerConfig(name="muon", lr=1e-2, schedule="constant", clip=0.25, eps=1e-3)
DOUBLE = 1e-11
LAYOUTS = [
    Layout.of(line)
    for line in """
    tp2                             | qwen3
    dp2                             |
    dp2 zero1 acc4                  | llama
    dp2 zero2                       | qwen3-moe
    dp2 zero3                       | gpt2
    cp2                             | llama
    pp2 acc4                        | gpt2
    dp2 ep2 zero1                   |
    cp2 ep2 zero2 acc2              | qwen3-moe
    tp4                             |
    dp2 tp2 sp zero3                | llama
    dp2 tp2                         | qwen3
    cp2 tp2 sp acc4                 |
    pp2 dp2 acc4 zero-bubble-v v2 zero2 | gpt2
    dp4 ep2 zero1                   |
    dp2 tp2 sp ep2 zero2            | qwen3-moe
    dp4 zero3 acc4                  |
    pp2 dp2 tp2 sp acc4 zero3       |
""".splitlines()
    if line.strip()
]


def rows(dtype: torch.dtype, layouts: list[Layout]) -> list[Row]:
    return [
        Row(
            f"{layout}-{family}",
            layout.world,
            partial(compare, FAMILIES[family], layout, optimizer=MUON, dtype=dtype),
            full=family not in layout.short,
        )
        for layout in layouts
        for family in layout.families
    ]


@pytest.mark.parametrize("row", [row.parameter for row in rows(torch.float64, LAYOUTS)])
def test_in_float64_the_layout_changes_nothing(row, result):
    for kind, (difference, where) in result(row).items():
        assert difference <= DOUBLE, f"{kind} of {row.name} differ by {difference:.1e} at {where}"


IN_FP32 = [
    Layout.of(line)
    for line in (
        "tp2 | qwen3",
        "dp2 zero1 acc4 |",
        "dp2 ep2 zero1 | qwen3-moe",
        "dp2 tp2 sp zero3 | llama",
    )
]


@pytest.mark.parametrize("row", [row.parameter for row in rows(torch.float32, IN_FP32)])
def test_in_fp32_within_the_bounds_of_the_table(row, result):
    hold(result(row), row.name)


def per_rank(patch):
    """Each rank orthogonalises its own part, and scales by its shape."""
    patch.setattr(Assembly, "apply", lambda self, make, parts: [make(part) for part in parts])


def scale_of_the_part(patch):
    """The whole is orthogonalised, the scale is that of a rank's part."""
    apply = Assembly.apply

    def wrong(self, make, parts):
        right = apply(self, make, parts)
        factors = [
            (max(part.shape) / max(shape)) ** 0.5
            for part, shape in zip(parts, self.shapes, strict=True)
        ]
        return [factor * x for factor, x in zip(factors, right, strict=True)]

    patch.setattr(Assembly, "apply", wrong)


def fused(patch):
    """Neighbours of equal width (q, k and v; gate and up) are one matrix."""
    patch.setattr(Assembly, "apply", lambda self, make, parts: fuse(make, parts))


def fuse(make, parts):
    out, i = [], 0
    while i < len(parts):
        j = i + 1
        while j < len(parts) and parts[j].shape[1] == parts[i].shape[1]:
            j += 1
        out += make(torch.cat(list(parts[i:j]))).split([p.shape[0] for p in parts[i:j]])
        i = j
    return out


def stacked(patch):
    """The experts of a stack are one matrix."""
    matrices = muon.matrices

    def flat(tensors):
        return [m for t in tensors for m in ([t.flatten(0, 1)] if t.ndim == 3 else matrices([t]))]

    patch.setattr(muon, "matrices", flat)
    patch.setattr(Assembly, "apply", lambda self, make, parts: [make(part) for part in parts])


def summed_again(patch):
    """Every rank of dp has summed the momentum, which is of the summed gradient already."""
    init, step = muon.Muon.__init__, muon.Muon.step

    def made(self, parameters, config, mesh, exact):
        init(self, parameters, config, mesh, exact)
        self.axis = mesh.dp

    def wrong(self):
        for s in self.state.values():
            if "momentum" in s:
                collectives.sum_(state.local_view(s["momentum"]), self.axis)
        step(self)

    patch.setattr(muon.Muon, "__init__", made)
    patch.setattr(muon.Muon, "step", wrong)


def parts_in_another_order(patch):
    """What came of the others is put together in the order of the ranks, backwards."""
    init = assembly._PartExchange.__init__

    def made(self, axis, entries):
        init(self, axis, entries)
        self.peers = self.peers[::-1]

    patch.setattr(assembly._PartExchange, "__init__", made)


def results_of_another(patch):
    """A result goes to where the matrix after it came from, of those alike."""
    apply = Assembly.apply

    def wrong(self, make, parts):
        out = apply(self, make, parts)
        for i in range(len(out) - 1):
            if out[i].shape == out[i + 1].shape and self.shapes[i] == self.shapes[i + 1]:
                out[i], out[i + 1] = out[i + 1], out[i]
        return out

    patch.setattr(Assembly, "apply", wrong)


CONTROLS = {
    "nothing is wrong": ("llama", "dp2 tp2 sp zero3", lambda patch: None),
    "Newton-Schulz per rank of tp": ("llama", "tp2", per_rank),
    "Newton-Schulz per rank of ZeRO": ("llama", "dp2 zero1", per_rank),
    "the scale of a part": ("gpt2", "tp2", scale_of_the_part),
    "q, k and v are one": ("llama", "one", fused),
    "experts are one": ("qwen3-moe", "one", stacked),
    "momentum is summed twice": ("llama", "dp2", summed_again),
    "parts are put together in another order": ("llama", "dp4 zero3", parts_in_another_order),
    "results go to another": ("llama", "dp2 zero1", results_of_another),
}


@contextmanager
def damaged(damage):
    with pytest.MonkeyPatch.context() as patch:
        damage(patch)
        yield


def compare_damaged(name: str) -> dict[str, tuple[float, str]]:
    family, words, damage = CONTROLS[name]
    layout = Layout() if words == "one" else Layout.of(words)
    options = dict(optimizer=MUON, dtype=torch.float64)
    want = alone(FAMILIES[family], **options)
    with damaged(damage):
        mesh = layout.mesh(torch.device("cpu"))
        return differences(run(FAMILIES[family], mesh, layout, **options), want)


@pytest.mark.parametrize(
    "row",
    [
        Row(
            name,
            1 if words == "one" else Layout.of(words).world,
            partial(compare_damaged, name),
            full=name not in ("nothing is wrong", "Newton-Schulz per rank of ZeRO"),
        ).parameter
        for name, (_, words, _) in CONTROLS.items()
    ],
)
def test_a_wrong_muon_is_seen(row, result):
    """By a hundred times what fp32 may differ by, in gradients of the steps after."""
    found = result(row)
    worst = max(found[kind][0] / DOUBLE for kind in found)
    assert worst <= 1 if row.name == "nothing is wrong" else worst >= 1e8, f"{row.name}: {found}"
