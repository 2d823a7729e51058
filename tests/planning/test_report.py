"""The page of a plan: whole, self-contained, every figure with what it says, and drawn by a browser
where there is one.
"""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import plans
import pytest

from dolmen.pages.page import FILLS, Scale, round_step
from dolmen.planning import figures
from dolmen.planning.answer import format_compared
from dolmen.planning.plan import Candidate, Compared, Fleet
from dolmen.planning.report import FIGURES, page, write_report

GIB = 2**30
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
# what is in an element is measured where it is drawn
PROBE = """<script>
const seen = [...document.querySelectorAll("figure svg")].map(svg => {
  const page = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll("rect, path, circle")];
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
        self.fetched: list[str | None] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.open += [tag] if tag not in self.SINGLE else []
        self.fetched += [v for name, v in attrs if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def text() -> str:
    return page(plans.plan())


def test_page_is_whole_and_needs_nothing_else(text):
    found = Tags(text)
    assert not found.open and found.fetched == ["data:,"]
    assert "http" not in text and "<script" not in text and "$" not in text
    assert "nan" not in re.sub("<[^>]*>", "", text).lower().split()
    assert text.count("<figure") == len(FIGURES) == text.count("<svg viewBox") == 8
    for svg in re.findall(r"<svg viewBox.*?</svg>", text, re.DOTALL):
        assert len(re.findall("<(rect|path|circle)", svg)) > 10
    assert {*re.findall(r"url\(#f-([\w-]+)\)", text)} <= {*FILLS}


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
        ">zero 1 sp interleaved v 3 recompute full layers 4</text>",
        ">microbatch 2</text>",
        "<td>11,342</td>",
    ):
        assert words in text, words


def test_names_are_text_and_no_markup():
    odd = replace(plans.plan(), model="<b>&$x")
    assert "&lt;b&gt;&amp;$x on dgx-a100" in page(odd) and "<b>&" not in page(odd)


def test_bars_are_the_parts_of_a_step():
    """Widths of the first bar are shares of its seconds."""
    svg = str(figures.step(plans.plan()))
    bars = re.findall(r'width="([\d.]+)" height="28".*?<title>([^:]+): ([\d.e-]+) s', svg)[:8]
    assert {name for _, name, _ in bars} == {figures.PART_NAMES[name] for name in plans.PARTS}
    widths = [float(width) for width, *_ in bars]
    for width, (_, _, seconds) in zip(widths, bars, strict=True):
        assert width / sum(widths) == pytest.approx(float(seconds) / 98, abs=2e-3)


def test_memory_stacks_to_what_a_stage_holds():
    plan = plans.plan()
    svg = str(figures.rank_memory(plan))
    first = [float(x) for x in re.findall(r"<title>rank 0, [^:]+: ([\d.]+) GiB", svg)]
    assert sum(first) == pytest.approx(plan.ranked[0].memory[0].total / GIB, abs=0.05)
    assert "a100: 80 GiB" in svg and svg.count("<title>rank ") == 8 * len(figures.KINDS)


def test_memory_follows_the_schedule():
    """1f1b: rank 0 of 8 holds 8 microbatches, 3 GiB of activations each here."""
    plan = plans.plan()
    stage = plan.ranked[0].memory[0]
    held = figures.course(stage, plan.timeline, 0)
    rest = stage.total - stage.live.activation
    assert held[0] == (rest + 3 * GIB, rest + 3 * GIB) and held[-1] == (rest + 3 * GIB, rest)
    assert max(most for most, _ in held) == stage.total


def test_every_action_is_a_box():
    plan = plans.plan()
    svg = str(figures.timeline(plan))
    boxes = sum(path.count("M") for path in re.findall(r'<path d="([^"]*)"[^>]*class="thin"', svg))
    assert boxes == 8 * 48 and svg.count("23% idle") == 8


def test_front_leaves_out_what_is_larger_and_slower():
    plan = plans.plan()
    assert [fleet.gpus for fleet in plan.front] == [256, 512, 1024, 2048, 3072, 4480]
    svg = str(figures.front(plan))
    assert svg.count('class="off"') == 3 and svg.count('class="dot"') == 3 * 6
    # 81.1 days of 3,072 GPUs at 1.6 an hour; 384 nodes over 4 years, and 6.5 kW each
    fleet = Fleet(3072, plan.ranked[0].estimate, "")
    days = 450e9 / (2048 * 3072) * 98 / 86400
    assert plan.rent_cost(fleet) == pytest.approx(3072 * 24 * days * 1.6)
    owned = 384 * 220_000 * days / (4 * 365.25) + 384 * 6.5 * 24 * days * 0.12
    assert plan.owning_cost(fleet) == pytest.approx(owned)
    free = replace(plan, prices=replace(plan.prices, rent=0, node=0))
    assert "GPU-days" in str(figures.front(free))
    assert "only one number" in str(figures.front(replace(plan, fleets=())))


def test_cluster_is_drawn_as_far_as_it_is_used():
    whole, pod, node = (str(figures.cluster(plans.plan(nodes=n))) for n in (384, 100, 1))
    assert all(f"{tier}: " in whole for tier in ("core", "spine", "leaf"))
    assert "core" not in pod and "spine: 1 " in pod and "leaf: 5 " in pod
    assert "leaf" not in node and "1 nodes of 8" in node and "300 GB/s each way" in node
    none = replace(plans.plan(), ranked=(replace(plans.candidate(8, 8, 98.0), traffic=()),))
    assert "Nothing crosses a link" in str(figures.traffic(none))


def test_fills_differ_without_colour():
    """Of the kinds of one legend, no two have the same hatching on a like grey."""

    def grey(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    step = [figures.FILL.get(name, name) for name in figures.PART_NAMES]
    for legend in (step, list(figures.KINDS), ["F", "B", "idle"], ["F", "I", "W", "idle"]):
        for i, one in enumerate(legend):
            for other in legend[i + 1 :]:
                (colour, hatch), (colour2, hatch2) = FILLS[one], FILLS[other]
                assert hatch != hatch2 or abs(grey(colour) - grey(colour2)) > 25, (one, other)


def test_scales_have_round_ticks():
    assert Scale(0, 98, 0, 1).ticks() == [0, 20, 40, 60, 80]
    assert Scale(9, 1100, 0, 1, log=True).ticks() == [10, 20, 50, 100, 200, 500, 1000]
    assert [round_step(x) for x in (0.9, 1, 1.1, 3, 6, 40)] == [1, 1, 2, 5, 10, 50]
    assert Scale(1, 100, 0, 2, log=True)(10) == pytest.approx(1)


def test_words_of_a_layout():
    layout = {"layout.tp": 8, "layout.sequence-parallel": True, "layout.compile": False}
    one = Candidate(layout, plans.estimate(1.0), (), "compute")
    assert one.words == "tp 8 sequence-parallel"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium and no google-chrome on this machine")
@pytest.mark.parametrize("size", ((64, 96, "zero-bubble-v"), (1, 4, "gpipe")))
def test_a_browser_draws_all_of_it(size, tmp_path):
    """No error of its console, no figure without marks, no text outside of its picture."""
    file = write_report(plans.plan(*size), tmp_path)
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
    assert format_compared(Compared("buffer", 48, 2**30)) == "0.00 (1.00 in closed form)"
    assert format_compared(Compared("buffer", 2**31, 2**30)) == "2.00 (-50.0%)"
