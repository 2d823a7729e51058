"""What the planner says of published runs, beside what was measured: python
-m benchmarks.planning.accuracy [ROWS.csv ...] [--json FILE]. Without files, of those in
benchmarks/planning/runs.

Columns are those of the published files. MFU is model FLOPs over peak: attention whole, nothing
computed again (2205.05198, section 6.3). HFU counts what is computed again too. Both are of the
predicted time and the datasheet's peak of the dtype (bf16 where products are in fp8).
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.planning.calibrate import (
    Calibration,
    calibrate,
    coverage,
    errors_yaml,
    published_rows,
)
from benchmarks.planning.predict import Prediction, gib, predict
from benchmarks.planning.published import Published, read_rows
from dolmen.files.gate import Refused
from dolmen.planning.step import FILE, ErrorSpread, read_errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", type=Path, help="CSV files of runs")
    parser.add_argument("--json", type=Path, help="write the predictions to this file")
    parser.add_argument(
        "--write", action="store_true", help="learn the errors anew from the published runs"
    )
    asked = parser.parse_args()
    try:
        rows = read_rows(asked.rows) if asked.rows else published_rows()
    except Refused as error:
        print(f"error: {error}")
        return 2
    calibration = None if asked.rows else calibrate(rows)
    if asked.write:
        FILE.write_text(errors_yaml((calibration or calibrate(published_rows())).errors))
    spread = read_errors().spread
    predictions = [predict(row, spread) for row in rows]
    print(
        f"{'row':34} {'model':16} {'predicted':>10} {'90 % interval':>21} {'measured':>10}"
        f" {'error':>7}  {'GiB':>6} fits   MFU   HFU"
    )
    for prediction in predictions:
        _tell(prediction)
    _summary(predictions)
    if calibration is not None:
        for line in left_out(calibration):
            print(line)
    _spreads(predictions, spread)
    if asked.json:
        return _write(asked.json, [_row(p) for p in predictions])
    return 0


def _write(file: Path, rows: list[dict]) -> int:
    try:
        file.write_text(json.dumps({"rows": rows}, indent=1))
    except OSError as error:
        print(f"error: {file}: cannot be written: {error.strerror}")
        return 2
    return 0


def _row(p: Prediction) -> dict:
    f = p.forecast
    return {
        "row_id": p.row.row_id,
        "dataset": p.row.dataset,
        "predicted_s": f.estimate.seconds if f else None,
        "low_s": p.low if f else None,
        "high_s": p.high if f else None,
        "measured_s": p.measured,
        "predicted_gib": gib(p),
        "fits": f.fits if f else None,
        "mfu": f.mfu if f else None,
        "hfu": f.hfu if f else None,
        "chosen": p.chosen,
        "warnings": list(p.warnings),
    }


def _tell(p: Prediction) -> None:
    """A line, one more for what was chosen, and one for each warning."""
    head = f"{p.row.row_id[-34:]:34} {p.row.model[:16]:16}"
    if p.forecast is None:
        print(f"{head} {'none':>10}")
    else:
        f, measured = p.forecast, p.measured
        said = f"{measured:10.4g}" if measured else f"{'':10}"
        off = f"{f.estimate.seconds / measured - 1:+7.1%}" if measured else f"{'':7}"
        interval = f"{p.low:10.4g}-{p.high:.4g}"
        print(
            f"{head} {f.estimate.seconds:10.4g} {interval:>21} {said} {off}  {gib(p):6.1f} "
            f"{'yes' if f.fits else 'no':4} {f.mfu:5.1%} {f.hfu:5.1%}"
        )
        print(f"    {p.chosen}")
    for warning in p.warnings:
        print(f"    warning: {warning}")


def _summary(predictions: Sequence[Prediction]) -> None:
    known = [(p, p.measured) for p in predictions if p.forecast is not None]
    timed = [(p, m) for p, m in known if m is not None and p.row.status == "ok"]
    for name in [*dict.fromkeys(p.row.dataset for p, _ in timed), None]:
        some = [(p, m) for p, m in timed if name in (None, p.row.dataset)]
        if not some:
            continue
        seconds = [abs(p.known.estimate.seconds - m) for p, m in some]
        shares = [s / m for s, (_, m) in zip(seconds, some, strict=True)]
        covered = sum(p.low <= m <= p.high for p, m in some) / len(some)
        print(
            f"{name or 'all':32} n {len(some):3}  mean absolute error "
            f"{sum(shares) / len(some):6.1%}  {sum(seconds) / len(some):8.4g} s  "
            f"covered {covered:.0%}"
        )
    print(f"regret of the ranking: {_regret(timed)}")
    wrong = [p for p, _ in known if p.known.fits != (p.row.status == "ok")]
    print(
        f"false calls of fits / does not fit: {len(wrong)} of {len(known)}"
        + "".join(
            f"\n    {p.row.row_id}: said {'fits' if p.known.fits else 'does not'}, {gib(p):.1f} GiB"
            for p in wrong
        )
    )


def left_out(calibration: Calibration) -> list[str]:
    """Compare, for each publication, the mean error with factors that were fitted to all runs and
    with factors that were fitted to the others alone: the second is what a stranger's run has.
    """
    fitted, others = calibration.fitted.rows, calibration.errors.rows
    lines = ["mean absolute error with factors fitted to all publications, and to the others:"]
    for name in [*dict.fromkeys(row[1] for row in others), None]:
        both = [
            [abs(math.expm1(-error)) for _, paper, _, error in rows if name in (None, paper)]
            for rows in (fitted, others)
        ]
        means = "  ".join(f"{sum(each) / len(each):6.1%}" for each in both)
        lines.append(f"  {name or 'all':30} n {len(both[0]):3}  {means}")
    wide, inside = coverage(calibration.errors)
    lines.append(
        f"intervals made from other publications: median high / low {wide:.2f}, {inside:.0%} of "
        "runs inside"
    )
    return lines


def _regret(timed: list[tuple[Prediction, float]]) -> str:
    """Of runs that differ in layout alone: how much slower than the fastest is the one that was
    predicted fastest.
    """
    groups: dict[tuple, list[tuple[Prediction, float]]] = {}
    for p, m in timed:
        groups.setdefault(_but_layout(p.row), []).append((p, m))
    found = []
    for same in groups.values():
        if len(same) > 1:
            chosen = min(same, key=lambda item: item[0].known.estimate.seconds)[1]
            found.append(chosen / min(m for _, m in same) - 1)
    if not found:
        return "no two rows differ in layout alone"
    return f"mean {sum(found) / len(found):.1%}, most {max(found):.1%}, of {len(found)} groups"


def _but_layout(row: Published) -> tuple:
    said = {
        name: value
        for name, value in row.numbers.items()
        if name in ("num_gpus", "layers", "hidden", "seq", "vocab", "gbs")
    }
    return row.dataset, row.gpu, row.framework, row.precision, tuple(sorted(said.items()))


def _spreads(predictions: Sequence[Prediction], spread_of) -> None:
    for device in dict.fromkeys(p.device for p in predictions):
        spread: ErrorSpread = spread_of(device)
        print(f"{device}: {spread.words}; times x / {math.exp(spread.log):.3f}")


if __name__ == "__main__":
    raise SystemExit(main())
