"""`dolmen show`: the page is whole, says what the files say and no more, thins honestly, survives
damaged and hostile files, and is drawn by a browser where there is one.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tinyrun import dolmen

from dolmen.watching.page import HERE, write_page
from dolmen.watching.run import WatchedRun, differing_options, labels
from dolmen.watching.series import MOST, MOST_COLUMNS, Series, number

FIGURES = re.findall('<figure id="(figure-[a-z]+)"', (HERE / "page.html").read_text())
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "</script><script>document.title='broken'</script><!-- <b>&\u2028"


def row(step: int, **more) -> dict:
    return {
        "step": step,
        "loss": 8 / step**0.5,
        "grad_norm": 1.0 + step % 7,
        "lr": 1e-3,
        "tokens": 64 * step,
        "tokens_per_second": 1000.0,
        "mfu_measured": 0.5,
        "memory_gib": 1.5,
        "time": 1e9 + step,
        "seconds": step / 2,
        **more,
    }


ROLLOUT = {
    "rollout/reward": 0.5,
    "rollout/completion_length": 12.25,
    "rollout/finished": 0.75,
}


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(one) + "\n" for one in rows)


def make_run(folder: Path, steps: int = 40, name: str = "one") -> Path:
    """A run with everything that a page shows: experts, four ranks, two starts, samples."""
    folder.mkdir(parents=True)
    rows = [
        row(step, **ROLLOUT, **{"router/max_load": 1.5, "objective/margin": 0.1})
        for step in range(1, steps)
    ]
    rows += [row(steps, loss=None, grad_norm=None, skipped_steps=1)]
    held = [{"step": s, "val_loss": 3.0, "val_tokens": 9, "time": 1e9} for s in (10, steps)]
    (folder / "metrics.jsonl").write_text(lines([*rows[:10], held[0], *rows[10:], held[1]]))
    started = {"steps": steps, "processes": 4, "device": "CPU", "parameters": 1234}
    load = {"0": [0.5, 1.5, 1.0, 1.0], "2": [2.5, 0.5, 0.5, 0.5]}
    history = [
        {"step": 0, "time": 1e9, "begun": "new", "changed": [], "reached": 0, **started},
        {"step": 20, "time": 1e9, "saved": True},
        {
            "step": 20,
            "time": 2e9,
            "begun": "restarted",
            "changed": [HOSTILE],
            "reached": 27,
            **started,
        },
        {"step": 30, "time": 2e9, "memory_gib": [1.0, 1.25, 1.5, 1.0], "router_load": load},
        {"step": steps, "time": 2e9, "saved": True},
        {"step": steps, "time": 2e9, "ended": "done"},
    ]
    (folder / "history.jsonl").write_text(lines(history))
    samples = [{"step": s, "prompt": "Once", "text": f"upon {s} {HOSTILE}"} for s in (10, 20)]
    (folder / "samples.jsonl").write_text(lines(samples))
    (folder / "checkpoints" / f"step-{steps:08d}").mkdir(parents=True)
    options = {"name": name, "layout": {"dp": 4}, "train": {"steps": steps, "seed": 0}}
    (folder / "config.yaml").write_text(json.dumps(options))
    return folder


def data_of(page: str) -> dict:
    """The block of JSON, as a browser finds it: up to the first that ends a script."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_is_whole_and_has_what_the_files_say(tmp_path):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", 50, HOSTILE)
    page = write_page([one, two], tmp_path / "show.html").read_text()
    assert page.count("<script") == page.count("</script") == 2
    assert "$" not in page.partition("<script")[0]
    assert {*re.findall(r'(?:src|href)="([^"]*)"', page)} == {"data:,"}
    assert {*re.findall(r"https?://[\w./]*", page)} == {"http://www.w3.org/2000/svg"}
    script = (HERE / "page.js").read_text()
    drawn = {*re.findall(r'{ id: "(\w+)"', script), *re.findall(r'byId\("figure-(\w+)"\)', script)}
    assert {f"figure-{name}" for name in drawn} == {*FIGURES} and len(FIGURES) == 14
    data = data_of(page)
    first, second = data["runs"]
    assert [run["label"] for run in data["runs"]] == ["one", "two"] and first["refused"] == []
    facts = dict(first["facts"])
    reported = {"mean reward": "0.5000", "completion length": "12.2 tokens"}
    reported["finished completions"] = "75.0%"
    assert [*first["facts"][:3]] == [[*fact] for fact in reported.items()]
    assert re.findall("<h2>(.*?)</h2>", page)[:2] == ["Rollouts", "Loss"]
    assert facts["layout"] == "dp 4" and facts["steps"] == "40 of 40"
    assert facts["state"] == "done, 2 starts" and facts["skipped steps"] == "1"
    assert facts["processes"] == "4 processes on CPU" and facts["model"] == "1.23 k parameters"
    assert first["series"]["columns"]["loss"]["gaps"] == [39]
    assert first["series"]["columns"]["val_loss"] == {"mean": [3, 3], "at": [9, 39]}
    assert first["series"]["seconds"][:2] == [0.5, 1] and first["series"]["tokens"][-1] == 2560
    assert [one["ended"] for one in first["starts"]] == ["killed", "done"]
    assert (first["starts"][0]["until"], first["starts"][1]["reached"]) == (27, 27)
    assert (first["saved"], first["checkpoints"]) == ([20, 40], [40])
    assert first["memory"] == {"step": 30, "gib": [1.0, 1.25, 1.5, 1.0]}
    assert first["samples"] == [
        {"prompt": "Once", "texts": [[10, f"upon 10 {HOSTILE}"], [20, f"upon 20 {HOSTILE}"]]}
    ]
    assert data["differs"] == [["name", ["one", HOSTILE]], ["train.steps", ["40", "50"]]]
    assert second["options"]["train.seed"] == "0"


