"""The page of the road: build/rlhf/rlhf.html, one file that needs no other."""

import html
import json
import math
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open

from benchmarks.rlhf import checks, figures, outcomes, task
from benchmarks.rlhf.faults import UNHELD
from benchmarks.rlhf.figures import NAMES
from benchmarks.rlhf.measure import Measured, kept
from benchmarks.rlhf.stages import BOUND, FOLDER, STAGES
from dolmen.core.messages import plural
from dolmen.pages.page import figure, fill, table

FILE = FOLDER / "rlhf.html"
FORM = Path(__file__).with_name("page.html")
WORD = re.compile(r"[a-z]+")


def write() -> Path:
    """Of what has been run. Returns the file."""
    found = kept(FOLDER / "measured.json")
    parts = {
        "claims": _claims(checks.checked()),
        "measured": _measured(found),
        "stories": _stories(found),
        "lessons": figures.drawn("What is learned from what is given", figures.lessons, 3, 2.5),
        "drawn": figures.drawn(
            "Reward and KL while learning", figures.reward_and_kl, 2, 3.0, found["sft"].reward
        ),
        "frontier": figures.drawn("Reward over KL", figures.frontier, 1, 4.2, found),
        "controls": _controls(),
        "size": _size(),
        "answers": str(found["sft"].answers),
        "held": str(task.HELD_OUT),
        "bound": f"{BOUND:g}",
        "least": f"{task.frontier(0.8):.1f}",
        "share": f"{task.SHARE:g}",
        "drawing": " and ".join(NAMES[name] for name in checks.DRAWN),
        "commands": _commands(),
        "machine": f"{platform.machine()}, one thread per run, two runs at once",
    }
    FILE.write_text(fill(FORM, **parts))
    return FILE


def _size() -> str:
    """Parameters of the model, of what it has exported."""
    with safe_open(FOLDER / "sft" / "hf" / "model.safetensors", "np") as stored:
        shapes = [stored.get_slice(name).get_shape() for name in stored.keys()]
    return f"{round(sum(map(math.prod, shapes)), -3):,}"


def _claims(found: Iterable[checks.Check]) -> str:
    rows = (
        f"<tr><td>{'holds' if one.holds else '<b class=fails>fails</b>'}</td>"
        f"<td>{html.escape(one.text)}</td></tr>"
        for one in found
    )
    return f"<table class=claims>{''.join(rows)}</table>"


def _measured(found: dict[str, Measured]) -> str:
    rows = []
    for name, one in found.items():
        start = name in ("base", "sft")
        kl = "–" if start else f"{one.kl:.2f} ± {one.kl_error:.2f}"
        best = "–" if start else f"{_best(one.kl):.3f}"
        reward = f"{one.reward:.3f} ± {one.error:.3f}"
        rows.append((NAMES[name], reward, kl, best, f"{one.fits:.1%}"))
    return table(rows, ("", "reward", "KL, nats", "best there", "fits"))


def _best(kl: float) -> float:
    """The most reward that any policy has at that KL."""
    low, high = task.SHARE, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if task.frontier(middle) < kl else (low, middle)
    return low


def _stories(found: dict[str, Measured]) -> str:
    """To one question, of each model; words of mood marked."""
    rows = (
        f"<tr><td>{NAMES[name]}</td>"
        f"<td>{WORD.sub(_marked, html.escape(one.story.strip()))}</td></tr>"
        for name, one in found.items()
    )
    _, held = task.subjects()
    return (
        f"<p class=prompt>{html.escape(task.beginning(*held[0]))}</p>"
        f"<table class=stories>{''.join(rows)}</table>"
    )


def _marked(word: re.Match[str]) -> str:
    for mood, words in (("up", task.CHEERFUL), ("down", task.GLOOMY)):
        if word[0] in words:
            return f"<b class={mood}>{word[0]}</b>"
    return word[0]


def _controls() -> str:
    """A section, where they have been run."""
    parts = [_controls_of(recipe) for recipe in UNHELD if outcomes.seeds(recipe)]
    if not parts:
        return ""
    return (
        "<h2>What is to fail, fails</h2><p>The same runs, sound and with one fault each, put in "
        "from outside. <i>Off by one</i>: training takes of each token the log-probability of the "
        "one before. <i>Shuffled</i>: a phase’s advantages are dealt out anew among its answers. "
        "<i>Flipped</i>: they have the other sign. <i>No KL</i>: nothing holds the policy.</p>"
        + "".join(parts)
    )


def _controls_of(recipe: str) -> str:
    rows = []
    for name, found in outcomes.table(recipe):
        times = " · ".join(f"{one.times:.1f}" for one in found)
        kl = " · ".join(f"{one.kl:.1f}" for one in found)
        passed = sum(one.passes for one in found)
        rows.append((name, times, kl, f"{passed} of {len(found)}"))
    drawing = figures.drawn("Reward and KL of each fault", figures.faults, 2, 3.2, recipe)
    caption = f"{NAMES[recipe]}: {plural(len(outcomes.seeds(recipe)), 'seed')} of each."
    heads = ("", "times the start’s reward", "KL, nats", "pass")
    return figure(f"faults-{recipe}", drawing, caption) + table(rows, heads)


def _commands() -> str:
    """As a user types them."""
    lines = []
    for name, stage in STAGES.items():
        words = " ".join(stage.words.replace(f"{FOLDER}/", "").split())
        took = _seconds(FOLDER / name)
        lines.append(f"dolmen train {stage.recipe} --out {name} {words}{took}")
    return html.escape("\n\n".join(lines))


def _seconds(run: Path) -> str:
    """That a run has trained for."""
    file = run / "metrics.jsonl"
    rows = file.read_text().splitlines() if file.exists() else []
    return f"      # {json.loads(rows[-1])['seconds']:.0f} s" if rows else ""
