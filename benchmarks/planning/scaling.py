"""Weak scaling of the ten models of 2104.04473, Table 1: predicted, and the published points.

    python -m benchmarks.planning.scaling --out docs/weak-scaling.png

Each model keeps its layout but for dp: a replica has the published number of sequences, so the
batch grows with the GPUs, from the fewest that hold it to all of a SuperPOD cluster (560 nodes).
Prints each published point beside its prediction and the ends of each curve, then what no curve
has: how long a checkpoint takes, how often something fails, and what both cost.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib import pyplot as plt

from benchmarks.planning import published
from benchmarks.planning.predict import predict
from benchmarks.planning.published import Published, read_rows
from dolmen.planning.hardware import read_cluster
from dolmen.planning.step import ErrorSpread

matplotlib.use("Agg")
TABLE = published.FOLDER / "megatron2021_table1.csv"
LARGEST = read_cluster("dgx-a100").gpus
WRITTEN = 273e9  # bytes a second to the files, by 384 nodes (2104.04473, section 5.10)
# of a GPU until something unexpected ends the run: 419 in 54 days of 16,384 (2407.21783, 3.3.4)
GPU_SECONDS = 54 * 86400 * 16384 / 419
RESTART = 600  # seconds from a failure to the first step; a guess
INK, BLUE, GREY = "#22303c", "#3f74ab", "#8a949c"


class Point(NamedTuple):
    gpus: int
    seconds: float
    teraflops: float
    """Of a GPU, by the paper's count: what is computed again among them."""


def point(row: Published) -> Point:
    """What is predicted of a row."""
    forecast = predict(row, lambda device: ErrorSpread(0.0, 0, True)).forecast
    gpus, flops = row.count("num_gpus"), row.flops(row.counts_again)
    assert forecast and gpus and flops, row.row_id
    seconds = forecast.estimate.seconds
    return Point(gpus, seconds, flops / seconds / gpus / 1e12)


def on(row: Published, dp: int) -> Published:
    """The same model on `dp` replicas, each with as many sequences as the row's have."""
    numbers = row.numbers
    each = numbers["gbs"] / numbers["dp"]
    gpus = numbers["tp"] * numbers["pp"] * dp
    return replace(row, numbers=numbers | {"dp": dp, "gbs": each * dp, "num_gpus": gpus})


def replicas(row: Published) -> list[int]:
    """Doublings from one replica, the published number, and as many as there are GPUs for."""
    most = LARGEST // int(row.numbers["tp"] * row.numbers["pp"])
    doubled = {2**n for n in range(int(math.log2(most)) + 1)}
    at_least = [dp for dp in doubled if dp * row.numbers["tp"] * row.numbers["pp"] >= 32]
    return sorted({*at_least, int(row.numbers["dp"]), most})


class Losses(NamedTuple):
    """What failures cost a run of a row's model, with checkpoints as often as is best."""

    gpus: int
    terabytes: float
    """A checkpoint: parameters and two moments in fp32."""
    link: float
    """Seconds of it over the nodes' links to the files."""
    saved: float
    """The same as fast as files were written."""
    between: float
    """Hours between failures."""
    every: float
    """Minutes between checkpoints: Young, 1974, sqrt(2 x saved x between)."""
    share: float
    """Of the time that is lost to saving, to work done twice and to starting again."""


def losses(row: Published, gpus: int) -> Losses:
    """Of so many GPUs."""
    cluster = read_cluster("dgx-a100")
    assert cluster.storage
    size = 12 * row.numbers["params_b"] * 1e9
    link = size / (gpus / cluster.gpus_per_node * cluster.storage)
    saved, between = max(link, size / WRITTEN), GPU_SECONDS / gpus
    every = math.sqrt(2 * saved * between)
    share = saved / every + (every / 2 + RESTART) / between
    return Losses(gpus, size / 1e12, link, saved, between / 3600, every / 60, share)


