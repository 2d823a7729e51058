"""Rows of the second golden table (tests/oracle) on the device: what `dolmen.train` gives beside
the frozen numbers of the oracle's float64, within the bounds that the CPU is held to.
"""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import compare, tables
from benchmarks.gpu.case import Case, Context, Record

adapter, freeze, rows, trainer = (
    tables.load("oracle", name) for name in ("adapter", "freeze", "rows", "trainer")
)


# float64's sums on a GPU have no order of their own: a hundred roundings more
LOOSER = {"float64": 100.0, "float32": 4.0, "bfloat16": 1.0, "float16": 1.0}
FEW = ("llama", "bfloat16-mixtral")


def cases(context: Context) -> Iterator[Case]:
    """In fp32 and half precision, which is what a GPU trains in; then the rows that tell only in
    float64.
    """
    asked = [row for row in rows.ROWS if context.full or row.name in FEW]
    for dtypes in (("float32", "bfloat16", "float16"), ("float64",)):
        for row in asked:
            for dtype in row.dtypes:
                if dtype in dtypes and (dtype != "float64" or "float32" not in row.dtypes):
                    yield Case(f"{row.name} {dtype}", 1, partial(golden, row, dtype))


def golden(row: Any, dtype: str, record: Record) -> None:
    torch.set_num_threads(1)
    want = freeze.frozen()[row.name]
    with tempfile.TemporaryDirectory() as to:
        made = adapter.material(Path(to))
        weights = trainer.initial(row.job, row.special, row.alike)
        then = None if row.then is None else {"global_batch_size": row.then}
        data = rows.DATA[row.data]
        given = row.job, data, made, weights, Path(to) / "run", dtype, row.train, row.resume, then
        got, _ = adapter.run(*given)
    loss, norm = (LOOSER[dtype] * bound for bound in rows.TOLERANCE[dtype][:2])
    loss *= 1 if row.at_rest else 4  # as in test_oracle.py: a token with another expert
    for kind, bound in (("losses", loss), ("norms", norm), ("rates", 1e-14), ("tokens", 0.0)):
        off = freeze.difference(vars(got)[kind], want[kind])
        record.check(kind, off, bound, "what the CPU is held to in tests/oracle")
    record.check(
        "validation loss", compare.apart([got.validation[0]], want["validation"][:1]), loss, "same"
    )
    if row.at_rest is False or row.job.loss_scale is None or row.resume is not None:
        return
    skipped = [sum(want["skipped"][: i + 1]) for i in range(len(want["skipped"]))]
    record.check(
        "skipped", freeze.difference(got.skipped, skipped), 0.0, "a step is skipped or not"
    )