def test_a_million_rows_are_thinned_and_nothing_is_hidden():
    """Equal intervals, each with mean, least and most; the same whenever they are added."""
    series, steps = Series(), 100_000
    for step in range(1, steps + 1):
        series.add(row(step, loss=3.0 if step != 70_001 else 99.0, grad_norm=step))
    found = series.as_dict()
    norm = found["columns"]["grad_norm"]
    assert norm["high"] == found["step"] and norm["low"][0] == 1
    assert norm["low"][1:] == [high + 1 for high in norm["high"][:-1]]
    middles = [(low + high) / 2 for low, high in zip(norm["low"], norm["high"], strict=True)]
    assert norm["mean"] == pytest.approx(middles, rel=1e-7)
    loss = found["columns"]["loss"]
    assert MOST / 2 <= len(found["step"]) <= MOST and found["width"] == 128
    assert (
        max(loss["high"]) == 99 and min(loss["low"]) == 3 and sum(h > 3 for h in loss["high"]) == 1
    )
    at = loss["high"].index(99)
    assert loss["mean"][at] == pytest.approx((99 + 127 * 3) / 128)
    assert found["step"][at] - 128 < 70_001 <= found["step"][at] and found["step"][-1] == steps
    assert found["tokens"][-1] == 64 * steps and len(json.dumps(found)) < 300_000


def test_what_is_no_number_is_left_out():
    series = Series()
    series.add(row(1, text="x", flag=True, nothing=None, deep=[1], huge=10**400, far=1e301))
    series.add(row(2, **{f"column {i}": 1.0 for i in range(MOST_COLUMNS + 9)}))
    found = series.as_dict()["columns"]
    assert not {"text", "flag", "deep", "huge"} & found.keys()
    assert found["nothing"] == {"mean": [], "at": [], "gaps": [0]} == found["far"]
    assert len(found) <= MOST_COLUMNS
    wide = Series(most=1)
    for step, value in enumerate((1e300, -1e300, 1e300), 1):
        wide.add(row(step, loss=value))
    assert abs(wide.as_dict()["columns"]["loss"]["mean"][0]) <= 1e300
    assert number(float("nan")) is None and number(3) == 3.0


