"""Devices and clusters: what their files may say, how a group's links follow from placement, and
what a collective takes by the closed forms of rings."""

import math

import pytest
import yaml

from dolmen.core.topology import Topology
from dolmen.planning.cost import Placement, collective_seconds, send_seconds
from dolmen.planning.hardware import CLUSTERS, DEVICES, known_names, read_cluster, read_device

SHARES = {"product": 0.8, "attention": 0.5, "memory": 0.8, "variation": 0.01}


@pytest.mark.parametrize("name", known_names(CLUSTERS))
def test_every_cluster_is_read_and_says_its_sources(name):
    cluster = read_cluster(name)
    assert cluster.gpus == cluster.nodes * cluster.gpus_per_node
    assert yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text())["sources"]


@pytest.mark.parametrize("name", known_names(DEVICES))
def test_every_constant_of_a_device_has_a_source(name):
    assert read_device(name).peak
    said = yaml.safe_load((DEVICES / f"{name}.yaml").read_text())
    constants = {"peak_tflops", "memory_gb_s", *said["efficiency"], "launch_us", "host_us"}
    assert constants - {"fp8", "tuned"} <= set(said["sources"])


def test_a_cluster_may_have_fewer_nodes():
    assert read_cluster("dgx-a100:16").gpus == 128


@pytest.mark.parametrize(
    "name, cluster, nodes, gpus",
    [
        ("dgx-h100", "hgx-h100", 512, 4096),
        ("DGX-H200:2", "hgx-h200", 2, 16),
        ("dgx-b200:1", "b200", 1, 8),
        ("8xh100", "hgx-h100", 1, 8),
        ("64xA100", "dgx-a100", 8, 64),
        ("4xh100", "hgx-h100", 1, 4),
    ],
)
def test_clusters_have_the_names_that_people_use(name, cluster, nodes, gpus):
    found = read_cluster(name)
    assert (found.name, found.nodes, found.gpus) == (cluster, nodes, gpus)


def test_a_part_of_a_node_takes_its_share_of_the_power():
    whole, half = read_cluster("8xh100").node_watts, read_cluster("4xh100").node_watts
    assert whole is not None and half == whole / 2


@pytest.mark.parametrize(
    "name, words",
    [
        ("dgx-a10", "did you mean dgx-a100"),
        ("12xh100", "use a multiple of 8, or fewer"),
        ("0xh100", "0xh100 is not a whole number of nodes"),
        ("8xh10", "no device 'h10': did you mean h100"),
        ("8000xh100", "512 nodes, but 1,000 are requested"),
        ("dgx-a100:0", "no nodes"),
        ("dgx-a100:561", "560 nodes"),
        ("zzz", "known are b200, dgx-1, dgx-2h"),
        ("nowhere.yaml", "cannot be read"),
    ],
)
def test_a_wrong_name_is_answered(name, words):
    with pytest.raises(ValueError, match=words):
        read_cluster(name)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"peak_tflops": {}}, "peak_tflops is empty"),
        ({"peak_tflops": {"int4": 1}}, "peak_tflops has int4"),
        ({"memory_gib": None}, "memory_gib is null"),
        ({"memory_gb_s": 2039e9}, "memory_gb_s"),
        ({"memory_gb_s": 2.039}, "check the units"),
        ({"memory_gib": 9000}, "memory_gib is 9,000: it must be 0.1 to 8,192 GiB"),
        ({"memory_gb_s": 60_000}, "memory_gb_s is 60,000"),
        ({"memory_gib": 0.5, "reserved_gib": 0.1}, "is read in 0.000263 s"),
        ({"peak_tflops": {"bf16": 312_00}}, "peak_tflops.bf16 is 31,200"),
        ({"multiprocessors": 6912}, "multiprocessors is 6,912"),
        ({"efficiency": SHARES | {"product": 0.0079}}, "efficiency.product is 0.0079"),
        ({"watts": 400_00}, "watts is 40,000"),
        ({"launch_us": 4000}, "launch_us is 4,000: it must be 0 to 100 us"),
        ({"efficiency": SHARES | {"product": 83}}, "efficiency.product"),
        ({"reserved_gib": 80}, "leaves no memory"),
        ({"launch_us": -1}, "launch_us"),
        ({"speed": 1}, "a field 'speed'"),
    ],
)
def test_an_absurd_device_is_refused_in_a_line(change, words, tmp_path):
    file = tmp_path / "mine.yaml"
    said = yaml.safe_load((DEVICES / "a100.yaml").read_text()) | change
    file.write_text(yaml.safe_dump(said))
    with pytest.raises(ValueError, match=words) as error:
        read_device(str(file))
    assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"inside": {"gb_s": 4800, "latency_us": 6, "share": 0.8}}, "inside.gb_s is 4,800, and"),
        ({"inside": {"gb_s": 300, "latency_us": 6e3, "share": 0.8}}, "inside.latency_us is 6,000"),
        ({"between": {"gb_s": 2e5, "latency_us": 8, "share": 0.8}}, "between.gb_s is 200,000"),
        ({"node_kw": 650}, "node_kw is 650, 203 times what its 8 GPUs of 400 W take"),
        ({"gpus_per_node": 4480}, "gpus_per_node is 4,480: it must be 1 to 1,152 GPUs"),
        ({"storage_gb_s": 5e4}, "storage_gb_s is 50,000"),
        ({"nodes": 500_000}, "nodes is 500,000"),
    ],
)
def test_an_absurd_cluster_is_refused_in_a_line(change, words, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        yaml.safe_dump(yaml.safe_load((CLUSTERS / "dgx-a100.yaml").read_text()) | change)
    )
    with pytest.raises(ValueError, match=words) as error:
        read_cluster(str(file))
    assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)


