// The view of one image at a time, with the labels to choose from and the images like it.

const BESIDE = 12, NEAREST = 4; // images beside one: like it, and with labels

// One image at a time, of a queue. A blind one shows nothing that would suggest a label.
class One {
  constructor(page, queue, { blind = false, endless = false, title, back } = {}) {
    Object.assign(this, { page, queue, blind, endless, title, back, answers: page.answers, place: 0 });
    this.next(0);
  }

  get image() {
    return this.queue[this.place];
  }

  // Go to the first from a place on that has no answer, from the beginning again after the last; then to what is unsure.
  next(from) {
    const queue = [...this.queue.slice(from), ...this.queue.slice(0, from)], { answers } = this.answers;
    const left = queue.find((n) => !answers[n]) ?? queue.find((n) => !answers[n].label);
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
    const { answers } = this.answers, n = this.image, answer = answers[n], guess = this.blind ? null : this.answers.guess(n);
    const left = this.queue.filter((each) => !answers[each]).length;
    const unsure = this.queue.filter((each) => answers[each]?.label === null).length;
    const done = `All are done${unsure ? `, but you were not sure of ${unsure.toLocaleString("en")}` : ""}.`;
    const rest = left ? `${left.toLocaleString("en")} to go.` : done;
    element(parent, "p", { class: "lead" }, !left ? rest : this.endless ? this.title : `${this.title} ${rest}`);
    if (this.blind) this.drawCheck(parent, left);
    if (this.back) button(parent, "← Back to the grid", this.back);
    else if (!left) this.page.drawEnd(parent);
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
    element(parent, "p", { class: "learned" }, `${right} of ${times(count, "random image")} ${count === 1 ? "is" : "are"} guessed right (${low} to ${high} %)`);
    element(parent, "p", {}, `Expect ${100 - high} to ${100 - low} wrong ones among 100 guesses before your corrections.`);
    const enough = classes.filter(([, [, of]]) => of >= LEAST), few = classes.length - enough.length;
    const parts = enough.map(([label, [its, of]]) => `${label}: ${its} of ${of} guessed right`);
    if (few) parts.push(`${few} ${few === 1 ? "label" : "labels"} with fewer than ${LEAST} random images: too few to say`);
    element(parent, "p", { class: "caption" }, parts.join(" · "));
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
