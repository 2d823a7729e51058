"""Run the oracle of every row and freeze what it gives, with the batches it was given:

    PYTHONPATH=.:tests python tests/oracle/freeze.py [--look]

prints what changed since, row by row, and writes frozen.json and batches/; --look writes nothing.
When to: a row was added, or the batches of a seed have changed with a reason. Never because dolmen
gives other numbers.
"""

import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import adapter
import numpy as np
import torch
import trainer
from rows import DATA, ROWS, Row
from torch import Tensor

HERE = Path(__file__).parent
FROZEN, BATCHES = HERE / "frozen.json", HERE / "batches"
SERIES = ("losses", "norms", "rates", "tokens", "skipped", "scales", "max_load", "balance", "z")


def oracle(row: Row, dumped: Mapping[str, np.ndarray]) -> tuple[trainer.Result, dict[str, Tensor]]:
    """What the oracle gives for a row on dumped batches, and the weights it began with."""
    weights = trainer.initial(row.job, row.special, row.alike)
    held_out = adapter.batches(dumped, "held_")
    return trainer.train(row.job, weights, batches(row, dumped), held_out), weights


def batches(row: Row, dumped: Mapping[str, np.ndarray]) -> list[trainer.Batch]:
    """What a row trains on: after another batch size, the samples go on where they were."""
    made = adapter.batches(dumped)
    if row.then is None:
        return made
    rest = {
        name: np.concatenate([vars(b)[name] for b in made[row.resume :]])
        for name in ("tokens", "labels")
    }
    parts = [
        {name: rows[at : at + row.then] for name, rows in rest.items()}
        for at in range(0, len(rest["tokens"]), row.then)
    ]
    return [*made[: row.resume], *(trainer.Batch(**part) for part in parts)]


def told(result: trainer.Result) -> dict[str, list]:
    """What is frozen of it: every series, and the norms of what is at rest."""
    rest = result.weights, result.first, result.second

    def size(tensors: dict[str, torch.Tensor]) -> float:
        return math.sqrt(sum(float(t[t.isfinite()].square().sum()) for t in tensors.values()))

    return {
        **{name: vars(result)[name] for name in SERIES},
        "validation": list(result.validation),
        "at_rest": [size(tensors) for tensors in rest],
        "biases": [float(b) for bias in result.biases for b in bias],
    }


def digest(row: Row, dumped: Mapping[str, np.ndarray], weights: dict[str, Tensor]) -> str:
    """Of everything that the numbers depend on."""
    made = hashlib.sha256(repr(row.job).encode())
    for name, array in [*dumped.items(), *((n, t.numpy()) for n, t in weights.items())]:
        made.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return made.hexdigest()


def load(name: str) -> dict[str, np.ndarray]:
    """The frozen batches of DATA[name]."""
    with np.load(BATCHES / f"{name}.npz") as held:
        return dict(held)


def frozen() -> dict[str, dict]:
    """Row name -> what is frozen of it; null stands for what is not finite."""
    rows = json.loads(FROZEN.read_text())

    def numbers(x: object) -> object:
        return [math.nan if v is None else v for v in x] if isinstance(x, list) else x

    return {name: {key: numbers(x) for key, x in row.items()} for name, row in rows.items()}


def difference(new: list[float], old: list[float]) -> float:
    """Largest relative difference; 0 where both are not finite, infinite where one is or lengths
    differ.
    """
    if len(new) != len(old):
        return math.inf
    a, b = np.array(new, np.float64), np.array(old, np.float64)
    if (np.isfinite(a) != np.isfinite(b)).any():
        return math.inf
    off = np.abs(a - b)[np.isfinite(a)] / np.maximum(np.abs(b[np.isfinite(a)]), 1e-300)
    return float(off.max(initial=0.0))


def main(look: bool) -> None:
    torch.set_num_threads(1)
    before, now = frozen() if FROZEN.exists() else {}, {}
    with tempfile.TemporaryDirectory() as folder:
        made = adapter.material(Path(folder))
        dumped = {name: adapter.dump(data, made) for name, data in DATA.items()}
    for row in ROWS:
        result, weights = oracle(row, dumped[row.data])
        now[row.name] = {"inputs": digest(row, dumped[row.data], weights), **told(result)}
        print(f"{row.name:28}{_changes(now[row.name], before.get(row.name))}")
    for name in before.keys() - now.keys():
        print(f"{name:28}gone")
    if look:
        return
    BATCHES.mkdir(exist_ok=True)
    for name, arrays in dumped.items():
        np.savez_compressed(BATCHES / f"{name}.npz", **arrays)
    lines = [
        f"{json.dumps(name)}: {json.dumps({key: _nulls(x) for key, x in row.items()})}"
        for name, row in now.items()
    ]
    FROZEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _nulls(x: object) -> object:
    """A series with null for what is not finite, for which JSON has no word."""
    return [v if math.isfinite(v) else None for v in x] if isinstance(x, list) else x


def _changes(now: dict, before: dict | None) -> str:
    if before is None:
        return "new"
    inputs = "" if now["inputs"] == before["inputs"] else "other inputs; "
    off = {key: difference(now[key], before.get(key, [])) for key in now if key != "inputs"}
    off = {key: value for key, value in off.items() if value}
    reported = ", ".join(f"{key} {value:.1e}" for key, value in off.items())
    return inputs + (reported or "the same")


if __name__ == "__main__":
    main("--look" in sys.argv)