def test_a_device_without_a_number_is_refused(tmp_path):
    said = yaml.safe_load((DEVICES / "a100.yaml").read_text())
    for name in said.keys() - {"watts"}:
        file = tmp_path / "mine.yaml"
        file.write_text(yaml.safe_dump({k: v for k, v in said.items() if k != name}))
        with pytest.raises(ValueError, match=f"has no {name}"):
            read_device(str(file))


def road(axis: str, used: int = 8, **sizes: int):
    placed = Placement(read_cluster("dgx-a100"), Topology(**sizes), used)
    return placed.road(placed.topology.group(axis, 0))


def test_groups_cross_the_links_that_their_ranks_lie_on():
    assert road("tp", tp=8).tier == "node"
    assert road("dp", tp=8, dp=8).tier == "leaf"
    assert road("dp", tp=8, dp=64).tier == "spine"
    assert road("pp", tp=8, dp=8, pp=35).tier == "core"


def test_groups_that_share_a_node_share_its_adapters():
    """All 8 GPUs of a node in one group have its 8 adapters, 4 of them a half, 1 an eighth."""
    between = read_cluster("dgx-a100").between
    assert between is not None
    node = between.rate
    for tp in (1, 2, 8):
        group = road("dp", tp=tp, dp=64)
        assert group.together == 8 // tp
        assert group.rate == node / tp
    # with half of the GPUs idle, each has two adapters
    assert road("dp", used=4, tp=4, dp=16).rate == node / 4


def test_oversubscription_thins_what_goes_through_it(tmp_path):
    said = yaml.safe_load((CLUSTERS / "dgx-a100.yaml").read_text())
    said["tiers"][1]["oversubscription"] = 4
    file = tmp_path / "thin.yaml"
    file.write_text(yaml.safe_dump(said))
    thin = Placement(read_cluster(str(file)), Topology(tp=8, dp=160), 8)
    whole = road("dp", tp=8, dp=160)
    assert (whole.tier, thin.road(range(0, 1280, 8)).tier) == ("core", "core")
    assert thin.road(range(0, 1280, 8)).rate == whole.rate / 4
    assert thin.road(range(0, 160, 8)).rate == whole.rate  # within a leaf


def test_a_ring_sends_what_its_formula_says():
    ring, payload = road("tp", tp=8), 10**9
    wire = payload / ring.rate
    steps = 7 * ring.step
    spec = math.log2(8) * ring.step
    assert collective_seconds("all-gather", payload, ring) == pytest.approx(7 / 8 * wire + steps)
    assert collective_seconds("all-reduce", payload, ring) == pytest.approx(
        2 * 7 / 8 * wire + 2 * steps
    )
    small = collective_seconds("all-reduce", 1000, ring)
    assert small == pytest.approx(2 * spec, rel=1e-3)  # by a tree
    assert collective_seconds("all-reduce", payload, road("tp", tp=1)) == 0
    with pytest.raises(ValueError, match="no collective"):
        collective_seconds("gossip", payload, ring)


def test_a_ring_over_nodes_goes_through_every_rank_of_each():
    """16 ranks in two nodes: 14 hops inside them, and one between; so small gathers of many nodes
    take the longer the more ranks there are.
    """
    both = road("dp", dp=16)
    assert both.nodes == 2
    small = collective_seconds("all-gather", 16, both)
    assert small == pytest.approx(14 * both.step + both.latency, rel=1e-3)


def test_gpus_without_a_switch_share_the_links_to_their_peers():
    """Of six links of a DGX-1's GPU to four others, two GPUs have a quarter, and five all."""
    dgx = read_cluster("dgx-1")
    placed = Placement(dgx, Topology(tp=8), 8)
    rates = [placed.road(range(n)).rate / dgx.inside.rate for n in (2, 3, 5, 8)]
    assert rates == [0.25, 0.5, 1, 1]
    switched = Placement(read_cluster("dgx-a100"), Topology(tp=8), 8)
    assert switched.road(range(2)).rate == switched.road(range(8)).rate


def test_of_an_all_to_all_what_stays_in_a_node_does_not_leave_it():
    both = road("ep", dp=16, ep=16)
    seconds = collective_seconds("all-to-all", 16 * 10**9, both)
    assert seconds == pytest.approx(8 * 10**9 / both.alone, rel=1e-3)


def test_a_send_has_the_adapter_of_its_own_gpu():
    hop = road("pp", tp=8, pp=2)
    assert send_seconds(10**9, hop) == pytest.approx(10**9 / (25e9 * 0.75), rel=1e-3)


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(ValueError, match="36,000 ranks take 4,500 nodes of 8 GPUs"):
        Placement(read_cluster("dgx-a100"), Topology(dp=36000), 8)
    with pytest.raises(ValueError, match="9 GPUs per node"):
        Placement(read_cluster("dgx-a100"), Topology(), 9)
