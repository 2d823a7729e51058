"""bf16 over fp32 masters: the dtypes of everything, and gradients, norms and losses of two steps
within rounding of one process, in bf16 and in fp32.
"""

from functools import cache, partial

import half
import pytest
import torch
from controls import damaged
from damages import untyped
from spawning import Row
from table import SINGLE, Layout, Run, run

from dolmen.core import mesh as meshes

# bf16 has 8 bits: 2^-9 a rounding, some dozen of them in a row, in another order on each layout, so
# two layouts differ as much as either does from fp32. Measured over all rows at most 0.048 of a
# gradient's norm (q and k of the last layer: softmax's backward is a difference), 5.8e-3 of the
# whole norm, 2.7e-4 of the loss; one process in bf16 is off fp32 by 0.041, 5.8e-3 and 1.6e-4.
TOLERANCE = {"gradient": 0.08, "norms": 1e-2, "losses": 5e-4}
WORKS = {"norm", "linear", "stream", "attention"}
RESTS = {"master", "moment", "gradient"}


def dtypes(family: str) -> set[str]:
    """What there is to see in a model, in which dtype."""
    experts = family == "qwen3-moe"
    works = WORKS | ({"expert", "experts' result"} if experts else set())
    rests = RESTS | ({"router", "scores"} if experts else set())
    return {f"{kind} torch.bfloat16" for kind in works} | {
        f"{kind} torch.float32" for kind in rests
    }


@cache
def alone(family: str) -> tuple[Run, Run]:
    """One process in bf16, and in fp32."""
    with meshes.process_group_context(None, torch.device("cpu")):
        rounded, seen = half.bfloat16(family, Layout())
    assert seen == dtypes(family)
    return rounded, run(half.CONFIGS[family], SINGLE, Layout(), steps=half.STEPS)


@pytest.mark.parametrize("row", [half.row(*case).parameter for case in half.ROWS])
def test_bfloat16(row, result):
    got, seen = result(row)
    family = row.call.args[0]
    assert seen == dtypes(family)
    layout = row.call.args[1]
    # sums over ranks or microbatches need more than 8 bits: 11 to 45 % of the elements do not; all
    # would fit if the sums were rounded to bf16, as they do where nothing is added
    if family != "qwen3-moe" and layout.dp * layout.cp * layout.accumulation > 1:
        assert rounded(got.gradients[0]) < 0.6
    for want, of in zip(alone(family), ("bf16", "fp32"), strict=True):
        for kind, (error, where) in half.errors(got, want).items():
            assert error <= TOLERANCE[kind], (
                f"{kind} of {row.name} differ from one process in {of} by {error:.1e} at {where}"
            )


def rounded(gradients: dict) -> float:
    """Share of the elements of all gradients that bf16 can hold, zeros left out."""
    flat = torch.cat([torch.from_numpy(g).flatten() for g in gradients.values()])
    flat = flat[flat != 0]
    return float((flat == flat.bfloat16().float()).double().mean())


def without_partial(family: str, layout: Layout) -> tuple[Run, set[str]]:
    with damaged(untyped("residual_partial")):
        return half.bfloat16(family, layout)


DAMAGED = "qwen3", Layout.of("tp2 sp zero1 acc4")


@pytest.mark.parametrize("row", [Row("a norm", 2, partial(without_partial, *DAMAGED)).parameter])
def test_a_gradient_left_out_is_more_than_rounding(row, result):
    """Negative control: the norms' gradients of one of two ranks."""
    error, where = half.errors(result(row)[0], alone(DAMAGED[0])[0])["gradient"]
    assert error > 5 * TOLERANCE["gradient"] and "norm" in where
