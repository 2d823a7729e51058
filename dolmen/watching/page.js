"use strict";
// The figures of DATA, drawn again where the view or the data change. Text comes from files: it is
// set as text, and never as markup.

let DATA = JSON.parse(document.getElementById("data").textContent);
const VIEW = { x: "step", log: false, zoom: null, hidden: new Set() };
const WORDS = { step: "step", tokens: "tokens", seconds: "time of training" };
const CURVES = [
  { id: "reward", y: "reward", columns: [["rollout/reward", ""]], smooth: true },
  { id: "length", y: "tokens", columns: [["rollout/completion_length", ""]], smooth: true, zero: true },
  { id: "finished", y: "share of completions", columns: [["rollout/finished", ""]], smooth: true, zero: true },
  { id: "loss", y: "nats per token", columns: [["loss", ""], ["val_loss", "validation"]], smooth: true, height: 400 },
  { id: "rate", y: "learning rate", columns: [["lr", ""]], zero: true },
  { id: "norm", y: "gradient norm", columns: [["grad_norm", ""]], smooth: true, log: true },
  { id: "skipped", y: "steps skipped so far", columns: [["skipped_steps", ""]], zero: true, some: true },
  { id: "speed", y: "tokens per second", columns: [["tokens_per_second", ""]], smooth: true, zero: true },
  { id: "mfu", y: "share of the peak", columns: [["mfu_datasheet", "datasheet"], ["mfu_measured", "measured"]], first: true, smooth: true, zero: true },
  { id: "held", y: "GiB, first rank", columns: [["memory_gib", ""]], zero: true },
  { id: "busiest", y: "times the mean", columns: [["router/max_load", ""]], smooth: true },
];
const DRAWN = new Set(CURVES.flatMap((one) => one.columns.map(([name]) => name)).concat("val_tokens"));
const byId = (id) => document.getElementById(id);

function element(parent, tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  parent.append(made);
  return made;
}

const several = () => DATA.runs.length > 1;
const shown = () => DATA.runs.map((run, i) => [run, i]).filter(([run]) => !VIEW.hidden.has(run.label));
const least = (values, start = Infinity) => values.reduce((a, b) => Math.min(a, b), start);
const most = (values, start = -Infinity) => values.reduce((a, b) => Math.max(a, b), start);

// A step as what the figures are drawn against.
function place(run, step) {
  if (VIEW.x === "step") return step;
  const { step: steps, [VIEW.x]: values } = run.series;
  const after = steps.findIndex((one) => one >= step);
  if (!steps.length) return 0;
  if (after < 0) return values[values.length - 1];
  const [s0, v0] = after ? [steps[after - 1], values[after - 1]] : [0, 0];
  return v0 + ((step - s0) / Math.max(1, steps[after] - s0)) * (values[after] - v0);
}

function points(run, name) {
  const column = run.series.columns[name];
  const xs = run.series[VIEW.x];
  const where = column.at || xs.map((_, i) => i);
  const inside = (x) => !VIEW.zoom || (x >= VIEW.zoom[0] && x <= VIEW.zoom[1]);
  const made = column.mean.map((mean, i) => ({
    x: xs[where[i]], step: run.series.step[where[i]], mean,
    low: column.low ? column.low[i] : mean, high: column.high ? column.high[i] : mean,
  }));
  return { points: made.filter((p) => inside(p.x)), gaps: (column.gaps || []).map((i) => xs[i]).filter(inside) };
}

function curves(spec) {
  return shown().flatMap(([run, index]) => {
    const known = spec.columns.filter(([name]) => run.series.columns[name]);
    return known.slice(0, spec.first ? 1 : known.length).map(([name, word]) => {
      const dots = word === "validation";
      const text = [several() ? run.label : "", dots ? word : ""].filter(Boolean).join(", ");
      return { ...points(run, name), run: index, dots, smooth: spec.smooth && !dots, text: text || (spec.id === "loss" ? "training" : ""), word };
    });
  }).filter((one) => one.points.length || one.gaps.length);
}

function domain() {
  if (VIEW.zoom) return VIEW.zoom;
  const ends = shown().map(([run]) => run.series[VIEW.x]).filter((xs) => xs.length);
  const low = VIEW.x === "step" ? least(ends.map((xs) => xs[0])) : 0;
  return ends.length ? [low, most(ends.map((xs) => xs[xs.length - 1]), low + 1e-9)] : [0, 1];
}

function range(list, spec, log) {
  const all = list.flatMap((one) => one.points);
  let low = least(all.map((p) => p.low).filter((v) => !log || v > 0));
  let high = most(all.map((p) => p.high));
  if (!Number.isFinite(low) || !Number.isFinite(high)) return log ? [0.1, 1] : [0, 1];
  if (spec.zero && !log) low = Math.min(0, low);
  if (log) return high > low ? [low / 1.05, high * 1.05] : [low / 2, low * 2];
  const room = high > low ? (high - low) * 0.04 : (Math.abs(low) || 1) / 10;
  return [spec.zero && low === 0 ? 0 : low - room, high + room];
}

