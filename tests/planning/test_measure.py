"""This machine measured: what is written is read as a cluster, and every number is of its own."""

import pytest

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
