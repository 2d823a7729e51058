"""The cluster of a published run: by what its GPU is called, and its network as people write it."""

import re
from dataclasses import replace

from benchmarks.planning.published import Published, bare
from dolmen.planning.hardware import Cluster, read_cluster

# what a GPU is called -> the cluster that has it; the first that is found
CLUSTERS = (
    (r"gb[23]00|nvl72", "gb200-nvl72"),
    (r"b[23]00", "b200"),
    (r"h200", "hgx-h200"),
    (r"h100.*(500 ?w|hbm2e|96 ?gb)", "grand-teton"),
    (r"h[18]00|gh200|hopper", "hgx-h100"),
    (r"(a100|a800|ampere).*\b40 ?gb", "dgx-a100-40gb"),
    (r"a[18]00|ampere|selene", "dgx-a100"),
    (r"dgx-?2|sxm3", "dgx-2h"),
    (r"v100|volta|dgx-?1", "dgx-1"),
)


def cluster_of(row: Published, warnings: list[str]) -> Cluster:
    """By the GPU's name, and its network where the row says it."""
    name = row.gpu.lower()
    name += f" {int(row.numbers['gpu_mem_gb'])}gb" if "gpu_mem_gb" in row.numbers else ""
    found = next((to for pattern, to in CLUSTERS if re.search(pattern, name)), None)
    if found is None:
        warnings.append(f"gpu {row.gpu[:40]!r} is not known: taken for an A100")
    cluster = read_cluster(found or "dgx-a100")
    if found is None:  # of which no run is known
        cluster = replace(cluster, device=replace(cluster.device, name=row.gpu[:40] or "unknown"))
    per_node = row.count("gpus_per_node")
    if cluster.name == "dgx-1" and per_node == 16:
        cluster = read_cluster("dgx-2h")
    if per_node and per_node != cluster.gpus_per_node and cluster.between is not None:
        # another board of the same GPUs: as many adapters for each
        scale = per_node / cluster.gpus_per_node
        between = replace(cluster.between, bandwidth=cluster.between.bandwidth * scale)
        cluster = replace(cluster, gpus_per_node=per_node, between=between)
    rate = network(row.text_of_network, cluster.gpus_per_node)
    if rate and cluster.between is not None:
        cluster = replace(cluster, between=replace(cluster.between, bandwidth=rate))
    crosses = (row.count("num_gpus") or 1) > cluster.gpus_per_node
    if not rate and crosses and bare(row.text_of_network):
        warnings.append(
            f"interconnect {row.text_of_network[:40]!r} says no rate between nodes, such as "
            f"8 x 200 Gb/s: taken for that of {cluster.name}"
        )
    nodes = -(-(row.count("num_gpus") or 1) // cluster.gpus_per_node)
    return replace(cluster, nodes=max(cluster.nodes, nodes, row.count("num_gpus") or 1))


def network(text: str, gpus: int) -> float | None:
    """Bytes per second of a node's adapters, as people write it; None where they do not. GB are
    bytes, Gb and gb bits.
    """
    unit = r"(GB|[Gg]b)"
    if found := re.search(
        rf"([0-9.]+)\s*{unit}(?:/s|ps|it/s)?\s*(?:\([^)]*\)\s*)?(?:per|/|an?)\s*(?i:gpu)", text
    ):
        before = re.split("[;,+]", text[max(0, found.start() - 24) : found.start()].lower())[-1]
        if "nvlink" not in before and "nvswitch" not in before:
            return float(found[1]) * _bytes(found[2]) * gpus
    if found := re.search(rf"([0-9]+)\s*[xX]\s*([0-9.]+)\s*{unit}", text):
        return int(found[1]) * float(found[2]) * _bytes(found[3])
    between = r"(?:inter-?node|(?:per|/|an?)\s*node|between nodes)"
    if found := re.search(rf"([0-9.]+)\s*{unit}(?:/s|ps|it/s)?\s*(?:\([^)]*\)\s*)?{between}", text):
        return float(found[1]) * _bytes(found[2])
    return None


def _bytes(unit: str) -> float:
    return 1e9 if unit == "GB" else 1e9 / 8
