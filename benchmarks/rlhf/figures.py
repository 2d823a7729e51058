"""The figures of the page, as SVG that stands in it."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from benchmarks.rlhf import task
from benchmarks.rlhf.checks import DRAWN, TIMES
from benchmarks.rlhf.faults import FAULTS, folder
from benchmarks.rlhf.measure import Measured
from benchmarks.rlhf.outcomes import seeds
from benchmarks.rlhf.series import kl_and_reward, series, smooth, story_kl
from benchmarks.rlhf.stages import BOUND, FOLDER
from dolmen.pages.picture import BLUE, FAINT, GREEN, INK, LINE, ORANGE, inline_svg

COLOURS = {"grpo": BLUE, "ppo": ORANGE, "dpo": GREEN, "sft": INK, "base": FAINT}
NAMES = {"base": "base", "sft": "SFT", "reward": "reward model", "dpo": "DPO", "grpo": "GRPO"}
NAMES |= {"ppo": "PPO"}


def drawn(
    title: str, paint: Callable[..., None], panels: int, height: float, *given: object
) -> str:
    """An <svg> of so many panels side by side, which `paint(axes, *given)` fills."""

    def fill(figure: Any) -> None:
        figure.set_figheight(height)
        paint(figure.subplots(1, panels, squeeze=False)[0], *given)

    return inline_svg(title, fill)


def reward_and_kl(axes: np.ndarray, start: float) -> None:
    """Of what is drawn while a policy learns, by step."""
    above, below = axes
    for name in DRAWN:
        run = FOLDER / name
        for axis, (steps, values) in (
            (above, series(run, "rollout/reward")),
            (below, story_kl(FOLDER / name)),
        ):
            axis.plot(steps, values, color=COLOURS[name], linewidth=0.6, alpha=0.35)
            axis.plot(steps, smooth(values), color=COLOURS[name])
            if len(steps):
                _end(axis, steps, smooth(values), NAMES[name], COLOURS[name])
    _level(above, TIMES * start, f"{TIMES:g} times the start")
    _level(above, start, "start")
    _level(below, BOUND, f"bound, {BOUND:g} nats")
    above.set(title="reward of drawn stories", ylim=(0, 1.02), xlabel="step")
    below.set(title="KL from the start, nats per story", ylim=(0, BOUND * 1.15), xlabel="step")


def frontier(axes: np.ndarray, found: dict[str, Measured]) -> None:
    """Reward over KL: no policy is above the line."""
    (axis,) = axes
    shares = np.linspace(task.SHARE, 1, 200)
    axis.plot([task.frontier(q) for q in shares], shares, color=INK, linewidth=1)
    axis.fill_between([task.frontier(q) for q in shares], shares, 1.04, color=LINE, alpha=0.6)
    axis.text(0.35, 0.94, "no policy is here", style="italic", color=FAINT, va="center")
    for name in DRAWN:
        kl, reward = kl_and_reward(FOLDER / name)
        axis.plot(smooth(kl, 8), smooth(reward, 8), color=COLOURS[name], linewidth=1, alpha=0.8)
    for name, one in found.items():
        if name == "base":
            continue
        axis.errorbar(
            [one.kl],
            [one.reward],
            xerr=[2 * one.kl_error],
            yerr=[2 * one.error],
            fmt="o",
            markersize=4.5,
            color=COLOURS[name],
            linewidth=1,
        )
        axis.annotate(
            NAMES[name],
            (one.kl, one.reward),
            xytext=(7, -9),
            textcoords="offset points",
            color=COLOURS[name],
        )
    axis.axvline(BOUND, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    axis.text(BOUND - 0.08, 0.06, "bound", ha="right", color=FAINT, style="italic")
    axis.set(
        xlabel="KL from the start, nats per story",
        ylabel="reward",
        ylim=(0, 1.04),
        xlim=(-0.15, BOUND * 1.3),
    )


def lessons(axes: np.ndarray) -> None:
    """Of what is learned from what is given: SFT, the reward model, DPO."""
    sft, model, dpo = axes
    steps, values = series(FOLDER / "sft", "loss")
    sft.plot(steps, values, color=COLOURS["sft"], linewidth=0.8, alpha=0.5)
    sft.plot(*series(FOLDER / "sft", "val_loss"), "o-", color=COLOURS["sft"], markersize=3)
    sft.set(title="SFT: loss, nats per token", xlabel="step")
    for axis, name, key, levels in (
        (model, "reward", "accuracy", (0.5, 0.95)),
        (dpo, "dpo", "rewards/accuracies", (0.5,)),
    ):
        key_of_training = key if "/" in key else f"objective/{key}"
        steps, values = series(FOLDER / name, key_of_training)
        colour = COLOURS.get(name, INK)
        axis.plot(steps, values, color=colour, linewidth=0.8, alpha=0.4)
        axis.plot(*series(FOLDER / name, f"val_{key}"), "o-", color=colour, markersize=3)
        for level in levels:
            _level(axis, level, f"{level:g}")
        axis.set(title=f"{NAMES[name]}: pairs it is right of", xlabel="step", ylim=(0.35, 1.02))


def faults(axes: np.ndarray, recipe: str) -> None:
    """Reward and KL of each seed: sound, and with each fault."""
    above, below = axes
    for i, name in enumerate(FAULTS):
        colour = COLOURS[recipe] if name == "sound" else f"C{i}"
        label = name
        for seed in seeds(recipe):
            steps, values = series(folder(recipe, name, seed), "rollout/reward")
            style = {"color": colour, "linewidth": 1.6 if name == "sound" else 1.1}
            above.plot(steps, smooth(values, 8), label=label, **style)
            kl_steps, kl = story_kl(folder(recipe, name, seed))
            below.plot(kl_steps, smooth(kl, 8), **style)
            label = "_"
    above.legend(fontsize=8.5)
    _level(below, BOUND, "bound")
    above.set(title="reward of drawn stories", ylim=(0, 1.02), xlabel="step")
    below.set(title="KL from the start, nats per story", ylim=(0, 2.5 * BOUND), xlabel="step")


def _level(axis: Axes, value: float, text: str) -> None:
    axis.axhline(value, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    axis.annotate(
        text,
        (0, value),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
        color=FAINT,
        style="italic",
        fontsize=8.5,
    )


def _end(axis: Axes, steps: np.ndarray, values: np.ndarray, text: str, colour: str) -> None:
    """A line's name, above its end, where no other line goes on."""
    axis.annotate(
        text,
        (steps[-1], values[-1]),
        xytext=(4, 9),
        textcoords="offset points",
        color=colour,
        ha="right",
        annotation_clip=False,
    )
