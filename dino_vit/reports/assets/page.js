// The page: line charts, and a map of the images.

// Line charts as SVG, with levels to compare with and the values under the pointer.
// Written by hand because Bokeh adds 1.5 MB to every page, has no colours that follow the theme of the page, and
// its styles and callbacks do not work under a strict content security policy.

const MARGIN = { top: 10, right: 12, bottom: 24, left: 46 }; // wider at the right by the names of levels
const COLOURS = 6; // of curves

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
    const width = this.figure.clientWidth, height = 190;
    if (!width) return; // behind a line that is closed
    const levels = Object.entries(this.data.levels).sort((a, b) => b[1] - a[1]);
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const names = levels.map(([name, value]) => this.text(`${name} ${format(value)}`, 0, 0, "name"));
    const widest = Math.max(0, ...names.map((name) => name.getComputedTextLength()));
    const right = width - MARGIN.right - widest, bottom = height - MARGIN.bottom;
    const values = [...this.series.flatMap(([, points]) => [...points.values()]), ...levels.map(([, value]) => value)];
    const least = Math.min(...values, ...(this.data.unit === "%" ? [0] : [])), greatest = Math.max(...values);
    const room = (greatest - least) * 0.06 || Math.abs(greatest) * 0.05 || 1;
    const low = least >= 0 ? Math.max(0, least - room) : least - room, high = greatest + room;
    const last = Math.max(this.steps.at(-1), 1);
    this.x = (step) => MARGIN.left + (step / last) * (right - MARGIN.left);
    this.y = (value) => bottom - ((value - low) / (high - low)) * (bottom - MARGIN.top);
    for (const value of ticks(low, high, 4)) {
      this.line("grid", MARGIN.left, right, this.y(value));
      this.text(format(value), MARGIN.left - 8, this.y(value) + 4);
    }
    for (const step of ticks(0, last, right / 110).filter(Number.isInteger)) this.text(step ? step.toLocaleString("en") : "step 0", this.x(step) + 18, height - 6);
    this.series.forEach(([, points], n) => {
      const corners = [...points].map(([step, value]) => `${this.x(step).toFixed(1)},${this.y(value).toFixed(1)}`);
      shape(this.svg, "polyline", { class: `curve c${n % COLOURS}`, points: corners.join(" ") });
    });
    let above = -Infinity; // the names are beside their lines, and not on each other
    levels.forEach(([, value], n) => {
      this.line("level", MARGIN.left, right, this.y(value));
      above = Math.max(this.y(value) + 4, above + 13);
      names[n].setAttribute("x", right + 6);
      names[n].setAttribute("y", above);
    });
    this.cursor = shape(this.svg, "g", {});
    this.read(this.steps.at(-1));
  }

  line(kind, x1, x2, y) {
    shape(this.svg, "line", { class: kind, x1, x2, y1: y, y2: y });
  }

  text(text, x, y, kind = "tick") {
    return shape(this.svg, "text", { class: kind, x, y }, text);
  }

  // Mark a step, and show its values beside the names of the curves.
  read(step) {
    this.cursor.replaceChildren();
    this.legend.textContent = `step ${step.toLocaleString("en")}`;
    this.series.forEach(([name, points], n) => {
      const latest = [...points.keys()].filter((other) => other <= step).at(-1); // curves that were thinned have steps of their own
      if (latest === undefined) return;
      const value = points.get(latest), since = latest === step ? "" : `at ${latest.toLocaleString("en")}`;
      shape(this.cursor, "circle", { class: `c${n % COLOURS}`, cx: this.x(latest), cy: this.y(value), r: 3.5 });
      element(this.legend, "span", { class: `c${n % COLOURS}` }, `${name} ${format(value)} ${this.data.unit} ${since}`);
    });
  }
}

// A map of images on one canvas: points when zoomed out, thumbnails when zoomed in. Selecting an image shows its
// attention and its nearest neighbours in a panel.

// Any two are at least 40 apart in CIELAB, and 18 for eyes that lack red or green cones. All further classes share
// one colour.
const PALETTE = ["#3078f3", "#f7c20a", "#d62d00", "#7d18ae", "#16aa5d", "#66ecda", "#cc81cb", "#943f31", "#a0b640",
  "#445b8e"];
const OTHERS = "#94a4a2";
const LARGEST = 72, SELECTED = 52, EDGE = 8; // pixels: of a thumbnail, of the selected one at least, and around the outermost ones
const FAINT = 0.12; // opacity of the images that are not of the class that is emphasised

