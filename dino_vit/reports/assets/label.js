// The page to label images by: its views, each drawn anew after an action.

const GRID = 48, STRIP = 8; // images: of a grid, of a row
const JUDGES = 50; // random images that predict needs to say how good its labels are

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
    if (shown.length) button(heading, "One at a time", () => this.openOne([...this.images]));
    this.page.drawUndo(heading);
    const rest = left > shown.length ? `${left.toLocaleString("en")} to look through, ${shown.length} of them here. ` : "";
    const lead = element(parent, "p", { class: "lead" }, shown.length ? `${rest}Click what is wrong.` : "All of these are done. What they are now:");
    if (shown.length) element(lead, "span", { class: "keys" }, " With keys: arrows, the space bar marks, Enter says that the others are right.");
    const columns = element(parent, "div", { class: "check" });
    this.grid = element(columns, "div", { class: "grid" });
    for (const n of shown) {
      const tile = button(this.grid, "", () => this.mark(n, tile), { class: "tile", "aria-pressed": this.marked.has(n), value: n });
      photo(tile, n);
    }
    for (const n of shown.length ? [] : this.images.filter((each) => this.answers.answers[each])) {
      const tile = button(this.grid, "", () => this.openOne([n]), { class: "tile" });
      photo(tile, n);
      element(tile, "span", {}, this.answers.answers[n].label ?? "not sure");
    }
    this.bar = element(columns, "div", { class: "side" });
    this.drawBar();
  }

  openOne(images) {
    this.page.open(new One(this.page, images, { title: this.title, back: () => this.page.open(this) }));
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
    if (right.length) tool(element(bar, "p", { class: "tools" }), "Enter", `${marked.size ? "The others are" : right.length > 1 ? "All are" : "It is"} right: ${right.length}`, () => this.accept());
    if (!marked.size) return;
    const wrong = element(bar, "div", { class: "wrong" });
    element(wrong, "h3", {}, `What ${marked.size > 1 ? `are the ${marked.size}` : "is the one"} that you marked?`);
    this.chooser = new Chooser(wrong, this.answers, (label) => this.decide(label));
    tool(element(wrong, "p", { class: "tools" }), "?", "Not sure", () => this.decide(null));
  }

  decide(label) {
    this.answers.act("label", [...this.marked], label, this.together && this.marked.size > 1);
    this.page.draw();
  }

  accept() {
    this.answers.act("accept", this.right);
    this.page.open(this);
  }

  key(event) {
    const tiles = [...this.grid.children], place = tiles.indexOf(document.activeElement);
    const columns = getComputedStyle(this.grid).gridTemplateColumns.split(" ").length;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    if (event.key in steps && tiles.length) tiles[place < 0 ? 0 : Math.min(tiles.length - 1, Math.max(0, place + steps[event.key]))].focus();
    else if (event.key === "Enter" && place >= 0) this.accept(); // what comes next has to be gone to
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
      const kept = images.filter((n) => answers.isKept(n)).length;
      element(side, "p", { class: "caption" }, `${times(size, "image")}${kept ? ` (${kept.toLocaleString("en")} kept for the check)` : ""}${done ? `, ${done} labelled: ${labels.slice(0, 3).join(", ")}` : ""}`);
      const left = images.filter((n) => answers.isOpen(n));
      if (!left.length) continue;
      const form = element(side, "div", { class: "name" });
      const field = element(form, "input", { type: "text", placeholder: "Name", "aria-label": `Name of a row of ${times(size, "image")}`, autocomplete: "off" });
      const name = () => isLabel(field.value) && this.name(left, field.value);
      field.addEventListener("keydown", (event) => event.key === "Enter" && name());
      button(form, "Name", name);
      button(form, "Open", () => this.page.open(new Grid(this.page, images, { title: `${times(left.length, "image")} that look alike`, together: true, back: () => this.page.show("Overview") })));
    }
  }

  name(images, label) {
    this.page.answers.act("guess", images, label, true);
    this.page.check(this.page.answers.spelling(label), "Overview");
  }
}

class Guesses {
  constructor(page) {
    this.page = page;
  }