// An empty picture in place of the figure's own, as wide as the figure is on this screen, so that
// letters have one size on all.
function picture(figure, height, title) {
  const svg = document.createElementNS(NS, "svg");
  const width = Math.max(300, figure.clientWidth);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", title);
  figure.querySelector("svg")?.remove();
  figure.prepend(svg);
  return [svg, width];
}

function drawCurves(spec) {
  const figure = byId("figure-" + spec.id);
  const list = curves(spec);
  const any = list.some((one) => one.gaps.length || one.points.some((p) => !spec.some || p.high > 0));
  figure.hidden = !any && !VIEW.zoom;
  if (!any) return figure.querySelector("svg")?.remove();
  const nats = spec.id !== "loss" || DATA.runs.every((run) => (run.options["objective.name"] || "tokens") === "tokens");
  const log = spec.id === "loss" ? VIEW.log : Boolean(spec.log);
  const peak = list[0].word === "datasheet" ? " of the datasheet" : " as measured";
  const words = (nats ? spec.y : "loss") + (spec.first ? peak : "") + (log ? ", logarithmic" : "");
  const [svg, width] = picture(figure, spec.height || 250, words);
  const longest = most(list.map((one) => one.text.length));
  const room = longest ? Math.min(width / 4, 38 + 7.2 * longest) : 14;
  const box = { left: 52, right: width - room, top: 26, bottom: (spec.height || 250) - 44 };
  const x = new Scale(...domain(), box.left, box.right);
  const y = new Scale(...range(list, spec, log), box.bottom, box.top, log);
  frame(svg, box, x, y, { x: WORDS[VIEW.x], y: words, whole: VIEW.x === "step" }, VIEW.x === "seconds");
  for (const one of list) one.y = curve(svg, one, x, y, box, several());
  labels(svg, box, list, Math.floor((room - 32) / 7.2), several());
  watch(svg, figure, box, x, list);
}

// What a pointer does: rests and reads, drags and enlarges, clicks twice and sees all again.
function watch(svg, figure, box, x, list) {
  const size = { y: box.top, height: box.bottom - box.top };
  const cursor = line(svg, [], { class: "cursor" });
  const part = mark(svg, "rect", { ...size, x: 0, width: 0, class: "part" });
  const over = mark(svg, "rect", { ...size, x: box.left, width: box.right - box.left, class: "over" });
  const read = figure.querySelector(".read") || element(figure, "p", "", "read");
  let from = null;
  const pixel = (event) => {
    const seen = svg.getBoundingClientRect();
    const found = ((event.clientX - seen.left) / seen.width) * svg.viewBox.baseVal.width;
    return Math.min(box.right, Math.max(box.left, found));
  };
  over.addEventListener("pointerdown", (event) => { from = pixel(event); over.setPointerCapture(event.pointerId); });
  over.addEventListener("pointermove", (event) => {
    const now = pixel(event);
    cursor.setAttribute("d", path([[now, box.top], [now, box.bottom]]));
    read.textContent = values(list, x.back(now));
    if (from !== null) {
      part.setAttribute("x", Math.min(from, now));
      part.setAttribute("width", Math.abs(now - from));
    }
  });
  over.addEventListener("pointerup", (event) => {
    const wide = Math.abs(pixel(event) - from) > 6;
    const ends = [x.back(from), x.back(pixel(event))].sort((a, b) => a - b);
    from = null;
    if (wide) { VIEW.zoom = ends; draw(); }
  });
  over.addEventListener("pointerleave", () => { cursor.setAttribute("d", ""); read.textContent = ""; });
  over.addEventListener("dblclick", () => { VIEW.zoom = null; draw(); });
}

// The values nearest to x, in words.
function values(list, x) {
  const nearest = list.filter((one) => one.points.length).map((one) => [one, one.points.reduce((a, b) => (Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a))]);
  const words = nearest.map(([one, near]) => {
    const spread = near.high > near.low ? ` (${near.low.toPrecision(4)} to ${near.high.toPrecision(4)})` : "";
    return (one.text ? one.text + " " : "") + near.mean.toPrecision(5) + spread;
  });
  return words.length ? `step ${nearest[0][1].step.toLocaleString("en")}: ${words.join("; ")}` : "";
}

// Starts and saves: a row for each run. What was done again is drawn under what it replaced.
function drawLife() {
  const figure = byId("figure-life");
  const list = shown().filter(([run]) => run.starts.length || run.saved.length || run.checkpoints.length);
  figure.hidden = !list.length;
  if (!list.length) return;
  const tall = 46;
  const [svg, width] = picture(figure, 54 + tall * list.length, "Starts and checkpoints");
  const box = { left: 26, right: width * 0.82, top: 10, bottom: 10 + tall * list.length };
  const x = new Scale(...domain(), box.left, box.right);
  frame(svg, box, x, null, { x: WORDS[VIEW.x], y: "", whole: VIEW.x === "step" }, VIEW.x === "seconds");
  list.forEach(([run, index], row) => drawRow(svg, box, x, run, index, box.top + tall * row + 26));
}

