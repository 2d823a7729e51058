"""How sure a reward model is, and how often it is right: of held-out pairs, by the probability that
it gives the answer it prefers, sigmoid(|difference of scores|) (Guo et al., 1706.04599).

    right  1.0 |            /o      o    a bin of pairs, as large as it has many
           0.8 |       o /           /    right as often as sure
           0.5 | o /_____________
               0.5          1.0  sure
"""

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO

from dolmen.objectives.reward import BINS

FILE = "calibration.png"


@dataclass(frozen=True)
class Calibration:
    """Shares of all pairs, by bins of how sure the model is, from 1 / 2 to 1."""

    sure: tuple[float, ...]
    """In each bin."""
    right: tuple[float, ...]
    """In each bin, and preferred as in the data."""

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> "Calibration":
        """From those that objectives.reward.Calibrated names."""
        sure, right = ([metrics[f"{name} {i}"] for i in range(BINS)] for name in ("sure", "right"))
        return cls(tuple(sure), tuple(right))

    @property
    def error(self) -> float:
        """The mean over pairs of how far a bin's share of right ones is from its middle: the
        expected calibration error, of the middle in the place of a bin's mean.
        """
        return sum(
            abs(right - sure * middle(i))
            for i, (sure, right) in enumerate(zip(self.sure, self.right, strict=True))
        )


def middle(index: int) -> float:
    """How sure the model is in the middle of a bin."""
    return 0.5 + (index + 0.5) / (2 * BINS)


def rest(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that are of no bin."""
    return {n: one for n, one in metrics.items() if not n.startswith(("sure ", "right "))}


def draw(found: Calibration, accuracy: float, title: str) -> bytes:
    """A PNG."""
    # half a second to import, for one rank
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 5), dpi=120)
    axis = figure.subplots()
    figure.subplots_adjust(left=0.13, right=0.96, bottom=0.11, top=0.9)
    axis.plot([0.5, 1], [0.5, 1], color="#7a9e7e", linestyle="--", linewidth=1)
    bins = [i for i, share in enumerate(found.sure) if share > 0]
    axis.scatter(
        [middle(i) for i in bins],
        [found.right[i] / found.sure[i] for i in bins],
        s=[30 + 600 * found.sure[i] for i in bins],
        color="#1f4e8c",
        alpha=0.75,
    )
    axis.set(
        xlabel="how sure the model is of the answer that it prefers",
        ylabel="how often it is right",
        xlim=(0.48, 1.02),
        ylim=(-0.03, 1.03),
    )
    axis.set_title(f"{title}\naccuracy {accuracy:.3f}, calibration error {found.error:.3f}", size=9)
    axis.grid(alpha=0.25)
    image = BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
