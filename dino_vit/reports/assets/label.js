// The page to label images by: its views, each drawn anew after an action.

const GRID = 48, BESIDE = 12, NEAREST = 4, STRIP = 8; // images: of a grid, beside one, with labels, of a row
const JUDGES = 50; // random images that predict needs to say how good its labels are

// One image at a time, of a queue. A blind one shows nothing that would suggest a label.
class One {
  constructor(page, queue, { blind = false, endless = false, title } = {}) {
    Object.assign(this, { page, queue, blind, endless, title, answers: page.answers, place: 0 });
    this.next(0);
  }

  get image() {
    return this.queue[this.place];
  }

  // Go to the first from a place on that has no answer, from the beginning again after the last.
  next(from) {
    const left = [...this.queue.slice(from), ...this.queue.slice(0, from)].find((n) => !this.answers.answers[n]);
    this.place = left === undefined ? Math.min(from, this.queue.length - 1) : this.queue.indexOf(left);
  }

  decide(label) {
    const ticked = [...this.parent.querySelectorAll(".beside :checked")].map((box) => Number(box.value));
    this.answers.act("label", [this.image, ...ticked], label, ticked.length > 0);
    this.next(this.place + 1);
    this.page.draw();
  }

  // In a blind queue nothing is left out: the others would no longer be random.
  move(by) {
    if (by > 0 && this.blind && !this.answers.answers[this.image]) return;
    this.place = Math.min(Math.max(0, this.place + by), this.queue.length - 1);
    this.page.draw();
  }

  draw(parent) {
    this.parent = parent;
    if (!this.queue.length) return element(parent, "p", { class: "lead" }, "There is nothing left here.");
    const n = this.image, answer = this.answers.answers[n], guess = this.blind ? null : this.answers.guess(n);
    const left = this.queue.filter((each) => !this.answers.answers[each]).length;
    const rest = left ? `${left.toLocaleString("en")} to go.` : "All are done.";
    element(parent, "p", { class: "lead" }, left && this.endless ? this.title : `${this.title} ${rest}`);
    if (this.blind) this.drawCheck(parent, left);
    const columns = element(parent, "div", { class: "one" }), subject = element(columns, "figure", { class: "subject" });
    photo(subject, n);
    element(subject, "figcaption", {}, data.names[n]);
    const side = element(columns, "div");
    const state = answer ? (answer.label ?? "not sure") : guess ? `${guess.label}?` : "What is this?";
    const heading = element(side, "div", { class: "heading" });
    element(heading, "h2", { class: answer ? "done" : "" }, state);
    if (guess && !answer) tool(heading, "Enter", "Yes", () => this.accept());
    if (answer) element(side, "p", { class: "caption" }, "You may change it: give another label.");
    this.chooser = new Chooser(side, this.answers, (label) => this.decide(label));
    const tools = element(side, "p", { class: "tools" });
    tool(tools, "?", "Not sure", () => this.decide(null));
    tool(tools, "-", "None of these", () => this.decide(NONE));
    tool(tools, "⌫", "Undo", () => this.page.undo());
    tool(tools, "←", "Back", () => this.move(-1));
    if (answer || !this.blind) tool(tools, "→", answer ? "Next" : "Skip", () => this.move(1));
    if (!this.blind) this.drawNear(side, n);
  }

  // Not from the start: it would tell whether the image before was guessed rightly.
  drawCheck(parent, left) {
    const { all: [right, count], classes } = this.answers.checked();
    if (!count || (left && count < JUDGES)) return;
    const [low, high] = wilson(right, count);
    element(parent, "p", { class: "learned" }, `${right} of ${times(count, "random image")} ${count === 1 ? "is" : "are"} labelled right (${low} to ${high} %)`);
    const parts = classes.map(([label, [its, of]]) => `${label}: ${its} of ${of}`);
    if (parts.length) element(parent, "p", { class: "caption" }, parts.join(" · "));
  }

