// Buttons with their keys, photos, and the labels to choose from.

// The second click of a double-click would answer for what has only just come; steps are often clicked fast.
function button(parent, text, act, attributes = {}) {
  const made = element(parent, "button", { type: "button", ...attributes }, text);
  made.addEventListener("click", ({ detail }) => (detail < 2 || made.matches(".step")) && act());
  return made;
}

// A button with the key that does the same.
function tool(parent, key, text, act) {
  const made = button(parent, "", act, ["⌫", "←", "→"].includes(key) ? { class: "step" } : {});
  if (key) element(made, "kbd", {}, key);
  made.append(text);
}

function photo(parent, n) {
  return element(parent, "img", { src: data.photos[n], alt: data.names[n], title: data.names[n] });
}

// The labels in use, as buttons, and a field for a new one.
class Chooser {
  constructor(parent, answers, choose) {
    [this.answers, this.choose] = [answers, choose];
    this.field = element(parent, "input", { type: "text", placeholder: "A new label, or the beginning of one", "aria-label": "Label", autocomplete: "off", enterkeyhint: "done", spellcheck: "false" });
    this.labels = element(parent, "div", { class: "labels", role: "group", "aria-label": "Labels" });
    this.field.addEventListener("input", () => this.draw());
    this.field.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Enter" && isLabel(this.field.value)) {
        const label = event.shiftKey ? this.field.value : this.chosen;
        if (label) this.take(label, event);
      }
      else if (/^\d$/.test(event.key) && !this.field.value) this.key(event);
      else if (event.key === "Tab" && this.completion && !event.shiftKey) {
        this.field.value = this.completion;
        this.draw();
        event.preventDefault();
      } else if (event.key === "Escape") {
        this.field.value = "";
        this.draw();
        this.field.blur();
      }
    });
    this.draw();
  }

  take(label, event) {
    event?.preventDefault();
    event?.stopPropagation();
    this.field.value = "";
    this.choose(label);
  }

  draw() {
    const typed = same(this.field.value), keys = this.answers.keys();
    const others = [...this.answers.spellings.values()].filter((label) => !keys.has(label)).sort();
    const fits = [...keys.keys(), ...others].filter((label) => same(label).includes(typed));
    const starts = fits.filter((label) => same(label).startsWith(typed) && same(label) !== typed);
    const isNew = typed && !this.answers.spellings.has(typed);
    this.completion = isNew ? starts[0] : undefined;
    // By Enter; none if it may be the beginning of several.
    this.chosen = !isNew || !starts.length ? this.answers.spelling(this.field.value) : starts.length === 1 ? starts[0] : null;
    this.labels.replaceChildren();
    for (const label of fits) {
      tool(this.labels, !typed ? keys.get(label) : label === this.chosen ? "Enter" : label === this.completion ? "Tab" : "", label, () => this.take(label));
    }
    if (typed && !isLabel(typed)) element(this.labels, "p", { class: "caption" }, `${typed} means that there is no label: write another word.`);
    else if (isNew) {
      tool(this.labels, starts.length ? "Shift Enter" : "Enter", `new: ${this.field.value.trim()}`, () => this.take(this.field.value));
    }
  }

  // A digit is its label; a letter begins to write one.
  key(event) {
    const label = [...this.answers.keys()].find(([, key]) => key === event.key)?.[0];
    if (label !== undefined) this.take(label, event);
    else if (/^[\p{L}\p{N}]$/u.test(event.key)) this.field.focus();
    else return false;
    return true;
  }
}