class Explorer {
  constructor(parent, data) {
    this.data = data;
    [this.emphasised, this.pinned] = [null, null]; // a class
    this.reset();
    this.atlas = new Image();
    this.atlas.onload = () => this.redraw();
    this.atlas.src = data.thumbnails.uri;
    const tools = element(parent, "p", { class: "tools" });
    for (const [text, act] of [["−", () => this.zoomSelected(1 / 1.6)], ["+", () => this.zoomSelected(1.6)], ["Show all", () => this.reset()]]) {
      element(tools, "button", { type: "button" }, text).addEventListener("click", act);
    }
    this.drawLegend(tools);
    const columns = element(parent, "div", { class: "explorer" }), plane = element(columns, "div");
    this.canvas = element(plane, "canvas", { role: "img", "aria-label": `Map of ${data.names.length} images` });
    this.hint = element(plane, "p", { class: "caption" });
    this.panel = element(columns, "div", { class: "selection", role: "status" });
    this.select(0); // to show what there is
    new ResizeObserver(() => this.resize()).observe(this.canvas);
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0016)), event.offsetX, event.offsetY);
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      [this.from, this.travelled] = [[event.offsetX, event.offsetY], 0];
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!event.isPrimary) return; // another finger
      if (!event.buttons) return this.hover(this.at(event.offsetX, event.offsetY));
      const [dx, dy] = [event.offsetX - this.from[0], event.offsetY - this.from[1]];
      this.pan(-dx / this.sides()[0], -dy / this.sides()[1]);
      [this.from, this.travelled] = [[event.offsetX, event.offsetY], this.travelled + Math.hypot(dx, dy)];
    });
    this.canvas.addEventListener("pointerup", (event) => {
      if (this.travelled < 5) this.show(this.at(event.offsetX, event.offsetY));
    });
    this.canvas.addEventListener("pointerleave", () => this.hover(null));
  }

  // The class of an image as the legend has it: -1 without a label, and one for all that share a colour.
  group(n) {
    return Math.min(this.data.labels[n], PALETTE.length);
  }

  // The legend: its classes in the order in which people count, and each of them to be emphasised.
  drawLegend(parent) {
    const entries = this.data.classes.map(([name, count], n) => ({ name, count, n })), others = entries.splice(PALETTE.length);
    if (!entries.length) return;
    const { compare } = new Intl.Collator("en", { numeric: true });
    entries.sort((one, other) => compare(one.name, other.name));
    const sum = others.reduce((total, { count }) => total + count, 0);
    if (others.length) entries.push({ name: `${others.length} other ${others.length > 1 ? "classes" : "class"}`, count: sum, n: PALETTE.length });
    const unlabelled = this.data.labels.filter((label) => label < 0).length;
    if (unlabelled) entries.push({ name: "without a label", count: unlabelled, n: -1 });
    const legend = element(parent, "span", { class: "classes", role: "group", "aria-label": "Classes, to emphasise one" });
    for (const { name, count, n } of entries) {
      const button = element(legend, "button", { type: "button", "aria-pressed": "false" });
      element(button, "i").style.background = PALETTE[n] ?? OTHERS;
      element(button, "b", {}, name);
      button.append(` ${count} image${count > 1 ? "s" : ""}`);
      button.addEventListener("pointerenter", () => this.emphasise(n));
      button.addEventListener("pointerleave", () => this.emphasise(this.pinned));
      button.addEventListener("click", () => {
        this.pinned = this.pinned === n ? null : n;
        for (const other of legend.children) other.setAttribute("aria-pressed", other === button && this.pinned === n);
        this.emphasise(this.pinned);
      });
    }
  }

  emphasise(group) {
    this.emphasised = group;
    this.redraw();
  }

  resize() {
    const ratio = devicePixelRatio || 1;
    [this.width, this.height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    [this.canvas.width, this.canvas.height] = [this.width * ratio, this.height * ratio];
    this.pen = this.canvas.getContext("2d");
    this.pen.scale(ratio, ratio);
    this.draw(); // at once, as a canvas of another size is blank
  }

  // The sides of the whole map, and that of a thumbnail, in pixels.
  sides() {
    const edges = this.selectedSize(1) + 2 * EDGE;
    return [(this.width - edges) * this.scale, (this.height - edges) * this.scale];
  }

  size(scale = this.scale) {
    return Math.min(LARGEST, 0.8 * scale * Math.sqrt((this.width * this.height) / this.data.names.length));
  }

  selectedSize(scale = this.scale) {
    return Math.max(SELECTED, 1.4 * this.size(scale));
  }

  onScreen(n) {
    const [x, y] = this.data.positions[n], [width, height] = this.sides();
    return [(x - this.middle[0]) * width + this.width / 2, (y - this.middle[1]) * height + this.height / 2];
  }

  // The image drawn at (x, y), or null. Checking all of them takes microseconds.
  at(x, y) {
    let best = null, least = Math.max(12, 0.6 * this.size());
    this.data.names.forEach((_, n) => {
      const [px, py] = this.onScreen(n), distance = Math.hypot(px - x, py - y);
      if (distance < least) [best, least] = [n, distance];
    });
    return best;
  }

  reset() {
    [this.scale, this.middle] = [1, [0.5, 0.5]];
    this.redraw();
  }

  zoom(factor, x = this.width / 2, y = this.height / 2) {
    const before = this.sides();
    this.scale = Math.min(200, Math.max(0.6, this.scale * factor));
    const [right, down] = this.sides().map((side, axis) => 1 / before[axis] - 1 / side);
    this.pan((x - this.width / 2) * right, (y - this.height / 2) * down);
  }

  // Zoom about the selected image, or the middle if there is none.
  zoomSelected(factor) {
    if (this.selected === null) return this.zoom(factor);
    this.reveal(this.selected);
    this.zoom(factor, ...this.onScreen(this.selected));
  }

  // Move an image to the middle if it is outside.
  reveal(n) {
    const [x, y] = this.onScreen(n);
    if (x < 0 || y < 0 || x > this.width || y > this.height) this.middle = [...this.data.positions[n]];
  }

  pan(x, y) {
    this.middle = [this.middle[0] + x, this.middle[1] + y];
    this.redraw();
  }

  // Draw with the next frame, once for all changes before it.
  redraw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    if (!this.pen) return;
    const size = this.size(), near = this.selected === null ? [] : this.data.neighbours[this.selected];
    this.pen.clearRect(0, 0, this.width, this.height);
    const paint = (bright) => this.data.names.forEach((_, n) => {
      if ((this.emphasised === null || this.group(n) === this.emphasised) !== bright) return;
      const [x, y] = this.onScreen(n);
      if (x < -size || y < -size || x > this.width + size || y > this.height + size) return;
      if (size >= 15) this.picture(n, size);
      else this.square(n, Math.max(3.4, size / 2)); // without a GPU, discs take ten times as long as squares
    });
    this.pen.globalAlpha = FAINT;
    paint(false);
    this.pen.globalAlpha = 1;
    paint(true); // above the others
    if (this.emphasised === null) for (const n of near) this.picture(n, Math.max(26, size));
    for (const n of [this.selected, this.hovered]) if (n !== null) this.picture(n, this.selectedSize());
  }

  square(n, side) {
    const [x, y] = this.onScreen(n);
    this.pen.fillStyle = PALETTE[this.data.labels[n]] ?? OTHERS;
    this.pen.fillRect(x - side / 2, y - side / 2, side, side);
  }

  picture(n, side) {
    this.square(n, side + 5);
    const { columns, size: [h, w] } = this.data.thumbnails, [x, y] = this.onScreen(n);
    this.pen.drawImage(this.atlas, (n % columns) * w, Math.floor(n / columns) * h, w, h, x - side / 2, y - side / 2, side, side);
  }

  label(n) {
    return this.data.classes[this.data.labels[n]]?.[0] ?? "";
  }

  title(n) {
    return [this.data.names[n], this.label(n)].filter(Boolean).join(" · ");
  }

  hover(n) {
    this.hovered = n;
    this.hint.textContent = n === null ? "Drag to move, scroll or press + and − to zoom, click to select." : this.title(n);
    this.redraw();
  }

  select(n) {
    this.selected = n;
    this.hover(null);
    this.panel.replaceChildren();
    element(this.panel, "p", { class: "caption" }, n === null ? "Select an image to see it whole, and the images most like it." : this.title(n));
    if (n === null) return;
    this.figure(this.panel, n, "image");
    if (this.data.attention.length) {
      const attended = this.figure(this.panel, n, "attention (mean of heads)");
      element(attended, "img", { src: this.data.attention[n], alt: "attention" });
    }
    element(this.panel, "p", { class: "caption" }, `Most like it, by cosine similarity${this.data.classes.length ? ", and their classes" : ""}`);
    this.data.neighbours[n].forEach((other, rank) => {
      const button = element(this.panel, "button", { type: "button", title: this.data.names[other] });
      this.figure(button, other, [this.data.cosines[n][rank].toFixed(3), this.label(other)].filter(Boolean).join(" · "));
      button.addEventListener("click", () => {
        this.reveal(other);
        this.show(other);
      });
    });
  }

  // Select an image, and bring its photo into sight, which on a narrow screen is below the map.
  show(n) {
    this.select(n);
    const photo = this.panel.querySelector("img"); // has no height before it is loaded
    photo?.addEventListener("load", () => photo.closest("figure").scrollIntoView({ block: "nearest" }));
  }

  figure(parent, n, caption) {
    const figure = element(parent, "figure"), frame = element(figure, "div", { class: "frame" });
    element(frame, "img", { src: this.data.photos[n], alt: this.data.names[n] });
    element(figure, "figcaption", {}, caption);
    return frame;
  }
}

const report = { data }; // also for the browser's console

report.charts = report.data.charts.map((data, n) => new Chart(document.getElementById(n < report.data.shown ? "charts" : "more"), data));
if (report.data.map) report.map = new Explorer(document.getElementById("explorer"), report.data.map);