  drawNear(parent, n) {
    const near = data.neighbours[n], { answers } = this.answers;
    const labelled = near.filter((other) => answers[other]?.label).slice(0, NEAREST);
    const others = near.filter((other) => this.answers.isOpen(other)).slice(0, BESIDE);
    if (labelled.length) element(parent, "h3", {}, "Like it, with a label: click one for the same label");
    const strip = element(parent, "div", { class: "strip" });
    for (const other of labelled) {
      const figure = button(strip, "", () => this.decide(answers[other].label), { class: "tile" });
      photo(figure, other);
      element(figure, "span", {}, answers[other].label);
    }
    if (answers[n] || !others.length || this.answers.sample.has(n)) return; // a random one has no group: it judges
    element(parent, "h3", {}, "The same thing? Tick it, and it gets the same label");
    const beside = element(parent, "div", { class: "strip beside" });
    for (const other of others) {
      const label = element(beside, "label", { class: "tile" });
      element(label, "input", { type: "checkbox", value: other, "aria-label": data.names[other] });
      photo(label, other);
    }
  }

  accept() {
    if (this.answers.answers[this.image] || this.blind || !this.answers.guess(this.image)) return;
    const guess = this.answers.guess(this.image);
    if (this.parent.querySelector(".beside :checked")) return this.decide(guess.label);
    this.answers.act("accept", [this.image]);
    this.next(this.place + 1);
    this.page.draw();
  }

  key(event) {
    const acts = { ArrowLeft: () => this.move(-1), ArrowRight: () => this.move(1), Enter: () => this.accept(), "?": () => this.decide(null), "-": () => this.decide(NONE) };
    if (!this.queue.length) return false;
    if (acts[event.key]) acts[event.key]();
    else return this.chooser.key(event);
    return true;
  }
}

// A grid of images: those that are marked get another label, the guesses of the others are right.
class Grid {
  constructor(page, images, { title, together = false, back }) {
    Object.assign(this, { page, images, title, together, back, answers: page.answers, marked: new Set() });
  }

  get left() {
    return this.images.filter((n) => this.answers.isOpen(n));
  }

  // So many at a time: others come when these are done.
  get shown() {
    if (!this.batch?.some((n) => this.answers.isOpen(n))) this.batch = this.left.slice(0, GRID);
    return this.batch.filter((n) => this.answers.isOpen(n));
  }

  draw(parent) {
    const { shown, left: { length: left } } = this;
    this.marked = new Set(shown.filter((n) => this.marked.has(n)));
    const heading = element(parent, "div", { class: "heading" });
    button(heading, "← All", this.back);
    element(heading, "h2", {}, this.title);
    if (shown.length) button(heading, "One at a time", () => this.page.open(new One(this.page, [...this.images], { title: this.title })));
    const rest = left > shown.length ? `${left.toLocaleString("en")} to look through, ${shown.length} of them here. ` : "";
    element(parent, "p", { class: "lead" }, shown.length ? `${rest}Click what is wrong; with keys: arrows and the space bar.` : "All of these are done.");
    const columns = element(parent, "div", { class: "check" });
    this.grid = element(columns, "div", { class: "grid" });
    for (const n of shown) {
      const tile = button(this.grid, "", () => this.mark(n, tile), { class: "tile", "aria-pressed": this.marked.has(n), value: n });
      photo(tile, n);
    }
    this.bar = element(columns, "div", { class: "side" });
    this.drawBar();
  }

  mark(n, tile) {
    if (!this.marked.delete(n)) this.marked.add(n);
    tile.setAttribute("aria-pressed", this.marked.has(n));
    this.drawBar();
  }

  get right() {
    return this.shown.filter((n) => !this.marked.has(n) && this.answers.guess(n));
  }

