"use strict";

// A map of images on one canvas: points when zoomed out, thumbnails when zoomed in. Selecting an image shows its
// attention and its nearest neighbours in a panel.

// Distinguishable with any colour vision (Petroff, 2021); all further groups share one colour.
const PALETTE = ["#3f90da", "#ffa90e", "#bd1f01", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#92dadd", "#2f9e6e",
  "#d66fb4"];
const OTHERS = "#94a4a2";
const SHOWN = 8; // neighbours beside the map
const MAX_ZOOM = 200;

function bytes(text, type) {
  const raw = atob(text), found = new Uint8Array(raw.length);
  for (let n = 0; n < raw.length; n++) found[n] = raw.charCodeAt(n);
  return new type(found.buffer);
}

// With the digits that tell them apart: four to six, as float32 has no more near 1.
function formatCosines(cosines) {
  const [four, five, six] = [4, 5, 6].map((digits) => cosines.map((cosine) => cosine.toFixed(digits)));
  return [four, five].find((texts) => new Set(texts).size === new Set(six).size) ?? six;
}

function colour(name) {
  const probe = element(document.body, "span");
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

class Explorer {
  constructor(parent, data) {
    this.data = data;
    this.layouts = data.layouts.map((one) => {
      const positions = bytes(one.positions, Uint16Array);
      return { name: one.name, positions: Float32Array.from(positions, (value) => value / 65535) };
    });
    this.positions = this.layouts[0].positions.slice();
    this.neighbours = bytes(data.neighbours, Uint16Array);
    this.similarities = bytes(data.similarities, Float32Array);
    this.maps = data.attention && bytes(data.attention.maps, Uint8Array);
    this.thumbnails = new Image();
    this.thumbnails.src = data.thumbnails.uri;
    this.thumbnails.decode().then(() => this.redraw(), () => this.redraw());
    this.only = null; // the group that is highlighted, or null for all
    this.pointers = new Map();
    this.build(parent);
    this.colourBy(data.classes.length > 1 ? "label" : "cluster");
    this.reset();
    this.select(null);
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  build(parent) {
    parent.hidden = false;
    const tools = element(parent, "div", { class: "tools" });
    this.menu(tools, "Layout", this.layouts.map((one) => one.name), (name) => this.show(name));
    const by = this.data.classes.length > 1 ? ["label", "cluster"] : ["cluster"];
    this.menu(tools, "Colour by", by, (name) => this.colourBy(name));
    const zoom = element(tools, "div", { class: "zoom" });
    for (const [text, name, act] of [["−", "Zoom out", () => this.zoom(1 / 1.6)], ["+", "Zoom in", () => this.zoom(1.6)],
      ["Show all", "Show the whole map", () => this.reset()]]) {
      element(zoom, "button", { type: "button", "aria-label": name }, text).addEventListener("click", act);
    }
    const both = element(parent, "div", { class: "explorer" });
    const left = element(both, "div"), plane = element(left, "div", { class: "plane" });
    this.canvas = element(plane, "canvas", { tabindex: 0, role: "application", "aria-describedby": "map-keys",
      "aria-label": `Map of ${this.data.count} images` });
    element(plane, "p", { class: "hint", "aria-hidden": "true" }, "drag to move, scroll to zoom, click to select");
    element(left, "p", { class: "hidden", id: "map-keys" },
      "Arrow keys select the next image in a direction, plus and minus zoom, 0 shows the whole map.");
    this.classes = element(left, "ul", { class: "classes", "aria-label": "Colours; press one to highlight its images" });
    this.panel = element(both, "div", { class: "selection" });
    this.status = element(parent, "p", { class: "hidden", role: "status" });
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.down(event));
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) this.canvas.addEventListener(name, (event) => this.up(event));
    this.canvas.addEventListener("keydown", (event) => this.press(event));
  }

  menu(parent, title, names, act) {
    const label = element(parent, "label", {}, title);
    const select = element(label, "select");
    for (const name of names) element(select, "option", { value: name }, name);
    select.addEventListener("change", () => act(select.value));
  }

  colourBy(what) {
    this.by = what;
    this.only = null;
    this.group = what === "label" ? this.data.labels : this.data.clusters;
    const counts = new Map();
    for (const group of this.group) counts.set(group, (counts.get(group) ?? 0) + 1);
    const largest = [...counts].filter(([group]) => group >= 0).sort((a, b) => b[1] - a[1]).map(([group]) => group);
    this.colours = new Map(largest.slice(0, PALETTE.length).map((group, n) => [group, PALETTE[n]]));
    this.classes.replaceChildren();
    for (const group of this.colours.keys()) {
      const button = element(element(this.classes, "li"), "button", { type: "button", "aria-pressed": "false" });
      element(button, "i").style.background = this.colours.get(group);
      button.append(`${this.groupName(group)} (${counts.get(group)})`);
      button.addEventListener("click", () => this.toggle(group, button));
    }
    if (largest.length > PALETTE.length) {
      element(this.classes, "li", {}, `and ${largest.length - PALETTE.length} more in grey`);
    }
    this.redraw();
  }

  groupName(group) {
    if (this.by === "cluster") return `prototype ${group}`;
    return group < 0 ? "no label" : this.data.classes[group];
  }

  toggle(group, button) {
    this.only = this.only === group ? null : group;
    for (const other of this.classes.querySelectorAll("button")) other.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-pressed", String(this.only === group));
    this.redraw();
  }

  resize() {
    const ratio = devicePixelRatio || 1;
    [this.width, this.height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    [this.canvas.width, this.canvas.height] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    this.ratio = ratio;
    this.draw(); // at once, as a canvas of another size is blank
  }

  reset() {
    this.scale = 1;
    this.middle = [0.5, 0.5];
    this.redraw();
  }

  // The side of the whole map in pixels.
  side() {
    return 0.88 * Math.min(this.width, this.height) * this.scale;
  }

  onScreen(n) {
    const side = this.side();
    return [(this.positions[2 * n] - this.middle[0]) * side + this.width / 2,
      (this.positions[2 * n + 1] - this.middle[1]) * side + this.height / 2];
  }

  // The side of a thumbnail in pixels.
  size() {
    return Math.min(72, (9 * this.side()) / (620 * Math.sqrt(this.data.count / 3000)));
  }

  // The image drawn at (x, y), or null. Checking all of them takes microseconds.
  at(x, y) {
    let best = null, least = Math.max(14, 0.6 * this.size()) ** 2;
    for (let n = 0; n < this.data.count; n++) {
      const [px, py] = this.onScreen(n), distance = (px - x) ** 2 + (py - y) ** 2;
      if (distance < least) [best, least] = [n, distance];
    }
    return best;
  }

  zoom(factor, x = this.width / 2, y = this.height / 2) {
    const before = this.side();
    this.scale = Math.min(MAX_ZOOM, Math.max(0.6, this.scale * factor));
    const shift = 1 / before - 1 / this.side();
    this.middle[0] += (x - this.width / 2) * shift;
    this.middle[1] += (y - this.height / 2) * shift;
    this.redraw();
  }

  show(name) {
    const from = this.positions.slice(), to = this.layouts.find((one) => one.name === name).positions;
    const began = performance.now(), span = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 450;
    const go = (now) => {
      const t = span ? Math.min(1, Math.max(0, (now - began) / span)) : 1, eased = t * t * (3 - 2 * t);
      for (let n = 0; n < to.length; n++) this.positions[n] = from[n] + (to[n] - from[n]) * eased;
      this.draw();
      if (t < 1) requestAnimationFrame(go);
    };
    requestAnimationFrame(go);
  }

  // Draw with the next frame, once for all changes before it.
  redraw() {
    if (this.requested) return;
    this.requested = true;
    requestAnimationFrame(() => {
      this.requested = false;
      this.draw();
    });
  }

  draw() {
    if (!this.width) return;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    const size = this.size(), pictures = size >= 15;
    const faded = [];
    for (let n = 0; n < this.data.count; n++) {
      if (this.only !== null && this.group[n] !== this.only) faded.push(n);
      else this.drawImage(pen, n, size, pictures);
    }
    pen.globalAlpha = 0.12;
    for (const n of faded) this.drawImage(pen, n, size, pictures);
    pen.globalAlpha = 1;
    if (this.selected !== null) this.drawSelection(pen, size);
  }

  drawImage(pen, n, size, pictures) {
    const [x, y] = this.onScreen(n);
    if (x < -size || y < -size || x > this.width + size || y > this.height + size) return;
    pen.fillStyle = this.colours.get(this.group[n]) ?? OTHERS;
    if (!pictures) {
      const side = Math.max(3.4, 0.5 * size); // without a GPU, discs take ten times as long as squares
      pen.fillRect(x - side / 2, y - side / 2, side, side);
      return;
    }
    pen.fillRect(x - size / 2 - 1.5, y - size / 2 - 1.5, size + 3, size + 3);
    this.thumbnail(pen, n, x - size / 2, y - size / 2, size, size);
  }

  drawSelection(pen, size) {
    const near = this.nearest(this.selected), from = this.onScreen(this.selected);
    const side = Math.max(26, size);
    [pen.strokeStyle, pen.lineWidth] = [colour("ink"), 1];
    for (const n of near) {
      const to = this.onScreen(n);
      pen.beginPath();
      pen.moveTo(...from);
      pen.lineTo(...to);
      pen.stroke();
    }
    for (const n of [...near, this.selected]) {
      const [x, y] = this.onScreen(n), extent = n === this.selected ? 1.4 * side : side;
      this.thumbnail(pen, n, x - extent / 2, y - extent / 2, extent, extent);
      pen.lineWidth = n === this.selected ? 3 : 1.5;
      pen.strokeStyle = n === this.selected ? colour("accent") : this.colours.get(this.group[n]) ?? OTHERS;
      pen.strokeRect(x - extent / 2, y - extent / 2, extent, extent);
    }
  }

  thumbnail(pen, n, x, y, width, height) {
    const { columns, size: [h, w] } = this.data.thumbnails;
    if (!this.thumbnails.complete || !this.thumbnails.naturalWidth) return;
    const [left, top] = [(n % columns) * w, Math.floor(n / columns) * h];
    pen.drawImage(this.thumbnails, left, top, w, h, x, y, width, height);
  }

  nearest(n) {
    return [...this.neighbours.subarray(n * this.data.k, n * this.data.k + Math.min(SHOWN, this.data.k))];
  }

  describe(n) {
    const parts = [this.data.names[n]];
    if (this.data.labels[n] >= 0 && this.data.classes.length) parts.push(this.data.classes[this.data.labels[n]]);
    parts.push(`prototype ${this.data.clusters[n]}`);
    return parts;
  }

  select(n) {
    this.selected = n;
    this.panel.replaceChildren();
    this.redraw();
    if (n === null) {
      element(this.panel, "p", { class: "caption" }, `Select an image to see its ${this.maps ? "attention and " : ""}nearest neighbours.`);
      return;
    }
    const near = this.nearest(n), [name, ...rest] = this.describe(n);
    element(this.panel, "h3", {}, name);
    element(this.panel, "p", { class: "caption" }, rest.join(", "));
    const pair = element(this.panel, "div", { class: "pair" });
    this.picture(pair, "image", (canvas) => this.paint(canvas, n));
    if (this.maps) this.picture(pair, "attention (mean of heads)", (canvas) => this.paintAttention(canvas, n));
    element(this.panel, "h3", {}, "Nearest neighbours").style.marginTop = "1.2rem";
    const list = element(this.panel, "ul", { class: "near" });
    const cosines = formatCosines([...this.similarities.subarray(n * this.data.k, n * this.data.k + near.length)]);
    near.forEach((other, rank) => {
      const cosine = cosines[rank];
      const button = element(element(list, "li"), "button", { type: "button", title: this.data.names[other],
        "aria-label": `${this.describe(other).join(", ")}, cosine ${cosine}` });
      this.paint(element(button, "canvas", { width: 96, height: 96 }), other);
      button.append(cosine);
      if (this.data.classes.length) element(button, "span", {}, this.data.classes[this.data.labels[other]] ?? "");
      button.addEventListener("click", () => this.goTo(other));
    });
    const nearest = near.slice(0, 3).map((other) => this.data.names[other]).join("; ");
    this.status.textContent = `${this.describe(n).join(", ")}. Nearest: ${nearest}.`;
  }

  picture(parent, title, paint) {
    const figure = element(parent, "figure");
    const canvas = element(figure, "canvas", { width: 192, height: 192, role: "img", "aria-label": title });
    element(figure, "figcaption", {}, title);
    paint(canvas);
  }

  // Where a thumbnail is centred on a canvas: x, y, width, height.
  box(canvas) {
    const [h, w] = this.data.thumbnails.size, fit = canvas.width / Math.max(h, w);
    return [(canvas.width - w * fit) / 2, (canvas.height - h * fit) / 2, w * fit, h * fit];
  }

  paint(canvas, n) {
    this.thumbnail(canvas.getContext("2d"), n, ...this.box(canvas));
  }

  paintAttention(canvas, n) {
    const [rows, columns] = this.data.attention.size, one = rows * columns;
    const map = new OffscreenCanvas(columns, rows), pen = map.getContext("2d");
    const pixels = pen.createImageData(columns, rows);
    for (let patch = 0; patch < one; patch++) { // black, purple, orange, yellow
      const value = this.maps[n * one + patch] / 255;
      pixels.data.set([255 * Math.min(1, 1.9 * value), 255 * Math.max(0, 1.5 * value - 0.45) ** 1.2,
        255 * Math.max(0.12 + 1.1 * value * (1 - value), 2.2 * value - 1.4), 255], 4 * patch);
    }
    pen.putImageData(pixels, 0, 0);
    const target = canvas.getContext("2d");
    target.imageSmoothingQuality = "high";
    target.drawImage(map, ...this.box(canvas));
  }

  // Select an image and make sure that it is visible.
  goTo(n) {
    const [x, y] = this.onScreen(n);
    if (x < 20 || y < 20 || x > this.width - 20 || y > this.height - 20) {
      this.middle = [this.positions[2 * n], this.positions[2 * n + 1]];
    }
    this.select(n);
  }

  wheel(event) {
    event.preventDefault();
    const box = this.canvas.getBoundingClientRect();
    this.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0016)), event.clientX - box.left,
      event.clientY - box.top);
  }

  down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, [event.clientX, event.clientY]);
    this.travelled = this.pointers.size > 1 ? Infinity : 0;
  }

  move(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return;
    const now = [event.clientX, event.clientY], box = this.canvas.getBoundingClientRect();
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, point]) => point);
    if (others.length) { // two fingers: zoom by their distance
      const [other] = others, apart = (point) => Math.hypot(point[0] - other[0], point[1] - other[1]);
      this.zoom(apart(now) / Math.max(1, apart(before)), (now[0] + other[0]) / 2 - box.left,
        (now[1] + other[1]) / 2 - box.top);
    }
    const share = others.length ? 0.5 : 1;
    this.middle[0] -= (share * (now[0] - before[0])) / this.side();
    this.middle[1] -= (share * (now[1] - before[1])) / this.side();
    this.travelled += Math.hypot(now[0] - before[0], now[1] - before[1]);
    this.pointers.set(event.pointerId, now);
    this.redraw();
  }

  up(event) {
    if (this.pointers.delete(event.pointerId) && event.type === "pointerup" && this.travelled < 5) {
      const box = this.canvas.getBoundingClientRect();
      this.select(this.at(event.clientX - box.left, event.clientY - box.top));
    }
  }

  press(event) {
    const directions = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const acts = { "+": () => this.zoom(1.4), "=": () => this.zoom(1.4), "-": () => this.zoom(1 / 1.4),
      0: () => this.reset(), Escape: () => this.select(null) };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in directions) this.step(directions[event.key]);
    else if (event.key in acts) acts[event.key]();
    else return;
    event.preventDefault();
  }

  // Select the nearest image in a direction, at most 45 degrees to either side.
  step([dx, dy]) {
    if (this.selected === null) {
      this.goTo(this.at(this.width / 2, this.height / 2) ?? 0);
      return;
    }
    const [x, y] = this.onScreen(this.selected);
    let best = null, least = Infinity;
    for (let n = 0; n < this.data.count; n++) {
      const [px, py] = this.onScreen(n), ahead = (px - x) * dx + (py - y) * dy;
      const aside = Math.abs((px - x) * dy) + Math.abs((py - y) * dx);
      if (n === this.selected || ahead <= 0 || aside > ahead) continue;
      if (ahead + aside < least) [best, least] = [n, ahead + aside];
    }
    if (best !== null) this.goTo(best);
  }
}