function drawRow(svg, box, x, run, index, height) {
  const stroke = style(COLOURS, index);
  const pixel = (step) => x.of(place(run, step));
  const inside = (step) => pixel(step) >= box.left - 1 && pixel(step) <= box.right + 1;
  const clip = (step) => Math.min(box.right, Math.max(box.left, pixel(step)));
  line(svg, [[clip(0), height], [clip(most(run.series.step, 0)), height]], { class: "line thin", stroke });
  run.starts.forEach((one, i) => {
    const p = clip(one.step);
    if ((one.reached || 0) > one.step) line(svg, [[p, height + 9], [clip(one.reached), height + 9]], { class: "again", stroke });
    if (!inside(one.step) && one.step !== 0) return;
    line(svg, [[p, height - 9], [p, height + 9]], { class: "line thin", stroke });
    if (i) write(svg, p + 4, height - 8, one.begun);
  });
  const kept = new Set(run.checkpoints);
  for (const step of new Set([...run.saved, ...run.checkpoints])) {
    if (inside(step)) marker(svg, clip(step), height, index, !kept.has(step));
  }
  const letters = Math.floor((box.right / 0.82 - box.right - 15) / 6.5);
  write(svg, box.right + 15, height + 4, run.label.slice(0, letters), "strong", "start", stroke);
}

// What each rank holds: a mark per rank, joined, so that several runs lie over each other.
function drawRanks() {
  const figure = byId("figure-ranks");
  const list = shown().filter(([run]) => run.memory.gib && run.memory.gib.length);
  figure.hidden = !list.some(([run]) => run.memory.gib.length > 1);
  if (figure.hidden) return;
  const [svg, width] = picture(figure, 250, "Memory by rank");
  const room = several() ? width / 4 : 14;
  const box = { left: 52, right: width - room, top: 26, bottom: 206 };
  const ranks = most(list.map(([run]) => run.memory.gib.length));
  const x = new Scale(-0.5, ranks - 0.5, box.left, box.right);
  const y = new Scale(0, most(list.flatMap(([run]) => run.memory.gib), 0) * 1.08 || 1, box.bottom, box.top);
  frame(svg, box, x, y, { x: "rank", y: "GiB, most held so far", whole: true }, false);
  const ends = list.map(([run, index]) => {
    const one = { points: run.memory.gib.map((g, rank) => ({ x: rank, mean: g, low: g, high: g })), gaps: [], run: index, dots: ranks <= 64 };
    return { y: curve(svg, one, x, y, box, false), text: several() ? run.label : "", run: index, dots: one.dots };
  });
  labels(svg, box, ends, Math.floor((room - 32) / 7.2), true);
}

// Load of experts: a row per layer, empty where an expert got nothing, full where twice its share.
function drawLoads() {
  const figure = byId("figure-loads");
  const list = shown().filter(([run]) => run.load.layers);
  figure.hidden = !list.length;
  if (!list.length) return;
  const rows = list.map(([run]) => Object.keys(run.load.layers).length);
  const tall = rows.map((n) => Math.max(5, Math.min(22, 220 / n)));
  const [svg, width] = picture(figure, rows.reduce((a, n, i) => a + n * tall[i] + 40, 34), "Load of experts");
  // one path for each shade: thousands of marks would make a page slow
  const shades = Array.from({ length: 11 }, () => "");
  const add = (x, y, wide, high, shade) => { shades[shade] += `M${at(x)} ${at(y)}h${at(wide)}v${at(high)}h-${at(wide)}z`; };
  let top = 22;
  list.forEach(([run], r) => {
    const layers = Object.entries(run.load.layers).sort((a, b) => a[0] - b[0]);
    const wide = (width - 64) / most(layers.map(([, loads]) => loads.length));
    write(svg, 52, top - 8, `${several() ? run.label + ", " : ""}step ${run.load.step.toLocaleString("en")}`, "label");
    const every = Math.ceil(12 / tall[r]);
    layers.forEach(([layer, loads], row) => {
      loads.forEach((load, i) => add(52 + i * wide, top + row * tall[r], wide, tall[r], Math.min(10, Math.round(load * 5))));
      if (row % every === 0) write(svg, 46, top + (row + 0.5) * tall[r] + 4, layer, "", "end");
    });
    top += layers.length * tall[r] + 40;
  });
  for (let i = 0; i <= 10; i++) add(52 + i * 16, top - 26, 16, 9, i);
  shades.forEach((d, i) => mark(svg, "path", { d, class: "cell", fill: "var(--ink)", "fill-opacity": i / 10 }));
  [[0, "0"], [5, "mean"], [10, "twice, or more"]].forEach(([i, text]) => write(svg, 60 + i * 16, top - 5, text, "", i === 10 ? "start" : "middle"));
}
