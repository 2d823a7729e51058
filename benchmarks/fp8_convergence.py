"""Training in eight bits beside bf16: the same model, seed and data, each recipe, and a bf16
control that adds in another order (in two microbatches), which is how far two runs part that
compute the same.

    python benchmarks/fp8_convergence.py run fp8-rowwise   one curve, into build/fp8/0.0005/
    python benchmarks/fp8_convergence.py draw              docs/fp8-convergence.png, and the table

A Llama of about a million parameters reads the Python standard library's source for 1,000 steps of
512 tokens. A curve that was stopped goes on from its checkpoint. What is held: the mean loss of
each 100 steps after the warm-up is within 0.5 % of bf16's, at a learning rate where two runs of
bf16 stay together for so long; `--lr` tries another (docs/how-to/fp8.md). Two faults are to fail:
scales frozen after the first step, and gradients rounded to E5M2 without a scale. What no
curve shows, an amax that tp does not reduce, is seen where scales
are compared (tests/golden/test_eight_bits.py).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
from torch import Tensor

from dolmen import cli
from dolmen.ops import numerics
from dolmen.parallel.quantized_product import Delayed, Fp8Product, Operands

ROOT = Path(__file__).parents[1]
FOLDER, PICTURE = ROOT / "build" / "fp8", ROOT / "docs" / "fp8-convergence.png"
STEPS, WARMUP, MEAN, BOUND = 1000, 100, 100, 0.005
RATE = 5e-4
OPTIONS = """
    train pretrain --model.model-type llama --model.vocab-size 512 --model.hidden-size 128
    --model.intermediate-size 384 --model.num-hidden-layers 4 --model.num-attention-heads 4
    --model.num-key-value-heads 4 --model.max-position-embeddings 128
    --model.tie-word-embeddings --data.path python-standard-library --data.tokenizer bpe:512
    --train.sequence-length 64 --train.global-batch-size 8 --train.dtype bfloat16
    --train.device cpu --optimizer.schedule cosine --checkpoint.every 200 --checkpoint.keep 1
    --log.validate-every 0
"""
FAULTS = {
    "frozen scales": "--train.precision fp8-delayed",
    "unscaled gradients": "--train.precision fp8-tensorwise",
}
CURVES = {
    "bf16": "",
    "bf16, another order": "--train.microbatch-size 4",
    **{name: f"--train.precision {name}" for name in numerics.GRANULARITY},
    "fp8-delayed, tp 2": "--train.precision fp8-delayed --layout.tp 2",
    "fp8-rowwise, tp 2": "--train.precision fp8-rowwise --layout.tp 2",
    **FAULTS,
}


def frozen(self: Delayed, amaxes: Tensor, updates: int) -> None:
    """In place of Delayed.enter: the scales of the first step, before anything was learned."""
    if not self.initialized:
        entered(self, amaxes, updates)
    self.now.zero_()


def unscaled(self: Fp8Product, parts: list, operand: numerics.Operand, along: int) -> Operands:
    """In place of Fp8Product.quantise: a gradient's scale is 1."""
    made = rounded(self, parts, operand, along)
    if operand != "gradient":
        return made
    ones = [scale / scale for scale in made.scales]
    return made._replace(
        payloads=[part.to(p.dtype) for part, p in zip(parts, made.payloads, strict=True)],
        scales=ones,
    )


entered, rounded = Delayed.enter, Fp8Product.quantise


def train(name: str, steps: int, rate: float) -> int:
    """The curve of a name, in this process and those it starts."""
    out = folder(name, rate)
    words = OPTIONS.split() + ["--optimizer.lr", str(rate)] + CURVES[name].split()
    words += ["--train.steps", str(steps), "--optimizer.warmup-steps", str(min(WARMUP, steps - 1))]
    words += ["--out", str(out), "--data.cache", str(FOLDER / "cache")]
    words += ["--resume"] if (out / "config.yaml").exists() else []
    if name not in FAULTS:
        return subprocess.run([sys.executable, "-m", "dolmen", *words]).returncode
    fault = (
        mock.patch.object(Delayed, "enter", frozen)
        if name == "frozen scales"
        else mock.patch.object(Fp8Product, "quantise", unscaled)
    )
    with fault:
        return cli.main(words)


def folder(name: str, rate: float) -> Path:
    """Of a curve."""
    return FOLDER / f"{rate:g}" / name.replace(", ", "-").replace(" ", "-")


def losses(name: str, rate: float) -> np.ndarray:
    """Of each step that has been made; none where the curve has not begun."""
    file = folder(name, rate) / "metrics.jsonl"
    if not file.exists():
        return np.empty(0)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return np.array([row["loss"] for row in rows if row.get("loss") is not None])


def means(curve: np.ndarray) -> np.ndarray:
    """Of each whole 100 steps."""
    return curve[: len(curve) // MEAN * MEAN].reshape(-1, MEAN).mean(1)


def draw(rate: float) -> None:
    """The table, and the picture: losses, and what they are over bf16's."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    compared(rate, left, right)
    left.legend(frameon=False, ncols=2, fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def compared(rate: float, left: plt.Axes, right: plt.Axes) -> None:
    """Curves of a rate, and what they are over bf16's."""
    base = means(losses("bf16", rate))
    steps = (np.arange(len(base)) + 0.5) * MEAN
    for i, name in enumerate(CURVES):
        own = means(losses(name, rate))[: len(base)]
        if not len(own):
            continue
        off = own / base[: len(own)] - 1
        style = {"linestyle": ":"} if name in FAULTS else {}
        style |= {"color": "black" if name.startswith("bf16") else f"C{i}"}
        left.plot(steps[: len(own)], own, label=name, **style)
        right.plot(steps[: len(own)], 100 * off, **style)
        after = off[WARMUP // MEAN :]
        if len(after):
            most = after[np.abs(after).argmax()]
            verdict = "fails" if abs(most) > BOUND else "holds"
            print(f"{rate:g} {name:22} {len(own) * MEAN:5} steps  {most:+7.2%}  {verdict}")
    right.axhspan(-100 * BOUND, 100 * BOUND, color="0.9", zorder=0)
    right.set_ylim(-0.75, 5.5)
    right.set_ylabel("over bf16, %")
    right.set_xlabel("step")
    left.set_xlabel("step")
    left.set_ylabel(f"loss, mean of {MEAN} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description="Training in eight bits beside bf16.")
    parser.add_argument("what", choices=("run", "draw"))
    parser.add_argument("name", nargs="?", choices=tuple(CURVES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lr", type=float, default=RATE)
    asked = parser.parse_args()
    if asked.what == "draw":
        draw(asked.lr)
    elif asked.name is None:
        parser.error(f"give a curve: {', '.join(CURVES)}")
    else:
        FOLDER.mkdir(parents=True, exist_ok=True)
        sys.exit(train(asked.name, asked.steps, asked.lr))


if __name__ == "__main__":
    main()
