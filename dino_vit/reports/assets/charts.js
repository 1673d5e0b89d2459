"use strict";

// Line charts as SVG, with levels to compare with and the values under the pointer.
// Written by hand because Bokeh adds 1.5 MB to every page, has no colours that follow the theme of the page, and
// its styles and callbacks do not work under a strict content security policy.

const MARGIN = { top: 10, right: 12, bottom: 24, left: 46 };

function append(parent, child, attributes, text) {
  for (const [key, value] of Object.entries(attributes)) child.setAttribute(key, value);
  if (text !== undefined) child.textContent = text;
  parent.append(child);
  return child;
}

function element(parent, name, attributes = {}, text) {
  return append(parent, document.createElement(name), attributes, text);
}

function shape(parent, name, attributes, text) {
  return append(parent, document.createElementNS("http://www.w3.org/2000/svg", name), attributes, text);
}

function format(value) {
  const size = Math.abs(value);
  if (size && (size >= 100000 || size < 0.001)) return value.toExponential(1).replace("e+", "e");
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
}

// Round numbers from low to high, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const values = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) values.push(n * step);
  return values;
}

class Chart {
  constructor(parent, data) {
    this.data = data;
    this.series = Object.entries(data.series).map(([name, points]) => [name, new Map(points)]);
    this.steps = [...new Set(this.series.flatMap(([, values]) => [...values.keys()]))].sort((a, b) => a - b);
    this.figure = element(parent, "figure", { class: "chart" });
    const caption = element(this.figure, "figcaption");
    element(caption, "h3", {}, data.title);
    element(caption, "p", { class: "caption" }, data.caption);
    this.svg = shape(this.figure, "svg", { role: "img", "aria-label": data.title });
    this.legend = element(this.figure, "p", { class: "legend" });
    this.svg.addEventListener("pointermove", (event) => {
      const distances = this.steps.map((step) => Math.abs(this.x(step) - event.offsetX));
      this.read(this.steps[distances.indexOf(Math.min(...distances))]);
    });
    this.svg.addEventListener("pointerleave", () => this.read(this.steps.at(-1)));
    new ResizeObserver(() => this.draw()).observe(this.figure);
  }

  draw() {
    const width = this.figure.clientWidth, height = this.data.small ? 130 : 220;
    const right = width - MARGIN.right, bottom = height - MARGIN.bottom;
    const levels = Object.entries(this.data.levels).sort((a, b) => b[1] - a[1]);
    const values = [...this.series.flatMap(([, points]) => [...points.values()]), ...levels.map(([, value]) => value)];
    const least = this.data.unit === "%" ? 0 : Math.min(...values), greatest = Math.max(...values);
    const room = (greatest - least) * 0.06 || Math.abs(greatest) * 0.05 || 1;
    const low = least >= 0 ? Math.max(0, least - room) : least - room, high = greatest + room;
    const last = Math.max(this.steps.at(-1), 1);
    this.x = (step) => MARGIN.left + (step / last) * (right - MARGIN.left);
    this.y = (value) => bottom - ((value - low) / (high - low)) * (bottom - MARGIN.top);
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    for (const value of ticks(low, high, this.data.small ? 2.5 : 4)) {
      this.line("grid", MARGIN.left, right, this.y(value));
      this.text(format(value), MARGIN.left - 8, this.y(value) + 4);
    }
    for (const step of ticks(0, last, width / 110).filter(Number.isInteger)) this.text(step || "step 0", this.x(step) + 18, height - 6);
    this.series.forEach(([, points], n) => {
      const corners = [...points].map(([step, value]) => `${this.x(step).toFixed(1)},${this.y(value).toFixed(1)}`);
      shape(this.svg, "polyline", { class: `curve c${n}`, points: corners.join(" ") });
    });
    let above = -Infinity; // names are above their lines, or below where two lines are close
    for (const [name, value] of levels) {
      const y = this.y(value);
      above = y - 5 - above < 13 ? Math.max(y, above) + 13 : y - 5;
      this.line("level", MARGIN.left, right, y);
      this.text(`${name} ${format(value)}`, right, above);
    }
    this.cursor = shape(this.svg, "g", {});
    this.read(this.steps.at(-1));
  }

  line(kind, x1, x2, y) {
    shape(this.svg, "line", { class: kind, x1, x2, y1: y, y2: y });
  }

  text(text, x, y) {
    shape(this.svg, "text", { x, y }, text);
  }

  // Mark a step, and show its values beside the names of the curves.
  read(step) {
    this.cursor.replaceChildren();
    this.legend.textContent = `step ${step.toLocaleString("en")}`;
    this.series.forEach(([name, points], n) => {
      if (!points.has(step)) return;
      shape(this.cursor, "circle", { class: `c${n}`, cx: this.x(step), cy: this.y(points.get(step)), r: 3.5 });
      element(this.legend, "span", { class: `c${n}` }, `${name} ${format(points.get(step))} ${this.data.unit}`);
    });
  }
}
