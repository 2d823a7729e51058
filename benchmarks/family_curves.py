"""Loss curves of dolmen over those of transformers trained by a plain loop (tests/oracle),
in float64: a Llama, a GPT and an expert model, 200 steps from the same weights on the same
batches. Draws docs/family-curves.png and prints the largest differences.

    PYTHONPATH=.:tests:tests/oracle python benchmarks/family_curves.py

Some 2 minutes on one core.
"""

import tempfile
from pathlib import Path

import adapter
import matplotlib.pyplot as plt
import numpy as np
import torch
import trainer
from adapter import Data
from rows import row

PICTURE = Path(__file__).parents[1] / "docs" / "family-curves.png"
STEPS = 200
MODELS = {"Llama": "llama", "GPT-2": "gpt2", "Mixtral": "mixtral"}
DTYPES = ("float64", "float32")


def curves(model: str, folder: Path, made: adapter.Material) -> dict[str, np.ndarray]:
    """Losses of each step: of the plain loop, and of dolmen in each dtype."""
    data = Data(steps=STEPS, rows=8)
    asked = row(model, model, steps=STEPS, lr=3e-3, warmup_steps=20, schedule="cosine", eps=1e-8)
    dumped = adapter.dump(data, made)
    weights = trainer.initial(asked.job, {}, False)
    held = adapter.batches(dumped, "held_")
    plain = trainer.train(asked.job, weights, adapter.batches(dumped), held)
    found = {"transformers": np.array(plain.losses)}
    for dtype in DTYPES:
        got, _ = adapter.run(asked.job, data, made, weights, folder / dtype, dtype, {})
        found[dtype] = np.array(got.losses)
    return found


def draw(all_curves: dict[str, dict[str, np.ndarray]]) -> None:
    figure, axes = plt.subplots(2, len(all_curves), figsize=(11, 5.5), sharex=True, sharey="row")
    steps = np.arange(1, STEPS + 1)
    for (name, found), (loss, off) in zip(all_curves.items(), axes.T, strict=True):
        loss.plot(steps, found["transformers"], color="0.7", linewidth=5, label="transformers")
        loss.plot(steps, found["float32"], color="black", linewidth=1, label="dolmen, float32")
        loss.set_title(name)
        for dtype, style in zip(DTYPES, ("-", "--"), strict=True):
            relative = np.abs(found[dtype] / found["transformers"] - 1)
            off.semilogy(steps, np.maximum(relative, 1e-17), style, color="black", label=dtype)
        off.set_xlabel("step")
    axes[0, 0].set_ylabel("loss")
    axes[1, 0].set_ylabel("relative difference")
    axes[0, 0].legend(frameon=False)
    axes[1, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "made").mkdir()
        made = adapter.material(folder / "made")
        found = {name: curves(model, folder / model, made) for name, model in MODELS.items()}
    for name, lines in found.items():
        truth = lines["transformers"]
        told = ", ".join(f"{d} {np.abs(lines[d] / truth - 1).max():.1e}" for d in DTYPES)
        print(f"{name:8} loss {truth[0]:.3f} to {truth[-1]:.3f}; largest difference: {told}")
    draw(found)


if __name__ == "__main__":
    main()
