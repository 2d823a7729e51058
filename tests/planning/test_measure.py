"""This machine measured: what is written is read as a cluster, and every number is of its own."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from dolmen.planning import measure
from dolmen.planning.hardware import read_cluster
from dolmen.planning.measure import CLUSTER, MeasuredRates, device_text

FOUND = MeasuredRates({"fp32": 5e10, "bf16": 2e11}, 0.7, 8e9, 2e-6)


def test_what_was_measured_is_read_as_a_cluster(tmp_path):
    (tmp_path / "local-device.yaml").write_text(device_text(FOUND))
    (tmp_path / "local.yaml").write_text(CLUSTER)
    here = read_cluster(str(tmp_path / "local.yaml"))
    device = here.device
    assert (here.gpus, here.nodes) == (1, 1)
    assert device.rate("bf16") * device.product == pytest.approx(2e11 * 0.7, rel=1e-3)
    assert (device.bandwidth, device.host) == pytest.approx((8e9, 2e-6))
    assert device.reserved < device.memory


def test_a_lone_process_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "SECONDS", 0.02)
    monkeypatch.setattr(measure, "SWEPT", 2**16)
    here = read_cluster(str(measure.measure(tmp_path)))
    assert here.gpus == 1 and here.device.rate("fp32") > 0


def test_the_fastest_call_is_timed_after_one_to_warm_up(monkeypatch):
    """By a clock that is set: calls of 9, 5, 2 and 4 seconds, as far as ten seconds allow."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now.seconds)
    lengths = iter((9.0, 5.0, 2.0, 4.0, 1.0))

    def call() -> None:
        now.seconds += next(lengths)

    assert measure.fastest(call, 10.0) == 2 and next(lengths) == 1
    lengths = iter((1.0, 3.0, 2.0))
    assert measure.fastest(call, 0.0) == 3  # one call at least


def test_rates_are_what_was_done_over_the_seconds_that_it_took(monkeypatch):
    seconds = iter((1e-3, 0.5, 3e-6))
    monkeypatch.setattr(measure, "fastest", lambda call: (call(), next(seconds))[1])
    monkeypatch.setattr(measure, "matmul_peak", lambda _, dtype, __: 4e12 / dtype.itemsize)
    monkeypatch.setattr(measure, "SWEPT", 2**16)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    found = measure.measure_device()
    assert found.products == {"fp32": 1e12, "bf16": 2e12} and found.operator == 3e-6
    assert found.share == pytest.approx(2 * 512 * 768 * 3072 / 1e-3 / 1e12, abs=1.5)
    assert found.share == 1.0  # no more than the peak
    assert found.bandwidth == 8 * 2**16 / 0.5  # four bytes read and four written of each
    seconds = itertools.chain((1.0,), itertools.repeat(1.0))
    assert measure.measure_device().share == 2 * 512 * 768 * 3072 / 1e12
