"""benchmarks/planning/scaling.py: a row on another number of GPUs, and the cost of failures."""

import pytest

from benchmarks.planning.published import read_rows
from benchmarks.planning.scaling import TABLE, losses, on, point, replicas

ROWS = read_rows([TABLE])


def test_a_replica_keeps_its_sequences():
    trillion = on(ROWS[-1], 8)
    said = {name: trillion.numbers[name] for name in ("tp", "pp", "dp", "gbs", "num_gpus")}
    assert said == {"tp": 8, "pp": 64, "dp": 8, "gbs": 4096, "num_gpus": 4096}
    assert replicas(ROWS[-1]) == [1, 2, 4, 6, 8] and replicas(ROWS[0])[-1] == 4480
    assert on(ROWS[0], 32).numbers == ROWS[0].numbers


def test_weak_scaling_is_as_published():
    """Within a tenth, which is what the whole table is held to; more replicas are no faster."""
    for row in (ROWS[3], ROWS[4]):
        here, wide = point(row), point(on(row, 2 * int(row.numbers["dp"])))
        assert here.seconds == pytest.approx(row.measured(), rel=0.1)
        assert 0.95 * here.teraflops < wide.teraflops <= here.teraflops


def test_what_failures_cost():
    """By hand: 12 bytes of 1,008e9 parameters at 273 GB/s; 54 days of 16,384 GPUs over 419."""
    found = losses(ROWS[-1], 3072)
    assert found.saved == pytest.approx(12 * 1008e9 / 273e9)
    assert found.between == pytest.approx(54 * 24 * 16384 / 419 / 3072)
    assert found.every == pytest.approx((2 * found.saved * found.between * 3600) ** 0.5 / 60)
    assert found.share == pytest.approx(0.049, abs=5e-4)
