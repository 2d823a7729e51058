"use strict";
// The page: figures and tables of DATA, drawn again where the view or the data change. Text comes
// from files: it is set as text, and never as markup.

let DATA = JSON.parse(document.getElementById("data").textContent);
const VIEW = { x: "step", log: false, zoom: null, hidden: new Set() };
const WORDS = { step: "step", tokens: "tokens", seconds: "time of training" };
const CURVES = [
  { id: "reward", y: "reward", columns: [["rollout/reward", ""]], smooth: true },
  { id: "length", y: "tokens", columns: [["rollout/completion_length", ""]], smooth: true, zero: true },
  { id: "finished", y: "share of completions", columns: [["rollout/finished", ""]], smooth: true, zero: true },
  { id: "loss", y: "nats per token", columns: [["loss", ""], ["val_loss", "validation"]], smooth: true, tall: true },
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

const shown = () => DATA.runs.map((run, i) => [run, i]).filter(([run]) => !VIEW.hidden.has(run.label));

// Of a run's marks, where there are several runs to tell apart.
const shape = (run) => (DATA.runs.length > 1 ? style(MARKERS, run) : "");

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
  if (!column) return null;
  const xs = run.series[VIEW.x];
  const where = column.at || xs.map((_, i) => i);
  const made = column.mean.map((mean, i) => ({
    x: xs[where[i]], step: run.series.step[where[i]], mean,
    low: column.low ? column.low[i] : mean, high: column.high ? column.high[i] : mean,
  }));
  const inside = (x) => !VIEW.zoom || (x >= VIEW.zoom[0] && x <= VIEW.zoom[1]);
  const gaps = (column.gaps || []).map((i) => xs[i]).filter(inside);
  return { points: made.filter((p) => inside(p.x)), gaps };
}

function curves(spec) {
  const out = [];
  for (const [run, index] of shown()) {
    const known = spec.columns.filter(([name]) => run.series.columns[name]);
    for (const [name, word] of spec.first ? known.slice(0, 1) : known) {
      const found = points(run, name);
      if (!found.points.length && !found.gaps.length) continue;
      const dots = word === "validation";
      const text = [DATA.runs.length > 1 ? run.label : "", dots ? word : ""].filter(Boolean).join(", ");
      out.push({ ...found, run: index, dots, smooth: spec.smooth && !dots, text: text || (spec.tall ? "training" : ""), word });
    }
  }
  return out;
}

function domain() {
  if (VIEW.zoom) return VIEW.zoom;
  const ends = shown().map(([run]) => run.series[VIEW.x]).filter((xs) => xs.length);
  const low = VIEW.x === "step" ? Math.min(...ends.map((xs) => xs[0])) : 0;
  return ends.length ? [low, Math.max(...ends.map((xs) => xs[xs.length - 1]), low + 1e-9)] : [0, 1];
}

function range(list, spec, log) {
  const all = list.flatMap((one) => one.points);
  const lows = all.map((p) => p.low).filter((v) => !log || v > 0);
  let [low, high] = [lows.reduce((a, b) => Math.min(a, b), Infinity), all.reduce((a, p) => Math.max(a, p.high), -Infinity)];
  if (!(high > -Infinity) || !(low < Infinity)) return log ? [0.1, 1] : [0, 1];
  if (spec.zero && !log) low = Math.min(0, low);
  if (high <= low) [low, high] = log ? [low / 2, low * 2] : [low - (Math.abs(low) || 1) / 10, low + (Math.abs(low) || 1) / 10];
  const room = log ? 1 : (high - low) * 0.04;
  return log ? [low / 1.05, high * 1.05] : [spec.zero && low === 0 ? 0 : low - room, high + room];
}

function svgIn(figure, width, height, title) {
  const svg = document.createElementNS(NS, "svg");
  svg.setAttribute("viewBox", "0 0 " + width + " " + height);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", title);
  const before = figure.querySelector("svg");
  if (before) before.replaceWith(svg);
  else figure.querySelector(".plot").append(svg);
  return svg;
}

