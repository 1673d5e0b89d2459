// What is known of the images on the page to label by. What its user does is a list of actions, so that undoing one is
// to take it off.

const NONE = "none of these"; // a label too, so that a classifier learns it
const LEAST = 10; // images of a class of which its share is told
const Z = 1.959964; // half the width of a 95 % confidence interval, in standard errors

const same = (text) => text.trim().replace(/\s+/g, " ").toLocaleLowerCase(); // of labels that are one
const STORED = "dino-vit label "; // the keys in the storage of the browser, each of one page
const NO_LABEL = ["", "nan", "-1", "-1.0"]; // for predict, and the next page
const isLabel = (text) => !NO_LABEL.includes(same(text));
const times = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

function wilson(right, count) {
  const share = right / count, middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count);
  const reach = (Z / (1 + Z * Z / count)) * Math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2);
  return [middle - reach, middle + reach].map((bound) => Math.round(100 * bound));
}

const groupOf = (origin) => Number(/^group:(\d+)$/.exec(origin)?.[1] ?? 0);

// What is known of the images: given, guessed, and what the actions have said since.
class Answers {
  constructor() {
    this.sample = new Set(data.sample);
    this.groups = Math.max(0, ...[...data.given, ...data.others.map((row) => row.slice(1))].map((row) => groupOf(row?.[1])));
    Object.assign(this, { actions: [], saves: 0, saved: 0, changed: false, key: `${STORED}${data.digest}` });
    this.recall();
  }

  recall() {
    try {
      const stored = localStorage.getItem(this.key);
      if (stored) Object.assign(this, JSON.parse(stored));
      else this.takeOver();
    } catch { /* a browser without storage starts anew */ }
    this.replay();
  }

  // What other pages know of these images, and no saved table does, is moved to this new one.
  takeOver() {
    const numbers = new Map(data.ids.map((id, n) => [id, n])), back = new Map();
    for (const key of Object.keys(localStorage).filter((each) => each.startsWith(STORED))) {
      const other = JSON.parse(localStorage.getItem(key)), taken = other.unsaved.filter(([id]) => numbers.has(id)), { groups } = this;
      if (!taken.length) continue;
      for (const [id, { label, origin }] of taken) {
        const group = groupOf(origin) && groups + groupOf(origin); // a number that is free here
        this.groups = Math.max(this.groups, group);
        back.set(numbers.get(id), { label, origin: group ? `group:${group}` : origin });
      }
      const unsaved = other.unsaved.filter(([id]) => !numbers.has(id));
      localStorage.setItem(key, JSON.stringify({ ...other, actions: other.actions.slice(0, other.saved), unsaved, changed: false }));
    }
    this.act("back", [...back.keys()], null, [...back.values()]);
  }

  // Kinds: label, one or several; accept, of guesses; guess, by which a row is named; back, of an earlier page, with
  // the answers as the last argument. A null is "not sure".
  act(kind, images, label = null, together = false) {
    if (!images.length) return;
    this.actions.push({ kind, images, label: label && this.spelling(label), together });
    this.keep(true);
  }

  undo() {
    const action = this.actions.pop();
    this.saved = Math.min(this.saved, this.actions.length);
    if (action) this.keep(true);
    return action;
  }

  keep(changed) {
    this.changed = changed;
    this.replay();
    try {
      const { actions, saves, saved, groups } = this, since = new Set(actions.slice(saved).flatMap(({ images }) => images));
      const unsaved = [...since].filter((n) => this.answers[n]).map((n) => [data.ids[n], this.answers[n]]);
      localStorage.setItem(this.key, JSON.stringify({ actions, saves, saved, groups, changed, unsaved }));
    } catch { /* the page asks before it closes */ }
  }

