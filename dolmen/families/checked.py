"""How close each family is to its reference, as benchmarks/families.py measured it and wrote it to
checked.json: what `dolmen families` and docs/reference/families.md show.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dolmen.files import gate

PLAIN = "plain reference"
"""Reference of a case for which transformers has no class."""
FILE = Path(__file__).with_name("checked.json")
KIND = gate.Kind(list[dict[str, Any]])


@dataclass(frozen=True)
class Checked:
    """Measured differences from the reference implementation, of one small randomly initialised
    model of a family.
    """

    case: str
    model_type: str
    parameters: int
    against: str
    """Reference implementation: a class of transformers, or one written from the published
    equations.
    """
    logits: float
    """Largest difference of logits in fp32, relative to their standard deviation."""
    gradients: float
    """Largest difference of a gradient in fp32, relative to the largest element of its tensor."""
    gradients_fp64: float
    """Largest difference in float64, where only the order of sums may differ."""
    texts: int | None
    """How many of three greedy completions, generated with a KV cache, equal the reference's; None:
    the model cannot generate (encoder).
    """
    layouts: dict[str, float | str]
    """Layout -> largest difference of a gradient from that of one process, in float64; or the error
    message if the model cannot be split so.
    """


@cache
def measured_cases() -> tuple[Checked, ...]:
    """Return the cases recorded in checked.json, ordered by family and case; read once."""
    return tuple(Checked(**row) for row in gate.read_json(FILE, KIND))


def cases_of(model_type: str) -> list[Checked]:
    """Return the measured cases of one family, by its name."""
    return [row for row in measured_cases() if row.model_type == model_type]


def worst(rows: list[Checked], number: str) -> float:
    """Return the largest value of the field named `number` over the cases."""
    return max(vars(row)[number] for row in rows)


def layouts(rows: list[Checked]) -> dict[str, str]:
    """Return layout -> "" if the model could be split so in every case (its gradients were compared
    with those of one process), else in how many of them, "3 of 4".
    """
    names = list(dict.fromkeys(name for row in rows for name in row.layouts))
    done = {n: sum(not isinstance(row.layouts.get(n, ""), str) for row in rows) for n in names}
    return {
        name: "" if count == len(rows) else f"{count} of {len(rows)}"
        for name, count in done.items()
    }