function drawCurves(spec) {
  const figure = byId("figure-" + spec.id);
  const list = curves(spec);
  const any = list.some((one) => one.gaps.length || one.points.some((p) => !spec.some || p.high > 0));
  figure.hidden = !any && !VIEW.zoom;
  if (!any) return figure.querySelector(".plot").replaceChildren();
  const [width, height] = spec.tall ? [920, 400] : [448, 250];
  const longest = list.reduce((most, one) => Math.max(most, one.text.length), 0);
  const room = Math.min(spec.tall ? 230 : 110, longest ? 38 + 7.2 * longest : 14);
  const box = { left: spec.tall ? 58 : 52, right: width - room, top: 26, bottom: height - 44 };
  const nats = DATA.runs.every((run) => (run.options["objective.name"] || "tokens") === "tokens");
  const plain = spec.id === "loss" && !nats ? "loss" : spec.y;
  const words = spec.first ? spec.y + (list[0].word === "datasheet" ? " of the datasheet" : " as measured") : plain;
  const svg = svgIn(figure, width, height, words);
  const log = spec.id === "loss" ? VIEW.log : Boolean(spec.log);
  const x = new Scale(...domain(), box.left, box.right, false);
  const y = new Scale(...range(list, spec, log), box.bottom, box.top, log);
  const time = VIEW.x === "seconds";
  frame(svg, box, x, y, { x: WORDS[VIEW.x], y: words + (log ? ", logarithmic" : ""), narrow: !spec.tall }, time);
  const ends = list.map((one) => ({
    y: curve(svg, one, x, y, box, DATA.runs.length > 1), text: one.text, colour: style(COLOURS, one.run),
    most: Math.floor((room - 32) / 7.2), shape: one.text && shape(one.run), dots: one.dots,
  }));
  labels(svg, box.right, box.top, box.bottom, ends.filter((one) => one.text));
  watch(svg, figure, box, x, list);
}

// What a pointer does: rests and reads, drags and enlarges, clicks twice and sees all again.
function watch(svg, figure, box, x, list) {
  const over = mark(svg, "rect", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top, class: "over" });
  const line = mark(svg, "path", { d: "", class: "cursor" });
  const part = mark(svg, "rect", { x: 0, y: box.top, width: 0, height: box.bottom - box.top, class: "part" });
  const read = figure.querySelector(".read");
  let from = null;
  const pixel = (event) => {
    const seen = svg.getBoundingClientRect();
    const found = ((event.clientX - seen.left) / seen.width) * svg.viewBox.baseVal.width;
    return Math.min(box.right, Math.max(box.left, found));
  };
  over.addEventListener("pointerdown", (event) => { from = pixel(event); over.setPointerCapture(event.pointerId); });
  over.addEventListener("pointermove", (event) => {
    const now = pixel(event);
    line.setAttribute("d", path([[now, box.top], [now, box.bottom]]));
    read.textContent = told(list, x.back(now));
    if (from !== null) {
      part.setAttribute("x", Math.min(from, now));
      part.setAttribute("width", Math.abs(now - from));
    }
  });
  over.addEventListener("pointerup", (event) => {
    const ends = [x.back(from), x.back(pixel(event))].sort((a, b) => a - b);
    const wide = Math.abs(pixel(event) - from) > 6;
    from = null;
    if (wide) { VIEW.zoom = ends; draw(); }
  });
  over.addEventListener("pointerleave", () => { line.setAttribute("d", ""); read.textContent = ""; });
  over.addEventListener("dblclick", () => { VIEW.zoom = null; draw(); });
}

// The values nearest to x, in words.
function told(list, x) {
  let step = null;
  const words = list.filter((one) => one.points.length).map((one) => {
    const near = one.points.reduce((a, b) => (Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a));
    step = step === null ? near.step : step;
    const spread = near.high > near.low ? " (" + near.low.toPrecision(4) + " to " + near.high.toPrecision(4) + ")" : "";
    return (one.text ? one.text + " " : "") + near.mean.toPrecision(5) + spread;
  });
  return step === null ? "" : "step " + step.toLocaleString("en") + ": " + words.join("; ");
}

// Starts and saves: a row for each run. What was done again is drawn under what it replaced.
function drawLife() {
  const figure = byId("figure-life");
  const list = shown().filter(([run]) => run.starts.length || run.saved.length || run.checkpoints.length);
  figure.hidden = !list.length;
  if (!list.length) return;
  const tall = 46;
  const box = { left: 26, right: 752, top: 10, bottom: 10 + tall * list.length };
  const svg = svgIn(figure, 920, box.bottom + 44, "Starts and checkpoints");
  const x = new Scale(...domain(), box.left, box.right, false);
  const y = new Scale(0, 1, box.bottom, box.top, false);
  y.ticks = () => [];
  frame(svg, box, x, y, { x: WORDS[VIEW.x], y: "" }, VIEW.x === "seconds");
  list.forEach(([run, index], row) => drawRow(svg, box, x, run, index, box.top + tall * row + 26));
}