def draw(rows: list[Published], curves: list[list[Point]], to: Path) -> None:
    """Teraflops of a GPU, a panel for each model, and petaflops of all GPUs."""
    figure = plt.figure(figsize=(13, 5), dpi=120, layout="constrained")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(5, 3))[0]
    panels = left.subplots(2, 5, sharex=True, sharey=True)
    panels[0, 0].set(xscale="log", ylim=(100, 180))
    for axes, row, curve in zip(panels.flat, rows, curves, strict=True):
        gpus = row.numbers["num_gpus"]
        axes.plot([p.gpus for p in curve], [p.teraflops for p in curve], color=BLUE)
        axes.plot(gpus, row.numbers["tflops_per_gpu"], "o", color="white", markeredgecolor=INK)
        axes.plot(gpus, at(curve, gpus).teraflops, "x", color=INK)
        axes.set_title(f"{row.numbers['params_b']:.4g} B", fontsize=10, color=INK)
        finish(axes, (32, 512, 4480))
    left.supylabel("TFLOP/s of a GPU (from 100)", fontsize=10)
    left.supxlabel("GPUs: more replicas of the same layout", fontsize=10)
    together(right.subplots(), rows, curves)
    figure.savefig(to)


def together(axes, rows: list[Published], curves: list[list[Point]]) -> None:
    """Each model on its own number of GPUs, as the paper weighs it."""
    gpus = [row.numbers["num_gpus"] for row in rows]
    said = [row.numbers["tflops_per_gpu"] * n / 1000 for row, n in zip(rows, gpus, strict=True)]
    found = [at(curve, n).teraflops * n / 1000 for curve, n in zip(curves, gpus, strict=True)]
    axes.plot(gpus, said, "o", color="white", markeredgecolor=INK, label="published")
    axes.plot(gpus, found, "x", color=INK, label="predicted")
    axes.plot([], [], color=BLUE, label="predicted, other numbers of replicas")
    ends = [32, LARGEST]
    axes.plot(ends, [n * 0.312 for n in ends], color=GREY, linestyle=":", label="312 TFLOP/s each")
    for row, n, total in zip(rows, gpus, said, strict=True):
        name = f"{row.numbers['params_b']:.4g} B"
        axes.annotate(name, (n, total), (7, -9), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="PFLOP/s of all", xlim=(25, 9000))
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    finish(axes, (32, 128, 512, 1024, 3072))


def finish(axes, ticks: tuple[int, ...]) -> None:
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    axes.minorticks_off()
    axes.grid(color="#e3e0d8", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def at(curve: list[Point], gpus: float) -> Point:
    return next(point for point in curve if point.gpus == gpus)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="picture to write")
    asked = parser.parse_args()
    rows = read_rows([TABLE])
    curves = [[point(on(row, dp)) for dp in replicas(row)] for row in rows]
    print("parameters   GPUs  published s  predicted s   error   TFLOP/s  predicted   at the ends")
    for row, curve in zip(rows, curves, strict=True):
        gpus, measured = row.numbers["num_gpus"], row.measured() or math.nan
        here = at(curve, gpus)
        print(
            f"{row.numbers['params_b']:8.1f} B {gpus:7,.0f} {measured:12.2f} {here.seconds:12.2f} "
            f"{here.seconds / measured - 1:+7.1%} {row.numbers['tflops_per_gpu']:9.0f} "
            f"{here.teraflops:10.0f}   {curve[0].teraflops:.0f} on {curve[0].gpus:,}, "
            f"{curve[-1].teraflops:.0f} on {curve[-1].gpus:,}"
        )
    print("failures, of the largest model:")
    for gpus in (3072, LARGEST):
        lost = losses(rows[-1], gpus)
        print(
            f"{gpus:7,} GPUs: a checkpoint of {lost.terabytes:.1f} TB, {lost.link:.2f} s over the "
            f"links, {lost.saved:.0f} s to the files; a failure every {lost.between:.1f} h; best a "
            f"checkpoint every {lost.every:.0f} min; {lost.share:.1%} lost"
        )
    if asked.out:
        draw(rows, curves, asked.out)
        print(f"wrote {asked.out}")


if __name__ == "__main__":
    main()
