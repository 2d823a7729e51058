"use strict";
// Curves against steps, tokens or time, as SVG: a scale, two axes, lines with bands, labels at the
// ends of lines. Runs differ by dashes and markers first, and by colour too. Colours are those of
// the page's theme.

const NS = "http://www.w3.org/2000/svg";
const COLOURS = ["ink", "blue", "orange", "green", "violet", "gold"].map((name) => `var(--${name})`);
const DASHES = ["", "8 3", "2 2.5", "10 3 2 3", "5 5", "1 3"];
const MARKERS = [
  "M-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0 -6.8 0z", "M-3 -3H3V3H-3z", "M0 -4L3.8 3H-3.8z",
  "M0 -4.2L4.2 0L0 4.2L-4.2 0z", "M-3 -3L3 3M-3 3L3 -3", "M0 -4V4M-4 0H4",
];
const style = (list, i) => list[i % list.length];

function mark(parent, tag, attributes, text) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

const at = (value) => Math.round(value * 10) / 10;

// A path through points; a point that is null interrupts it.
function path(points) {
  return points.map((point, i) => (point ? `${i && points[i - 1] ? "L" : "M"}${at(point[0])} ${at(point[1])}` : "")).join("");
}

function line(svg, points, attributes) {
  return mark(svg, "path", { d: path(points), ...attributes });
}

function write(svg, x, y, text, kind = "", anchor = "start", colour = "") {
  mark(svg, "text", { x: at(x), y: at(y), class: kind, "text-anchor": anchor, style: colour && `fill:${colour}` }, text);
}

// The marker of a run, open for what is measured on held-out text.
function marker(svg, x, y, run, open) {
  const colour = style(COLOURS, run);
  mark(svg, "path", { d: style(MARKERS, run), transform: `translate(${at(x)} ${at(y)})`, class: "marker", stroke: colour, fill: open ? "var(--paper)" : colour });
}

// Three digits and a letter for thousands.
function short(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + letter;
  }
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1).replace(".0e", "e");
  return String(Number(value.toPrecision(3)));
}

function clock(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const parts = [Math.floor(whole / 60) % 60, whole % 60].map((n) => String(n).padStart(2, "0"));
  return Math.floor(whole / 3600) + ":" + parts.join(":");
}

function roundStep(about) {
  const power = 10 ** Math.floor(Math.log10(about));
  return power * [1, 2, 5, 10].find((m) => power * m >= about * (1 - 1e-9));
}