function drawRow(svg, box, x, run, index, height) {
  const colour = style(COLOURS, index);
  const inside = (step) => { const p = x.of(place(run, step)); return p >= box.left - 1 && p <= box.right + 1; };
  const clip = (step) => Math.min(box.right, Math.max(box.left, x.of(place(run, step))));
  const steps = run.series.step;
  const end = steps.length ? steps[steps.length - 1] : 0;
  mark(svg, "path", { d: path([[clip(0), height], [clip(end), height]]), class: "line thin", stroke: colour });
  run.starts.forEach((one, i) => {
    const again = (one.reached || 0) > one.step;
    if (again) mark(svg, "path", { d: path([[clip(one.step), height + 9], [clip(one.reached), height + 9]]), class: "again", stroke: colour });
    if (!inside(one.step) && one.step !== 0) return;
    const p = at(clip(one.step));
    mark(svg, "path", { d: "M" + p + " " + (height - 9) + "V" + (height + 9), class: "line thin", stroke: colour });
    if (i) mark(svg, "text", { x: p + 4, y: height - 8, class: "small" }, one.begun);
  });
  const kept = new Set(run.checkpoints);
  for (const step of new Set([...run.saved, ...run.checkpoints])) {
    if (!inside(step)) continue;
    const fill = kept.has(step) ? colour : "#fff";
    mark(svg, "path", { d: MARKERS[1], transform: "translate(" + at(clip(step)) + " " + height + ")", class: "marker", stroke: colour, fill });
  }
  mark(svg, "text", { x: box.right + 15, y: height + 4, class: "small strong", style: "fill:" + colour }, run.label.slice(0, 24));
}

// What each rank holds: a mark per rank, joined, so that several runs lie over each other.
function drawRanks() {
  const figure = byId("figure-ranks");
  const list = shown().filter(([run]) => run.memory.gib && run.memory.gib.length);
  figure.hidden = !list.some(([run]) => run.memory.gib.length > 1);
  if (figure.hidden) return;
  const box = { left: 52, right: DATA.runs.length > 1 ? 338 : 434, top: 26, bottom: 206 };
  const svg = svgIn(figure, 448, 250, "Memory by rank");
  const most = list.reduce((a, [run]) => Math.max(a, run.memory.gib.length), 1);
  const high = list.reduce((a, [run]) => run.memory.gib.reduce((b, g) => Math.max(b, g), a), 0);
  const x = new Scale(-0.5, most - 0.5, box.left, box.right, false);
  const y = new Scale(0, high * 1.08 || 1, box.bottom, box.top, false);
  const ticks = x.ticks.bind(x);
  x.ticks = (n) => ticks(n).filter((tick) => Number.isInteger(tick) && tick >= 0);
  frame(svg, box, x, y, { x: "rank", y: "GiB, most held so far", narrow: true }, false);
  const ends = list.map(([run, index]) => {
    const one = { points: run.memory.gib.map((g, rank) => ({ x: rank, mean: g, low: g, high: g })), gaps: [], run: index, dots: most <= 64 };
    return { y: curve(svg, one, x, y, box, false), text: DATA.runs.length > 1 ? run.label : "", colour: style(COLOURS, index), most: 10, shape: shape(index), dots: one.dots };
  });
  labels(svg, box.right, box.top, box.bottom, ends.filter((one) => one.text));
}

// Load of experts: a row per layer, white where an expert got nothing, black where twice its share.
function drawLoads() {
  const figure = byId("figure-loads");
  const list = shown().filter(([run]) => run.load.layers);
  figure.hidden = !list.length;
  if (!list.length) return;
  const rows = list.map(([run]) => Object.keys(run.load.layers).length);
  const tall = rows.map((n) => Math.max(5, Math.min(22, 220 / n)));
  const svg = svgIn(figure, 448, rows.reduce((a, n, i) => a + n * tall[i] + 40, 34), "Load of experts");
  const shade = (load) => Math.min(10, Math.round(load * 5));
  let top = 22;
  list.forEach(([run], r) => {
    const layers = Object.entries(run.load.layers).sort((a, b) => a[0] - b[0]);
    const wide = 384 / Math.max(...layers.map(([, loads]) => loads.length));
    const words = (DATA.runs.length > 1 ? run.label + ", " : "") + "step " + run.load.step.toLocaleString("en");
    mark(svg, "text", { x: 52, y: top - 8, class: "label" }, words);
    const each = Array.from({ length: 11 }, () => "");
    layers.forEach(([, loads], row) => loads.forEach((load, i) => {
      each[shade(load)] += "M" + at(52 + i * wide) + " " + at(top + row * tall[r]) + "h" + at(wide) + "v" + at(tall[r]) + "h-" + at(wide) + "z";
    }));
    each.forEach((d, i) => d && mark(svg, "path", { d, class: wide > 6 ? "cell" : "", fill: grey(i) }));
    const every = Math.ceil(12 / tall[r]);
    layers.forEach(([layer], row) => row % every || mark(svg, "text", { x: 46, y: at(top + (row + 0.5) * tall[r] + 4), class: "small", "text-anchor": "end" }, layer));
    top += layers.length * tall[r] + 40;
  });
  for (let i = 0; i <= 10; i++) mark(svg, "rect", { x: 52 + i * 16, y: top - 26, width: 16, height: 9, fill: grey(i), class: "cell" });
  [[0, "0"], [5, "mean"], [10, "twice, or more"]].forEach(([i, text]) => mark(svg, "text", { x: 60 + i * 16, y: top - 5, class: "small", "text-anchor": i === 10 ? "start" : "middle" }, text));
}

const grey = (i) => { const v = Math.round(255 - i * 23); return "rgb(" + v + "," + v + "," + v + ")"; };
