"""The page of a plan: whole, self-contained, every figure with what it says, and drawn by a browser
where there is one.
"""

import itertools
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import plans
import pytest

from dolmen.pages import picture
from dolmen.planning import draw, figures
from dolmen.planning.answer import format_compared
from dolmen.planning.plan import Candidate, Compared, Fleet
from dolmen.planning.report import FIGURES, page, write_report

GIB = 2**30
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
# what is in an element is measured where it is drawn
PROBE = """<script>
const seen = [...document.querySelectorAll("figure svg")].map(svg => {
  const page = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll("path, use")];
  const out = [...svg.querySelectorAll("text")].map(text => text.getBoundingClientRect())
    .filter(b => b.left < page.left - 2 || b.right > page.right + 2 || b.bottom > page.bottom + 2);
  return {marks: marks.length, width: page.width, height: page.height, outside: out.length,
          drawn: marks.filter(mark => mark.getBoundingClientRect().width > 0).length};
});
document.title = JSON.stringify({seen, wide: document.documentElement.scrollWidth});
</script></body>"""


class Tags(HTMLParser):
    """Every tag closes what was opened last."""

    SINGLE = ("meta", "link", "br")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.open += [tag] if tag not in self.SINGLE else []
        links = [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        # marks of a picture are defined once and used by their ids
        self.fetched += [link for link in links if not link.startswith("#")]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def text() -> str:
    return page(plans.plan())


def test_page_is_whole_and_needs_nothing_else(text):
    found = Tags(text)
    assert not found.open and {*found.fetched} == {"data:,"}
    assert "http" not in text and "<script" not in text and "$" not in text
    assert "nan" not in re.sub("<[^>]*>", "", text).lower().split()
    assert text.count("<figure") == len(FIGURES) == text.count("<svg viewBox") == 8
    for svg in re.findall(r"<svg viewBox.*?</svg>", text, re.DOTALL):
        assert len(re.findall("<(use|path)", svg)) > 10 and 'aria-label="' in svg


def test_colours_are_those_of_the_theme(text):
    """No ink on black paper: each colour of a picture is a variable, or lies within a fill."""
    light = {light for light, _ in picture.THEME.values()}
    pictures = "".join(re.findall(r"<svg viewBox.*?</svg>", text, re.DOTALL))
    assert not light & {*re.findall("#[0-9a-f]{6}", pictures)}
    used = {*re.findall(r"var\(--(\w+)\)", text)}
    assert {"ink", "paper", "faint", "line"} <= used <= {*picture.THEME}
    for name, (bright, dark) in picture.THEME.items():
        assert text.count(f"--{name}: {bright}; ") == text.count(f"--{name}: {dark}; ") == 1


def test_a_step_of_many_actions_is_still_small():
    """64 ranks, 1,024 actions of each: the beginning and the end are shown."""
    many = plans.plan(64, 256, "interleaved")
    assert len(page(many)) < 2_000_000 and len(figures.windows(many.timeline)) == 2


def test_summary_says_the_answer(text):
    for words in (
        "3,072 GPUs of dgx-a100",
        "<td>98 (86.2 to 111) s, MFU 44.0%</td>",
        f"<td>{2048 * 3072 / 98:,.0f}</td>",
        # 450e9 tokens, 2048 x 3072 a step: 71,526 steps of 98 s
        "<td>81.1 (71.4 to 91.7) days</td>",
        "<pre>--layout.tp 8 --layout.pp 8 --layout.zero 1 --layout.sequence-parallel --layout.",
        ">zero 1 sp interleaved v 3 recompute full</text>",
        ">layers 4 microbatch 2</text>",
        "<td>11,342</td>",
    ):
        assert words in text, words


def test_names_are_text_and_no_markup():
    odd = replace(plans.plan(), model="<b>&$x")
    assert "&lt;b&gt;&amp;$x on dgx-a100" in page(odd) and "<b>&" not in page(odd)


def hints(svg: str, subject: str) -> dict[str, float]:
    """The tooltips that begin with the subject: name -> number."""
    found = re.findall(rf"<title>{subject}([^:<]+): ([\d.e-]+)", svg)
    return {name: float(value) for name, value in found}


def widths(svg: str) -> list[float]:
    """Of the boxes that have tooltips, in points."""
    corners = re.findall(r"<title>[^<]*</title>\s*<path d=\"M ([\d.]+) \S+\s+L ([\d.]+)", svg)
    return [float(right) - float(left) for left, right in corners]


def test_bars_are_the_parts_of_a_step():
    """Widths of the first bar are shares of its seconds."""
    svg = picture.inline_svg("", figures.paint_step, plans.plan())
    parts = {f.title: plans.PARTS[n] for n, f in figures.PARTS.items() if n in plans.PARTS}
    first = widths(svg)[: len(parts)]
    for width, (name, share) in zip(first, parts.items(), strict=True):
        assert width / sum(first) == pytest.approx(share, abs=1e-3), name
        assert f"<title>{name}: {98 * share:.4g} s</title>" in svg


def test_memory_stacks_to_what_a_stage_holds():
    plan = plans.plan()
    svg = picture.inline_svg("", figures.paint_memory, plan)
    first = hints(svg, "rank 0, ")
    assert {*first} == {fill.title for fill in figures.KINDS.values()}
    assert sum(first.values()) == pytest.approx(plan.ranked[0].memory[0].total / GIB, rel=1e-3)
    assert "a100: 80.00 GiB" in svg and svg.count("<title>rank ") == 8 * len(figures.KINDS)


def test_memory_follows_the_schedule():
    """1f1b: rank 0 of 8 holds 8 microbatches, 3 GiB of activations each here."""
    plan = plans.plan()
    stage = plan.ranked[0].memory[0]
    held = figures.memory_course(stage, plan.timeline, 0)
    rest = stage.total - stage.live.activation
    assert held[0] == (rest + 3 * GIB, rest + 3 * GIB) and held[-1] == (rest + 3 * GIB, rest)
    assert max(most for most, _ in held) == stage.total


def test_every_action_is_a_box():
    svg = picture.inline_svg("", figures.paint_timeline, plans.plan())
    boxes = re.findall(r'<path d="([^"]*)" clip-path[^>]*stroke: var\(--paper\)', svg)
    assert sum(path.count("M") for path in boxes) == 8 * 48 and svg.count(">23%</text>") == 8


def test_front_leaves_out_what_is_larger_and_slower():
    plan = plans.plan()
    assert [fleet.gpus for fleet in plan.front] == [256, 512, 1024, 2048, 3072, 4480]
    svg = picture.inline_svg("", figures.paint_front, plan)
    # GPUs, rented and owned: a dot, a line and its two ends for each fleet
    assert svg.count("<title>") == 3 * 7 * 4
    assert len(re.findall(r"<use [^>]*fill: var\(--paper\)", svg)) == 3
    # 81.1 days of 3,072 GPUs at 1.6 an hour; 384 nodes over 4 years, and 6.5 kW each
    fleet = Fleet(3072, plan.ranked[0].estimate, "")
    days = 450e9 / (2048 * 3072) * 98 / 86400
    assert plan.rent_cost(fleet) == pytest.approx(3072 * 24 * days * 1.6)
    owned = 384 * 220_000 * days / (4 * 365.25) + 384 * 6.5 * 24 * days * 0.12
    assert plan.owning_cost(fleet) == pytest.approx(owned)
    free = replace(plan, prices=replace(plan.prices, rent=0, node=0))
    assert "GPU-days" in picture.inline_svg("", figures.paint_front, free)
    alone = picture.inline_svg("", figures.paint_front, replace(plan, fleets=()))
    assert "only one number" in alone


def test_cluster_is_drawn_as_far_as_it_is_used():
    whole, pod, node = (
        picture.inline_svg("", figures.paint_cluster, plans.plan(nodes=n)) for n in (384, 100, 1)
    )
    assert all(f"{tier}: " in whole for tier in ("core", "spine", "leaf"))
    assert "core" not in pod and "spine: 1 " in pod and "leaf: 5 " in pod
    assert "leaf" not in node and "1 node of 8" in node and "300 GB/s each way" in node
    none = replace(plans.plan(), ranked=(replace(plans.candidate(8, 8, 98.0), traffic=()),))
    assert "Nothing crosses a link" in picture.inline_svg("", figures.paint_traffic, none)


def test_fills_differ_without_colour():
    """Of the kinds of one legend, no two have the same hatching on a like grey."""

    def grey(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    actions = [*draw.KINDS.values(), draw.IDLE]
    for legend in ([*figures.PARTS.values()], [*figures.KINDS.values()], actions):
        for one, other in itertools.combinations(legend, 2):
            alike = abs(grey(one.colour) - grey(other.colour)) < 25
            assert one.hatch != other.hatch or not alike, (one, other)


def test_words_of_a_layout():
    layout = {"layout.tp": 8, "layout.sequence-parallel": True, "layout.compile": False}
    one = Candidate(layout, plans.estimate(1.0), (), "compute")
    assert one.words == "tp 8 sequence-parallel"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium and no google-chrome on this machine")
@pytest.mark.parametrize("size", ((64, 96, "zero-bubble-v"), (1, 4, "gpipe")))
def test_a_browser_draws_all_of_it(size, tmp_path):
    """No error of its console, no figure without marks, no text outside of its picture."""
    file = tmp_path / "page.html"
    write_report(plans.plan(*size), file)
    file.write_text(file.read_text().replace("</body>", PROBE))
    words = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,3000"]
    words += ["--enable-logging=stderr", "--dump-dom", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [*words, file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "CONSOLE" not in shown.stderr
    title = re.search("<title>(.*?)</title>", shown.stdout)
    assert title
    found = json.loads(title[1])
    assert len(found["seen"]) == len(FIGURES) and found["wide"] <= 1000
    for figure, seen in zip(FIGURES, found["seen"], strict=True):
        assert seen["width"] > 800 and seen["height"] > 100, (figure.heading, seen)
        assert seen["drawn"] > 5 and not seen["outside"], (figure.heading, seen)


def test_a_count_of_next_to_nothing_is_beside_the_closed_form_and_no_percentage():
    assert format_compared(Compared("buffer", 48, 2**30)) == "0.00 (form: 1.00)"
    assert format_compared(Compared("buffer", 2**31, 2**30)) == "2.00 (-50.0%)"


@pytest.mark.parametrize("text", ('an "h100" & more', "rank 0's"))
def test_any_text_is_a_tooltip(text):
    """Names come from files, and matplotlib takes other quotation marks around those with some."""

    def paint(figure) -> None:
        figure.subplots().barh(0, 1, gid=text)

    svg = picture.inline_svg("", paint)
    assert f"<title>{escape(text, quote=False)}</title>" in svg and "<g id=" not in svg