  draw(parent) {
    const { answers } = this.page, left = answers.toCheck(), isLeft = new Set(left.map(([label]) => label));
    const count = left.reduce((sum, [, images]) => sum + images.length, 0), kept = data.sample.filter((n) => answers.isKept(n) && answers.guesses[n]).length;
    const also = kept ? ` ${kept} more are kept for Check by chance, where their guesses are hidden until you label them.` : "";
    const how = "Choose a label, and look through what is guessed to have it, the least sure first. After some 50 corrections, save and predict again.";
    element(parent, "p", { class: "lead" }, `${count ? `${count.toLocaleString("en")} guesses to look through.` : "All guesses here are looked through."}${also} ${count ? how : ""}`);
    if (!count) this.page.drawEnd(parent);
    const labels = element(parent, "div", { class: "labels" });
    for (const [label, images] of [...left, ...answers.toCheck(true).filter(([each]) => !isLeft.has(each))]) {
      const choice = button(labels, "", () => this.page.check(label), { class: "class" });
      photo(choice, images.at(-1));
      element(choice, "b", {}, label);
      element(choice, "span", { class: isLeft.has(label) ? "" : "done" }, isLeft.has(label) ? times(images.length, "image") : `✓ ${images.length.toLocaleString("en")} looked at`);
    }
    this.page.drawUndo(element(parent, "p", { class: "tools" }));
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
    addEventListener("storage", (event) => event.key === this.answers.key && this.follow());
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
  check(label, from = "Check guesses") {
    this.name = from;
    const images = [...this.answers.toCheck(), ...this.answers.toCheck(true)].flatMap(([name, each]) => (name === label ? each : []));
    this.open(new Grid(this, images, { title: `${label}?`, back: () => this.show(from) }));
  }

  draw() {
    const parent = document.getElementById("view");
    document.activeElement?.blur();
    parent.replaceChildren();
    const { rows, saves, changed, guesses } = this.answers, labelled = rows.filter(([, label]) => label).length;
    document.querySelector(".count").textContent = `${labelled.toLocaleString("en")} labelled${changed ? ", not saved yet" : saves ? ", saved" : ""}`;
    for (const tab of document.querySelector("nav").children) {
      tab.setAttribute("aria-pressed", tab.textContent === this.name);
      tab.hidden = tab.textContent === "Check guesses" && !guesses.some(Boolean);
    }
    this.saver.textContent = `Save ${this.file(saves)}`;
    this.saver.classList.toggle("changed", changed);
    this.drawSaved();
    this.view.draw(parent);
  }

  // Go on from what was done in another tab, or this one would write over it.
  follow() {
    this.answers.recall();
    this.view.next?.(this.view.place);
    this.draw();
  }

  undo() {
    const action = this.answers.undo();
    const place = this.view.queue?.indexOf(action?.images[0]) ?? -1;
    if (place >= 0) this.view.place = place;
    this.view.batch = null; // what comes back comes first
    this.draw();
  }

  drawUndo(parent) {
    if (this.answers.actions.length) tool(parent, "⌫", "Undo", () => this.undo());
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
    this.answers.saved = this.answers.actions.length;
    this.answers.keep(false);
    this.draw();
    scrollTo(0, 0); // to what is to be done next
  }

  // Until something changes.
  drawSaved() {
    const { note, answers: { rows, saves, changed, actions } } = this, back = actions.at(-1)?.kind === "back" ? actions.at(-1).images : [];
    note.hidden = changed ? !back.length : !saves;
    note.textContent = "";
    if (note.hidden) return;
    if (changed) {
      const [was, is] = back.length === 1 ? ["was", "is"] : ["were", "are"];
      note.textContent = `${times(back.length, "label")} that ${was} not saved yet ${is} back. `;
      return this.drawUndo(note);
    }
    note.textContent = `${this.file(saves - 1)} is in your downloads. `;
    this.drawCommand(note, this.file(saves - 1));
    if (rows.filter((row) => row[2] === "random").length < JUDGES) note.append(` To know better how good its labels are, label ${JUDGES} or more images in Check by chance, now or later.`);
  }

  drawCommand(parent, name) {
    if (!data.command) return;
    parent.append("Move it to where you work, then: ");
    element(parent, "code", {}, `${data.command} labels=${name}`);
  }

  // What to do when a list is done.
  drawEnd(parent) {
    const { answers } = this, isKept = data.sample.some((n) => answers.isKept(n)), end = element(parent, "p", { class: "end" });
    if (isKept) end.append("Next: Check by chance. It tells how many of all guesses are right. ");
    else if (answers.toCheck().length) end.append("Good enough? Then predict once more, and its table is finished. Otherwise correct more in Check guesses first. ");
    else if (data.names.length === data.total) end.append("You have looked at every image: predict once more, and its table is finished. ");
    if (!this.note.hidden) return;
    end.append(`Save ${this.file(answers.saves)}. `);
    this.drawCommand(end, this.file(answers.saves));
  }
}

const page = new Page(); // also for the browser's console
