"use strict";
// What is no curve, as tables; then the view, and the page's life while a run goes on.

function table(parent, heads, rows) {
  const made = element(parent, "table");
  const top = element(element(made, "thead"), "tr");
  heads.forEach((head) => element(top, "th", head));
  const body = element(made, "tbody");
  for (const row of rows) {
    const line = element(body, "tr");
    row.forEach((cell) => element(line, "td", cell));
  }
  return made;
}

// A row for each name that any run has, with its value in each run.
function compared(parent, all) {
  const names = [...new Set(all.flatMap(Object.keys))];
  return table(parent, ["", ...labelled()], names.map((name) => [name, ...all.map((one) => one[name] ?? "")]));
}

const labelled = () => DATA.runs.map((run) => run.label);
const when = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ");

// Tables of [id, what makes it]; a table is made anew only where it says something new, so that
// what a reader has opened or marked stays.
const SAID = {};
function tell(id, value, make) {
  const text = JSON.stringify(value);
  if (SAID[id] === text) return;
  SAID[id] = text;
  const place = byId(id);
  place.replaceChildren();
  make(place, value);
}

function drawTables() {
  tell("facts", DATA.runs.map((run) => run.facts), (to, all) => {
    compared(to, all.map(Object.fromEntries)).className = "facts";
  });
  const refused = DATA.runs.flatMap((run) => run.refused.map((line) => run.label + ": " + line));
  tell("refused", refused, (to) => refused.forEach((line) => element(to, "p", line, "warning")));
  tell("differs", DATA.differs, (to) => {
    byId("part-differs").hidden = !several();
    if (!DATA.differs.length) return element(to, "p", "Nothing: their options are the same.");
    table(to, ["option", ...labelled()], DATA.differs.map(([name, values]) => [name, ...values.map((v) => (v === null ? "none" : v))]));
  });
  const starts = DATA.runs.flatMap((run) => run.starts.map((one) => [run.label, one]));
  byId("part-starts").hidden = !starts.length;
  tell("starts", starts, (to) => {
    table(to, ["run", "when (UTC)", "how", "from step", "done again", "to step", "ended", "processes", "changed"], starts.map(([label, one]) => [
      label, when(one.time), one.begun, one.step.toLocaleString("en"),
      Math.max(0, (one.reached || 0) - one.step).toLocaleString("en"),
      one.until === null ? "" : one.until.toLocaleString("en"), one.ended || "",
      one.processes || "", one.changed.join("; "),
    ]));
  });
  const samples = DATA.runs.map((run) => [run.label, run.samples]);
  byId("part-samples").hidden = !samples.some(([, list]) => list.length);
  tell("samples", samples, drawSamples);
  tell("options", DATA.runs.map((run) => run.options), compared);
}

function drawSamples(to) {
  const prompts = [...new Set(DATA.runs.flatMap((run) => run.samples.map((one) => one.prompt)))];
  for (const prompt of prompts) {
    element(to, "p", prompt, "prompt");
    const rows = [];
    for (const run of DATA.runs) {
      const found = run.samples.find((one) => one.prompt === prompt);
      (found ? found.texts : []).forEach(([step, text]) => rows.push([...(several() ? [run.label] : []), step.toLocaleString("en"), text]));
    }
    table(to, [...(several() ? ["run"] : []), "step", "continued"], rows).className = "samples";
  }
}

// Columns that no figure has: a small one for each.
function drawOthers() {
  const names = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.series.columns)))].filter((name) => !DRAWN.has(name)).sort();
  names.forEach((name, i) => {
    const id = "other-" + i;
    if (!byId("figure-" + id)) element(byId("others"), "figure").id = "figure-" + id;
    drawCurves({ id, y: name, columns: [[name, ""]] });
  });
}

function drawRuns() {
  const to = byId("runs");
  to.replaceChildren();
  if (!several()) return;
  DATA.runs.forEach((run, i) => {
    const made = element(to, "button", undefined, VIEW.hidden.has(run.label) ? "off" : "");
    made.title = run.folder;
    const svg = document.createElementNS(NS, "svg");
    svg.setAttribute("viewBox", "0 0 40 10");
    line(svg, [[0, 5], [40, 5]], { class: "line", stroke: style(COLOURS, i), "stroke-dasharray": style(DASHES, i) });
    marker(svg, 20, 5, i, false);
    made.append(svg);
    element(made, "span", run.label);
    made.addEventListener("click", () => { if (!VIEW.hidden.delete(run.label)) VIEW.hidden.add(run.label); draw(); });
  });
}

function draw() {
  document.querySelectorAll("[data-x]").forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.x === VIEW.x)));
  byId("log").setAttribute("aria-pressed", String(VIEW.log));
  byId("whole").hidden = VIEW.zoom === null;
  byId("empty").hidden = DATA.runs.some((run) => run.series.rows > 0);
  byId("thin").hidden = !DATA.runs.some((run) => run.series.width > 1);
  // what is hidden has no width
  const sections = document.querySelectorAll("section");
  sections.forEach((one) => { one.hidden = false; });
  drawRuns();
  CURVES.forEach(drawCurves);
  drawLife();
  drawRanks();
  drawLoads();
  drawOthers();
  sections.forEach((one) => {
    one.hidden = [...one.querySelectorAll("figure")].every((figure) => figure.hidden);
  });
  drawTables();
}

document.querySelectorAll("[data-x]").forEach((one) => one.addEventListener("click", () => {
  VIEW.x = one.dataset.x;
  VIEW.zoom = null;
  draw();
}));
byId("log").addEventListener("click", () => { VIEW.log = !VIEW.log; draw(); });
byId("whole").addEventListener("click", () => { VIEW.zoom = null; draw(); });
addEventListener("resize", draw);
draw();

// While a run goes on: what is new is fetched, and drawn in the view that there is.
async function refresh() {
  const told = byId("live");
  try {
    const answer = await fetch("data" + location.search, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    const text = await answer.text();
    if (text !== refresh.last) {
      refresh.last = text;
      DATA = JSON.parse(text);
      draw();
    }
    told.textContent = "live, looked at " + new Date().toLocaleTimeString();
  } catch {
    told.textContent = "not live any more: dolmen show has ended, and this is what it showed last";
  }
}
if (document.body.dataset.every) setInterval(refresh, Number(document.body.dataset.every) * 1000);