  replay() {
    this.answers = data.given.map((row) => row && { label: row[0] || null, origin: row[1] || "given" });
    this.guesses = data.guesses.map((row) => row && { label: row[0], confidence: row[1] });
    this.spellings = new Map();
    this.know(data.labels);
    let groups = this.groups;
    for (const { kind, images, label, together } of this.actions) {
      const group = together === true ? `group:${++groups}` : null;
      for (const [place, n] of images.entries()) {
        const guess = this.guess(n);
        if (kind === "guess") this.guesses[n] = { label, confidence: 0, group };
        else if (kind === "back") this.answers[n] = { ...together[place] };
        else if (kind === "label") this.answers[n] = { label, origin: group ?? this.origin(n, guess, label) };
        else this.answers[n] = { label: guess.label, origin: guess.group ?? "checked" };
        this.know([kind === "guess" ? label : this.answers[n].label]);
      }
    }
    // Until the first without an answer, they are random; those that were met elsewhere after it are not.
    for (const n of data.sample) {
      if (!this.answers[n]) break;
      this.answers[n].origin = "random";
    }
    this.inUse = [...this.spellings.values()];
    this.know(byCount(data.guesses.filter(Boolean).map(([label]) => label)));
  }

  know(labels) {
    for (const label of labels) if (label && label !== NONE && !this.spellings.has(same(label))) this.spellings.set(same(label), label);
  }

  origin(n, guess, label) {
    const before = data.given[n];
    if (before?.[0]) return before[1] === "random" || before[0] === label ? before[1] || "given" : "corrected";
    if (!guess) return "chosen";
    return same(guess.label) === same(label ?? "") ? "checked" : "corrected";
  }

  // The guess for an image, unless it is kept for the check.
  guess(n) {
    return this.isKept(n) ? null : this.guesses[n];
  }

  isKept(n) {
    return this.sample.has(n) && !this.answers[n];
  }

  // Whether it may be labelled beside others.
  isOpen(n) {
    return !this.answers[n] && !this.sample.has(n);
  }

  // The label as it is known, whatever its capital letters and spaces.
  spelling(label) {
    return this.spellings.get(same(label)) ?? label.trim().replace(/\s+/g, " ");
  }

  // The digits by label; a label that is a digit has its own.
  keys() {
    const keys = new Map(this.inUse.filter((label) => /^\d$/.test(label)).map((label) => [label, label]));
    const others = this.inUse.filter((label) => !keys.has(label));
    for (const digit of "1234567890") if (![...keys.values()].includes(digit) && others.length) keys.set(others.shift(), digit);
    return keys;
  }

  // The images that are guessed to be something, by label, the least sure first: those to check, or those that were.
  toCheck(isChecked = false) {
    const images = new Map();
    this.guesses.forEach((guess, n) => {
      if (guess && (isChecked ? this.answers[n] && !this.sample.has(n) : this.isOpen(n))) images.set(guess.label, [...(images.get(guess.label) ?? []), n]);
    });
    for (const each of images.values()) each.sort((one, other) => this.guesses[one].confidence - this.guesses[other].confidence);
    return [...images].sort((one, other) => other[1].length - one[1].length);
  }

  // The rows of the table: of the images on the page, and of others. The labels are in the order of their keys, which
  // the next page reads from it.
  get rows() {
    const places = new Map([...this.spellings.keys()].map((label, place) => [label, place])), place = ([, label]) => places.get(same(label)) ?? places.size;
    const others = data.others.map(([name, label, origin]) => [name, label, origin || "given"]);
    const shown = this.answers.map((answer, n) => answer && [data.names[n], answer.label ?? "", answer.label ? answer.origin : "unsure"]);
    return [...others, ...shown.filter(Boolean)].sort((one, other) => place(one) - place(other));
  }

  // How many of the random images are guessed rightly, in all and by class.
  checked() {
    const classes = new Map(), all = [0, 0];
    for (const n of data.sample) {
      const answer = this.answers[n], guess = data.guesses[n];
      if (!answer) break;
      if (answer.label === null || !guess) continue;
      const right = Number(same(answer.label) === same(guess[0]));
      const counts = classes.get(answer.label) ?? classes.set(answer.label, [0, 0]).get(answer.label);
      for (const count of [all, counts]) [count[0], count[1]] = [count[0] + right, count[1] + 1];
    }
    return { all, classes: [...classes] };
  }

  table() {
    const lines = this.rows.map((row) => row.map((cell) => `"${cell.replaceAll('"', '""')}"`).join(","));
    return ["name,label,origin", ...lines, ""].join("\r\n");
  }
}

function byCount(labels) {
  const counts = new Map();
  for (const label of labels) counts.set(label, (counts.get(label) ?? 0) + 1);
  return [...counts].sort((one, other) => other[1] - one[1]).map(([label]) => label);
}

