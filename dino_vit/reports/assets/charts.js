"use strict";

// Line charts as SVG: axes, levels to compare with, values under the pointer or by arrow keys, a table of values.
// Written by hand because the page is one file without network access under a strict content security policy: the
// smallest chart library that has all of this would add 50 kB to every report.

const report = {}; // the parts of the page, to be inspected from the browser's console

const MARGIN = { top: 10, right: 12, bottom: 24, left: 46 };
const TABLE_ROWS = 12;
const COLOURS = 6; // of curves

function append(parent, made, attributes, text) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function element(parent, name, attributes = {}, text) {
  return append(parent, document.createElement(name), attributes, text);
}

function shape(parent, name, attributes, text) {
  return append(parent, document.createElementNS("http://www.w3.org/2000/svg", name), attributes, text);
}

function format(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 100000 || size < 0.001) return value.toExponential(1).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

// Round numbers from low to high, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((it) => it >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found.map((value) => Number(value.toPrecision(12)));
}

class Chart {
  constructor(parent, data) {
    this.figure = element(parent, "figure", { class: "chart", id: `chart-${data.id}` });
    const caption = element(this.figure, "figcaption");
    element(caption, "h3", {}, data.title);
    this.caption = element(caption, "p", { class: "caption" });
    this.legend = element(this.figure, "ul", { class: "legend" });
    this.svg = shape(this.figure, "svg", { tabindex: 0, role: "img" });
    this.reading = element(this.figure, "p", { class: "reading", "aria-live": "polite" });
    const details = element(this.figure, "details");
    element(details, "summary", {}, "Values");
    details.addEventListener("toggle", () => this.fillTable(details));
    this.svg.addEventListener("pointermove", (event) => this.readAtPointer(event));
    this.svg.addEventListener("pointerleave", () => this.read(null));
    this.svg.addEventListener("keydown", (event) => this.readByKey(event));
    this.svg.addEventListener("blur", () => this.read(null));
    new ResizeObserver(() => this.draw()).observe(this.figure);
    this.update(data);
  }

  update(data) {
    this.data = data;
    this.series = Object.entries(data.series).map(([name, points]) => ({ name, points, values: new Map(points) }));
    this.levels = Object.entries(data.levels).sort(([, one], [, other]) => other - one);
    this.steps = [...new Set(this.series.flatMap((one) => [...one.values.keys()]))].sort((a, b) => a - b);
    this.caption.textContent = data.caption;
    this.legend.replaceChildren();
    if (this.series.length > 1) {
      this.series.forEach((one, n) => {
        const item = element(this.legend, "li");
        element(item, "i", { class: `c${n % COLOURS}` });
        item.append(one.name);
      });
    }
    this.svg.setAttribute("aria-label", this.description());
    this.draw();
  }

  description() {
    const parts = this.series.filter((one) => one.points.length).map((one) => {
      const [first, last] = [one.points[0], one.points.at(-1)];
      return `${one.name}: ${format(first[1])} at step ${first[0]}, ${format(last[1])} at step ${last[0]}`;
    });
    const levels = this.levels.map(([name, value]) => `${name}: ${format(value)}`);
    return `${this.data.title}. ${[...parts, ...levels].join("; ")}. Use the arrow keys to read values.`;
  }

  withUnit(value) {
    return this.data.unit ? `${format(value)} ${this.data.unit}` : format(value);
  }

  range() {
    const values = this.series.flatMap((one) => [...one.values.values()]);
    values.push(...this.levels.map(([, value]) => value));
    let [low, high] = [Math.min(...values), Math.max(...values)];
    if (this.data.unit === "%") low = 0;
    const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }

  draw() {
    const width = Math.round(this.figure.clientWidth), height = this.data.small ? 130 : 220;
    if (!width) return;
    const [low, high] = this.range();
    const [first, last] = [Math.min(0, this.steps[0]), Math.max(this.steps.at(-1), this.steps[0] + 1)];
    this.x = (step) => MARGIN.left + ((step - first) / (last - first)) * (width - MARGIN.left - MARGIN.right);
    this.y = (value) => height - MARGIN.bottom - ((value - low) / (high - low)) * (height - MARGIN.top - MARGIN.bottom);
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.drawAxes(width, height, [low, high], [first, last]);
    this.series.forEach((one, n) => this.drawSeries(one, n));
    this.drawLevels(width);
    this.cursor = shape(this.svg, "g", { "aria-hidden": "true" });
  }