@pytest.mark.parametrize(
    "line", ("[" * 100_000, '{"step": -1}', '{"step": 1, "loss": "x"}', "\0", '{"step": 1e999}')
)
def test_damaged_lines_are_left_out_and_told(tmp_path, line):
    run = make_run(tmp_path / "run")
    for name in ("metrics.jsonl", "history.jsonl", "samples.jsonl"):
        text = (run / name).read_text()
        (run / name).write_text(f"{line}\n{text}" + '{"step": 41, "lo')
    (run / "config.yaml").write_text("a: [")
    found = data_of(write_page([run], tmp_path / "show.html").read_text())["runs"][0]
    assert found["series"]["rows"] == 42 and len(found["starts"]) == 2
    assert len(found["refused"]) == 4 and found["refused"] == sorted(found["refused"])
    assert any("metrics.jsonl" in one for one in found["refused"])


def test_a_run_is_read_on_and_begun_anew_with_a_new_file(tmp_path):
    folder = make_run(tmp_path / "run")
    run = WatchedRun(folder, "run")
    run.read()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(lines([row(41)]) + '{"step": 42')
    run.read()
    assert run.series.rows == 43 and run.as_dict()["series"]["step"][-1] == 41
    (folder / "new").write_text(lines([row(1)]))
    (folder / "new").rename(folder / "metrics.jsonl")
    run.read()
    assert run.series.rows == 1 and run.as_dict()["refused"] == []
    history = (folder / "history.jsonl").read_text().splitlines(keepends=True)
    (folder / "history.jsonl").write_text("".join(history[:-1]))
    run.read()
    os.utime(folder / "history.jsonl", (2e9, 2e9))
    said = "in progress, or killed; last update at 2033-05-18 03:33:20 (UTC), 2 starts"
    assert ["state", said] in run.as_dict()["facts"]


@pytest.mark.parametrize("instead", ("a link", "a folder", "a pipe"))
def test_what_is_no_file_of_a_run_is_not_read(tmp_path, instead):
    run, outside = make_run(tmp_path / "run"), tmp_path / "outside"
    for name in ("metrics.jsonl", "history.jsonl", "samples.jsonl", "config.yaml"):
        outside.mkdir(exist_ok=True)
        (run / name).rename(outside / name)
        if instead == "a link":
            (run / name).symlink_to(outside / name)
        elif instead == "a folder":
            (run / name).mkdir()
        else:
            os.mkfifo(run / name)
    found = data_of(write_page([run], tmp_path / "show.html").read_text())["runs"][0]
    assert found["series"]["rows"] == 0 and not found["starts"] and not found["options"]
    assert not found["samples"] and len(found["refused"]) == 4, found["refused"]


def test_what_is_refused(tmp_path):
    run = make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    mine = tmp_path / "mine.html"
    mine.write_text("<p>a page of mine")
    for words, said in (
        ((), "name a run first"),
        ((tmp_path / "none",), "is not a folder"),
        ((tmp_path / "empty",), "does not contain a run"),
        ((run, "--out", mine), "mine.html exists: give another name"),
        ((run, "--out", tmp_path / "no" / "show.html"), "does not exist: create it"),
        ((run, "--port", 70000), "--port is 70000"),
    ):
        result = dolmen("show", *words)
        assert result.code == 2 and said in result.words and result.err.count("\n") == 1, result
    assert mine.read_text() == "<p>a page of mine" and not (tmp_path / "show.html").exists()
    shown = tmp_path / "show.html"
    assert dolmen("show", run, "--out", shown).out == f"wrote {shown}\n"


def test_names_of_runs():
    assert labels([Path("a/x"), Path("b/x"), Path("b/y")]) == ["a/x", "b/x", "b/y"]
    assert labels([Path("a/x"), Path("b/y")]) == ["x", "y"]
    assert len(labels([Path("a"), Path("a")])) == 2
    runs = [{"options": {"a": "1", "b": "2"}}, {"options": {"a": "1", "c": "3"}}]
    assert differing_options(runs) == [["b", ["2", None]], ["c", [None, "3"]]]