const TIMES = [2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

class Scale {
  constructor(low, high, start, end, log = false) {
    Object.assign(this, { low, high, start, end, log });
  }
  of(value) {
    const [low, high, v] = [this.low, this.high, this.log ? Math.max(value, this.low) : value].map(this.log ? Math.log : Number);
    return this.start + (high > low ? (v - low) / (high - low) : 0.5) * (this.end - this.start);
  }
  back(pixel) {
    return this.low + ((pixel - this.start) / (this.end - this.start)) * (this.high - this.low);
  }
  // About so many round numbers; with `time`, round on a clock.
  ticks(most, time = false) {
    const span = (this.high - this.low) / most;
    if (!(span > 0)) return [this.low];
    if (this.log) {
      const powers = Array.from({ length: 640 }, (_, i) => 10 ** (i - 320));
      const inside = powers.flatMap((p) => [p, 2 * p, 5 * p]).filter((x) => x >= this.low * 0.999 && x <= this.high * 1.001);
      // a narrow range has none of these, or one: then round numbers as without a logarithm
      if (inside.length > 1) return inside.filter((_, i) => i % Math.ceil(inside.length / (most + 2)) === 0);
    }
    const step = time && span > 1 ? TIMES.find((one) => one >= span) || 86400 * roundStep(span / 86400) : roundStep(span);
    const first = Math.ceil(this.low / step - 1e-9);
    return Array.from({ length: Math.floor(this.high / step + 1e-9) - first + 1 }, (_, n) => (first + n) * step);
  }
}

// Mean of each value and its neighbours, a twentieth of all. At the beginning as many on each side, so
// that what falls steeply is not drawn below itself; at the end those before, so that it is no noise.
function smoothed(values) {
  const sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  const most = Math.floor(values.length / 40);
  return values.map((_, i) => {
    const side = Math.min(most, i);
    const end = Math.min(values.length, i + side + 1);
    return (sums[end] - sums[i - side]) / (end - i + side);
  });
}

// The frame of a picture: axes, grid, what they mean. Returns where curves are drawn.
function frame(svg, box, x, y, words, time) {
  const { left, right, top, bottom } = box;
  for (const tick of words.y ? y.ticks(5) : []) {
    line(svg, [[left, y.of(tick)], [right, y.of(tick)]], { class: "grid" });
    write(svg, left - 7, y.of(tick) + 4, short(tick), "", "end");
  }
  const across = x.ticks(Math.max(2, (right - left) / (time ? 95 : 75)), time).filter((tick) => !words.whole || (Number.isInteger(tick) && tick >= 0));
  for (const tick of across) {
    line(svg, [[x.of(tick), bottom], [x.of(tick), bottom + 4]], { class: "axis" });
    write(svg, x.of(tick), bottom + 17, time ? clock(tick) : short(tick), "", "middle");
  }
  line(svg, [[left, top], [left, bottom], [right, bottom]], { class: "axis" });
  write(svg, left, top - 9, words.y, "label");
  write(svg, (left + right) / 2, bottom + 34, words.x, "label", "middle");
}

// Labels at the right of lines, none over another: [{y, text, run, dots}], in so many letters.
function labels(svg, { right, top, bottom }, list, letters, marked) {
  const space = Math.min(14, (bottom - top + 14) / Math.max(1, list.length));
  const sorted = list.filter((one) => one.text).sort((a, b) => a.y - b.y);
  sorted.forEach((one, i) => { one.at = i ? Math.max(one.y, sorted[i - 1].at + space) : one.y; });
  sorted.reverse().forEach((one, i) => {
    one.at = Math.min(one.at, i ? sorted[i - 1].at - space : bottom);
    if (Math.abs(one.at - one.y) > 3) line(svg, [[right + 2, one.y], [right + 12, one.at]], { class: "lead" });
    if (marked) marker(svg, right + 21, one.at, one.run, one.dots);
    const words = one.text.length > letters ? one.text.slice(0, letters - 1) + "\u2026" : one.text;
    write(svg, right + (marked ? 29 : 15), one.at + 4, words, "strong", "start", style(COLOURS, one.run));
  });
}

// A curve: its band from least to most, its line, markers some way apart, and where it has no value.
// Returns the height of its end.
function curve(svg, one, x, y, box, several) {
  const stroke = style(COLOURS, one.run);
  const heights = (key) => one.points.map((p) => [x.of(p.x), y.of(p[key])]);
  let places = heights("mean");
  if (one.points.some((p) => p.high > p.low)) {
    mark(svg, "path", { d: path([...heights("high"), ...heights("low").reverse()]) + "z", class: "band", fill: stroke, stroke });
  }
  if (one.smooth) {
    line(svg, places, { class: "raw", stroke });
    places = smoothed(one.points.map((p) => p.mean)).map((mean, i) => [places[i][0], y.of(mean)]);
  }
  line(svg, places, { class: one.dots ? "line thin" : "line", stroke, "stroke-dasharray": style(DASHES, one.run) });
  const every = one.dots && places.length <= 60 ? 1 : Math.ceil(places.length / 7);
  if (several || one.dots) {
    places.forEach(([px, py], i) => (i + Math.floor(every / 2)) % every || marker(svg, px, py, one.run, one.dots));
  }
  for (const gap of one.gaps) write(svg, x.of(gap), box.top + 8, "\u00d7", "gap", "middle");
  return places.length ? places[places.length - 1][1] : box.bottom;
}