  drawBar() {
    const { right, marked, bar } = this;
    bar.replaceChildren();
    this.chooser = null;
    const tools = element(bar, "p", { class: "tools" });
    if (right.length) tool(tools, "Enter", `${marked.size ? "The others are" : right.length > 1 ? "All are" : "It is"} right: ${right.length}`, () => this.accept());
    if (this.answers.actions.length) tool(tools, "⌫", "Undo", () => this.page.undo());
    if (!marked.size) return;
    tool(tools, "?", "Not sure", () => this.decide(null));
    element(bar, "h3", {}, `What ${marked.size > 1 ? `are the ${marked.size}` : "is the one"} that you marked?`);
    this.chooser = new Chooser(bar, this.answers, (label) => this.decide(label));
  }

  decide(label) {
    this.answers.act("label", [...this.marked], label, this.together && this.marked.size > 1);
    this.page.draw();
  }

  accept() {
    this.answers.act("accept", this.right);
    this.page.draw();
  }

  key(event) {
    const tiles = [...this.grid.children], place = tiles.indexOf(document.activeElement);
    const columns = getComputedStyle(this.grid).gridTemplateColumns.split(" ").length;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    if (event.key in steps && tiles.length) tiles[place < 0 ? 0 : Math.min(tiles.length - 1, Math.max(0, place + steps[event.key]))].focus();
    else if (event.key === "Enter") this.accept();
    else if (event.key === "?" && this.marked.size) this.decide(null);
    else return this.chooser?.key(event) ?? false;
    return true;
  }
}

class Overview {
  constructor(page) {
    this.page = page;
  }

  draw(parent) {
    const { answers } = this.page;
    const text = "Each row holds images that look alike, typical ones first. If all of a row are the same thing, name it: you then look through them, and click what is wrong. Otherwise label one at a time.";
    const some = data.looked_at < data.total ? ` The numbers are of ${times(data.looked_at, "image")} that were looked at.` : "";
    element(parent, "p", { class: "lead" }, text + some);
    for (const { size, images } of data.clusters) {
      const row = element(parent, "section", { class: "row" }), strip = element(row, "div", { class: "strip" });
      for (const n of images.slice(0, STRIP)) photo(strip, n);
      const side = element(row, "div"), labels = byCount(images.map((n) => answers.answers[n]?.label).filter(Boolean));
      const done = images.filter((n) => answers.answers[n]?.label).length;
      element(side, "p", { class: "caption" }, `${times(size, "image")}${done ? `, ${done} labelled: ${labels.slice(0, 3).join(", ")}` : ""}`);
      const left = images.filter((n) => answers.isOpen(n));
      if (!left.length) continue;
      const form = element(side, "div", { class: "name" });
      const field = element(form, "input", { type: "text", placeholder: "Name", "aria-label": `Name of a row of ${times(size, "image")}`, autocomplete: "off" });
      const name = () => field.value.trim() && this.name(left, field.value);
      field.addEventListener("keydown", (event) => event.key === "Enter" && name());
      button(form, "Name", name);
      button(form, "Open", () => this.page.open(new Grid(this.page, images, { title: `${times(left.length, "image")} that look alike`, together: true, back: () => this.page.show("Overview") })));
    }
  }

  name(images, label) {
    this.page.answers.act("guess", images, label, true);
    this.page.check(this.page.answers.spelling(label));
  }
}

class Guesses {
  constructor(page) {
    this.page = page;
  }

  draw(parent) {
    const left = this.page.answers.toCheck();
    element(parent, "p", { class: "lead" }, left.length ? "Choose a label, and look through what is guessed to have it, the least sure first. After some 50 corrections, save and predict again." : "There are no guesses to check. They come from predict, or from naming a row of the overview.");
    const labels = element(parent, "div", { class: "labels" });
    for (const [label, images] of left) {
      const choice = button(labels, "", () => this.page.check(label), { class: "class" });
      photo(choice, images.at(-1));
      element(choice, "b", {}, label);
      element(choice, "span", {}, times(images.length, "image"));
    }
  }
}