# Clicks on everything, then asks what is drawn.
PROBE = """<script>
{
const seen = () => [...document.querySelectorAll("figure:not([hidden]) svg")].map((svg) => {
  const page = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll("rect, path")];
  const outside = [...svg.querySelectorAll("text")].filter((text) => {
    const b = text.getBoundingClientRect();
    return b.left < page.left - 2 || b.right > page.right + 2 || b.bottom > page.bottom + 2;
  });
  return { id: svg.closest("figure").id, drawn: marks.length, width: page.width,
    outside: outside.map((text) => text.textContent), bad: svg.outerHTML.includes("NaN") };
});
const views = { steps: seen() };
for (const x of ["tokens", "seconds"]) {
  document.querySelector("[data-x=" + x + "]").click();
  views[x] = seen();
}
document.getElementById("log").click();
const all = views.seconds[0].drawn;
const over = document.querySelector("#figure-loss .over");
const send = (kind, clientX) => over.dispatchEvent(new PointerEvent(kind, { clientX }));
over.setPointerCapture = () => {};
const place = over.getBoundingClientRect();
send("pointerdown", place.left + place.width / 2); send("pointermove", place.right);
const read = document.querySelector("#figure-loss .read").textContent;
send("pointerup", place.right);
const zoom = [...VIEW.zoom];
const buttons = document.querySelectorAll("#runs button");
if (buttons.length) buttons[0].click();
DATA = JSON.parse(JSON.stringify(DATA)); draw();
const shown = { views, all, zoom, read, hidden: [...VIEW.hidden], log: VIEW.log,
  x: VIEW.x, wide: document.documentElement.scrollWidth,
  samples: document.getElementById("samples").textContent,
  scripts: document.scripts.length, bold: document.querySelectorAll("td b").length };
Object.assign(VIEW, { x: "step", zoom: [1, 2] });
draw();
const few = [...document.querySelectorAll("#figure-loss text")].map((text) => text.textContent);
const narrow = new Scale(1.1, 1.6, 0, 100, true).ticks(5);
document.title = JSON.stringify({ ...shown, few, narrow });
}
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium and no google-chrome on this machine")
def test_a_browser_draws_all_of_it(tmp_path):
    """No error of its console, every figure drawn in every view, no text outside of its picture; an
    enlarged part, a hidden run and the axis stay as data come anew; what is hostile is text.
    """
    runs = [make_run(tmp_path / "one"), make_run(tmp_path / "a run of a rather long name", 50)]
    file = write_page(runs, tmp_path / "show.html")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", file.read_text())
    file.write_text(text.replace("</body>", PROBE))
    words = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,3000"]
    words += ["--enable-logging=stderr", "--dump-dom", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [*words, file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "CONSOLE" not in shown.stderr, shown.stderr
    title = re.search("<title>(.*?)</title>", shown.stdout)
    assert title
    found = json.loads(title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    for view in found["views"].values():
        assert {one["id"] for one in view} == {*FIGURES, "figure-other-0"}
        for one in view:
            assert one["drawn"] > 5 and one["width"] > 300, one
            assert not one["outside"] and not one["bad"], one
    # steps are whole numbers, and a logarithmic axis of a narrow range has numbers too
    assert {"1", "2"} <= {*found["few"]} and not {"1.2", "1.5"} & {*found["few"]}
    assert len(found["narrow"]) > 2 and all(1.1 <= x <= 1.61 for x in found["narrow"])
    assert found["wide"] <= 1000 and found["scripts"] == 3 and found["bold"] == 0
    assert found["samples"].count(HOSTILE) == 4
    assert found["x"] == "seconds" and found["log"] and found["hidden"] == ["one"]
    assert found["zoom"][0] == pytest.approx(12.5, rel=0.02) and found["zoom"][1] == 25
    assert found["read"].startswith("step 39: one 1.2810; one, validation 3.0000; a run"), found[
        "read"
    ]
