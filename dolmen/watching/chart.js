"use strict";
// Curves against steps, tokens or time, as SVG: a scale, two axes, lines with bands, labels at the
// ends of lines. Runs differ by dashes and markers first, and by colour too.

const NS = "http://www.w3.org/2000/svg";
const COLOURS = ["#16202a", "#2f6cab", "#c2572f", "#4f8a48", "#7d55a5", "#9a7a1f"];
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

function path(points) {
  let out = "";
  let open = false;
  for (const point of points) {
    if (point) out += (open ? "L" : "M") + at(point[0]) + " " + at(point[1]);
    open = point !== null;
  }
  return out;
}

// Three digits and a letter for thousands.
function short(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return String(Number((value / size).toPrecision(3))) + letter;
  }
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1).replace(".0e", "e");
  return String(Number(value.toPrecision(3)));
}

function clock(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const parts = [Math.floor(whole / 60) % 60, whole % 60].map((n) => String(n).padStart(2, "0"));
  return Math.floor(whole / 3600) + ":" + parts.join(":");
}

function roundStep(about, steps) {
  const power = 10 ** Math.floor(Math.log10(about));
  return power * (steps.find((m) => power * m >= about * (1 - 1e-9)) || 10);
}

class Scale {
  constructor(low, high, start, end, log) {
    Object.assign(this, { low, high, start, end, log });
  }
  of(value) {
    const f = this.log ? Math.log : (x) => x;
    const value_ = this.log ? Math.max(value, this.low) : value;
    const share = this.high > this.low ? (f(value_) - f(this.low)) / (f(this.high) - f(this.low)) : 0.5;
    return this.start + share * (this.end - this.start);
  }
  back(pixel) {
    return this.low + ((pixel - this.start) / (this.end - this.start)) * (this.high - this.low);
  }
  ticks(most, time) {
    if (this.log) return this.powers(most);
    const span = (this.high - this.low) / most;
    if (!(span > 0)) return [this.low];
    const steps = [1, 2, 5, 10];
    let step = roundStep(span, steps);
    if (time && span > 1) {
      const known = [2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
      step = known.find((one) => one >= span) || 86400 * roundStep(span / 86400, steps);
    }
    const out = [];
    for (let n = Math.ceil(this.low / step - 1e-9); n * step <= this.high + step * 1e-9; n++) {
      out.push(n * step);
    }
    return out;
  }
  powers(most) {
    const out = [];
    const first = Math.floor(Math.log10(this.low));
    for (let p = first; p <= Math.ceil(Math.log10(this.high)); p++) {
      for (const m of [1, 2, 5]) out.push(m * 10 ** p);
    }
    const inside = out.filter((x) => x >= this.low * 0.999 && x <= this.high * 1.001);
    return inside.filter((_, i) => i % Math.ceil(inside.length / (most + 2)) === 0);
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
  for (const tick of y.ticks(5)) {
    const height = y.of(tick);
    mark(svg, "path", { d: path([[left, height], [right, height]]), class: "grid" });
    mark(svg, "text", { x: left - 7, y: at(height + 4), class: "small", "text-anchor": "end" }, short(tick));
  }
  for (const tick of x.ticks(words.narrow ? 4 : 7, time)) {
    const place = x.of(tick);
    mark(svg, "path", { d: path([[place, bottom], [place, bottom + 4]]), class: "axis" });
    const text = time ? clock(tick) : short(tick);
    mark(svg, "text", { x: at(place), y: bottom + 17, class: "small", "text-anchor": "middle" }, text);
  }
  mark(svg, "path", { d: path([[left, top], [left, bottom], [right, bottom]]), class: "axis" });
  mark(svg, "text", { x: left, y: top - 9, class: "label" }, words.y);
  mark(svg, "text", { x: (left + right) / 2, y: bottom + 34, class: "label", "text-anchor": "middle" }, words.x);
}

// Labels at the right of lines, none over another: [{y, text, colour, most letters, shape, dots}].
function labels(svg, left, top, bottom, list) {
  const sorted = [...list].sort((a, b) => a.y - b.y);
  const space = Math.min(14, (bottom - top + 14) / Math.max(1, sorted.length));
  let last = top - space;
  for (const one of sorted) {
    one.at = Math.max(one.y, last + space);
    last = one.at;
  }
  let limit = bottom + space;
  for (const one of sorted.reverse()) {
    one.at = Math.min(one.at, limit - space);
    limit = one.at;
    if (Math.abs(one.at - one.y) > 3) {
      mark(svg, "path", { d: path([[left + 2, one.y], [left + 12, one.at]]), class: "lead" });
    }
    const fill = one.dots ? "#fff" : one.colour;
    const to = "translate(" + (left + 21) + " " + at(one.at) + ")";
    if (one.shape) mark(svg, "path", { d: one.shape, transform: to, class: "marker", stroke: one.colour, fill });
    const words = one.text.length > one.most ? one.text.slice(0, one.most - 1) + "\u2026" : one.text;
    mark(svg, "text", { x: left + (one.shape ? 29 : 15), y: at(one.at + 4), class: "small strong", style: "fill:" + one.colour }, words);
  }
}

// A curve: its band from least to most, its line, markers some way apart, and where it has no value.
function curve(svg, one, x, y, box, several) {
  const colour = style(COLOURS, one.run);
  const places = one.points.map((p) => [x.of(p.x), y.of(p.mean)]);
  if (one.points.some((p) => p.high > p.low)) {
    const above = one.points.map((p) => [x.of(p.x), y.of(p.high)]);
    const below = one.points.map((p) => [x.of(p.x), y.of(p.low)]).reverse();
    mark(svg, "path", { d: path([...above, ...below]) + "z", class: "band", fill: colour, stroke: colour });
  }
  const dash = style(DASHES, one.run);
  if (one.smooth) {
    mark(svg, "path", { d: path(places), class: "raw", stroke: colour });
    const means = smoothed(one.points.map((p) => p.mean));
    const line = means.map((mean, i) => [places[i][0], y.of(mean)]);
    mark(svg, "path", { d: path(line), class: "line", stroke: colour, "stroke-dasharray": dash });
    places.splice(0, places.length, ...line);
  } else {
    const kind = one.dots ? "line thin" : "line";
    mark(svg, "path", { d: path(places), class: kind, stroke: colour, "stroke-dasharray": dash });
  }
  const every = one.dots && places.length <= 60 ? 1 : Math.ceil(places.length / 7);
  if (several || one.dots) {
    places.forEach(([px, py], i) => {
      if ((i + Math.floor(every / 2)) % every) return;
      const shape = style(MARKERS, one.run);
      const to = "translate(" + at(px) + " " + at(py) + ")";
      const fill = one.dots ? "#fff" : colour;
      mark(svg, "path", { d: shape, transform: to, class: "marker", stroke: colour, fill });
    });
  }
  for (const gap of one.gaps) {
    const place = at(x.of(gap));
    mark(svg, "text", { x: place, y: box.top + 8, class: "gap", "text-anchor": "middle" }, "\u00d7");
  }
  return places.length ? places[places.length - 1][1] : box.bottom;
}