  drawAxes(width, height, [low, high], [first, last]) {
    for (const value of ticks(low, high, this.data.small ? 2.5 : 4)) {
      const y = this.y(value);
      shape(this.svg, "line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y });
      shape(this.svg, "text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, this.withUnit(value));
    }
    for (const step of ticks(first, last, Math.max(2, width / 110))) {
      if (step % 1) continue;
      const anchor = this.x(step) > width - 30 ? "end" : "middle";
      const text = step ? step.toLocaleString("en") : "step 0";
      shape(this.svg, "text", { x: this.x(step), y: height - 6, "text-anchor": anchor }, text);
    }
  }

  // Names are above their lines, or below where two lines are close.
  drawLevels(width) {
    let above = -Infinity;
    for (const [name, value] of this.levels) {
      const y = this.y(value), text = y - 5 - above < 13 ? Math.max(y + 13, above + 13) : y - 5;
      shape(this.svg, "line", { class: "level", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y });
      shape(this.svg, "text", { class: "name", x: width - MARGIN.right, y: text, "text-anchor": "end" },
        `${name} ${format(value)}`);
      above = text;
    }
  }

  drawSeries(one, n) {
    const points = one.points.map(([step, value]) => `${this.x(step).toFixed(1)},${this.y(value).toFixed(1)}`);
    shape(this.svg, "polyline", { class: `curve c${n % COLOURS}`, points: points.join(" ") });
    if (one.points.length > 40) return;
    for (const [step, value] of one.points) {
      shape(this.svg, "circle", { class: `f${n % COLOURS}`, cx: this.x(step), cy: this.y(value), r: 2.6 });
    }
  }

  readAtPointer(event) {
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    const distances = this.steps.map((step) => Math.abs(this.x(step) - x));
    this.read(distances.indexOf(Math.min(...distances)));
  }

  readByKey(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const from = this.index ?? (moves[event.key] < 0 ? this.steps.length : -1);
    this.read(Math.max(0, Math.min(this.steps.length - 1, from + moves[event.key])));
  }

  // Show the values of one step by its index, or none.
  read(index) {
    this.index = index;
    this.cursor.replaceChildren();
    this.reading.textContent = "";
    if (index === null) return;
    const step = this.steps[index], x = this.x(step);
    const bottom = Number(this.svg.getAttribute("height")) - MARGIN.bottom;
    shape(this.cursor, "line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: bottom });
    const values = [];
    this.series.forEach((one, n) => {
      if (!one.values.has(step)) return;
      const value = one.values.get(step);
      shape(this.cursor, "circle", { class: `f${n % COLOURS}`, cx: x, cy: this.y(value), r: 4 });
      values.push(this.series.length > 1 ? `${one.name} ${this.withUnit(value)}` : this.withUnit(value));
    });
    this.reading.textContent = `step ${step.toLocaleString("en")}: ${values.join(", ")}`;
  }

  fillTable(details) {
    details.querySelector("table")?.remove();
    if (!details.open) return;
    const table = element(details, "table");
    const head = element(element(table, "thead"), "tr"), body = element(table, "tbody");
    for (const name of ["step", ...this.series.map((one) => one.name)]) element(head, "th", { scope: "col" }, name);
    const rows = Math.min(TABLE_ROWS, this.steps.length);
    for (let n = 0; n < rows; n++) {
      const step = this.steps[Math.round((n * (this.steps.length - 1)) / Math.max(1, rows - 1))];
      const row = element(body, "tr");
      element(row, "th", { scope: "row" }, step.toLocaleString("en"));
      for (const { values } of this.series) element(row, "td", {}, values.has(step) ? format(values.get(step)) : "");
    }
  }
}