class Page {
  constructor() {
    this.answers = new Answers();
    const hasGuesses = data.guesses.some(Boolean);
    this.views = {
      Overview: () => new Overview(this),
      Label: () => new One(this, data.queue, { endless: true, title: "Typical images come first. After 50 to 200 labels, save." }),
      "Check guesses": () => new Guesses(this),
      "Check by chance": () => new One(this, data.sample, { blind: true, title: `Random images: label them without help. After ${JUDGES}, ${hasGuesses ? "the page says how many guesses are right" : "predict knows how good its labels are"}.` }),
    };
    const nav = document.querySelector("nav");
    for (const name of Object.keys(this.views)) button(nav, name, () => this.show(name));
    [this.saver, this.note] = [document.querySelector(".save"), document.querySelector(".saved")];
    this.saver.addEventListener("click", () => this.save());
    document.addEventListener("keydown", (event) => this.key(event));
    addEventListener("beforeunload", (event) => this.answers.changed && event.preventDefault());
    this.show(hasGuesses ? "Check guesses" : "Overview");
  }

  show(name) {
    this.name = name;
    this.open(this.views[name]());
  }

  open(view) {
    this.view = view;
    this.draw();
    scrollTo(0, 0);
  }

  // Look through the guesses of a label.
  check(label) {
    this.name = "Check guesses";
    const images = this.answers.toCheck().find(([name]) => name === label)?.[1] ?? [];
    this.open(new Grid(this, images, { title: `${label}?`, back: () => this.show("Check guesses") }));
  }

  draw() {
    const parent = document.getElementById("view");
    document.activeElement?.blur();
    parent.replaceChildren();
    document.querySelector(".count").textContent = `${this.answers.rows.length.toLocaleString("en")} labelled`;
    for (const tab of document.querySelector("nav").children) tab.setAttribute("aria-pressed", tab.textContent === this.name);
    this.saver.textContent = `Save ${this.file(this.answers.saves)}`;
    this.saver.classList.toggle("changed", this.answers.changed);
    this.note.hidden = this.answers.changed || !this.note.textContent;
    this.view.draw(parent);
  }

  undo() {
    const action = this.answers.undo();
    const place = this.view.queue?.indexOf(action?.images[0]) ?? -1;
    if (place >= 0) this.view.place = place;
    this.view.batch = null; // what comes back comes first
    this.draw();
  }

  key(event) {
    const held = event.repeat && !event.key.startsWith("Arrow"), writes = event.target.matches("input[type=text]") && event.target.value;
    if ((event.ctrlKey || event.metaKey) && event.key === "s") held || this.save();
    else if ((event.ctrlKey || event.metaKey) && event.key === "z" && !writes) this.undo();
    else if (held || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input[type=text]")) return;
    else if (event.key === "Backspace") this.undo();
    else if (event.key === "Enter" && event.target.matches("button:not(.grid .tile)")) return; // it is a click
    else if (!this.view.key?.(event)) return;
    else if (document.activeElement.matches("input[type=text]")) return; // the letter is written there
    event.preventDefault();
  }

  // few.csv, few-1.csv, few-2.csv: after that of labels=.
  file(saves) {
    const [, stem, number] = /^(.*?)(?:-(\d+))?$/.exec(data.after || "few");
    const next = saves + (data.after ? Number(number ?? 0) + 1 : 0);
    return `${stem}${next ? `-${next}` : ""}.csv`;
  }

  save() {
    const name = this.file(this.answers.saves), table = new Blob(["\ufeff", this.answers.table()], { type: "text/csv" });
    const link = element(document.body, "a", { href: URL.createObjectURL(table), download: name });
    link.click();
    link.remove();
    this.answers.saves += 1;
    this.answers.keep(false);
    const { note } = this;
    note.textContent = `${name} is in your downloads. `;
    if (data.command) {
      note.append("Move it to where you work, then: ");
      element(note, "code", {}, `${data.command} labels=${name} output=rest.csv overwrite=true`);
    }
    if (this.answers.rows.filter((row) => row[2] === "random").length < JUDGES) note.append(` To know better how good its labels are, label ${JUDGES} or more images in Check by chance, now or later.`);
    this.draw();
  }
}

const page = new Page(); // also for the browser's console
